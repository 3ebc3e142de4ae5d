"""The producer of the Hopper forward: which tiles a thread block takes, and what it loads for them."""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.cache import (
    KeyPlace,
    KeyTile,
    box_pages,
    clear_rows,
    copy_rows,
    load_boxes,
    locate_in_cache,
    row_pages,
    tile_pages,
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
    KeyTileRange,
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
    other_rows_of,
    sequence_rows,
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
    tiles), sequence and head (`published_head`). The other fields are 0 where they mean nothing: in a packed call the
    row at which the sequence begins and its lengths; with a block mask how many key tiles it lists; where key lengths
    or a mask end them, how many keys of the sequence count."""

    first: Any
    sequence: Any
    head: Any
    begin_q: Any
    seq_q: Any
    seq_k: Any
    listed: Any
    keys: Any


class Producer(NamedTuple):
    """The arguments that the producer gets from the kernel (`forward`)."""

    config: Any
    queue: Any
    counter_ptr: Any
    rings: Any
    tensors: Any
    problem: Any
    blocks: Any


class ClearedRows(NamedTuple):
    """Rows to clear of a sequence in a cache under a window: the first row that any of its queries sees; the first row
    of the last key tile to come, which is cleared up to there (`clear_rows`); and the phase of the barriers."""

    first: Any
    last_tile: Any
    phase: Any


@gluon.jit
def produce(config, queue, counter_ptr, rings, tensors, problem, blocks):
    """Producer warp: takes the tiles of this thread block, and loads what they need as soon as the rings have room."""
    tiles_published = 0
    key_tiles = 0
    number = gl.program_id(0)
    beyond = 0
    producer = Producer(config, queue, counter_ptr, rings, tensors, problem=problem, blocks=blocks)
    while number < problem.tiles * problem.lines:
        tiles_published, key_tiles, number, beyond = produce_tile(number, beyond, tiles_published, key_tiles, producer)
    end = LocatedTile(sequence=0, head=0, first=-1, begin=0, length=0, other_begin=0, other_length=0)
    publish_query_tile(queue, tiles_published, end, 0, 0, 0, config)
    finish_numbers(counter_ptr, problem.dynamic)


@gluon.jit
def load_share(SHARE: gl.constexpr, config, queue, rings, tensors, problem):
    """Another warp, where tiles of keys are many boxes of pages, or their rows are copied: loads its share of those of
    each tile."""
    N: gl.constexpr = rings.k.ROWS
    tiles_received = 0
    key_tiles = 0
    tile = receive_query_tile(queue, tiles_received, config)
    while tile.first >= 0:
        tiles_received += 1
        keys = tile.seq_k
        seq_q = tile.seq_q if config.PACKED else problem.rows_q
        of_queries, split = head_and_split(tile.head, problem.splits)
        visited = visited_keys(tile.first, seq_q, keys, keys, problem, config, N)
        visited = split_range(visited, split, problem.splits)
        place = tile_pages(tile.sequence, problem.cache, problem.cache_numbers, problem.batch)
        head = HeadRows(tile.sequence, of_queries // problem.group, 0, keys)
        seen = seen_rows(seq_q, keys, visited.begin, tiles_received - 1, problem, config, N)
        pages = share_pages(tensors.k, (visited.end - 1) * N, seen, keys, place, config, N, SHARE=SHARE)
        for done in range(0, visited.end - visited.begin):
            row = (visited.end - 1 - done) * N
            slot = key_slot(rings, key_tiles)
            here = pages
            rings.k.wait_empty(slot)
            load_keys(slot, KeyTile(head, row, here, place.k_apart), tile, seen, rings, tensors, config, SHARE=SHARE)
            # The pages of the next tile are looked up while the values wait for their place.
            pages = share_pages(tensors.k, row - N, seen, keys, place, config, N, SHARE=SHARE)
            v_tile = KeyTile(head, row, here, place.v_apart)
            load_values(slot, v_tile, 0, seen, rings, tensors, config, SHARE=SHARE)
            key_tiles += 1
        tile = receive_query_tile(queue, tiles_received, config)


@gluon.jit
def produce_tile(number, beyond, tiles_published, key_tiles, producer):
    """Publishes a tile to the consumers, if it has rows, and loads it. Returns how many tiles were published, how many
    key tiles were loaded, and the next tile, as `following_tile`."""
    config = producer.config
    rings = producer.rings
    tensors = producer.tensors
    problem = producer.problem
    blocks = producer.blocks
    ROWS: gl.constexpr = config.CONSUMERS * M
    N: gl.constexpr = rings.k.ROWS
    SLOTS: gl.constexpr = config.PACKED and not config.BY_SEQUENCE
    UNEVEN: gl.constexpr = SLOTS or config.HAS_LEFT or config.HAS_RIGHT or config.TILE_Q > 0
    heads = problem.heads
    following = number
    part = 0
    tile, line = tile_in_order(
        number, problem.tiles, problem.lines, PAIRS_TOGETHER, closing_lines(problem.tiles), UNEVEN
    )
    if config.VALUE_PARTS > 1:
        part = line % config.VALUE_PARTS
        line = line // config.VALUE_PARTS
    line, split = head_and_split(line, problem.splits)
    if config.BATCH_FIRST:
        line = line % problem.batch * heads + line // problem.batch
    if config.TILE_Q > 0 and not config.PACKED:
        tile = longest_line_first(blocks.lists, tile, line // heads, line % heads, ROWS, config.TILE_Q)
    of_line = tile
    if config.BY_SEQUENCE:
        of_line += beyond
    at = locate_tile(
        of_line, line, problem.side.cu_seqlens_q, problem.side.cu_seqlens_k, problem.batch, heads, problem.rows_q,
        other_rows=problem.rows_k, ROWS=ROWS, PACKED=SLOTS,
    )  # fmt: skip
    if config.BY_SEQUENCE:  # a line as of a dense call; the last ones are the rows past `cu_seqlens[batch]`
        begin, length = sequence_rows(problem.side.cu_seqlens_q, at.sequence, problem.batch, problem.rows_q)
        others = other_rows_of(at.sequence, problem.side.cu_seqlens_k, problem.batch, problem.rows_k)
        at = LocatedTile(at.sequence, at.head, at.first, begin, length, *others)
    place = KeyPlace(at.other_begin, at.other_begin)
    if config.CACHED:
        at, place = locate_in_cache(at, problem.cache, problem.cache_numbers, problem.batch, config.PACKED)
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
                place = KeyPlace(at.sequence * problem.k_rows_apart, at.sequence * problem.v_rows_apart)
        if config.MASK_ENDS_KEYS:
            mask = head_table(problem.side.mask, problem.numbers.mask, at.sequence, at.head)
            keys = last_shown(mask, problem.numbers.mask, config.MASK_COLUMN, keys)
        if config.TILE_Q > 0 and config.PACKED:
            entry, listed = listed_line(
                blocks.lists, at.sequence, at.head, at.first // config.TILE_Q, keys,
                exists=at.sequence < problem.batch, OTHER=N, TILE=config.TILE_K,
            )  # fmt: skip
        head = published_head(at.head, part, split, problem, config)
        publish_query_tile(producer.queue, tiles_published, at, head, listed, keys, config)
        queries = HeadRows(at.sequence, at.head, at.begin, at.length)
        for which in gl.static_range(config.CONSUMERS):
            slot = rings.q.slot(tiles_published, which)
            rings.q.fill(slot, tensors.q, queries, at.first + which * M, config.PACKED)
        tiles_published += 1
        visited = visited_keys(at.first, at.length, at.other_length, keys, problem, config, N)
        visited = split_range(visited, split, problem.splits)
        key_begin = visited.begin
        key_end = visited.end
        if config.TILE_Q > 0:
            key_begin = 0
            key_end = gl.maximum(listed, 1)
        column = value_column(part, rings, config)
        seen = seen_rows(at.length, keys, key_begin, tiles_published - 1, problem, config, N)
        row_before = 0
        pages = (0,)
        if config.SHARES > 1:
            pages = share_pages(tensors.k, (key_end - 1) * N, seen, keys, place, config, N, SHARE=0)
        for done in range(0, key_end - key_begin):
            n = key_end - 1 - done
            if config.TILE_Q > 0:
                n, kind = listed_tile(blocks.lists, entry, n, listed > 0, N, config.TILE_K)
            row = n * N
            slot = key_slot(rings, key_tiles)
            here = pages
            if config.SHARES == 1:  # one warp has no registers for the pages of two tiles
                here = share_pages(tensors.k, row, seen, keys, place, config, N, SHARE=0)
            rings.k.wait_empty(slot)
            if config.TILE_Q > 0:
                write_tile_info(blocks.tile_info, slot.place, TILE_NUMBER, n)
                write_tile_info(blocks.tile_info, slot.place, TILE_KIND, kind)
            head = at.head // problem.group
            k_head = HeadRows(at.sequence, head, place.k_begin, keys)
            v_head = HeadRows(at.sequence, head, place.v_begin, keys)
            load_keys(slot, KeyTile(k_head, row, here, place.k_apart), at, seen, rings, tensors, config, SHARE=0)
            if config.SHARES > 1:
                pages = share_pages(tensors.k, row - N, seen, keys, place, config, N, SHARE=0)
            if config.ONE_STAGE:
                # Keys become free before the values of the tile before, so they are loaded before these.
                if done > 0:
                    before = key_slot(rings, key_tiles - 1)
                    here = share_pages(tensors.v, row_before, seen, keys, place, config, N, SHARE=0)
                    v_tile = KeyTile(v_head, row_before, here, place.v_apart)
                    load_values(before, v_tile, column, seen, rings, tensors, config, SHARE=0)
                row_before = row
            else:
                v_tile = KeyTile(v_head, row, here, place.v_apart)
                load_values(slot, v_tile, column, seen, rings, tensors, config, SHARE=0)
            key_tiles += 1
        # Asking early would divide the tiles by who began one first, not by who is done first (1 × 1,000 tokens, 32
        # heads of 128: 24.1 µs instead of 21.4). While the answer comes, consumers have the last key tiles before them.
        following, beyond = following_tile(number, beyond, tile, at, producer, ROWS)
        if config.ONE_STAGE:
            last = key_slot(rings, key_tiles - 1)
            v_head = HeadRows(at.sequence, at.head // problem.group, place.v_begin, keys)
            pages = share_pages(tensors.v, row_before, seen, keys, place, config, N, SHARE=0)
            v_tile = KeyTile(v_head, row_before, pages, place.v_apart)
            load_values(last, v_tile, column, seen, rings, tensors, config, SHARE=0)
    else:
        following, beyond = following_tile(number, beyond, tile, at, producer, ROWS)
    return tiles_published, key_tiles, following, beyond


@gluon.jit
def following_tile(number, beyond, tile, at, producer, ROWS: gl.constexpr):
    """The number of the next tile, and how many tiles beyond that number's it lies. So the last number of a sequence
    that is longer than the caller said has all tiles that are left."""
    problem = producer.problem
    left = False
    if producer.config.BY_SEQUENCE:
        left = (tile == problem.tiles - 1) & (at.first + ROWS < at.length)
    if left:
        beyond += 1
    else:
        beyond *= 0
        number = next_number(number, producer.counter_ptr, problem.dynamic)
    return number, beyond


@gluon.jit
def published_head(head, part, split, problem, config):
    """The head of a tile as it is published, with the split of its keys, and the part of the values' columns."""
    if problem.splits is not None:
        head = head * problem.splits + split
    if config.VALUE_PARTS > 1:
        head = head * config.VALUE_PARTS + part
    return head


@gluon.jit
def head_and_split(number, splits):
    """The head and the split of its keys that a tile has; 0 where keys are not split."""
    split = 0
    if splits is not None:
        split = number % splits
        number = number // splits
    return number, split


@gluon.jit
def split_range(tiles, split, splits):
    """A split's share of a `KeyTileRange`: splits of a tile of queries differ by one key tile at most. One that has
    none visits the first tile, of which no row sees the whole (`split_keys`)."""
    if splits is not None:
        count = tiles.end - tiles.begin
        share = count // splits
        rest = count % splits
        begin = tiles.begin + split * share + gl.minimum(split, rest)
        begin = gl.where(split < count, begin, tiles.begin)
        end = begin + gl.maximum(share + gl.where(split < rest, 1, 0), 1)
        full_end = gl.where(split < count, tiles.full_end, tiles.begin)
        tiles = KeyTileRange(begin, tiles.full_begin, full_end, end)
    return tiles


@gluon.jit
def split_keys(tiles, split, keys, splits):
    """How many keys of a sequence count in a split of a `KeyTileRange`: 0 in one that has no tile."""
    if splits is not None:
        keys = gl.where(split < tiles.end - tiles.begin, keys, 0)
    return keys


@gluon.jit
def split_rows(rows, split, problem):
    """The `HeadRows` of a split in the results of all splits, which are those of so many batches, or of so many packed
    calls, one after another."""
    if problem.splits is not None:
        begin = rows.begin + split * problem.rows_q
        rows = HeadRows(rows.sequence + split * problem.batch, rows.head, begin, rows.length)
    return rows


@gluon.jit
def publish_query_tile(queue, count, at, head, listed, keys, config):
    """The producer's side of the queue. `at`: a `LocatedTile`, `head`: of `published_head`, `listed`: how many key
    tiles a block mask lists."""
    tile = QueryTile(
        first=at.first, sequence=at.sequence, head=head, begin_q=at.begin, seq_q=at.length, seq_k=at.other_length,
        listed=listed, keys=keys,
    )  # fmt: skip
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
def share_pages(descriptors, row, seen, keys, place, config, N: gl.constexpr, SHARE: gl.constexpr):
    """The pages of this warp's share of a `KeyTile` from row `row` on; `seen`: a `ClearedRows`."""
    pages = (0,)
    if config.COPIED:
        pages = row_pages(row, seen.first, keys, place.table, config, N, SHARE=SHARE)
    elif config.PAGE_SIZE > 0:
        pages = box_pages(descriptors.main, row, keys, place.table, config, N, SHARE)
    return pages


@gluon.jit
def load_keys(slot, tile, at, seen, rings, tensors, config, SHARE: gl.constexpr):
    """Loads a `KeyTile` into a slot whose first chunk is free, and its bias for the queries `at` a `LocatedTile`.
    `seen`: a `ClearedRows`. `SHARE`: of the boxes, or rows, that pages are loaded in."""
    BOUNDED: gl.constexpr = ends_at_lengths(config)
    if config.COPIED:
        copy_rows(rings.k, slot, tensors.k_rows, tile, 0, seen.first, config, SHARE=SHARE)
    elif config.PAGE_SIZE > 0:
        load_boxes(rings.k, slot, tensors.k, tile, 0, config, SHARE, barrier=slot.place)
    else:
        BIAS_BYTES: gl.constexpr = bias_bytes(rings.bias, config.CONSUMERS)
        rings.k.load(slot, tensors.k, tile.head, tile.row, BOUNDED, BESIDE=BIAS_BYTES)
        if rings.bias is not None:
            move_bias(
                tensors.bias, rings.bias, slot.place, at.sequence, at.head, at.first, tile.row,
                barrier=rings.k.full.index(slot.place), PARTS=config.CONSUMERS, ALONG_KEYS=False,
            )  # fmt: skip
    if rings.k_tail is not None:
        tail = Chunks(tensors.k.tail, None)
        rings.k_tail.wait_empty(slot)
        if config.COPIED:
            copy_rows(rings.k_tail, slot, tensors.k_rows, tile, rings.k.WIDTH, seen.first, config, SHARE=SHARE)
        elif config.PAGE_SIZE > 0:
            load_boxes(rings.k_tail, slot, tail, tile, rings.k.WIDTH, config, SHARE, barrier=slot.place)
        else:
            rings.k_tail.load(slot, tail, tile.head, tile.row, BOUNDED, rings.k.WIDTH)


@gluon.jit
def load_values(slot, tile, column, seen, rings, tensors, config, SHARE: gl.constexpr):
    """Loads a `KeyTile` of values, from a column on, as soon as its slot is free. `seen`: a `ClearedRows`."""
    rings.v.wait_empty(slot)
    if config.COPIED:
        copy_rows(rings.v, slot, tensors.v_rows, tile, column, seen.first, config, SHARE=SHARE)
    elif config.CACHED and config.HAS_LEFT:
        last = tile.row == seen.last_tile
        barrier = gl.where(last, rings.v.STAGES + SHARE, slot.place)
        load_boxes(rings.v, slot, tensors.v, tile, column, config, SHARE, barrier=barrier)
        if last:
            clear_rows(rings.v, slot, seen.first - tile.row, seen.phase, config, SHARE)
    elif config.PAGE_SIZE > 0:
        load_boxes(rings.v, slot, tensors.v, tile, column, config, SHARE, barrier=slot.place)
    else:
        rings.v.load(slot, tensors.v, tile.head, tile.row, ends_at_lengths(config), column)


@gluon.jit
def visited_keys(first, seq_q, seq_k, keys, problem, config, N: gl.constexpr):
    """The `key_tile_ranges` of a tile of queries of all consumers, from row `first` of a sequence on, of whose `seq_k`
    keys `keys` count."""
    shift = 0 if config.TOP_LEFT else seq_k - seq_q
    return key_tile_ranges(
        first, seq_q, shift, keys, problem.window.left, problem.window.right, config.CONSUMERS * M, N=N,
        HAS_LEFT=config.HAS_LEFT, HAS_RIGHT=config.HAS_RIGHT,
    )  # fmt: skip


@gluon.jit
def seen_rows(seq_q, keys, begin, tiles, problem, config, N: gl.constexpr):
    """The `ClearedRows` of a tile of queries, whose key tiles begin with number `begin`; `tiles`: how many came
    before."""
    return ClearedRows(first_seen_row(seq_q, keys, problem, config), begin * N, tiles & 1)


@gluon.jit
def first_seen_row(seq_q, keys, problem, config):
    """The first row in a cache that a query of the sequence sees; 0 for keys that are no rows of one."""
    first = 0
    if config.CACHED and config.HAS_LEFT:
        first = gl.maximum(keys - seq_q - problem.window.left, 0)
    return first


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
