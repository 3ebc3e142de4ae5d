"""The CPU backend: PyTorch's fused activations and derivatives over cached blocks of rows, in float32 (float64)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.dense import spec as formulas
from flashtile.ops.dense.spec import Activated, ActivationGradients, ActivationSpec, ActivationUpstream, Summed, Wanted

_aten = torch.ops.aten


def _squared_relu_backward(dhidden: Tensor, pre: Tensor) -> Tensor:
    return _aten.threshold_backward(2 * dhidden * pre, pre, 0)


#: name -> (gradient of the result, argument) -> gradient of the argument.
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(_aten.gelu_backward, approximate="tanh"),
    "gelu": _aten.gelu_backward,
    "relu": functools.partial(_aten.threshold_backward, threshold=0),
    "squared_relu": _squared_relu_backward,
    "silu": _aten.silu_backward,
}


def activate(given: Activated, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]`."""
    (pre,) = given
    hidden = pre.new_empty(pre.shape[0], spec.width(pre.shape[1]))
    function, dtype = formulas.ACTIVATIONS[spec.activation], compute_dtype(pre.dtype)
    for rows in row_blocks(*pre.shape):
        block = pre[rows].to(dtype)
        if spec.gated:
            value, gate = block.chunk(2, dim=1)
            hidden[rows] = function(gate).mul_(value)
        else:
            hidden[rows] = function(block)
    return hidden


def activate_backward(given: ActivationUpstream, spec: ActivationSpec, wanted: Wanted) -> ActivationGradients:
    """See `spec.ActivationGradients`."""
    (dhidden, pre), (wants_bias, wants_hidden) = given, wanted
    dtype = compute_dtype(pre.dtype)
    dpre, hidden = torch.empty_like(pre), torch.empty_like(dhidden) if wants_hidden else None
    dbias = pre.new_zeros(pre.shape[1], dtype=dtype) if wants_bias else None
    for rows in row_blocks(*pre.shape):
        gradient, activated = _differentiate(dhidden[rows].to(dtype), pre[rows].to(dtype), spec, wants_hidden)
        dpre[rows] = gradient
        if dbias is not None:
            dbias += gradient.sum(dim=0)
        if hidden is not None and activated is not None:
            hidden[rows] = activated
    return ActivationGradients(dpre, None if dbias is None else dbias.to(pre.dtype), hidden)


def _differentiate(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a block of pre, and its activation where it is wanted."""
    function, derivative = formulas.ACTIVATIONS[spec.activation], _DERIVATIVES[spec.activation]
    if not spec.gated:
        return derivative(dhidden, pre), function(pre) if wants_hidden else None
    value, gate = pre.chunk(2, dim=1)
    activated, gradient = function(gate), torch.empty_like(pre)
    dvalue, dgate = gradient.chunk(2, dim=1)
    torch.mul(dhidden, activated, out=dvalue)
    dgate.copy_(derivative(dhidden * value, gate))
    return gradient, activated.mul_(value) if wants_hidden else None


def column_sum(given: Summed) -> Tensor:
    """The sum over rows, in the dtype of x; PyTorch adds up in float32."""
    return given.x.sum(dim=0)
