"""Functions of Triton kernels that operations share: what Triton lacks on some targets, sums, and dropout bits of
matrices that are read row by row (the scheme of `ops.common.philox`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

_TWICE_LOG2_E = tl.constexpr(2 * 1.4426950408889634)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent: to a few units of 2⁻²⁴, or with PRECISE to the last places of float32 near 0 as well, by a
    polynomial where the formula would cancel."""
    value = 1.0 - 2.0 / (1.0 + tl.exp2(x * _TWICE_LOG2_E))
    if PRECISE:
        square = x * x
        series = -0.053968254 + square * (0.021869488 + square * (-0.0088632358 + square * 0.0035921280))
        small = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * series)))
        value = tl.where(tl.abs(x) < 0.5, small, value)
    return value


@triton.constexpr_function
def swizzles_differ(columns, columns_v):
    """Whether 16-bit tiles with `columns` of k and `columns_v` of v have different swizzles in shared memory: of 32, 64
    or 128 bytes. If so, a kernel must load the tile of v before it multiplies by that of k, so that both are on chip.

    If it is loaded later, it may take the place of k's tile, which is no longer needed. The descriptors of both (of
    wgmma, on sm_90) are then sums of one address and different constants. ptxas 12.8, in Triton 3.6 and 3.7, computes
    such a sum from a wrong register, and from the second 16 keys on `p v` reads other memory. Two tiles that are on
    chip at once have two addresses. It happened only where tiles go through registers: 8-bit operands, and rows that do
    not begin at multiples of 4 bytes. Others are copied asynchronously, and only the wait for v comes earlier for them.
    """
    return columns != columns_v and min(columns, columns_v) < 64


@triton.jit
def reduce_partial(
    partial_ptr, out_ptr, columns, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, PRESENT: tl.constexpr
):  # fmt: skip
    """A sum over rows without atomics: each program stored its part, and these are added in a fixed order. Stores the
    sum over programs of parts `[programs, WIDTH]`; returns where those of the next sum begin."""
    if PRESENT:
        total = tl.zeros([ROWS, columns.shape[0]], tl.float32)
        inside = (columns < WIDTH)[None, :]
        for first in range(0, programs, ROWS):
            program = first + tl.arange(0, ROWS)
            offsets = program.to(tl.int64)[:, None] * WIDTH + columns[None, :]
            total += tl.load(partial_ptr + offsets, mask=inside & (program < programs)[:, None], other=0.0)
        sums = tl.sum(total, axis=0)
        tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)
        partial_ptr += programs.to(tl.int64) * WIDTH
    return partial_ptr


class Dropout(NamedTuple):
    """The seed and offset of Philox, and the number from which on a word of it keeps an element."""

    seed: Any
    offset: Any
    threshold: Any


@triton.jit
def load_dropout(seed_ptr, threshold, PRESENT: tl.constexpr):
    """The `Dropout` of a call, None without; a kernel chooses in which of its loops."""
    dropout = None
    if PRESENT:
        dropout = Dropout(tl.load(seed_ptr), tl.load(seed_ptr + 1).to(tl.int32), threshold)
    return dropout


@triton.jit
def kept_in_rows(dropout, stream, rows, first_column, COLUMNS: tl.constexpr):
    """The kept elements of a tile of rows `[M]`, int32, and COLUMNS columns from a multiple of 4 on: bool."""
    group = (first_column // 4 + tl.arange(0, COLUMNS // 4))[None, :]
    zeros = rows[:, None] * 0 + group * 0  # [M, COLUMNS / 4]
    word_0, word_1, word_2, word_3 = tl.philox(
        dropout.seed, zeros + group, zeros + rows[:, None], zeros + stream, zeros + dropout.offset
    )
    even = tl.join(kept_words(word_0, dropout.threshold), kept_words(word_2, dropout.threshold))
    odd = tl.join(kept_words(word_1, dropout.threshold), kept_words(word_3, dropout.threshold))
    # [M, COLUMNS / 4, word / 2, word % 2]
    return tl.reshape(tl.join(even, odd), (rows.shape[0], COLUMNS)) != 0


@triton.jit
def kept_words(words, threshold):
    """1 for each word of Philox that keeps its element, else 0: int8."""
    return (words.to(tl.int32, bitcast=True) >= threshold).to(tl.int8)
