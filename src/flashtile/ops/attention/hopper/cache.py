"""Keys and values that are rows of a cache, dense or in pages: where they lie, and how the forward loads them.

Sequence `b` has `lengths[b]` rows in the cache, and those that were appended by the call. Rows of entry or page `p` lie
from row `p · apart` of the cache on, taken as one long tensor: `apart` is what leads from one to the next. Its last
query lies at its last row.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load
from flashtile.ops.attention.hopper.primitives import HeadRows, coordinates, tile_slice
from flashtile.ops.attention.hopper.schedule import LocatedTile, sequence_rows


class CacheAddresses(NamedTuple):
    """What a launch is given; None for what a call does not have.

    Attributes:
        lengths: of the rows of each sequence before any are appended; else all have `length`, which is no address.
        entries: of the entry of the cache of each sequence.
        table: of the pages of each sequence.
        new_starts: of where the rows that are appended to each sequence begin.
        flags: of some numbers of each query. Sequences of one query that have only 0 there are not served.
    """

    lengths: Any
    length: Any
    entries: Any
    table: Any
    new_starts: Any
    flags: Any


class CacheNumbers(NamedTuple):
    """What a plan knows of the cache.

    Attributes:
        seq_new: rows that are appended to each sequence; None if `new_starts` says it.
        least: packed sequences of fewer queries are not served here.
        capacity: rows that a sequence can have.
        stride_table: from the pages of one sequence to those of the next.
        k_apart, v_apart: rows from one entry or page to the next.
        flags: how many of a query; None without.
    """

    seq_new: Any
    least: Any
    capacity: Any
    stride_table: Any
    k_apart: Any
    v_apart: Any
    flags: Any


class CachedRows(NamedTuple):
    """Both of them, and the constants: rows of a page, 0 without pages, and boxes of the descriptors in a tile of
    keys."""

    addresses: CacheAddresses
    numbers: CacheNumbers
    page_size: int
    loads: int


def load_shares(loads: int) -> int:
    """Warps that load the boxes of a tile of keys: each box is some forty instructions of one."""
    return 4 if loads >= 4 else 1


class KeyPlace(NamedTuple):
    """Where the keys and values of a head of a sequence begin, or where its pages are listed. What a call does not need
    is 0."""

    k_begin: Any
    v_begin: Any
    table: Any


@gluon.jit
def locate_in_cache(at, cache, numbers, batch, PACKED: gl.constexpr):
    """A tile of queries with the rows that its sequence has in the cache (`CacheAddresses`, `CacheNumbers`) as its
    other length, and their `KeyPlace`.
    Rows past the last packed sequence see nothing; sequences that are not served here have no rows."""
    sequence = at.sequence
    length = at.length
    if PACKED:
        somebody = at.sequence < batch
        sequence = gl.minimum(at.sequence, batch - 1)
        if numbers.least is not None:
            length = gl.where(somebody & (length < numbers.least), 0, length)
    if cache.flags is not None:
        asked = at.sequence < batch
        query = sequence
        if PACKED:
            asked &= length > 0
            query = at.begin
        length = gl.where(_has_flag(cache.flags, query, asked, numbers.flags), length, 0)
    new = numbers.seq_new
    if cache.new_starts is not None:
        _, new = sequence_rows(cache.new_starts, sequence, batch, 0)
    before = cache.length
    if cache.lengths is not None:
        # A length may be far more than there are rows, so it is 32 bits wide only after that.
        before = gl.minimum(gl.load(cache.lengths + sequence), numbers.capacity).to(gl.int32)
    total = gl.minimum(gl.maximum(before + new, 0), numbers.capacity)
    if PACKED:
        total = gl.where(somebody, total, 0)
    located = LocatedTile(at.sequence, at.head, at.first, at.begin, length, 0, total)
    if cache.table is not None:
        place = sequence_pages(sequence, cache, numbers, batch)
    else:
        entry = sequence
        if cache.entries is not None:
            entry = gl.load(cache.entries + sequence).to(gl.int32)
        place = KeyPlace(entry * numbers.k_apart, entry * numbers.v_apart, 0)
    return located, place


@gluon.jit
def _has_flag(flags, query, asked, count):
    """Whether a query has another number than 0 among `count`; not unless it is `asked`. The caller is one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    found = gl.to_tensor(0)
    for first in range(0, count, 256):
        number = first + gl.arange(0, 256, layout)
        some = gl.load(flags + query * count + number, mask=asked & (number < count), other=0)
        found = gl.maximum(found, gl.max(some, 0))
    return found != 0


@gluon.jit
def sequence_pages(sequence, cache, numbers, batch):
    """The `KeyPlace` of a sequence in pages, also for one past the last, which has no rows."""
    table = cache.table + gl.minimum(sequence, batch - 1).to(gl.int64) * numbers.stride_table
    return KeyPlace(0, 0, table)


@gluon.jit
def box_pages(desc, row, length, table, config, ROWS: gl.constexpr, SHARE: gl.constexpr):
    """The pages of this warp's boxes of a tile of `ROWS` rows from `row` on, of both keys and values. Nothing is looked
    up past the last row, where it is 0. The producer asks before it waits for a place in the ring."""
    BOX: gl.constexpr = desc.block_shape[-3]
    COUNT: gl.constexpr = ROWS // BOX // config.SHARES
    pages = (row * 0,)
    if config.PAGE_SIZE > 0:
        for piece in gl.static_range(COUNT):
            first = row + (SHARE * COUNT + piece) * BOX
            page = gl.load(table + first // config.PAGE_SIZE, mask=first < length, other=0).to(gl.int32)
            if piece == 0:
                pages = (page,)
            else:
                pages = pages + (page,)
    return pages


@gluon.jit
def load_boxes(ring, slot, barrier, descriptors, rows, row, pages, apart, column, config, SHARE: gl.constexpr):
    """Producer: as `Ring.load`, of rows of a head in a cache, for number `barrier` of the ring's full barriers. The
    boxes of the descriptors divide a page, and each is loaded by itself, by one of `config.SHARES` warps; what is past
    the last row is read as zero. `pages`: of `box_pages`.

    As rows of one packed tensor (`coordinates`) the sequence begins `row` rows before the place of a box; past its end
    where no coordinate is negative.
    """
    BOX: gl.constexpr = descriptors.main.block_shape[-3]
    COUNT: gl.constexpr = ring.ROWS // BOX // config.SHARES
    full = ring.full.index(barrier)
    mbarrier.expect(full, ring.tiles.dtype.primitive_bitwidth // 8 * COUNT * BOX * (ring.WIDTH + ring.TAIL))
    for piece in gl.static_range(SHARE * COUNT, (SHARE + 1) * COUNT):
        first = row + piece * BOX
        here = rows
        if config.PAGE_SIZE > 0:
            begin = gl.maximum(pages[piece - SHARE * COUNT] * apart + first % config.PAGE_SIZE - first, -rows.length)
            here = HeadRows(rows.sequence, rows.head, begin, rows.length)
        tile = tile_slice(ring.tiles.index(slot.place), piece * BOX, BOX, 2)
        tma_load(descriptors.main, coordinates(here, first, column, True), full, tile)
        if ring.TAIL > 0:
            tail = tile_slice(ring.tail.index(slot.place), piece * BOX, BOX, 2)
            tma_load(descriptors.tail, coordinates(here, first, column + ring.WIDTH, True), full, tail)


@gluon.jit
def clear_rows(ring, slot, count, phase, config, SHARE: gl.constexpr):
    """Producer: once this warp's boxes of a tile are there, which its own barrier says, zeros in those of the tile's
    first `count` rows that are its share; then the tile is there for the consumers.

    No query of the sequence sees these rows: they are left of all windows, and may hold NaN, which a weight of 0 would
    not remove. The hardware ends a sequence on one side alone.
    """
    ROWS: gl.constexpr = ring.ROWS // config.SHARES
    mbarrier.wait(ring.full.index(ring.STAGES + SHARE), phase)
    clear_first(ring.main_operand(slot), count, SHARE * ROWS, ROWS)
    if ring.TAIL > 0:
        clear_first(ring.tail_operand(slot), count, SHARE * ROWS, ROWS)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot.place), count=1)


@gluon.jit
def clear_first(tile, count, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Zeros in the rows below `count` of `ROWS` rows of a tile from `FIRST` on; the caller is one warp."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for first in gl.static_range(FIRST, FIRST + ROWS, 8):
        if first < count:
            part = tile.slice(first, 8, dim=0)
            row = first + gl.arange(0, 8, gl.SliceLayout(1, layout))
            values = part.load(layout)
            part.store(gl.where((row >= count)[:, None], values, gl.zeros([8, WIDTH], values.dtype, layout)))
