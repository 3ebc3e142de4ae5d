"""Calls that take less than 0.1 ms of a GPU, drawn at random: eager, where the host counts, and in CUDA graphs.

    python -m benchmarks.small_calls --count 256 --jobs 16 --output benchmarks/results/h200-small-calls.json

The eager time of a call is that of many, enqueued back to back, until the device has finished them: the host's time or
the device's, whichever is longer. Rows of it have the operation `attention-eager`; those of CUDA graphs, `attention`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashtile.bench.ahead import compile_ahead
from flashtile.bench.cases import Case
from flashtile.bench.commands import default_device
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.masks import PADDING
from flashtile.bench.oracle import AttentionProblem
from flashtile.bench.record import Recorder, Row, command_line
from flashtile.bench.report import mean_tables
from flashtile.bench.runner import run_case, side_stream

#: FLOPs of a forward, and tokens of a batch, at most.
_MOST_FLOPS, _MOST_TOKENS = 2e10, 2**14
_HEAD_DIMS, _HEADS = (32, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256), (2, 4, 8, 12, 16, 32)
_KINDS = (*("plain",) * 6, "window", "softcap", "packed", "dropout", "padding", "mask", "bias")
_MEASURED = ("flashtile-auto", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "torch-varlen")


def draw_cases(count: int, seed: int) -> list[Case]:
    """Lengths and tokens are drawn evenly on a scale of logarithms."""
    draw = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        seq = int(2 ** draw.uniform(4, 12))
        if draw.random() < 0.5:
            seq = max(16, seq // 64 * 64)
        batch = max(1, round(2 ** draw.uniform(4, 14) / seq))
        head_dim, heads, group = draw.choice(_HEAD_DIMS), draw.choice(_HEADS), draw.choice((1, 1, 4))
        kind, causal = draw.choice(_KINDS), draw.random() < 0.5
        flops = 4 * batch * heads * seq**2 * head_dim
        if heads % group or flops > _MOST_FLOPS or batch * seq > _MOST_TOKENS:
            continue
        more: dict[str, Any] = {
            "plain": {"causal": causal},
            "window": {"causal": True, "window": (draw.randrange(8, 512), 0)},
            "softcap": {"causal": causal, "softcap": 30.0},
            "packed": {"causal": causal},
            "dropout": {"causal": causal, "dropout_p": 0.1},
            "padding": {"mask": PADDING},
            "mask": {"mask": "random0.5"},
            "bias": {"bias": "1HSS"},
        }[kind]
        if kind == "packed":
            more["lengths"] = tuple(max(8, int(seq * draw.uniform(0.2, 1))) for _ in range(batch))
            seq = max(more["lengths"])
        cases.append(Case(batch, seq, heads, heads // group, head_dim, head_dim, **more))
    return cases


class EagerTimer:
    """Times calls that are enqueued back to back, until the device has finished the last one."""

    kind = "back-to-back"
    _CALLS = 30

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self._function = function
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def sample(self, seconds: float) -> list[float]:
        self._wait()
        start = time.perf_counter()
        for _ in range(self._CALLS):
            self._function()
        self._wait()
        return [(time.perf_counter() - start) / self._CALLS * 1e3]


class EagerProblem(AttentionProblem):
    """One call as a program makes it, without a CUDA graph."""

    phases = ("fwd-nograd", "fwd+bwd")

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.op = "attention-eager"

    def timer(self, call: Callable[[], Any]) -> EagerTimer:
        return EagerTimer(call, self.device)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.01, help="for each phase of each implementation")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile before anything is measured")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no case begins")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    begin, device = time.perf_counter(), default_device()
    cases = draw_cases(options.count, options.seed)
    measured = [each for each in IMPLEMENTATIONS if each.name in _MEASURED]
    if options.jobs:
        compile_ahead("attention", cases, measured, device, options.jobs)
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    recorder = Recorder(device, command_line("python -m benchmarks.small_calls", arguments), options.output)
    with side_stream(device):
        for number, case in enumerate(cases):
            if time.perf_counter() - begin > options.until:
                print(f"time is over after {number} of {len(cases)} cases")
                break
            for problem in (EagerProblem, AttentionProblem):
                recorder.add(run_case(case, measured, device, problem, options.seconds))
    rows: list[Row] = recorder.rows
    for op in ("attention-eager", "attention"):
        for table in mean_tables([row for row in rows if row["op"] == op]):
            print(op, table.title, *table.lines, sep="\n")


if __name__ == "__main__":
    main()
