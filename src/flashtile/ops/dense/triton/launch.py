"""Host side of the kernels between the matrix products: outputs, cut, and the launch. The backend module for "triton".

All that a launch needs beside its pointers is a `Plan`, looked up under what the call looks like from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import empty
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.common.checks import check_rows
from flashtile.ops.dense.spec import ActivationGradients, ActivationSpec
from flashtile.ops.dense.triton import kernels
from flashtile.ops.dense.triton.configs import REDUCE, TileConfig, activate_config, backward_config

_KERNELS = {
    "activate": kernels.activate_kernel,
    "activate_backward": kernels.activate_backward_kernel,
    "column_sum": kernels.column_sum_kernel,
    "reduce": kernels.reduce_kernel,
}
_COLUMN_SUM = ActivationSpec("none", False)


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device. The number of rows is not part of it.

    Attributes:
        kernel: its name in `_KERNELS`.
        dtype: of the tensors; partial sums are float32.
        width: columns of hidden; of what is summed.
        spec: of the activation.
        sums_bias, stores_hidden: what a backward makes beside dpre.
        pointer_multiple: a power of two that divides all addresses.
        config: the cut.
    """

    kernel: str
    dtype: torch.dtype
    width: int
    spec: ActivationSpec
    sums_bias: bool
    stores_hidden: bool
    pointer_multiple: int
    config: TileConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`; launch is None for an empty matrix.

    Attributes:
        splits: partial sums of a column; 0 = there are none.
        reduce: adds them up: `reduce(reduce_programs, partial, sum, splits)`.
    """

    launch: Callable[..., None] | None = None
    programs: int = 0
    scalars: tuple[int, ...] = ()
    splits: int = 0
    reduce: Callable[..., None] | None = None
    reduce_programs: int = 0


def activate(pre: Tensor, spec: ActivationSpec) -> Tensor:
    """hidden `[R, F]` of contiguous pre `[R, F]`, gated `[R, 2F]`."""
    (rows, columns), device = pre.shape, pre.device
    width = spec.width(columns)
    hidden = empty((rows, width), (width, 1), pre.dtype, device)
    plan = _activate_plan(pre.dtype, rows, width, pre.data_ptr() & 15, spec, device)
    if plan.launch is not None:
        plan.launch(plan.programs, pointer(pre), pointer(hidden), *plan.scalars)
    return hidden


def activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool
) -> ActivationGradients:
    """See `spec.ActivationGradients`; dhidden and pre are contiguous."""
    (rows, width), columns, dtype, device = dhidden.shape, pre.shape[1], pre.dtype, pre.device
    misalignment = (dhidden.data_ptr() | pre.data_ptr()) & 15
    plan = _backward_plan("activate_backward", dtype, rows, width, misalignment, spec, wants_bias, wants_hidden, device)
    dpre = empty((rows, columns), (columns, 1), dtype, device)
    hidden = empty((rows, width), (width, 1), dtype, device) if wants_hidden else None
    partial = empty((plan.splits, columns), (columns, 1), torch.float32, device) if wants_bias else None
    if plan.launch is not None:
        plan.launch(plan.programs, *map(pointer, (dhidden, pre, dpre, hidden, partial)), *plan.scalars)
    return ActivationGradients(dpre, None if partial is None else _reduced(partial, plan, dtype), hidden)


def column_sum(x: Tensor) -> Tensor:
    """The sum over rows of contiguous x `[R, N]`, in its dtype."""
    (rows, width), device = x.shape, x.device
    plan = _backward_plan("column_sum", x.dtype, rows, width, x.data_ptr() & 15, _COLUMN_SUM, True, False, device)
    partial = empty((plan.splits, width), (width, 1), torch.float32, device)
    if plan.launch is not None:
        plan.launch(plan.programs, pointer(x), pointer(partial), *plan.scalars)
    return _reduced(partial, plan, x.dtype)


def _reduced(partial: Tensor, plan: Plan, dtype: torch.dtype) -> Tensor:
    """The sum of partial sums `[splits, columns]`."""
    columns, device = partial.shape[1], partial.device
    if plan.reduce is None:
        return torch.zeros(columns, dtype=dtype, device=device)
    total = empty((columns,), (1,), dtype, device)
    plan.reduce(plan.reduce_programs, pointer(partial), pointer(total), plan.splits)
    return total


@functools.lru_cache(maxsize=4096)
def _activate_plan(
    dtype: torch.dtype, rows: int, width: int, misalignment: int, spec: ActivationSpec, device: torch.device
) -> Plan:
    if not rows * width:
        return Plan()
    check_rows("x", rows)
    config = activate_config(width, device_facts(device))
    variant = Variant("activate", dtype, width, spec, False, False, power_of_two_factor(misalignment), config)
    return Plan(_launcher(variant, device), -(-rows // config.rows) * -(-width // config.block_n), (rows,))


@functools.lru_cache(maxsize=4096)
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
) -> Plan:
    """The plan of "activate_backward" or "column_sum"."""
    if not rows * width:
        return Plan()
    check_rows("x", rows)
    tensors = 1 if kernel == "column_sum" else 3 if spec.gated else 2
    config = backward_config(width, spec.gated, tensors * dtype.itemsize, device_facts(device))
    variant = Variant(kernel, dtype, width, spec, sums_bias, stores_hidden, power_of_two_factor(misalignment), config)
    strips, tiles = -(-width // config.block_n), -(-rows // config.rows)
    resident = multiprocessors(device) * config.programs_per_multiprocessor
    splits = min(tiles, max(1, resident // strips))
    launch = _launcher(variant, device)
    if not sums_bias:
        return Plan(launch, strips * splits, (rows, splits))
    columns = 2 * width if spec.gated else width
    reduce = _launcher(Variant("reduce", dtype, columns, _COLUMN_SUM, True, False, 16, REDUCE), device)
    return Plan(launch, strips * splits, (rows, splits), splits, reduce, -(-columns // REDUCE.block_n))


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function, config = _KERNELS[variant.kernel], variant.config
    constants = {
        "WIDTH": variant.width,
        "ROWS": config.rows,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "ACTIVATION": variant.spec.activation,
        "GATED": variant.spec.gated,
        "SUMS_BIAS": variant.sums_bias,
        "STORES_HIDDEN": variant.stores_hidden,
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    run_time = [_parameter(name, variant) for name in function.arg_names if name not in constants]
    types, multiples = zip(*run_time)
    return KernelSource(
        function, types, multiples, constants, config.num_warps, config.num_stages, config.max_registers
    )


def _parameter(name: str, variant: Variant) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    if name == "partial_ptr":
        return "*fp32", 16
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    return "i32", 1
