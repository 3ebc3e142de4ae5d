"""Masked-LM steps of BERT, packed and padded: `python -m benchmarks.bert --output bert.json`.

From the root of a checkout, with flashtile on the path, and transformers, whose model is what all are checked by. The
sequences have the lengths of real text: Python's standard library, or what `--data` names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bert.problem import IMPLEMENTATIONS, MODELS, BertProblem, make_case, select
from benchmarks.evidence.text import load_text
from flashtile.bench.record import Recorder, command_line
from flashtile.bench.runner import run_case, side_stream
from flashtile.bench.start import UserError
from flashtile.bench.training_steps import check_dropout


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = "bf16" if device.type == "cuda" else "fp32"
    command = command_line("python -m benchmarks.bert", arguments)
    recorder = Recorder(device, command, given.output)
    try:
        check_dropout(given.dropout)
        text = load_text(given.data)
        for size in given.batch:
            case, batch = make_case(given.model, size, given.context, dtype, text, dropout_p=given.dropout)
            print(
                f"{case.name}: {sum(case.lengths)} tokens, {sum(case.lengths) / size / given.context:.0%} of the batch"
            )
            with side_stream(device):
                problem = partial(_problem, batch)
                found = run_case(case, select(given.impl), device, problem, given.seconds)
            recorder.add([{**row, "text": text.name, "text_sha256": text.sha256} for row in found])
            for row in found:
                speed = row.get("why") or f"{row['ms']:.1f} ms, {row['tokens_per_s']:.0f} tokens/s"
                print(f"  {row['impl']:20} {speed}", flush=True)
    except (UserError, ValueError) as error:
        print(f"python -m benchmarks.bert: {error}", file=sys.stderr)
        return 2
    return 0


def _problem(batch: Any, case: Any, device: torch.device) -> BertProblem:
    return BertProblem(case, batch, device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="bert-large")
    add("--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=[], help="default: all")
    add("--batch", type=int, nargs="+", default=[16, 64], help="sequences in a step; several are several cases")
    add("--context", type=int, default=512, help="tokens to which a batch is padded")
    add("--dropout", type=float, default=0.0, help="probability of each of BERT's dropouts")
    add("--seconds", type=float, default=2.0, help="for the samples of each implementation")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    add("--output", type=Path, help="file for the record, written after every case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
