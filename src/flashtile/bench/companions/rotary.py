"""Cases of the rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import flashtile
from flashtile.bench.companions.case import Build, Case, Inputs, Random, Tensors, Way


@dataclass(frozen=True)
class Rotary(Case):
    """`flashtile.apply_rotary` of `[B, S, H, D]`, whole heads, pairs of elements D / 2 apart; tables in x's dtype."""

    B: int
    S: int
    H: int
    D: int

    op: ClassVar[str] = "rotary"

    def sizes(self) -> Sequence[str]:
        return (f"{self.B}x{self.S}x{self.H}x{self.D}",)

    def width(self) -> int:
        return self.S * self.H * self.D

    def make_inputs(self, random: Random) -> Inputs:
        shape = (self.B, self.S, self.H, self.D)
        frequencies = 1e4 ** -(torch.arange(self.D // 2, dtype=torch.float64, device=random.device) * 2 / self.D)
        angles = torch.arange(self.S, dtype=torch.float64, device=random.device)[:, None] * frequencies
        tables = {"cos": angles.cos().to(random.dtype), "sin": angles.sin().to(random.dtype)}
        return Inputs({"x": random.normal(*shape)}, tables, [random.normal(*shape)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, second = leaves[0].chunk(2, dim=-1)
        cos, sin = others["cos"][:, None], others["sin"][:, None]  # [S, 1, D / 2]
        return (torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.apply_rotary(x, others["cos"], others["sin"], backend=backend))

    def peers(self) -> dict[str, Build]:
        return {"liger": _liger, "quack": _quack}

    def bytes(self, phase: str) -> int:
        return (2 * self.B * self.width() + self.S * self.D) * self.torch_dtype.itemsize


def _liger(others: dict[str, Tensor]) -> Way:
    """It rotates queries and keys together, in place, as `[B, H, S, D]` views: half of the heads are the keys."""
    from liger_kernel.transformers.functional import liger_rope

    cos, sin = (torch.cat([others[name]] * 2, dim=-1)[None] for name in ("cos", "sin"))  # [1, S, D]

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def halves(tensors: Tensors) -> Tensors:
        return list(tensors[0].chunk(2, dim=2))

    def whole(tensors: Tensors) -> Tensors:
        return [torch.cat(tensors, dim=2)]

    return Way(
        function,
        own_leaves=halves,
        own_upstream=lambda tensors: [t.transpose(1, 2) for t in halves(tensors)],
        outputs=lambda tensors: whole([t.transpose(1, 2) for t in tensors]),
        gradients=whole,
    )


def _quack(others: dict[str, Tensor]) -> Way:
    from quack.rotary import apply_rotary_emb

    return Way(lambda x: apply_rotary_emb(x, others["cos"], others["sin"]))
