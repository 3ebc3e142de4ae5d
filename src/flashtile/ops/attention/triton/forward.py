"""Forward kernel: one query tile per program, online softmax over the key tiles that it sees.

For each key tile, with `c = scale · log2(e)`::

    s     = q kᵀ                      [M, N]
    m'    = max(m, rowmax(c·s))       [M]
    p     = exp2(c·s - m')            [M, N]
    alpha = exp2(m - m')              [M]
    l     = alpha·l + rowsum(p)       [M]
    acc   = alpha·acc + p v           [M, E]

and in the end `out = acc / l`, `lse = (m + log2 l) · ln 2`. Letters as in `tiles`. Key tiles come in three runs:
masked, wholly visible, masked; only the masked ones pay for mask arithmetic. Where a soft cap, a bias, ALiBi or a mask
changes the scores, `c·s` is what `scores.modified_scores` makes of it. A sink is where `m` and `l` begin: `l = 1` at `m
= sink · log2(e)`. 8-bit operands come as bytes, and the factors of q and k join the scale, that of v joins `1 / l`.

Reference: Dao, "FlashAttention-2" (2023), algorithm 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.spec import Origin
from flashtile.ops.attention.triton.blocks import BlockLists, apply_pattern, listed_tile, load_line
from flashtile.ops.attention.triton.scores import (
    Dropout,
    Modifiers,
    ScoreFunction,
    Table,
    dropout_matrix,
    kept_weights,
    load_alibi,
    load_sink,
    modified_scores,
    start_softmax,
)
from flashtile.ops.attention.triton.tiles import (
    LEAST_SCALE,
    LN_2,
    LOG2_E,
    as_operand,
    head_pointer,
    key_tile_ranges,
    load_descale,
    load_rows,
    locate_tile,
    product_by_chunks,
    row_statistics_offset,
    store_rows,
    valid_keys,
    visible_pairs,
)
from flashtile.ops.common.triton.functions import swizzles_differ


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_scores_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, key_lengths_ptr, dropout_seed_ptr,
    bias_ptr, mask_ptr, alibi_slopes_ptr, block_lists_ptr, block_patterns_ptr, sinks_ptr,
    descale_q_ptr, descale_k_ptr, descale_v_ptr, captured,
    stride_q_batch, stride_q_head,
    stride_k_batch, stride_k_head,
    stride_v_batch, stride_v_head,
    stride_out_batch, stride_out_head,
    batch, heads, group, rows_q, rows_k, window_left, window_right, keep_threshold, scale, keep_scale,
    softcap, stride_bias_batch, stride_bias_head, stride_bias_row, bias_rows, bias_columns,
    stride_mask_batch, stride_mask_head, stride_mask_row, mask_rows, mask_columns, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, stride_block_batch, stride_block_head,
    origin_row, origin_column, origin_diagonal, origin_matrix, origin_heads,
    captured_sizes,
    stride_descale_q_batch, stride_descale_q_head, stride_descale_k_batch, stride_descale_k_head,
    stride_descale_v_batch, stride_descale_v_head,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    STRIDE_OUT_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TOP_LEFT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    HAS_KEY_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, STRIDE_BIAS_COLUMN: tl.constexpr, STRIDE_MASK_COLUMN: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """`rows_q`, `rows_k`: seq_q and seq_k, or the totals of a packed call. `group`: query heads per key/value head.
    `keep_scale`: 1 / (1 - dropout_p). `CHUNK`: columns of the head in one product, 0 for all of them. `WHOLE`: the
    tiles that move divide their sequence. `ALL_VISIBLE`: none of them needs a mask. `MODIFIED`: something changes the
    scores. `bias_rows`, `bias_columns` (and of the mask): how far it goes, endless where it broadcasts. `TILE_Q`,
    `TILE_K`: tiles of the block mask, 0 without; `PATTERNS`: some are partly visible; `block_offsets`, `block_tiles`,
    `block_kinds`: where in its lists those stand that this kernel reads. `max_scores_ptr`: the largest score of each
    row, in the shape of lse, where it is asked for."""
    sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, rows_k,
        BLOCK_M, PACKED, LAST_FIRST=HAS_RIGHT, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_q:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, sequence, begin_q + first, head, stride_q_batch, STRIDE_Q_ROW, stride_q_head, PACKED)
    k_base = head_pointer(k_ptr, sequence, begin_k, head_kv, stride_k_batch, STRIDE_K_ROW, stride_k_head, PACKED)
    v_base = head_pointer(v_ptr, sequence, begin_k, head_kv, stride_v_batch, STRIDE_V_ROW, stride_v_head, PACKED)

    keys = valid_keys(key_lengths_ptr, sequence, batch, seq_k, HAS_KEY_LENGTHS)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    begin, full_begin, full_end, end = key_tile_ranges(
        first, seq_q, shift, keys, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )

    if descale_q_ptr is not None:
        scale *= load_descale(descale_q_ptr, stride_descale_q_batch, stride_descale_q_head, sequence, head_kv, batch)
    if descale_k_ptr is not None:
        scale *= load_descale(descale_k_ptr, stride_descale_k_batch, stride_descale_k_head, sequence, head_kv, batch)
    if descale_q_ptr is not None or descale_k_ptr is not None:
        # The host sees to the scale alone, not to its product with factors. NaN stays.
        scale = tl.where(tl.abs(scale) < LEAST_SCALE, LEAST_SCALE, scale)
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
        blocks = load_line(lists, sequence, head, first // TILE_Q)
        begin = 0
        end = blocks.entries * TILE_K
    sink = load_sink(sinks_ptr, head, sequence, batch)
    dropout = Dropout(
        dropout_seed_ptr, dropout_matrix(sequence, head, heads, origin), origin, keep_threshold, keep_scale
    )
    acc, row_max, row_sum, score_max = _visit_key_tiles(
        q_base, k_base, v_base, begin, full_begin, full_end, end,
        first, seq_q, keys, shift, window_left, window_right, scale, modifiers, blocks, block_patterns_ptr,
        sink, dropout,
        STRIDE_Q_ROW, STRIDE_K_ROW, STRIDE_V_ROW,
        HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, CHUNK,
        HAS_LEFT, HAS_RIGHT, WHOLE, ALL_VISIBLE, DROPOUT, ALIGNED, PRECISION, MODIFIED, TILE_Q, TILE_K, PATTERNS,
        MAX_SCORES=max_scores_ptr is not None, SCORE_FUNCTION=SCORE_FUNCTION,
    )  # fmt: skip

    # A row that saw no key has row_sum = 0 and acc = 0: its out is 0 and its lse -inf.
    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if DROPOUT:
        inverse *= dropout.scale
    if descale_v_ptr is not None:
        inverse *= load_descale(descale_v_ptr, stride_descale_v_batch, stride_descale_v_head, sequence, head_kv, batch)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2)
    row = tl.arange(0, BLOCK_M)
    statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
    lse_base = lse_ptr + statistics + first
    tl.store(lse_base + row, lse, mask=first + row < seq_q)
    if max_scores_ptr is not None:
        tl.store(max_scores_ptr + statistics + first + row, score_max * LN_2, mask=first + row < seq_q)
    out_base = head_pointer(
        out_ptr, sequence, begin_q + first, head, stride_out_batch, STRIDE_OUT_ROW, stride_out_head, PACKED
    )
    store_rows(out_base, STRIDE_OUT_ROW, 0, seq_q - first, acc * inverse[:, None], HEAD_DIM_V, BLOCK_M, BLOCK_E)


@triton.jit
def _visit_key_tiles(
    q_base, k_base, v_base, begin, full_begin, full_end, end,
    first, seq_q, keys, shift, window_left, window_right, scale, modifiers, blocks, patterns_ptr, sink, dropout,
    STRIDE_Q_ROW: tl.constexpr, STRIDE_K_ROW: tl.constexpr, STRIDE_V_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, DROPOUT: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PATTERNS: tl.constexpr,
    MAX_SCORES: tl.constexpr, SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the key tiles from `begin` to `end`, or over those that `blocks` lists.

    Returns acc, row_max (in units of log2), row_sum, and row_max again, with `MAX_SCORES` without the sink.

    One loop with a branch for the masks, not one loop for each run of tiles: accumulators that pass from one loop to
    the next make ptxas serialise every matrix product of both on Hopper (its message C7515).
    """
    row_max, row_sum = start_softmax(sink, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    if MAX_SCORES:
        score_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # The scale is positive (launch sees to it), so it can wait until after the maximum, where nothing else comes first.
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    V_WITH_K: tl.constexpr = swizzles_differ(CHUNK if CHUNK else BLOCK_D, BLOCK_E)
    row = first + tl.arange(0, BLOCK_M)
    if not CHUNK:
        q_tile = as_operand(load_rows(q_base, STRIDE_Q_ROW, 0, seq_q - first, HEAD_DIM, BLOCK_M, BLOCK_D, False))
    for step in tl.range(begin, end, BLOCK_N):
        start = step
        if TILE_K:
            start, kind = listed_tile(blocks, step, TILE_K, BLOCK_N)
        if not CHUNK:
            k_tile = as_operand(load_rows(k_base, STRIDE_K_ROW, start, keys, HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE))
        if V_WITH_K:
            v_tile = as_operand(load_rows(v_base, STRIDE_V_ROW, start, keys, HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE))
        if CHUNK:
            scores = product_by_chunks(
                q_base, STRIDE_Q_ROW, 0, seq_q - first, k_base, STRIDE_K_ROW, start, keys,
                HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        column = start + tl.arange(0, BLOCK_N)
        if MODIFIED:
            scores, _tanh = modified_scores(
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
            scores = apply_pattern(
                scores, patterns_ptr, kind, first, start, BLOCK_M, BLOCK_N, TILE_Q, TILE_K, TRANSPOSED=False
            )
        if not ALL_VISIBLE and ((start < full_begin) | (start >= full_end)):
            visible = visible_pairs(
                row[:, None], column[None, :], shift, keys, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            scores = tl.where(visible, scores, float("-inf"))
        tile_max = tl.max(scores, 1) * unit
        new_max = tl.maximum(row_max, tile_max)
        if MAX_SCORES:
            score_max = tl.maximum(score_max, tile_max)
        # While a row has seen nothing its maximum is -inf, and -inf - -inf would be NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores * unit - finite_max[:, None])
        alpha = tl.exp2(row_max - finite_max)
        row_sum = row_sum * alpha + tl.sum(probs, 1)
        row_max = new_max
        if DROPOUT:
            kept = kept_weights(dropout, first, start, BLOCK_M, BLOCK_N, ALIGNED)
            probs = tl.where(kept, probs, 0.0)
        if not V_WITH_K:
            v_tile = as_operand(load_rows(v_base, STRIDE_V_ROW, start, keys, HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE))
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
    if not MAX_SCORES:
        score_max = row_max
    return acc, row_max, row_sum, score_max
