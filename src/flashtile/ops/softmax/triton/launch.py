"""Host side of the softmax kernels: output, cut, and the launch. The backend module for "triton".

All that a launch needs beside its pointers is a `Plan`, looked up under what the call looks like from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous_strides, empty
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import ELEMENT_TYPES, KernelSource, make_launcher, pointer
from flashtile.ops.common.checks import check_programs, check_rows
from flashtile.ops.softmax.spec import SoftmaxSpec
from flashtile.ops.softmax.triton.configs import RowConfig, row_config
from flashtile.ops.softmax.triton.kernels import softmax_backward_kernel, softmax_forward_kernel
from flashtile.ops.softmax.triton.merge_kernel import merge_finish_kernel, merge_part_kernel

_KERNELS = {"forward": softmax_forward_kernel, "backward": softmax_backward_kernel}


class Variant(NamedTuple):
    """All that decides a kernel's machine code on one device. The number of rows is not part of it."""

    kernel: str
    dtype: torch.dtype
    width: int
    causal: bool
    has_mask: bool
    mask_columns: int
    pointer_multiple: int
    mask_multiple: int
    config: RowConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int | float, ...]


def forward(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec) -> Tensor:
    """Runs the forward kernel on contiguous x `[batch, heads, seq_q, seq_k]`; a mask of its shape has any strides."""
    out = empty(tuple(x.shape), contiguous_strides(x.shape), x.dtype, x.device)
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
    if plan.programs:
        plan.launch(plan.programs, pointer(x), pointer(mask), pointer(out), *plan.scalars)
    return out


def backward(dout: Tensor, out: Tensor, spec: SoftmaxSpec) -> Tensor:
    """Runs the backward kernel on contiguous dout and out."""
    dx = empty(tuple(out.shape), contiguous_strides(out.shape), out.dtype, out.device)
    addresses = dout.data_ptr() | out.data_ptr()
    plan = _plan("backward", out.dtype, out.shape, None, addresses & 15, 0, spec, out.device)
    if plan.programs:
        plan.launch(plan.programs, pointer(dout), pointer(out), pointer(dx), *plan.scalars)
    return dx


@functools.lru_cache(maxsize=4096)
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
    strides = mask_strides or (0, 0, 0, 0)
    variant = Variant(
        kernel,
        dtype,
        seq_k,
        spec.causal,
        mask_strides is not None,
        strides[3],
        power_of_two_factor(misalignment),
        power_of_two_factor(mask_misalignment, *strides[:3]),
        config,
    )
    scalars: tuple[int | float, ...] = (rows, seq_q, spec.scale)
    if kernel == "forward":
        scalars = (*strides[:3], rows, max(heads, 1), seq_q, spec.scale)
    return Plan(_launcher(variant, device), -(-rows // config.rows) if seq_k else 0, scalars)


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of a kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    function, config = _KERNELS[variant.kernel], variant.config
    constants = {
        "MASK_COLUMNS": variant.mask_columns,
        "WIDTH": variant.width,
        "ROWS": config.rows,
        "BLOCK_N": config.block_n,
        "CAUSAL": variant.causal,
        "HAS_MASK": variant.has_mask,
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    run_time = [_parameter(name, variant) for name in function.arg_names if name not in constants]
    types, multiples = zip(*run_time)
    return KernelSource(function, types, multiples, constants, config.num_warps, 1)


def _parameter(name: str, variant: Variant) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    if name == "mask_ptr":
        return "*u8", variant.mask_multiple
    if name.endswith("_ptr"):
        return "*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple
    if name.startswith("stride_"):
        return "i64", variant.mask_multiple
    return ("fp32" if name == "scale" else "i32"), 1


#: Elements of a tile of the merge: 32 for each thread of 4 warps, eight loads of 16 bytes of float32.
_MERGED_ELEMENTS, _MERGE_WARPS = 4096, 4


class MergeVariant(NamedTuple):
    """All that decides the machine code of a merge's kernels on one device.

    Attributes:
        step: "first" or "next" for a part that joins, "finish" for the result.
        dtype: of the parts, and of the result.
    """

    step: str
    dtype: torch.dtype
    width: int
    pointer_multiple: int
    stride_multiple: int


def merge_part(acc: Tensor, row_max: Tensor, row_sum: Tensor, out: Tensor, lse: Tensor, first: bool) -> None:
    """Runs the kernel that joins a part to a running merge, in place."""
    strides = (*out.stride()[:3], *row_max.stride()[:2], *lse.stride()[:2])
    _merge("first" if first else "next", acc, row_max, row_sum, out, lse, strides, out.stride()[:3])


def merge_finish(acc: Tensor, row_max: Tensor, row_sum: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Runs the kernel that makes the result of a running merge."""
    out = torch.empty(acc.shape, dtype=dtype, device=acc.device)
    lse = torch.empty(row_max.shape, dtype=row_max.dtype, device=acc.device)
    _merge("finish", acc, row_max, row_sum, out, lse, row_max.stride()[:2], ())
    return out, lse


def _merge(
    step: str,
    acc: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    out: Tensor,
    lse: Tensor,
    strides: tuple[int, ...],
    of_columns: tuple[int, ...],
) -> None:
    """`strides`: as the kernel takes them after those of acc. `of_columns`: those of out among them."""
    batch, rows, heads, width = acc.shape
    check_rows("acc", rows)
    variant = MergeVariant(
        step,
        out.dtype,
        width,
        power_of_two_factor((acc.data_ptr() | out.data_ptr()) & 15),
        power_of_two_factor(*acc.stride()[:3], *of_columns),
    )
    if acc.numel():
        launch = _merge_launcher(variant, acc.device)
        tile_rows, _ = merge_tile(width)
        programs = batch * heads * -(-rows // tile_rows)
        check_programs("acc", programs)
        launch(
            programs,
            *map(pointer, (acc, row_max, row_sum, out, lse)),
            *acc.stride()[:3], *strides, rows, heads,
        )  # fmt: skip


def merge_tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, _MERGED_ELEMENTS // columns), columns


@functools.cache
def _merge_launcher(variant: MergeVariant, device: torch.device) -> Callable[..., None]:
    return make_launcher(merge_source(variant, device_facts(device).warp_size), device, device_facts(device))


def merge_source(variant: MergeVariant, warp_size: int = 32) -> KernelSource:
    """The specialisation of the merge for a variant."""
    tile_rows, columns = merge_tile(variant.width)
    constants: dict[str, object] = {"WIDTH": variant.width, "ROWS": tile_rows, "BLOCK_D": columns}
    kernel = merge_finish_kernel
    if variant.step != "finish":
        kernel, constants = merge_part_kernel, constants | {"FIRST": variant.step == "first"}
    parameters: dict[str, tuple[str, int]] = {
        "acc_ptr": ("*fp32", variant.pointer_multiple),
        "out_ptr": ("*" + ELEMENT_TYPES[variant.dtype], variant.pointer_multiple),
        "rows": ("i32", 1),
        "heads": ("i32", 1),
    }
    found = []
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name.startswith(("stride_acc", "stride_out")):
            found.append(("i64", variant.stride_multiple))
        elif name.startswith("stride_"):
            found.append(("i64", 1))
        else:
            found.append(parameters.get(name, ("*fp32", 1)))
    types, multiples = zip(*found)
    return KernelSource(kernel, types, multiples, constants, max(1, _MERGE_WARPS * 32 // warp_size), 1)
