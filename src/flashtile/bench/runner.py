"""Runs cases: every implementation of a case is verified, then timed in turns with the others."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.bench.problem import AnyBound, AnyCase, AnyImplementation, AttentionProblem, Problem
from flashtile.bench.record import Row
from flashtile.bench.timing import Timer, make_timer, typical

PHASES = AttentionProblem.phases

#: Implementations take turns this often, so that a GPU whose clock moves slows all of them alike.
_ROUNDS = 6
#: Calls so long that they use the time up in fewer rounds are measured at least this often.
_LEAST_SAMPLES = 3
#: Time for the samples of one phase of one implementation, over all rounds.
_SECONDS = {"cuda": 0.15, "cpu": 0.3}


@dataclass
class Prepared:
    """An implementation with its own copy of a case's tensors, called once and judged."""

    implementation: AnyImplementation
    bound: AnyBound | None = None
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: dict[str, Timer] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def sample(self, phase: str, seconds: float) -> None:
        """Takes a round's samples of a phase that has a timer and, of the `seconds` of all rounds, time left."""
        samples = self.samples[phase]
        if phase not in self.timers or (self.spent[phase] >= seconds and len(samples) >= _LEAST_SAMPLES):
            return
        begin = time.perf_counter()
        with self.implementation.context():
            samples += self.timers[phase].sample(seconds / _ROUNDS)
        self.spent[phase] += time.perf_counter() - begin


def run_cases(
    cases: Sequence[Any],
    implementations: Sequence[AnyImplementation],
    device: torch.device,
    on_case: Callable[[int, Any, list[Row] | None], None] = lambda index, case, rows: None,
    seconds: float | None = None,
    problem: Callable[[Any, torch.device], Problem] = AttentionProblem,
) -> list[Row]:
    """Measures all cases.

    Args:
        cases: what is measured.
        implementations: in which ways.
        device: where.
        on_case: called with the index and the case, before it is measured with None, and afterwards with its rows.
        seconds: time for the samples of one phase of one implementation; None for the device's default.
        problem: makes the tensors of a case; which operation's cases they are.
    """
    rows: list[Row] = []
    with side_stream(device):
        for index, case in enumerate(cases):
            on_case(index, case, None)
            case_rows = run_case(case, implementations, device, seconds, problem)
            rows += case_rows
            on_case(index, case, case_rows)
    return rows


def run_case(
    case: Any,
    implementations: Iterable[AnyImplementation],
    device: torch.device,
    seconds: float | None = None,
    problem: Callable[[Any, torch.device], Problem] = AttentionProblem,
) -> list[Row]:
    """The rows of one case: for each implementation and phase a speed, or the reason why there is none."""
    seconds = _SECONDS[device.type] if seconds is None else seconds
    rows = _measure(case, problem(case, device), implementations, device, seconds)
    _free(device)
    return rows


def _measure(
    case: AnyCase,
    problem: Problem,
    implementations: Iterable[AnyImplementation],
    device: torch.device,
    seconds: float,
) -> list[Row]:
    entries = [
        _prepare(implementation, problem) for implementation in implementations if problem.offers(implementation)
    ]
    for entry in entries:
        _make_timers(entry, problem.phases, device)
    _sample_in_turns(entries, seconds, problem.phases)
    return [_row(entry, problem, case, phase) for entry in entries for phase in problem.phases]


def _sample_in_turns(entries: list[Prepared], seconds: float, phases: Sequence[str] = PHASES) -> None:
    """Samples of one phase from each implementation in turn, to and fro, so that none always follows the same one."""
    for turn in range(_ROUNDS):
        for phase in phases:
            for entry in entries if turn % 2 == 0 else entries[::-1]:
                entry.sample(phase, seconds)


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of its own for everything that may be captured into a CUDA graph."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _prepare(implementation: AnyImplementation, problem: Problem) -> Prepared:
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


def _make_timers(entry: Prepared, phases: Sequence[str], device: torch.device) -> None:
    for phase in phases:
        if phase not in entry.why and entry.bound is not None:
            with entry.implementation.context():
                entry.facts[phase] = entry.bound.facts(phase)
                entry.timers[phase] = make_timer(entry.bound.calls[phase], device)


def _row(entry: Prepared, problem: Problem, case: AnyCase, phase: str) -> Row:
    row: Row = {
        "op": problem.op,
        "phase": phase,
        "impl": entry.implementation.name,
        "case": case.record(),
        "ms": None,
        "tflops": None,
        "gbps": None,
        "error": _finite(entry.errors.get(phase)),
    }
    if phase in entry.why:
        return {**row, "why": entry.why[phase]}
    ms = typical(entry.samples[phase], entry.timers[phase].kind)
    speed = {"ms": ms, **problem.speed(phase, ms), **entry.facts[phase]}
    return {**row, **speed, "timer": entry.timers[phase].kind}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def describe(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _free(device: torch.device) -> None:
    """Graphs and tensors of a case are gone before the next one allocates."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
