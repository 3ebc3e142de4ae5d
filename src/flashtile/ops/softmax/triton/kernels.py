"""The softmax kernels.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile; x, out, dout and dx are matrices `[rows, WIDTH]`, where
row r is query `r % seq_q`. The mask has strides of its own. Only what is visible is read, all is written. See
`ops/softmax/spec.py` for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_ends(row, seq_q, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys each row `[M]` may see."""
    if CAUSAL:
        return tl.maximum(tl.minimum(row % seq_q + (WIDTH - seq_q) + 1, WIDTH), 0)
    else:
        return row * 0 + WIDTH


@triton.jit
def readable(row, columns, ends, rows, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """Which elements of a tile to read: bool `[M, N]`. Up to 15 more than are visible, so that vectors stay whole."""
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    if CAUSAL:
        inside = inside & (columns[None, :] < ((ends + 15) // 16 * 16)[:, None])
    return inside


@triton.jit
def load_scores(
    x_ptr, mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, row, columns, ends, rows, heads, seq_q,
    scale, MASK_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """A tile of scores: float32 `[M, N]`, -inf where nothing is visible."""
    inside = readable(row, columns, ends, rows, WIDTH, CAUSAL)
    visible = inside & (columns[None, :] < ends[:, None])
    if HAS_MASK:
        matrix, query = row // seq_q, (row % seq_q).to(tl.int64)
        batch, head = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
        mask_rows = batch * stride_mask_batch + head * stride_mask_head + query * stride_mask_row
        offsets = mask_rows[:, None] + columns[None, :].to(tl.int64) * MASK_COLUMNS
        visible = visible & (tl.load(mask_ptr + offsets, mask=inside, other=1) == 0)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    return tl.where(visible, x.to(tl.float32) * scale, float("-inf"))


@triton.jit
def exponentials(scores, row_max):
    """exp of scores `[M, N]` against their maximum `[M]`; 0 in a row that sees nothing. Units of log2 are for the
    difference alone: in these the largest numbers would be infinite."""
    return tl.exp2((scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None]) * LOG2_E)


@triton.jit
def store_rows(pointer, value, row, columns, rows, WIDTH: tl.constexpr):
    offsets = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def softmax_forward_kernel(
    x_ptr, mask_ptr, out_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, rows, heads,
    seq_q, scale, MASK_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    ends = visible_ends(row, seq_q, WIDTH, CAUSAL)
    if BLOCK_N >= WIDTH:
        columns = tl.arange(0, BLOCK_N)
        scores = load_scores(
            x_ptr, mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, row, columns,
            ends, rows, heads, seq_q, scale, MASK_COLUMNS, WIDTH, CAUSAL, HAS_MASK,
        )  # fmt: skip
        p = exponentials(scores, tl.max(scores, axis=1))
        row_sum = tl.sum(p, axis=1)
        p = p * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        store_rows(out_ptr, p, row, columns, rows, WIDTH)
    else:
        # Longer rows: maximum and sum of each place of a tile, put together at the end; then a second reading.
        place_max = tl.full([ROWS, BLOCK_N], float("-inf"), tl.float32)
        place_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
        last = tl.max(ends, axis=0)
        for first in range(0, last, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            scores = load_scores(
                x_ptr, mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, row, columns,
                ends, rows, heads, seq_q, scale, MASK_COLUMNS, WIDTH, CAUSAL, HAS_MASK,
            )  # fmt: skip
            larger = tl.maximum(place_max, scores)
            against = tl.where(larger == float("-inf"), 0.0, larger)
            place_sum = place_sum * tl.exp2((place_max - against) * LOG2_E) + tl.exp2((scores - against) * LOG2_E)
            place_max = larger
        row_max = tl.max(place_max, axis=1)
        row_sum = tl.sum(place_sum * exponentials(place_max, row_max), axis=1)
        factor = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        for first in range(0, WIDTH, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            scores = load_scores(
                x_ptr, mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, row, columns,
                ends, rows, heads, seq_q, scale, MASK_COLUMNS, WIDTH, CAUSAL, HAS_MASK,
            )  # fmt: skip
            store_rows(out_ptr, exponentials(scores, row_max) * factor[:, None], row, columns, rows, WIDTH)


@triton.jit
def load_product(
    dout_ptr, out_ptr, row, columns, ends, rows, WIDTH: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """p and p · dout of a tile, float32 `[M, N]`. Where p is 0 no gradient passes, whatever comes from above."""
    offsets = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    inside = readable(row, columns, ends, rows, WIDTH, CAUSAL)
    p = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return p, tl.where(p == 0.0, 0.0, p * dout)


@triton.jit
def softmax_backward_kernel(
    dout_ptr, out_ptr, dx_ptr, rows, seq_q, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    ends = visible_ends(row, seq_q, WIDTH, CAUSAL)
    if BLOCK_N >= WIDTH:
        columns = tl.arange(0, BLOCK_N)
        p, product = load_product(dout_ptr, out_ptr, row, columns, ends, rows, WIDTH, CAUSAL)
        dx = (product - p * tl.sum(product, axis=1)[:, None]) * scale
        store_rows(dx_ptr, dx, row, columns, rows, WIDTH)
    else:
        place_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in range(0, tl.max(ends, axis=0), BLOCK_N):
            _, product = load_product(dout_ptr, out_ptr, row, first + tl.arange(0, BLOCK_N), ends, rows, WIDTH, CAUSAL)
            place_sum += product
        total = tl.sum(place_sum, axis=1)
        for first in range(0, WIDTH, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            p, product = load_product(dout_ptr, out_ptr, row, columns, ends, rows, WIDTH, CAUSAL)
            store_rows(dx_ptr, (product - p * total[:, None]) * scale, row, columns, rows, WIDTH)
