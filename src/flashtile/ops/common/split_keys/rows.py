"""Where the rows of a sequence lie: what the kernels over a cache share. N = BLOCK_N rows of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sequences(NamedTuple):
    """Pointers to what says where the rows of each sequence lie; None for what a call does not have.

    Attributes:
        lengths: rows in the cache before any are appended.
        entries: the entry of the cache.
        left: rows before this one are not visible.
        table: pages, `[batch, max_pages]`.
        starts: `[batch + 1]`, where the queries begin, if they are packed.
        new_starts: likewise of the rows that are appended.
        tree: `[batch, seq_q, seq_q]`, packed `[total_q, ...]`: which of the last rows a query sees, other than 0.
    """

    lengths: Any
    entries: Any
    left: Any
    table: Any
    starts: Any
    new_starts: Any
    tree: Any


class TableStrides(NamedTuple):
    """Elements from one sequence to the next in the table of pages, in slopes and in the tree, from one query to the
    next in the tree, and how many columns that has."""

    table: Any
    slopes: Any
    tree: Any
    tree_query: Any
    tree_columns: Any


class RowStrides(NamedTuple):
    """Elements from one batch entry, row and head of a tensor to the next."""

    batch: Any
    row: Any
    head: Any


class CacheStrides(NamedTuple):
    """From one entry (or page), row and head to the next. `NARROW`: offsets in all pages have 32 bits, or None."""

    outer: Any
    row: Any
    head: Any
    NARROW: Any = None


class Descales(NamedTuple):
    """Pointers to the factors of k and v of 8 bits, float32, None for 1; or where they lie."""

    k: Any
    v: Any


class Window(NamedTuple):
    """Which keys are visible to a query.

    Attributes:
        left, right: keys on each side of the diagonal; None: all.
        diagonal: the key on the diagonal of the first query; None: that of the last query is the last key.
        slope_diagonal: likewise, for the distances of ALiBi.
    """

    left: Any
    right: Any
    diagonal: Any
    slope_diagonal: Any


@triton.jit
def sequence_lengths(lengths_ptr, sequence, length, seq_new, capacity):
    """Rows of a sequence before and after appending. The second is never outside of the cache."""
    before = length
    if lengths_ptr is not None:
        # A length may be far more than there are rows, so it is 32 bits wide only after that.
        before = tl.minimum(tl.load(lengths_ptr + sequence), capacity).to(tl.int32)
    return before, tl.minimum(tl.maximum(before + seq_new, 0), capacity)


@triton.jit
def tile_sequence(starts_ptr, place, batch, SCALE: tl.constexpr, TILE: tl.constexpr):
    """The packed sequence that tile number `place` belongs to, by bisection; `batch` for what follows the last one.

    A row counts SCALE times. Sequence `b` begins with tile `starts[b] * SCALE // TILE + b`, so that no tile has rows of
    two sequences. With tiles of one row it begins with its first row, and there are no tiles between sequences.
    """
    low = 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts_ptr + middle).to(tl.int32) * SCALE // TILE
        if TILE > 1:
            first += middle
        if first <= place:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def packed_rows(starts_ptr, sequence, batch, total):
    """The first row of a packed sequence, and how many it has; behind the last sequence, the rows that nobody has."""
    first = tl.load(starts_ptr + sequence).to(tl.int32)
    end = tl.load(starts_ptr + tl.minimum(sequence + 1, batch)).to(tl.int32)
    return first, tl.where(sequence < batch, end, total) - first


@triton.jit
def tile_pages(table, tile, last_tile, begin, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page that a tile of rows lies in, or those of its rows `[N]`; 0 for rows outside of `[begin, end)`.

    As they were loaded: whatever is done to them, a conversion too, waits for them. And of what one turn of a loop
    hands to the next, Triton's pipeline puts a load early enough, but nothing that is made of one.
    """
    page = 0
    if PAGE_SIZE:
        start = tile * BLOCK_N
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE_SIZE, mask=tile < last_tile, other=0)
        else:
            key = start + tl.arange(0, BLOCK_N)
            there = (key >= begin) & (key < end) & (tile < last_tile)
            page = tl.load(table + key // PAGE_SIZE, mask=there, other=0)
    return page


@triton.jit
def tile_pointers(base, page, start, strides, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pointers to the first column of the rows from `start` on, `[N, 1]`: wide arithmetic once for the first row,
    narrow arithmetic inside the tile, where the stride allows it, and inside all pages, where their stride is narrow.
    `strides`: `CacheStrides`; that of rows is a constant."""
    row = tl.arange(0, BLOCK_N)[:, None]
    first = start
    if PAGE_SIZE:
        if PAGE_SIZE % BLOCK_N == 0:
            first = start % PAGE_SIZE
            base += page.to(tl.int64) * strides.outer
        else:
            row = (start + row) % PAGE_SIZE
            first = 0
            if strides.NARROW is not None:
                return base + (page.to(tl.int32)[:, None] * tl.cast(strides.outer, tl.int32) + row * strides.row)
            base += (page.to(tl.int64) * strides.outer)[:, None]
    ROWS: tl.constexpr = BLOCK_N if PAGE_SIZE % BLOCK_N == 0 else PAGE_SIZE
    if strides.row * ROWS >= 2**31:
        row = row.to(tl.int64)
    return base + tl.cast(first, tl.int64) * strides.row + row * strides.row


@triton.jit
def tile_factors(base, page, start, strides, valid, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Factors `[1, N]` of the rows from `start` on, in products with them. `strides`: `CacheStrides` of the factors."""
    pointers = tile_pointers(base, page, start, strides, PAGE_SIZE, BLOCK_N)
    return tl.trans(tl.load(pointers, mask=valid[:, None], other=0.0))


@triton.jit
def load_flags(pointers, there, PTX: tl.constexpr):
    """Bytes `[M, N]`, and 1 where none is `there`. What `tl.load` loads has a layout of its own, which Triton gives the
    scores that it masks too, in all tiles: products of Hopper then wait for one another."""
    if PTX:
        flags = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 1; @p ld.global.u8 $0, [$1]; }", "=r,l,r",
            [pointers, there.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        flags = tl.load(pointers, mask=there, other=1).to(tl.int32)
    return flags
