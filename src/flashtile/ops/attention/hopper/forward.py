"""Forward kernel for Hopper: a producer warp that loads, and consumer warpgroups that multiply and exponentiate.

A thread block stays on its multiprocessor and takes one tile of query rows after another. Its roles:

- `produce`, one warp: takes the next tile, publishes it to the consumers (`TileQueue`), and loads queries, keys and
  values by TMA into rings, as soon as they have room.
- `consume`, two or three warpgroups: each computes 64 query rows of every tile. `consume_tile` finds the key tiles that
  these rows see, `attend` is the loop over them, and `store_statistics` and `store_epilogue` write lse and out.

They wait for one another only through the rings and the queue. Per key tile, with `c = scale · log2(e)` (letters as in
`pieces`), a consumer computes an online softmax::

    s = q kᵀ               [M, N]
    p = exp2(c·s - r)      [M, N]
    l = l + rowsum(p)      [M], kept as [M, 8]: each thread's own part
    o = o + p v            [M, E]

and in the end `out = o / l` and `lse = r·ln 2 + ln l`.

The reference `r` `[M]` rarely moves; `forward_softmax` says why, and when it does. `p v` of the tile before is in
flight while `config.AHEAD` keys of a tile are exponentiated. Key tiles come from the last to the first, so that the
masked ones of the diagonal come first.

8-bit queries and keys are multiplied as they are, and their factors join the scale. Values come in 16 bits.

References: Shah et al., "FlashAttention-3" (2024), algorithm 2, for the products in flight and the consumers that take
turns; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.blocks import (
    FULL,
    TILE_KIND,
    TILE_NUMBER,
    BlockLists,
    line_entries,
    listed_tile,
    load_bits,
    longest_line_first,
    make_tile_info,
    read_tile_info,
    where_visible,
    write_tile_info,
)
from flashtile.ops.attention.hopper.eight_bits import LEAST_UNIT, Descale, load_descale
from flashtile.ops.attention.hopper.forward_softmax import (
    Softmax,
    first_reference,
    query_operand,
    start_scores,
    start_values,
    wait_values,
    weights_by_maxima,
    weights_by_sums,
)
from flashtile.ops.attention.hopper.pieces import (
    LN_2,
    PAIRS_TOGETHER,
    WARPGROUP,
    Chunks,
    HeadRows,
    KeyTileRange,
    LocatedTile,
    M,
    barriers,
    closing_lines,
    consumer_key_tiles,
    coordinates,
    declare_flag,
    finish_numbers,
    key_tile_ranges,
    locate_tile,
    make_ring,
    make_tile_queue,
    mask_scores,
    matrix,
    next_number,
    pack,
    product_layout,
    publish_tile,
    receive_tile,
    release,
    row_maximum,
    row_sums,
    scale_rows,
    tile_in_order,
)
from flashtile.ops.attention.hopper.scores import LOG2_E, capped, load_slope, lowered_by_distance


@aggregate
class KernelConfig:
    """What the kernel is specialised for; meanings as in `configs.HopperConfig` and `launch.Variant`."""

    EIGHT_BITS: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    AHEAD: gl.constexpr
    IN_TURN: gl.constexpr
    OUT_PLACES: gl.constexpr
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


class Tensors(NamedTuple):
    """TMA descriptors of each tensor, as `Chunks`."""

    q: Any
    k: Any
    v: Any
    out: Any


class Rings(NamedTuple):
    """Tiles of queries (64 rows for each consumer), keys and values, which the producer fills and consumers empty."""

    q: Any
    k: Any
    v: Any


class Schedule(NamedTuple):
    """How tiles are shared out: `tiles` on each of `lines`, which thread blocks take as they come if `dynamic`."""

    counter_ptr: Any
    tiles: Any
    lines: Any
    dynamic: Any


class Problem(NamedTuple):
    """Sizes of the call; the kernel's docstring says what they count."""

    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    batch: Any
    heads: Any
    group: Any
    rows_q: Any
    rows_k: Any
    window_left: Any
    window_right: Any


class Output(NamedTuple):
    """Where results go: `tiles` in shared memory on their way out, as `Chunks`, which consumers that share one use in
    turn (`free`); `descriptors` of out; lse; and the sinks, which join the statistics."""

    tiles: Any
    free: Any
    descriptors: Any
    lse_ptr: Any
    sinks_ptr: Any


class Modifiers(NamedTuple):
    """What changes scores, for all heads: units, soft cap, ALiBi, and the factors of 8-bit inputs."""

    scale_log2: Any
    cap_scale: Any
    alibi_slopes_ptr: Any
    stride_alibi_batch: Any
    descale_q: Any
    descale_k: Any
    descale_v: Any


class HeadModifiers(NamedTuple):
    """What changes the scores of one head. `slope` of ALiBi; None where a call has none, as is `cap_scale`."""

    scale_log2: Any
    cap_scale: Any
    slope: Any


class Mask(NamedTuple):
    """The block mask: its lists, and what the producer publishes of each loaded key tile. All None without one."""

    lists: Any
    tile_info: Any


class QueryTile(NamedTuple):
    """A tile of query rows, as the producer publishes it: its first row in the sequence (negative: there are no more
    tiles), sequence and head."""

    first: Any
    sequence: Any
    head: Any


class PackedQueryTile(NamedTuple):
    """The same in a packed call, with the row at which the sequence begins, and its lengths."""

    first: Any
    sequence: Any
    head: Any
    begin_q: Any
    seq_q: Any
    seq_k: Any


class ListedQueryTile(NamedTuple):
    """The same with a block mask, and how many key tiles it lists."""

    first: Any
    sequence: Any
    head: Any
    listed: Any


class View(NamedTuple):
    """Which keys a consumer's rows see. `row` `[M]`: its rows, from `first` on; `shift`: the key of row 0's diagonal;
    `alibi_shift`: the key at no distance from row 0; `tiles`: the key tiles to visit."""

    row: Any
    first: Any
    shift: Any
    alibi_shift: Any
    seq_k: Any
    window_left: Any
    window_right: Any
    tiles: Any


class Attended(NamedTuple):
    """All but the last product of a tile: weights `p` of the last key tile, which are still to be multiplied by the
    values in `slot`, and how many key tiles have come out of the rings before that one."""

    p: Any
    out: Any
    softmax: Any
    key_tiles: Any
    slot: Any


@gluon.jit
def attention_forward_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, out_desc, out_tail_desc,
    lse_ptr, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr, block_lists_ptr,
    descale_q_ptr, descale_k_ptr, descale_v_ptr,
    batch, heads, group, rows_q, rows_k, tiles, lines, dynamic, window_left, window_right,
    scale_log2, cap_scale, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, block_bits, stride_block_batch, stride_block_head, block_order,
    stride_descale_q_batch, stride_descale_q_head, stride_descale_k_batch, stride_descale_k_head,
    stride_descale_v_batch, stride_descale_v_head, descale_group,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr,
    IN_TURN: gl.constexpr, OUT_PLACES: gl.constexpr, QUERY_PLACES: gl.constexpr,
    PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr,
):  # fmt: skip
    """`..._tail_desc`: of the second chunk of head_dim. `rows_q`, `rows_k`: seq_q and seq_k, or the totals of a packed
    call. `group`: query heads per key/value head. `tiles` (packed: slots) on each of `lines`. `dynamic`: thread blocks
    take tiles as they come, through the two zeros at `counter_ptr`. `scale_log2`: scale · log2(e) > 0, or with a soft
    cap softcap · log2(e), and then `cap_scale`: scale / softcap. `block_...`, `TILE_...`: of the block mask
    (`blocks`). Descale factors of 8-bit inputs belong to a sequence and key/value head, and `descale_group` is `group`
    once more. A parameter that a call does not need is None.
    """
    config = KernelConfig(
        EIGHT_BITS=k_desc.dtype.primitive_bitwidth == 8,
        CONSUMERS=CONSUMERS,
        Q_IN_REGISTERS=Q_IN_REGISTERS,
        AHEAD=AHEAD,
        IN_TURN=IN_TURN,
        OUT_PLACES=OUT_PLACES,
        PACKED=PACKED,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        TILE_Q=TILE_Q,
        TILE_K=TILE_K,
    )
    tensors = Tensors(
        q=Chunks(q_desc, q_tail_desc),
        k=Chunks(k_desc, k_tail_desc),
        v=Chunks(v_desc, v_tail_desc),
        out=Chunks(out_desc, out_tail_desc),
    )
    schedule = Schedule(counter_ptr, tiles, lines, dynamic)
    problem = Problem(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, group, rows_q, rows_k, window_left, window_right
    )
    modifiers = Modifiers(
        scale_log2=scale_log2,
        cap_scale=cap_scale,
        alibi_slopes_ptr=alibi_slopes_ptr,
        stride_alibi_batch=stride_alibi_batch,
        descale_q=Descale(descale_q_ptr, stride_descale_q_batch, stride_descale_q_head, descale_group),
        descale_k=Descale(descale_k_ptr, stride_descale_k_batch, stride_descale_k_head, descale_group),
        descale_v=Descale(descale_v_ptr, stride_descale_v_batch, stride_descale_v_head, descale_group),
    )
    rings = Rings(
        q=make_ring(tensors.q, STAGES=QUERY_PLACES, READERS=1, PARTS=CONSUMERS),
        k=make_ring(tensors.k, STAGES=STAGES, READERS=CONSUMERS),
        v=make_ring(tensors.v, STAGES=STAGES, READERS=CONSUMERS),
    )
    output = Output(
        tiles=make_out_tiles(tensors.out, config),
        free=barriers(CONSUMERS, WARPGROUP),
        descriptors=tensors.out,
        lse_ptr=lse_ptr,
        sinks_ptr=sinks_ptr,
    )
    queue = make_tile_queue(CONSUMERS)
    tile_info = None
    if TILE_K > 0:
        tile_info = make_tile_info(STAGES)
    mask = Mask(
        lists=BlockLists(
            lists_ptr=block_lists_ptr,
            offsets=block_offsets,
            tiles=block_tiles,
            kinds=block_kinds,
            bits=block_bits,
            stride_batch=stride_block_batch,
            stride_head=stride_block_head,
            order=block_order,
        ),
        tile_info=tile_info,
    )
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, modifiers, mask)),
                (consume, (1, config, queue, rings, output, problem, modifiers, mask)),
                (produce, (config, queue, schedule, rings, tensors, problem, mask)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, modifiers, mask)),
                (consume, (1, config, queue, rings, output, problem, modifiers, mask)),
                (consume, (2, config, queue, rings, output, problem, modifiers, mask)),
                (produce, (config, queue, schedule, rings, tensors, problem, mask)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


# The producer


@gluon.jit
def produce(config, queue, schedule, rings, tensors, problem, mask):
    """Producer warp: takes the tiles of this thread block, and loads what they need as soon as the rings have room."""
    tiles_published = 0
    key_tiles = 0
    number = gl.program_id(0)
    while number < schedule.tiles * schedule.lines:
        tiles_published, key_tiles, number = produce_tile(
            number, tiles_published, key_tiles, config, queue, schedule, rings, tensors, problem, mask
        )
    end = LocatedTile(sequence=0, head=0, first=-1, begin=0, length=0, other_begin=0, other_length=0)
    publish_query_tile(queue, tiles_published, end, 0, config)
    finish_numbers(schedule.counter_ptr, schedule.dynamic)


@gluon.jit
def produce_tile(
    number, tiles_published, key_tiles, config, queue, schedule, rings, tensors, problem, mask
):  # fmt: skip
    """Publishes a tile to the consumers, if it has rows, and loads it. Returns how many tiles were published, how many
    key tiles were loaded, and the number of the next tile."""
    ROWS: gl.constexpr = config.CONSUMERS * M
    N: gl.constexpr = rings.k.ROWS
    UNEVEN: gl.constexpr = config.PACKED or config.HAS_LEFT or config.HAS_RIGHT or config.TILE_Q > 0
    heads = problem.heads
    following = number
    tile, line = tile_in_order(
        number, schedule.tiles, schedule.lines, PAIRS_TOGETHER, closing_lines(schedule.tiles), UNEVEN
    )
    if config.TILE_Q > 0:
        tile = longest_line_first(mask.lists, tile, line // heads, line % heads, ROWS, config.TILE_Q)
    at = locate_tile(
        tile, line, problem.cu_seqlens_q_ptr, problem.cu_seqlens_k_ptr, problem.batch, heads,
        problem.rows_q, problem.rows_k, ROWS, config.PACKED,
    )  # fmt: skip
    if at.first < at.length:
        listed = 0
        if config.TILE_Q > 0:
            entry, last_entry = line_entries(mask.lists, at.sequence, at.head, at.first // config.TILE_Q)
            listed = (last_entry - entry) * (config.TILE_K // N)
        publish_query_tile(queue, tiles_published, at, listed, config)
        queries = HeadRows(at.sequence, at.head, at.begin, at.length)
        for which in gl.static_range(config.CONSUMERS):
            slot = rings.q.slot(tiles_published, which)
            rings.q.fill(slot, tensors.q, queries, at.first + which * M, config.PACKED)
        tiles_published += 1
        shift = 0 if config.TOP_LEFT else at.other_length - at.length
        visited = key_tile_ranges(
            at.first, at.length, shift, at.other_length, problem.window_left, problem.window_right, ROWS, N,
            config.HAS_LEFT, config.HAS_RIGHT,
        )  # fmt: skip
        key_begin = visited.begin
        key_end = visited.end
        if config.TILE_Q > 0:
            key_begin = 0
            key_end = gl.maximum(listed, 1)
        for done in range(0, key_end - key_begin):
            n = key_end - 1 - done
            if config.TILE_Q > 0:
                n, kind = listed_tile(mask.lists, entry, n, listed > 0, N, config.TILE_K)
            row = n * N
            slot = rings.k.slot(key_tiles)
            rings.k.wait_empty(slot)
            if config.TILE_Q > 0:
                write_tile_info(mask.tile_info, slot.place, TILE_NUMBER, n)
                write_tile_info(mask.tile_info, slot.place, TILE_KIND, kind)
            keys = HeadRows(at.sequence, at.head // problem.group, at.other_begin, at.other_length)
            rings.k.load(slot, tensors.k, keys, row, config.PACKED)
            rings.v.fill(slot, tensors.v, keys, row, config.PACKED)
            key_tiles += 1
            if done == 0:  # the answer takes time: ask early, but not before there is work for the consumers
                following = next_number(number, schedule.counter_ptr, schedule.dynamic)
    else:
        following = next_number(number, schedule.counter_ptr, schedule.dynamic)
    return tiles_published, key_tiles, following


@gluon.jit
def publish_query_tile(queue, count, at, listed, config):
    """The producer's side of the queue. `at`: a `LocatedTile`, `listed`: how many key tiles a block mask lists."""
    if config.PACKED:
        tile = PackedQueryTile(at.first, at.sequence, at.head, at.begin, at.length, at.other_length)
    elif config.TILE_Q > 0:
        tile = ListedQueryTile(at.first, at.sequence, at.head, listed)
    else:
        tile = QueryTile(at.first, at.sequence, at.head)
    publish_tile(queue, count, tile)


@gluon.jit
def receive_query_tile(queue, count, config):
    """The consumers' side of the queue."""
    if config.PACKED:
        first, sequence, head, begin_q, seq_q, seq_k = receive_tile(queue, count, 6)
        tile = PackedQueryTile(first, sequence, head, begin_q, seq_q, seq_k)
    elif config.TILE_Q > 0:
        first, sequence, head, listed = receive_tile(queue, count, 4)
        tile = ListedQueryTile(first, sequence, head, listed)
    else:
        first, sequence, head = receive_tile(queue, count, 3)
        tile = QueryTile(first, sequence, head)
    return tile


# The consumers


@gluon.jit
def consume(WHICH: gl.constexpr, config, queue, rings, output, problem, modifiers, mask):
    """Consumer warpgroup: computes the `WHICH`-th 64 rows of each tile."""
    declare_flag(WHICH)
    tiles_received = 0
    key_tiles = 0
    if config.IN_TURN and WHICH == config.CONSUMERS - 1:
        end_turn(WHICH, config.CONSUMERS)
    tile = receive_query_tile(queue, tiles_received, config)
    while tile.first >= 0:
        tiles_received += 1
        tile, key_tiles = consume_tile(
            tile, tiles_received, key_tiles, config, queue, rings, output, problem, modifiers, mask, WHICH
        )
    tma_store_wait(0)


@gluon.jit
def consume_tile(
    tile, tiles_received, key_tiles, config, queue, rings, output, problem, modifiers, mask, WHICH: gl.constexpr
):  # fmt: skip
    """Computes 64 rows of a tile, the `tiles_received`-th counted from 1, and stores them. Returns the next tile, and
    how many key tiles have come out of the rings."""
    k = rings.k
    v = rings.v
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    ROWS: gl.constexpr = config.CONSUMERS * M
    # Where a tile has more rows than a key tile has keys, a band often hides whole key tiles from a consumer.
    SKIPS: gl.constexpr = (config.HAS_LEFT or config.HAS_RIGHT) and config.TILE_Q == 0 and ROWS > k.ROWS
    rows = HeadRows(tile.sequence, tile.head, 0, problem.rows_q)
    seq_k = problem.rows_k
    if config.PACKED:
        rows = HeadRows(tile.sequence, tile.head, tile.begin_q, tile.seq_q)
        seq_k = tile.seq_k
    shift = 0 if config.TOP_LEFT else seq_k - rows.length
    first = tile.first + WHICH * M
    row = first + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    visited, before, after = consumer_key_tiles(
        tile.first, first, rows.length, shift, seq_k, problem.window_left, problem.window_right, ROWS, k.ROWS,
        config.HAS_LEFT, config.HAS_RIGHT, SKIPS,
    )  # fmt: skip
    if SKIPS:
        key_tiles = skip_key_tiles(before, key_tiles, rings, config, WHICH)
    if config.TILE_Q > 0:
        visited = KeyTileRange(0, visited.full_begin, visited.full_end, gl.maximum(tile.listed, 1))
    exists = tile.sequence < problem.batch  # rows past the end of a packed call belong to no sequence
    unit = modifiers.scale_log2
    cap_unit = modifiers.cap_scale
    if config.EIGHT_BITS:
        factor = load_descale(modifiers.descale_q, tile.sequence, tile.head, exists)
        factor *= load_descale(modifiers.descale_k, tile.sequence, tile.head, exists)
        if modifiers.cap_scale is not None:
            cap_unit = modifiers.cap_scale * factor
        else:
            unit = modifiers.scale_log2 * factor
            unit = gl.where(gl.abs(unit) < LEAST_UNIT, LEAST_UNIT, unit)
    slope = modifiers.alibi_slopes_ptr  # None stays None
    if modifiers.alibi_slopes_ptr is not None:
        slope = load_slope(
            modifiers.alibi_slopes_ptr, modifiers.stride_alibi_batch, tile.sequence, tile.head, unit, exists
        )  # fmt: skip
    q_slot = rings.q.slot(tiles_received - 1, WHICH)
    rings.q.acquire(q_slot)
    query = query_operand(rings.q, q_slot, s_layout, config)
    view = View(
        row=row,
        first=first,
        shift=shift,
        alibi_shift=seq_k - rows.length,
        seq_k=seq_k,
        window_left=problem.window_left,
        window_right=problem.window_right,
        tiles=visited,
    )
    attended = attend(
        query, key_tiles, HeadModifiers(unit, cap_unit, slope), view, mask, rings, config, WHICH
    )  # fmt: skip
    v.acquire(attended.slot)
    out = start_values(attended.p, attended.out, v, attended.slot)
    if not config.Q_IN_REGISTERS:
        rings.q.release(q_slot)
    # While the last product is in flight: what comes next, and the statistics.
    following = receive_query_tile(queue, tiles_received, config)
    inverse = store_statistics(attended.softmax, rows, row, problem, modifiers, output, config)
    out = wait_values(out, v)
    v.release(attended.slot)
    key_tiles = attended.key_tiles + 1
    if SKIPS and config.HAS_LEFT:
        key_tiles = skip_key_tiles(after, key_tiles, rings, config, WHICH)
    store_epilogue(out, inverse, rows, first, tiles_received, v, output, config, WHICH)
    return following, key_tiles


@gluon.jit
def skip_key_tiles(count, key_tiles, rings, config, WHICH: gl.constexpr):
    """Releases the next key tiles without a look, and lets the other consumers have its turns. Returns the number of
    tiles taken from the rings so far."""
    for _ in range(count):
        slot = rings.k.slot(key_tiles)
        rings.k.acquire(slot)
        rings.k.release(slot)
        rings.v.acquire(slot)
        rings.v.release(slot)
        key_tiles += 1
        if config.IN_TURN:
            begin_turn(WHICH)
            end_turn(WHICH, config.CONSUMERS)
    return key_tiles


@gluon.jit
def begin_turn(WHICH: gl.constexpr):
    """Waits until the consumer before this one has started its products. Every consumer has as many turns."""
    gl.inline_asm_elementwise(_named_barrier("sync", WHICH), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_turn(WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """The consumer after this one may start."""
    NEXT: gl.constexpr = (WHICH + 1) % CONSUMERS
    gl.inline_asm_elementwise(_named_barrier("arrive", NEXT), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _named_barrier(action, consumer):
    """PTX of the barrier of a consumer and the one before it. Triton counts its own barriers from 0."""
    return f"barrier.cta.{action}.aligned {8 + consumer}, 256; mov.b32 $0, 0;"


# The loop over key tiles


@gluon.jit
def attend(query, key_tiles, modifiers, view, mask, rings, config, WHICH: gl.constexpr):
    """The online softmax over the key tiles that `view` names, from the last one to the first."""
    k = rings.k
    v = rings.v
    dtype: gl.constexpr = v.tiles.dtype
    o_layout: gl.constexpr = product_layout(v.WIDTH)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([M, k.ROWS], gl.float32, product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth))
    o = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    o_tail = gl.to_tensor(0)
    if v.TAIL > 0:
        o_tail = gl.zeros([M, v.TAIL], gl.float32, product_layout(v.TAIL))
    out = Chunks(o, o_tail)

    slot = k.slot(key_tiles)
    k.acquire(slot)
    n, kind, bits = key_tile_at(view.tiles.end - 1, slot, view, mask, k, config)
    s = warpgroup_mma_wait(0, [start_scores(query, k, slot, zeros)])
    k.release(slot)
    s = modify_scores(s, n, kind, bits, modifiers, view, True, config)
    reference = first_reference(row_maximum(s) * modifiers.scale_log2, dtype)
    probs = gl.exp2(s * modifiers.scale_log2 - reference[:, None])
    softmax = Softmax(reference, row_sums(probs))
    p = gl.convert_layout(pack(probs, dtype), p_layout)

    for done in range(view.tiles.begin + 1, view.tiles.end):
        v_slot = slot
        key_tiles += 1
        s, out, slot = scores_during_values(
            query, p, out, v_slot, key_tiles, done, zeros, modifiers, view, mask, rings, config, WHICH
        )
        if dtype == gl.float16:
            p, softmax, out = weights_by_maxima(
                s, modifiers.scale_log2, softmax, out, v, v_slot, p_layout, config, WHICH
            )
        else:
            p, softmax, out = weights_by_sums(s, modifiers.scale_log2, softmax, out, v, v_slot, p_layout, config, WHICH)
    return Attended(p, out, softmax, key_tiles, slot)


@gluon.jit
def scores_during_values(
    query, p, out, v_slot, key_tiles, done, zeros, modifiers, view, mask, rings, config, WHICH: gl.constexpr
):  # fmt: skip
    """Starts the scores of the next key tile and `p v` of the one before, and waits for the scores. Returns these,
    `out` with that product in flight, and the slot of the key tile."""
    k = rings.k
    v = rings.v
    PRODUCTS: gl.constexpr = 2 if v.TAIL > 0 else 1
    # Without a band only the last tile of keys can be cut, and that comes first. A branch that is never taken would
    # still keep the loop in pieces, which costs 7 % at head_dim 64.
    MAY_CUT: gl.constexpr = config.HAS_LEFT or config.HAS_RIGHT or config.TILE_Q > 0
    slot = k.slot(key_tiles)
    k.acquire(slot)
    if config.IN_TURN:
        begin_turn(WHICH)
    scores = start_scores(query, k, slot, zeros)
    v.acquire(v_slot)
    out = start_values(p, out, v, v_slot)
    if config.IN_TURN:
        end_turn(WHICH, config.CONSUMERS)
    n, kind, bits = key_tile_at(view.tiles.begin + view.tiles.end - 1 - done, slot, view, mask, k, config)
    s = warpgroup_mma_wait(PRODUCTS, [scores])
    k.release(slot)
    s = modify_scores(s, n, kind, bits, modifiers, view, MAY_CUT, config)
    return s, out, slot


@gluon.jit
def key_tile_at(n, slot, view, mask, k, config):
    """Number of a key tile. With a block mask, which one it is that was loaded there, its kind, and its bits."""
    kind = FULL
    bits = 0
    if config.TILE_Q > 0:
        n = read_tile_info(mask.tile_info, slot.place, TILE_NUMBER)
        kind = read_tile_info(mask.tile_info, slot.place, TILE_KIND)
        bits = load_bits(mask.lists, kind, view.first, n, k.ROWS, config.TILE_Q, config.TILE_K)
    return n, kind, bits


@gluon.jit
def modify_scores(s, n, kind, bits, modifiers, view, MAY_CUT: gl.constexpr, config):
    """Scores `[M, N]` of the `n`-th key tile with what changes them, and -inf where a row does not see the key."""
    first_key = n * s.shape[1]
    diagonal = view.row + view.alibi_shift
    if modifiers.cap_scale is not None:
        s = capped(s, modifiers.cap_scale)
    if modifiers.slope is not None:
        s = lowered_by_distance(s, diagonal, first_key, modifiers.slope)
    if config.TILE_Q > 0:
        if kind != FULL:
            s = where_visible(bits, s, float("-inf"))
    if MAY_CUT:
        if (n < view.tiles.full_begin) | (n >= view.tiles.full_end):
            s = mask_scores(
                s, view.row, n * s.shape[1], view.shift, view.seq_k, view.window_left, view.window_right,
                config.HAS_LEFT, config.HAS_RIGHT,
            )  # fmt: skip
    return s


# Results


@gluon.jit
def make_out_tiles(descriptors, config):
    """Room in shared memory for out on its way to device memory: for each consumer, or for one after the other."""
    desc = descriptors.main
    tail_desc = descriptors.tail
    main = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + desc.block_shape, desc.layout)
    tail = main
    if tail_desc is not None:
        tail = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + tail_desc.block_shape, tail_desc.layout)
    return Chunks(main, tail)


@gluon.jit
def store_statistics(softmax, rows, row, problem, modifiers, output, config):
    """Stores lse. Returns what `o` is to be multiplied by."""
    row_sum = gl.convert_layout(gl.sum(softmax.row_sum, 1), row.type.layout)
    reference = softmax.reference
    own = 1.0
    if output.sinks_ptr is not None:
        row_sum, reference, own = join_sink(row_sum, reference, output.sinks_ptr, rows, problem.batch)
    if config.EIGHT_BITS:
        own *= load_descale(modifiers.descale_v, rows.sequence, rows.head, rows.sequence < problem.batch)
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
    if config.PACKED:
        offset = rows.head.to(gl.int64) * problem.rows_q + rows.begin
    else:
        offset = (rows.sequence.to(gl.int64) * problem.heads + rows.head) * problem.rows_q
    gl.store(output.lse_ptr + offset + row, lse, mask=row < rows.length)
    return inverse


@gluon.jit
def join_sink(row_sum, reference, sinks_ptr, rows, batch):
    """Row sums and maxima with the sink among them, and the factor that leads from a row's old unit to the new one. The
    rows past the end of a packed call (sequence number `batch`) have no sink."""
    sink = gl.load(sinks_ptr + rows.head, mask=rows.sequence < batch, other=float("-inf")) * LOG2_E
    seen = gl.where(row_sum == 0.0, float("-inf"), reference)
    top = finite(gl.maximum(seen, sink))
    own = gl.exp2(seen - top)
    return row_sum * own + gl.exp2(sink - top), top, own


@gluon.jit
def finite(m):
    """The maximum of a row, 0 instead of -inf where it has seen nothing: a difference to -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def store_epilogue(out, inverse, rows, first, tiles_received, v, output, config, WHICH: gl.constexpr):
    """Divides 64 rows by their sums and starts the store, through the consumer's place in shared memory or through the
    one that all share, each in its turn. Rows past the end are not written."""
    if config.OUT_PLACES > 1:
        PLACE: gl.constexpr = WHICH
    else:
        PLACE: gl.constexpr = 0
        # The consumer before this one has stored this tile; the first waits for the last one and the tile before.
        mbarrier.wait(output.free.index(WHICH), ((tiles_received - 1) & 1) ^ (1 if WHICH == 0 else 0))
    main = output.tiles.main.index(PLACE)
    tail = output.tiles.tail.index(PLACE)
    out = scale_rows(out, inverse, v)
    tma_store_wait(0)  # until the tile before has been read from there
    matrix(main, M, v.WIDTH).store(out.main.to(main.dtype))
    if v.TAIL > 0:
        matrix(tail, M, v.TAIL).store(out.tail.to(main.dtype))
    fence_async_shared()
    tma_store(output.descriptors.main, coordinates(rows, first, 0, config.PACKED), main)
    if v.TAIL > 0:
        tma_store(output.descriptors.tail, coordinates(rows, first, v.WIDTH, config.PACKED), tail)
    if config.OUT_PLACES == 1:
        tma_store_wait(0)
        release(output.free.index((WHICH + 1) % config.CONSUMERS))
