"""Loss curves of GPT-2 on real text: `python -m benchmarks.gpt2 --minutes 3 --output curves.json`.

From the root of a checkout, with flashtile on the path. The text is Python's own standard library, as bytes, or that of
`--data`. Step times and the share of the GPU's peak at other contexts are those of `flashtile bench train
--context 1024 4096 16384 65536`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.budget import Budget
from benchmarks.evidence.text import load_text
from benchmarks.gpt2.curves import differences, train_curves
from flashtile.bench.record import Recorder, command_line
from flashtile.bench.training import IMPLEMENTATIONS, MODELS, TrainCase


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    case = TrainCase(given.model, given.batch, given.context, "bf16" if device.type == "cuda" else "fp32")
    chosen = [each for name in given.impl for each in IMPLEMENTATIONS if each.name == name]
    command = command_line("python -m benchmarks.gpt2", arguments)
    recorder = Recorder(device, command, given.output)

    def on_row(row: dict[str, Any]) -> None:
        recorder.add([row])
        print(
            f"{row['impl']:20} {row['case']['steps']} steps, {row['ms']:.1f} ms each, "
            f"{row['tokens_per_s']:.0f} tokens/s, last loss {row['curve'][-1]}",
            flush=True,
        )

    try:
        missing = [reason for each in chosen if (reason := each.missing())]
        if missing:
            raise ValueError(f"impl: {'; '.join(missing)}")
        train_curves(case, chosen, load_text(given.data), Budget(given.steps, given.minutes), device, on_row=on_row)
    except ValueError as error:
        print(f"python -m benchmarks.gpt2: {error}", file=sys.stderr)
        return 2
    for impl, (largest, mean) in differences(recorder.rows).items():
        first = recorder.rows[0]["impl"]
        print(f"{impl} from {first}, smoothed losses of the second half: at most {largest:.4f}, {mean:.4f} mean")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpt2", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="gpt2-small")
    add("--impl", nargs="+", choices=[each.name for each in IMPLEMENTATIONS],
        default=["transformers-eager", "flashtile"], help="the first is what the others are compared with")  # fmt: skip
    add("--steps", type=int, help="of each implementation")
    add("--minutes", type=float, help="for everything, in place of --steps")
    add("--batch", type=int, default=16)
    add("--context", type=int, default=1024)
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--output", type=Path, help="file for the record, written after every implementation")
    return parser


if __name__ == "__main__":
    sys.exit(main())
