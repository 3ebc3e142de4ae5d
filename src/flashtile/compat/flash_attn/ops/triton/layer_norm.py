"""flash_attn.ops.triton.layer_norm over `flashtile.dropout_add_layer_norm` and `dropout_add_rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flashtile
from flashtile.compat.norms import fused_norm, norm_fn, norm_ref


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """Layer norm (or RMS norm) of `dropout(x · rowscale) + dropout(x1) + residual`.

    Args:
        x: `[..., hidden]`; other shapes as in `flashtile.dropout_add_layer_norm`.
        out_dtype: of the result, default that of x.
        out: a buffer that the result is written to, and that is returned.
        residual_out: likewise for the sum.

    Returns:
        y; where more is asked for (y, y1 with weight1, sum with prenorm, dropout masks of x and of x1).
    """
    return norm_fn(
        is_rms_norm, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, zero_centered_weight, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Tensor | tuple[Tensor | None, ...]:
    """As `layer_norm_fn` with `is_rms_norm=True`."""
    return norm_fn(
        True, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, zero_centered_weight, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The formula of `layer_norm_fn` in PyTorch operations, in x's dtype, or with upcast in float32."""
    return norm_ref(
        False, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The formula of `rms_norm_fn` in PyTorch operations, in x's dtype, or with upcast in float32."""
    return norm_ref(
        True, x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        zero_centered_weight, dropout_mask, dropout_mask1, upcast,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """A norm of `x + residual` and a linear layer, `[..., hidden] -> [..., out]`; with prenorm also the sum.

    The linear layer runs in the dtype of x, or in that of `torch.autocast`.
    """
    results = fused_norm(is_rms_norm)(
        x, residual, norm_weight, norm_bias, 0.0, eps, prenorm=prenorm, residual_in_fp32=residual_in_fp32
    )
    normed = results[0] if prenorm else results
    weight = linear_weight.to(normed.dtype)
    out = flashtile.fused_dense(normed, weight, None if linear_bias is None else linear_bias.to(normed.dtype))
    assert isinstance(out, Tensor)
    return (out, results[1]) if prenorm else out


class RMSNorm(nn.Module):
    """RMS norm after dropout and addition; dropout in training only.

    Args:
        hidden_size: the last dimension of the input.
        eps: added to the mean square.
        dropout_p: probability that an element of x is dropped.
        zero_centered_weight: the factor is `1 + weight`.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.zero_centered_weight = zero_centered_weight
        self.plain_rms_norm = type(self).forward is RMSNorm.forward and not (dropout_p or zero_centered_weight)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """The norm of `dropout(x) + residual`, `[..., hidden]`; with prenorm also the sum."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, dropout_p=dropout_p, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip
