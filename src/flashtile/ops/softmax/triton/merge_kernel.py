"""A partial result of attention joins a running one, in one pass over memory, and the running one becomes the result.

Shapes: M = ROWS rows of a tile, D = BLOCK_D columns; acc and out `[batch, rows, heads, WIDTH]`, row_max, row_sum and
lse `[batch, heads, rows]`. See `ops/softmax/merge.py` for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(rows, heads, ROWS: tl.constexpr):
    """Batch entry, head and rows `[M]` of a program. Heads are the fastest, as in memory."""
    program = tl.program_id(0)
    tiles = tl.cdiv(rows, ROWS)
    row = program // heads % tiles * ROWS + tl.arange(0, ROWS)
    return (program // heads // tiles).to(tl.int64), (program % heads).to(tl.int64), row


@triton.jit
def merge_part_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr,
    stride_acc_batch, stride_acc_row, stride_acc_head, stride_out_batch, stride_out_row, stride_out_head,
    stride_max_batch, stride_max_head, stride_lse_batch, stride_lse_head, rows, heads,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """row_sum has the strides of row_max. FIRST: there is nothing to join yet."""
    batch, head, row = _place(rows, heads, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    statistics = batch * stride_max_batch + head * stride_max_head + row
    lse = tl.load(lse_ptr + batch * stride_lse_batch + head * stride_lse_head + row, mask=inside, other=0.0)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    wide = row.to(tl.int64)[:, None]
    acc_pointers = acc_ptr + batch * stride_acc_batch + head * stride_acc_head + wide * stride_acc_row + column[None, :]
    out_pointers = out_ptr + batch * stride_out_batch + head * stride_out_head + wide * stride_out_row + column[None, :]
    if FIRST:
        tl.store(max_ptr + statistics, lse, mask=inside)
        tl.store(sum_ptr + statistics, tl.where(lse == float("-inf"), 0.0, 1.0), mask=inside)
        tl.store(acc_pointers, tl.load(out_pointers, mask=mask, other=0.0).to(tl.float32), mask=mask)
        return
    row_max = tl.load(max_ptr + statistics, mask=inside, other=0.0)
    row_sum = tl.load(sum_ptr + statistics, mask=inside, other=0.0)
    largest = tl.maximum(row_max, lse)
    # While a row has seen nothing, the difference is taken against 0: -inf - -inf would be NaN.
    against = tl.where(largest == float("-inf"), 0.0, largest)
    decay = tl.exp2((row_max - against) * LOG2_E)  # [M]
    weight = tl.exp2((lse - against) * LOG2_E)
    # Several threads hold the same row: all of them have read it before one writes.
    tl.debug_barrier()
    tl.store(max_ptr + statistics, largest, mask=inside)
    tl.store(sum_ptr + statistics, row_sum * decay + weight, mask=inside)
    acc = tl.load(acc_pointers, mask=mask, other=0.0)  # [M, D]
    out = tl.load(out_pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(acc_pointers, acc * decay[:, None] + out * weight[:, None], mask=mask)


@triton.jit
def merge_finish_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr,
    stride_acc_batch, stride_acc_row, stride_acc_head, stride_max_batch, stride_max_head, rows, heads,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out and lse are contiguous."""
    batch, head, row = _place(rows, heads, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    statistics = batch * stride_max_batch + head * stride_max_head + row
    row_max = tl.load(max_ptr + statistics, mask=inside, other=0.0)
    row_sum = tl.load(sum_ptr + statistics, mask=inside, other=1.0)
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
    infinite = (row_sum == 0.0) | (row_max == float("inf"))
    tl.store(
        lse_ptr + (batch * heads + head) * rows + row, tl.where(infinite, row_max, row_max + tl.log(total)), inside
    )
    mask = inside[:, None] & (column < WIDTH)[None, :]
    wide = row.to(tl.int64)[:, None]
    acc_pointers = acc_ptr + batch * stride_acc_batch + head * stride_acc_head + wide * stride_acc_row + column[None, :]
    acc = tl.load(acc_pointers, mask=mask, other=0.0)  # [M, D]
    out_pointers = out_ptr + ((batch * rows + wide) * heads + head) * WIDTH + column[None, :]
    tl.store(out_pointers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
