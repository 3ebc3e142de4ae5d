"""Runs cases: every implementation of a case is verified, then timed in turns with the others."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.bench.record import Row, grouped, make_row
from flashtile.bench.timing import Timer, WrongReplayError, typical

#: Implementations take turns this often, so that a GPU whose clock moves slows all of them alike.
_ROUNDS = 6
#: Calls so long that they use the time up in fewer rounds are measured at least this often.
_LEAST_SAMPLES = 3
#: Time for the samples of one phase of one implementation, over all rounds.
_SECONDS = {"cuda": 0.15, "cpu": 0.3}

#: Seconds after which a step that has not ended is told of again, with the place in the code.
_SLOW = 60.0

#: Makes the problem of a case on a device: a `base.Problem`, or what has its methods.
ProblemOf = Callable[[Any, torch.device], Any]
#: Called with what begins now.
Announce = Callable[[str], None]


def say_nothing(what: str) -> None:
    """An `Announce` for runs that nobody follows."""


@contextmanager
def announced(announce: Announce, what: str) -> Iterator[None]:
    """Tells of a step before it begins, and of where it is if it takes long: a log that is cut shows where it stood."""
    thread = threading.get_ident()

    def remind() -> None:
        frames = traceback.extract_stack(sys._current_frames()[thread])[-4:]
        calls = " > ".join(f"{frame.name} (line {frame.lineno})" for frame in frames)
        announce(f"still {what} after {_SLOW:.0f} s, in {calls}")

    announce(what)
    timer = threading.Timer(_SLOW, remind)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Measurement:
    """One phase of an implementation in a case."""

    implementation: Any
    phase: str
    why: str | None  # why it has no speed, None as long as it may have one
    bound: Any = None  # its own copy of the case's tensors
    error: float | None = None  # the largest, where it was judged
    facts: dict[str, Any] = field(default_factory=dict)  # further keys of its row
    timer: Timer | None = None
    samples: list[float] = field(default_factory=list)
    spent: float = 0.0  # seconds of taking samples

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Makes it the reason if the GPU's memory does not suffice."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.why, self.timer = describe(error), None

    def prepare(self, problem: Any) -> None:
        """Makes the timer; there is none where a CUDA graph is wrong, or memory does not suffice."""
        with self.within_memory(), self.implementation.context():
            facts = self.bound.facts(self.phase)
            try:
                self.timer, self.facts = problem.timer(self.bound.calls[self.phase]), facts
            except WrongReplayError as error:
                self.why = str(error)

    def sample(self, seconds: float) -> None:
        """Takes a round's samples if there is a timer and, of the `seconds` of all rounds, time left."""
        if self.timer is None or (self.spent >= seconds and len(self.samples) >= _LEAST_SAMPLES):
            return
        begin = time.perf_counter()
        with self.within_memory(), self.implementation.context():
            self.samples += self.timer.sample(seconds / _ROUNDS)
        self.spent += time.perf_counter() - begin

    def row(self, problem: Any) -> Row:
        found: Row = {"error": self.error if self.error is not None and math.isfinite(self.error) else None}
        if self.timer is None:
            found["why"] = self.why
        else:
            ms, kind = typical(self.samples, self.timer.kind), self.timer.kind
            found |= {"ms": ms, **problem.speed(self.phase, ms), **self.facts} | ({"timer": kind} if kind else {})
        named = {"phase": self.phase, **problem.labels(self.phase)}
        return make_row(problem.op, impl=self.implementation.name, case=problem.case.record(), **named, **found)


def run_case(
    case: Any,
    implementations: Iterable[Any],
    device: torch.device,
    problem: ProblemOf,
    seconds: float | None = None,
    announce: Announce = say_nothing,
) -> list[Row]:
    """The rows of one case: for each implementation and phase a speed, or the reason why there is none. `seconds`: for
    the samples of one phase of one implementation; None for the device's default. `announce`: told of each step."""
    with announced(announce, "making tensors"):
        made = problem(case, device)
    rows = _measure(made, implementations, _SECONDS[device.type] if seconds is None else seconds, announce)
    gc.collect()  # graphs and tensors of a case are gone before the next one allocates
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return rows


def _measure(problem: Any, implementations: Iterable[Any], seconds: float, announce: Announce) -> list[Row]:
    found: list[Measurement] = []
    for each in implementations:
        if phases := problem.measured_phases(each):
            with announced(announce, f"checking {each.name}"):
                found += _check(each, phases, problem)
    for one in found:
        if one.why is None:
            with announced(announce, f"timing {one.implementation.name} {one.phase}"):
                one.prepare(problem)
    with announced(announce, "taking samples"):
        _sample_in_turns(found, seconds)
    return [one.row(problem) for one in found]


def _sample_in_turns(found: list[Measurement], seconds: float) -> None:
    """Samples of one phase from each implementation in turn, to and fro, so that none always follows the same one."""
    by_phase = grouped(found, lambda one: one.phase)
    for turn in range(_ROUNDS):
        for of_phase in by_phase.values():
            for one in of_phase if turn % 2 == 0 else of_phase[::-1]:
                one.sample(seconds)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own for everything that may be captured into a CUDA graph."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _check(implementation: Any, phases: Sequence[str], problem: Any) -> list[Measurement]:
    """The phases of an implementation, each called once and judged."""
    found = [Measurement(implementation, phase, problem.unsupported(implementation, phase)) for phase in phases]
    bound, left = None, [one for one in found if one.why is None]
    for index, one in enumerate(left):
        try:
            with implementation.context():
                one.bound = bound = problem.bind(implementation) if bound is None else bound
                results = bound.results(one.phase)
        except Exception as error:  # whatever a peer raises is a fact for the record, not the end of the run
            for failed in left[index:]:
                failed.why, failed.bound = describe(error), None  # the others need the memory
            break
        if implementation.judged:
            with one.within_memory():
                one.error, one.why = problem.judge(bound, one.phase, results)
    return found


def describe(error: Exception) -> str:
    """An exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "left out: it does not fit the memory that is free on this GPU"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
