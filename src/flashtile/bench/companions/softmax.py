"""Cases of the scaled softmax, causal and with a mask."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import flashtile
from flashtile.bench.companions.case import Case, Inputs, Random, Way

_SCALE = 0.125
_MASKED = 0.25


@dataclass(frozen=True)
class _Softmax(Case):
    """A softmax of scores `[B, H, S, S]`."""

    B: int
    H: int
    S: int

    def sizes(self) -> Sequence[str]:
        return (f"{self.B}x{self.H}x{self.S}x{self.S}",)

    def width(self) -> int:
        return self.H * self.S**2

    def make_inputs(self, random: Random) -> Inputs:
        shape = (self.B, self.H, self.S, self.S)
        return Inputs({"x": random.normal(*shape)}, self._others(random), [random.normal(*shape)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return ((leaves[0] * _SCALE).masked_fill(others["mask"], float("-inf")).softmax(dim=-1),)

    @abstractmethod
    def _others(self, random: Random) -> dict[str, Tensor]:
        """The mask."""


@dataclass(frozen=True)
class CausalSoftmax(_Softmax):
    """`flashtile.scaled_causal_softmax`."""

    op: ClassVar[str] = "causal_softmax"

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.scaled_causal_softmax(x, _SCALE, backend=backend))

    def bytes(self, phase: str) -> int:
        """What is masked out need not be read, only written."""
        visible, whole = self.S * (self.S + 1) // 2, self.S**2
        read = visible if phase == "fwd" else 2 * visible
        return self.B * self.H * (read + whole) * self.torch_dtype.itemsize

    def _others(self, random: Random) -> dict[str, Tensor]:
        return {"mask": torch.ones(self.S, self.S, dtype=torch.bool, device=random.device).triu(1)}


@dataclass(frozen=True)
class MaskedSoftmax(_Softmax):
    """`flashtile.scaled_masked_softmax` with a mask `[B, 1, S, S]` that takes out a quarter of the keys."""

    op: ClassVar[str] = "masked_softmax"
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "mask", "out"))

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.scaled_masked_softmax(x, others["mask"], _SCALE, backend=backend))

    def bytes(self, phase: str) -> int:
        """The backward needs the result alone, and no mask."""
        scores = self.B * self.width() * self.torch_dtype.itemsize
        return 2 * scores + self.B * self.S**2 if phase == "fwd" else 3 * scores

    def _others(self, random: Random) -> dict[str, Tensor]:
        mask = random.booleans(self.B, 1, self.S, self.S, probability=_MASKED)
        mask[..., 0] = False  # the formula has no answer for a row with nothing left
        return {"mask": mask}
