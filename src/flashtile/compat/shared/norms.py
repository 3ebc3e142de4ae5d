"""Norms of flash_attn over `flashtile.dropout_add_layer_norm` and `dropout_add_rms_norm`, and by their definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile


def fused_norm(rms: bool) -> Callable[..., Any]:
    """The function of flashtile that has the norm in it."""
    return flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm


def norm_fn(
    rms: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    zero_centered_weight: bool,
    return_dropout_mask: bool,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    residual_out: Tensor | None,
) -> Tensor | tuple[Tensor | None, ...]:
    """`layer_norm_fn` and `rms_norm_fn` of flash_attn.ops.triton.layer_norm.

    Returns:
        y; where more is asked for (y, y1 with weight1, sum with prenorm, and two dropout masks, None without dropout or
        without x1).
    """
    sum_dtype = x.dtype if not residual_in_fp32 or x.dtype is torch.float64 else torch.float32
    sum_dtype = sum_dtype if residual is None else residual.dtype
    # A result wider than x is computed from a wider x: it is then rounded once.
    wide = x.dtype if out_dtype is None else torch.promote_types(x.dtype, out_dtype)
    masks = return_dropout_mask and dropout_p > 0
    results = fused_norm(rms)(
        x.to(wide), residual, weight, bias, dropout_p, eps, rowscale, None, prenorm, residual_in_fp32, masks,
        x1=None if x1 is None else x1.to(wide), weight1=weight1, bias1=bias1, zero_centered_weight=zero_centered_weight,
    )  # fmt: skip
    results = list(results) if isinstance(results, tuple) else [results]
    normed = 1 if weight1 is None else 2
    for index in range(normed):
        results[index] = results[index].to(out_dtype or x.dtype)
    results[0] = _written("out", results[0], out)
    if prenorm:
        results[normed] = _written("residual_out", results[normed].to(sum_dtype), residual_out)
    elif residual_out is not None:
        raise ValueError("residual_out: expected None with prenorm=False, got a tensor; there is no sum to write to it")
    if return_dropout_mask:
        results += [None] * (normed + prenorm + 2 - len(results))
    return results[0] if len(results) == 1 else tuple(results)


def _written(name: str, result: Tensor, buffer: Tensor | None) -> Tensor:
    """The result, in a buffer where there is one."""
    if buffer is None:
        return result
    if buffer.shape != result.shape or buffer.dtype is not result.dtype:
        raise ValueError(
            f"{name}: expected {result.dtype} {list(result.shape)}, got {buffer.dtype} {list(buffer.shape)}; the "
            "result is written to it"
        )
    return buffer.copy_(result)


def norm_ref(
    rms: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    zero_centered_weight: bool,
    dropout_mask: Tensor | None,
    dropout_mask1: Tensor | None,
    upcast: bool,
) -> Tensor | tuple[Tensor, ...]:
    """`layer_norm_ref` and `rms_norm_ref`: the same formulas in PyTorch operations.

    The masks are those of dropout, True = kept; without them PyTorch draws its own.
    """
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale: expected None with x1, got a tensor; scale x before")
    dtype = x.dtype
    tensors = [x, weight, bias, residual, x1, weight1, bias1, rowscale]
    if upcast:
        tensors = [None if tensor is None else tensor.float() for tensor in tensors]
    total, weight, bias, residual, x1, weight1, bias1, rowscale = tensors  # type: ignore[assignment]
    assert total is not None and weight is not None
    if rowscale is not None:
        total = total * rowscale.unsqueeze(-1)
    total = _dropped(total, dropout_p, dropout_mask)
    if x1 is not None:
        total = total + _dropped(x1, dropout_p, dropout_mask1)
    if residual is not None:
        total = (total + residual).to(total.dtype)
    outputs = [_normed(rms, total, weight, bias, eps, zero_centered_weight).to(dtype)]
    if weight1 is not None:
        outputs.append(_normed(rms, total, weight1, bias1, eps, zero_centered_weight).to(dtype))
    if prenorm:
        outputs.append(total)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _dropped(x: Tensor, dropout_p: float, kept: Tensor | None) -> Tensor:
    if not dropout_p:
        return x
    if kept is None:
        return F.dropout(x, dropout_p)
    return x.masked_fill(~kept, 0) / (1 - dropout_p)


def _normed(
    rms: bool, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_weight: bool
) -> Tensor:
    weight = weight + 1 if zero_centered_weight else weight
    if not rms:
        return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return scaled if bias is None else scaled + bias
