"""Timers: how long one call takes, on a GPU or on a CPU.

A GPU call that is short beside what the host needs to launch it is captured into a CUDA graph and replayed, so that
the GPU is what is measured; longer ones are timed between CUDA events. On a CPU the clock is `time.perf_counter`, or
that of the thread if PyTorch has only one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

#: A graph holds as many calls as fill this time, in ms, at least one.
_GRAPH_MS = 1.0
#: Up to this, in ms, an estimate may be the time that a busy host takes to launch the call, so a graph decides.
_HOST_MAY_TAKE_MS = 5.0
_WARM_UP_CALLS = 3
_ESTIMATE_CALLS = 5
#: Calls longer than this, in ms, need no warming up, and two of them are enough for an estimate.
_LONG_MS = 20.0


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


def make_timer(function: Callable[[], Any], device: torch.device) -> Timer:
    """The timer of a function that was called before, so that its kernels are compiled."""
    if device.type != "cuda":
        return CpuTimer(function)
    events = EventTimer(function)
    estimate_ms = events.estimate_ms
    if estimate_ms >= _HOST_MAY_TAKE_MS or isinstance(function, Uncaptured):
        return events
    calls = math.ceil(_GRAPH_MS / max(estimate_ms, 1e-3))
    try:
        return GraphTimer(function, calls)
    except Exception:  # what cannot be captured is timed with its launches; the record's `timer` tells
        torch.cuda.synchronize()
        return events


def typical(samples: Sequence[float], kind: str) -> float:
    """The number that a record has for the samples of a timer: a GPU's median, and a CPU's lower quartile, because
    other processes lengthen calls, and nothing shortens them."""
    if kind not in CpuTimer.KINDS:
        return statistics.median(samples)
    return sorted(samples)[len(samples) // 4]


class CpuTimer:
    """Times calls that are over when they return.

    If PyTorch has one thread, by the time that the calling thread ran ("thread-time"): what other processes do on its
    core in between does not count. Otherwise by the wall clock ("perf-counter").
    """

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


class EventTimer:
    """Times calls between CUDA events on the current stream; the host runs ahead of the GPU."""

    kind = "cuda-events"

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        samples = self._time(2)
        if min(samples) < _LONG_MS:
            samples = self._time(_WARM_UP_CALLS + _ESTIMATE_CALLS)[_WARM_UP_CALLS:]
        self.estimate_ms = statistics.median_low(samples)

    def sample(self, seconds: float) -> list[float]:
        return self._time(max(1, min(200, int(seconds * 1e3 / self.estimate_ms))))

    def _time(self, repeats: int) -> list[float]:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        torch.cuda.synchronize()
        for start, end in marks:
            start.record()
            self._function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in marks]


class GraphTimer:
    """Times replays of a CUDA graph that holds several calls."""

    kind = "cuda-graph"

    def __init__(self, function: Callable[[], Any], calls: int) -> None:
        self._calls = calls
        graph = torch.cuda.CUDAGraph()
        # Autograd runs a backward on the stream of its forward, so the capture must be on that stream too.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                function()
        graph.replay()
        self._events = EventTimer(graph.replay)

    def sample(self, seconds: float) -> list[float]:
        return [ms / self._calls for ms in self._events.sample(seconds)]
