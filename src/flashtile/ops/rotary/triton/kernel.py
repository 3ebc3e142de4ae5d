"""The rotary kernel.

Shapes: S = BLOCK_S rows (tokens), H = BLOCK_H heads, N = BLOCK_HALF pairs of a head, of which HALF are there. A program
reads the angles of its rows once and turns all their heads. See `ops/rotary/spec.py` for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_sequences(cu_seqlens_ptr, token, batch, BLOCK_S: tl.constexpr):
    """The sequence that owns each row `[S]`: how many end at or before it. `batch` for a row of none."""
    sequence = tl.zeros([BLOCK_S], tl.int32)
    for first in range(0, batch, 256):
        entry = first + tl.arange(0, 256)
        ends = tl.load(cu_seqlens_ptr + 1 + entry, mask=entry < batch, other=2**31 - 1)  # [256]
        sequence += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    return sequence


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, stride_cos, stride_sin, position, positions, HALF: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    """cos and sin at positions `[S]`, float32 `[S, 1, N]` or `[S, H, N]`; 1 and 0 outside the table."""
    pair = tl.arange(0, BLOCK_HALF)[None, None, :]
    place = position.to(tl.int64)[:, None, None]
    if BLOCK_S > 1:
        # Several rows have fewer angles than there are threads to share them out to: each would read two bytes, and
        # the angles would reach their pairs through shared memory. So every head reads them, out of the L1 cache.
        place += tl.zeros([1, BLOCK_H, 1], tl.int64)
    inside = ((position >= 0) & (position < positions))[:, None, None] & (pair < HALF)
    cos = tl.load(cos_ptr + place * stride_cos + pair, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + place * stride_sin + pair, mask=inside, other=0.0).to(tl.float32)
    if CONJUGATE:
        sin = -sin
    return cos, sin


@triton.jit
def turn_heads(
    x_ptr, out_ptr, x_rows, out_rows, stride_x_head, stride_out_head, there, cos, sin, begin, end,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Turns heads from `begin` to `end` of rows at offsets `[S]`, and copies what lies past the pairs."""
    for first in range(begin, end, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        inside = there[:, None, None] & (head < end)[None, :, None]
        x_heads = x_rows[:, None, None] + (head.to(tl.int64) * stride_x_head)[None, :, None]  # [S, H, 1]
        out_heads = out_rows[:, None, None] + (head.to(tl.int64) * stride_out_head)[None, :, None]
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
            mask = inside & (column < 2 * HALF)
            both = tl.load(x_ptr + x_heads + column, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(both, (BLOCK_S, BLOCK_H, BLOCK_HALF, 2)))
            turned = tl.join(a * cos - b * sin, a * sin + b * cos)
            turned = tl.reshape(turned, (BLOCK_S, BLOCK_H, 2 * BLOCK_HALF)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_heads + column, turned, mask=mask)
        else:
            column = tl.arange(0, BLOCK_HALF)[None, None, :]
            mask = inside & (column < HALF)
            a = tl.load(x_ptr + x_heads + column, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_ptr + x_heads + (column + HALF), mask=mask, other=0.0).to(tl.float32)
            turned_a = (a * cos - b * sin).to(out_ptr.dtype.element_ty)
            turned_b = (a * sin + b * cos).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_heads + column, turned_a, mask=mask)
            tl.store(out_ptr + out_heads + (column + HALF), turned_b, mask=mask)
        if COPIES and 2 * HALF < HEAD_DIM:
            column = 2 * HALF + tl.arange(0, BLOCK_REST)[None, None, :]
            mask = inside & (column < HEAD_DIM)
            tl.store(out_ptr + out_heads + column, tl.load(x_ptr + x_heads + column, mask=mask), mask=mask)


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

    cos, sin = load_angles(
        cos_ptr, sin_ptr, stride_cos, stride_sin, position, positions, HALF, BLOCK_S, BLOCK_H, BLOCK_HALF, CONJUGATE
    )
    turn_heads(
        x_ptr, out_ptr, x_rows, out_rows, stride_x_head, stride_out_head, there, cos, sin, 0, heads_q, HEAD_DIM, HALF,
        BLOCK_S, BLOCK_H, BLOCK_HALF, BLOCK_REST, INTERLEAVED, COPIES,
    )  # fmt: skip
    if HAS_K:
        cos, sin = load_angles(
            cos_k_ptr, sin_k_ptr, stride_cos_k, stride_sin_k, position, positions, HALF, BLOCK_S, BLOCK_H, BLOCK_HALF,
            CONJUGATE,
        )  # fmt: skip
        turn_heads(
            x_ptr, out_ptr, x_rows, out_rows, stride_x_head, stride_out_head, there, cos, sin, heads_q, heads_rotated,
            HEAD_DIM, HALF, BLOCK_S, BLOCK_H, BLOCK_HALF, BLOCK_REST, INTERLEAVED, COPIES,
        )  # fmt: skip
    if COPIES:
        still = cos * 0.0
        turn_heads(
            x_ptr, out_ptr, x_rows, out_rows, stride_x_head, stride_out_head, there, still + 1.0, still, heads_rotated,
            heads, HEAD_DIM, HALF, BLOCK_S, BLOCK_H, BLOCK_HALF, BLOCK_REST, INTERLEAVED, COPIES,
        )  # fmt: skip
