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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.ops.common.rows import compute_dtype

_aten = torch.ops.aten


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _squared_relu_backward(upstream: Tensor, x: Tensor) -> Tensor:
    return _aten.threshold_backward(2 * upstream * x, x, 0)


def _silu_backward(upstream: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(upstream, x)
    s = torch.sigmoid(x)  # PyTorch's operator has no derivative
    return upstream * (s + x * s * (1 - s))


#: name -> the activation in PyTorch's words.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "silu": F.silu,
}
#: name -> (gradient of the result, argument) -> gradient of the argument. None passes where relu is 0, whatever it is.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(_aten.gelu_backward, approximate="tanh"),
    "gelu": _aten.gelu_backward,
    "relu": functools.partial(_aten.threshold_backward, threshold=0),
    "squared_relu": _squared_relu_backward,
    "silu": _silu_backward,
}


class ActivationSpec(NamedTuple):
    """The meaning of what lies between the products: scalars only, hashable. `activation`: a name in `ACTIVATIONS`.
    `gated`: the second half of `pre` gates the first."""

    activation: str
    gated: bool

    def width(self, columns: int) -> int:
        """Columns of `hidden`, from those of `pre`."""
        return columns // 2 if self.gated else columns


#: In the place of one, where nothing is activated.
NO_ACTIVATION = ActivationSpec("none", False)


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


def activate(given: Activated, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]` in the dtype of pre."""
    (pre,) = given
    x, function = pre.to(compute_dtype(pre.dtype)), ACTIVATIONS[spec.activation]
    if not spec.gated:
        return function(x).to(pre.dtype)
    value, gate = x.chunk(2, dim=-1)
    return (value * function(gate)).to(pre.dtype)


def activate_backward(given: ActivationUpstream, spec: ActivationSpec, wanted: Wanted) -> ActivationGradients:
    """The gradient of pre, its sum over rows, and hidden once more."""
    dhidden, pre = (t.to(compute_dtype(t.dtype)) for t in given)
    dpre, hidden = differentiate(dhidden, pre, spec, wanted.wants_hidden)
    dtype = given.pre.dtype
    dbias = dpre.sum(dim=0).to(dtype) if wanted.wants_bias else None
    return ActivationGradients(dpre.to(dtype), dbias, None if hidden is None else hidden.to(dtype))


def differentiate(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of rows of pre, and where it is wanted their activation, not rounded."""
    function, derivative = ACTIVATIONS[spec.activation], DERIVATIVES[spec.activation]
    if not spec.gated:
        return derivative(dhidden, pre), function(pre) if wants_hidden else None
    value, gate = pre.chunk(2, dim=-1)
    activated = function(gate)
    dpre = torch.cat((dhidden * activated, derivative(dhidden * value, gate)), dim=-1)
    return dpre, value * activated if wants_hidden else None


def column_sum(given: Summed) -> Tensor:
    """The sum over rows, in the dtype of x."""
    (x,) = given
    return x.to(compute_dtype(x.dtype)).sum(dim=0).to(x.dtype)
