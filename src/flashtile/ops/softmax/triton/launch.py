"""Host side of the softmax kernels: outputs, cut, and the launch. The backend module for "triton"."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import (
    Plan,
    constants_of,
    float32,
    int32,
    make_plan,
    plan_cache,
    pointer,
    pointer_to,
    strides_of,
)
from flashtile.ops.common.checks import check_programs, check_rows
from flashtile.ops.softmax.spec import SoftmaxSpec
from flashtile.ops.softmax.triton.configs import row_config
from flashtile.ops.softmax.triton.kernels import softmax_backward_kernel, softmax_forward_kernel
from flashtile.ops.softmax.triton.merge_kernel import merge_finish_kernel, merge_part_kernel

_KERNELS = {"forward": softmax_forward_kernel, "backward": softmax_backward_kernel}


def forward(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec) -> Tensor:
    """Runs the forward kernel on contiguous x `[batch, heads, seq_q, seq_k]`; a mask of its shape has any strides."""
    if mask is not None:
        mask = mask.view(torch.uint8)
    plan = _plan(
        "forward",
        x.dtype,
        x.shape,
        None if mask is None else mask.stride(),
        x.data_ptr() & 15,
        0 if mask is None else mask.data_ptr() & 15,
        spec,
        x.device,
    )
    (out,) = plan.allocate()
    plan.launch(pointer(x), pointer(mask), pointer(out))
    return out


def backward(dout: Tensor, out: Tensor, spec: SoftmaxSpec) -> Tensor:
    """Runs the backward kernel on contiguous dout and out."""
    addresses = dout.data_ptr() | out.data_ptr()
    plan = _plan("backward", out.dtype, out.shape, None, addresses & 15, 0, spec, out.device)
    (dx,) = plan.allocate()
    plan.launch(pointer(dout), pointer(out), pointer(dx))
    return dx


@plan_cache
def _plan(
    kernel: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    mask_strides: tuple[int, ...] | None,
    misalignment: int,
    mask_misalignment: int,
    spec: SoftmaxSpec,
    device: torch.device,
) -> Plan:
    batch, heads, seq_q, seq_k = shape
    rows = batch * heads * seq_q
    check_rows("x", rows)
    config = row_config(max(seq_k, 1), device_facts(device))
    *of_rows, of_columns = mask_strides or (0, 0, 0, 0)
    mask_multiple = power_of_two_factor(mask_misalignment, *of_rows)
    tensor = pointer_to(dtype, power_of_two_factor(misalignment))
    parameters = {
        **dict.fromkeys(("x_ptr", "out_ptr", "dout_ptr", "dx_ptr"), tensor),
        "mask_ptr": pointer_to(torch.uint8, mask_multiple),
        **strides_of("mask", dict(zip(("batch", "head", "row"), of_rows)), mask_multiple),
        "rows": int32(rows),
        "heads": int32(max(heads, 1)),
        "seq_q": int32(seq_q),
        "scale": float32(spec.scale),
    }
    constants = {
        "MASK_COLUMNS": of_columns,
        "WIDTH": seq_k,
        **constants_of(config),
        "CAUSAL": spec.causal,
        "HAS_MASK": mask_strides is not None,
    }
    programs = -(-rows // config.rows) if seq_k else 0
    outputs = (contiguous(shape, dtype),)
    return make_plan(_KERNELS[kernel], parameters, constants, programs, device, *config.compiled, outputs)


#: Elements of a tile of the merge: 32 for each thread of 4 warps, eight loads of 16 bytes of float32.
_MERGED_ELEMENTS, _MERGE_WARPS = 4096, 4


def merge_part(acc: Tensor, row_max: Tensor, row_sum: Tensor, out: Tensor, lse: Tensor, first: bool) -> None:
    """Runs the kernel that joins a part to a running merge, in place."""
    _merge("first" if first else "next", acc, row_max, row_sum, out, lse)


def merge_finish(acc: Tensor, row_max: Tensor, row_sum: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Runs the kernel that makes the result of a running merge."""
    out = torch.empty(acc.shape, dtype=dtype, device=acc.device)
    lse = torch.empty(row_max.shape, dtype=row_max.dtype, device=acc.device)
    _merge("finish", acc, row_max, row_sum, out, lse)
    return out, lse


def _merge(step: str, acc: Tensor, row_max: Tensor, row_sum: Tensor, out: Tensor, lse: Tensor) -> None:
    """`step`: "first" or "next" for a part that joins, "finish" for the result."""
    plan = _merge_plan(
        step,
        out.dtype,
        acc.shape,
        (acc.stride(), out.stride(), row_max.stride(), lse.stride()),
        (acc.data_ptr() | out.data_ptr()) & 15,
        acc.device,
    )
    plan.launch(*map(pointer, (acc, row_max, row_sum, out, lse)))


@plan_cache
def _merge_plan(
    step: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    misalignment: int,
    device: torch.device,
) -> Plan:
    """`dtype` of out, `shape` of acc, `strides` of acc, out, row_max and lse."""
    batch, rows, heads, width = shape
    check_rows("acc", rows)
    tile_rows, columns = merge_tile(width)
    programs = batch * heads * -(-rows // tile_rows) if width else 0
    check_programs("acc", programs)
    acc_strides, out_strides, row_strides, lse_strides = strides
    # A result goes to contiguous memory.
    of_columns = acc_strides[:3] if step == "finish" else (*acc_strides[:3], *out_strides[:3])
    tensors, multiple = power_of_two_factor(misalignment), power_of_two_factor(*of_columns)
    dimensions = "batch", "row", "head"
    parameters = {
        "acc_ptr": pointer_to(torch.float32, tensors),
        "out_ptr": pointer_to(dtype, tensors),
        **dict.fromkeys(("max_ptr", "sum_ptr", "lse_ptr"), pointer_to(torch.float32)),
        **strides_of("acc", dict(zip(dimensions, acc_strides)), multiple),
        **strides_of("out", dict(zip(dimensions, out_strides)), multiple),
        **strides_of("max", dict(zip(("batch", "head"), row_strides))),
        **strides_of("lse", dict(zip(("batch", "head"), lse_strides))),
        "rows": int32(rows),
        "heads": int32(heads),
    }
    constants = {"WIDTH": width, "ROWS": tile_rows, "BLOCK_D": columns, "FIRST": step == "first"}
    kernel = merge_finish_kernel if step == "finish" else merge_part_kernel
    num_warps = max(1, _MERGE_WARPS * 32 // device_facts(device).warp_size)
    return make_plan(kernel, parameters, constants, programs, device, num_warps)


def merge_tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, _MERGED_ELEMENTS // columns), columns
