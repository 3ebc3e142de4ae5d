"""Keys and values that are rows of a cache, dense or in pages: where they lie, and how the forward loads them.

Sequence `b` has `lengths[b]` rows in the cache, and those that were appended by the call. Rows of entry or page `p` lie
from row `p · apart` of the cache on, taken as one long tensor: `apart` is what leads from one to the next. Its last
query lies at its last row.
"""

from typing import Any, NamedTuple

import torch

from flashtile._backends.gluon import async_copy, fence_async_shared, gl, gluon, mbarrier, tma_load
from flashtile._backends.launch import GIVEN, Parameter, int32, int64, pointer_to
from flashtile.ops.attention.hopper.primitives import (
    HeadRows,
    coordinates,
    packed_sequence,
    release,
    rows_in_cache,
    tile_slice,
)
from flashtile.ops.attention.hopper.schedule import LocatedTile, sequence_rows
from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.common.tiles import box_rows

#: Elements that a thread copies at a time, 16 bytes, of which strides are multiples.
TOGETHER = gl.constexpr(8)


class CacheAddresses(NamedTuple):
    """What a launch is given; None for what a call does not have.

    Attributes:
        lengths: of the rows of each sequence before any are appended; else all have `length`, which is no address.
        entries: of the entry of the cache of each sequence; negative where it is not served here (`some`).
        table: of the pages of each sequence.
        new_starts: of where the rows that are appended to each sequence begin.
        flags: of some numbers of each query. Sequences of one query that have only 0 there are not served.
        k_factors, v_factors: of what all keys, and all values, of a head are multiplied by.
        tree: of which of the last rows each query sees.
        token_starts: of where the queries of packed sequences begin, if the rows of a tile are the heads of a group
            (`Tokens`).
        k_rows, v_rows: of the caches, if threads copy their rows (`copy_rows`).
    """

    lengths: Any
    length: Any
    entries: Any
    table: Any
    new_starts: Any
    flags: Any
    k_factors: Any
    v_factors: Any
    tree: Any
    token_starts: Any
    k_rows: Any
    v_rows: Any


class CacheNumbers(NamedTuple):
    """What a plan knows of the cache.

    Attributes:
        seq_new: rows that are appended to each sequence; None if `new_starts` says it.
        least: packed sequences of fewer queries are not served here.
        some: a constant: not all sequences have an entry; else None.
        capacity: rows that a sequence can have.
        stride_table: from the pages of one sequence to those of the next.
        k_apart, v_apart: rows from one entry or page to the next.
        flags: how many of a query; None without.
        k_factors, v_factors: from the factor of one head to the next.
        tree, tree_query, tree_columns: from the tree of one sequence to the next, from one query to the next there, and
            how many columns it has.
        sequences, by_sequence: those of `Tokens`, the latter None or not.
        k_row, k_head, k_columns, v_row, v_head, v_columns: as in `CopiedRows`, columns as constants; None if TMA moves
            the rows.
    """

    seq_new: Any
    least: Any
    some: Any
    capacity: Any
    stride_table: Any
    k_apart: Any
    v_apart: Any
    flags: Any
    k_factors: Any
    v_factors: Any
    tree: Any
    tree_query: Any
    tree_columns: Any
    sequences: Any
    by_sequence: Any
    k_row: Any
    k_head: Any
    k_columns: Any
    v_row: Any
    v_head: Any
    v_columns: Any


class Tokens(NamedTuple):
    """Packed sequences of one query, whose heads of a group are the rows of a tile.

    Attributes:
        dtype: of their starts.
        sequences: how many there are, with those of no query or several.
        by_sequence: tiles are numbered by sequences, of which others are left out; else by queries.
    """

    dtype: torch.dtype
    sequences: int
    by_sequence: bool


class CachedRows(NamedTuple):
    """Both of them, and the constants: rows of a page, 0 without pages; boxes of the descriptors in a tile of keys; and
    whether threads copy the rows, because the boxes would be too small."""

    addresses: CacheAddresses
    numbers: CacheNumbers
    page_size: int
    loads: int
    copied: bool

    @staticmethod
    def from_call(
        call: SplitCall,
        block_n: int,
        most_left: int,
        flags: int | None = None,
        tokens: Tokens | None = None,
        some: bool = False,
    ) -> "CachedRows":
        """Describes the cache for a kernel with tiles of so many keys. `most_left`: packed sequences of up to so many
        queries are left to another kernel. `flags`, `some`: as in `CacheNumbers`."""
        lengths, entries, _, table, starts, new_starts, tree = call.index_dtypes
        (k_outer, k_row, k_head), (v_outer, v_row, v_head) = call.cache_strides
        box, copied = box_rows(call.page_size, block_n), not call.moves_pages
        cache = pointer_to(call.dtype if copied else None, 16)
        k_apart, v_apart = (int32(each // TOGETHER.value if copied else None) for each in (k_row, v_row))
        k_heads, v_heads = (int64(each if copied else None, TOGETHER.value) for each in (k_head, v_head))
        k_columns, v_columns = call.shape[-2:] if copied else (None, None)
        factors = dict(zip("kv", call.descale_strides))
        addresses = CacheAddresses(
            lengths=pointer_to(lengths),
            length=Parameter("i32", 1, GIVEN),
            entries=pointer_to(entries),
            table=pointer_to(table),
            new_starts=pointer_to(new_starts),
            flags=pointer_to(None if flags is None else torch.int32),
            **{f"{of}_factors": pointer_to(None if each is None else torch.float32) for of, each in factors.items()},
            tree=pointer_to(tree),
            token_starts=pointer_to(None if tokens is None else tokens.dtype),
            k_rows=cache,
            v_rows=cache,
        )
        of_sequence, of_query, columns = call.tree or (None, None, None)
        numbers = CacheNumbers(
            seq_new=int32(call.seq_new if new_starts is None else None),
            least=int32(None if starts is None else most_left + 1),
            some=some or None,
            capacity=int32(call.capacity),
            stride_table=int64(call.stride_table if call.page_size else None),
            k_apart=int32(k_outer // k_row),
            v_apart=int32(v_outer // v_row),
            flags=int32(flags),
            **{f"{of}_factors": int64(None if each is None else each[-1]) for of, each in factors.items()},
            tree=int64(of_sequence),
            tree_query=int64(of_query),
            tree_columns=int32(columns),
            sequences=int32(None if tokens is None else tokens.sequences),
            by_sequence=int32(1 if tokens is not None and tokens.by_sequence else None),
            k_row=k_apart,
            k_head=k_heads,
            k_columns=k_columns,
            v_row=v_apart,
            v_head=v_heads,
            v_columns=v_columns,
        )
        return CachedRows(addresses, numbers, call.page_size, 1 if copied else block_n // box, copied)

    @property
    def shares(self) -> int:
        """Warps that load a tile of keys: each box is some forty instructions of one."""
        return 4 if self.copied or self.loads >= 4 else 1


class KeyPlace(NamedTuple):
    """The begin of the keys and values of a head of a sequence, or the list of its pages with the rows from one page to
    the next. Fields that a call does not need are 0."""

    k_begin: Any
    v_begin: Any
    table: Any = 0
    k_apart: Any = 0
    v_apart: Any = 0


class KeyTile(NamedTuple):
    """A tile of keys, or of values: all rows of the head (`HeadRows`), and the first one of the tile; in pages also
    those of its boxes (`box_pages`), or of its rows (`row_pages`), and rows from one page to the next."""

    head: Any
    row: Any
    pages: Any
    apart: Any


@gluon.jit
def locate_in_cache(at, cache, numbers, batch, PACKED: gl.constexpr):
    """A tile of queries with the rows that its sequence has in the cache (`CacheAddresses`, `CacheNumbers`) as its
    other length, and their `KeyPlace`.
    Rows past the last packed sequence see nothing; sequences that are not served here have no rows. Of `Tokens` the
    result has the query instead of the sequence."""
    sequence = at.sequence
    length = at.length
    query = sequence
    somebody = sequence < batch
    sequences = batch
    if cache.token_starts is not None:
        sequences = numbers.sequences
        if numbers.by_sequence is not None:
            query, queries = sequence_rows(cache.token_starts, sequence, sequences, 0)
            length = gl.where(queries == 1, length, 0)
        else:
            sequence = packed_sequence(cache.token_starts, query, sequences, scale=1, TILE=1)
        somebody = sequence < sequences
        sequence = gl.minimum(sequence, sequences - 1)
    if PACKED:
        sequence = gl.minimum(at.sequence, batch - 1)
        if numbers.least is not None:
            length = gl.where(somebody & (length < numbers.least), 0, length)
    if cache.flags is not None:
        asked = somebody
        if PACKED:
            asked &= length > 0
            query = at.begin
        length = gl.where(_has_flag(cache.flags, query, asked, numbers.flags), length, 0)
    new = numbers.seq_new
    if cache.new_starts is not None:
        _, new = sequence_rows(cache.new_starts, sequence, batch, 0)
    total = rows_in_cache(cache.lengths, sequence, cache.length, new, numbers.capacity)
    if PACKED or cache.token_starts is not None:
        total = gl.where(somebody, total, 0)
    place = sequence_place(sequence, cache, numbers, sequences)
    if numbers.some is not None:
        length = gl.where(somebody & (place.k_begin < 0), 0, length)
        place = KeyPlace(gl.maximum(place.k_begin, 0), gl.maximum(place.v_begin, 0))
    of_tile = at.sequence
    if cache.token_starts is not None:
        of_tile = query
    located = LocatedTile(of_tile, at.head, at.first, at.begin, length, 0, total)
    return located, place


@gluon.jit
def tile_pages(sequence, cache, numbers, batch):
    """The `KeyPlace` in pages of the keys of a tile, whose `sequence` is a query of `Tokens`."""
    if cache.token_starts is not None:
        batch = numbers.sequences
        sequence = packed_sequence(cache.token_starts, sequence, batch, scale=1, TILE=1)
    return sequence_pages(sequence, cache, numbers, batch)


class Tree(NamedTuple):
    """A mask of the last rows of a sequence for each of its queries.

    Attributes:
        first: address of the row of the tree that the first query of the sequence has.
        stride: from one of these rows to the next.
        rows, columns: how many there are.
    """

    first: Any
    stride: Any
    rows: Any
    columns: Any


@gluon.jit
def sequence_tree(cache, numbers, rows, PACKED: gl.constexpr):
    """The `Tree` of the queries of a sequence, `HeadRows`; None without."""
    tree = None
    if cache.tree is not None:
        if PACKED:
            before = gl.to_tensor(rows.begin).to(gl.int64) * numbers.tree_query
        else:
            before = gl.to_tensor(rows.sequence).to(gl.int64) * numbers.tree
        tree = Tree(cache.tree + before, numbers.tree_query, rows.length, numbers.tree_columns)
    return tree


@gluon.jit
def sequence_place(sequence, cache, numbers, batch):
    """The `KeyPlace` of a sequence."""
    if cache.table is not None:
        place = sequence_pages(sequence, cache, numbers, batch)
    else:
        entry = sequence
        if cache.entries is not None:
            entry = gl.load(cache.entries + sequence).to(gl.int32)
        place = KeyPlace(entry * numbers.k_apart, entry * numbers.v_apart)
    return place


@gluon.jit
def cache_factor(pointer, stride, head):
    """The factor of a key/value head; None where there is none."""
    factor = None
    if pointer is not None:
        factor = gl.load(pointer + head * stride)
    return factor


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
    return KeyPlace(0, 0, table, numbers.k_apart, numbers.v_apart)


@gluon.jit
def box_pages(desc, row, length, table, config, ROWS: gl.constexpr, SHARE: gl.constexpr):
    """The pages of this warp's boxes of a tile of `ROWS` rows from `row` on, of both keys and values. Nothing is looked
    up before the first row or past the last, where it is 0. A single warp asks before it waits for a place in the ring,
    several ask a tile ahead."""
    BOX: gl.constexpr = desc.block_shape[-3]
    COUNT: gl.constexpr = ROWS // BOX // config.SHARES
    pages = (row * 0,)
    if config.PAGE_SIZE > 0:
        for piece in gl.static_range(COUNT):
            first = row + (SHARE * COUNT + piece) * BOX
            there = first < length
            if config.SHARES > 1:
                there &= first >= 0
            page = gl.load(table + first // config.PAGE_SIZE, mask=there, other=0).to(gl.int32)
            if piece == 0:
                pages = (page,)
            else:
                pages = pages + (page,)
    return pages


@gluon.jit
def load_boxes(ring, slot, descriptors, tile, column, config, SHARE: gl.constexpr, barrier):
    """Producer: as `Ring.load`, of a `KeyTile` in a cache, for number `barrier` of the ring's full barriers. The boxes
    of the descriptors divide a page, and each is loaded by itself, by one of `config.SHARES` warps; what is past the
    last row is read as zero.

    As rows of one packed tensor (`coordinates`) the sequence begins `row` rows before the place of a box; past its end
    where no coordinate is negative.
    """
    BOX: gl.constexpr = descriptors.main.block_shape[-3]
    COUNT: gl.constexpr = ring.ROWS // BOX // config.SHARES
    full = ring.full.index(barrier)
    mbarrier.expect(full, ring.tiles.dtype.primitive_bitwidth // 8 * COUNT * BOX * (ring.WIDTH + ring.TAIL))
    for piece in gl.static_range(SHARE * COUNT, (SHARE + 1) * COUNT):
        first = tile.row + piece * BOX
        here = tile.head
        if config.PAGE_SIZE > 0:
            page = tile.pages[piece - SHARE * COUNT]
            begin = gl.maximum(page * tile.apart + first % config.PAGE_SIZE - first, -tile.head.length)
            here = HeadRows(tile.head.sequence, tile.head.head, begin, tile.head.length)
        box = tile_slice(ring.tiles.index(slot.place), piece * BOX, BOX, 2)
        tma_load(descriptors.main, coordinates(here, first, column, True), full, box)
        if ring.TAIL > 0:
            tail = tile_slice(ring.tail.index(slot.place), piece * BOX, BOX, 2)
            tma_load(descriptors.tail, coordinates(here, first, column + ring.WIDTH, True), full, tail)


class CopiedRows(NamedTuple):
    """The rows of a cache: the address of the first; pieces of `TOGETHER` elements from one row to the next, elements
    from one head to the next, and columns of a head. 32 bits hold the number of any piece."""

    pointer: Any
    row: Any
    head: Any
    columns: Any


@gluon.jit
def copied_rows(cache, numbers):
    """The `CopiedRows` of keys, and of values."""
    keys = CopiedRows(cache.k_rows, numbers.k_row, numbers.k_head, numbers.k_columns)
    return keys, CopiedRows(cache.v_rows, numbers.v_row, numbers.v_head, numbers.v_columns)


@gluon.constexpr_function
def _copying(width):
    """How a warp copies rows of so many columns, eight at a time. Four threads have 64 bytes of a row, so each finds
    one address for all its pieces. The next four have those of the fourth row after it, which lie in other banks."""
    columns = [[0, 1], [0, 2], [0, 4], *([0, column] for column in (32, 64, 128) if column < width)]
    lanes = [[0, 8], [0, 16 if width > 16 else 0], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(columns, lanes, [], [], [8, width])


@gluon.constexpr_function
def _copied_rows(width):
    """The layout of one number for each of the eight rows."""
    return gl.SliceLayout(1, _copying(width))


@gluon.jit
def row_pages(row, first_seen, length, table, config, ROWS: gl.constexpr, SHARE: gl.constexpr):
    """As `box_pages`, the pages of this warp's rows of a tile, `[8]` each. For a row that does not count, that of one
    that does is looked up, which takes fewer registers than not to look."""
    COUNT: gl.constexpr = ROWS // config.SHARES
    pages = ()
    for first in gl.static_range(SHARE * COUNT, (SHARE + 1) * COUNT, 8):
        rows = gl.maximum(row + first + gl.arange(0, 8, _copied_rows(64)), first_seen)
        rows = gl.maximum(gl.minimum(rows, length - 1), 0)
        pages = pages + (gl.load(table + rows // config.PAGE_SIZE).to(gl.int32),)
    return pages


@gluon.jit
def copy_rows(ring, slot, rows, tile, column, first_seen, config, SHARE: gl.constexpr):
    """Producer: as `load_boxes`, of pages that TMA does not move. The threads of each of `config.SHARES` warps copy
    their share of the rows, zeros for those before `first_seen` or past the end. The tile is there once all are."""
    _copy_chunk(ring.main_operand(slot), rows, tile, column, first_seen, config, SHARE)
    if ring.TAIL > 0:
        _copy_chunk(ring.tail_operand(slot), rows, tile, column + ring.WIDTH, first_seen, config, SHARE)
    release(ring.full.index(slot.place))


@gluon.jit
def _copy_chunk(target, rows, tile, column, first_seen, config, SHARE: gl.constexpr):
    """Starts to copy this warp's rows of a tile, and their columns from `column` on."""
    COUNT: gl.constexpr = target.shape[0] // config.SHARES
    WIDTH: gl.constexpr = target.shape[1]
    layout: gl.constexpr = _copied_rows(WIDTH)
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, _copying(WIDTH)))[None, :]
    head = rows.pointer + tile.head.head * rows.head + columns
    for first in gl.static_range(SHARE * COUNT, (SHARE + 1) * COUNT, 8):
        row = tile.row + first + gl.arange(0, 8, layout)
        there = row < tile.head.length
        if config.HAS_LEFT:
            there &= row >= first_seen
        shown = there[:, None] & (columns < rows.columns)
        place = gl.convert_layout(tile.pages[(first - SHARE * COUNT) // 8], layout, assert_trivial=True)
        if config.PAGE_SIZE > 1:
            place = place * tile.apart + row % config.PAGE_SIZE
        pointers = head + ((place * rows.row).to(gl.int64) * TOGETHER)[:, None]
        async_copy.async_copy_global_to_shared(target.slice(first, 8, dim=0), pointers, mask=shown)


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
