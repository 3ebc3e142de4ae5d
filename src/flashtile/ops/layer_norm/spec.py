"""The meaning of a normalisation call: its scalars and tensors, and the eager reference, written to be read and not to
be fast.

One operation covers layer norm and RMS norm, alone or after dropout and addition. With `R` rows of `N` columns::

    h    = dropout(x0 · rowscale · rowscale_const · layerscale)        rows picked by x0_subset, others 0
    x    = h + dropout(x1) + residual                                  rounded to sum_dtype
    xhat = (x - mean) · rstd        or, for RMS norm,  x · rstd
    z    = xhat · weight + bias                                        rows picked by out_subset
    z1   = xhat · weight1 + bias1                                      where there is a weight1

`mean`, `rstd` and all arithmetic are float32 (float64 for float64 tensors). Tensors that a call leaves out are None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common.philox import keep_rows
from flashtile.ops.common.rows import compute_dtype

#: Longest row that any backend takes.
MAX_COLUMNS = 65536


class NormSpec(NamedTuple):
    """The meaning of a call: scalars only, hashable.

    Attributes:
        rms: RMS norm: no mean is subtracted.
        epsilon: added to the variance (to the mean square).
        dropout_p: probability that an element of x0, and of x1, is dropped, in [0, 1).
        rowscale_const: factor on x0.
        zero_centered: weights are stored as their difference from 1.
        sum_dtype: dtype of x.
        out_rows: rows of z and z1.
    """

    rms: bool
    epsilon: float
    dropout_p: float
    rowscale_const: float
    zero_centered: bool
    sum_dtype: torch.dtype
    out_rows: int


class Operands(NamedTuple):
    """The tensors of a forward call.

    Attributes:
        x0: `[R0, N]`; R0 = R without x0_subset.
        residual: `[R, N]` in sum_dtype.
        x1: `[R, N]` in x0's dtype.
        weight, bias, weight1, bias1: `[N]`.
        rowscale: `[R0]`.
        layerscale: `[N]`.
        x0_subset: `[R]` integers: 0 = no row of x0, i = its row i - 1.
        out_subset: `[R]` integers: 0 = not in z, i = its row i - 1. Rows of z that nothing names are 0.
        dropout_seed: `[2]` int64 (seed, offset), None where `dropout_p` is 0.
    """

    x0: Tensor
    residual: Tensor | None = None
    x1: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight1: Tensor | None = None
    bias1: Tensor | None = None
    rowscale: Tensor | None = None
    layerscale: Tensor | None = None
    x0_subset: Tensor | None = None
    out_subset: Tensor | None = None
    dropout_seed: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of x."""
        return (self.x0 if self.x0_subset is None else self.x0_subset).shape[0]


class Upstream(NamedTuple):
    """The tensors that a backward pass reads: the gradients of z, z1 and x, and what the forward saved. Shapes are as
    in `Operands`; there is an x0 only with a layerscale."""

    dz: Tensor
    dz1: Tensor | None
    dx: Tensor | None
    x: Tensor
    x0: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None
    rowscale: Tensor | None
    layerscale: Tensor | None
    x0_subset: Tensor | None
    out_subset: Tensor | None
    dropout_seed: Tensor | None


class Wanted(NamedTuple):
    """The gradients that a backward pass makes.

    Attributes:
        x0_rows: rows of x0.
        residual: there was a residual.
        x1: there was an x1.
        weights: of the weights, biases and the layerscale.
    """

    x0_rows: int
    residual: bool
    x1: bool
    weights: bool


class Normalised(NamedTuple):
    """Results of a forward pass: z, z1 `[out_rows, N]`, x `[R, N]` (None where it is x0), mean and rstd `[R]`."""

    z: Tensor
    z1: Tensor | None
    x: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Gradients(NamedTuple):
    """Results of a backward pass. The gradients of residual, x0 and x1 are that of the sum where they have
    none of their own."""

    dsum: Tensor | None = None
    dx0: Tensor | None = None
    dx1: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dweight1: Tensor | None = None
    dbias1: Tensor | None = None
    dlayerscale: Tensor | None = None


def flattened(operands: Operands) -> Operands:
    """Matrices as rows, row numbers and factors of rows as vectors."""
    columns = operands.x0.shape[-1]
    changes = {
        name: tensor.reshape(-1, columns) if name in ("x0", "residual", "x1") else tensor.reshape(-1)
        for name in ("x0", "residual", "x1", "rowscale", "x0_subset", "out_subset")
        if (tensor := getattr(operands, name)) is not None
    }
    return operands._replace(**changes)


def is_modified(tensors: Operands | Upstream, spec: NormSpec) -> bool:
    """Whether x0 reaches the sum other than as it is."""
    return (
        tensors.dropout_seed is not None
        or tensors.rowscale is not None
        or tensors.layerscale is not None
        or tensors.x0_subset is not None
        or spec.rowscale_const != 1.0
    )


def makes_sum(operands: Operands, spec: NormSpec) -> bool:
    """Whether x is a tensor of its own, and not x0."""
    return (
        operands.residual is not None
        or operands.x1 is not None
        or operands.x0.dtype is not spec.sum_dtype
        or is_modified(operands, spec)
    )


def present_results(operands: Operands, spec: NormSpec) -> tuple[bool, ...]:
    """True for each field of `Normalised` that a forward pass fills."""
    return True, operands.weight1 is not None, makes_sum(operands, spec), not spec.rms, True


def present_gradients(given: Upstream, spec: NormSpec, wanted: Wanted) -> tuple[bool, ...]:
    """True for each field of `Gradients` that a backward pass fills."""
    own = is_modified(given, spec) or given.dz.dtype is not spec.sum_dtype
    parameters = (given.weight, given.bias, given.weight1, given.bias1, given.layerscale)
    of_parameters = (wanted.weights and parameter is not None for parameter in parameters)
    return (wanted.residual or not own, own, own and wanted.x1, *of_parameters)


# --- the reference: differentiable to any order by autograd, and rounded where PyTorch rounds ------------------------


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
    x = pick(dropped(x, 0, operands, spec), operands.x0_subset)
    if operands.x1 is not None:
        x = x + dropped(operands.x1, 1, operands, spec)
    if operands.residual is not None:
        x = x + operands.residual
    return x.to(spec.sum_dtype)


def normalise(x: Tensor, spec: NormSpec) -> tuple[Tensor, Tensor | None, Tensor]:
    """xhat `[R, N]`, mean and rstd `[R]` in float32."""
    xhat, mean = x.to(compute_dtype(x.dtype)), None
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


def backward(given: Upstream, spec: NormSpec, wanted: Wanted) -> Gradients:
    """Gradients of the sum, of what was summed, and of the parameters; `mean` and `rstd` are made anew."""
    present, (dz, dz1, dx, *_) = present_gradients(given, spec, wanted), given
    xhat, _, rstd = normalise(given.x, spec)
    upstream = [pick(d.to(xhat.dtype), given.out_subset) for d in (dz, dz1) if d is not None]
    weights = [None if w is None else _effective(w, spec, xhat.dtype) for w in (given.weight, given.weight1)]
    dxhat = torch.stack([d if w is None else d * w for d, w in zip(upstream, weights)]).sum(dim=0)
    along = xhat * (dxhat * xhat).mean(dim=-1, keepdim=True)
    gradient = dxhat - along if spec.rms else dxhat - along - dxhat.mean(dim=-1, keepdim=True)
    gradient = gradient * rstd[:, None]
    if dx is not None:
        gradient = gradient + dx.to(gradient.dtype)

    into_x0 = put(gradient, given.x0_subset, wanted.x0_rows) * spec.rowscale_const
    if given.rowscale is not None:
        into_x0 = into_x0 * given.rowscale[:, None]
    into_x0 = dropped(into_x0, 0, given, spec)  # the gradient of layerscale · x0
    values = (
        gradient.to(spec.sum_dtype),
        (into_x0 if given.layerscale is None else into_x0 * given.layerscale).to(dz.dtype),
        dropped(gradient, 1, given, spec).to(dz.dtype),
        _sum(upstream[0] * xhat, given.weight),
        _sum(upstream[0], given.bias),
        _sum(upstream[-1] * xhat, given.weight1),
        _sum(upstream[-1], given.bias1),
        None if given.x0 is None else _sum(into_x0 * given.x0, given.layerscale),
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


def dropped(x: Tensor, stream: int, tensors: Operands | Upstream, spec: NormSpec) -> Tensor:
    """x without what dropout drops, and the rest scaled; x itself without dropout."""
    if tensors.dropout_seed is None:
        return x
    kept = keep_rows(tensors.dropout_seed, spec.dropout_p, stream, x.shape[0], x.shape[1])
    return torch.where(kept, x / (1 - spec.dropout_p), 0)


def _effective(weight: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + 1 if spec.zero_centered else weight.to(dtype)


def _sum(rows: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else rows.sum(dim=0).to(parameter.dtype)
