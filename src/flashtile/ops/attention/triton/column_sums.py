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

from flashtile.ops.attention.triton.blocks import BlockLists, apply_pattern, listed_tile, load_line
from flashtile.ops.attention.triton.scores import Modifiers, Table, load_alibi, modified_scores
from flashtile.ops.attention.triton.tiles import (
    LOG2_E,
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
    q_ptr, k_ptr, lse_ptr, sums_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    batch, heads, group, rows_q, rows_k, window_left, window_right, scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, HAS_KEY_LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr, BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `lse`: `[batch, heads, seq_q]`, packed `[heads, total_q]`; `sums` likewise,
    of keys."""
    sequence, head, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
        tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads, rows_k, rows_q,
        BLOCK_N, PACKED, LAST_FIRST=False, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_k:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, sequence, begin_q, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
    k_base = head_pointer(
        k_ptr, sequence, begin_k + first, head_kv, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED
    )
    lse_base = lse_ptr + row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
    keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    begin, full_begin, full_end, end = query_tile_ranges(
        first, keys, shift, seq_q, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    bias_table = Table(
        bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns
    )
    mask_table = Table(
        mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns
    )
    alibi = load_alibi(alibi_slopes_ptr, stride_alibi_batch, sequence, head, batch, seq_q, seq_k, None)
    modifiers = Modifiers(sequence, head, softcap, bias_table, alibi, mask_table, None)
    blocks = None
    if TILE_Q:
        lists = BlockLists(
            block_lists_ptr, block_offsets, block_tiles, block_kinds,
            stride_block_batch, stride_block_head,
        )  # fmt: skip
        blocks = load_line(lists, sequence, head, first // TILE_K)
        begin = 0
        end = blocks.entries * TILE_Q
    sums = _sum_weights(
        q_base, k_base, lse_base, begin, full_begin, full_end, end,
        first, keys, shift, seq_q, window_left, window_right, scale, modifiers, blocks, block_patterns_ptr,
        STRIDE_Q_ROW, STRIDE_K_ROW, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK,
        HAS_LEFT, HAS_RIGHT, WHOLE, ALL_VISIBLE, PRECISION, MODIFIED, TILE_Q, TILE_K, PATTERNS,
    )  # fmt: skip
    # Keys past their length read as zeros above; what they gathered is not theirs.
    column = tl.arange(0, BLOCK_N)
    sums = tl.where(first + column < keys, sums, 0.0)
    sums_base = sums_ptr + row_statistics_offset(sequence, head, heads, begin_k, rows_k, PACKED) + first
    tl.store(sums_base + column, sums, mask=first + column < seq_k)


@triton.jit
def _sum_weights(
    q_base, k_base, lse_base, begin, full_begin, full_end, end,
    first, keys, shift, seq_q, window_left, window_right, scale, modifiers, blocks, patterns_ptr,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    PRECISION: tl.constexpr, MODIFIED: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of the rows in the query tiles from `begin` to `end`, or in those that `blocks` lists:
    `[N]`."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    column = first + tl.arange(0, BLOCK_N)
    if not CHUNK:
        k_tile = load_rows(k_base, STRIDE_K_ROW, 0, keys - first, HEAD_DIM, BLOCK_N, BLOCK_D, False)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(begin, end, BLOCK_M):
        start = step
        if TILE_Q:
            start, kind = listed_tile(blocks, step, TILE_Q, BLOCK_M)
        row = start + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_base + row, mask=row < seq_q, other=float("-inf"))
        # In units of log2; +inf for rows that saw nothing, so that their weights are 0.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        if CHUNK:
            scores = product_by_chunks(
                q_base, STRIDE_Q_ROW, start, seq_q, k_base, STRIDE_K_ROW, 0, keys - first,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, STRIDE_Q_ROW, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        if MODIFIED:
            scores, _tanh = modified_scores(
                scores,
                scale,
                start,
                first,
                modifiers,
                q_base.dtype.element_ty == tl.float32,
                TRANSPOSED=False,
                SCORE_FUNCTION=None,
            )
        if PATTERNS:
            if kind >= 0:
                scores = apply_pattern(
                    scores, patterns_ptr, kind, start, first, BLOCK_M, BLOCK_N, TILE_Q, TILE_K, TRANSPOSED=False
                )
        probs = tl.exp2(scores * unit - lse[:, None])
        if not ALL_VISIBLE and ((start < full_begin) | (start >= full_end)):
            visible = (row < seq_q)[:, None] & visible_pairs(
                row[:, None], column[None, :], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            probs = tl.where(visible, probs, 0.0)
        total += probs
    return tl.sum(total, 0)
