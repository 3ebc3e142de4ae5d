"""The gradient of the bias: the scores' gradients, recomputed tile by tile and summed over all that shares an entry.

Shapes as in `tiles`; the bias is `[batch | 1, heads | 1, rows | 1, columns | 1]`. One tile `[M, N]` of the bias (of a
direction in which it broadcasts: all of it) belongs to PARTS programs, each of which walks over its part of the
sequences, heads and tiles that share it, in a fixed order: no atomics, and no buffer larger than PARTS times the bias.
Costs two of the backward's five products once more; adding up the tiles of the dq kernel in memory would instead read
and write every score's gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.triton.blocks import EMPTY, apply_pattern, kind_of_tile, line_entries
from flashtile.ops.attention.triton.scores import alibi_diagonal, load_slope, modified_scores, table_offset
from flashtile.ops.attention.triton.tiles import (
    dropout_matrix,
    head_pointer,
    kept_weights,
    key_tile_ranges,
    load_rows,
    product_by_chunks,
    row_statistics_offset,
    sequence_rows,
    valid_keys,
    visible_pairs,
)


@triton.jit
def attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, sums_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    stride_v_batch, stride_v_head,
    stride_dout_batch, stride_dout_head,
    batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    sums_batch, sums_heads, sums_rows, sums_columns, longest_q, longest_k, parts,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_DOUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `sums`: float32 `[parts, sums_batch, sums_heads, sums_rows, sums_columns]`,
    the sizes of the bias. `longest_q`, `longest_k`: how many queries and keys a sequence has at most."""
    tiles_m = tl.cdiv(longest_q, BLOCK_M)
    tiles_n = tl.cdiv(longest_k, BLOCK_N)
    # Which entries of the bias: (part, batch, head, tile of rows, tile of columns), the last one fastest.
    program = tl.program_id(0)
    own_n = 1 if SHARED_COLUMNS else tiles_n
    own_m = 1 if SHARED_ROWS else tiles_m
    tile_n = program % own_n
    tile_m = program // own_n % own_m
    head_of = program // (own_n * own_m) % sums_heads
    batch_of = program // (own_n * own_m * sums_heads) % sums_batch
    part = program // (own_n * own_m * sums_heads * sums_batch)
    # What shares them, numbered likewise.
    shared_n = tiles_n // own_n
    shared_m = tiles_m // own_m
    shared_heads = heads // sums_heads
    sharing = shared_n * shared_m * shared_heads * (batch // sums_batch)
    begin = (tl.cast(sharing, tl.int64) * part // parts).to(tl.int32)
    end = (tl.cast(sharing, tl.int64) * (part + 1) // parts).to(tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for one in range(begin, end):
        n = tile_n + one % shared_n
        m = tile_m + one // shared_n % shared_m
        head = head_of + one // (shared_n * shared_m) % shared_heads
        sequence = batch_of + one // (shared_n * shared_m * shared_heads)
        total += _score_gradients(
            q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr,
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
            bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr,
            stride_q_batch, stride_q_head, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head,
            stride_dout_batch, stride_dout_head,
            sequence, head, m * BLOCK_M, n * BLOCK_N,
            batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
            softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
            stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
            block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
            origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
            STRIDE_Q_ROW, STRIDE_K_ROW, STRIDE_V_ROW, STRIDE_DOUT_ROW,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_E, BLOCK_M, BLOCK_N, CHUNK,
            PACKED, HAS_LEFT, HAS_RIGHT, TOP_LEFT, HAS_KEY_LENGTHS, DROPOUT, ALIGNED, PRECISION,
            STRIDE_BIAS_COLUMN, STRIDE_MASK_COLUMN, TILE_Q, TILE_K, PATTERNS,
        )  # fmt: skip
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if SHARED_ROWS:
        total = tl.sum(total, 0)[None, :]
        row = tl.zeros((1, 1), tl.int32)
    if SHARED_COLUMNS:
        total = tl.sum(total, 1)[:, None]
        column = tl.zeros((1, 1), tl.int32)
    plane = (tl.cast(part, tl.int64) * sums_batch + batch_of) * sums_heads + head_of
    offsets = (plane * sums_rows + row) * sums_columns + column
    tl.store(sums_ptr + offsets, total, mask=(row < sums_rows) & (column < sums_columns))


@triton.jit
def _score_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr,
    stride_q_batch, stride_q_head, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head,
    stride_dout_batch, stride_dout_head,
    sequence, head, first, start,
    batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_DOUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
):  # fmt: skip
    """ds of queries `first..first + M` and keys `start..start + N` of one head of one sequence: `[M, N]`."""
    begin_q, begin_k = 0, 0
    seq_q, seq_k = rows_q, rows_k
    if PACKED:
        begin_q, seq_q = sequence_rows(cu_seqlens_q_ptr, sequence, batch, rows_q)
        begin_k, seq_k = sequence_rows(cu_seqlens_k_ptr, sequence, batch, rows_k)
    keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    begin, _, _, end = key_tile_ranges(
        first, seq_q, shift, keys, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    dscores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PACKED or HAS_LEFT or HAS_RIGHT or HAS_KEY_LENGTHS or TILE_Q:
        needed = (first < seq_q) & (start >= begin) & (start < end)
    else:
        needed = True  # known to the compiler: without a branch it fetches tiles ahead
    if TILE_Q:
        entry, last_entry = line_entries(
            block_lists_ptr, block_offsets, stride_block_batch, stride_block_head, sequence, head, first // TILE_Q
        )
        blocks = (block_lists_ptr + block_tiles + entry, block_lists_ptr + block_kinds + entry, block_patterns_ptr)
        kind = kind_of_tile(blocks, last_entry - entry, start // TILE_K)
        needed = needed & (kind != EMPTY)
    if needed:
        head_kv = head // group
        q_base = head_pointer(q_ptr, sequence, begin_q, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
        k_base = head_pointer(k_ptr, sequence, begin_k, head_kv, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED)
        v_base = head_pointer(v_ptr, sequence, begin_k, head_kv, stride_v_batch, STRIDE_V_ROW, stride_v_head, PACKED)
        dout_base = head_pointer(
            dout_ptr, sequence, begin_q, head, stride_dout_batch, STRIDE_DOUT_ROW, stride_dout_head, PACKED
        )
        if CHUNK:
            scores = product_by_chunks(
                q_base, STRIDE_Q_ROW, first, seq_q, k_base, STRIDE_K_ROW, start, keys,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
            dprobs = product_by_chunks(
                dout_base, STRIDE_DOUT_ROW, first, seq_q, v_base, STRIDE_V_ROW, start, keys,
                HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_E, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, STRIDE_Q_ROW, first, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, False)
            k_tile = load_rows(k_base, STRIDE_K_ROW, start, keys, HEAD_DIM, BLOCK_N, BLOCK_D, False)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
            dout_tile = load_rows(dout_base, STRIDE_DOUT_ROW, first, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
            v_tile = load_rows(v_base, STRIDE_V_ROW, start, keys, HEAD_DIM_V, BLOCK_N, BLOCK_E, False)
            dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        row = first + tl.arange(0, BLOCK_M)
        column = start + tl.arange(0, BLOCK_N)
        statistics = statistics_ptr + 4 * (row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED) + row)
        lse = tl.load(statistics, mask=row < seq_q, other=float("inf"))
        delta = tl.load(statistics + 1, mask=row < seq_q, other=0.0)
        origin = (origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads)
        bias, mask, slope = None, None, None
        if bias_ptr is not None:
            offset = table_offset(sequence, head, stride_bias_batch, stride_bias_head)
            bias = (bias_ptr, offset, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns)
        if mask_ptr is not None:
            offset = table_offset(sequence, head, stride_mask_batch, stride_mask_head)
            mask = (mask_ptr, offset, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns)
        if alibi_slopes_ptr is not None:
            slope = load_slope(alibi_slopes_ptr, stride_alibi_batch, sequence, head, batch)
        modifiers = (softcap, bias, mask, slope, alibi_diagonal(seq_q, seq_k, origin))
        scores = modified_scores(
            scores, scale, row, column, modifiers, q_ptr.dtype.element_ty == tl.float32, TRANSPOSED=False
        )[0]
        if PATTERNS:
            scores = apply_pattern(
                scores, blocks, kind, first, start, BLOCK_M, BLOCK_N, TILE_Q, TILE_K, TRANSPOSED=False
            )
        visible = (row < seq_q)[:, None] & visible_pairs(
            row[:, None], column[None, :], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
        )
        probs = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
        if DROPOUT:
            kept = kept_weights(
                dropout_seed_ptr, dropout_matrix(sequence, head, heads, origin), first, start, origin, keep_threshold,
                BLOCK_M, BLOCK_N, ALIGNED,
            )  # fmt: skip
            dprobs = tl.where(kept, dprobs * keep_scale, 0.0)
        dscores = probs * (dprobs - delta[:, None])
    return dscores
