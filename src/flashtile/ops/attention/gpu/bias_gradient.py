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

from flashtile.ops.attention.gpu.scores import (
    EMPTY,
    Modifiers,
    ScoreFunction,
    TableColumns,
    dropout_matrix,
    kept_weights,
    load_distance,
    load_line,
    load_table,
    load_tile_kind,
    statistic_column,
    tile_scores,
)
from flashtile.ops.attention.gpu.tiles import (
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
    q_ptr, k_ptr, v_ptr, dout_ptr, statistics_ptr, sums_ptr, side, captured,
    q_strides, k_strides, v_strides, dout_strides,
    batch, heads, group, rows_q, rows_k, window, scale, numbers, softcap, captured_sizes, work, constants, shape,
    PACKED: tl.constexpr, TOP_LEFT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_COLUMNS: tl.constexpr, WHOLE: tl.constexpr, ALL_VISIBLE: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr,
):  # fmt: skip
    """Arguments as in the forward kernel. `sums`: `[parts, batch, heads, rows, columns]`, the sizes of the bias, which
    `work` (`WorkNumbers`) has; in its dtype where there is one part, else float32. `WHOLE`, `ALL_VISIBLE`: of
    both sides, because both move."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    TILE_Q: tl.constexpr = constants.TILE_Q
    sharing = work.sharing
    tiles_m = tl.cdiv(work.longest_q, BLOCK_M)
    tiles_n = tl.cdiv(work.longest_k, BLOCK_N)
    # The entries of the bias: (part, batch, head, tile of rows, tile of columns), the last one fastest.
    program = tl.program_id(0)
    own_n = 1 if SHARED_COLUMNS else tiles_n
    own_m = 1 if SHARED_ROWS else tiles_m
    tile_n = program % own_n
    tile_m = program // own_n % own_m
    head_of = program // (own_n * own_m) % work.heads
    batch_of = program // (own_n * own_m * work.heads) % work.batch
    part = program // (own_n * own_m * work.heads * work.batch)
    # The scores that share them, numbered likewise.
    shared_n = tiles_n // own_n
    shared_m = tiles_m // own_m
    shared_heads = heads // work.heads
    begin = (tl.cast(sharing, tl.int64) * part // work.parts).to(sharing.dtype)
    end = (tl.cast(sharing, tl.int64) * (part + 1) // work.parts).to(sharing.dtype)
    # All that shares a tile reads the same bias.
    bias_tile = load_table(
        side.bias, numbers.bias, constants.BIAS_COLUMN, batch_of, head_of, tile_m * BLOCK_M, tile_n * BLOCK_N,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, OTHER=float("nan"), TRANSPOSED=False,
    )  # fmt: skip
    # Tiles that a window hides are left out. If all that shares a tile lies in the same place, the whole loop is:
    # a branch in the loop would keep tiles from being fetched ahead.
    BANDED: tl.constexpr = constants.HAS_LEFT or constants.HAS_RIGHT
    HAS_KEY_LENGTHS: tl.constexpr = side.key_lengths is not None
    IN_PLACE: tl.constexpr = not (PACKED or HAS_KEY_LENGTHS or TILE_Q or SHARED_ROWS or SHARED_COLUMNS)
    if BANDED and IN_PLACE:
        shift = 0 if TOP_LEFT else rows_k - rows_q
        seen = key_tile_ranges(tile_m * BLOCK_M, rows_q, shift, rows_k, window, constants, shape)
        end = tl.where((tile_n * BLOCK_N >= seen.begin) & (tile_n * BLOCK_N < seen.end), end, begin)
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
            begin_q, seq_q = sequence_rows(side.cu_seqlens_q, sequence, batch, rows_q)
            begin_k, seq_k = sequence_rows(side.cu_seqlens_k, sequence, batch, rows_k)
        keys = valid_keys(side.key_lengths, sequence, batch, seq_k)
        shift = 0 if TOP_LEFT else seq_k - seq_q
        blocks, kind = None, 0
        if IN_PLACE or not (BANDED or PACKED or HAS_KEY_LENGTHS or TILE_Q):
            needed = True
        else:
            visited = key_tile_ranges(first, seq_q, shift, keys, window, constants, shape)
            needed = (first < seq_q) & (start >= visited.begin) & (start < visited.end)
        if TILE_Q:
            line = first // TILE_Q
            if PACKED:
                # A mask ends where the longest sequence may.
                line = tl.where(needed, line, 0)
            blocks = load_line(side, numbers, sequence, head, line)
            kind = load_tile_kind(blocks, start // constants.TILE_K)
            needed = needed & (kind != EMPTY)
        if needed:
            head_kv = head // group
            product = _product(
                head_pointer(q_ptr, q_strides, sequence, begin_q, head, PACKED),
                head_pointer(k_ptr, k_strides, sequence, begin_k, head_kv, PACKED),
                head_pointer(v_ptr, v_strides, sequence, begin_k, head_kv, PACKED),
                head_pointer(dout_ptr, dout_strides, sequence, begin_q, head, PACKED), q_strides, k_strides, v_strides,
                dout_strides=dout_strides, second=second, first=first, seq_q=seq_q, start=start, keys=keys, shape=shape,
                WHOLE=WHOLE, PRECISION=PRECISION,
            )  # fmt: skip
            row = first + tl.arange(0, BLOCK_M)
            statistics = row_statistics_offset(sequence, head, heads, begin_q, rows_q, PACKED) + row
            which = statistic_column(side, second)
            if WHOLE:
                statistic = tl.load(statistics_ptr + 4 * statistics + which)
            else:
                statistic = tl.load(statistics_ptr + 4 * statistics + which, mask=row < seq_q, other=0.0)
            # Not inside of the branches: the compiler cannot fetch ahead for a product that is used there alone.
            product *= tl.where(second == 0, scale, numbers.dropout.scale)
            if second == 0:
                function = ScoreFunction(captured, captured_sizes, None)
                distance = load_distance(side, numbers, sequence, head, batch, seq_q, seq_k)
                columns = TableColumns(constants.BIAS_COLUMN, constants.MASK_COLUMN)
                modifiers = Modifiers(
                    side, numbers, columns, softcap, function, sequence, head, distance=distance, near_keys=keys,
                    dropout_matrix=None,
                )  # fmt: skip
                scores, _tanh = tile_scores(
                    product, 1.0, first, start, modifiers, kind, constants, MODIFIED=True,
                    PRECISE=q_ptr.dtype.element_ty == tl.float32, TRANSPOSED=False, SCORE_FUNCTION=SCORE_FUNCTION,
                    BRANCHES=False, bias_tile=bias_tile,
                )  # fmt: skip
                probs = tl.exp2(scores * LOG2_E - statistic[:, None])
                if not ALL_VISIBLE:
                    column = start + tl.arange(0, BLOCK_N)
                    visible = (row < seq_q)[:, None] & visible_pairs(
                        row[:, None], column[None, :], shift, keys, window, constants
                    )
                    probs = tl.where(visible, probs, 0.0)
            else:
                if side.dropout_seed is not None:
                    matrix = dropout_matrix(numbers.origin, sequence, head, heads)
                    dropped = Modifiers(
                        side, numbers, None, softcap, None, sequence, head, distance=None, near_keys=None,
                        dropout_matrix=matrix,
                    )  # fmt: skip
                    kept = kept_weights(dropped, first, start, BLOCK_M, BLOCK_N, ALIGNED)
                    product = tl.where(kept, product, 0.0)
                total += probs * (product - statistic[:, None])
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    store_part(
        sums_ptr, total, row, column, part, batch_of, head_of, work=work, SHARED_ROWS=SHARED_ROWS,
        SHARED_COLUMNS=SHARED_COLUMNS,
    )  # fmt: skip


@triton.jit
def store_part(
    sums_ptr, total, row, column, part, batch_of, head_of, work,
    SHARED_ROWS: tl.constexpr, SHARED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a tile `[M, N]` of a part of a bias's gradient, or its sums if all share one row or column."""
    if SHARED_ROWS:
        total = tl.sum(total, 0)[None, :]
        row = tl.zeros((1, 1), tl.int32)
    if SHARED_COLUMNS:
        total = tl.sum(total, 1)[:, None]
        column = tl.zeros((1, 1), tl.int32)
    plane = (tl.cast(part, tl.int64) * work.batch + batch_of) * work.heads + head_of
    offsets = (plane * work.rows + row) * work.columns + column
    tl.store(sums_ptr + offsets, total.to(sums_ptr.dtype.element_ty), mask=(row < work.rows) & (column < work.columns))


@triton.jit
def _product(
    q_base, k_base, v_base, dout_base, q_strides, k_strides, v_strides, dout_strides,
    second, first, seq_q, start, keys, shape, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`q kᵀ`, or `dout vᵀ` where `second` is 1, of queries `first..first + M` and keys `start..start + N`: `[M, N]`."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    BLOCK_E: tl.constexpr = shape.BLOCK_E
    CHUNK: tl.constexpr = shape.CHUNK
    if CHUNK:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if second == 0:
            product = product_by_chunks(
                q_base, q_strides, first, seq_q, k_base, k_strides, start, b_rows=keys, HEAD_DIM=shape.HEAD_DIM,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_D, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
        else:
            product = product_by_chunks(
                dout_base, dout_strides, first, seq_q, v_base, v_strides, start, b_rows=keys, HEAD_DIM=shape.HEAD_DIM_V,
                BLOCK_A=BLOCK_M, BLOCK_B=BLOCK_N, BLOCK_COLUMNS=BLOCK_E, CHUNK=CHUNK, PRECISION=PRECISION,
            )  # fmt: skip
    else:
        BLOCK_COLUMNS: tl.constexpr = max(BLOCK_D, BLOCK_E)
        rows_tile = _load_either(
            second, q_base, q_strides, shape.HEAD_DIM, dout_base, dout_strides, shape.HEAD_DIM_V, first=first,
            rows=seq_q, BLOCK_ROWS=BLOCK_M, BLOCK_COLUMNS=BLOCK_COLUMNS, WHOLE=WHOLE,
        )  # fmt: skip
        keys_tile = _load_either(
            second, k_base, k_strides, shape.HEAD_DIM, v_base, v_strides, shape.HEAD_DIM_V, first=start, rows=keys,
            BLOCK_ROWS=BLOCK_N, BLOCK_COLUMNS=BLOCK_COLUMNS, WHOLE=WHOLE,
        )  # fmt: skip
        product = tl.dot(rows_tile, tl.trans(keys_tile), input_precision=PRECISION)
    return product


@triton.jit
def _load_either(
    second, a_base, a_strides, A_WIDTH: tl.constexpr, b_base, b_strides, B_WIDTH: tl.constexpr, first, rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`load_rows` of a, or of b where `second` is 1, by one instruction, so that tiles of either are fetched ahead."""
    base = tl.where(second == 0, a_base, b_base)
    if a_strides.ROW == b_strides.ROW:
        base = row_pointers(base, a_strides.ROW, first, BLOCK_ROWS)
    else:
        stride = tl.where(second == 0, a_strides.ROW, b_strides.ROW).to(tl.int64)
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
