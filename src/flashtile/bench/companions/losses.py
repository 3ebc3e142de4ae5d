"""Cases of the losses: cross-entropy of logits, and of a linear layer whose logits need not all be in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.companions.case import Build, Case, Inputs, Random, Way


@dataclass(frozen=True)
class CrossEntropy(Case):
    """`flashtile.cross_entropy` of `[rows, vocabulary]`, the mean over rows."""

    rows: int
    vocabulary: int

    op: ClassVar[str] = "cross_entropy"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd+bwd")
    outputs: ClassVar[tuple[str, ...]] = ("loss",)
    rowwise: ClassVar[frozenset[str]] = frozenset(("logits", "labels"))

    def sizes(self) -> Sequence[str]:
        return (f"{self.rows}x{self.vocabulary}",)

    def width(self) -> int:
        return self.vocabulary

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {"logits": random.normal(self.rows, self.vocabulary)}
        return Inputs(leaves, {"labels": random.labels(self.rows, self.vocabulary)}, [_one(random)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (F.cross_entropy(leaves[0], others["labels"]),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda logits: flashtile.cross_entropy(logits, others["labels"], backend=backend))

    def peers(self) -> dict[str, Build]:
        return {"liger": _liger, "quack": _quack}

    def lacks(self, implementation: str, phase: str) -> str | None:
        """Liger's backward has nothing left to do."""
        return "computes its gradient in the forward" if (implementation, phase) == ("liger", "bwd") else None

    def bytes(self, phase: str) -> int:
        """Together, forward and backward could read the logits once."""
        return (1 if phase == "fwd" else 2) * self.rows * self.vocabulary * self.torch_dtype.itemsize


def _one(random: Random) -> Tensor:
    """The gradient of a loss."""
    return torch.ones((), dtype=random.dtype, device=random.device)


def _liger(others: dict[str, Tensor]) -> Way:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return Way(lambda logits: liger_cross_entropy(logits, others["labels"]))


def _quack(others: dict[str, Tensor]) -> Way:
    from quack.cross_entropy import cross_entropy

    return Way(lambda logits: cross_entropy(logits, others["labels"], reduction="mean"))
