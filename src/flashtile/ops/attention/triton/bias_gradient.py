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

from flashtile.ops.attention.spec import Origin
from flashtile.ops.attention.triton.blocks import EMPTY, BlockLists, apply_pattern, kind_of_tile, load_line
from flashtile.ops.attention.triton.scores import (
    Dropout,
    Modifiers,
    ScoreFunction,
    Table,
    dropout_matrix,
    kept_weights,
    load_alibi,
    load_table,
    modified_scores,
)
from flashtile.ops.attention.triton.tiles import (
    LOG2_E,
    head_pointer,
    key_tile_ranges,
    product_by_chunks,
    row_pointers,
    row_statistics_offset,
    sequence_rows,
    valid_keys,
    visible_pairs,
)


@triton.jit
def attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, sums_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr, captured,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    stride_v_batch, stride_v_head,
    stride_dout_batch, stride_dout_head,
    batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    captured_sizes,
    sums_batch, sums_heads, sums_rows, sums_columns, longest_q, longest_k, sharing, parts,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_DOUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `sums`: `[parts, sums_batch, sums_heads, sums_rows, sums_columns]`, the sizes
    of the bias; in its dtype where there is one part, else float32. `WHOLE`, `ALL_VISIBLE`: of both sides, because both
    move. `longest_q`, `longest_k`: how many queries and keys a sequence has at most. `sharing`: how many tiles share
    one of the bias; in 64 bits where the loop counts past 32."""
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
    begin = (tl.cast(sharing, tl.int64) * part // parts).to(sharing.dtype)
    end = (tl.cast(sharing, tl.int64) * (part + 1) // parts).to(sharing.dtype)
    # All that shares a tile reads the same bias.
    origin = Origin(origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads)
    bias_table = Table(
        bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns
    )
    mask_table = Table(
        mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns
    )
    bias_tile = load_table(
        bias_table, batch_of, head_of, tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_M, BLOCK_N, float("nan"),
        TRANSPOSED=False,
    )  # fmt: skip
    # Tiles that a window hides are left out. Where all that shares a tile lies in the same place, the whole loop is:
    # a branch in the loop would keep tiles from being fetched ahead.
    BANDED: tl.constexpr = HAS_LEFT or HAS_RIGHT
    IN_PLACE: tl.constexpr = not (PACKED or HAS_KEY_LENGTHS or TILE_Q or SHARED_ROWS or SHARED_COLUMNS)
    if BANDED and IN_PLACE:
        shift = 0 if TOP_LEFT else rows_k - rows_q
        first_key, _, _, last_key = key_tile_ranges(
            tile_m * BLOCK_M, rows_q, shift, rows_k, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        end = tl.where((tile_n * BLOCK_N >= first_key) & (tile_n * BLOCK_N < last_key), end, begin)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    probs = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Two steps for each: the first makes p, the second dp and what it adds. Nothing stays on chip, and with one product
    # in a step half as much has to be there, so that more programs fit, or more tiles are on their way.
    for step in range(2 * begin, 2 * end):
        one = step // 2
        second = tl.cast(step % 2, tl.int32)
        start = (tile_n + tl.cast(one % shared_n, tl.int32)) * BLOCK_N
        first = (tile_m + tl.cast(one // shared_n % shared_m, tl.int32)) * BLOCK_M
        matrix = tl.cast(one // shared_n // shared_m, tl.int32)
        head = head_of + matrix % shared_heads
        sequence = batch_of + matrix // shared_heads
        begin_q, begin_k = 0, 0
        seq_q, seq_k = rows_q, rows_k
        if PACKED:
            begin_q, seq_q = sequence_rows(cu_seqlens_q_ptr, sequence, batch, rows_q)
            begin_k, seq_k = sequence_rows(cu_seqlens_k_ptr, sequence, batch, rows_k)
        keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
        shift = 0 if TOP_LEFT else seq_k - seq_q
        blocks, kind = None, 0
        if IN_PLACE or not (BANDED or PACKED or HAS_KEY_LENGTHS or TILE_Q):
            needed = True
        else:
            first_key, _, _, last_key = key_tile_ranges(
                first, seq_q, shift, keys, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
            needed = (first < seq_q) & (start >= first_key) & (start < last_key)
        if TILE_Q:
            lists = BlockLists(
                block_lists_ptr, block_offsets, block_tiles, block_kinds,
                stride_block_batch, stride_block_head,
            )  # fmt: skip
            line = first // TILE_Q
            if PACKED:
                # A mask ends where the longest sequence may.
                line = tl.where(needed, line, 0)
            blocks = load_line(lists, sequence, head, line)
            kind = kind_of_tile(blocks, start // TILE_K)
            needed = needed & (kind != EMPTY)
        if needed:
            product = _product(
                q_ptr, k_ptr, v_ptr, dout_ptr, second, sequence, head, head // group, begin_q, begin_k,
                stride_q_batch, stride_q_head, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head,
                stride_dout_batch, stride_dout_head, first, seq_q, start, keys,
                STRIDE_Q_ROW, STRIDE_K_ROW, STRIDE_V_ROW, STRIDE_DOUT_ROW,
                HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_E, BLOCK_M, BLOCK_N, CHUNK, PACKED, WHOLE, PRECISION,
            )  # fmt: skip
            row = first + tl.arange(0, BLOCK_M)
            statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED) + row
            if WHOLE:
                statistic = tl.load(statistics_ptr + 4 * statistics + second)
            else:
                statistic = tl.load(statistics_ptr + 4 * statistics + second, mask=row < seq_q, other=0.0)
            # Not inside of the branches: the compiler cannot fetch ahead for a product that is used there alone.
            product *= tl.where(second == 0, scale, keep_scale)
            if second == 0:
                alibi = load_alibi(
                    alibi_slopes_ptr, stride_alibi_batch, sequence, head, batch, seq_q, seq_k, origin.diagonal
                )
                function = ScoreFunction(captured, captured_sizes, None)
                modifiers = Modifiers(sequence, head, softcap, bias_table, alibi, mask_table, function)
                scores, _tanh = modified_scores(
                    product, 1.0, first, start, modifiers, q_ptr.dtype.element_ty == tl.float32, TRANSPOSED=False,
                    SCORE_FUNCTION=SCORE_FUNCTION, bias_tile=bias_tile,
                )  # fmt: skip
                if PATTERNS:
                    scores = apply_pattern(
                        scores, block_patterns_ptr, kind, first, start, BLOCK_M, BLOCK_N, TILE_Q, TILE_K,
                        TRANSPOSED=False,
                    )  # fmt: skip
                probs = tl.exp2(scores * LOG2_E - statistic[:, None])
                if not ALL_VISIBLE:
                    column = start + tl.arange(0, BLOCK_N)
                    visible = (row < seq_q)[:, None] & visible_pairs(
                        row[:, None], column[None, :], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
                    )
                    probs = tl.where(visible, probs, 0.0)
            else:
                if DROPOUT:
                    matrix_number = dropout_matrix(sequence, head, heads, origin)
                    dropout = Dropout(dropout_seed_ptr, matrix_number, origin, keep_threshold, keep_scale)
                    kept = kept_weights(dropout, first, start, BLOCK_M, BLOCK_N, ALIGNED)
                    product = tl.where(kept, product, 0.0)
                total += probs * (product - statistic[:, None])
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
    tl.store(sums_ptr + offsets, total.to(sums_ptr.dtype.element_ty), mask=(row < sums_rows) & (column < sums_columns))


@triton.jit
def _product(
    q_ptr, k_ptr, v_ptr, dout_ptr, second, sequence, head, head_kv, begin_q, begin_k,
    stride_q_batch, stride_q_head, stride_k_batch, stride_k_head, stride_v_batch, stride_v_head,
    stride_dout_batch, stride_dout_head, first, seq_q, start, keys,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr, STRIDE_DOUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`q kᵀ`, or `dout vᵀ` where `second` is 1, of queries `first..first + M` and keys `start..start + N`: `[M, N]`."""
    q_base = head_pointer(q_ptr, sequence, begin_q, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
    k_base = head_pointer(k_ptr, sequence, begin_k, head_kv, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED)
    v_base = head_pointer(v_ptr, sequence, begin_k, head_kv, stride_v_batch, STRIDE_V_ROW, stride_v_head, PACKED)
    dout_base = head_pointer(
        dout_ptr, sequence, begin_q, head, stride_dout_batch, STRIDE_DOUT_ROW, stride_dout_head, PACKED
    )
    if CHUNK:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if second == 0:
            product = product_by_chunks(
                q_base, STRIDE_Q_ROW, first, seq_q, k_base, STRIDE_K_ROW, start, keys,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            product = product_by_chunks(
                dout_base, STRIDE_DOUT_ROW, first, seq_q, v_base, STRIDE_V_ROW, start, keys,
                HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_E, CHUNK, PRECISION,
            )  # fmt: skip
    else:
        rows_tile = _load_either(
            second, q_base, STRIDE_Q_ROW, HEAD_DIM, dout_base, STRIDE_DOUT_ROW, HEAD_DIM_V, first, seq_q,
            BLOCK_M, max(BLOCK_D, BLOCK_E), WHOLE,
        )  # fmt: skip
        keys_tile = _load_either(
            second, k_base, STRIDE_K_ROW, HEAD_DIM, v_base, STRIDE_V_ROW, HEAD_DIM_V, start, keys,
            BLOCK_N, max(BLOCK_D, BLOCK_E), WHOLE,
        )  # fmt: skip
        product = tl.dot(rows_tile, tl.trans(keys_tile), input_precision=PRECISION)
    return product


@triton.jit
def _load_either(
    second, a_base, STRIDE_A_ROW: tl.constexpr, A_WIDTH: tl.constexpr, b_base, STRIDE_B_ROW: tl.constexpr,
    B_WIDTH: tl.constexpr, first, rows, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a, or of b where `second` is 1, by one instruction, so that tiles of either are fetched ahead."""
    base = tl.where(second == 0, a_base, b_base)
    if STRIDE_A_ROW == STRIDE_B_ROW:
        base = row_pointers(base, STRIDE_A_ROW, first, BLOCK_ROWS)
    else:
        stride = tl.where(second == 0, STRIDE_A_ROW, STRIDE_B_ROW).to(tl.int64)
        base = base + first * stride + tl.arange(0, BLOCK_ROWS)[:, None] * stride
    row = first + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    pointers = base + column[None, :]
    if A_WIDTH == BLOCK_COLUMNS and B_WIDTH == BLOCK_COLUMNS:
        if WHOLE:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    else:
        width = tl.where(second == 0, A_WIDTH, B_WIDTH)
        tile = tl.load(pointers, mask=(row < rows)[:, None] & (column < width)[None, :], other=0.0)
    return tile
