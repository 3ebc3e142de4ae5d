"""What becomes of the products `q kᵀ` on their way to the softmax: soft cap, bias, ALiBi and masks.

Tiles are `[M, N]`, in the dk/dv kernel (TRANSPOSED) `[N, M]`; `first_row` and `first_column` are the numbers of their
first query and key within their sequence. `modifiers` holds all that changes the scores of one head of one sequence;
what a call does not have is None there, and costs nothing::

    (softcap, slope, diagonal, sequence, head, *bias, *mask)
    bias, mask: pointer, strides of batch, head, row and column, rows, columns; no rows where no tile ends past them
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.common.triton.functions import tanh as hyperbolic_tangent


@triton.jit
def load_slope(alibi_slopes_ptr, stride_batch, sequence, head, batch):
    """The slope of one head of one sequence. Rows past the end (sequence number `batch`) have none."""
    return tl.load(alibi_slopes_ptr + sequence * stride_batch + head, mask=sequence < batch, other=0.0)


@triton.jit
def load_table(
    pointer, stride_batch, stride_head, stride_row, STRIDE_COLUMN: tl.constexpr, rows, columns,
    sequence, head, first_row, first_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile `[M, N]` of a tensor that broadcasts to the scores, `OTHER` past its end. A stride of 0 broadcasts."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    # Wide arithmetic for the first entry; of the others only once, where the loop stays in their rows.
    corner = tl.cast(sequence, tl.int64) * stride_batch + tl.cast(head, tl.int64) * stride_head
    corner += tl.cast(first_row, tl.int64) * stride_row + tl.cast(first_column, tl.int64) * STRIDE_COLUMN
    pointers = (
        pointer + corner + (row.to(tl.int64) * stride_row)[:, None] + (column.to(tl.int64) * STRIDE_COLUMN)[None, :]
    )
    if rows is not None:
        inside = (first_row + row < rows)[:, None] & (first_column + column < columns)[None, :]
        tile = tl.load(pointers, mask=inside, other=OTHER)
    else:
        tile = tl.load(pointers)
    # Read by rows and turned round on chip: read by columns it would not be fetched ahead. Split and joined again,
    # which changes nothing but that the compiler changes the layout first: only then does it fetch into shared memory.
    if TRANSPOSED:
        low, high = tl.split(tl.reshape(tile, (BLOCK_M, BLOCK_N // 2, 2)))
        tile = tl.reshape(tl.join(low, high), (BLOCK_M, BLOCK_N))
        return tl.trans(tile)
    else:
        return tile


@triton.jit
def alibi_diagonal(seq_q, seq_k, origin):
    """The key at which ALiBi's distance from row 0 is 0. `origin`: where in a larger call this one lies."""
    diagonal = seq_k - seq_q
    if origin[2] is not None:
        diagonal += origin[2]
    return diagonal


@triton.jit
def modified_scores(
    products, scale, first_row, first_column, modifiers, PRECISE: tl.constexpr, TRANSPOSED: tl.constexpr,
    bias_tile=None,
):  # fmt: skip
    """Scores of a tile of products, and the tanh of the soft cap (the products themselves without one). `PRECISE`: they
    are products of float32 tensors. `bias_tile`: that of the bias, where it is on chip already."""
    BLOCK_M: tl.constexpr = products.shape[1 if TRANSPOSED else 0]
    BLOCK_N: tl.constexpr = products.shape[0 if TRANSPOSED else 1]
    (
        softcap, slope, _, sequence, head,
        bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns,
        mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns,
    ) = modifiers  # fmt: skip
    tanh = products
    if softcap is not None:
        tanh = hyperbolic_tangent(products * (scale / softcap), PRECISE)
        scores = tanh * softcap
    else:
        scores = products * scale
    if bias_tile is not None:
        scores += bias_tile.to(tl.float32)
    elif bias_ptr is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        tile = load_table(
            bias_ptr, stride_bias_batch, stride_bias_head, stride_bias_row, STRIDE_BIAS_COLUMN, bias_rows, bias_columns,
            sequence, head, first_row, first_column, BLOCK_M, BLOCK_N, float("nan"), TRANSPOSED,
        )  # fmt: skip
        scores += tile.to(tl.float32)
    if slope is not None:
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        scores -= slope * alibi_distance(row, column, modifiers, TRANSPOSED)
    if mask_ptr is not None:
        shown = load_table(
            mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, STRIDE_MASK_COLUMN, mask_rows, mask_columns,
            sequence, head, first_row, first_column, BLOCK_M, BLOCK_N, 0, TRANSPOSED,
        )  # fmt: skip
        scores = tl.where(shown != 0, scores, float("-inf"))
    return scores, tanh


@triton.jit
def alibi_distance(row, column, modifiers, TRANSPOSED: tl.constexpr):
    """`|i + diagonal - j|`."""
    diagonal = row + modifiers[2]
    if TRANSPOSED:
        distance = diagonal[None, :] - column[:, None]
    else:
        distance = diagonal[:, None] - column[None, :]
    return tl.abs(distance).to(tl.float32)


@triton.jit
def uncapped_gradient(dscores, tanh, modifiers):
    """The gradient in front of the soft cap, of that behind it."""
    if modifiers[0] is not None:
        dscores = dscores * (1.0 - tanh * tanh)
    return dscores
