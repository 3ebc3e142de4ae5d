"""The CPU backend: blocks of elements that stay in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.gate.spec import GateGradients, GateInputs, GateSpec, GateUpstream


def forward(inputs: GateInputs, spec: GateSpec) -> Tensor:
    x, y = (t.view(-1) for t in inputs)
    out, dtype = torch.empty_like(x), compute_dtype(x.dtype)
    for some in row_blocks(x.numel(), 1):
        out[some] = x[some].to(dtype).mul(spec.scale).tanh_().mul_(y[some])
    return out.view(inputs.x.shape)


def backward(given: GateUpstream, spec: GateSpec) -> GateGradients:
    dout, x, y = (t.view(-1) for t in given)
    dx, dy, dtype = torch.empty_like(x), torch.empty_like(x), compute_dtype(x.dtype)
    for some in row_blocks(x.numel(), 1):
        upstream, gate = dout[some].to(dtype), x[some].to(dtype).mul(spec.scale).tanh_()
        dy[some] = upstream * gate
        dx[some] = gate.square_().neg_().add_(1).mul_(upstream).mul_(y[some]).mul_(spec.scale)
    return GateGradients(dx.view(given.x.shape), dy.view(given.x.shape))
