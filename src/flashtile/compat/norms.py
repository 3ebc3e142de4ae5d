"""flash_attn.ops.layer_norm, rms_norm, triton.layer_norm over flashtile's `dropout_add_layer_norm`, `…_rms_norm`.

Shapes are told there. Dropout masks are uint8, 1 = kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flashtile
from flashtile import modules
from flashtile.compat.calls import written
from flashtile.compat.signatures import VERSION_2

Results = Tensor | tuple[Tensor | None, ...]
RMSNorm: type[modules.RMSNorm]  # made of its table


def fused_norm(rms: bool) -> Callable[..., Any]:
    """The function of flashtile that has the norm in it."""
    return flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm


def _normed(rms: bool, **given: Any) -> Results:
    """z of `x = dropout(x0 · rowscale · layerscale) + residual`, or (z, x with prenorm, mask of dropout)."""
    results = fused_norm(rms)(**given)
    masks = 0 if not given["return_dropout_mask"] else 1 if given.get("x1") is None else 2
    if not masks:
        return results
    return *results[:-masks], *(mask.to(torch.uint8) for mask in results[-masks:])


def _normed_subset(rms: bool, **given: Any) -> Results:
    """The same with x0 for some rows of x only, and z of some rows; both are `[..., *x0.shape[1:]]`."""
    results, x0 = _normed(rms, **given), given["x0"]
    if isinstance(results, Tensor):
        return _like_x0("z", results, x0)
    names = ("z", "x" if given["prenorm"] else "mask", "mask")
    return tuple(_like_x0(name, result, x0) for name, result in zip(names, results) if result is not None)


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


def _normed_twice(rms: bool, weight0: Tensor, bias0: Tensor | None, **given: Any) -> Results:
    """Both norms of `x = dropout(x0) + dropout(x1) + residual`: (z0, z1, x with prenorm, two masks).

    z1 is None without weight1.
    """
    results = _normed(rms, weight=weight0, bias=bias0, **given)
    results = results if isinstance(results, tuple) else (results,)
    if given["weight1"] is None:
        results = (results[0], None, *results[1:])
    if given["return_dropout_mask"] and given["x1"] is None:
        results = (*results, torch.ones_like(given["x0"], dtype=torch.uint8))
    return results


def _serving(rms: bool, body: Callable[..., Results]) -> Callable[..., Any]:
    """A body for one of the norms."""
    made = partial(body, rms)
    made.__doc__ = body.__doc__
    return made


dropout_add_layer_norm, dropout_add_rms_norm = (_serving(rms, _normed) for rms in (False, True))
dropout_add_layer_norm_subset, dropout_add_rms_norm_subset = (_serving(rms, _normed_subset) for rms in (False, True))
dropout_add_layer_norm_parallel_residual, dropout_add_rms_norm_parallel_residual = (
    _serving(rms, _normed_twice) for rms in (False, True)
)


# ops.triton.layer_norm


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, x1: Tensor | None, eps: float,
    residual_in_fp32: bool, is_rms_norm: bool, return_dropout_mask: bool, out_dtype: torch.dtype | None,
    out: Tensor | None, residual_out: Tensor | None, **given: Any,
) -> Results:  # fmt: skip
    """Layer norm (or RMS norm) of `dropout(x · rowscale) + dropout(x1) + residual`.

    Args:
        x: `[..., hidden]`; other shapes as in `flashtile.dropout_add_layer_norm`.
        out_dtype: of the result, default that of x.
        out: a buffer that the result is written to, and that is returned.
        residual_out: likewise for the sum.

    Returns:
        y; where more is asked for (y, y1 with weight1, sum with prenorm, dropout masks of x and of x1). A mask is None
        without dropout, or without x1.
    """
    sum_dtype = x.dtype if not residual_in_fp32 or x.dtype is torch.float64 else torch.float32
    sum_dtype = sum_dtype if residual is None else residual.dtype
    # A result wider than x is computed from a wider x: it is then rounded once.
    wide = x.dtype if out_dtype is None else torch.promote_types(x.dtype, out_dtype)
    results = fused_norm(is_rms_norm)(
        x.to(wide), residual, weight, bias, epsilon=eps, residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask and given["dropout_p"] > 0, x1=None if x1 is None else x1.to(wide),
        **given,
    )  # fmt: skip
    results = list(results) if isinstance(results, tuple) else [results]
    normed, prenorm = 1 if given["weight1"] is None else 2, given["prenorm"]
    for index in range(normed):
        results[index] = results[index].to(out_dtype or x.dtype)
    results[0] = written("out", results[0], out)
    if prenorm:
        results[normed] = written("residual_out", results[normed].to(sum_dtype), residual_out)
    elif residual_out is not None:
        raise ValueError("residual_out: expected None with prenorm=False, got a tensor; there is no sum to write to it")
    if return_dropout_mask:
        results += [None] * (normed + prenorm + 2 - len(results))
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(**given: Any) -> Results:
    """As `layer_norm_fn` with `is_rms_norm=True`."""
    return layer_norm_fn(is_rms_norm=True, **given)


def _by_formula(
    rms: bool, x: Tensor, eps: float, dropout_p: float, prenorm: bool, zero_centered_weight: bool,
    dropout_mask: Tensor | None, dropout_mask1: Tensor | None, upcast: bool, **given: Tensor | None,
) -> Results:  # fmt: skip
    """The formula of `layer_norm_fn` and `rms_norm_fn` in PyTorch operations, in x's dtype, or with upcast in float32.

    The masks are those of dropout, True = kept; without them PyTorch draws its own.
    """
    if given["x1"] is not None and given["rowscale"] is not None:
        raise ValueError("rowscale: expected None with x1, got a tensor; scale x before")
    if upcast:
        given = {name: None if tensor is None else tensor.float() for name, tensor in given.items()}

    def dropped(x: Tensor, kept: Tensor | None) -> Tensor:
        if not dropout_p or kept is None:
            return F.dropout(x, dropout_p)
        return x.masked_fill(~kept, 0) / (1 - dropout_p)

    def normed(weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight + 1 if zero_centered_weight else weight
        if not rms:
            return F.layer_norm(total.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)
        scaled = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight
        return (scaled if bias is None else scaled + bias).to(x.dtype)

    total = x.float() if upcast else x
    rowscale, x1, residual = given["rowscale"], given["x1"], given["residual"]
    total = dropped(total if rowscale is None else total * rowscale.unsqueeze(-1), dropout_mask)
    total = total if x1 is None else total + dropped(x1, dropout_mask1)
    total = total if residual is None else (total + residual).to(total.dtype)
    pairs = [(given["weight"], given["bias"]), (given["weight1"], given["bias1"])]
    outputs = [normed(weight, bias) for weight, bias in pairs if weight is not None] + [total] * prenorm
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


layer_norm_ref, rms_norm_ref = (_serving(rms, _by_formula) for rms in (False, True))


def layer_norm_linear_fn(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, eps: float, prenorm: bool, is_rms_norm: bool, residual_in_fp32: bool,
) -> Results:  # fmt: skip
    """A norm of `x + residual` and a linear layer, `[..., hidden] -> [..., out]`; with prenorm also the sum.

    The linear layer runs in the dtype of x, or in that of `torch.autocast`.
    """
    normed, total = fused_norm(is_rms_norm)(
        x, residual, norm_weight, norm_bias, 0.0, eps, prenorm=True, residual_in_fp32=residual_in_fp32
    )
    bias = None if linear_bias is None else linear_bias.to(normed.dtype)
    out = flashtile.fused_dense(normed, linear_weight.to(normed.dtype), bias)
    return (out, total) if prenorm else out


class TritonRMSNorm(modules.RMSNorm):
    """RMS norm of the last dimension, hidden_size, after dropout (in training only) and addition; with
    zero_centered_weight the factor is `1 + weight`."""

    def __init__(
        self, hidden_size: int, eps: float, dropout_p: float, zero_centered_weight: bool, **place: Any
    ) -> None:
        self.zero_centered_weight = zero_centered_weight
        super().__init__(hidden_size, eps, **place)
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None

    def reset_parameters(self) -> None:
        assert self.weight is not None
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(self, x: Tensor, **given: Any) -> Any:  # type: ignore[override]
        """The norm of `dropout(x) + residual`, `[..., hidden]`; with prenorm also the sum."""
        dropout_p = self.drop.p if self.drop is not None and self.training else 0.0
        return rms_norm_fn(
            x=x, weight=self.weight, bias=None, eps=self.eps, dropout_p=dropout_p,
            zero_centered_weight=self.zero_centered_weight, **given,
        )  # fmt: skip


VERSION_2.serve(globals())
