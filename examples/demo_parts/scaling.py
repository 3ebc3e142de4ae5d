"""Memory and time of attention alone, forward and backward, against the sequence length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from demo_parts.isolation import PeakMemory, PieceFailedError, Report, run_piece
from demo_parts.training import Plan
from flashtile.bench.base import free_memory
from flashtile.models.gpt import CausalAttention

_HEAD_DIM = 64
_WARM_UP_LENGTH = 64
_SECONDS_OF_SAMPLES = 0.2
#: Twice the length is this many times the work, or as many times as it was at the last doubling: matrices that outgrow
#: the caches, or memory that the system must find first, cost more.
_GROWTH = 4
#: Share of the free memory that a measurement may take.
_MEMORY_SHARE = 0.5
#: A measurement calls attention at least this often; starting its process takes about as long as a short call.
_CALLS = 2
_START_SECONDS = 1.0
#: Even where no time is left, the first length of each implementation gets this much.
_LEAST_SECONDS = 5.0


@dataclass(frozen=True)
class Point:
    """One implementation at one length, forward and backward. `implementation`: its name. `length`: of the sequence.
    `ms`: median milliseconds. `peak_bytes`: beyond q, k, v and dout. `first_ms`: of the first call, in which the system
    provides the memory; 0 on a GPU, where it may compile."""

    implementation: str
    length: int
    ms: float
    peak_bytes: int
    first_ms: float = 0.0


def measure_scaling(
    plan: Plan, attentions: dict[str, CausalAttention], seconds: float, on_start: Callable[[str, int], None]
) -> tuple[list[Point], dict[str, str]]:
    """Measures every implementation at the plan's growing lengths until it becomes too expensive. `seconds`: for all.
    `on_start`: called with implementation and length. Returns the points, and why implementations stopped early."""
    points: list[Point] = []
    stopped: dict[str, str] = {}
    end = time.perf_counter() + seconds
    for length in plan.lengths:
        for name, attention in attentions.items():
            if name in stopped:
                continue
            before = [point for point in points if point.implementation == name]
            left = end - time.perf_counter()
            reason = _too_expensive(before, length, left, plan.device)
            if reason is not None:
                stopped[name] = reason
                continue
            on_start(name, length)
            try:
                limit = max(left, _LEAST_SECONDS)
                measured = run_piece(measure, plan, attention, length, device=plan.device, seconds=limit)
            except PieceFailedError as error:
                stopped[name] = f"length {length}: {error}"
                continue
            points.append(Point(name, length, *measured))
    return points, stopped


def measure(plan: Plan, attention: CausalAttention, length: int, report: Report) -> tuple[float, int, float]:
    """Median milliseconds of a forward and backward; the first one's peak bytes beyond its inputs, and milliseconds."""
    _call(attention, *_inputs(plan, _WARM_UP_LENGTH))  # libraries and kernels load before memory is counted
    inputs = _inputs(plan, length)
    memory = PeakMemory(plan.device)
    first = _call(attention, *inputs)
    peak = memory.growth()
    first_ms = 0.0 if plan.device.type == "cuda" else first * 1e3
    samples: list[float] = []
    while not samples or sum(samples) < _SECONDS_OF_SAMPLES:
        samples.append(_call(attention, *inputs))
    return statistics.median(samples) * 1e3, peak, first_ms


def _too_expensive(before: list[Point], length: int, seconds_left: float, device: torch.device) -> str | None:
    """Why the next length is not tried, judged by the length before it, or None."""
    if not before:
        return None
    memory, free = _GROWTH * before[-1].peak_bytes, free_memory(device)
    if memory > _MEMORY_SHARE * free:
        return f"length {length} may need {memory / 2**30:.1f} of {free / 2**30:.1f} GiB"
    costs = [max(point.ms, point.first_ms) for point in before]
    growth = max(_GROWTH, costs[-1] / costs[-2]) if len(costs) > 1 else _GROWTH
    seconds = _CALLS * growth * costs[-1] / 1e3 + _START_SECONDS
    if seconds > seconds_left:
        return f"length {length} may take {seconds:.0f} s of the {max(seconds_left, 0):.0f} s left"
    return None


def _inputs(plan: Plan, length: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    shape = (1, length, plan.heads, _HEAD_DIM)
    tensors = [torch.randn(shape, device=plan.device).to(plan.attention_dtype) for _ in range(4)]
    return [t.requires_grad_() for t in tensors[:3]], tensors[3]


def _call(attention: CausalAttention, inputs: list[torch.Tensor], dout: torch.Tensor) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    torch.autograd.grad(attention(*inputs), inputs, dout)
    if dout.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
