"""The eager reference: the definition of the semantics, written to be read, not to be fast.

It works in any float dtype on any device, is differentiable to any order by PyTorch's autograd, forward and backward
pass alike, and imports no kernel.
"""

from __future__ import annotations

import math

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
    value, factor = _value_and_factor(pre.to(compute_dtype(pre.dtype)), spec)
    return (factor if value is None else value * factor).to(pre.dtype)


def activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool
) -> ActivationGradients:
    """The gradient of pre, its sum over rows, and hidden once more."""
    x, upstream = (t.to(compute_dtype(pre.dtype)) for t in (pre, dhidden))
    value, factor = _value_and_factor(x, spec)
    if value is None:
        dpre = _derivative(upstream, x, spec.activation)
    else:
        gate = x.chunk(2, dim=-1)[1]
        dpre = torch.cat((upstream * factor, _derivative(upstream * value, gate, spec.activation)), dim=-1)
    return ActivationGradients(
        dpre.to(pre.dtype),
        dpre.sum(dim=0).to(pre.dtype) if wants_bias else None,
        activate(pre, spec) if wants_hidden else None,
    )


def column_sum(x: Tensor) -> Tensor:
    """The sum over rows of x `[R, N]`, in its dtype."""
    return x.to(compute_dtype(x.dtype)).sum(dim=0).to(x.dtype)


def _value_and_factor(x: Tensor, spec: ActivationSpec) -> tuple[Tensor | None, Tensor]:
    """What is gated, or None, and the activation."""
    function = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return None, function(x)
    value, gate = x.chunk(2, dim=-1)
    return value, function(gate)


def _derivative(upstream: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x from that of its activation. Where relu is 0 no gradient passes, whatever it is."""
    if activation == "relu":
        return torch.where(x <= 0, 0, upstream)
    if activation == "squared_relu":
        return torch.where(x <= 0, 0, 2 * upstream * x)
    if activation == "silu":
        s = torch.sigmoid(x)
        return upstream * (s + x * s * (1 - s))
    if activation == "gelu_tanh":
        slope = math.sqrt(2 / math.pi)
        t = torch.tanh(slope * (x + 0.044715 * x**3))
        return upstream * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x))
    assert activation == "gelu"
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return upstream * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density)
