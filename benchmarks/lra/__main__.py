"""Long Range Arena's ListOps and Pathfinder in each way to attend: `python -m benchmarks.lra --task pathfinder`.

From the root of a checkout, with flashtile on the path. With `--minutes` the script times a few steps of each way
first, and then gives every run as many steps as fit; with `--steps` it takes that many.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.budget import Budget
from benchmarks.lra.attentions import ATTENTIONS
from benchmarks.lra.tasks import make_task
from benchmarks.lra.train import Settings, train_all
from flashtile.bench.record import Recorder, command_line


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        budget = Budget(given.steps, given.minutes)
        task = make_task(given.task, given.size, given.dashes)
    except ValueError as error:
        print(f"python -m benchmarks.lra: {error}", file=sys.stderr)
        return 2
    names = ("task", "layers", "width", "heads", "examples", "held_out", "learning_rate")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    settings = Settings(B=given.batch, dtype=dtype, **{name: getattr(given, name) for name in names})
    command = command_line("python -m benchmarks.lra", arguments)
    recorder = Recorder(device, command, given.output)

    def on_row(row: dict[str, Any]) -> None:
        recorder.add([row])
        memory = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
        print(
            f"{row['op']} {row['impl']:16} seed {row['case']['seed']}: {row['case']['steps']} steps, "
            f"{row['ms']:.1f} ms each{memory}, accuracy {row['accuracy']:.3f}",
            flush=True,
        )

    # Images are all of one size: there is nothing to unpad.
    impls = given.impl or [name for name, way in ATTENTIONS.items() if not (way.packed and task.grid)]
    train_all(settings, task, impls, range(given.seeds), budget, device, workers=given.workers, on_row=on_row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lra", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--task", choices=("listops", "pathfinder"), required=True)
    add("--impl", nargs="+", choices=list(ATTENTIONS), help="ways to attend; default: all")
    add("--seeds", type=int, default=3, help="runs of each")
    add("--steps", type=int, help="of each run")
    add("--minutes", type=float, help="for everything, in place of --steps")
    add("--batch", type=int, default=64, help="sequences in a step")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--learning-rate", type=float, default=5e-4)
    add("--size", type=int, help="longest expression (2000), or side of the images (32)")
    add("--dashes", type=int, help="of a long path of Pathfinder (6)")
    add("--examples", type=int, default=20000, help="to learn from")
    add("--held-out", type=int, default=2000, help="to measure the accuracy with")
    add("--workers", type=int, default=1, help="processes that make the examples")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--output", type=Path, help="file for the record, written after every run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
