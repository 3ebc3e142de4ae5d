"""Host side of the norm kernels: outputs, cut, and the launch. The backend module for "triton"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import device_facts, multiprocessors
from flashtile._backends.launch import (
    Parameter,
    Plan,
    constants_of,
    float32,
    int32,
    int64,
    make_plan,
    plan_cache,
    pointer,
    pointer_to,
)
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.philox import keep_threshold
from flashtile.ops.common.row_tiles import RowTile
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
from flashtile.ops.layer_norm.triton.configs import REDUCE, backward_config, forward_config

#: Inputs whose gradients are sums over rows.
_SUMMED = ("weight", "bias", "weight1", "bias1", "layerscale")


class BackwardPlan(NamedTuple):
    """The launches of a backward.

    Attributes:
        main: its programs each store partial sums of columns.
        reduce: adds these up; None where there are none.
    """

    main: Plan
    reduce: Plan | None


def forward(operands: Operands, spec: NormSpec) -> Normalised:
    """Runs the forward kernel. Operands as the operator gives them: rows contiguous in themselves."""
    x0, residual, x1, weight, bias, weight1, bias1, rowscale, layerscale, x0_subset, out_subset, seed = operands
    rows, width, device = operands.rows, x0.shape[1], x0.device
    sums = makes_sum(operands, spec)
    plan = _forward_plan(
        _dtypes(operands), rows, width, _row_strides(x0, x1, residual), _misalignment(operands), sums, spec, device
    )
    z, z1, x, mean, rstd = plan.allocate()
    if out_subset is not None:
        _fill_with_zeros(z, z1)
    tensors = (x0, x1, residual, weight, bias, weight1, bias1, rowscale, layerscale, x0_subset, out_subset, seed)
    plan.launch(*map(pointer, (*tensors, z, z1, x, mean, rstd)))
    return Normalised(z, z1, x, mean, rstd)


def backward(
    dz: Tensor, dz1: Tensor | None, dx: Tensor | None, saved: Saved, spec: NormSpec, wanted: Wanted
) -> Gradients:
    """Runs the backward kernel, and where there are gradients of parameters, the one that adds their parts."""
    x, x0, mean, rstd, weight, _, weight1, _, rowscale, layerscale, x0_subset, out_subset, seed = saved
    (rows, width), device = x.shape, x.device
    present = present_gradients(dz, saved, spec, wanted)
    main, reduce = _backward_plan(
        (dz.dtype, None if dx is None else dx.dtype, *_dtypes(saved)),
        present,
        rows,
        width,
        _row_strides(dz, dz1, dx, x, x0),
        _misalignment((dz, dz1, dx, *saved)),
        wanted.x0_rows,
        spec,
        device,
    )
    dsum, dx0, dx1, partial = main.allocate()
    if x0_subset is not None:
        _fill_with_zeros(dx0)
    tensors = (dz, dz1, dx, x, x0, mean, rstd, weight, weight1, rowscale, layerscale, x0_subset, out_subset, seed)
    main.launch(*map(pointer, (*tensors, dsum, dx0, dx1, partial)))
    if reduce is None:
        return Gradients(dsum, dx0, dx1)
    sums = reduce.allocate()
    if main.programs:
        reduce.launch(*map(pointer, (partial, *sums)))
    else:
        _fill_with_zeros(*sums)
    return Gradients(dsum, dx0, dx1, *sums)


def _fill_with_zeros(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()


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


@plan_cache
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
    tensors = names | {
        "z": names["x0"],
        "z1": names["weight1"] and names["x0"],
        "x": spec.sum_dtype if sums else None,
        "mean": None if spec.rms else torch.float32,
        "rstd": torch.float32,
    }
    parameters = {
        **_parameters(tensors, dict(zip(("x0", "x1", "residual"), strides)), misalignment, rows, spec),
        "epsilon": float32(spec.epsilon),
    }
    constants = _constants(names, width, spec, config)
    kernels = forward_kernels.norm_forward_kernel, forward_kernels.norm_forward_looped_kernel
    programs = -(-rows // config.rows)
    out = spec.out_rows, width
    outputs = _outputs(tensors, {"z": out, "z1": out, "x": (rows, width), "mean": (rows,), "rstd": (rows,)})
    return make_plan(kernels[config.looped(width)], parameters, constants, programs, device, *config.compiled, outputs)


@plan_cache
def _backward_plan(
    dtypes: tuple[torch.dtype | None, ...],
    present: tuple[bool, ...],
    rows: int,
    width: int,
    strides: tuple[int, ...],
    misalignment: int,
    x0_rows: int,
    spec: NormSpec,
    device: torch.device,
) -> BackwardPlan:
    """`dtypes` of dz, dx and the saved tensors; `strides` of the rows of dz, dz1, dx, x and x0."""
    names = dict(zip(("dz", "dx", *Saved._fields), dtypes))
    stores_dsum, stores_dx0, stores_dx1, *sums = present
    dz_dtype, sum_dtype = names["dz"], names["x"]
    assert dz_dtype is not None and sum_dtype is not None
    tensors = names | {
        "dz1": names["weight1"] and dz_dtype,
        "dsum": sum_dtype if stores_dsum else None,
        "dx0": dz_dtype if stores_dx0 else None,
        "dx1": dz_dtype if stores_dx1 else None,
        "partial": torch.float32,
    }
    loaded = [dtype for dtype in map(tensors.get, ("dz", "dz1", "dx", "x", "x0")) if dtype is not None]
    bytes_per_column = sum(dtype.itemsize for dtype in loaded)
    config = backward_config(width, sum(sums), bytes_per_column, spec.dropout_p > 0, device_facts(device))
    summed = {f"SUMS_{name.upper()}": there for name, there in zip(_SUMMED, sums, strict=True)}
    constants = {**_constants(names, width, spec, config), **summed, "STAGES": config.num_stages}
    parameters = _parameters(tensors, dict(zip(("dz", "dz1", "dx", "x", "x0"), strides)), misalignment, rows, spec)
    programs = min(-(-rows // config.rows), multiprocessors(device) * config.programs_per_multiprocessor)
    kernels = backward_kernels.norm_backward_kernel, backward_kernels.norm_backward_looped_kernel
    matrices = {"dsum": (rows, width), "dx0": (x0_rows, width), "dx1": (rows, width)}
    outputs = _outputs(tensors, {**matrices, "partial": (sum(sums), programs, width)})
    main = make_plan(kernels[config.looped(width)], parameters, constants, programs, device, *config.compiled, outputs)
    if not any(sums):
        return BackwardPlan(main, None)
    totals = {f"d{name}": names[name] if there else None for name, there in zip(_SUMMED, sums, strict=True)}
    parameters = {f"{name}_ptr": pointer_to(dtype or torch.float32, 16) for name, dtype in totals.items()}
    parameters |= {"partial_ptr": pointer_to(torch.float32, 16), "programs": int32(programs)}
    constants = {**summed, "WIDTH": width, **constants_of(REDUCE)}
    strips, outputs = -(-width // REDUCE.block_n), _outputs(totals, dict.fromkeys(totals, (width,)))
    kernel = backward_kernels.norm_reduce_kernel
    return BackwardPlan(main, make_plan(kernel, parameters, constants, strips, device, *REDUCE.compiled, outputs))


def _outputs(
    dtypes: Mapping[str, torch.dtype | None], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Layout | None, ...]:
    """The layouts of contiguous tensors; `dtypes` has None for one that is not written."""
    of_each = ((shape, dtypes[name]) for name, shape in shapes.items())
    return tuple(None if dtype is None else contiguous(shape, dtype) for shape, dtype in of_each)


def _parameters(
    tensors: Mapping[str, torch.dtype | None], strides: Mapping[str, int], misalignment: int, rows: int, spec: NormSpec
) -> dict[str, Parameter]:
    """The parameters that forward and backward share. `tensors`: the dtype of each by name; None for one that is not
    there. `strides`: of their rows."""
    pointers, apart = power_of_two_factor(misalignment), power_of_two_factor(*strides.values())
    keep_scale = 1 / (1 - spec.dropout_p)
    return {
        **{f"{name}_ptr": pointer_to(dtype, pointers) for name, dtype in tensors.items()},
        "seed_ptr": pointer_to(tensors["dropout_seed"], pointers),
        **{f"stride_{name}": int64(stride, apart) for name, stride in strides.items()},
        "rows": int32(rows),
        "threshold": int32(keep_threshold(spec.dropout_p)),
        "scale_x0": float32(spec.rowscale_const * keep_scale),
        "scale_x1": float32(keep_scale),
    }


def _constants(names: Mapping[str, torch.dtype | None], width: int, spec: NormSpec, config: RowTile) -> dict[str, Any]:
    """The constants that forward and backward share. `names`: dtypes of the tensors of a call, by name."""
    return {
        "WIDTH": width,
        **constants_of(config),
        "SCALED": _scales(names, spec),
        "DROPOUT": spec.dropout_p > 0,
        "RMS": spec.rms,
        "WEIGHT_ADD": float(spec.zero_centered),
    }


def _scales(names: Mapping[str, torch.dtype | None], spec: NormSpec) -> bool:
    """Whether x0 is multiplied on its way into the sum."""
    factors = any(names[name] is not None for name in ("rowscale", "layerscale"))
    return factors or spec.dropout_p > 0 or spec.rowscale_const != 1.0
