"""The eager reference: the definition of the semantics, written to be read, not to be fast.

It works in any float dtype on any device, is differentiable to any order by PyTorch's autograd, forward and backward
pass alike, and imports no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.ops.dense.spec import ACTIVATIONS, ActivationGradients, ActivationSpec, compute_dtype


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, spec: ActivationSpec
) -> Tensor:
    """out `[R, N]`; shapes as in `spec`."""
    return F.linear(activate(F.linear(x, weight1, bias1), spec), weight2, bias2)


def activate(pre: Tensor, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]` in the dtype of pre."""
    return _activate(pre.to(compute_dtype(pre.dtype)), spec).to(pre.dtype)


def activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool
) -> ActivationGradients:
    """The gradient of pre, its sum over rows, and hidden once more."""
    dtype = compute_dtype(pre.dtype)
    differentiated: Any = torch.func.vjp(lambda pre: _activate(pre, spec), pre.to(dtype))
    hidden, pullback = differentiated
    (dpre,) = pullback(dhidden.to(dtype))
    return ActivationGradients(
        dpre.to(pre.dtype),
        dpre.sum(dim=0).to(pre.dtype) if wants_bias else None,
        hidden.to(pre.dtype) if wants_hidden else None,
    )


def column_sum(x: Tensor) -> Tensor:
    """The sum over rows of x `[R, N]`, in its dtype."""
    return x.to(compute_dtype(x.dtype)).sum(dim=0).to(x.dtype)


def _activate(pre: Tensor, spec: ActivationSpec) -> Tensor:
    function = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return function(pre)
    value, gate = pre.chunk(2, dim=-1)
    return value * function(gate)
