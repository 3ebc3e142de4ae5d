"""Forward kernel: one query tile per program, online softmax over the key tiles that it sees. And the kernel of column
sums, which has a key tile per program and no values.

For each key tile, with `c = scale · log2(e)`::

    s     = q kᵀ                      [M, N]
    m'    = max(m, rowmax(c·s))       [M]
    p     = exp2(c·s - m')            [M, N]
    alpha = exp2(m - m')              [M]
    l     = alpha·l + rowsum(p)       [M]
    acc   = alpha·acc + p v           [M, E]

and in the end `out = acc / l`, `lse = (m + log2 l) · ln 2`. Letters as in `tiles`. Key tiles come in three runs:
masked, wholly visible, masked; only the masked ones pay for mask arithmetic. If a soft cap, a bias, ALiBi or a mask
changes the scores, `c·s` is what `scores.modified_scores` makes of it. A sink is where `m` and `l` begin: `l = 1` at `m
= sink · log2(e)`. q and k in 8 bits are multiplied as they are, or come as bytes, as v does. The factors of q and k
join the scale, that of v joins `1 / l`.

Reference: Dao, "FlashAttention-2" (2023), algorithm 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.gpu.scores import (
    Modifiers,
    ScoreFunction,
    TableColumns,
    dropout_matrix,
    kept_weights,
    listed_tile,
    load_distance,
    load_line,
    raised_to_near,
    start_softmax,
    tile_scores,
)
from flashtile.ops.attention.gpu.tiles import (
    LEAST_SCALE,
    LN_2,
    LOG2_E,
    TileRanges,
    as_operand,
    head_pointer,
    key_tile_ranges,
    load_descale,
    load_rows,
    locate_tile,
    product_by_chunks,
    query_tile_ranges,
    row_statistics_offset,
    store_rows,
    valid_keys,
    visible_pairs,
)
from flashtile.ops.common.kernels import swizzles_differ


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_scores_ptr, side, captured,
    q_strides, k_strides, v_strides, out_strides,
    batch, heads, group, rows_q, rows_k, window, scale, numbers, softcap, captured_sizes, constants, shape,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """`side`, `numbers`: the side inputs (`parameters`). `..._strides`: `Strides`. `rows_q`, `rows_k`: seq_q and
    seq_k, or the totals of a packed call. `group`: query heads per key/value head. `window`: a `Window`. `shape`: a
    `TileShape`. `WHOLE`: the tiles that move divide their sequence. `ALL_VISIBLE`: none of them needs a mask.
    `ALIGNED`: as in `scores.kept_weights`. `MODIFIED`: something changes the scores. `max_scores_ptr`: the largest
    score of each row, in the shape of lse, where it is asked for."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
        tl.program_id(0), side.cu_seqlens_q, side.cu_seqlens_k, batch, heads, rows_q, rows_k, BLOCK=BLOCK_M,
        PACKED=PACKED, LAST_FIRST=constants.HAS_RIGHT, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_q:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, q_strides, sequence, begin_q + first, head, PACKED)
    k_base = head_pointer(k_ptr, k_strides, sequence, begin_k, head_kv, PACKED)
    v_base = head_pointer(v_ptr, v_strides, sequence, begin_k, head_kv, PACKED)

    keys = valid_keys(side.key_lengths, sequence, batch, seq_k)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    visited = key_tile_ranges(first, seq_q, shift, keys, window, constants, shape)

    descales = numbers.descales
    if side.descale_q is not None:
        scale *= load_descale(side.descale_q, descales.q, sequence, head_kv, batch)
    if side.descale_k is not None:
        scale *= load_descale(side.descale_k, descales.k, sequence, head_kv, batch)
    if side.descale_q is not None or side.descale_k is not None:
        # The host sees to the scale alone, not to its product with factors. NaN stays.
        scale = tl.where(tl.abs(scale) < LEAST_SCALE, LEAST_SCALE, scale)
    function = ScoreFunction(captured, captured_sizes, None)
    distance = load_distance(side, numbers, sequence, head, batch, seq_q, seq_k)
    matrix = dropout_matrix(numbers.origin, sequence, head, heads)
    blocks = None
    if constants.TILE_Q:
        blocks = load_line(side, numbers, sequence, head, first // constants.TILE_Q)
        visited = TileRanges(0, visited.full_begin, visited.full_end, blocks.entries * constants.TILE_K)
    row = tl.arange(0, BLOCK_M)
    columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
    modifiers = Modifiers(
        side, numbers, columns, softcap, function, sequence, head, distance=distance, near_keys=keys,
        dropout_matrix=matrix,
    )  # fmt: skip
    row_max, row_sum = start_softmax(modifiers, first, batch, BLOCK_M)
    acc, row_max, row_sum, score_max = _visit_key_tiles(
        q_base, k_base, v_base, q_strides, k_strides, v_strides, visited, first=first, seq_q=seq_q, keys=keys,
        shift=shift, window=window, scale=scale, row_max=row_max, row_sum=row_sum, modifiers=modifiers, blocks=blocks,
        constants=constants, shape=shape, WHOLE=WHOLE, ALL_VISIBLE=ALL_VISIBLE, ALIGNED=ALIGNED, PRECISION=PRECISION,
        MODIFIED=MODIFIED, MAX_SCORES=max_scores_ptr is not None, SCORE_FUNCTION=SCORE_FUNCTION,
    )  # fmt: skip

    # A row that saw no key has row_sum = 0 and acc = 0: its out is 0 and its lse -inf.
    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if side.dropout_seed is not None:
        inverse *= numbers.dropout.scale
    if side.descale_v is not None:
        inverse *= load_descale(side.descale_v, descales.v, sequence, head_kv, batch)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2)
    score_max *= LN_2
    lse = raised_to_near(lse, first + row, modifiers, -1)
    score_max = raised_to_near(score_max, first + row, modifiers, -1)
    statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
    lse_base = lse_ptr + statistics + first
    tl.store(lse_base + row, lse, mask=first + row < seq_q)
    if max_scores_ptr is not None:
        tl.store(max_scores_ptr + statistics + first + row, score_max, mask=first + row < seq_q)
    out_base = head_pointer(out_ptr, out_strides, sequence, begin_q + first, head, PACKED)
    out = acc * inverse[:, None]
    store_rows(out_base, out_strides, 0, seq_q - first, out, shape.HEAD_DIM_V, BLOCK_M, BLOCK_COLUMNS=shape.BLOCK_E)


@triton.jit
def _visit_key_tiles(
    q_base, k_base, v_base, q_strides, k_strides, v_strides, visited, first, seq_q, keys, shift, window, scale,
    row_max, row_sum, modifiers, blocks, constants, shape,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, MAX_SCORES: tl.constexpr, SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the key tiles of `visited`, or over those that `blocks` lists. `row_max`, `row_sum`: of
    `start_softmax`.

    Returns acc, row_max (in units of log2), row_sum, and row_max again, with `MAX_SCORES` without the sink.

    One loop with a branch for the masks, not one loop for each run of tiles: accumulators that pass from one loop to
    the next make ptxas serialise every matrix product of both on Hopper (its message C7515).
    """
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    CHUNK: tl.constexpr = shape.CHUNK
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    if MAX_SCORES:
        score_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # The scale is positive (launch sees to it), so it can wait until after the maximum, where nothing else comes first.
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    COLUMNS: tl.constexpr = CHUNK if CHUNK else BLOCK_D
    # A row of 8-bit numbers is as long as one of half as many columns.
    FP8: tl.constexpr = q_base.dtype.element_ty == tl.float8e4nv
    V_WITH_K: tl.constexpr = swizzles_differ(COLUMNS // 2 if FP8 else COLUMNS, BLOCK_E)
    row = first + tl.arange(0, BLOCK_M)
    if not CHUNK:
        q_tile = as_operand(
            load_rows(q_base, q_strides, 0, seq_q - first, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=False)
        )
    for step in tl.range(visited.begin, visited.end, BLOCK_N):
        start, kind = step, 0
        if blocks is not None:
            start, kind = listed_tile(blocks, step, constants.TILE_K, BLOCK_N)
        if not CHUNK:
            k_tile = as_operand(
                load_rows(k_base, k_strides, start, keys, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE=WHOLE)
            )
        if V_WITH_K:
            v_tile = as_operand(
                load_rows(v_base, v_strides, start, keys, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE=WHOLE)
            )
        if CHUNK:
            scores = product_by_chunks(
                q_base, q_strides, 0, seq_q - first, k_base, k_strides, start, b_rows=keys, HEAD_DIM=shape.HEAD_DIM,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_D, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        column = start + tl.arange(0, BLOCK_N)
        scores, _tanh = tile_scores(
            scores, scale, first, start, modifiers, kind, constants, MODIFIED=MODIFIED,
            PRECISE=q_base.dtype.element_ty == tl.float32, TRANSPOSED=False, SCORE_FUNCTION=SCORE_FUNCTION,
            BRANCHES=False,
        )  # fmt: skip
        if not ALL_VISIBLE and ((start < visited.full_begin) | (start >= visited.full_end)):
            visible = visible_pairs(row[:, None], column[None, :], shift, keys, window, constants)
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
        if modifiers.side.dropout_seed is not None:
            kept = kept_weights(modifiers, first, start, BLOCK_M, BLOCK_N, ALIGNED)
            probs = tl.where(kept, probs, 0.0)
        if not V_WITH_K:
            v_tile = as_operand(
                load_rows(v_base, v_strides, start, keys, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE=WHOLE)
            )
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
    if not MAX_SCORES:
        score_max = row_max
    return acc, row_max, row_sum, score_max


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
        tl.program_id(0), side.cu_seqlens_k, side.cu_seqlens_q, batch, heads, rows_k, rows_q, BLOCK=BLOCK_N,
        PACKED=PACKED, LAST_FIRST=False, BATCH_FIRST=BATCH_FIRST,
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
    distance = load_distance(side, numbers, sequence, head, batch, seq_q, seq_k)
    blocks = None
    if constants.TILE_Q:
        blocks = load_line(side, numbers, sequence, head, first // constants.TILE_K)
        visited = TileRanges(0, visited.full_begin, visited.full_end, blocks.entries * constants.TILE_Q)
    columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
    modifiers = Modifiers(
        side, numbers, columns, softcap, None, sequence, head, distance=distance, near_keys=keys, dropout_matrix=None
    )
    sums = _sum_weights(
        q_base, k_base, q_strides, k_strides, lse_base, visited, first, keys=keys, shift=shift, seq_q=seq_q,
        window=window, scale=scale, modifiers=modifiers, blocks=blocks, constants=constants, shape=shape, WHOLE=WHOLE,
        ALL_VISIBLE=ALL_VISIBLE, PRECISION=PRECISION, MODIFIED=MODIFIED,
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
    """The sum of the weights of rows in the query tiles of `visited`, or that `blocks` lists: `[N]`."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    CHUNK: tl.constexpr = shape.CHUNK
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    column = first + tl.arange(0, BLOCK_N)
    if not CHUNK:
        k_tile = load_rows(k_base, k_strides, 0, keys - first, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE=False)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(visited.begin, visited.end, BLOCK_M):
        start, kind = step, 0
        if blocks is not None:
            start, kind = listed_tile(blocks, step, constants.TILE_Q, BLOCK_M)
        row = start + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_base + row, mask=row < seq_q, other=float("-inf"))
        lse = raised_to_near(lse, row, modifiers, 1)
        # In units of log2; +inf for rows that saw nothing, so that their weights are 0.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
        if CHUNK:
            scores = product_by_chunks(
                q_base, q_strides, start, seq_q, k_base, k_strides, 0, b_rows=keys - first, HEAD_DIM=shape.HEAD_DIM,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_D, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, q_strides, start, seq_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=WHOLE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        scores, _tanh = tile_scores(
            scores, scale, start, first, modifiers, kind, constants, MODIFIED=MODIFIED,
            PRECISE=q_base.dtype.element_ty == tl.float32, TRANSPOSED=False, SCORE_FUNCTION=None, BRANCHES=True,
        )  # fmt: skip
        probs = tl.exp2(scores * unit - lse[:, None])
        if not ALL_VISIBLE and ((start < visited.full_begin) | (start >= visited.full_end)):
            visible = (row < seq_q)[:, None] & visible_pairs(
                row[:, None], column[None, :], shift, keys, window, constants
            )
            probs = tl.where(visible, probs, 0.0)
        total += probs
    return tl.sum(total, 0)
