"""What a normalisation call means, apart from the numbers in its tensors.

One operation covers layer norm and RMS norm, alone or after dropout and addition. With `R` rows of `N` columns::

    h    = dropout(x0 · rowscale · rowscale_const · layerscale)        rows picked by x0_subset, others 0
    x    = h + dropout(x1) + residual                                  rounded to sum_dtype
    xhat = (x - mean) · rstd        or, for RMS norm,  x · rstd
    z    = xhat · weight + bias                                        rows picked by out_subset
    z1   = xhat · weight1 + bias1                                      where there is a weight1

`mean`, `rstd` and all arithmetic are float32 (float64 for float64 tensors). What is left out of a call is None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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


class Saved(NamedTuple):
    """The tensors that a backward pass reads; shapes as in `Operands`, x0 only where there is a layerscale."""

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
    """Which gradients a backward pass makes.

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
    """Results of a backward pass. The gradients of residual, x0 and x1 are dx where they have none of their own."""

    dx: Tensor | None = None
    dx0: Tensor | None = None
    dx1: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dweight1: Tensor | None = None
    dbias1: Tensor | None = None
    dlayerscale: Tensor | None = None


def is_modified(tensors: Operands | Saved, spec: NormSpec) -> bool:
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


def present_gradients(dz: Tensor, saved: Saved, spec: NormSpec, wanted: Wanted) -> tuple[bool, ...]:
    """Which fields of `Gradients` a backward pass fills."""
    own = is_modified(saved, spec) or dz.dtype is not spec.sum_dtype
    parameters = (saved.weight, saved.bias, saved.weight1, saved.bias1, saved.layerscale)
    of_parameters = (wanted.weights and parameter is not None for parameter in parameters)
    return (wanted.residual or not own, own, own and wanted.x1, *of_parameters)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
