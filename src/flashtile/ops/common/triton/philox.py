"""Dropout bits on a GPU, of matrices that are read row by row: the scheme of `flashtile.ops.common.philox`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_seed(seed_ptr, PRESENT: tl.constexpr):
    """Seed and offset for `kept_in_rows`, 0 where there are none; a kernel chooses in which of its loops."""
    if PRESENT:
        seed = tl.load(seed_ptr)
        offset = tl.load(seed_ptr + 1).to(tl.int32)
    else:
        seed = tl.full([], 0, tl.int64)
        offset = tl.full([], 0, tl.int32)
    return seed, offset


@triton.jit
def kept_in_rows(seed, offset, stream, rows, first_column, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The kept elements of a tile: bool `[ROWS, COLUMNS]`.

    `rows` is int32 `[ROWS]`; `first_column` is a multiple of 4.
    """
    group = (first_column // 4 + tl.arange(0, COLUMNS // 4))[None, :]
    zeros = rows[:, None] * 0 + group * 0  # [ROWS, COLUMNS / 4]
    word_0, word_1, word_2, word_3 = tl.philox(
        seed, zeros + group, zeros + rows[:, None], zeros + stream, zeros + offset
    )
    even = tl.join(_kept(word_0, threshold), _kept(word_2, threshold))
    odd = tl.join(_kept(word_1, threshold), _kept(word_3, threshold))
    # [ROWS, COLUMNS / 4, word / 2, word % 2]
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS)) != 0


@triton.jit
def _kept(words, threshold):
    return (words.to(tl.int32, bitcast=True) >= threshold).to(tl.int8)
