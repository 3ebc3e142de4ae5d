"""Host side of the cross-entropy kernels: outputs, cut, and the launch. The backend module for "triton".

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
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.common.checks import check_rows
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics, gradient_strides
from flashtile.ops.cross_entropy.triton import kernels
from flashtile.ops.cross_entropy.triton.configs import MULTIPLY, REDUCE, TileConfig, tile_config

_KERNELS = {
    "forward": kernels.cross_entropy_forward_kernel,
    "reduce": kernels.cross_entropy_reduce_kernel,
    "backward": kernels.cross_entropy_backward_kernel,
    "multiply": kernels.multiply_kernel,
}


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device. The number of rows is not part of it.

    Attributes:
        kernel: its name in `_KERNELS`.
        dtype: of logits and gradients.
        label_dtype: of the labels.
        width: columns of a row.
        smoothing: whether the labels are smoothed.
        flag: of the forward, whether it reads a part of the columns; of the reduction, whether it is a mean; of the
            backward, whether there is a factor on the gradient from above.
        positive: whether the factor on the logits is positive.
        has_z: whether the part of lse² is stored.
        config: the cut.
    """

    kernel: str
    dtype: torch.dtype
    label_dtype: torch.dtype
    width: int
    smoothing: bool
    flag: bool
    positive: bool
    has_z: bool
    config: TileConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float, ...]


def forward(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """Runs the forward kernel on logits `[rows, columns]` with contiguous rows, and that of the reduction."""
    rows, device = logits.shape[0], logits.device
    losses = _vector(rows, device)
    z_losses = _vector(rows, device) if spec.z_loss else None
    lse = _vector(rows, device)
    _run_forward(logits, labels, losses, z_losses, lse, spec, False)
    if spec.reduction == "none":
        return Results(losses, z_losses, lse, None)
    loss = empty((), (), torch.float32, device)
    z_loss = empty((), (), torch.float32, device) if spec.z_loss else None
    scale = empty((), (), torch.float32, device) if spec.reduction == "mean" else None
    launch = _reduction(labels.dtype, spec.reduction == "mean", spec.z_loss, device)
    launch(1, *map(pointer, (losses, z_losses, labels, loss, z_loss, scale)), rows, spec.ignore_index)
    return Results(loss, z_loss, lse, scale)


def read(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Statistics:
    """The statistics of the columns that are here, as rows of one tensor `[3, rows]`."""
    rows = logits.shape[0]
    found = empty((3, rows), (rows, 1), torch.float32, logits.device)
    lse, target, total = found.unbind()
    _run_forward(logits, labels, target, total, lse, spec, True)
    return Statistics(lse, target, total)


def backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    spec: CrossEntropySpec,
    inplace: bool = False,
) -> Tensor:
    """Runs the backward kernel on logits with contiguous rows; writes to their memory where asked to."""
    shape, device = (logits.shape[0], logits.shape[1]), logits.device
    dlogits = logits if inplace else empty(shape, gradient_strides(logits), logits.dtype, device)
    plan = _backward_plan(
        logits.dtype,
        labels.dtype,
        shape,
        dloss.stride(0) if dloss.dim() else 0,
        (logits.stride(0), dlogits.stride(0)),
        (logits.data_ptr() & 15, dlogits.data_ptr() & 15),
        scale is not None,
        spec,
        device,
    )
    if plan.programs:
        plan.launch(plan.programs, *map(pointer, (dloss, scale, logits, labels, lse, dlogits)), *plan.scalars)
    return dlogits


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient by a scalar, in place, in float32 whatever its dtype."""
    size, block_n = gradient.numel(), MULTIPLY[0]
    if size:
        _multiplication(gradient.dtype, gradient.device)(-(-size // block_n), pointer(gradient), pointer(factor), size)


def _vector(rows: int, device: torch.device) -> Tensor:
    return empty((rows,), (1,), torch.float32, device)


def _run_forward(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    z_losses: Tensor | None,
    lse: Tensor,
    spec: CrossEntropySpec,
    partial: bool,
) -> None:
    plan = _forward_plan(
        logits.dtype,
        labels.dtype,
        (logits.shape[0], logits.shape[1]),
        logits.stride(0),
        logits.data_ptr() & 15,
        z_losses is not None,
        partial,
        spec,
        logits.device,
    )
    if plan.programs:
        plan.launch(plan.programs, *map(pointer, (logits, labels, losses, z_losses, lse)), *plan.scalars)


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    dtype: torch.dtype,
    label_dtype: torch.dtype,
    shape: tuple[int, int],
    stride: int,
    misalignment: int,
    has_z: bool,
    partial: bool,
    spec: CrossEntropySpec,
    device: torch.device,
) -> Plan:
    rows, width = shape
    check_rows("logits", rows)
    itemsize = dtype.itemsize
    config = tile_config(width, itemsize, 16 // itemsize, device_facts(device))
    smoothing, positive = spec.label_smoothing > 0, spec.logit_scale > 0
    variant = Variant("forward", dtype, label_dtype, width, smoothing, partial, positive, has_z, config)
    scalars = (stride, misalignment // itemsize, *_scalars(spec))
    return Plan(_launcher(variant, device), rows, scalars)


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    dtype: torch.dtype,
    label_dtype: torch.dtype,
    shape: tuple[int, int],
    dloss_stride: int,
    strides: tuple[int, int],
    misalignments: tuple[int, int],
    has_scale: bool,
    spec: CrossEntropySpec,
    device: torch.device,
) -> Plan:
    """`strides` and `misalignments` of logits and dlogits."""
    (rows, width), itemsize = shape, dtype.itemsize
    # As many columns as rows of both are equally far from a multiple of.
    lead, dlead = (misalignment // itemsize for misalignment in misalignments)
    vector = min(16 // itemsize, power_of_two_factor(lead - dlead, strides[0] - strides[1]))
    config = tile_config(width, itemsize, vector, device_facts(device))
    smoothing = spec.label_smoothing > 0
    variant = Variant("backward", dtype, label_dtype, width, smoothing, has_scale, True, False, config)
    tiles = _tiles(width, config)
    return Plan(
        _launcher(variant, device), rows * tiles, (dloss_stride, *strides, lead % vector, *_scalars(spec))
    )  # fmt: skip


def _scalars(spec: CrossEntropySpec) -> tuple[int | float, ...]:
    return (
        spec.ignore_index,
        spec.first,
        spec.vocabulary,
        spec.logit_scale,
        spec.label_smoothing,
        spec.lse_square_scale,
    )


def _tiles(width: int, config: TileConfig) -> int:
    """Tiles of a row, wherever within a vector it begins."""
    return -(-(width + config.vector - 1) // config.block_n)


@functools.cache
def _reduction(label_dtype: torch.dtype, mean: bool, has_z: bool, device: torch.device) -> Callable[..., None]:
    config = TileConfig(REDUCE[0], 1, REDUCE[1])
    return _launcher(Variant("reduce", torch.float32, label_dtype, 0, False, mean, True, has_z, config), device)


@functools.cache
def _multiplication(dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
    config = TileConfig(MULTIPLY[0], 1, MULTIPLY[1])
    return _launcher(Variant("multiply", dtype, torch.int64, 0, False, False, True, False, config), device)


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function, config = _KERNELS[variant.kernel], variant.config
    constants = {
        "WIDTH": variant.width,
        "BLOCK_N": config.block_n,
        "VECTOR": config.vector,
        "TILES": _tiles(variant.width, config),
        "SMOOTHING": variant.smoothing,
        "POSITIVE": variant.positive,
        "PARTIAL": variant.flag,
        "MEAN": variant.flag,
        "HAS_SCALE": variant.flag,
        "HAS_Z": variant.has_z,
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = tuple(_type(name, variant) for name in function.arg_names if name not in constants)
    # Addresses and row strides are of any alignment: the kernels find it out.
    multiples = tuple(16 if _is_own(name, variant) else 1 for name in function.arg_names if name not in constants)
    return KernelSource(function, types, multiples, constants, config.num_warps, 1)


def _is_own(name: str, variant: Variant) -> bool:
    """Whether a parameter is memory that starts with an allocation."""
    return variant.kernel == "multiply" and name == "gradient_ptr"


def _type(name: str, variant: Variant) -> str:
    """Type of a run-time parameter."""
    if name in ("logits_ptr", "dlogits_ptr", "gradient_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype]
    if name == "labels_ptr":
        return "*" + ELEMENT_TYPES[variant.label_dtype]
    if name.endswith("_ptr"):
        return "*fp32"
    if name.startswith("stride_") or name in ("ignore_index", "size"):
        return "i64"
    return "fp32" if name in ("logit_scale", "smoothing", "lse_square_scale") else "i32"
