"""How much attention each key receives: the weights, recomputed from `lse` and summed over the queries.

With scores `s` as the softmax takes them, in units of log2::

    p    = exp2(s - lse)              [M, N]
    sums = sum of p over all rows     [N]

A program owns one key tile of one query head and walks over the query tiles that see it, as the dk/dv kernel does. It
adds up whole tiles of p and their rows once in the end, in a fixed order. Letters as in `tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.triton.blocks import listed_tile, load_line
from flashtile.ops.attention.triton.scores import Modifiers, TableColumns, load_alibi, tile_scores
from flashtile.ops.attention.triton.tiles import (
    LOG2_E,
    TileRanges,
    head_pointer,
    load_rows,
    locate_tile,
    product_by_chunks,
    query_tile_ranges,
    row_statistics_offset,
    valid_keys,
    visible_pairs,
)


@triton.jit
def attention_column_sums_kernel(
    q_ptr, k_ptr, lse_ptr, sums_ptr, side, q_strides, k_strides,
    batch, heads, group, rows_q, rows_k, window, scale, numbers, softcap, constants, shape,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    PRECISION: tl.constexpr, MODIFIED: tl.constexpr, BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `lse`: `[batch, heads, seq_q]`, packed `[heads, total_q]`; `sums` likewise,
    of keys."""
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    sequence, head, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
        tl.program_id(0), side.cu_seqlens_k, side.cu_seqlens_q, batch, heads, rows_k, rows_q,
        BLOCK_N, PACKED, LAST_FIRST=False, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_k:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, q_strides, sequence, begin_q, head, PACKED)
    k_base = head_pointer(k_ptr, k_strides, sequence, begin_k + first, head_kv, PACKED)
    lse_base = lse_ptr + row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
    keys = valid_keys(side.key_lengths, sequence, batch, seq_k)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    visited = query_tile_ranges(first, keys, shift, seq_q, window, constants, shape)
    alibi = load_alibi(side, numbers, sequence, head, batch, seq_q, seq_k)
    blocks = None
    if constants.TILE_Q:
        blocks = load_line(side, numbers, sequence, head, first // constants.TILE_K)
        visited = TileRanges(0, visited.full_begin, visited.full_end, blocks.entries * constants.TILE_Q)
    columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
    modifiers = Modifiers(side, numbers, columns, softcap, None, sequence, head, alibi, None, None)
    sums = _sum_weights(
        q_base, k_base, q_strides, k_strides, lse_base, visited, first, keys, shift, seq_q, window, scale,
        modifiers, blocks, constants, shape,
        WHOLE, ALL_VISIBLE, PRECISION, MODIFIED,
    )  # fmt: skip
    # Keys past their length read as zeros above; what they gathered is not theirs.
    column = tl.arange(0, BLOCK_N)
    sums = tl.where(first + column < keys, sums, 0.0)
    sums_base = sums_ptr + row_statistics_offset(sequence, head, heads, begin_k, rows_k, PACKED) + first
    tl.store(sums_base + column, sums, mask=first + column < seq_k)


@triton.jit
def _sum_weights(
    q_base, k_base, q_strides, k_strides, lse_base, visited, first, keys, shift, seq_q, window, scale,
    modifiers, blocks, constants, shape,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of the rows in the query tiles of `visited`, or in those that `blocks` lists:
    `[N]`."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    CHUNK: tl.constexpr = shape.CHUNK
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    column = first + tl.arange(0, BLOCK_N)
    if not CHUNK:
        k_tile = load_rows(k_base, k_strides, 0, keys - first, shape.HEAD_DIM, BLOCK_N, BLOCK_D, False)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(visited.begin, visited.end, BLOCK_M):
        start, kind = step, 0
        if blocks is not None:
            start, kind = listed_tile(blocks, step, constants.TILE_Q, BLOCK_M)
        row = start + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_base + row, mask=row < seq_q, other=float("-inf"))
        # In units of log2; +inf for rows that saw nothing, so that their weights are 0.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        if CHUNK:
            scores = product_by_chunks(
                q_base, q_strides, start, seq_q, k_base, k_strides, 0, keys - first,
                shape.HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, q_strides, start, seq_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        scores, _tanh = tile_scores(
            scores, scale, start, first, modifiers, kind, constants, MODIFIED, q_base.dtype.element_ty == tl.float32,
            TRANSPOSED=False, SCORE_FUNCTION=None, BRANCHES=True,
        )  # fmt: skip
        probs = tl.exp2(scores * unit - lse[:, None])
        if not ALL_VISIBLE and ((start < visited.full_begin) | (start >= visited.full_end)):
            visible = (row < seq_q)[:, None] & visible_pairs(
                row[:, None], column[None, :], shift, keys, window, constants
            )
            probs = tl.where(visible, probs, 0.0)
        total += probs
    return tl.sum(total, 0)
