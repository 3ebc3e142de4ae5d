"""The kernel that brings new rows into a cache, rotated, and rotates the queries.

Shapes: H = BLOCK_H heads, N = BLOCK_HALF pairs of a head, of which HALF are there. A program has one row of one
sequence: its keys and values, or its queries. See `ops/rotary/spec.py` for the formula of the rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.common.split_keys.rows import packed_rows, sequence_lengths, sequence_of


@triton.jit
def append_kernel(
    q_ptr, rotated_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, sequences, length,
    q_strides, k_strides, v_strides, k_cache_strides, v_cache_strides, stride_cos, stride_sin, stride_table,
    batch, heads_q, heads_kv, seq_q, seq_new, capacity, positions,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_E: tl.constexpr, PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr, BANDED: tl.constexpr,
):  # fmt: skip
    """`sequences`: `Sequences`. `q_strides`, and those of k and v: `RowStrides`; those of the caches: `CacheStrides`.

    A program has one row: the first `seq_new` programs of a sequence one of its rows of k and v, and then, where they
    rotate, `seq_q` programs one of q. Of packed sequences these are the rows of all of them. Queries are written to
    `rotated`, contiguous. `BANDED`: each query has a position of its own, else all have the first."""
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
            sequence = sequence_of(sequences.new_starts, row, batch, 1, 1)
        else:
            sequence = sequence_of(sequences.starts, row, batch, 1, 1)
        if sequence == batch:
            return  # rows of no sequence
        first_q, _ = packed_rows(sequences.starts, sequence, batch, 0)
        first_new, sequence_rows = packed_rows(sequences.new_starts, sequence, batch, 0)
        row -= tl.where(appends, first_new, first_q)
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
            k_row, v_row = k_ptr + source * k_strides.row, v_ptr + source * v_strides.row
            if sequences.starts is None:
                k_row += wide * k_strides.batch
                v_row += wide * v_strides.batch
            turn_row(
                k_row, k_strides.head,
                k_cache_ptr + k_place * k_cache_strides.outer + inner * k_cache_strides.row, k_cache_strides.head,
                heads_kv,
                cos_ptr, sin_ptr, stride_cos, stride_sin, place, positions,
                HEAD_DIM, HALF, BLOCK_H, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
            )  # fmt: skip
            copy_heads(
                v_row, v_strides.head,
                v_cache_ptr + v_place * v_cache_strides.outer + inner * v_cache_strides.row, v_cache_strides.head,
                heads_kv, 0, HEAD_DIM_V, BLOCK_H, BLOCK_E,
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
        turn_row(
            q_ptr + source, q_strides.head,
            rotated_ptr + (first_q + row).to(tl.int64) * heads_q * HEAD_DIM, HEAD_DIM, heads_q,
            cos_ptr, sin_ptr, stride_cos, stride_sin, position, positions,
            HEAD_DIM, HALF, BLOCK_H, BLOCK_HALF, BLOCK_REST, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def turn_row(
    source, stride_source, target, stride_target, heads, cos_ptr, sin_ptr, stride_cos, stride_sin, position, positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Turns all heads of a row by the angles of a position; outside of the table it is only copied."""
    if HALF:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        known = (pair < HALF) & (position >= 0) & (position < positions)
        place = position.to(tl.int64)
        cos = tl.load(cos_ptr + place * stride_cos + pair, mask=known, other=1.0).to(tl.float32)  # [1, N]
        sin = tl.load(sin_ptr + place * stride_sin + pair, mask=known, other=0.0).to(tl.float32)
        for first in range(0, heads, BLOCK_H):
            head = (first + tl.arange(0, BLOCK_H))[:, None]
            sources = source + head.to(tl.int64) * stride_source
            targets = target + head.to(tl.int64) * stride_target
            if INTERLEAVED:
                column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
                there = (head < heads) & (column < 2 * HALF)
                both = tl.load(sources + column, mask=there, other=0.0).to(tl.float32)
                a, b = tl.split(tl.reshape(both, (BLOCK_H, BLOCK_HALF, 2)))
                turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (BLOCK_H, 2 * BLOCK_HALF))
                tl.store(targets + column, turned.to(target.dtype.element_ty), mask=there)
            else:
                there = (head < heads) & (pair < HALF)
                a = tl.load(sources + pair, mask=there, other=0.0).to(tl.float32)
                b = tl.load(sources + HALF + pair, mask=there, other=0.0).to(tl.float32)
                tl.store(targets + pair, (a * cos - b * sin).to(target.dtype.element_ty), mask=there)
                tl.store(targets + HALF + pair, (a * sin + b * cos).to(target.dtype.element_ty), mask=there)
    if 2 * HALF < HEAD_DIM:
        copy_heads(source, stride_source, target, stride_target, heads, 2 * HALF, HEAD_DIM, BLOCK_H, BLOCK_REST)


@triton.jit
def copy_heads(
    source, stride_source, target, stride_target, heads, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies columns from FIRST to LAST of all heads of a row."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    for first in range(0, heads, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H))[:, None]
        there = (head < heads) & (column < LAST)
        values = tl.load(source + head.to(tl.int64) * stride_source + column, mask=there)
        tl.store(target + head.to(tl.int64) * stride_target + column, values, mask=there)
