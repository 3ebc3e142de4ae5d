"""Host side of the rotary kernel: output, cut, and the launch. The backend module for "triton".

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
from flashtile.ops.common.checks import check_rows
from flashtile.ops.rotary.spec import RotarySpec, Rotation
from flashtile.ops.rotary.triton.configs import RotaryConfig, rotary_config
from flashtile.ops.rotary.triton.kernel import rotary_kernel


class Variant(NamedTuple):
    """All that decides the kernel's machine code on one device: of rows and heads, only how they are cut."""

    dtype: torch.dtype
    table_dtype: torch.dtype
    head_dim: int
    half: int
    interleaved: bool
    conjugate: bool
    copies: bool
    has_k: bool
    offsets_dtype: torch.dtype | None
    cu_seqlens_dtype: torch.dtype | None
    pointer_multiple: int
    stride_multiple: int
    config: RotaryConfig


class Plan(NamedTuple):
    """A launch without its pointers: `launch(programs, *pointers, *scalars)`. No programs: nothing to launch."""

    launch: Callable[..., None]
    programs: int
    scalars: tuple[int, ...]


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool) -> Tensor:
    """The rotated x: a new tensor, or x itself."""
    x, cos, sin, cos_k, sin_k, offsets, cu_seqlens = rotation
    out = x if inplace else empty(tuple(x.shape), contiguous_strides(x.shape), x.dtype, x.device)
    addresses = x.data_ptr() | cos.data_ptr() | sin.data_ptr()
    if cos_k is not None and sin_k is not None:
        addresses |= cos_k.data_ptr() | sin_k.data_ptr()
    plan = _plan(
        x.dtype,
        cos.dtype,
        x.shape,
        x.stride(),
        tuple(cos.shape),
        tuple(0 if t is None else t.stride(0) for t in rotation[1:5]),
        None if offsets is None else offsets.dtype,
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape[0] - 1),
        addresses & 15,
        inplace,
        spec,
        x.device,
    )
    if plan.programs:
        plan.launch(plan.programs, *map(pointer, (x, out, cos, sin, cos_k, sin_k, offsets, cu_seqlens)), *plan.scalars)
    return out


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    table: tuple[int, int],
    table_strides: tuple[int, ...],
    offsets_dtype: torch.dtype | None,
    sequences: tuple[torch.dtype, int] | None,
    misalignment: int,
    inplace: bool,
    spec: RotarySpec,
    device: torch.device,
) -> Plan:
    """`shape` and `strides` of x, `table` of cos, `table_strides` of the rows of cos, sin, cos_k and sin_k."""
    *outer, heads, head_dim = shape
    positions, half = table
    tokens = functools.reduce(int.__mul__, outer, 1)
    check_rows("x", tokens)
    check_rows("cos", positions)
    x_strides = _row_strides(strides)
    out_strides = x_strides if inplace else _row_strides(contiguous_strides(shape))
    # Where nothing changes, all heads are copied as those past the last rotated one.
    has_k = spec.heads_q < spec.heads_rotated
    config = rotary_config(heads, head_dim, half, device_facts(device))
    variant = Variant(
        dtype,
        table_dtype,
        head_dim,
        half,
        spec.interleaved,
        spec.conjugate,
        not inplace,
        has_k,
        offsets_dtype,
        None if sequences is None else sequences[0],
        power_of_two_factor(misalignment),
        power_of_two_factor(*x_strides, *out_strides, *table_strides),
        config,
    )
    seq, batch = (tokens, sequences[1]) if sequences is not None else (max(outer[1], 1), outer[0])
    scalars = (
        *x_strides, *out_strides, *table_strides,
        tokens, seq, batch, heads, spec.heads_q, spec.heads_rotated, positions, spec.offset,
    )  # fmt: skip
    programs = 0 if 0 in shape or (inplace and not half) else -(-tokens // config.block_s)
    return Plan(_launcher(variant, device), programs, scalars)


def _row_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, row, head) strides."""
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


@functools.cache
def _launcher(variant: Variant, device: torch.device) -> Callable[..., None]:
    return make_launcher(kernel_source(variant), device, device_facts(device))


def kernel_source(variant: Variant) -> KernelSource:
    """The specialisation of the kernel for a variant, as the launcher and ahead-of-time compilation take it."""
    config = variant.config
    constants = {
        "HEAD_DIM": variant.head_dim,
        "HALF": variant.half,
        "BLOCK_S": config.block_s,
        "BLOCK_H": config.block_h,
        "BLOCK_HALF": config.block_half,
        "BLOCK_REST": config.block_rest,
        "INTERLEAVED": variant.interleaved,
        "CONJUGATE": variant.conjugate,
        "COPIES": variant.copies,
        "HAS_K": variant.has_k,
        "HAS_OFFSETS": variant.offsets_dtype is not None,
        "PACKED": variant.cu_seqlens_dtype is not None,
    }
    run_time = [_parameter(name, variant) for name in rotary_kernel.arg_names if name not in constants]
    types, multiples = zip(*run_time)
    return KernelSource(rotary_kernel, types, multiples, constants, config.num_warps, 1)


def _parameter(name: str, variant: Variant) -> tuple[str, int]:
    """Type of a run-time parameter, and a power of two that divides it."""
    index_dtypes = {"offsets_ptr": variant.offsets_dtype, "cu_seqlens_ptr": variant.cu_seqlens_dtype}
    if name in index_dtypes:
        return "*" + ELEMENT_TYPES[index_dtypes[name] or torch.int32], 1
    if name.endswith("_ptr"):
        dtype = variant.dtype if name in ("x_ptr", "out_ptr") else variant.table_dtype
        return "*" + ELEMENT_TYPES[dtype], variant.pointer_multiple
    if name.startswith("stride_"):
        return "i64", variant.stride_multiple
    return "i32", 1
