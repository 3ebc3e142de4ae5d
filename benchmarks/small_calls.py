"""Calls that take less than 0.1 ms of a GPU, drawn at random: eager, where the host counts, and in CUDA graphs.

    python -m benchmarks.small_calls --count 256 --jobs 16 --output benchmarks/results/h200-small-calls.json

The eager time of a call is that of many, enqueued back to back, until the device has finished them: the host's time or
the device's, whichever is longer. Rows of it have the operation `attention-eager`; those of CUDA graphs, `attention`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.common import Program
from flashtile.bench.cases import Case
from flashtile.bench.commands import compile_ahead
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import AttentionProblem, HostProblem
from flashtile.bench.report import mean_tables
from flashtile.bench.runner import run_case, side_stream
from flashtile.bench.tables import small_cases
from flashtile.bench.timing import HostTimer

_MEASURED = ("flashtile-auto", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "torch-varlen")


class EagerProblem(HostProblem):
    """One call as a program makes it, without a CUDA graph."""

    phases = ("fwd-nograd", "fwd+bwd")

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.op = "attention-eager"

    def timer(self, call: Callable[[], Any]) -> HostTimer:
        return HostTimer(call, self.device, finished=True)


def main(arguments: Sequence[str] | None = None) -> None:
    program = Program("small_calls", __doc__, "case")
    add = program.add_argument
    add("--count", type=int, default=256)
    add("--seed", type=int, default=3)
    add("--seconds", type=float, default=0.01, help="for each phase of each implementation")
    add("--jobs", type=int, default=0, help="processes that compile before anything is measured")
    add("--until", type=float, default=float("inf"), help="seconds after which no case begins")
    options, device, recorder = program.start(arguments)
    begin = time.perf_counter()
    cases = small_cases(options.count, options.seed)
    measured = [each for each in IMPLEMENTATIONS if each.name in _MEASURED]
    if options.jobs:
        compile_ahead("attention", cases, measured, device, options.jobs)
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    with side_stream(device):
        for number, case in enumerate(cases):
            if time.perf_counter() - begin > options.until:
                print(f"time is over after {number} of {len(cases)} cases")
                break
            for problem in (EagerProblem, AttentionProblem):
                recorder.add(run_case(case, measured, device, problem, options.seconds))
    for op in ("attention-eager", "attention"):
        for table in mean_tables([row for row in recorder.rows if row["op"] == op]):
            print(op, table.title, *table.lines, sep="\n")


if __name__ == "__main__":
    main()
