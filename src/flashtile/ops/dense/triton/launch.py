"""Host side of the kernels between the matrix products: outputs, cut, and the launch. The backend module for
"triton"."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import Plan, constants_of, int32, make_plan, plan_cache, pointer, pointer_to
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.row_tiles import RowTile
from flashtile.ops.dense.spec import ActivationGradients, ActivationSpec
from flashtile.ops.dense.triton import kernels
from flashtile.ops.dense.triton.configs import REDUCE, activate_config, backward_config

_KERNELS = {
    "activate": kernels.activate_kernel,
    "activate_backward": kernels.activate_backward_kernel,
    "column_sum": kernels.column_sum_kernel,
    "reduce": kernels.reduce_kernel,
}
_COLUMN_SUM = ActivationSpec("none", False)


class SumPlan(NamedTuple):
    """The launches of what may sum columns.

    Attributes:
        main: programs that each store partial sums, if sums are wanted.
        reduce: adds them up; None where there is nothing to add.
    """

    main: Plan
    reduce: Plan | None


def activate(pre: Tensor, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]` of contiguous pre `[R, F]`, gated `[R, 2F]`."""
    rows, columns = pre.shape
    plan = _activate_plan(pre.dtype, rows, spec.width(columns), pre.data_ptr() & 15, spec, pre.device)
    (hidden,) = plan.allocate()
    plan.launch(pointer(pre), pointer(hidden))
    return hidden


def activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool
) -> ActivationGradients:
    """See `spec.ActivationGradients`; dhidden and pre are contiguous."""
    (rows, width), dtype, device = dhidden.shape, pre.dtype, pre.device
    misalignment = (dhidden.data_ptr() | pre.data_ptr()) & 15
    plan = _backward_plan("activate_backward", dtype, rows, width, misalignment, spec, wants_bias, wants_hidden, device)
    dpre, hidden, partial = plan.main.allocate()
    plan.main.launch(*map(pointer, (dhidden, pre, dpre, hidden, partial)))
    return ActivationGradients(dpre, None if partial is None else _reduced(partial, plan, dtype), hidden)


def column_sum(x: Tensor) -> Tensor:
    """The sum over rows of contiguous x `[R, N]`, in its dtype."""
    rows, width = x.shape
    plan = _backward_plan("column_sum", x.dtype, rows, width, x.data_ptr() & 15, _COLUMN_SUM, True, False, x.device)
    (partial,) = plan.main.allocate()
    plan.main.launch(pointer(x), pointer(partial))
    return _reduced(partial, plan, x.dtype)


def _reduced(partial: Tensor, plan: SumPlan, dtype: torch.dtype) -> Tensor:
    """The sum of partial sums `[splits, columns]`."""
    if plan.reduce is None:
        return torch.zeros(partial.shape[1], dtype=dtype, device=partial.device)
    (total,) = plan.reduce.allocate()
    plan.reduce.launch(pointer(partial), pointer(total))
    return total


@plan_cache
def _activate_plan(
    dtype: torch.dtype, rows: int, width: int, misalignment: int, spec: ActivationSpec, device: torch.device
) -> Plan:
    check_rows("x", rows)
    config = activate_config(max(width, 1), device_facts(device))
    programs = -(-rows // config.rows) * -(-width // config.block_n)
    outputs = (contiguous((rows, width), dtype),)
    return _plan("activate", dtype, width, misalignment, config, programs, device, {"rows": rows}, outputs, spec)


@plan_cache
def _backward_plan(
    kernel: str,
    dtype: torch.dtype,
    rows: int,
    width: int,
    misalignment: int,
    spec: ActivationSpec,
    sums_bias: bool,
    stores_hidden: bool,
    device: torch.device,
) -> SumPlan:
    """The plan of "activate_backward" or "column_sum"."""
    check_rows("x", rows)
    tensors = 1 if kernel == "column_sum" else 3 if spec.gated else 2
    config = backward_config(max(width, 1), spec.gated, tensors * dtype.itemsize, device_facts(device))
    strips, tiles = -(-width // config.block_n), -(-rows // config.rows)
    resident = multiprocessors(device) * config.programs_per_multiprocessor
    splits = min(tiles, max(1, resident // strips)) if strips else 0
    scalars, wanted = {"rows": rows, "splits": splits}, (sums_bias, stores_hidden)
    columns = 2 * width if spec.gated else width
    hidden = contiguous((rows, width), dtype) if stores_hidden else None
    partial = contiguous((splits, columns), torch.float32) if sums_bias else None
    outputs = (partial,) if kernel == "column_sum" else (contiguous((rows, columns), dtype), hidden, partial)
    main = _plan(kernel, dtype, width, misalignment, config, strips * splits, device, scalars, outputs, spec, *wanted)
    if not sums_bias or not splits:
        return SumPlan(main, None)
    strips, total = -(-columns // REDUCE.block_n), (contiguous((columns,), dtype),)
    return SumPlan(main, _plan("reduce", dtype, columns, 0, REDUCE, strips, device, {"splits": splits}, total))


def _plan(
    kernel: str,
    dtype: torch.dtype,
    width: int,
    misalignment: int,
    config: RowTile,
    programs: int,
    device: torch.device,
    scalars: dict[str, int],
    outputs: tuple[Layout | None, ...],
    spec: ActivationSpec = _COLUMN_SUM,
    sums_bias: bool = False,
    stores_hidden: bool = False,
) -> Plan:
    """`width`: columns of hidden, or of what is summed; `misalignment`: all addresses modulo 16, put together."""
    names = ("pre_ptr", "hidden_ptr", "dhidden_ptr", "dpre_ptr", "x_ptr", "sum_ptr")
    parameters = {
        **dict.fromkeys(names, pointer_to(dtype, power_of_two_factor(misalignment))),
        "partial_ptr": pointer_to(torch.float32, 16),
        **{name: int32(number) for name, number in scalars.items()},
    }
    constants: dict[str, Any] = {
        "WIDTH": width,
        **constants_of(config),
        "STAGES": config.num_stages,
        "ACTIVATION": spec.activation,
        "GATED": spec.gated,
        "SUMS_BIAS": sums_bias,
        "STORES_HIDDEN": stores_hidden,
    }
    return make_plan(_KERNELS[kernel], parameters, constants, programs, device, *config.compiled, outputs)
