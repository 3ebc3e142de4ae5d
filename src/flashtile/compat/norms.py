"""flash_attn.ops.layer_norm and rms_norm over `flashtile.dropout_add_layer_norm` and `dropout_add_rms_norm`.

Shapes are told there. Dropout masks are uint8, 1 = kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.adapter import Names
from flashtile.compat.signatures import VERSION_2

_LAYER, _RMS = VERSION_2.modules["ops.layer_norm"], VERSION_2.modules["ops.rms_norm"]
Results = Tensor | tuple[Tensor | None, ...]


def fused_norm(rms: bool) -> Callable[..., Any]:
    """The function of flashtile that has the norm in it."""
    return flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Layer norm over the last dimension."""
    return flashtile.layer_norm(x, weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension."""
    return flashtile.rms_norm(x, weight, None, epsilon)


class RMSNorm(modules.RMSNorm):
    """`flashtile.rms_norm` with a weight.

    Args:
        hidden_size: the last dimension of the input.
        eps: added to the mean square.
        device, dtype: of the weight.
    """

    @_RMS.takes
    def __init__(self, hidden_size: int, eps: float, **place: Any) -> None:
        super().__init__(hidden_size, eps, **place)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x `[..., hidden]`."""
        return super().forward(x)


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


def _named(names: Names, name: str, rms: bool, body: Callable[..., Results]) -> Callable[..., Any]:
    return names.made(name, partial(body, rms), body.__doc__)


_PARALLEL = "parallel_residual"
dropout_add_layer_norm = _named(_LAYER, "dropout_add_layer_norm", False, _normed)
dropout_add_layer_norm_subset = _named(_LAYER, "dropout_add_layer_norm_subset", False, _normed_subset)
dropout_add_layer_norm_parallel_residual = _named(_LAYER, f"dropout_add_layer_norm_{_PARALLEL}", False, _normed_twice)
dropout_add_rms_norm = _named(_RMS, "dropout_add_rms_norm", True, _normed)
dropout_add_rms_norm_subset = _named(_RMS, "dropout_add_rms_norm_subset", True, _normed_subset)
dropout_add_rms_norm_parallel_residual = _named(_RMS, f"dropout_add_rms_norm_{_PARALLEL}", True, _normed_twice)
