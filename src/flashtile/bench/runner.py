"""Runs cases: every implementation of a case is verified, then timed in turns with the others."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.bench.record import Row, make_row
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
class Prepared:
    """An implementation with its own copy of a case's tensors, called once and judged."""

    implementation: Any
    phases: Sequence[str]
    bound: Any = None
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def within_memory(self, phases: Iterable[str]) -> Iterator[None]:
        """Makes it the reason of some phases if the GPU's memory does not suffice."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            for phase in phases:
                self.why[phase] = describe(error)
                self.timers.pop(phase, None)

    def time(self, phase: str, problem: Any) -> None:
        """Makes the timer of a phase; there is none where a CUDA graph of it is wrong, or memory does not suffice."""
        with self.within_memory([phase]), self.implementation.context():
            facts = self.bound.facts(phase)
            try:
                self.timers[phase] = problem.timer(self.bound.calls[phase])
            except WrongReplayError as error:
                self.why[phase] = str(error)
            else:
                self.facts[phase] = facts

    def sample(self, phase: str, seconds: float) -> None:
        """Takes a round's samples of a phase that has a timer and, of the `seconds` of all rounds, time left."""
        samples = self.samples[phase]
        if phase not in self.timers or (self.spent[phase] >= seconds and len(samples) >= _LEAST_SAMPLES):
            return
        begin = time.perf_counter()
        with self.within_memory([phase]), self.implementation.context():
            samples += self.timers[phase].sample(seconds / _ROUNDS)
        self.spent[phase] += time.perf_counter() - begin


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
    rows = _measure(case, made, implementations, device, seconds, announce)
    gc.collect()  # graphs and tensors of a case are gone before the next one allocates
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return rows


def _measure(
    case: Any,
    problem: Any,
    implementations: Iterable[Any],
    device: torch.device,
    seconds: float | None,
    announce: Announce,
) -> list[Row]:
    entries = []
    for each in implementations:
        if problem.offers(each):
            with announced(announce, f"checking {each.name}"):
                entries.append(_prepare(each, problem))
    for entry in entries:
        for phase in entry.phases:
            if phase not in entry.why and entry.bound is not None:
                with announced(announce, f"timing {entry.implementation.name} {phase}"):
                    entry.time(phase, problem)
    with announced(announce, "taking samples"):
        _sample_in_turns(entries, _SECONDS[device.type] if seconds is None else seconds)
    return [_row(entry, problem, case, phase) for entry in entries for phase in entry.phases]


def _sample_in_turns(entries: list[Prepared], seconds: float) -> None:
    """Samples of one phase from each implementation in turn, to and fro, so that none always follows the same one."""
    for turn in range(_ROUNDS):
        for phase in dict.fromkeys(phase for entry in entries for phase in entry.phases):
            for entry in entries if turn % 2 == 0 else entries[::-1]:
                entry.sample(phase, seconds)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own for everything that may be captured into a CUDA graph."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _prepare(implementation: Any, problem: Any) -> Prepared:
    entry = Prepared(implementation, problem.measured_phases(implementation))
    reasons = {phase: problem.unsupported(implementation, phase) for phase in entry.phases}
    entry.why = {phase: reason for phase, reason in reasons.items() if reason is not None}
    phases = [phase for phase in entry.phases if phase not in entry.why]
    for index, phase in enumerate(phases):
        try:
            with implementation.context():
                if entry.bound is None:
                    entry.bound = problem.bind(implementation)
                results = entry.bound.results(phase)
        except Exception as error:  # whatever a peer raises is a fact for the record, not the end of the run
            entry.why.update(dict.fromkeys(phases[index:], describe(error)))
            if index == 0:
                entry.bound = None  # the others need the memory
            break
        if not implementation.judged:
            continue
        with entry.within_memory([phase]):
            verdict = problem.judge(entry.bound, phase, results)
            entry.errors[phase] = verdict.error
            if verdict.why is not None:
                entry.why[phase] = verdict.why
    return entry


def _row(entry: Prepared, problem: Any, case: Any, phase: str) -> Row:
    error = entry.errors.get(phase)
    found: Row = {"error": error if error is not None and math.isfinite(error) else None}
    if phase in entry.why:
        found["why"] = entry.why[phase]
    else:
        kind = entry.timers[phase].kind
        ms = typical(entry.samples[phase], kind)
        found |= {"ms": ms, **problem.speed(phase, ms), **entry.facts[phase]} | ({"timer": kind} if kind else {})
    named = {"phase": phase, **problem.labels(phase)}
    return make_row(problem.op, impl=entry.implementation.name, case=case.record(), **named, **found)


def describe(error: Exception) -> str:
    """An exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "left out: it does not fit the memory that is free on this GPU"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
