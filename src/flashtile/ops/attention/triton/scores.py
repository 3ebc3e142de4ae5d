"""What becomes of the products `q kᵀ` on their way to the softmax: soft cap, bias, ALiBi and masks.

Tiles are `[M, N]`, in the dk/dv kernel (TRANSPOSED) `[N, M]`; `row` `[M]` and `column` `[N]` are the numbers of queries
and keys within their sequence. `modifiers` holds all that changes the scores of one head of one
sequence; what a call does not have is None there, and costs nothing::

    (softcap, bias, mask, slope, diagonal)
    bias, mask: (pointer, offset, row stride, column stride, rows, columns)
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.attention.triton.tiles import LOG2_E
from flashtile.ops.common.triton.functions import tanh as hyperbolic_tangent


@triton.jit
def load_slope(alibi_slopes_ptr, stride_batch, sequence, head, batch):
    """The slope of one head of one sequence. Rows past the end (sequence number `batch`) have none."""
    return tl.load(alibi_slopes_ptr + sequence * stride_batch + head, mask=sequence < batch, other=0.0)


@triton.jit
def _load_table(table, row, column, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Entries of a tensor that broadcasts to the scores, `OTHER` past its end. A stride of 0 broadcasts."""
    pointer, offset, stride_row, STRIDE_COLUMN, rows, columns = table
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointers = pointer + offset + (row.to(tl.int64) * stride_row)[:, None] + (column * STRIDE_COLUMN)[None, :]
    tile = tl.load(pointers, mask=inside, other=OTHER)
    # Read by rows and turned round on chip: read by columns it would not be fetched ahead.
    return tl.trans(tile) if TRANSPOSED else tile


@triton.jit
def alibi_diagonal(seq_q, seq_k, origin):
    """The key at which ALiBi's distance from row 0 is 0. `origin`: where in a larger call this one lies."""
    diagonal = seq_k - seq_q
    if origin[2] is not None:
        diagonal += origin[2]
    return diagonal


@triton.jit
def table_offset(sequence, head, stride_batch, stride_head):
    """Where one head of one sequence begins in a bias or mask."""
    return tl.cast(sequence, tl.int64) * stride_batch + tl.cast(head, tl.int64) * stride_head


@triton.jit
def modified_scores(products, scale, row, column, modifiers, PRECISE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Scores in units of log2, and the tanh of the soft cap (the products themselves without one). `PRECISE`: they are
    products of float32 tensors."""
    softcap, bias, mask, slope, _ = modifiers
    tanh = products
    if softcap is not None:
        tanh = hyperbolic_tangent(products * (scale / softcap), PRECISE)
        scores = tanh * (softcap * LOG2_E)
    else:
        scores = products * (scale * LOG2_E)
    if bias is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        scores += _load_table(bias, row, column, float("nan"), TRANSPOSED).to(tl.float32) * LOG2_E
    if slope is not None:
        scores -= (slope * LOG2_E) * alibi_distance(row, column, modifiers, TRANSPOSED)
    if mask is not None:
        scores = tl.where(_load_table(mask, row, column, 0, TRANSPOSED) != 0, scores, float("-inf"))
    return scores, tanh


@triton.jit
def alibi_distance(row, column, modifiers, TRANSPOSED: tl.constexpr):
    """`|i + diagonal - j|`."""
    diagonal = row + modifiers[4]
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
