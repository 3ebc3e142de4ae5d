"""The meaning of a gate, `out = tanh(scale · x) · y`: its scalars and tensors, and the eager reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype


class GateSpec(NamedTuple):
    scale: float


class GateInputs(NamedTuple):
    """x and y, of one shape and dtype."""

    x: Tensor
    y: Tensor


class GateUpstream(NamedTuple):
    """The tensors that the backward reads: the gradient of out, and what the forward saved."""

    dout: Tensor
    x: Tensor
    y: Tensor


class GateGradients(NamedTuple):
    dx: Tensor
    dy: Tensor


def forward(inputs: GateInputs, spec: GateSpec) -> Tensor:
    x, y = (t.to(compute_dtype(t.dtype)) for t in inputs)
    return (torch.tanh(x * spec.scale) * y).to(inputs.x.dtype)


def backward(given: GateUpstream, spec: GateSpec) -> GateGradients:
    dout, x, y = (t.to(compute_dtype(t.dtype)) for t in given)
    gate = torch.tanh(x * spec.scale)
    dx = dout * y * (1 - gate * gate) * spec.scale
    return GateGradients(dx.to(given.x.dtype), (dout * gate).to(given.x.dtype))
