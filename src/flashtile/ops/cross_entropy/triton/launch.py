"""Host side of the cross-entropy kernels: outputs, cut, and the launch. The backend module for "triton"."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous, empty
from flashtile._backends.devices import device_facts
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
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics, gradient_strides
from flashtile.ops.cross_entropy.triton import kernels
from flashtile.ops.cross_entropy.triton.configs import MULTIPLY, REDUCE, TileConfig, tile_config

#: Statistics of a row, and sums of them.
_STATISTICS = pointer_to(torch.float32)


def forward(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Results:
    """Runs the forward kernel on logits `[rows, columns]` with contiguous rows, and that of the reduction. `weights`:
    class weights and their sum."""
    plan = _forward_plan_for(logits, labels, spec, weights, partial=False)
    losses, z_losses, normaliser = plan.allocate()
    plan.launch(*map(pointer, (logits, labels, weights, losses, z_losses, normaliser)))
    if spec.reduction == "none":
        return Results(losses, z_losses, normaliser, None)
    plan = _reduce_plan(labels.dtype, logits.shape[0], weights is not None, spec, logits.device)
    loss, z_loss, scale = plan.allocate()
    plan.launch(*map(pointer, (losses, z_losses, labels, weights, loss, z_loss, scale)))
    return Results(loss, z_loss, normaliser, scale)


def read(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """The statistics of the columns that are here."""
    plan = _forward_plan_for(logits, labels, spec, weights, partial=True)
    target, total, normaliser = plan.allocate()
    plan.launch(*map(pointer, (logits, labels, weights, target, total, normaliser)))
    return Statistics(normaliser, target, total)


def backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    inplace: bool = False,
    weights: Tensor | None = None,
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
        weights is not None,
        spec,
        device,
    )
    plan.launch(*map(pointer, (dloss, scale, logits, labels, weights, normaliser, dlogits)))
    return dlogits


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient by a scalar, in place, in float32 whatever its dtype."""
    plan = _multiply_plan(gradient.dtype, gradient.numel(), gradient.device)
    plan.launch(pointer(gradient), pointer(factor))


def _forward_plan_for(
    logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None, partial: bool
) -> Plan:
    shape, stride, misalignment = (logits.shape[0], logits.shape[1]), logits.stride(0), logits.data_ptr() & 15
    weighted, device = weights is not None, logits.device
    return _forward_plan(logits.dtype, labels.dtype, shape, stride, misalignment, partial, weighted, spec, device)


@plan_cache
def _forward_plan(
    dtype: torch.dtype,
    label_dtype: torch.dtype,
    shape: tuple[int, int],
    stride: int,
    misalignment: int,
    partial: bool,
    weighted: bool,
    spec: CrossEntropySpec,
    device: torch.device,
) -> Plan:
    """`partial`: of `read`, which wants statistics and no losses."""
    rows, width = shape
    check_rows("logits", rows)
    itemsize = dtype.itemsize
    config = tile_config(width, itemsize, 16 // itemsize, device_facts(device))
    parameters = {
        **_parameters(dtype, label_dtype, spec),
        "stride_row": int64(stride),
        "lead": int32(misalignment // itemsize),
    }
    has_z = partial or spec.z_loss
    constants = {
        "WIDTH": width,
        **constants_of(config),
        "SMOOTHING": spec.label_smoothing > 0,
        "SIGN": (spec.factor > 0) - (spec.factor < 0),
        "PARTIAL": partial,
        "HAS_Z": has_z,
        "CAPPED": spec.softcap > 0,
        "WEIGHTED": weighted,
    }
    of_rows = contiguous((rows,), torch.float32)
    outputs = (of_rows, of_rows if has_z else None, contiguous((rows, 2), torch.float32))
    kernel = kernels.cross_entropy_forward_kernel
    return make_plan(kernel, parameters, constants, rows, device, config.num_warps, outputs=outputs)


@plan_cache
def _backward_plan(
    dtype: torch.dtype,
    label_dtype: torch.dtype,
    shape: tuple[int, int],
    dloss_stride: int,
    strides: tuple[int, int],
    misalignments: tuple[int, int],
    has_scale: bool,
    weighted: bool,
    spec: CrossEntropySpec,
    device: torch.device,
) -> Plan:
    """`strides` and `misalignments` of logits and dlogits."""
    (rows, width), itemsize = shape, dtype.itemsize
    # As many columns as rows of both are equally far from a multiple of.
    lead, dlead = (misalignment // itemsize for misalignment in misalignments)
    vector = min(16 // itemsize, power_of_two_factor(lead - dlead, strides[0] - strides[1]))
    config = tile_config(width, itemsize, vector, device_facts(device))
    tiles = _tiles(width, config)
    parameters = {
        **_parameters(dtype, label_dtype, spec),
        "stride_dloss": int64(dloss_stride),
        "stride_row": int64(strides[0]),
        "stride_drow": int64(strides[1]),
        "lead": int32(lead % vector),
    }
    constants = {
        "WIDTH": width,
        **constants_of(config),
        "TILES": tiles,
        "SMOOTHING": spec.label_smoothing > 0,
        "HAS_SCALE": has_scale,
        "CAPPED": spec.softcap > 0,
        "WEIGHTED": weighted,
    }
    kernel = kernels.cross_entropy_backward_kernel
    return make_plan(kernel, parameters, constants, rows * tiles, device, config.num_warps)


@plan_cache
def _reduce_plan(
    label_dtype: torch.dtype, rows: int, weighted: bool, spec: CrossEntropySpec, device: torch.device
) -> Plan:
    parameters = {**_parameters(torch.float32, label_dtype, spec), "rows": int32(rows)}
    block_n, num_warps = REDUCE
    mean, scalar = spec.reduction == "mean", contiguous((), torch.float32)
    constants = {"BLOCK_N": block_n, "MEAN": mean, "HAS_Z": spec.z_loss, "WEIGHTED": weighted}
    outputs = scalar, scalar if spec.z_loss else None, scalar if mean else None
    kernel = kernels.cross_entropy_reduce_kernel
    return make_plan(kernel, parameters, constants, 1, device, num_warps, outputs=outputs)


@plan_cache
def _multiply_plan(dtype: torch.dtype, size: int, device: torch.device) -> Plan:
    block_n, num_warps = MULTIPLY
    # The gradient begins where its memory was allocated.
    parameters = {"gradient_ptr": pointer_to(dtype, 16), "factor_ptr": _STATISTICS, "size": int64(size)}
    programs = -(-size // block_n)
    return make_plan(kernels.multiply_kernel, parameters, {"BLOCK_N": block_n}, programs, device, num_warps)


def _parameters(dtype: torch.dtype, label_dtype: torch.dtype, spec: CrossEntropySpec) -> dict[str, Parameter]:
    """What the kernels have in common. Addresses and strides of rows are of any alignment: kernels find it out."""
    statistics = ("weights", "loss", "z", "normaliser", "dloss", "scale", "loss_out", "z_out")
    return {
        **dict.fromkeys(("logits_ptr", "dlogits_ptr"), pointer_to(dtype)),
        **dict.fromkeys((f"{name}_ptr" for name in statistics), _STATISTICS),
        "labels_ptr": pointer_to(label_dtype),
        "ignore_index": int64(spec.ignore_index),
        "first": int32(spec.first),
        "vocabulary": int32(spec.vocabulary),
        "logit_scale": float32(spec.logit_scale),
        "factor": float32(spec.factor),
        "softcap": float32(spec.softcap),
        "smoothing": float32(spec.label_smoothing),
        "lse_square_scale": float32(spec.lse_square_scale),
    }


def _tiles(width: int, config: TileConfig) -> int:
    """Tiles of a row, wherever within a vector it begins."""
    return -(-(width + config.vector - 1) // config.block_n)
