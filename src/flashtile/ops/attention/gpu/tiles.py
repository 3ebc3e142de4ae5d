"""The vocabulary that the portable attention kernels share: where a tile lies, what it sees, and its loads and stores.

Shapes::

    M  query rows of a tile        N  key columns of a tile
    D  head_dim of q and k         E  head_dim of v and out
    BLOCK_D, BLOCK_E: D and E rounded up to what a tensor core takes; the rest of a tile is zero

A *sequence* is a batch entry of a dense call, or what lies between two entries of `cu_seqlens` of a packed one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
#: The smallest scale: a smaller one is no number of full precision, or 0, and hidden scores times 0 are NaN.
LEAST_SCALE = tl.constexpr(2.0**-126)


class TileShape(NamedTuple):
    """Constants of a kernel: head_dim of q and k, that of v, tiles that hold them, queries and keys of a tile, and the
    columns of a head in one product, 0 for all of them."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_E: Any
    BLOCK_M: Any
    BLOCK_N: Any
    CHUNK: Any


class Strides(NamedTuple):
    """Elements from one batch entry and head of a tensor to the next, and as a constant from one row to the next.

    A constant in a NamedTuple stays one where the tuple is a parameter, not where it is assigned to a variable.
    """

    batch: Any
    head: Any
    ROW: Any


class RowTensors(NamedTuple):
    """Pointers to tensors with something for each query, of the dq kernel.

    Attributes:
        out, dout, lse, dlse: what the forward wrote, and the gradients of that; `dlse` may be None.
        statistics: where it writes lse in units of log2, delta and, with sinks, the delta of these.
        slope_sums: where ALiBi's slopes want a gradient: what each row adds to it, in the shape of lse.
        quiet: where rows may see no key: dout for the other kernels, in the layout of out, with zeros in these rows,
            whose weights of 0 would not stop NaN there.
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    statistics: Any
    slope_sums: Any
    quiet: Any


class TileRanges(NamedTuple):
    """The tiles that a program visits: `[begin, full_begin)` masked, `[full_begin, full_end)` wholly visible
    to every row, `[full_end, end)` masked."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def find_sequence(cu_seqlens_ptr, slot, batch, BLOCK: tl.constexpr):
    """The sequence that a slot of a packed call belongs to, found on the device without the host's help.

    Sequence `b` owns the slots from `cu_seqlens[b] // BLOCK + b` on: always as many as it has tiles, or one more,
    so `total // BLOCK + batch + 1` slots hold every tile of any lengths. Rows past `cu_seqlens[batch]` are
    sequence number `batch`, which has no keys.
    """
    CHUNK: tl.constexpr = 256
    count = 0
    for start in range(0, batch + 1, CHUNK):
        sequence = start + tl.arange(0, CHUNK)
        exists = sequence <= batch
        row = tl.load(cu_seqlens_ptr + sequence, mask=exists, other=0).to(tl.int32)
        count += tl.sum(((row // BLOCK + sequence <= slot) & exists).to(tl.int32), 0)
    return count - 1


@triton.jit
def sequence_rows(cu_seqlens_ptr, sequence, batch, total):
    """First row and number of rows of a sequence of a packed call; sequence `batch` is the rest of the rows."""
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=total).to(tl.int32)
    return begin, end - begin


@triton.jit
def locate_tile(
    program, cu_seqlens_ptr, other_cu_seqlens_ptr, batch, heads, rows, other_rows,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, LAST_FIRST: tl.constexpr, BATCH_FIRST: tl.constexpr,
):  # fmt: skip
    """The tile, head and sequence that a program computes.

    `rows` are those that the tiles divide (queries, or keys in the dk/dv kernel), `other_rows` the opposite ones; in
    a packed call both are totals. `BATCH_FIRST`: programs next to each other compute the same tile of all batch
    entries, not the tiles of one, because those share something larger than keys and values (a bias).

    Returns:
        sequence, head, first row of the tile within its sequence (at or past its length: nothing to do), first row
        of the sequence in memory, its length, and both of the opposite side.
    """
    if PACKED:
        slots = rows // BLOCK + batch + 1
        slot = program % slots
        head = program // slots
        sequence = find_sequence(cu_seqlens_ptr, slot, batch, BLOCK)
        begin, length = sequence_rows(cu_seqlens_ptr, sequence, batch, rows)
        first = (slot - begin // BLOCK - sequence) * BLOCK
        other_begin, other_length = sequence_rows(other_cu_seqlens_ptr, sequence, batch, other_rows)
        other_length = tl.where(sequence < batch, other_length, 0)
    else:
        tiles = tl.cdiv(rows, BLOCK)
        if BATCH_FIRST:
            sequence = program % batch
            program = program // batch
        tile = program % tiles
        if LAST_FIRST:
            tile = tiles - 1 - tile
        head = program // tiles % heads
        if not BATCH_FIRST:
            sequence = program // tiles // heads
        first = tile * BLOCK
        begin = 0
        length = rows
        other_begin = 0
        other_length = other_rows
    return sequence, head, first, begin, length, other_begin, other_length


@triton.jit
def head_pointer(pointer, strides, sequence, first_row, head, PACKED: tl.constexpr):
    """Pointer to row `first_row` of one head of one sequence, computed in 64 bits."""
    offset = tl.cast(first_row, tl.int64) * strides.ROW + tl.cast(head, tl.int64) * strides.head
    if not PACKED:
        offset += tl.cast(sequence, tl.int64) * strides.batch
    return pointer + offset


@triton.jit
def row_statistics_offset(sequence, head, heads, begin, rows, PACKED: tl.constexpr):
    """Offset of a head's first row in lse and delta: `[batch, heads, seq_q]`, packed `[heads, total_q]`."""
    if PACKED:
        offset = tl.cast(head, tl.int64) * rows + begin
    else:
        offset = (tl.cast(sequence, tl.int64) * heads + head) * rows
    return offset


@triton.jit
def valid_keys(key_lengths_ptr, sequence, batch, seq_k):
    """How many keys of a sequence may be visible."""
    valid = seq_k
    if key_lengths_ptr is not None:
        # The sequence of the rows past the end (number `batch`) has no keys, and no length either.
        # A length may be far more than there are keys, so it is 32 bits wide only after that.
        length = tl.load(key_lengths_ptr + sequence, mask=sequence < batch, other=0)
        valid = tl.minimum(length, seq_k).to(tl.int32)
    return valid


@triton.jit
def row_pointers(base, STRIDE_ROW: tl.constexpr, first, BLOCK_ROWS: tl.constexpr):
    """Pointers to the first column of some rows, `[BLOCK_ROWS, 1]`, in wide arithmetic for the first row only."""
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    if STRIDE_ROW >= 2**23:
        row = row.to(tl.int64)
    return base + tl.cast(first, tl.int64) * STRIDE_ROW + row * STRIDE_ROW


@triton.jit
def load_rows(
    base, strides, first, rows, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_ROWS, BLOCK_COLUMNS]` of one head from row `first` on, 0 past the end; `WHOLE`: nothing is past it."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    pointers = row_pointers(base, strides.ROW, first, BLOCK_ROWS) + column[None, :]
    if not WHOLE and HEAD_DIM < BLOCK_COLUMNS:
        tile = tl.load(pointers, mask=(first + row < rows)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif not WHOLE:
        tile = tl.load(pointers, mask=(first + row < rows)[:, None], other=0.0)
    elif HEAD_DIM < BLOCK_COLUMNS:
        tile = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def as_operand(tile):
    """A tile as a product takes it: bytes of e4m3 become float16, because neither all GPUs nor Triton have all
    conversions."""
    if tile.dtype == tl.uint8:
        # Sign, exponent and fraction of the one at their places in the other. Its exponent counts from 7, not from 15:
        # the number is 2⁸ times that, also where it has no leading one. NaN comes out as 480, which nothing else does.
        bits = (tile.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
        half = bits.to(tl.float16, bitcast=True) * 256.0
        tile = tl.where(tl.abs(half) == 480.0, float("nan"), half).to(tl.float16)
    return tile


@triton.jit
def load_descale(descale_ptr, strides, sequence, head_kv, batch):
    """The factor of one key/value head of one sequence. Rows past the end (sequence `batch`) have none."""
    place = tl.cast(sequence, tl.int64) * strides.batch + head_kv * strides.head
    return tl.load(descale_ptr + place, mask=sequence < batch, other=1.0)


@triton.jit
def product_by_chunks(
    a_base, a_strides, a_first, a_rows, b_base, b_strides, b_first, b_rows,
    HEAD_DIM: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`a bᵀ` of two tiles of rows, `[BLOCK_A, BLOCK_B]`, CHUNK columns at a time, if whole tiles would not fit."""
    a_row = tl.arange(0, BLOCK_A)
    b_row = tl.arange(0, BLOCK_B)
    a_pointers = row_pointers(a_base, a_strides.ROW, a_first, BLOCK_A)
    b_pointers = row_pointers(b_base, b_strides.ROW, b_first, BLOCK_B)
    product = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for start in range(0, BLOCK_COLUMNS, CHUNK):
        column = (start + tl.arange(0, CHUNK))[None, :]
        a_mask = (a_first + a_row < a_rows)[:, None] & (column < HEAD_DIM)
        b_mask = (b_first + b_row < b_rows)[:, None] & (column < HEAD_DIM)
        a_chunk = as_operand(tl.load(a_pointers + column, mask=a_mask, other=0.0))
        b_chunk = as_operand(tl.load(b_pointers + column, mask=b_mask, other=0.0))
        product = tl.dot(a_chunk, tl.trans(b_chunk), product, input_precision=PRECISION)
    return product


@triton.jit
def store_rows(
    base, strides, first, rows, tile, HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """Stores a `[BLOCK_ROWS, BLOCK_COLUMNS]` tile, but for what lies past the last row or past HEAD_DIM."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_COLUMNS)
    pointers = row_pointers(base, strides.ROW, first, BLOCK_ROWS) + column[None, :]
    mask = (first + row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def key_tile_ranges(first, rows, shift, keys, window, constants, shape):
    """The `TileRanges` of keys that a query tile visits. `shift` is the key of row 0's diagonal."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    last = tl.minimum(first + BLOCK_M, rows) - 1
    begin = 0
    full_begin = 0
    end = keys
    full_end = keys
    if constants.HAS_RIGHT:
        end = tl.minimum(keys, last + shift + window.right + 1)
        full_end = tl.minimum(keys, first + shift + window.right + 1)
    if constants.HAS_LEFT:
        begin = tl.maximum(first + shift - window.left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last + shift - window.left, 0), BLOCK_N) * BLOCK_N
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK_N * BLOCK_N, full_begin)
    return TileRanges(begin, full_begin, full_end, end)


@triton.jit
def query_tile_ranges(first, keys, shift, rows, window, constants, shape):
    """The `TileRanges` of queries that see a key tile; the last, partial tile of the queries counts as masked."""
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    last = tl.minimum(first + BLOCK_N, keys) - 1
    begin = 0
    full_begin = 0
    end = rows
    full_end = rows
    if constants.HAS_RIGHT:
        begin = tl.maximum(first - shift - window.right, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(last - shift - window.right, 0), BLOCK_M) * BLOCK_M
    if constants.HAS_LEFT:
        end = tl.minimum(rows, last - shift + window.left + 1)
        full_end = tl.minimum(rows, first - shift + window.left + 1)
    end = tl.where(first < keys, tl.maximum(end, begin), begin)
    full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_M) * BLOCK_M)
    full_end = tl.maximum(tl.maximum(full_end, 0) // BLOCK_M * BLOCK_M, full_begin)
    return TileRanges(begin, full_begin, tl.minimum(full_end, tl.maximum(end, full_begin)), end)


@triton.jit
def visible_pairs(row, column, shift, keys, window, constants):
    """The (query row, key column) pairs that are visible; `row` and `column` broadcast against each other."""
    visible = (column < keys) & (row == row)
    if constants.HAS_RIGHT:
        visible &= column <= row + (shift + window.right)
    if constants.HAS_LEFT:
        visible &= column >= row + (shift - window.left)
    return visible
