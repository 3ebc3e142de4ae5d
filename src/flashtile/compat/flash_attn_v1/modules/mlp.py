"""flash_attn.modules.mlp of version 1: the perceptrons of flashtile.modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile import modules
from flashtile.compat.flash_attn.ops.fused_dense import FusedMLP
from flashtile.modules import Mlp

__all__ = ["FusedMLP", "GatedMlp", "Mlp"]


class GatedMlp(modules.GatedMlp):
    """`flashtile.modules.GatedMlp`, whose hidden features are a multiple of 256."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 256,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, hidden_features, out_features, activation, bias1, bias2, multiple_of, return_residual, device,
            dtype,
        )  # fmt: skip
