"""The producer of the Hopper forward: which tiles a thread block takes, and what it loads for them."""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier
from flashtile.ops.attention.hopper.cache import (
    KeyPlace,
    RowSource,
    SeenRows,
    box_pages,
    clear_rows,
    fetch_rows,
    head_factors,
    load_boxes,
    locate_in_cache,
    look_up,
    put_rows,
    sequence_entry,
    sequence_pages,
    sequence_place,
)
from flashtile.ops.attention.hopper.modifiers import (
    TILE_KIND,
    TILE_NUMBER,
    bias_bytes,
    head_table,
    last_shown,
    line_entries,
    listed_line,
    listed_tile,
    move_bias,
    write_tile_info,
)
from flashtile.ops.attention.hopper.primitives import (
    Chunks,
    HeadRows,
    M,
    Slot,
    hidden_zero,
    key_tile_ranges,
    publish_tile,
    receive_tile,
)
from flashtile.ops.attention.hopper.schedule import (
    PAIRS_TOGETHER,
    LocatedTile,
    closing_lines,
    finish_numbers,
    locate_tile,
    longest_line_first,
    next_number,
    tile_in_order,
)


class Rings(NamedTuple):
    """Tiles of queries (64 rows for each consumer), keys and values, which the producer fills and consumers empty.
    `k_tail`: the second chunk of keys, where it is released apart from the first (ONE_STAGE); else None. `bias`: the
    tiles of a bias that TMA brings, one for each consumer, which come and go with the keys (`tables`); else None."""

    q: Any
    k: Any
    k_tail: Any
    v: Any
    bias: Any


class QueryTile(NamedTuple):
    """A tile of query rows, as the producer publishes it: its first row in the sequence (negative: there are no more
    tiles), sequence and head. The other fields are 0 where they mean nothing: in a packed call the row at which the
    sequence begins and its lengths; with a block mask how many key tiles it lists; where key lengths or a mask end
    them, how many keys of the sequence count."""

    first: Any
    sequence: Any
    head: Any
    begin_q: Any
    seq_q: Any
    seq_k: Any
    listed: Any
    keys: Any


class ClearedRows(NamedTuple):
    """Of a sequence in a cache under a window: the first row that any of its queries sees; the first row of the last
    key tile to come, which is cleared up to there (`clear_rows`); and the phase of the barriers for that."""

    first: Any
    last_tile: Any
    phase: Any


@gluon.jit
def produce(config, queue, counter_ptr, rings, tensors, problem, blocks):
    """Producer warp: takes the tiles of this thread block, and loads what they need as soon as the rings have room."""
    tiles_published = 0
    key_tiles = 0
    number = gl.program_id(0)
    while number < problem.tiles * problem.lines:
        tiles_published, key_tiles, number = produce_tile(
            number, tiles_published, key_tiles, config, queue, counter_ptr, rings, tensors, problem, blocks
        )
    end = LocatedTile(sequence=0, head=0, first=-1, begin=0, length=0, other_begin=0, other_length=0)
    publish_query_tile(queue, tiles_published, end, 0, 0, 0, config)
    finish_numbers(counter_ptr, problem.dynamic)


@gluon.jit
def load_share(SHARE: gl.constexpr, config, queue, rings, tensors, problem):
    """Another warp, where tiles of keys are many boxes of pages: loads its share of those of each tile."""
    ROWS: gl.constexpr = config.CONSUMERS * M
    N: gl.constexpr = rings.k.ROWS
    numbers = problem.cache_numbers
    tiles_received = 0
    key_tiles = 0
    tile = receive_query_tile(queue, tiles_received, config)
    while tile.first >= 0:
        tiles_received += 1
        keys = tile.seq_k
        seq_q = tile.seq_q if config.PACKED else problem.rows_q
        shift = 0 if config.TOP_LEFT else keys - seq_q
        visited = key_tile_ranges(
            tile.first, seq_q, shift, keys, problem.window.left, problem.window.right, ROWS, N,
            config.HAS_LEFT, config.HAS_RIGHT,
        )  # fmt: skip
        place = sequence_pages(tile.sequence, problem.cache, numbers, problem.batch)
        rows = HeadRows(tile.sequence, tile.head // problem.group, 0, keys)
        seen = seen_rows(seq_q, keys, visited.begin, tiles_received - 1, problem, config, N)
        for done in range(0, visited.end - visited.begin):
            row = (visited.end - 1 - done) * N
            slot = key_slot(rings, key_tiles)
            pages = box_pages(tensors.k.main, row, keys, place.table, config, N, SHARE)
            rings.k.wait_empty(slot)
            load_keys(slot, tile, pages, rings, tensors, rows, row, numbers, config, SHARE)
            load_values(slot, pages, rings, tensors, rows, row, 0, seen, numbers, config, SHARE)
            key_tiles += 1
        tile = receive_query_tile(queue, tiles_received, config)


@gluon.jit
def load_rows(config, queue, rings, problem, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr):
    """A warpgroup that loads keys and values where TMA does not, through registers: while a tile waits for its place,
    the next one is on its way."""
    ROWS: gl.constexpr = config.CONSUMERS * M
    N: gl.constexpr = rings.k.ROWS
    ALIKE: gl.constexpr = rings.v.WIDTH == rings.k.WIDTH and rings.v.TAIL == rings.k.TAIL
    cache = problem.cache
    numbers = problem.cache_numbers
    tiles_received = 0
    key_tiles = 0
    tile = receive_query_tile(queue, tiles_received, config)
    while tile.first >= 0:
        tiles_received += 1
        keys = tile.seq_k
        seq_q = tile.seq_q if config.PACKED else problem.rows_q
        shift = keys - seq_q
        visited = key_tile_ranges(
            tile.first, seq_q, shift, keys, problem.window.left, problem.window.right, ROWS, N,
            config.HAS_LEFT, config.HAS_RIGHT,
        )  # fmt: skip
        first = 0
        if config.HAS_LEFT:
            first = gl.maximum(shift - problem.window.left, 0)
        sequence = gl.minimum(tile.sequence, problem.batch - 1)
        head = tile.head // problem.group
        place = sequence_place(sequence, cache, numbers, problem.batch)
        entry = 0
        if config.PAGE_SIZE == 0 and cache.k_factors is not None:
            entry = sequence_entry(sequence, cache)
        seen = SeenRows(first, keys, place.table)
        k_source = RowSource(
            cache.k + (gl.to_tensor(place.k_begin).to(gl.int64) * numbers.k_stride + head * numbers.k_head),
            head_factors(cache.k_factors, numbers.k_factors, entry, head),
            numbers.k_stride,
            numbers.k_apart,
            numbers.k_factors,
        )
        v_source = RowSource(
            cache.v + (gl.to_tensor(place.v_begin).to(gl.int64) * numbers.v_stride + head * numbers.v_head),
            head_factors(cache.v_factors, numbers.v_factors, entry, head),
            numbers.v_stride,
            numbers.v_apart,
            numbers.v_factors,
        )
        row = (visited.end - 1) * N
        pages = look_up(rings.k, row, seen, config, True)
        v_pages = pages
        if not ALIKE:
            v_pages = look_up(rings.v, row, seen, config, True)
        k = fetch_rows(k_source, rings.k, row, pages, seen, HEAD_DIM, config, True)
        v = fetch_rows(v_source, rings.v, row, v_pages, seen, HEAD_DIM_V, config, True)
        row -= N
        pages = look_up(rings.k, row, seen, config, True)
        if not ALIKE:
            v_pages = look_up(rings.v, row, seen, config, True)
        for _ in range(visited.begin + 1, visited.end):
            slot = rings.k.slot(key_tiles)
            put_rows(rings.k, slot, k, k_source, config)
            put_rows(rings.v, slot, v, v_source, config)
            publish_rows(rings.v, slot)
            publish_rows(rings.k, slot)
            k = fetch_rows(k_source, rings.k, row, pages, seen, HEAD_DIM, config, False)
            if ALIKE:
                v_pages = pages
            v = fetch_rows(v_source, rings.v, row, v_pages, seen, HEAD_DIM_V, config, False)
            row -= N
            key_tiles += 1
            pages = look_up(rings.k, row, seen, config, False)
            if not ALIKE:
                v_pages = look_up(rings.v, row, seen, config, False)
        slot = rings.k.slot(key_tiles)
        put_rows(rings.k, slot, k, k_source, config)
        publish_rows(rings.k, slot)
        put_rows(rings.v, slot, v, v_source, config)
        publish_rows(rings.v, slot)
        key_tiles += 1
        tile = receive_query_tile(queue, tiles_received, config)


@gluon.jit
def publish_rows(ring, slot):
    """Each thread makes what it wrote visible to products, and when all have, the tile is there."""
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot.place), count=1)


@gluon.jit
def produce_tile(
    number, tiles_published, key_tiles, config, queue, counter_ptr, rings, tensors, problem, blocks
):  # fmt: skip
    """Publishes a tile to the consumers, if it has rows, and loads it. Returns how many tiles were published, how many
    key tiles were loaded, and the number of the next tile."""
    ROWS: gl.constexpr = config.CONSUMERS * M
    N: gl.constexpr = rings.k.ROWS
    UNEVEN: gl.constexpr = config.PACKED or config.HAS_LEFT or config.HAS_RIGHT or config.TILE_Q > 0
    heads = problem.heads
    following = number
    part = 0
    tile, line = tile_in_order(
        number, problem.tiles, problem.lines, PAIRS_TOGETHER, closing_lines(problem.tiles), UNEVEN
    )
    if config.VALUE_PARTS > 1:
        part = line % config.VALUE_PARTS
        line = line // config.VALUE_PARTS
    if config.BATCH_FIRST:
        line = line % problem.batch * heads + line // problem.batch
    if config.TILE_Q > 0 and not config.PACKED:
        tile = longest_line_first(blocks.lists, tile, line // heads, line % heads, ROWS, config.TILE_Q)
    at = locate_tile(
        tile, line, problem.side.cu_seqlens_q, problem.side.cu_seqlens_k, problem.batch, heads,
        problem.rows_q, problem.rows_k, ROWS, config.PACKED,
    )  # fmt: skip
    place = KeyPlace(at.other_begin, at.other_begin, 0)
    numbers = problem.cache_numbers
    if config.CACHED:
        at, place = locate_in_cache(at, problem.cache, numbers, problem.batch, config.PACKED)
    if at.first < at.length:
        listed = 0
        if config.TILE_Q > 0 and not config.PACKED:
            entry, last_entry = line_entries(blocks.lists, at.sequence, at.head, at.first // config.TILE_Q)
            listed = (last_entry - entry) * (config.TILE_K // N)
        keys = at.other_length
        if config.KEY_LENGTHS:
            # Rows past the end of a packed call have no sequence, and no length. A length may be more than 32 bits.
            counted = gl.load(problem.side.key_lengths + at.sequence, mask=at.sequence < problem.batch, other=0)
            keys = gl.minimum(counted, at.other_length).to(gl.int32)
            if not config.PACKED:
                place = KeyPlace(at.sequence * problem.k_rows_apart, at.sequence * problem.v_rows_apart, 0)
        if config.MASK_ENDS_KEYS:
            mask = head_table(problem.side.mask, problem.numbers.mask, at.sequence, at.head)
            keys = last_shown(mask, problem.numbers.mask, config.MASK_COLUMN, keys)
        if config.TILE_Q > 0 and config.PACKED:
            entry, listed = listed_line(
                blocks.lists, at.sequence, at.head, at.first // config.TILE_Q, keys, at.sequence < problem.batch, N,
                config.TILE_K,
            )  # fmt: skip
        publish_query_tile(queue, tiles_published, at, part, listed, keys, config)
        queries = HeadRows(at.sequence, at.head, at.begin, at.length)
        for which in gl.static_range(config.CONSUMERS):
            slot = rings.q.slot(tiles_published, which)
            rings.q.fill(slot, tensors.q, queries, at.first + which * M, config.PACKED)
        tiles_published += 1
        shift = 0 if config.TOP_LEFT else at.other_length - at.length
        visited = key_tile_ranges(
            at.first, at.length, shift, keys, problem.window.left, problem.window.right, ROWS, N,
            config.HAS_LEFT, config.HAS_RIGHT,
        )  # fmt: skip
        if not config.BY_THREADS:
            key_begin = visited.begin
            key_end = visited.end
            if config.TILE_Q > 0:
                key_begin = 0
                key_end = gl.maximum(listed, 1)
            column = value_column(part, rings, config)
            seen = seen_rows(at.length, keys, key_begin, tiles_published - 1, problem, config, N)
            row_before = 0
            for done in range(0, key_end - key_begin):
                n = key_end - 1 - done
                if config.TILE_Q > 0:
                    n, kind = listed_tile(blocks.lists, entry, n, listed > 0, N, config.TILE_K)
                row = n * N
                slot = key_slot(rings, key_tiles)
                pages = (0,)
                if config.PAGE_SIZE > 0:
                    pages = box_pages(tensors.k.main, row, keys, place.table, config, N, 0)
                rings.k.wait_empty(slot)
                if config.TILE_Q > 0:
                    write_tile_info(blocks.tile_info, slot.place, TILE_NUMBER, n)
                    write_tile_info(blocks.tile_info, slot.place, TILE_KIND, kind)
                head = at.head // problem.group
                key_rows = HeadRows(at.sequence, head, place.k_begin, keys)
                value_rows = HeadRows(at.sequence, head, place.v_begin, keys)
                load_keys(slot, at, pages, rings, tensors, key_rows, row, numbers, config, 0)
                if config.ONE_STAGE:
                    # Keys become free before the values of the tile before, so they are loaded before these.
                    if done > 0:
                        before = key_slot(rings, key_tiles - 1)
                        pages = (0,)
                        if config.PAGE_SIZE > 0:
                            pages = box_pages(tensors.v.main, row_before, keys, place.table, config, N, 0)
                        load_values(
                            before, pages, rings, tensors, value_rows, row_before, column, seen, numbers, config, 0
                        )
                    row_before = row
                else:
                    load_values(slot, pages, rings, tensors, value_rows, row, column, seen, numbers, config, 0)
                key_tiles += 1
        # Asking early would divide the tiles by who began one first, not by who is done first (1 × 1,000 tokens, 32
        # heads of 128: 24.1 µs instead of 21.4). While the answer comes, consumers have the last key tiles before them.
        following = next_number(number, counter_ptr, problem.dynamic)
        if config.ONE_STAGE and not config.BY_THREADS:
            last = key_slot(rings, key_tiles - 1)
            value_rows = HeadRows(at.sequence, at.head // problem.group, place.v_begin, keys)
            pages = (0,)
            if config.PAGE_SIZE > 0:
                pages = box_pages(tensors.v.main, row_before, keys, place.table, config, N, 0)
            load_values(last, pages, rings, tensors, value_rows, row_before, column, seen, numbers, config, 0)
    else:
        following = next_number(number, counter_ptr, problem.dynamic)
    return tiles_published, key_tiles, following


@gluon.jit
def publish_query_tile(queue, count, at, part, listed, keys, config):
    """The producer's side of the queue. `at`: a `LocatedTile`, `part`: of the values' columns, which is published with
    the head, `listed`: how many key tiles a block mask lists."""
    head = at.head
    if config.VALUE_PARTS > 1:
        head = head * config.VALUE_PARTS + part
    tile = QueryTile(at.first, at.sequence, head, at.begin, at.length, at.other_length, listed, keys)
    publish_tile(queue, count, tile, _told(config))


@gluon.jit
def receive_query_tile(queue, count, config):
    """The consumers' side of the queue."""
    return QueryTile(*receive_tile(queue, count, _told(config)))


@gluon.constexpr_function
def _told(config):
    """Which fields of a query tile mean something, in their order."""
    packed, ends = config.PACKED, config.KEY_LENGTHS or config.MASK_ENDS_KEYS
    return (True, True, True, packed, packed, packed or config.CACHED, config.TILE_Q > 0, ends)


@gluon.jit
def key_slot(rings, key_tiles):
    """The slot of a key tile, and of its values.

    With a single stage the addresses of operands are the same in all steps of the loop. A compiler that sees this keeps
    the descriptors of all products in registers, and there are more than a thread has.
    """
    slot = rings.k.slot(key_tiles)
    if rings.k.STAGES == 1:
        slot = Slot(hidden_zero(key_tiles), slot.phase)
    return slot


@gluon.jit
def load_keys(slot, at, pages, rings, tensors, rows, row, cache, config, SHARE: gl.constexpr):
    """Loads a tile of keys into a slot whose first chunk is free, and its bias for the queries `at` a `LocatedTile`.
    `pages`: of `box_pages`. `SHARE`: of the boxes that pages are loaded in."""
    BOUNDED: gl.constexpr = ends_at_lengths(config)
    if config.PAGE_SIZE > 0:
        load_boxes(rings.k, slot, slot.place, tensors.k, rows, row, pages, cache.k_apart, 0, config, SHARE)
    else:
        BIAS_BYTES: gl.constexpr = bias_bytes(rings.bias, config.CONSUMERS)
        rings.k.load(slot, tensors.k, rows, row, BOUNDED, BESIDE=BIAS_BYTES)
        if rings.bias is not None:
            move_bias(
                tensors.bias, rings.bias, slot.place, at.sequence, at.head, at.first, row,
                rings.k.full.index(slot.place), config.CONSUMERS, False,
            )  # fmt: skip
    if rings.k_tail is not None:
        tail = Chunks(tensors.k.tail, None)
        rings.k_tail.wait_empty(slot)
        if config.PAGE_SIZE > 0:
            apart, column = cache.k_apart, rings.k.WIDTH
            load_boxes(rings.k_tail, slot, slot.place, tail, rows, row, pages, apart, column, config, SHARE)
        else:
            rings.k_tail.load(slot, tail, rows, row, BOUNDED, rings.k.WIDTH)


@gluon.jit
def load_values(slot, pages, rings, tensors, rows, row, column, seen, cache, config, SHARE: gl.constexpr):
    """Loads a tile of values, from a column on, as soon as its slot is free. `pages`: of `box_pages`. `seen`: a
    `ClearedRows`."""
    rings.v.wait_empty(slot)
    if config.CACHED and config.HAS_LEFT:
        last = row == seen.last_tile
        barrier = gl.where(last, rings.v.STAGES + SHARE, slot.place)
        load_boxes(rings.v, slot, barrier, tensors.v, rows, row, pages, cache.v_apart, column, config, SHARE)
        if last:
            clear_rows(rings.v, slot, seen.first - row, seen.phase, config, SHARE)
    elif config.PAGE_SIZE > 0:
        load_boxes(rings.v, slot, slot.place, tensors.v, rows, row, pages, cache.v_apart, column, config, SHARE)
    else:
        rings.v.load(slot, tensors.v, rows, row, ends_at_lengths(config), column)


@gluon.jit
def seen_rows(seq_q, keys, begin, tiles, problem, config, N: gl.constexpr):
    """The `ClearedRows` of a tile of queries, whose key tiles begin with number `begin`; `tiles`: how many came
    before."""
    first = 0
    if config.CACHED and config.HAS_LEFT:
        first = gl.maximum(keys - seq_q - problem.window.left, 0)
    return ClearedRows(first, begin * N, tiles & 1)


@gluon.constexpr_function
def ends_at_lengths(config):
    """Whether the hardware ends the keys of each sequence. Values past the end must be zeros, for a weight of 0 times
    what is no number would be none."""
    return config.PACKED or config.KEY_LENGTHS or config.CACHED


@gluon.jit
def value_column(part, rings, config):
    """The first column of a part of the values, and of out."""
    column = 0
    if config.VALUE_PARTS > 1:
        column = part * (rings.v.WIDTH + rings.v.TAIL)
    return column
