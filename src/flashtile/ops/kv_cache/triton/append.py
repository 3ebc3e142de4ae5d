"""The kernel that brings new rows into a cache, rotated, and rotates the queries.

Shapes: H = BLOCK_H heads, N = BLOCK_HALF pairs of a head, of which HALF are there. A program has one row of one
sequence: its keys and values, or its queries. See `ops/rotary/spec.py` for the formula of the rotation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.split_keys.rows import packed_rows, sequence_lengths, tile_sequence
from flashtile.ops.common.tiles import power_of_two


class Angles(NamedTuple):
    """Pointers to tables of cos and sin of so many positions, and elements from one position to the next."""

    cos: Any
    sin: Any
    stride_cos: Any
    stride_sin: Any
    positions: Any


class Heads(NamedTuple):
    """The heads of a row: pointers to the first one where they come from and go to, and elements from one to the next;
    likewise of their factors, None without."""

    source: Any
    stride_source: Any
    target: Any
    stride_target: Any
    count: Any
    factors: Any
    stride_factors: Any


@triton.jit
def append_kernel(
    q_ptr, rotated_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, sequences, descales, length,
    q_strides, k_strides, v_strides, k_cache_strides, v_cache_strides, k_descale_strides, v_descale_strides,
    stride_cos, stride_sin, stride_table,
    batch, heads_q, heads_kv, seq_q, seq_new, capacity, positions,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_E: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, BANDED: tl.constexpr, FACTORS_OF_ROWS: tl.constexpr,
):  # fmt: skip
    """`sequences`: `Sequences`. `q_strides`, and those of k and v: `RowStrides`; those of the caches: `CacheStrides`.

    A program has one row: the first `seq_new` programs of a sequence one of its rows of k and v, and then, where they
    rotate, `seq_q` programs one of q. Of packed sequences these are the rows of all of them. Queries are written to
    `rotated`, contiguous. `BANDED`: each query has a position of its own, else all have the first.
    `descales`: `Descales`, with `CacheStrides`; those of new rows are written if FACTORS_OF_ROWS. No `v`: values are
    columns of the keys."""
    program = tl.program_id(0)
    if sequences.starts is None:
        programs = seq_new
        if HALF:
            programs += seq_q
        sequence = program // programs
        row = program % programs
        appends = row < seq_new
        row = tl.where(appends, row, row - seq_new)
        first_q, first_new, sequence_rows = sequence * seq_q, 0, seq_new
    else:
        appends = program < seq_new
        row = tl.where(appends, program, program - seq_new)
        if appends:
            sequence = tile_sequence(sequences.new_starts, row, batch, 1, 1)
        else:
            sequence = tile_sequence(sequences.starts, row, batch, 1, 1)
        if sequence == batch:
            return  # rows of no sequence
        first_q, _ = packed_rows(sequences.starts, sequence, batch, 0)
        first_new, sequence_rows = packed_rows(sequences.new_starts, sequence, batch, 0)
        row -= tl.where(appends, first_new, first_q)
    angles = Angles(cos_ptr, sin_ptr, stride_cos, stride_sin, positions)
    before, _ = sequence_lengths(sequences.lengths, sequence, length, sequence_rows, capacity)
    wide = sequence.to(tl.int64)
    if appends:
        place = before + row
        if (place >= 0) & (place < capacity):
            k_place, v_place = wide, wide
            inner = place.to(tl.int64)
            if sequences.table is not None:
                page = tl.load(sequences.table + wide * stride_table + place // PAGE_SIZE).to(tl.int64)
                k_place, v_place = page, page
                inner = (place % PAGE_SIZE).to(tl.int64)
            elif sequences.entries is not None:
                entry = tl.load(sequences.entries + sequence).to(tl.int64)
                k_place, v_place = entry, entry
            source = (first_new + row).to(tl.int64)
            k_row = k_ptr + source * k_strides.row
            if sequences.starts is None:
                k_row += wide * k_strides.batch
            k_factors = descales.k
            if k_factors is not None:
                k_factors += k_place * k_descale_strides.outer + inner * k_descale_strides.row
            k_heads = Heads(
                source=k_row,
                stride_source=k_strides.head,
                target=k_cache_ptr + k_place * k_cache_strides.outer + inner * k_cache_strides.row,
                stride_target=k_cache_strides.head,
                count=heads_kv,
                factors=k_factors,
                stride_factors=k_descale_strides.head,
            )
            put_row(
                k_heads, angles, place, HEAD_DIM=HEAD_DIM, HALF=HALF, BLOCK_H=BLOCK_H, BLOCK_HALF=BLOCK_HALF,
                BLOCK_REST=BLOCK_REST, INTERLEAVED=INTERLEAVED, FACTORS_OF_ROWS=FACTORS_OF_ROWS,
            )  # fmt: skip
            if v_ptr is not None:
                v_row = v_ptr + source * v_strides.row
                if sequences.starts is None:
                    v_row += wide * v_strides.batch
                v_factors = descales.v
                if v_factors is not None:
                    v_factors += v_place * v_descale_strides.outer + inner * v_descale_strides.row
                v_heads = Heads(
                    source=v_row,
                    stride_source=v_strides.head,
                    target=v_cache_ptr + v_place * v_cache_strides.outer + inner * v_cache_strides.row,
                    stride_target=v_cache_strides.head,
                    count=heads_kv,
                    factors=v_factors,
                    stride_factors=v_descale_strides.head,
                )
                put_row(
                    v_heads, None, place, HEAD_DIM=HEAD_DIM_V, HALF=0, BLOCK_H=BLOCK_H, BLOCK_HALF=1,
                    BLOCK_REST=BLOCK_E, INTERLEAVED=INTERLEAVED, FACTORS_OF_ROWS=FACTORS_OF_ROWS,
                )  # fmt: skip
    elif HALF:
        position = before
        if BANDED:
            position += row
        source = row.to(tl.int64) * q_strides.row
        if sequences.starts is None:
            source += wide * q_strides.batch
        else:
            source += first_q.to(tl.int64) * q_strides.row
        q_heads = Heads(
            source=q_ptr + source,
            stride_source=q_strides.head,
            target=rotated_ptr + (first_q + row).to(tl.int64) * heads_q * HEAD_DIM,
            stride_target=HEAD_DIM,
            count=heads_q,
            factors=None,
            stride_factors=None,
        )
        put_row(
            q_heads, angles, position, HEAD_DIM=HEAD_DIM, HALF=HALF, BLOCK_H=BLOCK_H, BLOCK_HALF=BLOCK_HALF,
            BLOCK_REST=BLOCK_REST, INTERLEAVED=INTERLEAVED, FACTORS_OF_ROWS=False,
        )  # fmt: skip


@triton.constexpr_function
def largest_number(dtype):
    """Of a dtype of 8 bits; 0 for wider ones."""
    return {tl.float8e4nv: 448.0, tl.float8e5: 57344.0, tl.int8: 127.0}.get(dtype, 0.0)


@triton.jit
def put_row(
    heads, angles, position, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, FACTORS_OF_ROWS: tl.constexpr,
):  # fmt: skip
    """Copies all heads of a row, the first `2 * HALF` columns turned by the angles of a position; a position outside of
    the table turns nothing. Into 8 bits each head is divided by its factor, which is found here if FACTORS_OF_ROWS."""
    SOURCE: tl.constexpr = heads.source.dtype.element_ty
    LIMIT: tl.constexpr = largest_number(heads.target.dtype.element_ty)
    if HALF:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        known = (pair < HALF) & (position >= 0) & (position < angles.positions)
        place = position.to(tl.int64)
        cos = tl.load(angles.cos + place * angles.stride_cos + pair, mask=known, other=1.0).to(tl.float32)  # [1, N]
        sin = tl.load(angles.sin + place * angles.stride_sin + pair, mask=known, other=0.0).to(tl.float32)
    for first in range(0, heads.count, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H))[:, None]
        sources = heads.source + head.to(tl.int64) * heads.stride_source
        targets = heads.target + head.to(tl.int64) * heads.stride_target
        largest = tl.zeros((BLOCK_H, 1), tl.float32)
        # Rows are rounded to their own dtype first, as if they had been turned before the call.
        if HALF:
            if INTERLEAVED:
                both_columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
                turns = (head < heads.count) & (both_columns < 2 * HALF)
                both = tl.load(sources + both_columns, mask=turns, other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(both, (BLOCK_H, BLOCK_HALF, 2)))
                turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK_H, 2 * BLOCK_HALF))
                turned = turned.to(SOURCE)
                if FACTORS_OF_ROWS:
                    largest = tl.maximum(largest, tl.max(tl.abs(turned.to(tl.float32)), 1, keep_dims=True))
            else:
                turns = (head < heads.count) & (pair < HALF)
                a = tl.load(sources + pair, mask=turns, other=0.0).to(tl.float32)
                b = tl.load(sources + HALF + pair, mask=turns, other=0.0).to(tl.float32)
                turned_a = (a * cos - b * sin).to(SOURCE)
                turned_b = (a * sin + b * cos).to(SOURCE)
                if FACTORS_OF_ROWS:
                    of_pairs = tl.maximum(tl.abs(turned_a.to(tl.float32)), tl.abs(turned_b.to(tl.float32)))
                    largest = tl.maximum(largest, tl.max(of_pairs, 1, keep_dims=True))
        if 2 * HALF < HEAD_DIM:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            copied = (head < heads.count) & (rest < HEAD_DIM)
            values = tl.load(sources + rest, mask=copied, other=0.0)
            if FACTORS_OF_ROWS:
                largest = tl.maximum(largest, tl.max(tl.abs(values.to(tl.float32)), 1, keep_dims=True))
        factor = None
        if heads.factors is not None:
            of_heads = heads.factors + head.to(tl.int64) * heads.stride_factors
            if FACTORS_OF_ROWS:
                factor = tl.where(largest == 0.0, 1.0, tl.maximum(tl.div_rn(largest, LIMIT), 2.0**-100))
                tl.store(of_heads, factor, mask=head < heads.count)
            else:
                factor = tl.load(of_heads, mask=head < heads.count, other=1.0)
        if HALF:
            if INTERLEAVED:
                put(targets + both_columns, turned, factor, turns, LIMIT)
            else:
                put(targets + pair, turned_a, factor, turns, LIMIT)
                put(targets + HALF + pair, turned_b, factor, turns, LIMIT)
        if 2 * HALF < HEAD_DIM:
            put(targets + rest, values, factor, copied, LIMIT)


@triton.jit
def put(pointers, values, factor, mask, LIMIT: tl.constexpr):
    """Stores values; into 8 bits divided by the factor, cut off at the largest number, and rounded to the nearest."""
    DTYPE: tl.constexpr = pointers.dtype.element_ty
    if LIMIT > 0:
        values = values.to(tl.float32)
        if factor is not None:
            values = tl.div_rn(values, factor)
        values = tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if DTYPE == tl.int8:
            values = (values + 12582912.0) - 12582912.0  # 1.5 · 2²³: nothing but a whole number is left
    tl.store(pointers, values.to(DTYPE), mask=mask)


#: Elements of a row that a program moves at a time.
_APPENDED = 4096


class AppendCut(NamedTuple):
    """How the appending kernel is cut: heads, pairs of a head, columns past the pairs, columns of a value; warps."""

    block_h: int
    block_half: int
    block_rest: int
    block_e: int
    num_warps: int


def append_cut(heads: int, head_dim: int, head_dim_v: int, half: int, device: DeviceFacts) -> AppendCut:
    """`heads`: the most that a row of q or k has."""
    block_half, block_rest = power_of_two(half), power_of_two(head_dim - 2 * half)
    block_e = power_of_two(head_dim_v)
    widest = max(block_half, block_rest, block_e)
    block_h = max(1, min(power_of_two(heads), _APPENDED // widest))
    return AppendCut(block_h, block_half, block_rest, block_e, 256 // device.warp_size)
