"""The CPU backend: PyTorch's own fused layer norm where it has one, else blocks of rows that stay in cache, in float32
(float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.layer_norm import spec as formulas
from flashtile.ops.layer_norm.spec import (
    Gradients,
    Normalised,
    NormSpec,
    Operands,
    Upstream,
    Wanted,
    dropped,
    pick,
    put,
)


def forward(operands: Operands, spec: NormSpec) -> Normalised:
    """See `spec`. Shapes as in `Operands`."""
    x = _add(operands, spec) if formulas.makes_sum(operands, spec) else None
    # Outputs come in the dtype of what is normalised, so that must not be narrower than x0.
    summed = operands.x0 if x is None else x.to(torch.promote_types(x.dtype, operands.x0.dtype))
    z, mean, rstd = _output(summed, operands.weight, operands.bias, spec)
    z1 = None
    if operands.weight1 is not None:
        z1, _, _ = _output(summed, operands.weight1, operands.bias1, spec)
        z1 = put(z1.to(operands.x0.dtype), operands.out_subset, spec.out_rows)
    return Normalised(put(z.to(operands.x0.dtype), operands.out_subset, spec.out_rows), z1, x, mean, rstd)


def backward(given: Upstream, spec: NormSpec, wanted: Wanted) -> Gradients:
    """See `spec.Gradients`."""
    present, (dz, dz1, dx, *_) = formulas.present_gradients(given, spec, wanted), given
    gradient, dweight, dbias = _norm_backward(dz, given.weight, given.bias, given, spec, wanted)
    dweight1 = dbias1 = None
    if dz1 is not None:
        of_second, dweight1, dbias1 = _norm_backward(dz1, given.weight1, given.bias1, given, spec, wanted)
        gradient += of_second
    if dx is not None:
        gradient += dx
    dsum = gradient.to(spec.sum_dtype) if present[0] else None
    dx1 = dropped(gradient, 1, given, spec).to(dz.dtype) if present[2] else None
    dx0 = dlayerscale = None
    if present[1]:
        # If dsum is the same memory, it must not change.
        dx0, dlayerscale = _x0_gradients(
            gradient.clone() if dsum is gradient else gradient, dz.dtype, given, spec, wanted
        )
    of_parameters = {"dweight1": dweight1, "dbias1": dbias1, "dlayerscale": dlayerscale}
    return Gradients(dsum, dx0, dx1, dweight, dbias, **of_parameters)


def _add(operands: Operands, spec: NormSpec) -> Tensor:
    """x `[R, N]` in sum_dtype."""
    x0, residual, x1 = operands.x0, operands.residual, operands.x1
    if not formulas.is_modified(operands, spec) and x1 is None:
        return x0.to(spec.sum_dtype) if residual is None else torch.add(x0, residual).to(spec.sum_dtype)
    x = x0.to(compute_dtype(x0.dtype), copy=True)
    if operands.rowscale is not None:
        x *= operands.rowscale[:, None]
    if operands.layerscale is not None:
        x *= operands.layerscale
    x = pick(dropped(x, 0, operands, spec), operands.x0_subset)
    if spec.rowscale_const != 1.0:
        x *= spec.rowscale_const
    if x1 is not None:
        x += dropped(x1.to(x.dtype), 1, operands, spec)
    if residual is not None:
        x += residual
    return x.to(spec.sum_dtype)


def _output(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm of x in x's dtype, mean and rstd `[R]`."""
    weight, bias = _parameters(x, weight, bias, spec)
    if spec.rms:
        return _rms(x, weight, bias, spec)
    z, mean, rstd = torch.native_layer_norm(x, x.shape[1:], weight, bias, spec.epsilon)
    return z, mean.view(-1), rstd.view(-1)


def _parameters(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as PyTorch's kernels take them. Parameters in float32 make those keep float32 statistics."""
    dtype = compute_dtype(x.dtype)
    if weight is not None:
        weight = weight.to(dtype) + 1 if spec.zero_centered else weight.to(dtype)
    elif x.dtype is not dtype:
        weight = x.new_ones(x.shape[1], dtype=dtype)
    return weight, None if bias is None else bias.to(dtype)


def _rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor | None, Tensor]:
    z, rstd = torch.empty_like(x), x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype))
    for rows in row_blocks(*x.shape):
        block = x[rows].to(rstd.dtype)
        squares = torch.linalg.vector_norm(block, dim=1).square_().div_(x.shape[1])
        rstd[rows] = squares.add_(spec.epsilon).rsqrt_()
        block = block * rstd[rows, None]
        if weight is not None:
            block *= weight
        if bias is not None:
            block += bias
        z[rows] = block
    return z, None, rstd


def _norm_backward(
    dz: Tensor, weight: Tensor | None, bias: Tensor | None, given: Upstream, spec: NormSpec, wanted: Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the norm of x for one output: x's in float32, weight's and bias's in their dtypes."""
    x, dz = given.x, pick(dz, given.out_subset)
    of_weight, of_bias = (wanted.weights and parameter is not None for parameter in (weight, bias))
    full_weight, _ = _parameters(x, weight, bias, spec)
    if spec.rms:
        dx, dweight, dbias = _rms_backward(dz, x, given.rstd, full_weight, of_weight, of_bias)
    else:
        dx, dweight, dbias = _layer_backward(dz, given, full_weight, of_weight, of_bias)
    return (
        dx,
        dweight.to(weight.dtype) if of_weight and weight is not None else None,
        dbias.to(bias.dtype) if of_bias and bias is not None else None,
    )


def _layer_backward(
    dz: Tensor, given: Upstream, weight: Tensor | None, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own, in float32: given narrow tensors, it would add up the parameters' gradients in their dtype."""
    x, mean, rstd = given.x, given.mean, given.rstd
    assert mean is not None
    if weight is None and of_bias:
        weight = rstd.new_ones(x.shape[1])

    def differentiate(rows: slice) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm_backward(
            dz[rows].to(rstd.dtype),
            x[rows].to(rstd.dtype),
            x.shape[1:],
            mean[rows, None],
            rstd[rows, None],
            weight,
            weight,  # stands for the bias, of which only the dtype counts
            output_mask=[True, of_weight, of_bias],
        )

    if x.dtype is rstd.dtype or not x.shape[0]:
        dx, dweight, dbias = differentiate(slice(None))
        return dx, dweight, dbias
    dx = torch.empty_like(x, dtype=rstd.dtype)
    dweight, dbias = (x.new_zeros(x.shape[1], dtype=rstd.dtype) for _ in range(2))
    for rows in row_blocks(*x.shape):
        dx[rows], of_block, of_block_bias = differentiate(rows)
        if of_weight:
            dweight += of_block
        if of_bias:
            dbias += of_block_bias
    return dx, dweight, dbias


def _rms_backward(
    dz: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, dtype=rstd.dtype)
    dweight, dbias = (x.new_zeros(x.shape[1], dtype=rstd.dtype) for _ in range(2))
    for rows in row_blocks(*x.shape):
        upstream = dz[rows].to(rstd.dtype)
        xhat = x[rows].to(rstd.dtype) * rstd[rows, None]
        if of_bias:
            dbias += upstream.sum(dim=0)
        if of_weight:
            dweight += (upstream * xhat).sum(dim=0)
        if weight is not None:
            upstream = upstream * weight
        along = torch.linalg.vecdot(upstream, xhat).div_(x.shape[1])
        dx[rows] = upstream.addcmul(xhat, along[:, None], value=-1).mul_(rstd[rows, None])
    return dx, dweight, dbias


def _x0_gradients(
    gradient: Tensor, dtype: torch.dtype, given: Upstream, spec: NormSpec, wanted: Wanted
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x0 and of layerscale, from that of the sum, which is overwritten."""
    dx0 = gradient
    if spec.rowscale_const != 1.0:
        dx0 *= spec.rowscale_const
    dx0 = put(dx0, given.x0_subset, wanted.x0_rows)
    if given.rowscale is not None:
        dx0 *= given.rowscale[:, None]
    dx0 = dropped(dx0, 0, given, spec)
    dlayerscale = None
    if given.layerscale is not None:
        if wanted.weights and given.x0 is not None:
            dlayerscale = torch.linalg.vecdot(dx0, given.x0.to(dx0.dtype), dim=0).to(given.layerscale.dtype)
        dx0 *= given.layerscale
    return dx0.to(dtype), dlayerscale
