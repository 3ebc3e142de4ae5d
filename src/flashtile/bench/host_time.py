"""The host's own time for one call: what a program pays for each small attention, whatever the GPU does.

Calls are enqueued back to back on an idle device, few enough between two synchronisations that its queue never
fills and makes the host wait. On a CPU the computation is part of the call, and so of the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashtile.bench.bound import Bound
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import Implementation
from flashtile.bench.record import Row
from flashtile.bench.runner import describe, side_stream

PHASES = ("fwd-nograd", "fwd", "fwd+bwd")

_CALLS = 20
_ROUNDS = {"cuda": 60, "cpu": 10}
_WARM_UP_CALLS = 5
_NOT_MEASURED = {"tflops": None, "gbps": None, "error": None}


def host_case(device: torch.device) -> Case:
    """A call so small that launching it takes longer than running it."""
    return Case(1, 128, 2, 2, 64, 64, dtype="bf16" if device.type == "cuda" else "fp32")


def run_host_time(implementations: Iterable[Implementation], device: torch.device) -> list[Row]:
    """Rows with op "attention-host": `ms` is host time per call."""
    case = host_case(device)
    with side_stream(device):
        return [row for implementation in implementations for row in _measure(implementation, case, device)]


def _measure(implementation: Implementation, case: Case, device: torch.device) -> list[Row]:
    reason = implementation.unsupported(case, device)
    times: dict[str, float] = {}
    if reason is None:
        try:
            with implementation.context():
                times = _times(Bound(implementation, case, make_inputs(case, device)), device)
        except Exception as error:  # a fact about this implementation, for the record
            reason = describe(error)
    row: Row = {"op": "attention-host", "phase": "", "impl": implementation.name, "case": case.record()}
    rows = [{**row, "phase": phase, "ms": times.get(phase), **_NOT_MEASURED} for phase in PHASES]
    return rows if reason is None else [{**row, "why": reason} for row in rows]


def _times(bound: Bound, device: torch.device) -> dict[str, float]:
    calls = (bound.forward_without_grad, bound.forward, bound.forward_backward)
    return {phase: _host_ms(call, device) for phase, call in zip(PHASES, calls, strict=True)}


def _host_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median over rounds of the time to enqueue one call."""
    for _ in range(_WARM_UP_CALLS):
        call()
    samples = []
    for _ in range(_ROUNDS[device.type]):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - start) / _CALLS * 1e3)
    return statistics.median(samples)
