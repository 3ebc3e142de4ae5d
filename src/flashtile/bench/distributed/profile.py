"""Where a call's time goes on a GPU: what computes, what travels, how much of it is hidden, what the host needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[float, float]

#: What kernels are for, by parts of their names; the first that fits. All others are "other": copies, sums, divisions.
_KINDS = {
    "transfers": ("nccl",),
    "attention": ("attention_", "flash", "fmha"),
    "merging": ("merge_part", "merge_finish"),
}


def profile(function: Callable[[], Any], calls: int) -> dict[str, float | None]:
    """Milliseconds of one call, of several that the host enqueues without waiting, as a training does.

    Returns:
        `attention`, `transfers`, `merging`, `other`: in which such kernels ran on this GPU, a transfer's wait for the
        other side included; `idle`: in which none did; `host`: until the host had enqueued the call; `hidden`: the
        share of the transfers' time in which this GPU computed, None where nothing travels.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    host = (time.perf_counter() - begin) / calls
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = summary(((event.name, (event.time_range.start, event.time_range.end)) for event in kernels), calls)
    return found | {"host": host * 1e3}


def summary(kernels: Iterable[tuple[str, Span]], calls: int) -> dict[str, float | None]:
    """As `profile` returns it, from names of kernels and their times in microseconds."""
    spans: dict[str, list[Span]] = {kind: [] for kind in (*_KINDS, "other")}
    for name, span in kernels:
        spans[kind_of(name)].append(span)
    everything = [span for of_kind in spans.values() for span in of_kind]
    if not everything:
        return {}
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    computing = [span for kind, of_kind in spans.items() if kind != "transfers" for span in of_kind]
    milliseconds: dict[str, float | None] = {kind: _length(found) / calls / 1e3 for kind, found in spans.items()}
    idle = (whole - _length(everything)) / calls / 1e3
    return milliseconds | {"idle": idle, "hidden": covered(spans["transfers"], computing)}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in lower for part in parts)), "other")


def covered(spans: list[Span], by: list[Span]) -> float | None:
    """The share of the length of some spans that others cover."""
    total = _length(spans)
    if not total:
        return None
    both = 0.0
    for start, end in _union(spans):
        both += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in _union(by))
    return both / total


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in _union(spans))


def _union(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def line(found: dict[str, float | None]) -> str:
    """A summary in words."""
    share = found.get("hidden")
    times = "  ".join(f"{kind} {value:.3f}" for kind, value in found.items() if kind != "hidden" and value is not None)
    return f"{times} ms" + ("" if share is None else f"  hidden {share:.2f}")
