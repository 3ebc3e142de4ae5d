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


@dataclass(frozen=True)
class LinearCrossEntropy(Case):
    """`flashtile.linear_cross_entropy` of `[tokens, hidden]` and an output layer `[vocabulary, hidden]`."""

    tokens: int
    hidden: int
    vocabulary: int

    op: ClassVar[str] = "linear_cross_entropy"
    phases: ClassVar[tuple[str, ...]] = ("fwd+bwd",)
    outputs: ClassVar[tuple[str, ...]] = ("loss",)
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "labels"))

    def sizes(self) -> Sequence[str]:
        return (f"{self.tokens}x{self.hidden}x{self.vocabulary}",)

    def width(self) -> int:
        return self.vocabulary

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {
            "x": random.normal(self.tokens, self.hidden),
            "weight": random.normal(self.vocabulary, self.hidden, scale=self.hidden**-0.5),
        }
        return Inputs(leaves, {"labels": random.labels(self.tokens, self.vocabulary)}, [_one(random)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, weight = leaves
        return (F.cross_entropy(F.linear(x, weight), others["labels"]),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x, weight: flashtile.linear_cross_entropy(x, weight, others["labels"], backend=backend))

    def peers(self) -> dict[str, Build]:
        return {"liger": _liger_linear, "quack": _quack_linear}

    def bytes(self, phase: str) -> int:
        """x and weight, and their gradients."""
        return 2 * (self.tokens + self.vocabulary) * self.hidden * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """One product forward, two backward."""
        return 3 * 2 * self.tokens * self.hidden * self.vocabulary


def _one(random: Random) -> Tensor:
    """The gradient of a loss."""
    return torch.ones((), dtype=random.dtype, device=random.device)


def _liger(others: dict[str, Tensor]) -> Way:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return Way(lambda logits: liger_cross_entropy(logits, others["labels"]))


def _quack(others: dict[str, Tensor]) -> Way:
    from quack.cross_entropy import cross_entropy

    return Way(lambda logits: cross_entropy(logits, others["labels"], reduction="mean"))


def _liger_linear(others: dict[str, Tensor]) -> Way:
    """Sums of gradients in float32, as the others': in bfloat16, its default, they lose much over the chunks."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = {"accum_dtype": torch.float32}
    return Way(lambda x, weight: liger_fused_linear_cross_entropy(x, weight, others["labels"], **options))


def _quack_linear(others: dict[str, Tensor]) -> Way:
    """Without its search for tiles, which takes minutes."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return Way(lambda x, weight: chunked_linear_cross_entropy(x, weight, others["labels"], tuned=False))
