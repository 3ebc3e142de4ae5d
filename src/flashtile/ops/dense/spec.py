"""The meaning of a perceptron call: its scalars and tensors, and the eager reference, written to be read and not to be
fast.

With `R` rows of `K` columns, `F` hidden and `N` output columns::

    pre    = x weight1ᵀ + bias1                             [R, F], gated [R, 2F]
    hidden = act(pre)                                       [R, F]
    hidden = pre[:, :F] · act(pre[:, F:])                   gated: values first, then gates, as `F.glu` has them
    out    = hidden weight2ᵀ + bias2                        [R, N]

`pre` and `hidden` are rounded to the dtype of the tensors; products add up, and activations are computed, in float32
(float64 for float64).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.ops.common.rows import compute_dtype


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: name -> the activation in PyTorch's words.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "silu": F.silu,
}


class ActivationSpec(NamedTuple):
    """The meaning of what lies between the products: scalars only, hashable. `activation`: a name in `ACTIVATIONS`.
    `gated`: the second half of `pre` gates the first."""

    activation: str
    gated: bool

    def width(self, columns: int) -> int:
        """Columns of `hidden`, from those of `pre`."""
        return columns // 2 if self.gated else columns


class Wanted(NamedTuple):
    """The results of a backward pass between the products besides dpre: its sum over rows, and hidden."""

    wants_bias: bool
    wants_hidden: bool


class Activated(NamedTuple):
    """The tensor that is activated: `[R, F]`, gated `[R, 2F]`."""

    pre: Tensor


class Summed(NamedTuple):
    """The tensor that is summed over its rows: `[R, N]`."""

    x: Tensor


class ActivationUpstream(NamedTuple):
    """The tensors that the backward of an activation reads: the gradient of hidden `[R, F]`, and pre."""

    dhidden: Tensor
    pre: Tensor


class ActivationGradients(NamedTuple):
    """Results of a backward pass between the products. `dpre`: `[R, F]`, gated `[R, 2F]`. `dbias`: `[F]` or `[2F]`, the
    sum of dpre over rows, before it is rounded; None where it is not wanted. `hidden`: `[R, F]`, made again; None where
    it is not wanted."""

    dpre: Tensor
    dbias: Tensor | None
    hidden: Tensor | None


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, spec: ActivationSpec
) -> Tensor:
    """out `[R, N]`; shapes as in `spec`."""
    return F.linear(activate(Activated(F.linear(x, weight1, bias1)), spec), weight2, bias2)


def activate(given: Activated, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]` in the dtype of pre."""
    (pre,) = given
    value, factor = _value_and_factor(pre.to(compute_dtype(pre.dtype)), spec)
    return (factor if value is None else value * factor).to(pre.dtype)


def activate_backward(given: ActivationUpstream, spec: ActivationSpec, wanted: Wanted) -> ActivationGradients:
    """The gradient of pre, its sum over rows, and hidden once more."""
    dhidden, pre = given
    x, upstream = (t.to(compute_dtype(pre.dtype)) for t in (pre, dhidden))
    value, factor = _value_and_factor(x, spec)
    if value is None:
        dpre = _derivative(upstream, x, spec.activation)
    else:
        gate = x.chunk(2, dim=-1)[1]
        dpre = torch.cat((upstream * factor, _derivative(upstream * value, gate, spec.activation)), dim=-1)
    return ActivationGradients(
        dpre.to(pre.dtype),
        dpre.sum(dim=0).to(pre.dtype) if wanted.wants_bias else None,
        activate(Activated(pre), spec) if wanted.wants_hidden else None,
    )


def column_sum(given: Summed) -> Tensor:
    """The sum over rows, in the dtype of x."""
    (x,) = given
    return x.to(compute_dtype(x.dtype)).sum(dim=0).to(x.dtype)


def _value_and_factor(x: Tensor, spec: ActivationSpec) -> tuple[Tensor | None, Tensor]:
    """The gated values, or None, and the activation."""
    function = ACTIVATIONS[spec.activation]
    if not spec.gated:
        return None, function(x)
    value, gate = x.chunk(2, dim=-1)
    return value, function(gate)


def _derivative(upstream: Tensor, x: Tensor, activation: str) -> Tensor:
    """The gradient of x from that of its activation. No gradient passes where relu is 0, whatever it is."""
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
