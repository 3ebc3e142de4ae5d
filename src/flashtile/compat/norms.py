"""Norms of flash_attn over `flashtile.dropout_add_layer_norm` and `dropout_add_rms_norm`, and by their definition.

The dropout-add-norm functions are those of flash_attn.ops in both versions; their masks are uint8, 1 = kept.
"""

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


def dropout_add_norm(
    rms: bool,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None,
    layerscale: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> Tensor | tuple[Tensor, ...]:
    """z, or (z, x with prenorm, mask with return_dropout_mask)."""
    results = fused_norm(rms)(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32,
        return_dropout_mask,
    )  # fmt: skip
    return _with_byte_masks(results, 1 if return_dropout_mask else 0)


def dropout_add_norm_subset(
    rms: bool,
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: Tensor | None,
    x0_subset: Tensor | None,
    out_subset: Tensor | None,
    rowscale_const: float,
    out_numrows: int,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> Tensor | tuple[Tensor, ...]:
    """The same with x0 for some rows of x only, and z of some; z and x are `[..., *x0.shape[1:]]`."""
    results = fused_norm(rms)(
        x0, residual, weight, bias, dropout_p, epsilon, None, layerscale, prenorm, residual_in_fp32,
        return_dropout_mask, x0_subset=x0_subset, out_subset=out_subset, rowscale_const=rowscale_const,
        out_numrows=out_numrows,
    )  # fmt: skip
    results = _with_byte_masks(results, 1 if return_dropout_mask else 0)
    if isinstance(results, Tensor):
        return _like_x0("z", results, x0)
    return tuple(_like_x0(name, result, x0) for name, result in zip(("z", "x" if prenorm else "mask", "mask"), results))


def _like_x0(name: str, result: Tensor, x0: Tensor) -> Tensor:
    """A result, whose rows are as many as it has, with the inner dimensions of x0."""
    inner, rows = x0.shape[1:], result.shape[:-1].numel()
    together = inner[:-1].numel()
    if together and rows % together:
        raise ValueError(
            f"out_subset, x0_subset: expected rows of {name} in a multiple of {together}, those of an entry of x0 "
            f"{list(x0.shape)}, got {rows}; flatten x0 to [rows, hidden]"
        )
    return result.reshape(rows // max(together, 1), *inner)


def dropout_add_norm_parallel(
    rms: bool,
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> tuple[Tensor | None, ...]:
    """(z0, z1, x with prenorm, two masks with return_dropout_mask); z1 is None without weight1."""
    results = fused_norm(rms)(
        x0, residual, weight0, bias0, dropout_p, epsilon, None, None, prenorm, residual_in_fp32, return_dropout_mask,
        x1=x1, weight1=weight1, bias1=bias1,
    )  # fmt: skip
    masks = 0 if not return_dropout_mask else 1 if x1 is None else 2
    results = _with_byte_masks(results, masks)
    results = results if isinstance(results, tuple) else (results,)
    if weight1 is None:
        results = (results[0], None, *results[1:])
    if return_dropout_mask and x1 is None:
        results = (*results, torch.ones_like(x0, dtype=torch.uint8))
    return results


def _with_byte_masks(results: Tensor | tuple[Tensor, ...], masks: int) -> Tensor | tuple[Tensor, ...]:
    """The last so many results as uint8."""
    if not masks or isinstance(results, Tensor):
        return results
    return (*results[:-masks], *(mask.to(torch.uint8) for mask in results[-masks:]))
