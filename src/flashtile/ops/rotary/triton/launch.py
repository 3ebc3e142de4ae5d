"""Host side of the rotary kernel: output, cut, and the launch. The backend module for "triton"."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous, contiguous_strides
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import (
    Plan,
    constants_of,
    int32,
    int64,
    make_plan,
    plan_cache,
    pointer,
    pointer_to,
    strides_of,
)
from flashtile.ops.common.checks import check_rows
from flashtile.ops.rotary.spec import RotarySpec, Rotation
from flashtile.ops.rotary.triton.configs import rotary_config
from flashtile.ops.rotary.triton.kernel import rotary_kernel


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool) -> Tensor:
    """The rotated x: a new tensor, or x itself."""
    x, cos, sin, cos_k, sin_k, offsets, cu_seqlens, ids = rotation
    of_rows = None if ids is None else 0 if ids.shape[0] == 1 or ids.dim() == 1 else ids.stride(0)
    offsets = offsets if ids is None else ids
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
        of_rows,
        addresses & 15,
        inplace,
        spec,
        x.device,
    )
    out = x if inplace else plan.allocate()[0]
    plan.launch(*map(pointer, (x, out, cos, sin, cos_k, sin_k, offsets, cu_seqlens)))
    return out


@plan_cache
def _plan(
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    table: tuple[int, int],
    table_strides: tuple[int, ...],
    offsets_dtype: torch.dtype | None,
    sequences: tuple[torch.dtype, int] | None,
    of_rows: int | None,
    misalignment: int,
    inplace: bool,
    spec: RotarySpec,
    device: torch.device,
) -> Plan:
    """`shape` and `strides` of x, `table` of cos, `table_strides` of the rows of cos, sin, cos_k and sin_k. `of_rows`:
    if the offsets are positions of rows, their stride from one sequence to the next."""
    *outer, heads, head_dim = shape
    positions, half = table
    tokens = functools.reduce(int.__mul__, outer, 1)
    check_rows("x", tokens)
    check_rows("cos", positions)
    x_strides = _row_strides(strides)
    out_strides = x_strides if inplace else _row_strides(contiguous_strides(shape))
    multiple = power_of_two_factor(*x_strides, *out_strides, *table_strides)
    config = rotary_config(heads, head_dim, half, device_facts(device))
    # Rows in one dimension are those of one sequence to the kernel, unless it has cumulative lengths.
    seq, batch = (tokens, 1) if len(outer) == 1 else (outer[1], outer[0])
    batch = batch if sequences is None else sequences[1]
    tensor, angles = (pointer_to(of, power_of_two_factor(misalignment)) for of in (dtype, table_dtype))
    dimensions, tables = ("batch", "row", "head"), ("cos", "sin", "cos_k", "sin_k")
    parameters = {
        **dict.fromkeys(("x_ptr", "out_ptr"), tensor),
        **dict.fromkeys((f"{name}_ptr" for name in tables), angles),
        # Constants say which of these and of cos_k and sin_k are there.
        "offsets_ptr": pointer_to(offsets_dtype or torch.int32),
        "cu_seqlens_ptr": pointer_to(torch.int32 if sequences is None else sequences[0]),
        **strides_of("x", dict(zip(dimensions, x_strides)), multiple),
        **strides_of("out", dict(zip(dimensions, out_strides)), multiple),
        **{f"stride_{name}": int64(stride, multiple) for name, stride in zip(tables, table_strides)},
        "stride_offsets": int64(of_rows or 0),
        "tokens": int32(tokens),
        "seq": int32(max(seq, 1)),
        "batch": int32(batch),
        "heads": int32(heads),
        "heads_q": int32(spec.heads_q),
        "heads_rotated": int32(spec.heads_rotated),
        "positions": int32(positions),
        "offset": int32(spec.offset),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HALF": half,
        **constants_of(config),
        "INTERLEAVED": spec.interleaved,
        "CONJUGATE": spec.conjugate,
        "COPIES": not inplace,
        # Where nothing changes, all heads are copied as those past the last rotated one.
        "HAS_K": spec.heads_q < spec.heads_rotated,
        "HAS_OFFSETS": offsets_dtype is not None,
        "OF_ROWS": of_rows is not None,
        "PACKED": sequences is not None,
    }
    programs = 0 if 0 in shape or (inplace and not half) else -(-tokens // config.block_s)
    outputs = () if inplace else (contiguous(shape, dtype),)
    return make_plan(rotary_kernel, parameters, constants, programs, device, config.num_warps, outputs=outputs)


def _row_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, row, head) strides."""
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])
