"""Backward kernels, recomputing the probabilities from `lse`: dq over query tiles, then dk and dv over key tiles. Where
one tile holds all queries of a sequence and one all keys, one kernel computes all three.

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

from flashtile.ops.attention.gpu.bias_gradient import store_part
from flashtile.ops.attention.gpu.scores import (
    Modifiers,
    ScoreFunction,
    TableColumns,
    apart_from_near,
    dropout_matrix,
    function_gradient,
    kept_weights,
    listed_tile,
    load_distance,
    load_line,
    load_table,
    moved_near,
    sees_logit_alone,
    slope_gradients,
    tile_scores,
    uncapped_gradient,
    wave_program,
)
from flashtile.ops.attention.gpu.tiles import (
    LOG2_E,
    TileRanges,
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
    q_ptr, k_ptr, v_ptr, rows, dq_ptr, side, captured, captured_sums,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides,
    batch, heads, group, rows_q, rows_k, window, scale, numbers, softcap, captured_sizes, constants, shape,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr, IN_WAVES: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `rows`: `RowTensors`. `side.sinks`: those that lse counts, beside
    `rows.quiet`. `IN_WAVES`: the thread blocks of the call come in several launches, see `scores`."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    program = tl.program_id(0)
    if IN_WAVES:
        program, exists = wave_program(captured_sums.wave)
    sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
        program, side.cu_seqlens_q, side.cu_seqlens_k, batch, heads, rows_q, rows_k, BLOCK=BLOCK_M, PACKED=PACKED,
        LAST_FIRST=constants.HAS_RIGHT, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if IN_WAVES:
        first = tl.where(exists, first, seq_q)
    if first >= seq_q:
        return
    head_kv = head // group
    q_base = head_pointer(q_ptr, q_strides, sequence, begin_q + first, head, PACKED)
    k_base = head_pointer(k_ptr, k_strides, sequence, begin_k, head_kv, PACKED)
    v_base = head_pointer(v_ptr, v_strides, sequence, begin_k, head_kv, PACKED)
    out_base = head_pointer(rows.out, out_strides, sequence, begin_q + first, head, PACKED)
    dout_base = head_pointer(rows.dout, dout_strides, sequence, begin_q + first, head, PACKED)

    rows_left = seq_q - first
    row = tl.arange(0, BLOCK_M)
    statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED) + first + row
    keys = valid_keys(side.key_lengths, sequence, batch, seq_k)
    distance = load_distance(side, numbers, sequence, head, batch, seq_q, seq_k)
    dout_tile = load_rows(dout_base, dout_strides, 0, rows_left, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=False)
    out_tile = load_rows(out_base, out_strides, 0, rows_left, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=False)
    apart = apart_from_near(first + row, distance, keys)
    lse, delta, hidden = row_statistics_tile(
        rows, statistics, first + row < seq_q, out_tile, dout_tile, side, head, distance=distance, apart=apart,
        HIDES_ROWS=rows.quiet is not None,
    )  # fmt: skip
    if rows.quiet is not None:
        # From here on +inf marks all of them. The loop reads dout as it came: here a row spreads to itself alone.
        quiet_base = head_pointer(rows.quiet, out_strides, sequence, begin_q + first, head, PACKED)
        quiet_tile = tl.where(hidden[:, None], 0.0, dout_tile)
        store_rows(quiet_base, out_strides, 0, rows_left, quiet_tile, shape.HEAD_DIM_V, BLOCK_M, BLOCK_COLUMNS=BLOCK_E)
        lse = tl.where(hidden, float("inf"), lse)

    shift = 0 if TOP_LEFT else seq_k - seq_q
    visited = key_tile_ranges(first, seq_q, shift, keys, window, constants, shape)
    function = ScoreFunction(captured, captured_sizes, captured_sums)
    matrix = dropout_matrix(numbers.origin, sequence, head, heads)
    blocks = None
    if constants.TILE_Q:
        blocks = load_line(side, numbers, sequence, head, first // constants.TILE_Q)
        visited = TileRanges(0, visited.full_begin, visited.full_end, blocks.entries * constants.TILE_K)
    columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
    modifiers = Modifiers(
        side, numbers, columns, softcap, function, sequence, head, distance=distance, near_keys=keys,
        dropout_matrix=matrix,
    )  # fmt: skip
    dq, slope_sums = _sum_dq(
        q_base, dout_base, k_base, v_base, q_strides, dout_strides, k_strides, v_strides=v_strides, lse=lse,
        delta=delta, rows_left=rows_left, visited=visited, first=first, keys=keys, shift=shift, window=window,
        scale=scale, modifiers=modifiers, blocks=blocks, constants=constants, shape=shape, WHOLE=WHOLE,
        ALL_VISIBLE=ALL_VISIBLE, ALIGNED=ALIGNED, PRECISION=PRECISION, MODIFIED=MODIFIED,
        SUMS_SLOPES=rows.slope_sums is not None, SCORE_FUNCTION=SCORE_FUNCTION, SCORE_DERIVATIVE=SCORE_DERIVATIVE,
    )  # fmt: skip
    if rows.quiet is not None:
        dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)
        slope_sums = tl.where(lse == float("inf"), 0.0, slope_sums)
    if rows.slope_sums is not None:
        tl.store(rows.slope_sums + statistics, slope_sums, mask=row < rows_left)
    dq_base = head_pointer(dq_ptr, dq_strides, sequence, begin_q + first, head, PACKED)
    store_rows(dq_base, dq_strides, 0, rows_left, dq * scale, shape.HEAD_DIM, BLOCK_M, BLOCK_COLUMNS=BLOCK_D)


@triton.jit
def row_statistics_tile(
    rows, places, inside, out_tile, dout_tile, side, head, distance, apart, HIDES_ROWS: tl.constexpr
):  # fmt: skip
    """lse in units of log2 and delta of some rows, `[M]`, and which of them see no key. `places`: of rows in lse,
    `inside`: those that exist. With `distance` the lse is that of scores whose distances are less by `apart`.
    `HIDES_ROWS`: rows may see no key. Stores for the kernels that follow (`rows.statistics`) the lse that the forward
    returned and delta, with sinks and a dlse also a third number, the delta of the sinks, and with ALiBi a fourth, the
    lse that is returned here."""
    natural_lse = tl.load(rows.lse + places, mask=inside, other=float("-inf"))
    # In units of log2; +inf for rows that saw no key, so that their p is 0.
    lse = tl.where(natural_lse == float("-inf"), float("inf"), natural_lse * LOG2_E)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    hidden = lse == float("inf")
    alone = None
    if HIDES_ROWS:
        alone = sees_logit_alone(lse, side, head, out_tile)
        if alone is not None:
            # A row with tiny weights may look like one that sees its sink alone, and has gradients; so finite numbers,
            # which do no harm, stay. As out is 0, delta is NaN where dout is not finite.
            hidden = hidden | (alone & (delta != delta))
        delta = tl.where(hidden, 0.0, delta)
    if rows.dlse is not None:
        dlse = tl.load(rows.dlse + places, mask=inside, other=0.0)
        # A row that saw no key has no gradient, even where its dlse is NaN (as when two such rows are merged).
        delta -= tl.where(lse == float("inf"), 0.0, dlse)
        if alone is not None:
            # A gradient through lse to a row that sees its sink alone belongs to the sink, and to nobody else.
            tl.store(rows.statistics + 4 * places + 2, delta, mask=inside)
            delta = tl.where(alone, tl.where(tl.abs(delta) < float("inf"), delta, 0.0), delta)
    if rows.statistics is not None:
        pair = tl.arange(0, 2)[None, :]
        tl.store(rows.statistics + 4 * places[:, None] + pair, tl.join(lse, delta), mask=inside[:, None])
    if distance is not None:
        lse = tl.where(lse == float("inf"), lse, tl.fma(apart, distance.slope, natural_lse) * LOG2_E)
        if rows.statistics is not None:
            tl.store(rows.statistics + 4 * places + 3, lse, mask=inside)
    return lse, delta, hidden


@triton.jit
def _sum_dq(
    q_base, dout_base, k_base, v_base, q_strides, dout_strides, k_strides, v_strides,
    lse, delta, rows_left, visited, first, keys, shift, window, scale, modifiers, blocks, constants, shape,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, SUMS_SLOPES: tl.constexpr, SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """The sum of `ds k` (without the scale) over the key tiles of `visited`: dq, `[M, D]`; for ALiBi, that of ds by the
    distance, `[M]`."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    CHUNK: tl.constexpr = shape.CHUNK
    slope_sums = tl.zeros((BLOCK_M,), tl.float32)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row = first + tl.arange(0, BLOCK_M)
    if not CHUNK:
        q_tile = load_rows(q_base, q_strides, 0, rows_left, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=False)
        dout_tile = load_rows(dout_base, dout_strides, 0, rows_left, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=False)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(visited.begin, visited.end, BLOCK_N):
        start, kind = step, 0
        if blocks is not None:
            start, kind = listed_tile(blocks, step, constants.TILE_K, BLOCK_N)
        k_tile = load_rows(k_base, k_strides, start, keys, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE=WHOLE)
        if CHUNK:
            scores = product_by_chunks(
                q_base, q_strides, 0, rows_left, k_base, k_strides, start, b_rows=keys, HEAD_DIM=shape.HEAD_DIM,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_D, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
            dprobs = product_by_chunks(
                dout_base, dout_strides, 0, rows_left, v_base, v_strides, start, b_rows=keys, HEAD_DIM=shape.HEAD_DIM_V,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_E, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            v_tile = load_rows(v_base, v_strides, start, keys, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE=WHOLE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
            dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        column = start + tl.arange(0, BLOCK_N)
        scores, tanh = tile_scores(
            scores, scale, first, start, modifiers, kind, constants, MODIFIED=MODIFIED,
            PRECISE=q_base.dtype.element_ty == tl.float32, TRANSPOSED=False, SCORE_FUNCTION=SCORE_FUNCTION,
            BRANCHES=True,
        )  # fmt: skip
        probs = tl.exp2(scores * unit - lse[:, None])
        if not ALL_VISIBLE and ((start < visited.full_begin) | (start >= visited.full_end)):
            visible = visible_pairs(row[:, None], column[None, :], shift, keys, window, constants)
            probs = tl.where(visible, probs, 0.0)
        if modifiers.side.dropout_seed is not None:
            kept = kept_weights(modifiers, first, start, BLOCK_M, BLOCK_N, ALIGNED)
            dprobs = tl.where(kept, dprobs * modifiers.numbers.dropout.scale, 0.0)
        dscores = probs * (dprobs - delta[:, None])
        if SUMS_SLOPES:
            slope_sums += slope_gradients(dscores, row, column, modifiers.distance)
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
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, dk_ptr, dv_ptr, side, captured,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    batch, heads, group, shares, rows_q, rows_k, window, scale, numbers, softcap, captured_sizes, constants, shape,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, MODIFIED: tl.constexpr, BATCH_FIRST: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. A program owns one key tile of one key/value head and sums over the `group`
    query heads of one of the `shares` of those that read it: dk and dv count each key/value head `shares` times."""
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    CHUNK: tl.constexpr = shape.CHUNK
    heads_kv = heads // group
    sequence, head_kv, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
        tl.program_id(0), side.cu_seqlens_k, side.cu_seqlens_q, batch, heads_kv, rows_k, rows_q, BLOCK=BLOCK_N,
        PACKED=PACKED, LAST_FIRST=False, BATCH_FIRST=BATCH_FIRST,
    )  # fmt: skip
    if first >= seq_k:
        return
    keys = valid_keys(side.key_lengths, sequence, batch, seq_k)
    shift = 0 if TOP_LEFT else seq_k - seq_q
    visited = query_tile_ranges(first, keys, shift, seq_q, window, constants, shape)
    k_base = head_pointer(k_ptr, k_strides, sequence, begin_k + first, head_kv // shares, PACKED)
    v_base = head_pointer(v_ptr, v_strides, sequence, begin_k + first, head_kv // shares, PACKED)
    if not CHUNK:
        k_tile = load_rows(k_base, k_strides, 0, keys - first, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE=False)
        v_tile = load_rows(v_base, v_strides, 0, keys - first, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE=False)
    else:
        k_tile = None
        v_tile = None
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)

    for head in range(head_kv * group, head_kv * group + group):
        q_base = head_pointer(q_ptr, q_strides, sequence, begin_q, head, PACKED)
        dout_base = head_pointer(dout_ptr, dout_strides, sequence, begin_q, head, PACKED)
        statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED)
        function = ScoreFunction(captured, captured_sizes, None)
        distance = load_distance(side, numbers, sequence, head, batch, seq_q, seq_k)
        matrix = dropout_matrix(numbers.origin, sequence, head, heads)
        blocks = None
        walked = visited
        if constants.TILE_Q:
            blocks = load_line(side, numbers, sequence, head, first // constants.TILE_K)
            walked = TileRanges(0, visited.full_begin, visited.full_end, blocks.entries * constants.TILE_Q)
        columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
        modifiers = Modifiers(
            side, numbers, columns, softcap, function, sequence, head, distance=distance, near_keys=keys,
            dropout_matrix=matrix,
        )  # fmt: skip
        dk, dv = _sum_dkdv(
            dk, dv, k_tile, v_tile, k_base, v_base, q_base, dout_base=dout_base, k_strides=k_strides,
            v_strides=v_strides, q_strides=q_strides, dout_strides=dout_strides,
            statistics_base=statistics_ptr + 4 * statistics, visited=walked, first=first, keys=keys, shift=shift,
            seq_q=seq_q, window=window, scale=scale, modifiers=modifiers, blocks=blocks, constants=constants,
            shape=shape, WHOLE=WHOLE, ALL_VISIBLE=ALL_VISIBLE, ALIGNED=ALIGNED, PRECISION=PRECISION, MODIFIED=MODIFIED,
            SCORE_FUNCTION=SCORE_FUNCTION, SCORE_DERIVATIVE=SCORE_DERIVATIVE,
        )  # fmt: skip

    # Keys past their length read as zeros above; what they gathered is not theirs.
    valid = (first + tl.arange(0, BLOCK_N) < keys)[:, None]
    dk = tl.where(valid, dk * scale, 0.0)
    dv = tl.where(valid, dv, 0.0)
    dk_base = head_pointer(dk_ptr, dk_strides, sequence, begin_k + first, head_kv, PACKED)
    dv_base = head_pointer(dv_ptr, dv_strides, sequence, begin_k + first, head_kv, PACKED)
    store_rows(dk_base, dk_strides, 0, seq_k - first, dk, shape.HEAD_DIM, BLOCK_N, BLOCK_COLUMNS=BLOCK_D)
    store_rows(dv_base, dv_strides, 0, seq_k - first, dv, shape.HEAD_DIM_V, BLOCK_N, BLOCK_COLUMNS=BLOCK_E)


@triton.jit
def _sum_dkdv(
    dk, dv, k_tile, v_tile, k_base, v_base, q_base, dout_base, k_strides, v_strides, q_strides, dout_strides,
    statistics_base, visited, first, keys, shift, seq_q, window, scale, modifiers, blocks, constants, shape,
    WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    MODIFIED: tl.constexpr, SCORE_FUNCTION: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """Adds `dsᵀ q` (without the scale) and `(p·z)ᵀ dout` of the query tiles of `visited` to dk and dv, all transposed,
    keys by queries, so that the products need no transposed operand in registers."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    CHUNK: tl.constexpr = shape.CHUNK
    column = first + tl.arange(0, BLOCK_N)
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    for step in tl.range(visited.begin, visited.end, BLOCK_M):
        start, kind = step, 0
        if blocks is not None:
            start, kind = listed_tile(blocks, step, constants.TILE_Q, BLOCK_M)
        row = start + tl.arange(0, BLOCK_M)
        lse, delta = _load_statistics(statistics_base, row, seq_q, WHOLE, modifiers.distance is not None)
        if CHUNK:
            scores = product_by_chunks(
                k_base, k_strides, 0, keys - first, q_base, q_strides, start, b_rows=seq_q, HEAD_DIM=shape.HEAD_DIM,
                BLOCK_A=BLOCK_N, BLOCK_B=BLOCK_M, BLOCK_COLUMNS=BLOCK_D, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            q_tile = load_rows(q_base, q_strides, start, seq_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=WHOLE)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [N, M]
        # Both products before the exponentials: 5 % faster than one on either side of them.
        dout_tile = load_rows(dout_base, dout_strides, start, seq_q, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=WHOLE)
        if CHUNK:
            dprobs = product_by_chunks(
                v_base, v_strides, 0, keys - first, dout_base, dout_strides, start, b_rows=seq_q,
                HEAD_DIM=shape.HEAD_DIM_V, BLOCK_A=BLOCK_N, BLOCK_B=BLOCK_M, BLOCK_COLUMNS=BLOCK_E, CHUNK=CHUNK,
                PRECISION=PRECISION,
            )  # fmt: skip
        else:
            dprobs = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)  # [N, M]
        scores, tanh = tile_scores(
            scores, scale, start, first, modifiers, kind, constants, MODIFIED=MODIFIED,
            PRECISE=q_base.dtype.element_ty == tl.float32, TRANSPOSED=True, SCORE_FUNCTION=SCORE_FUNCTION,
            BRANCHES=True,
        )  # fmt: skip
        probs = tl.exp2(scores * unit - lse[None, :])
        if not ALL_VISIBLE and ((start < visited.full_begin) | (start >= visited.full_end)):
            visible = (row < seq_q)[None, :] & visible_pairs(
                row[None, :], column[:, None], shift, keys, window, constants
            )
            probs = tl.where(visible, probs, 0.0)
        weights = probs
        if modifiers.side.dropout_seed is not None:
            kept = tl.trans(kept_weights(modifiers, start, first, BLOCK_M, BLOCK_N, ALIGNED))
            weights = tl.where(kept, probs * modifiers.numbers.dropout.scale, 0.0)
            dprobs = tl.where(kept, dprobs * modifiers.numbers.dropout.scale, 0.0)
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
            q_tile = load_rows(q_base, q_strides, start, seq_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=WHOLE)
        dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _load_statistics(base, row, rows, WHOLE: tl.constexpr, NEAR: tl.constexpr):
    """lse (in units of log2) and delta of some rows. `NEAR`: lse of scores relative to the nearest key. They lie side
    by side in 16 bytes, so that a tile is large enough for the compiler to load it once for all threads (9 load
    instructions per tile instead of 40, and fewer spills)."""
    pointers = base + 4 * row[:, None] + tl.arange(0, 4)[None, :]  # [M, 4]
    if WHOLE:
        quads = tl.load(pointers)
    else:
        quads = tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    evens, odds = tl.split(tl.reshape(quads, (quads.shape[0], 2, 2)))
    lse, _ = tl.split(evens)
    delta, near_lse = tl.split(odds)
    if NEAR:
        lse = near_lse
    return lse, delta


@triton.jit
def attention_short_backward_kernel(
    q_ptr, k_ptr, v_ptr, rows, dq_ptr, dk_ptr, dv_ptr, sums_ptr, side,
    q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides,
    batch, heads, group, rows_q, rows_k, window, scale, numbers, softcap, work, constants, shape,
    TOP_LEFT: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, MODIFIED: tl.constexpr, HIDES_ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Arguments as in the dq kernel. `rows`: `RowTensors` without `quiet`, and with `statistics` where there are sinks.
    dk and dv have a part for each query head. `sums`: `[parts, batch, heads, rows, columns]`, the sizes of the bias,
    which `work` (`reductions.WorkNumbers`) has; None where nobody wants its gradient. `HIDES_ROWS`: rows may see no
    key."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    # Neighbours have other heads of the same sequences, which lie side by side in memory.
    program = tl.program_id(0)
    head_of = program % work.heads
    batch_of = program // work.heads % work.batch
    part = program // work.heads // work.batch
    sharing = work.sharing
    begin = (tl.cast(sharing, tl.int64) * part // work.parts).to(sharing.dtype)
    end = (tl.cast(sharing, tl.int64) * (part + 1) // work.parts).to(sharing.dtype)
    shared_heads = heads // work.heads

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    shift = 0 if TOP_LEFT else rows_k - rows_q
    unit = LOG2_E if MODIFIED else scale * LOG2_E
    columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
    # Added to scores, it hides keys past the end. A mask `[M, N]` would stay in as many registers during the loop.
    ends = tl.where(column < rows_k, 0.0, float("-inf"))[None, :]
    bias_tile = None
    if side.bias is not None:
        bias_tile = load_table(
            side.bias, numbers.bias, constants.BIAS_COLUMN, batch_of, head_of, 0, 0, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            OTHER=0.0, TRANSPOSED=False,
        ).to(tl.float32)  # fmt: skip
        bias_tile += ends
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for number in tl.range(begin, end):
        head = head_of + tl.cast(number % shared_heads, tl.int32)
        sequence = batch_of + tl.cast(number // shared_heads, tl.int32)
        head_kv = head // group
        keys = valid_keys(side.key_lengths, sequence, batch, rows_k)
        q_base = head_pointer(q_ptr, q_strides, sequence, 0, head, False)
        k_base = head_pointer(k_ptr, k_strides, sequence, 0, head_kv, False)
        v_base = head_pointer(v_ptr, v_strides, sequence, 0, head_kv, False)
        out_base = head_pointer(rows.out, out_strides, sequence, 0, head, False)
        dout_base = head_pointer(rows.dout, dout_strides, sequence, 0, head, False)
        q_tile = load_rows(q_base, q_strides, 0, rows_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, WHOLE=False)
        k_tile = load_rows(k_base, k_strides, 0, keys, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE=WHOLE)
        v_tile = load_rows(v_base, v_strides, 0, keys, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE=WHOLE)
        dout_tile = load_rows(dout_base, dout_strides, 0, rows_q, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=False)
        out_tile = load_rows(out_base, out_strides, 0, rows_q, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, WHOLE=False)
        statistics = row_statistics_offset(sequence, head, heads, 0, rows_q, False) + row
        distance = load_distance(side, numbers, sequence, head, batch, rows_q, rows_k)
        apart = None
        if distance is not None:
            # In a part of a larger call all keys may be far. The nearest one of each row would take registers.
            distance, apart = moved_near(distance, keys, BLOCK_M)
        lse, delta, hidden = row_statistics_tile(
            rows, statistics, row < rows_q, out_tile, dout_tile, side, head, distance=distance, apart=apart,
            HIDES_ROWS=HIDES_ROWS,
        )  # fmt: skip
        if HIDES_ROWS:
            lse = tl.where(hidden, float("inf"), lse)
            dout_tile = tl.where(hidden[:, None], 0.0, dout_tile)

        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        matrix = dropout_matrix(numbers.origin, sequence, head, heads)
        modifiers = Modifiers(
            side, numbers, columns, softcap, None, sequence, head, distance=distance, near_keys=None,
            dropout_matrix=matrix,
        )  # fmt: skip
        scores, tanh = tile_scores(
            scores, scale, 0, 0, modifiers, 0, constants, MODIFIED=MODIFIED, PRECISE=False, TRANSPOSED=False,
            SCORE_FUNCTION=None, BRANCHES=False, bias_tile=bias_tile,
        )  # fmt: skip
        if side.bias is None and not ALL_VISIBLE:
            scores += ends
        probs = tl.exp2(scores * unit - lse[:, None])
        if constants.HAS_LEFT or constants.HAS_RIGHT or side.key_lengths is not None:
            visible = visible_pairs(row[:, None], column[None, :], shift, keys, window, constants)
            probs = tl.where(visible, probs, 0.0)
        weights = probs
        if side.dropout_seed is not None:
            kept = kept_weights(modifiers, 0, 0, BLOCK_M, BLOCK_N, ALIGNED)
            dprobs = tl.where(kept, dprobs * numbers.dropout.scale, 0.0)
            weights = tl.where(kept, probs * numbers.dropout.scale, 0.0)
        # Each sum is stored before the next one is made: all at once would take too many registers.
        dv = tl.dot(tl.trans(weights.to(dout_tile.dtype)), dout_tile, input_precision=PRECISION)  # [N, E]
        # Keys past their length read as zeros; what they gathered is not theirs.
        valid = (column < keys)[:, None]
        dv_base = head_pointer(dv_ptr, dv_strides, sequence, 0, head, False)
        store_rows(
            dv_base, dv_strides, 0, rows_k, tl.where(valid, dv, 0.0), shape.HEAD_DIM_V, BLOCK_N, BLOCK_COLUMNS=BLOCK_E
        )
        dscores = probs * (dprobs - delta[:, None])
        if rows.slope_sums is not None:
            slope_sums = slope_gradients(dscores, row, column, distance, apart)
            if HIDES_ROWS:
                slope_sums = tl.where(hidden, 0.0, slope_sums)
            tl.store(rows.slope_sums + statistics, slope_sums, mask=row < rows_q)
        if sums_ptr is not None:
            total += dscores
        if MODIFIED:
            dscores = uncapped_gradient(dscores, tanh, modifiers)
        dscores = dscores.to(q_tile.dtype)
        dk = tl.dot(tl.trans(dscores), q_tile, input_precision=PRECISION)  # [N, D]
        dk_base = head_pointer(dk_ptr, dk_strides, sequence, 0, head, False)
        store_rows(
            dk_base, dk_strides, 0, rows_k, tl.where(valid, dk * scale, 0.0), shape.HEAD_DIM, BLOCK_N,
            BLOCK_COLUMNS=BLOCK_D,
        )  # fmt: skip
        dq = tl.dot(dscores, k_tile, input_precision=PRECISION)  # [M, D]
        if HIDES_ROWS:
            dq = tl.where(hidden[:, None], 0.0, dq)
        dq_base = head_pointer(dq_ptr, dq_strides, sequence, 0, head, False)
        store_rows(dq_base, dq_strides, 0, rows_q, dq * scale, shape.HEAD_DIM, BLOCK_M, BLOCK_COLUMNS=BLOCK_D)

    if sums_ptr is not None:
        store_part(
            sums_ptr, total, row[:, None], column[None, :], part, batch_of, head_of, work=work, SHARED_ROWS=SHARED_ROWS,
            SHARED_COLUMNS=SHARED_COLUMNS,
        )  # fmt: skip
