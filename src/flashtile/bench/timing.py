"""Timers: how long one call takes, on a GPU or on a CPU; the memory that it takes, and where its time goes.

A GPU call that is short beside what the host needs to launch it is captured into a CUDA graph and replayed, so that
the GPU is what is measured; longer ones are timed between CUDA events. On a CPU the clock is `time.perf_counter`, or
that of the thread if PyTorch has only one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

#: A graph holds as many calls as fill this time, in ms, at least one.
_GRAPH_MS = 1.0
#: Up to this, in ms, an estimate may be the time that a busy host takes to launch the call, so a graph decides.
_HOST_MAY_TAKE_MS = 5.0
_WARM_UP_CALLS = 3
_ESTIMATE_CALLS = 5
#: Share of their length by which results of two calls may differ.
_ALIKE = 0.01
#: Calls longer than this, in ms, need no warming up, and two of them are enough for an estimate.
_LONG_MS = 20.0

Span = tuple[float, float]

#: Purposes of kernels, by parts of their names; the first that fits. All others are "other": copies, sums, divisions.
_KINDS = {
    "transfers": ("nccl",),
    "attention": ("attention_", "flash", "fmha"),
    "merging": ("merge_part", "merge_finish"),
}


class Timer(Protocol):
    """Takes samples of one function's time. `kind` says how, for the record."""

    kind: str

    def sample(self, seconds: float) -> list[float]:
        """Milliseconds of single calls, as many as fit into `seconds`, but at least one."""


class Uncaptured:
    """A call that a CUDA graph must not hold, because its replay would fail."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self) -> Any:
        return self._function()


class WrongReplayError(AssertionError):
    """A replay of a CUDA graph gives other results than the calls that it holds: its time is that of other work."""


def make_timer(function: Callable[[], Any], device: torch.device) -> Timer:
    """The timer of a function that was called before. WrongReplayError if its CUDA graph gives wrong results."""
    if device.type != "cuda":
        return CpuTimer(function)
    events = EventTimer(function)
    estimate_ms = events.estimate_ms
    if estimate_ms >= _HOST_MAY_TAKE_MS or isinstance(function, Uncaptured):
        return events
    calls = math.ceil(_GRAPH_MS / max(estimate_ms, 1e-3))
    try:
        return GraphTimer(function, calls)
    except WrongReplayError:
        raise
    except Exception:  # what cannot be captured is timed with its launches; the record's `timer` tells
        torch.cuda.synchronize()
        return events


def typical(samples: Sequence[float], kind: str) -> float:
    """The number that a record has for the samples of a timer: a GPU's median, and the lower quartile of a CPU and of
    the host's time, because other processes lengthen calls, and nothing shortens them."""
    if kind not in CpuTimer.KINDS + HostTimer.KINDS:
        return statistics.median(samples)
    return sorted(samples)[len(samples) // 4]


class CpuTimer:
    """Times calls that are over when they return: if PyTorch has one thread, the time that it ran ("thread-time"),
    which other processes do not lengthen; otherwise by the wall clock ("perf-counter")."""

    KINDS = ("thread-time", "perf-counter")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        alone = torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self.kind = self.KINDS[0] if alone else self.KINDS[1]

    def sample(self, seconds: float) -> list[float]:
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while not samples or time.perf_counter() < end:
            start = self._clock()
            self._function()
            samples.append((self._clock() - start) * 1e3)
        return samples


class HostTimer:
    """Times what the host does for a call: calls are enqueued back to back on an idle device, few enough between two
    synchronisations that its queue never fills and makes the host wait. On a CPU the computation is part of the call.
    Records say no `timer`. With `finished`, until the device has finished the last one: the host's time or the
    device's, whichever is longer."""

    KINDS = ("", "back-to-back")
    CALLS, ROUNDS = 20, 10

    def __init__(self, function: Callable[[], Any], device: torch.device, finished: bool = False) -> None:
        self._function, self._device, self._finished = function, device, finished
        self.kind = self.KINDS[finished]
        for _ in range(_ESTIMATE_CALLS):
            function()

    def sample(self, seconds: float) -> list[float]:
        return [self._round() for _ in range(self.ROUNDS if self._device.type == "cuda" else 1)]

    def _round(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.CALLS):
            self._function()
        if self._finished and self._device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.CALLS * 1e3


def time_calls(function: Callable[[], Any], calls: int, device: torch.device | None = None) -> list[float]:
    """Milliseconds of each of some calls, on a GPU between CUDA events on the current stream; the host runs ahead."""
    if device is not None and device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(calls):
            function()
            marks.append(time.perf_counter())
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    torch.cuda.synchronize()
    for begin, done in events:
        begin.record()
        function()
        done.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(done) for begin, done in events]


class EventTimer:
    """Times calls between CUDA events on the current stream; the host runs ahead of the GPU."""

    kind = "cuda-events"

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        samples = time_calls(function, 2)
        if min(samples) < _LONG_MS:
            samples = time_calls(function, _WARM_UP_CALLS + _ESTIMATE_CALLS)[_WARM_UP_CALLS:]
        self.estimate_ms = statistics.median_low(samples)

    def sample(self, seconds: float) -> list[float]:
        return time_calls(self._function, max(1, min(200, int(seconds * 1e3 / self.estimate_ms))))


class GraphTimer:
    """Times replays of a CUDA graph that holds several calls."""

    kind = "cuda-graph"

    def __init__(self, function: Callable[[], Any], calls: int) -> None:
        self._calls = calls
        graph, expected = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in _tensors(function())]
        repeats = _alike(expected, _tensors(function()))
        # Autograd runs a backward on the stream of its forward, so the capture must be on that stream too.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                captured = _tensors(function())
        graph.replay()
        if repeats and not _alike(expected, captured):
            raise WrongReplayError("wrong result: a replay of its CUDA graph differs from a call")
        del expected, captured
        self._events = EventTimer(graph.replay)

    def sample(self, seconds: float) -> list[float]:
        return [ms / self._calls for ms in self._events.sample(seconds)]


def _tensors(results: Any) -> list[Tensor]:
    """The tensors that a call returns."""
    found = results if isinstance(results, list | tuple) else [results]
    return [each.detach() for each in found if isinstance(each, Tensor)]


def _alike(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether results are the same up to the order of sums. Two calls of a function that works in place are not."""
    return all(
        torch.equal(one, other) or bool((one - other).float().norm() <= _ALIKE * one.float().norm())
        for one, other in zip(ones, others, strict=True)
    )


def peak_facts(call: Callable[[], Iterable[Tensor]], inputs: Sequence[Tensor]) -> dict[str, Any]:
    """`peak_mib` of a row: the largest amount in MiB that a call takes on a GPU beside `inputs` and its results (those
    in the memory of an input are none); nothing elsewhere."""
    device = inputs[0].device
    if device.type != "cuda":
        return {}
    results, peak = _called(call, device)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    own = {(storage := t.untyped_storage()).data_ptr(): storage.nbytes() for t in results}
    kept = sum(size for pointer, size in own.items() if pointer not in given)
    return {"peak_mib": round(max(peak - kept, 0) / 2**20, 1)}  # results may lie in memory that was there


def step_facts(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """`peak_mib` of a training step: the largest amount on a GPU beside what was there; nothing elsewhere."""
    return {"peak_mib": _called(step, device)[1] / 2**20} if device.type == "cuda" else {}


def _called(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """The results of a call, and the bytes by which memory grew at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    return results, torch.cuda.max_memory_allocated(device) - before


def profile_calls(function: Callable[[], Any], calls: int) -> dict[str, float | None]:
    """Milliseconds of one call, of several that the host enqueues without waiting: in `attention`, `transfers` (with
    their waits), `merging` and `other` kernels on this GPU; `idle`; `host`: until the host had enqueued it; `hidden`:
    the share of the transfers' time in which this GPU computed, None without any."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    host = (time.perf_counter() - begin) / calls
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = summary(((event.name, (event.time_range.start, event.time_range.end)) for event in kernels), calls)
    return found | {"host": host * 1e3}


def summary(kernels: Iterable[tuple[str, Span]], calls: int) -> dict[str, float | None]:
    """As `profile_calls` returns it, from names of kernels and their times in microseconds."""
    spans: dict[str, list[Span]] = {kind: [] for kind in (*_KINDS, "other")}
    for name, span in kernels:
        fitting = (kind for kind, parts in _KINDS.items() if any(part in name.lower() for part in parts))
        spans[next(fitting, "other")].append(span)
    everything = [span for of_kind in spans.values() for span in of_kind]
    if not everything:
        return {}
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    computing = [span for kind, of_kind in spans.items() if kind != "transfers" for span in of_kind]
    milliseconds: dict[str, float | None] = {kind: _length(found) / calls / 1e3 for kind, found in spans.items()}
    idle = (whole - _length(everything)) / calls / 1e3
    return milliseconds | {"idle": idle, "hidden": covered(spans["transfers"], computing)}


def covered(spans: list[Span], by: list[Span]) -> float | None:
    """The share of the length of some spans that others cover."""
    total = _length(spans)
    return (total + _length(by) - _length([*spans, *by])) / total if total else None


def _length(spans: list[Span]) -> float:
    """How long the union of spans is."""
    length, last = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, last))
        last = max(last, end)
    return length


def describe_profile(found: dict[str, float | None]) -> str:
    """A summary in words."""
    share = found.get("hidden")
    times = "  ".join(f"{kind} {value:.3f}" for kind, value in found.items() if kind != "hidden" and value is not None)
    return f"{times} ms" + ("" if share is None else f"  hidden {share:.2f}")
