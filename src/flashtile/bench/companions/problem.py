"""A companion case with its tensors, as the runner asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.bench.companions.bound import Bound
from flashtile.bench.companions.case import Case, Random
from flashtile.bench.companions.implementations import Implementation
from flashtile.bench.companions.oracle import Oracle
from flashtile.bench.problem import speed_of
from flashtile.bench.verify import Verdict


class CompanionProblem:
    """A case on a device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.op, self.phases = case.op, case.phases
        self._case, self._ways = case, case.ways()
        self._inputs = case.make_inputs(Random(device, case.torch_dtype))
        self._oracle: Oracle | None = None

    def offers(self, implementation: Implementation) -> bool:
        return implementation.name in self._ways

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        return implementation.missing() or self._case.lacks(implementation.name, phase)

    def bind(self, implementation: Implementation) -> Bound:
        return Bound(self._ways[implementation.name](self._inputs.others), self._case, self._inputs)

    def judge(self, bound: Bound, phase: str, results: dict[str, Tensor]) -> Verdict:
        if self._oracle is None:
            self._oracle = Oracle(self._case, self._inputs)
        return self._oracle.judge(results, bound.way.own_bits)

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        return speed_of(self._case, phase, ms)
