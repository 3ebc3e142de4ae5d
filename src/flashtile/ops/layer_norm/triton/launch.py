"""Host side of the norm kernels: outputs, cut, and the launch. The backend module for "triton".

All that a launch needs beside its pointers is a `Plan`, looked up under what the call looks like from outside. A call
like an earlier one costs no decision and no compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import empty
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.philox import keep_threshold
from flashtile.ops.layer_norm.spec import (
    Gradients,
    Normalised,
    NormSpec,
    Operands,
    Saved,
    Wanted,
    makes_sum,
    present_gradients,
)
from flashtile.ops.layer_norm.triton import backward as backward_kernels
from flashtile.ops.layer_norm.triton import forward as forward_kernels
from flashtile.ops.layer_norm.triton.configs import REDUCE, RowConfig, backward_config, forward_config

_KERNELS = {
    "forward": forward_kernels.norm_forward_kernel,
    "forward_looped": forward_kernels.norm_forward_looped_kernel,
    "backward": backward_kernels.norm_backward_kernel,
    "backward_looped": backward_kernels.norm_backward_looped_kernel,
    "reduce": backward_kernels.norm_reduce_kernel,
}


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device. The number of rows is not part of it.

    Attributes:
        kernel: its name in `_KERNELS`.
        dtypes: of the kernel's pointers in order, None for a tensor that is not there.
        flags: values of the kernel's constants in order, without those of the config.
        width: columns of a row: known, so that masks and offsets become constants.
        pointer_multiple: a power of two that divides all addresses.
        stride_multiple: a power of two that divides all row strides.
        config: the cut.
    """

    kernel: str
    dtypes: tuple[torch.dtype | None, ...]
    flags: tuple[bool | float, ...]
    width: int
    pointer_multiple: int
    stride_multiple: int
    config: RowConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float, ...]
    sums: int = 0
    reduce: Callable[..., None] | None = None


def forward(operands: Operands, spec: NormSpec) -> Normalised:
    """Runs the forward kernel. Operands as the operator gives them: rows contiguous in themselves."""
    x0, residual, x1, weight, bias, weight1, bias1, rowscale, layerscale, x0_subset, out_subset, seed = operands
    rows, width, device = operands.rows, x0.shape[1], x0.device
    sums = makes_sum(operands, spec)
    plan = _forward_plan(
        _dtypes(operands), rows, width, _row_strides(x0, x1, residual), _misalignment(operands), sums, spec, device
    )
    z = _matrix(spec.out_rows, width, x0.dtype, device, zero=out_subset is not None)
    z1 = None if weight1 is None else _matrix(spec.out_rows, width, x0.dtype, device, zero=out_subset is not None)
    x = _matrix(rows, width, spec.sum_dtype, device) if sums else None
    mean = None if spec.rms else empty((rows,), (1,), torch.float32, device)
    rstd = empty((rows,), (1,), torch.float32, device)
    if plan.programs:
        tensors = (x0, x1, residual, weight, bias, weight1, bias1, rowscale, layerscale, x0_subset, out_subset, seed)
        plan.launch(plan.programs, *map(pointer, (*tensors, z, z1, x, mean, rstd)), *plan.scalars)
    return Normalised(z, z1, x, mean, rstd)


def backward(
    dz: Tensor, dz1: Tensor | None, dx: Tensor | None, saved: Saved, spec: NormSpec, wanted: Wanted
) -> Gradients:
    """Runs the backward kernel, and where there are gradients of parameters, the one that adds their parts."""
    x, x0, mean, rstd, weight, _, weight1, _, rowscale, layerscale, x0_subset, out_subset, seed = saved
    (rows, width), device = x.shape, x.device
    present = present_gradients(dz, saved, spec, wanted)
    plan = _backward_plan(
        (dz.dtype, None if dx is None else dx.dtype, *_dtypes(saved)),
        present,
        rows,
        width,
        _row_strides(dz, dz1, dx, x, x0),
        _misalignment((dz, dz1, dx, *saved)),
        spec,
        device,
    )
    dsum = _matrix(rows, width, spec.sum_dtype, device) if present[0] else None
    dx0 = _matrix(wanted.x0_rows, width, dz.dtype, device, zero=x0_subset is not None) if present[1] else None
    dx1 = _matrix(rows, width, dz.dtype, device) if present[2] else None
    partial = empty((plan.sums, plan.programs, width), (plan.programs * width, width, 1), torch.float32, device)
    if plan.programs:
        tensors = (dz, dz1, dx, x, x0, mean, rstd, weight, weight1, rowscale, layerscale, x0_subset, out_subset, seed)
        plan.launch(plan.programs, *map(pointer, (*tensors, dsum, dx0, dx1, partial)), *plan.scalars)
    parameters = (saved.weight, saved.bias, saved.weight1, saved.bias1, layerscale)
    sums = [
        empty((width,), (1,), parameter.dtype, device) if there and parameter is not None else None
        for parameter, there in zip(parameters, present[3:], strict=True)
    ]
    if plan.reduce is not None and plan.programs:
        plan.reduce(-(-width // REDUCE.block_n), *map(pointer, (partial, *sums)), plan.programs)
    elif plan.sums:
        sums = [None if total is None else total.zero_() for total in sums]
    return Gradients(dsum, dx0, dx1, *sums)


def _matrix(rows: int, width: int, dtype: torch.dtype, device: torch.device, zero: bool = False) -> Tensor:
    if zero:
        return torch.zeros(rows, width, dtype=dtype, device=device)
    return empty((rows, width), (width, 1), dtype, device)


def _dtypes(tensors: Sequence[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in tensors)


def _row_strides(*matrices: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if t is None else t.stride(0) for t in matrices)


def _misalignment(tensors: Sequence[Tensor | None]) -> int:
    """Addresses modulo 16, put together: 0 where all are multiples of 16."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses & 15


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    dtypes: tuple[torch.dtype | None, ...],
    rows: int,
    width: int,
    strides: tuple[int, ...],
    misalignment: int,
    sums: bool,
    spec: NormSpec,
    device: torch.device,
) -> Plan:
    """`dtypes` of the operands; `strides` of the rows of x0, x1 and residual."""
    check_rows("x0", rows)
    names = dict(zip(Operands._fields, dtypes))
    config = forward_config(width, device_facts(device))
    scaled = _scales(names, spec)
    # As the kernel's constants: what is there of x1, residual, weight, bias, weight1, bias1, rowscale, layerscale and
    # the subsets; then the rest.
    optional = (
        *("x1", "residual", "weight", "bias", "weight1", "bias1", "rowscale", "layerscale"),
        *("x0_subset", "out_subset"),
    )
    flags = (
        *(names[name] is not None for name in optional),
        *(scaled, spec.dropout_p > 0, sums, spec.rms, float(spec.zero_centered)),
    )
    pointers = (
        *(names["x0"], names["x1"], names["residual"], names["weight"], names["bias"], names["weight1"]),
        *(names["bias1"], names["rowscale"], names["layerscale"], names["x0_subset"], names["out_subset"]),
        *(names["dropout_seed"], names["x0"], names["weight1"] and names["x0"], spec.sum_dtype if sums else None),
        *(None if spec.rms else torch.float32, torch.float32),
    )
    kernel = "forward_looped" if config.looped(width) else "forward"
    variant = Variant(
        kernel, pointers, flags, width, power_of_two_factor(misalignment), power_of_two_factor(*strides), config
    )
    scalars = (*strides, rows, keep_threshold(spec.dropout_p), *_scale_factors(spec), spec.epsilon)
    return Plan(_launcher(variant, device), -(-rows // config.rows), scalars)


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    dtypes: tuple[torch.dtype | None, ...],
    present: tuple[bool, ...],
    rows: int,
    width: int,
    strides: tuple[int, ...],
    misalignment: int,
    spec: NormSpec,
    device: torch.device,
) -> Plan:
    """`dtypes` of dz, dx and the saved tensors; `strides` of the rows of dz, dz1, dx, x and x0."""
    names = dict(zip(("dz", "dx", *Saved._fields), dtypes))
    sums = present[3:]
    dz_dtype, dx_dtype, sum_dtype = names["dz"], names["dx"], names["x"]
    assert dz_dtype is not None and sum_dtype is not None
    dz1_dtype = names["weight1"] and dz_dtype
    loaded = [dtype for dtype in (dz_dtype, dz1_dtype, dx_dtype, sum_dtype, names["x0"]) if dtype is not None]
    bytes_per_column = sum(dtype.itemsize for dtype in loaded)
    config = backward_config(width, sum(sums), bytes_per_column, spec.dropout_p > 0, device_facts(device))
    optional = ("weight", "weight1", "rowscale", "layerscale", "x0_subset", "out_subset")
    flags = (
        *(dx_dtype is not None, *present[:3]),
        *(names[name] is not None for name in optional),
        *(_scales(names, spec), spec.dropout_p > 0, spec.rms, float(spec.zero_centered), *sums),
    )
    pointers = (
        *(dz_dtype, dz1_dtype, dx_dtype, sum_dtype, names["x0"], names["mean"], names["rstd"], names["weight"]),
        *(names["weight1"], names["rowscale"], names["layerscale"], names["x0_subset"], names["out_subset"]),
        *(names["dropout_seed"], sum_dtype if present[0] else None, dz_dtype if present[1] else None),
        *(dz_dtype if present[2] else None, torch.float32),
    )
    kernel = "backward_looped" if config.looped(width) else "backward"
    variant = Variant(
        kernel, pointers, flags, width, power_of_two_factor(misalignment), power_of_two_factor(*strides), config
    )
    tiles = -(-rows // config.rows)
    programs = min(tiles, multiprocessors(device) * config.programs_per_multiprocessor)
    scalars = (*strides, rows, keep_threshold(spec.dropout_p), *_scale_factors(spec))
    reduce = None
    if any(sums):
        of_parameters = ("weight", "bias", "weight1", "bias1", "layerscale")
        outputs = tuple(names[name] if there else None for name, there in zip(of_parameters, sums, strict=True))
        reduce = _launcher(Variant("reduce", (torch.float32, *outputs), sums, width, 16, 16, REDUCE), device)
    return Plan(_launcher(variant, device), programs, scalars, sum(sums), reduce)


def _scales(names: dict[str, torch.dtype | None], spec: NormSpec) -> bool:
    """Whether x0 is multiplied on its way into the sum."""
    factors = any(names[name] is not None for name in ("rowscale", "layerscale"))
    return factors or spec.dropout_p > 0 or spec.rowscale_const != 1.0


def _scale_factors(spec: NormSpec) -> tuple[float, float]:
    """Of x0 and of x1."""
    keep_scale = 1 / (1 - spec.dropout_p)
    return spec.rowscale_const * keep_scale, keep_scale


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function, config = _KERNELS[variant.kernel], variant.config
    names = function.arg_names
    pointers = [name for name in names if name.endswith("_ptr")]
    constants = {"WIDTH": variant.width, "ROWS": config.rows, "BLOCK_N": config.block_n}
    if "STAGES" in names:
        constants["STAGES"] = config.num_stages
    flags = [name for name in names if name.isupper() and name not in constants]
    constants.update(zip(flags, variant.flags, strict=True))
    dtypes = dict(zip(pointers, variant.dtypes, strict=True))
    run_time = [_parameter(name, dtypes, variant) for name in names if name not in constants]
    types, multiples = zip(*run_time)
    return KernelSource(
        function, types, multiples, constants, config.num_warps, config.num_stages, config.max_registers
    )


def _parameter(name: str, dtypes: dict[str, torch.dtype | None], variant: Variant) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    if name in dtypes:
        return "*" + ELEMENT_TYPES[dtypes[name] or torch.float32], variant.pointer_multiple
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return ("fp32" if name.startswith("scale_") or name == "epsilon" else "i32"), 1
