"""The backend for GPUs: the rotary kernel, how it is cut, and its launch.

Shapes: S = BLOCK_S rows (tokens), H = BLOCK_H heads, N = BLOCK_HALF pairs of a head, of which HALF are there. A program
reads the angles of its rows once and turns all their heads. See `ops/rotary/spec.py` for the formulas.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.alignment import misalignment, power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import DeviceFacts, device_facts
from flashtile._backends.launch import (
    int32,
    int64,
    named_constants,
    pointer_to,
    stride_parameters,
)
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.tiles import power_of_two
from flashtile.ops.rotary.spec import RotarySpec


@triton.jit
def find_sequences(cu_seqlens_ptr, token, batch, BLOCK_S: tl.constexpr):
    """The sequence that owns each row `[S]`: how many end at or before it. `batch` for a row of none."""
    sequence = tl.zeros([BLOCK_S], tl.int32)
    for first in range(0, batch, 256):
        entry = first + tl.arange(0, 256)
        ends = tl.load(cu_seqlens_ptr + 1 + entry, mask=entry < batch, other=2**31 - 1)  # [256]
        sequence += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    return sequence


class Angles(NamedTuple):
    """Pointers to a table of cos and sin, and elements from one position to the next."""

    cos: Any
    sin: Any
    stride_cos: Any
    stride_sin: Any


class Rows(NamedTuple):
    """Rows of x and out: pointers, offsets `[S]`, elements from one head to the next, and which rows are there."""

    x: Any
    out: Any
    x_rows: Any
    out_rows: Any
    stride_x_head: Any
    stride_out_head: Any
    there: Any


@triton.jit
def load_angles(
    angles, position, positions, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    CONJUGATE: tl.constexpr,
):  # fmt: skip
    """cos and sin at positions `[S]`, float32 `[S, 1, N]` or `[S, H, N]`; 1 and 0 outside the table."""
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    place = position.to(tl.int64)[:, None, None]
    if position.shape[0] > 1:
        # Several rows have fewer angles than there are threads to share them out to: each would read two bytes, and
        # the angles would reach their pairs through shared memory. Therefore every head reads them, out of the L1
        # cache.
        place += tl.zeros([1, BLOCK_H, 1], tl.int64)
    inside = ((position >= 0) & (position < positions))[:, None, None] & (pair < HALF)
    cos = tl.load(angles.cos + place * angles.stride_cos + pair, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(angles.sin + place * angles.stride_sin + pair, mask=inside, other=0.0).to(tl.float32)
    if CONJUGATE:
        sin = -sin
    return cos, sin


@triton.jit
def turn_heads(
    rows, cos, sin, begin, end, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Turns heads from `begin` to `end` of `Rows`, and copies what lies past the pairs."""
    BLOCK_S: tl.constexpr = rows.there.shape[0]
    for first in range(begin, end, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        inside = rows.there[:, None, None] & (head < end)[None, :, None]
        x_heads = rows.x_rows[:, None, None] + (head.to(tl.int64) * rows.stride_x_head)[None, :, None]  # [S, H, 1]
        out_heads = rows.out_rows[:, None, None] + (head.to(tl.int64) * rows.stride_out_head)[None, :, None]
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
            mask = inside & (column < 2 * HALF)
            both = tl.load(rows.x + x_heads + column, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(both, (BLOCK_S, BLOCK_H, BLOCK_HALF, 2)))
            turned = tl.join(a * cos - b * sin, a * sin + b * cos)
            turned = tl.reshape(turned, (BLOCK_S, BLOCK_H, 2 * BLOCK_HALF)).to(rows.out.dtype.element_ty)
            tl.store(rows.out + out_heads + column, turned, mask=mask)
        else:
            column = tl.arange(0, BLOCK_HALF)[None, None, :]
            mask = inside & (column < HALF)
            a = tl.load(rows.x + x_heads + column, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(rows.x + x_heads + (column + HALF), mask=mask, other=0.0).to(tl.float32)
            turned_a = (a * cos - b * sin).to(rows.out.dtype.element_ty)
            turned_b = (a * sin + b * cos).to(rows.out.dtype.element_ty)
            tl.store(rows.out + out_heads + column, turned_a, mask=mask)
            tl.store(rows.out + out_heads + (column + HALF), turned_b, mask=mask)
        if COPIES and 2 * HALF < HEAD_DIM:
            column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
            mask = inside & (column < HEAD_DIM)
            tl.store(rows.out + out_heads + column, tl.load(rows.x + x_heads + column, mask=mask), mask=mask)


@triton.jit
def rotary_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, cos_k_ptr, sin_k_ptr, offsets_ptr, cu_seqlens_ptr,
    stride_x_batch, stride_x_row, stride_x_head, stride_out_batch, stride_out_row, stride_out_head,
    stride_cos, stride_sin, stride_cos_k, stride_sin_k, stride_offsets,
    tokens, seq, batch, heads, heads_q, heads_rotated, positions, offset,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, COPIES: tl.constexpr,
    HAS_K: tl.constexpr, HAS_OFFSETS: tl.constexpr, OF_ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`offsets` are those of sequences, or with OF_ROWS the positions of all rows."""
    token = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)  # [S]
    there = token < tokens
    if PACKED:
        owner = find_sequences(cu_seqlens_ptr, token, batch, BLOCK_S)
        owned = there & (owner < batch)
        position = token - tl.load(cu_seqlens_ptr + owner, mask=owned, other=0).to(tl.int32)
        outer, row = token * 0, token
    else:
        owner, owned = token // seq, there
        outer, row = owner, token % seq
        position = row
    position += offset
    if HAS_OFFSETS and not OF_ROWS:
        position += tl.load(offsets_ptr + owner, mask=owned, other=0).to(tl.int32)
    position = tl.where(owned, position, -1)
    if OF_ROWS:
        position = tl.load(offsets_ptr + outer.to(tl.int64) * stride_offsets + row, mask=there, other=-1)
    x_rows = outer.to(tl.int64) * stride_x_batch + row.to(tl.int64) * stride_x_row
    out_rows = outer.to(tl.int64) * stride_out_batch + row.to(tl.int64) * stride_out_row

    rows = Rows(
        x=x_ptr, out=out_ptr, x_rows=x_rows, out_rows=out_rows, stride_x_head=stride_x_head,
        stride_out_head=stride_out_head, there=there,
    )  # fmt: skip
    angles = Angles(cos_ptr, sin_ptr, stride_cos, stride_sin)
    cos, sin = load_angles(angles, position, positions, HALF, BLOCK_H, BLOCK_HALF, CONJUGATE)
    turn_heads(
        rows, cos, sin, 0, heads_q, HEAD_DIM=HEAD_DIM, HALF=HALF, BLOCK_H=BLOCK_H, BLOCK_HALF=BLOCK_HALF,
        BLOCK_REST=BLOCK_REST, INTERLEAVED=INTERLEAVED, COPIES=COPIES,
    )  # fmt: skip
    if HAS_K:
        angles = Angles(cos_k_ptr, sin_k_ptr, stride_cos_k, stride_sin_k)
        cos, sin = load_angles(angles, position, positions, HALF, BLOCK_H, BLOCK_HALF, CONJUGATE)
        turn_heads(
            rows, cos, sin, heads_q, heads_rotated, HEAD_DIM=HEAD_DIM, HALF=HALF, BLOCK_H=BLOCK_H,
            BLOCK_HALF=BLOCK_HALF, BLOCK_REST=BLOCK_REST, INTERLEAVED=INTERLEAVED, COPIES=COPIES,
        )  # fmt: skip
    if COPIES:
        still = cos * 0.0
        turn_heads(
            rows, still + 1.0, still, heads_rotated, heads, HEAD_DIM=HEAD_DIM, HALF=HALF, BLOCK_H=BLOCK_H,
            BLOCK_HALF=BLOCK_HALF, BLOCK_REST=BLOCK_REST, INTERLEAVED=INTERLEAVED, COPIES=COPIES,
        )  # fmt: skip


# --- how the kernel is cut, and its launch ---------------------------------------------------------------------------

#: Pairs of a tile: 8 for each of 128 threads. A thread thus has a load of 16 bytes of either half of a head in flight,
#: of a 16-bit tensor (H200, 16,384 rows of 32 heads of 128, forward: 65.0 µs; twice as many pairs 67.1).
_PAIRS = 1024


class RotaryConfig(NamedTuple):
    """How the kernel is cut. Heads share the angles of their row, so heads come first: a program of one row keeps its
    angles in registers for all of them. Rows come together where there are too few heads.

    Attributes:
        block_s: rows of a tile.
        block_h: heads of a tile.
        block_half: pairs of a tile.
        block_rest: elements past the pairs.
        num_warps: warps per program.
    """

    block_s: int
    block_h: int
    block_half: int
    block_rest: int
    num_warps: int


def rotary_config(heads: int, head_dim: int, half: int, device: DeviceFacts) -> RotaryConfig:
    block_half = power_of_two(half)
    block_h = max(1, min(power_of_two(heads), _PAIRS // block_half))
    block_s = max(1, _PAIRS // (block_half * block_h))
    return RotaryConfig(block_s, block_h, block_half, power_of_two(head_dim - 2 * half), 128 // device.warp_size)


_TABLES = ("cos", "sin", "cos_k", "sin_k")


@launched(Tensor, addresses=lambda rotation: misalignment(*rotation[:5]))
def forward(rotation: Any, spec: RotarySpec, inplace: bool = False, *, at: int, device: torch.device) -> Pipeline:
    """The rotated x: a new tensor, or nothing, if x is written to."""
    x, cos, _, _, _, offsets, cu_seqlens, ids = rotation
    (*outer, heads, head_dim), (positions, half) = x.shape, cos.shape
    tokens = functools.reduce(int.__mul__, outer, 1)
    check_rows("x", tokens)
    check_rows("cos", positions)
    x_strides, table_strides = _row_strides(x.strides), [0 if t is None else t.strides[0] for t in rotation[1:5]]
    out = contiguous(x.shape, x.dtype)
    out_strides = x_strides if inplace else _row_strides(out.strides)
    multiple = power_of_two_factor(*x_strides, *out_strides, *table_strides)
    config = rotary_config(heads, head_dim, half, device_facts(device))
    # Rows in one dimension are those of one sequence to the kernel, unless it has cumulative lengths.
    seq, batch = (tokens, 1) if len(outer) == 1 else (outer[1], outer[0])
    batch = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tensor, angles = (pointer_to(of.dtype, power_of_two_factor(at)) for of in (x, cos))
    dimensions, starts = ("batch", "row", "head"), offsets if ids is None else ids
    parameters = {
        **dict.fromkeys(("x_ptr", "out_ptr"), tensor),
        **dict.fromkeys((f"{name}_ptr" for name in _TABLES), angles),
        # Constants say which of these and of cos_k and sin_k are there.
        "offsets_ptr": pointer_to(torch.int32 if starts is None else starts.dtype),
        "cu_seqlens_ptr": pointer_to(torch.int32 if cu_seqlens is None else cu_seqlens.dtype),
        **stride_parameters("x", dict(zip(dimensions, x_strides)), multiple),
        **stride_parameters("out", dict(zip(dimensions, out_strides)), multiple),
        **{f"stride_{name}": int64(stride, multiple) for name, stride in zip(_TABLES, table_strides)},
        "stride_offsets": int64(ids.strides[0] if ids is not None and len(ids.shape) > 1 and ids.shape[0] > 1 else 0),
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
        **named_constants(config),
        "INTERLEAVED": spec.interleaved,
        "CONJUGATE": spec.conjugate,
        "COPIES": not inplace,
        # If nothing changes, all heads are copied as those past the last rotated one.
        "HAS_K": spec.heads_q < spec.heads_rotated,
        "HAS_OFFSETS": starts is not None,
        "OF_ROWS": ids is not None,
        "PACKED": cu_seqlens is not None,
    }
    programs = 0 if 0 in x.shape or (inplace and not half) else -(-tokens // config.block_s)
    buffers = {**({"out_ptr": "x"} if inplace else {}), **({} if ids is None else {"offsets_ptr": "position_ids"})}
    kernel = Kernel(rotary_kernel, parameters, constants, programs, buffers, config.num_warps)
    return Pipeline(device, {"rotary": kernel}, rotation, {"out": None if inplace else out})


def _row_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """(batch, row, head) strides."""
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])
