"""The CPU backend: PyTorch's fused activations and derivatives over cached blocks of rows, in float32 (float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.dense import spec as formulas
from flashtile.ops.dense.spec import Activated, ActivationGradients, ActivationSpec, ActivationUpstream, Summed, Wanted


def activate(given: Activated, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]`."""
    (pre,) = given
    hidden = pre.new_empty(pre.shape[0], spec.width(pre.shape[1]))
    for rows in row_blocks(*pre.shape):
        hidden[rows] = formulas.activate(Activated(pre[rows]), spec)
    return hidden


def activate_backward(given: ActivationUpstream, spec: ActivationSpec, wanted: Wanted) -> ActivationGradients:
    """See `spec.ActivationGradients`."""
    (dhidden, pre), (wants_bias, wants_hidden) = given, wanted
    dtype = compute_dtype(pre.dtype)
    dpre, hidden = torch.empty_like(pre), torch.empty_like(dhidden) if wants_hidden else None
    dbias = pre.new_zeros(pre.shape[1], dtype=dtype) if wants_bias else None
    for rows in row_blocks(*pre.shape):
        gradient, activated = formulas.differentiate(dhidden[rows].to(dtype), pre[rows].to(dtype), spec, wants_hidden)
        dpre[rows] = gradient
        if dbias is not None:
            dbias += gradient.sum(dim=0)
        if hidden is not None and activated is not None:
            hidden[rows] = activated
    return ActivationGradients(dpre, None if dbias is None else dbias.to(pre.dtype), hidden)


def column_sum(given: Summed) -> Tensor:
    """The sum over rows, in the dtype of x; PyTorch adds up in float32."""
    return given.x.sum(dim=0)
