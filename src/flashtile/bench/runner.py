"""Runs cases: every implementation of a case is verified, then timed in turns with the others."""

from __future__ import annotations

import gc
import math
import statistics
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

from flashtile.bench.base import Implementation
from flashtile.bench.record import Row
from flashtile.bench.timing import Timer, WrongReplayError, make_timer, typical

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
#: Measures a case, as `run_case` does.
Run = Callable[[Any, Sequence[Implementation], torch.device, ProblemOf, float | None, Announce], list[Row]]


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
    bound: Any = None
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def time(self, phase: str, device: torch.device) -> None:
        """Makes the timer of a phase; there is none where a CUDA graph of it is wrong."""
        with self.implementation.context():
            facts = self.bound.facts(phase)
            try:
                self.timers[phase] = make_timer(self.bound.calls[phase], device)
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
        with self.implementation.context():
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
    """The rows of one case: for each implementation and phase a speed, or the reason why there is none.

    Args:
        case: what is measured.
        implementations: in which ways.
        device: where.
        problem: makes the tensors of a case.
        seconds: time for the samples of one phase of one implementation; None for the device's default.
        announce: told of each step.
    """
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
        for phase in problem.phases:
            if phase not in entry.why and entry.bound is not None:
                with announced(announce, f"timing {entry.implementation.name} {phase}"):
                    entry.time(phase, device)
    with announced(announce, "taking samples"):
        _sample_in_turns(entries, _SECONDS[device.type] if seconds is None else seconds, problem.phases)
    return [_row(entry, problem, case, phase) for entry in entries for phase in problem.phases]


def _sample_in_turns(entries: list[Prepared], seconds: float, phases: Sequence[str]) -> None:
    """Samples of one phase from each implementation in turn, to and fro, so that none always follows the same one."""
    for turn in range(_ROUNDS):
        for phase in phases:
            for entry in entries if turn % 2 == 0 else entries[::-1]:
                entry.sample(phase, seconds)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own for everything that may be captured into a CUDA graph."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _prepare(implementation: Any, problem: Any) -> Prepared:
    entry = Prepared(implementation)
    reasons = {phase: problem.unsupported(implementation, phase) for phase in problem.phases}
    entry.why = {phase: reason for phase, reason in reasons.items() if reason is not None}
    phases = [phase for phase in problem.phases if phase not in entry.why]
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
        verdict = problem.judge(entry.bound, phase, results)
        entry.errors[phase] = verdict.error
        if verdict.why is not None:
            entry.why[phase] = verdict.why
    return entry


def _row(entry: Prepared, problem: Any, case: Any, phase: str) -> Row:
    error = entry.errors.get(phase)
    row: Row = {
        "op": problem.op, "phase": phase, "impl": entry.implementation.name, "case": case.record(), "ms": None,
        "tflops": None, "gbps": None, "error": error if error is not None and math.isfinite(error) else None,
    }  # fmt: skip
    if phase in entry.why:
        return {**row, "why": entry.why[phase]}
    kind = entry.timers[phase].kind
    ms = typical(entry.samples[phase], kind)
    return {**row, "ms": ms, **problem.speed(phase, ms), **entry.facts[phase], "timer": kind}


def describe(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


#: Phases of host time, calls between two synchronisations, and how often they are made.
HOST_PHASES = ("fwd-nograd", "fwd", "fwd+bwd")
_HOST_CALLS = 20
_HOST_ROUNDS = {"cuda": 60, "cpu": 10}


def run_host_time(
    case: Any,
    implementations: Iterable[Implementation],
    device: torch.device,
    problem: ProblemOf,
    seconds: float | None = None,
    announce: Announce = say_nothing,
) -> list[Row]:
    """The host's own time for one call, what a program pays for each small call, whatever the GPU does: rows whose op
    ends in "-host", with `ms` per call.

    Calls are enqueued back to back on an idle device, few enough between two synchronisations that its queue never
    fills and makes the host wait. On a CPU the computation is part of the call, and so of the figure.
    """
    rows: list[Row] = []
    prepared = problem(case, device)
    for each in implementations:
        times: dict[str, float] = {}
        reason = prepared.unsupported(each, "fwd")
        if reason is None:
            try:
                with announced(announce, f"timing {each.name}"), each.context():
                    bound = prepared.bind(each)
                    bound.results("bwd")
                    calls = bound.forward_without_grad, bound.forward, bound.forward_backward
                    times = {phase: _host_ms(call, device) for phase, call in zip(HOST_PHASES, calls, strict=True)}
            except Exception as error:  # a fact about this implementation, for the record
                reason = describe(error)
        row = {"op": f"{prepared.op}-host", "phase": "", "impl": each.name, "case": case.record()}
        more = {"tflops": None, "gbps": None, "error": None, **({} if reason is None else {"why": reason})}
        rows += [{**row, "phase": phase, "ms": times.get(phase), **more} for phase in HOST_PHASES]
    return rows


def _host_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median over rounds of the time to enqueue one call."""
    for _ in range(5):
        call()
    samples = []
    for _ in range(_HOST_ROUNDS[device.type]):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        samples.append((time.perf_counter() - start) / _HOST_CALLS * 1e3)
    return statistics.median(samples)
