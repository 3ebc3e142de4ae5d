"""Dropout bits on a GPU, of matrices that are read row by row: the scheme of `flashtile.ops.common.philox`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


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
    even = tl.join(_kept(word_0, dropout.threshold), _kept(word_2, dropout.threshold))
    odd = tl.join(_kept(word_1, dropout.threshold), _kept(word_3, dropout.threshold))
    # [M, COLUMNS / 4, word / 2, word % 2]
    return tl.reshape(tl.join(even, odd), (rows.shape[0], COLUMNS)) != 0


@triton.jit
def _kept(words, threshold):
    return (words.to(tl.int32, bitcast=True) >= threshold).to(tl.int8)
