"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.ops.common import checks
from flashtile.ops.common.sizes import differ, known
from flashtile.ops.layer_norm.spec import MAX_COLUMNS, NormSpec, Operands


def check_input(name: str, x: Tensor) -> None:
    """Checks the tensor whose last dimension is normalised."""
    checks.check_input(name, x, "(..., hidden)", "give it a last dimension")
    if not 1 <= x.shape[-1] <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected a last dimension from 1 to {MAX_COLUMNS}, got {x.shape[-1]}; it is what is normalised"
        )


def check_like(name: str, tensor: Tensor | None, x: Tensor, of: str, shape: tuple[int, ...], meaning: str) -> None:
    """Checks shape and device of a tensor beside x, and that float64 does not meet narrower types."""
    if tensor is None:
        return
    checks.check_shape(name, tensor, shape, meaning, "expand or reshape it")
    checks.check_float_dtype(name, tensor.dtype)
    checks.check_device(name, tensor, x.device, of)
    if (tensor.dtype is torch.float64) is not (x.dtype is torch.float64):
        raise TypeError(
            f"{name}: expected float64 exactly where {of} is, got {tensor.dtype} with {x.dtype}; cast one of them"
        )


def check_parameter(name: str, parameter: Tensor | None, x: Tensor, of: str) -> None:
    """Checks a vector over the normalised dimension."""
    check_like(name, parameter, x, of, x.shape[-1:], f"the last dimension of {of}")


def resolve_out_rows(out_subset: Tensor | None, out_numrows: int, rows: int) -> int:
    if not checks.is_integer(out_numrows):
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
    epsilon = checks.as_float(name, epsilon)
    if not 0.0 <= epsilon < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {epsilon}; 1e-5 is usual")
    return epsilon


def check_operands(operands: Operands, rowscale_const: float) -> torch.Size:
    """Checks the tensors; returns the shape of x."""
    x0, rowscale = operands.x0, operands.rowscale
    check_input("x0", x0)
    shape = x0.shape
    for name, subset in (("x0_subset", operands.x0_subset), ("out_subset", operands.out_subset)):
        if subset is not None:
            checks.check_tensors(**{name: subset})
            meaning = "one number for each row"
            checks.check_lengths(name, subset.reshape(-1), subset.numel(), x0.device, meaning, "x0")
    if operands.x0_subset is not None:
        shape = torch.Size((*operands.x0_subset.shape, x0.shape[-1]))
    rows = math.prod(shape[:-1])
    if operands.out_subset is not None and differ((operands.out_subset.numel(),), (rows,)):
        raise ValueError(
            f"out_subset: expected {rows} numbers, one for each row of the sum, got {operands.out_subset.numel()} "
            f"in shape {tuple(operands.out_subset.shape)}"
        )
    check_like("residual", operands.residual, x0, "x0", shape, "that of the sum")
    check_like("x1", operands.x1, x0, "x0", shape, "that of the sum")
    if operands.x1 is not None:
        checks.check_dtype("x1", operands.x1, x0.dtype, "x0")
        changed = None if rowscale_const == 1.0 else rowscale_const
        checks.refuse(
            "together with x1", "scale x0 and x1 before the call", rowscale=rowscale, layerscale=operands.layerscale,
            x0_subset=operands.x0_subset, rowscale_const=changed,
        )  # fmt: skip
    for name in ("weight", "bias", "weight1", "bias1", "layerscale"):
        check_parameter(name, getattr(operands, name), x0, "x0")
    if operands.bias1 is not None and operands.weight1 is None:
        raise ValueError("bias1: expected None without weight1, got a tensor; give weight1 for a second output")
    check_like("rowscale", rowscale, x0, "x0", x0.shape[:-1], "one factor for each row of x0")
    if rowscale is not None:
        checks.check_wants_no_gradient("rowscale", rowscale, remedy="multiply x0 by it before the call, or detach it")
    return shape


def check_values(operands: Operands, spec: NormSpec) -> None:
    """Checks the row numbers: always on a CPU, on a GPU with FLASHTILE_CHECK_VALUES=1."""
    for name, subset, rows in (
        ("x0_subset", operands.x0_subset, operands.x0.shape[0]), ("out_subset", operands.out_subset, spec.out_rows),
    ):  # fmt: skip
        if subset is None or not subset.numel() or not checks.readable(subset):
            continue
        smallest, largest = int(subset.min()), int(subset.max())
        if smallest < 0 or largest > rows:
            wrong = smallest if smallest < 0 else largest
            raise ValueError(f"{name}: expected numbers from 1 to {rows}, or 0 for no row, got {wrong}")
        named = torch.bincount(subset, minlength=1)[1:]
        if named.numel() and int(named.max()) > 1:
            raise ValueError(
                f"{name}: expected each row at most once, got row {int(named.argmax()) + 1} {int(named.max())} times"
            )
