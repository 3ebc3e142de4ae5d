"""What the runner asks of a benchmark: a case with its tensors, to which implementations are bound and by which their
results are judged. Attention's answers are here, those of the companion operations in `companions/problem.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtile.bench.bound import Bound
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import Implementation
from flashtile.bench.values import NORMAL
from flashtile.bench.verify import Oracle, Verdict


class AnyCase(Protocol):
    """A case of any benchmark."""

    @property
    def name(self) -> str:
        """A readable identifier, that `--cases` patterns match."""

    def record(self) -> dict[str, Any]:
        """The `case` object of a record."""


class WorkCase(AnyCase, Protocol):
    """A case of one operation, whose work is counted."""

    def flops(self, phase: str) -> float | None:
        """Floating-point operations; None where bytes are what counts."""

    def bytes(self, phase: str) -> int:
        """Bytes that must move at least."""


def speed_of(case: WorkCase, phase: str, ms: float) -> dict[str, Any]:
    """The speed of a row with its work by time."""
    flops = case.flops(phase)
    return {"tflops": None if flops is None else flops / ms / 1e9, "gbps": case.bytes(phase) / ms / 1e6}


class AnyImplementation(Protocol):
    """An implementation of any benchmark."""

    @property
    def name(self) -> str:
        """As it stands in records."""

    @property
    def context(self) -> Callable[[], AbstractContextManager[Any]]:
        """What must be entered around its calls."""


class AnyBound(Protocol):
    """An implementation with its own copy of a case's tensors."""

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """For each phase what is timed."""

    def results(self, phase: str) -> dict[str, Tensor]:
        """Runs a phase once; the tensors that are judged, by name."""

    def facts(self, phase: str) -> dict[str, Any]:
        """Further keys of the row of a phase."""


class Problem(Protocol):
    """A case with its tensors on a device."""

    op: str
    phases: tuple[str, ...]

    def offers(self, implementation: Any) -> bool:
        """Whether there is a row for an implementation at all."""

    def unsupported(self, implementation: Any, phase: str) -> str | None:
        """Why an implementation cannot run a phase here, or None."""

    def bind(self, implementation: Any) -> AnyBound:
        """An implementation with its own copy of the tensors."""

    def judge(self, bound: Any, phase: str, results: dict[str, Tensor]) -> Verdict:
        """Whether the results of a phase are right."""

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        """What a row says of a speed beside the time, `tflops` and `gbps` among it."""


class AttentionProblem:
    """One attention call and its gradients."""

    op = "attention"
    phases: tuple[str, ...] = ("fwd", "bwd")

    def __init__(self, case: Case, device: torch.device, first_calls: Mapping[str, float] | None = None) -> None:
        """`first_calls`: for implementations, the milliseconds of a first call in a new process."""
        self._case = case
        self._first_calls = first_calls or {}
        if case.values != NORMAL:
            self.phases = ("fwd",)  # a backward reads finished statistics: its time depends on no values
        self._inputs = make_inputs(case, device)
        self._oracle = Oracle(case, self._inputs)

    @property
    def _without_dropout(self) -> Case:
        return replace(self._case, dropout_p=0.0)

    @functools.cached_property
    def _oracle_without_dropout(self) -> Oracle:
        return Oracle(self._without_dropout, self._inputs)

    def offers(self, implementation: Implementation) -> bool:
        return True

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        return implementation.unsupported(self._case, self._inputs.q.device)

    def bind(self, implementation: Implementation) -> Bound:
        return Bound(implementation, self._case, self._inputs, self._first_calls.get(implementation.name))

    def judge(self, bound: Bound, phase: str, results: dict[str, Tensor]) -> Verdict:
        """An implementation that drops weights by bits of its own is judged by what it computes without dropout."""
        if not (self._case.dropout_p and bound.implementation.own_dropout):
            return self._oracle.judge(phase, results)
        with bound.implementation.context():
            whole = Bound(bound.implementation, self._without_dropout, self._inputs).results(phase)
        verdict = self._oracle_without_dropout.judge(phase, whole)
        if all(torch.equal(results[name], tensor) for name, tensor in whole.items()):
            return Verdict(verdict.error, "wrong result: nothing is dropped")
        return verdict

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return speed_of(self._case, phase, ms)
