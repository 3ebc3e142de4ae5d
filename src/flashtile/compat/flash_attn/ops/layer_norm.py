"""flash_attn.ops.layer_norm over `flashtile.layer_norm` and `dropout_add_layer_norm`.

Shapes as in `flashtile.dropout_add_layer_norm`. Dropout masks are uint8, 1 = kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.norms import (
    dropout_add_norm,
    dropout_add_norm_parallel,
    dropout_add_norm_subset,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Layer norm over the last dimension."""
    return flashtile.layer_norm(x, weight, bias, epsilon)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """z of `x = dropout(x0 · rowscale · layerscale) + residual`, or (z, x with prenorm, mask of dropout)."""
    return dropout_add_norm(
        False, x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32,
        return_dropout_mask,
    )  # fmt: skip


def dropout_add_layer_norm_subset(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: Tensor | None = None,
    x0_subset: Tensor | None = None,
    out_subset: Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The same with x0 for some rows of x only, and z of some rows; both are `[..., *x0.shape[1:]]`."""
    return dropout_add_norm_subset(
        False, x0, residual, weight, bias, dropout_p, epsilon, layerscale, x0_subset, out_subset, rowscale_const,
        out_numrows, prenorm, residual_in_fp32, return_dropout_mask,
    )  # fmt: skip


def dropout_add_layer_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> tuple[Tensor | None, ...]:
    """Both norms of `x = dropout(x0) + dropout(x1) + residual`: (z0, z1, x with prenorm, two masks).

    z1 is None without weight1.
    """
    return dropout_add_norm_parallel(
        False, x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm, residual_in_fp32,
        return_dropout_mask,
    )  # fmt: skip


class DropoutAddLayerNorm(modules.DropoutAddLayerNorm):
    """`flashtile.modules.DropoutAddLayerNorm`; dropout in training only."""

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, prenorm, p, eps, residual_in_fp32, device, dtype)
