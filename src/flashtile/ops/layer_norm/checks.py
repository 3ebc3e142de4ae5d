"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.ops.common.checks import (
    as_float,
    check_device,
    check_float_dtype,
    check_lengths,
    check_tensors,
    finite_float,
    readable,
)
from flashtile.ops.common.sizes import differ, known
from flashtile.ops.layer_norm.spec import MAX_COLUMNS, NormSpec, Operands


def check_input(name: str, x: Tensor) -> None:
    """Checks the tensor whose last dimension is normalised."""
    check_tensors(**{name: x})
    check_float_dtype(name, x.dtype)
    if x.dim() < 1:
        raise ValueError(f"{name}: expected shape (..., hidden), got {tuple(x.shape)}; give it a last dimension")
    if not 1 <= x.shape[-1] <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected a last dimension from 1 to {MAX_COLUMNS}, got {x.shape[-1]}; it is what is normalised"
        )


def _check_like(name: str, tensor: Tensor, x: Tensor, of: str) -> None:
    """Checks type, device, and that float64 does not meet narrower types."""
    check_tensors(**{name: tensor})
    check_float_dtype(name, tensor.dtype)
    check_device(name, tensor, x.device, of)
    if (tensor.dtype is torch.float64) is not (x.dtype is torch.float64):
        raise TypeError(
            f"{name}: expected float64 exactly where {of} is, got {tensor.dtype} with {x.dtype}; cast one of them"
        )


def check_parameter(name: str, parameter: Tensor | None, x: Tensor, of: str) -> None:
    """Checks a vector over the normalised dimension."""
    if parameter is None:
        return
    _check_like(name, parameter, x, of)
    if parameter.shape != x.shape[-1:]:
        raise ValueError(
            f"{name}: expected shape ({x.shape[-1]},), the last dimension of {of}, got {tuple(parameter.shape)}"
        )


def check_summand(name: str, summand: Tensor | None, x0: Tensor, shape: tuple[int, ...], same_dtype: bool) -> None:
    """Checks a tensor that is added to x0: of `shape`, of any dtype or of x0's."""
    if summand is None:
        return
    _check_like(name, summand, x0, "x0")
    if differ(summand.shape, shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(summand.shape)}; expand or reshape it")
    if same_dtype and summand.dtype is not x0.dtype:
        raise TypeError(f"{name}: expected the dtype of x0, {x0.dtype}, got {summand.dtype}; cast one of them")


def check_rowscale(rowscale: Tensor | None, x0: Tensor) -> None:
    if rowscale is None:
        return
    _check_like("rowscale", rowscale, x0, "x0")
    if differ(rowscale.shape, x0.shape[:-1]):
        raise ValueError(
            f"rowscale: expected shape {tuple(x0.shape[:-1])}, one factor for each row of x0, "
            f"got {tuple(rowscale.shape)}; reshape it"
        )
    if rowscale.requires_grad:
        raise ValueError(
            "rowscale: expected a tensor that wants no gradient, got one with requires_grad=True; multiply x0 by it "
            "before the call, or detach it"
        )


def check_parallel(**excluded: object) -> None:
    """Checks what cannot be together with x1: `excluded` holds those arguments, None where absent."""
    for name, argument in excluded.items():
        if argument is not None:
            raise ValueError(f"{name}: expected None together with x1, got a value; scale x0 and x1 before the call")


def check_subset(name: str, subset: Tensor, device: torch.device) -> None:
    check_tensors(**{name: subset})
    check_lengths(name, subset.reshape(-1), subset.numel(), device, "one number for each row", "x0")


def check_rows(name: str, subset: Tensor, rows: int) -> None:
    if differ((subset.numel(),), (rows,)):
        raise ValueError(
            f"{name}: expected {rows} numbers, one for each row of the sum, got {subset.numel()} "
            f"in shape {tuple(subset.shape)}"
        )


def resolve_out_rows(out_subset: Tensor | None, out_numrows: int, rows: int) -> int:
    if isinstance(out_numrows, bool) or not isinstance(out_numrows, (int, torch.SymInt)):
        raise TypeError(f"out_numrows: expected an int, got {out_numrows!r}; pass the number of rows of the output")
    if out_subset is None:
        if not known(out_numrows == 0) and differ((out_numrows,), (rows,)):
            raise ValueError(f"out_numrows: expected 0 without out_subset, got {out_numrows}; leave it out")
        return rows
    if known(out_numrows < 0):
        raise ValueError(f"out_numrows: expected at least 0, got {out_numrows}; it is the number of rows of the output")
    return out_numrows


def resolve_sum_dtype(operands: Operands, residual_in_fp32: bool) -> torch.dtype:
    if operands.residual is not None:
        return operands.residual.dtype
    dtype = operands.x0.dtype
    return torch.float32 if residual_in_fp32 and dtype is not torch.float64 else dtype


def resolve_epsilon(name: str, epsilon: float) -> float:
    epsilon = as_float(name, epsilon)
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {epsilon}; 1e-5 is usual")
    return epsilon


def resolve_rowscale_const(rowscale_const: float, x0: Tensor) -> float:
    check_tensors(x0=x0)
    return finite_float("rowscale_const", rowscale_const, "1.0 changes nothing", dtype=x0.dtype)


def check_operands(operands: Operands, rowscale_const: float) -> torch.Size:
    """Checks the tensors; returns the shape of x."""
    x0 = operands.x0
    check_input("x0", x0)
    shape = x0.shape
    if operands.x0_subset is not None:
        check_subset("x0_subset", operands.x0_subset, x0.device)
        shape = torch.Size((*operands.x0_subset.shape, x0.shape[-1]))
    if operands.out_subset is not None:
        check_subset("out_subset", operands.out_subset, x0.device)
        check_rows("out_subset", operands.out_subset, math.prod(shape[:-1]))
    check_summand("residual", operands.residual, x0, shape, same_dtype=False)
    check_summand("x1", operands.x1, x0, shape, same_dtype=True)
    if operands.x1 is not None:
        check_parallel(
            rowscale=operands.rowscale,
            layerscale=operands.layerscale,
            x0_subset=operands.x0_subset,
            rowscale_const=None if rowscale_const == 1.0 else rowscale_const,
        )
    for name in ("weight", "bias", "weight1", "bias1", "layerscale"):
        check_parameter(name, getattr(operands, name), x0, "x0")
    if operands.bias1 is not None and operands.weight1 is None:
        raise ValueError("bias1: expected None without weight1, got a tensor; give weight1 for a second output")
    check_rowscale(operands.rowscale, x0)
    return shape


def check_values(operands: Operands, spec: NormSpec) -> None:
    """Checks the row numbers: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    for name, subset, rows in (
        ("x0_subset", operands.x0_subset, operands.x0.shape[0]),
        ("out_subset", operands.out_subset, spec.out_rows),
    ):
        if subset is not None and subset.numel() and readable(subset):
            _check_row_numbers(name, subset, rows)


def _check_row_numbers(name: str, subset: Tensor, rows: int) -> None:
    smallest, largest = int(subset.min()), int(subset.max())
    if smallest < 0 or largest > rows:
        raise ValueError(
            f"{name}: expected numbers from 1 to {rows}, or 0 for no row, got {smallest if smallest < 0 else largest}"
        )
    named = torch.bincount(subset, minlength=1)[1:]
    if named.numel() and int(named.max()) > 1:
        raise ValueError(
            f"{name}: expected each row at most once, got row {int(named.argmax()) + 1} {int(named.max())} times"
        )
