"""Backward of sequences whose queries are one tile and whose keys are one: dq, dk, dv and the gradient of the bias.

Formulas and letters as in `backward`. All scores of a matrix, one head of one sequence, are on chip at once. So their
weights are made once: five products instead of seven, and each tensor is read once. And ds is there for the gradient of
the bias.

A program goes through several matrices that share one tile of a bias, one after the other. It reads the bias once,
fetches the rows of the next matrix meanwhile, and sums ds in registers. In the end it stores its part of the bias's
gradient, and the launch adds up the parts: no atomics, so the gradient is the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.triton.backward import statistics_of_rows
from flashtile.ops.attention.triton.bias_gradient import store_part
from flashtile.ops.attention.triton.scores import (
    Modifiers,
    TableColumns,
    dropout_matrix,
    kept_weights,
    load_alibi,
    load_table,
    slope_gradients,
    tile_scores,
    uncapped_gradient,
)
from flashtile.ops.attention.triton.tiles import (
    LOG2_E,
    head_pointer,
    load_rows,
    row_statistics_offset,
    store_rows,
    valid_keys,
    visible_pairs,
)


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
    which `work` (`bias_work.WorkNumbers`) has; None where nobody wants its gradient. `HIDES_ROWS`: rows may see no
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
            side.bias, numbers.bias, constants.BIAS_COLUMN, batch_of, head_of, 0, 0, BLOCK_M, BLOCK_N, 0.0,
            TRANSPOSED=False,
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
        q_tile = load_rows(q_base, q_strides, 0, rows_q, shape.HEAD_DIM, BLOCK_M, BLOCK_D, False)
        k_tile = load_rows(k_base, k_strides, 0, keys, shape.HEAD_DIM, BLOCK_N, BLOCK_D, WHOLE)
        v_tile = load_rows(v_base, v_strides, 0, keys, shape.HEAD_DIM_V, BLOCK_N, BLOCK_E, WHOLE)
        dout_tile = load_rows(dout_base, dout_strides, 0, rows_q, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
        out_tile = load_rows(out_base, out_strides, 0, rows_q, shape.HEAD_DIM_V, BLOCK_M, BLOCK_E, False)
        statistics = row_statistics_offset(sequence, head, heads, 0, rows_q, False) + row
        # Scores as they are, not relative to the nearest key: keys of one tile are far from no query but in a part of a
        # larger call, and the numbers that it takes would spill.
        lse, delta, hidden = statistics_of_rows(
            rows, statistics, row, rows_q, out_tile, dout_tile, side, head, None, keys, HIDES_ROWS
        )
        if HIDES_ROWS:
            lse = tl.where(hidden, float("inf"), lse)
            dout_tile = tl.where(hidden[:, None], 0.0, dout_tile)

        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [M, N]
        dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)  # [M, N]
        alibi = load_alibi(side, numbers, sequence, head, batch, rows_q, rows_k)
        matrix = dropout_matrix(numbers.origin, sequence, head, heads)
        modifiers = Modifiers(side, numbers, columns, softcap, None, sequence, head, alibi, None, matrix)
        scores, tanh = tile_scores(
            scores, scale, 0, 0, modifiers, 0, constants, MODIFIED, False,
            TRANSPOSED=False, SCORE_FUNCTION=None, BRANCHES=False, bias_tile=bias_tile,
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
        store_rows(dv_base, dv_strides, 0, rows_k, tl.where(valid, dv, 0.0), shape.HEAD_DIM_V, BLOCK_N, BLOCK_E)
        dscores = probs * (dprobs - delta[:, None])
        if rows.slope_sums is not None:
            slope_sums = slope_gradients(dscores, row, column, modifiers)
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
        store_rows(dk_base, dk_strides, 0, rows_k, tl.where(valid, dk * scale, 0.0), shape.HEAD_DIM, BLOCK_N, BLOCK_D)
        dq = tl.dot(dscores, k_tile, input_precision=PRECISION)  # [M, D]
        if HIDES_ROWS:
            dq = tl.where(hidden[:, None], 0.0, dq)
        dq_base = head_pointer(dq_ptr, dq_strides, sequence, 0, head, False)
        store_rows(dq_base, dq_strides, 0, rows_q, dq * scale, shape.HEAD_DIM, BLOCK_M, BLOCK_D)

    if sums_ptr is not None:
        store_part(
            sums_ptr, total, row[:, None], column[None, :], part, batch_of, head_of, work, SHARED_ROWS, SHARED_COLUMNS
        )
