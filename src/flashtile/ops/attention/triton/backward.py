"""Backward kernels, recomputing the probabilities from `lse`: dq over query tiles, then dk and dv over key tiles.

With `p = exp(scale·s - lse)`, keep mask `z = kept / (1 - dropout_p)` (1 without dropout)::

    delta = rowsum(dout · out) - dlse        [M]
    dv    = (p·z)ᵀ dout                      [N, E]
    dp    = z · (dout vᵀ)                    [M, N]
    ds    = p · (dp - delta)                 [M, N]
    dq    = scale · ds k                     [M, D]
    dk    = scale · dsᵀ q                    [N, D]

`exp` takes the scores as `scores.modified_scores` makes them, and in front of a soft cap ds has its derivative too. The
gradient of the bias is ds, summed by a kernel of its own (`bias_gradient`).

The dq kernel also writes, for the kernels after it, delta, lse in units of log2, and where rows may see no key the dout
to read. Each output tile has one owner that sums in a fixed order: no atomics, so the gradients are the same in every
run. Letters as in `tiles`.

Reference: Dao et al., "FlashAttention" (2022), algorithm 4; Dao, "FlashAttention-2" (2023), section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.spec import Origin
from flashtile.ops.attention.triton.blocks import BlockLists, apply_pattern, listed_tile, load_line
from flashtile.ops.attention.triton.ordered_sums import program_of_wave
from flashtile.ops.attention.triton.scores import (
    Dropout,
    Modifiers,
    ScoreFunction,
    Table,
    alibi_distance,
    dropout_matrix,
    function_gradient,
    kept_weights,
    load_alibi,
    modified_scores,
    sees_sink_alone,
    uncapped_gradient,
)
from flashtile.ops.attention.triton.tiles import (
    LOG2_E,
    head_pointer,
    key_tile_ranges,
    load_rows,
    locate_tile,
    product_by_chunks,
    query_tile_ranges,
    row_statistics_offset,
    store_rows,
    valid_keys,
    visible_pairs,
)


@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, statistics_ptr, dq_ptr, slope_sums_ptr, quiet_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr, sinks_ptr, captured, captured_sums,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    stride_v_batch, stride_v_head,
    stride_out_batch, stride_out_head,
    stride_dout_batch, stride_dout_head,
    stride_dq_batch, stride_dq_head,
    batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    captured_sizes,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_OUT_ROW: tl.constexpr, STRIDE_DOUT_ROW: tl.constexpr, STRIDE_DQ_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, HAS_DLSE: tl.constexpr,
    PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr, IN_WAVES: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `slope_sums_ptr`, where ALiBi's slopes want a gradient: what each row adds to
    it, in the shape of lse. `quiet_ptr`, where rows may see no key: dout for the other kernels, in the layout of out,
    with zeros in these rows, whose weights of 0 would not stop NaN there. `sinks_ptr`: those that lse counts, beside
    it; with `HAS_DLSE` the statistics then have a third number, the delta of the sinks. `IN_WAVES`: the thread blocks
    of the call come in several launches, see `ordered_sums`."""
    program = tl.program_id(0)
    if IN_WAVES:
        program, exists = program_of_wave(captured_sums.wave)
    sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
        program, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, rows_k,
        BLOCK_M, PACKED, LAST_FIRST=HAS_RIGHT, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if IN_WAVES:
        first = tl.where(exists, first, seq_q)
    if first >= seq_q:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, sequence, begin_q + first, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
    k_base = head_pointer(k_ptr, sequence, begin_k, head_kv, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED)
    v_base = head_pointer(v_ptr, sequence, begin_k, head_kv, stride_v_batch, STRIDE_V_ROW, stride_v_head, PACKED)
    out_base = head_pointer(
        out_ptr, sequence, begin_q + first, head, stride_out_batch, STRIDE_OUT_ROW, stride_out_head, PACKED
    )
    dout_base = head_pointer(
        dout_ptr, sequence, begin_q + first, head, stride_dout_batch, STRIDE_DOUT_ROW, stride_dout_head, PACKED
    )

    rows_left = seq_q - first
    row = tl.arange(0, BLOCK_M)
    statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED) + first + row
    dout_tile = load_rows(dout_base, STRIDE_DOUT_ROW, 0, rows_left, HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
    out_tile = load_rows(out_base, STRIDE_OUT_ROW, 0, rows_left, HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
    lse = tl.load(lse_ptr + statistics, mask=row < rows_left, other=float("-inf"))
    # In units of log2; +inf for rows that saw no key, so that their p is 0.
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if quiet_ptr is not None:
        hidden = lse == float("inf")
        if sinks_ptr is not None:
            # A row with tiny weights may look like one that sees its sink alone, and has gradients; so finite numbers,
            # which do no harm, stay. As out is 0, delta is NaN where dout is not finite.
            alone = sees_sink_alone(lse, tl.load(sinks_ptr + head), out_tile)
            hidden = hidden | (alone & (delta != delta))
        delta = tl.where(hidden, 0.0, delta)
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + statistics, mask=row < rows_left, other=0.0)
        # A row that saw no key has no gradient, even where its dlse is NaN (as when two such rows are merged).
        delta -= tl.where(lse == float("inf"), 0.0, dlse)
        if sinks_ptr is not None:
            # What comes through lse to a row that sees its sink alone is the sink's, and nobody else's.
            tl.store(statistics_ptr + 4 * statistics + 2, delta, mask=row < rows_left)
            delta = tl.where(alone, tl.where(tl.abs(delta) < float("inf"), delta, 0.0), delta)
    pair = tl.arange(0, 2)[None, :]
    tl.store(statistics_ptr + 4 * statistics[:, None] + pair, tl.join(lse, delta), mask=(row < rows_left)[:, None])
    if quiet_ptr is not None:
        # From here on +inf marks all of them. The loop reads dout as it came: here a row spreads to itself alone.
        quiet_base = head_pointer(
            quiet_ptr, sequence, begin_q + first, head, stride_out_batch, STRIDE_OUT_ROW, stride_out_head, PACKED
        )
        quiet_tile = tl.where(hidden[:, None], 0.0, dout_tile)
        store_rows(quiet_base, STRIDE_OUT_ROW, 0, rows_left, quiet_tile, HEAD_DIM_V, BLOCK_M, BLOCK_E)
        lse = tl.where(hidden, float("inf"), lse)

    keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    begin, full_begin, full_end, end = key_tile_ranges(
        first, seq_q, shift, keys, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    origin = Origin(origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads)
    bias_table = Table(
        bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns
    )
    mask_table = Table(
        mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns
    )
    alibi = load_alibi(alibi_slopes_ptr, stride_alibi_batch, sequence, head, batch, seq_q, seq_k, origin.diagonal)
    function = ScoreFunction(captured, captured_sizes, captured_sums)
    modifiers = Modifiers(sequence, head, softcap, bias_table, alibi, mask_table, function)
    blocks = None
    if TILE_Q:
        lists = BlockLists(
            block_lists_ptr, block_offsets, block_tiles, block_kinds,
            stride_block_batch, stride_block_head,
        )  # fmt: skip
        blocks = load_line(lists, sequence, head, first // TILE_Q)
        begin = 0
        end = blocks.entries * TILE_K
    dropout = Dropout(
        dropout_seed_ptr, dropout_matrix(sequence, head, heads, origin), origin, keep_threshold, keep_scale
    )
    dq, slope_sums = _sum_dq(
        q_base, dout_base, k_base, v_base,
        lse, delta, rows_left, begin, full_begin, full_end, end,
        first, keys, shift, window_left, window_right, scale, modifiers, blocks, block_patterns_ptr, dropout,
        STRIDE_Q_ROW, STRIDE_DOUT_ROW, STRIDE_K_ROW, STRIDE_V_ROW,
        HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, CHUNK,
        HAS_LEFT, HAS_RIGHT, WHOLE, ALL_VISIBLE, DROPOUT, ALIGNED, PRECISION, MODIFIED, TILE_Q, TILE_K, PATTERNS,
        SUMS_SLOPES=slope_sums_ptr is not None, SCORE_FUNCTION=SCORE_FUNCTION, SCORE_DERIVATIVE=SCORE_DERIVATIVE,
    )  # fmt: skip
    if quiet_ptr is not None:
        dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)
        slope_sums = tl.where(lse == float("inf"), 0.0, slope_sums)
    if slope_sums_ptr is not None:
        tl.store(slope_sums_ptr + statistics, slope_sums, mask=row < rows_left)
    dq_base = head_pointer(
        dq_ptr, sequence, begin_q + first, head, stride_dq_batch, STRIDE_DQ_ROW, stride_dq_head, PACKED
    )
    store_rows(dq_base, STRIDE_DQ_ROW, 0, rows_left, dq * scale, HEAD_DIM, BLOCK_M, BLOCK_D)


@triton.jit
def _sum_dq(
    q_base, dout_base, k_base, v_base,
    lse, delta, rows_left, begin, full_begin, full_end, end,
    first, keys, shift, window_left, window_right, scale, modifiers, blocks, patterns_ptr, dropout,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_DOUT_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr,
    STRIDE_V_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
    SUMS_SLOPES: tl.constexpr, SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """The sum of `ds k` (without the scale) over the key tiles from `begin` to `end`: dq, `[M, D]`; for ALiBi, that of
    ds by the distance, `[M]`."""
    slope_sums = tl.zeros((BLOCK_M,), tl.float32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row = first + tl.arange(0, BLOCK_M)
    if not CHUNK:
        q_tile = load_rows(q_base, STRIDE_Q_ROW, 0, rows_left, HEAD_DIM, BLOCK_M, BLOCK_D, False)
        dout_tile = load_rows(dout_base, STRIDE_DOUT_ROW, 0, rows_left, HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(begin, end, BLOCK_N):
        start = step
        if TILE_K:
            start, kind = listed_tile(blocks, step, TILE_K, BLOCK_N)
        k_tile = load_rows(k_base, STRIDE_K_ROW, start, keys, HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE)
        if CHUNK:
            scores = product_by_chunks(
                q_base, STRIDE_Q_ROW, 0, rows_left, k_base, STRIDE_K_ROW, start, keys,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
            dprobs = product_by_chunks(
                dout_base, STRIDE_DOUT_ROW, 0, rows_left, v_base, STRIDE_V_ROW, start, keys,
                HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_E, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            v_tile = load_rows(v_base, STRIDE_V_ROW, start, keys, HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
            dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        column = start + tl.arange(0, BLOCK_N)
        if MODIFIED:
            scores, tanh = modified_scores(
                scores,
                scale,
                first,
                start,
                modifiers,
                q_base.dtype.element_ty == tl.float32,
                TRANSPOSED=False,
                SCORE_FUNCTION=SCORE_FUNCTION,
            )
        if PATTERNS:
            if kind >= 0:
                scores = apply_pattern(
                    scores, patterns_ptr, kind, first, start, BLOCK_M, BLOCK_N, TILE_Q, TILE_K, TRANSPOSED=False
                )
        probs = tl.exp2(scores * unit - lse[:, None])
        if not ALL_VISIBLE and ((start < full_begin) | (start >= full_end)):
            visible = visible_pairs(
                row[:, None], column[None, :], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            probs = tl.where(visible, probs, 0.0)
        if DROPOUT:
            kept = kept_weights(dropout, first, start, BLOCK_M, BLOCK_N, ALIGNED)
            dprobs = tl.where(kept, dprobs * dropout.scale, 0.0)
        dscores = probs * (dprobs - delta[:, None])
        if SUMS_SLOPES:
            slope_sums += tl.sum(dscores * alibi_distance(row, column, modifiers.alibi, TRANSPOSED=False), 1)
        if SCORE_DERIVATIVE is not None:
            # Rows past the end, too, whose weights may be NaN.
            hidden = (probs == 0.0) | (lse == float("inf"))[:, None]
            dscores = function_gradient(
                dscores, hidden, tanh, scale, first, start, modifiers,
                TRANSPOSED=False, SCORE_DERIVATIVE=SCORE_DERIVATIVE,
            )  # fmt: skip
        if MODIFIED:
            dscores = uncapped_gradient(dscores, tanh, modifiers)
        dq = tl.dot(dscores.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, slope_sums


@triton.jit
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr, captured,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    stride_v_batch, stride_v_head,
    stride_dout_batch, stride_dout_head,
    stride_dk_batch, stride_dk_head,
    stride_dv_batch, stride_dv_head,
    batch, heads, group, shares, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    captured_sizes,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_DOUT_ROW: tl.constexpr, STRIDE_DK_ROW: tl.constexpr, STRIDE_DV_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. A program owns one key tile of one key/value head and sums over the `group`
    query heads of one of the `shares` of those that read it: dk and dv count each key/value head `shares` times."""
    heads_kv = heads // group
    sequence, head_kv, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
        tl.program_id(0), cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads_kv, rows_k, rows_q,
        BLOCK_N, PACKED, LAST_FIRST=False, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_k:
        return
    keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    begin, full_begin, full_end, end = query_tile_ranges(
        first, keys, shift, seq_q, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    k_base = head_pointer(
        k_ptr, sequence, begin_k + first, head_kv // shares, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED
    )
    v_base = head_pointer(
        v_ptr, sequence, begin_k + first, head_kv // shares, stride_v_batch, STRIDE_V_ROW, stride_v_head, PACKED
    )
    if not CHUNK:
        k_tile = load_rows(k_base, STRIDE_K_ROW, 0, keys - first, HEAD_DIM, BLOCK_N, BLOCK_D, False)
        v_tile = load_rows(v_base, STRIDE_V_ROW, 0, keys - first, HEAD_DIM_V, BLOCK_N, BLOCK_E, False)
    else:
        k_tile = None
        v_tile = None
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)

    for head in range(head_kv * group, head_kv * group + group):
        q_base = head_pointer(q_ptr, sequence, begin_q, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
        dout_base = head_pointer(
            dout_ptr, sequence, begin_q, head, stride_dout_batch, STRIDE_DOUT_ROW, stride_dout_head, PACKED
        )
        statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
        origin = Origin(origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads)
        bias_table = Table(
            bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns
        )
        mask_table = Table(
            mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns
        )
        alibi = load_alibi(alibi_slopes_ptr, stride_alibi_batch, sequence, head, batch, seq_q, seq_k, origin.diagonal)
        function = ScoreFunction(captured, captured_sizes, None)
        modifiers = Modifiers(sequence, head, softcap, bias_table, alibi, mask_table, function)
        blocks = None
        if TILE_Q:
            lists = BlockLists(
                block_lists_ptr, block_offsets, block_tiles, block_kinds,
                stride_block_batch, stride_block_head,
            )  # fmt: skip
            blocks = load_line(lists, sequence, head, first // TILE_K)
            begin = 0
            end = blocks.entries * TILE_Q
        dropout = Dropout(
            dropout_seed_ptr, dropout_matrix(sequence, head, heads, origin), origin, keep_threshold, keep_scale
        )
        dk, dv = _sum_dkdv(
            dk, dv, k_tile, v_tile, k_base, v_base, q_base, dout_base, statistics_ptr + 4 * statistics,
            begin, full_begin, full_end, end,
            first, keys, shift, seq_q, window_left, window_right, scale, modifiers, blocks, block_patterns_ptr, dropout,
            STRIDE_K_ROW, STRIDE_V_ROW, STRIDE_Q_ROW, STRIDE_DOUT_ROW,
            HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, CHUNK,
            HAS_LEFT, HAS_RIGHT, WHOLE, ALL_VISIBLE, DROPOUT, ALIGNED, PRECISION, MODIFIED, TILE_Q, TILE_K, PATTERNS,
            SCORE_FUNCTION, SCORE_DERIVATIVE,
        )  # fmt: skip

    # Keys past their length read as zeros above; what they gathered is not theirs.
    valid = (first + tl.arange(0, BLOCK_N) < keys)[:, None]
    dk = tl.where(valid, dk * scale, 0.0)
    dv = tl.where(valid, dv, 0.0)
    dk_base = head_pointer(
        dk_ptr, sequence, begin_k + first, head_kv, stride_dk_batch, STRIDE_DK_ROW, stride_dk_head, PACKED
    )
    dv_base = head_pointer(
        dv_ptr, sequence, begin_k + first, head_kv, stride_dv_batch, STRIDE_DV_ROW, stride_dv_head, PACKED
    )
    store_rows(dk_base, STRIDE_DK_ROW, 0, seq_k - first, dk, HEAD_DIM, BLOCK_N, BLOCK_D)
    store_rows(dv_base, STRIDE_DV_ROW, 0, seq_k - first, dv, HEAD_DIM_V, BLOCK_N, BLOCK_E)


@triton.jit
def _sum_dkdv(
    dk, dv, k_tile, v_tile, k_base, v_base, q_base, dout_base, statistics_base,
    begin, full_begin, full_end, end,
    first, keys, shift, seq_q, window_left, window_right, scale, modifiers, blocks, patterns_ptr, dropout,
    STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr, STRIDE_Q_ROW: tl.constexpr,
    STRIDE_DOUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Adds `dsᵀ q` (without the scale) and `(p·z)ᵀ dout` of the query tiles from `begin` to `end` to dk and dv.

    Everything is computed transposed, keys by queries, so that the products need no transposed operand in registers.
    """
    column = first + tl.arange(0, BLOCK_N)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(begin, end, BLOCK_M):
        start = step
        if TILE_Q:
            start, kind = listed_tile(blocks, step, TILE_Q, BLOCK_M)
        row = start + tl.arange(0, BLOCK_M)
        lse, delta = _load_statistics(statistics_base, row, seq_q, WHOLE)
        if CHUNK:
            scores = product_by_chunks(
                k_base, STRIDE_K_ROW, 0, keys - first, q_base, STRIDE_Q_ROW, start, seq_q,
                HEAD_DIM, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, STRIDE_Q_ROW, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [N, M]
        # Both products before the exponentials: 5 % faster than one on either side of them.
        dout_tile = load_rows(dout_base, STRIDE_DOUT_ROW, start, seq_q, HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE)
        if CHUNK:
            dprobs = product_by_chunks(
                v_base, STRIDE_V_ROW, 0, keys - first, dout_base, STRIDE_DOUT_ROW, start, seq_q,
                HEAD_DIM_V, BLOCK_N, BLOCK_M, BLOCK_E, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            dprobs = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)  # [N, M]
        if MODIFIED:
            scores, tanh = modified_scores(
                scores,
                scale,
                start,
                first,
                modifiers,
                q_base.dtype.element_ty == tl.float32,
                TRANSPOSED=True,
                SCORE_FUNCTION=SCORE_FUNCTION,
            )
        if PATTERNS:
            if kind >= 0:
                scores = apply_pattern(
                    scores, patterns_ptr, kind, start, first, BLOCK_M, BLOCK_N, TILE_Q, TILE_K, TRANSPOSED=True
                )
        probs = tl.exp2(scores * unit - lse[None, :])
        if not ALL_VISIBLE and ((start < full_begin) | (start >= full_end)):
            visible = (row < seq_q)[None, :] & visible_pairs(
                row[None, :], column[:, None], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            probs = tl.where(visible, probs, 0.0)
        weights = probs
        if DROPOUT:
            kept = tl.trans(kept_weights(dropout, start, first, BLOCK_M, BLOCK_N, ALIGNED))
            weights = tl.where(kept, probs * dropout.scale, 0.0)
            dprobs = tl.where(kept, dprobs * dropout.scale, 0.0)
        dv = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
        dscores = probs * (dprobs - delta[None, :])
        if SCORE_DERIVATIVE is not None:
            dscores = function_gradient(
                dscores, probs == 0.0, tanh, scale, start, first, modifiers,
                TRANSPOSED=True, SCORE_DERIVATIVE=SCORE_DERIVATIVE,
            )  # fmt: skip
        if MODIFIED:
            dscores = uncapped_gradient(dscores, tanh, modifiers)
        if CHUNK:
            q_tile = load_rows(q_base, STRIDE_Q_ROW, start, seq_q, HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE)
        dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _load_statistics(base, row, rows, WHOLE: tl.constexpr):
    """lse (in units of log2) and delta of some rows.

    They lie side by side in 16 bytes, half of them unused: a tile of them is then large enough that the compiler
    loads it once for all threads, not once in each (40 load instructions per tile against 9, and fewer spills).
    """
    pointers = base + 4 * row[:, None] + tl.arange(0, 4)[None, :]  # [M, 4]
    if WHOLE:
        quads = tl.load(pointers)
    else:
        quads = tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    evens, odds = tl.split(tl.reshape(quads, (quads.shape[0], 2, 2)))
    lse, _ = tl.split(evens)
    delta, _ = tl.split(odds)
    return lse, delta
