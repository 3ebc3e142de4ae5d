"""The dropout-add-norm functions of flash_attn.ops in both versions: masks are uint8, 1 = kept."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.compat.shared.norms import fused_norm


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
