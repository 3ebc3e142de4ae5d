"""The eager reference: the definition of the semantics, written to be read, not to be fast.

It works in any float dtype on any device, is differentiable to any order by PyTorch's autograd, forward and backward
pass alike, and imports no kernel. The sum is rounded where PyTorch rounds; the norm runs in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.philox import keep_rows
from flashtile.ops.layer_norm.spec import (
    Gradients,
    Normalised,
    NormSpec,
    Operands,
    Saved,
    Wanted,
    makes_sum,
    present_gradients,
    statistics_dtype,
)


def forward(operands: Operands, spec: NormSpec) -> Normalised:
    """z, x and statistics. Shapes as in `Operands`."""
    x = add(operands, spec) if makes_sum(operands, spec) else None
    xhat, mean, rstd = normalise(operands.x0 if x is None else x, spec)
    z = output(xhat, operands.weight, operands.bias, operands, spec)
    z1 = None if operands.weight1 is None else output(xhat, operands.weight1, operands.bias1, operands, spec)
    return Normalised(z, z1, x, mean, rstd)


def add(operands: Operands, spec: NormSpec) -> Tensor:
    """x `[R, N]`: scales, dropout and sum."""
    x = operands.x0
    if operands.rowscale is not None:
        x = x * operands.rowscale[:, None]
    if spec.rowscale_const != 1.0:
        x = x * spec.rowscale_const
    if operands.layerscale is not None:
        x = x * operands.layerscale
    x = pick(_dropped(x, 0, operands, spec), operands.x0_subset)
    if operands.x1 is not None:
        x = x + _dropped(operands.x1, 1, operands, spec)
    if operands.residual is not None:
        x = x + operands.residual
    return x.to(spec.sum_dtype)


def normalise(x: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor | None, Tensor]:
    """xhat `[R, N]`, mean and rstd `[R]` in float32."""
    xhat, mean = x.to(statistics_dtype(x.dtype)), None
    if not spec.rms:
        mean = xhat.mean(dim=-1)
        xhat = xhat - mean[:, None]
    rstd = torch.rsqrt(xhat.square().mean(dim=-1) + spec.epsilon)
    return xhat * rstd[:, None], mean, rstd


def output(xhat: Tensor, weight: Tensor | None, bias: Tensor | None, operands: Operands, spec: NormSpec) -> Tensor:
    """z `[out_rows, N]` in x0's dtype."""
    z = xhat
    if weight is not None:
        z = z * _effective(weight, spec, z.dtype)
    if bias is not None:
        z = z + bias.to(z.dtype)
    return put(z.to(operands.x0.dtype), operands.out_subset, spec.out_rows)


def backward(
    dz: Tensor, dz1: Tensor | None, dx: Tensor | None, saved: Saved, spec: NormSpec, wanted: Wanted
) -> Gradients:
    """Gradients of the sum, of what was summed, and of the parameters; `mean` and `rstd` are made anew."""
    present = present_gradients(dz, saved, spec, wanted)
    xhat, _, rstd = normalise(saved.x, spec)
    upstream = [pick(d.to(xhat.dtype), saved.out_subset) for d in (dz, dz1) if d is not None]
    weights = [None if w is None else _effective(w, spec, xhat.dtype) for w in (saved.weight, saved.weight1)]
    dxhat = torch.stack([d if w is None else d * w for d, w in zip(upstream, weights)]).sum(dim=0)
    along = xhat * (dxhat * xhat).mean(dim=-1, keepdim=True)
    gradient = dxhat - along if spec.rms else dxhat - along - dxhat.mean(dim=-1, keepdim=True)
    gradient = gradient * rstd[:, None]
    if dx is not None:
        gradient = gradient + dx.to(gradient.dtype)

    into_x0 = put(gradient, saved.x0_subset, wanted.x0_rows) * spec.rowscale_const
    if saved.rowscale is not None:
        into_x0 = into_x0 * saved.rowscale[:, None]
    into_x0 = _dropped(into_x0, 0, saved, spec)  # the gradient of layerscale · x0
    values = (
        gradient.to(spec.sum_dtype),
        (into_x0 if saved.layerscale is None else into_x0 * saved.layerscale).to(dz.dtype),
        _dropped(gradient, 1, saved, spec).to(dz.dtype),
        _sum(upstream[0] * xhat, saved.weight),
        _sum(upstream[0], saved.bias),
        _sum(upstream[-1] * xhat, saved.weight1),
        _sum(upstream[-1], saved.bias1),
        None if saved.x0 is None else _sum(into_x0 * saved.x0, saved.layerscale),
    )
    return Gradients(*(value if there else None for value, there in zip(values, present, strict=True)))


def pick(matrix: Tensor, subset: Tensor | None) -> Tensor:
    """Rows of a matrix by number from 1; 0 is a row of zeros."""
    if subset is None:
        return matrix
    return torch.cat((matrix.new_zeros(1, matrix.shape[1]), matrix)).index_select(0, subset.long())


def put(matrix: Tensor, subset: Tensor | None, rows: int) -> Tensor:
    """The inverse of `pick`: each row at its number from 1, those of number 0 nowhere, and zeros elsewhere."""
    if subset is None:
        return matrix
    return matrix.new_zeros(rows + 1, matrix.shape[1]).index_copy(0, subset.long(), matrix)[1:].clone()


def _dropped(x: Tensor, stream: int, tensors: Operands | Saved, spec: NormSpec) -> Tensor:
    if tensors.dropout_seed is None:
        return x
    return x * keep_rows(tensors.dropout_seed, spec.dropout_p, stream, x.shape[0], x.shape[1]) / (1 - spec.dropout_p)


def _effective(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + 1 if spec.zero_centered else weight.to(dtype)


def _sum(rows: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else rows.sum(dim=0).to(parameter.dtype)
