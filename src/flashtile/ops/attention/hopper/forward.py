"""Forward kernel for Hopper: a producer warp that loads, and warpgroups that multiply and exponentiate ("consumers").

Each program stays on its multiprocessor and takes one tile of query rows after another. Its producer finds the tile,
publishes it to the consumers, and loads queries, keys and values by TMA into rings. Each consumer computes 64 query
rows; its loop over key tiles is in `forward_walk`. In the end `out = o / l`, `lse = c·m·ln 2 + ln l`. Soft cap and
ALiBi change scores (`scores`); a sink joins `l` at the end. 8-bit queries and keys are multiplied as they are, their
factors join the scale, and values come in 16 bits.

Reference: Shah et al., "FlashAttention-3" (2024), algorithm 2.
"""

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
)
from flashtile.ops.attention.hopper.blocks import (
    TILE_KIND,
    TILE_NUMBER,
    BlockLists,
    line_entries,
    listed_tile,
    longest_line_first,
    make_tile_info,
    write_tile_info,
)
from flashtile.ops.attention.hopper.eight_bits import LEAST_UNIT, load_descale
from flashtile.ops.attention.hopper.forward_pieces import (
    Form,
    end_turn,
    join_sink,
    skip_key_tiles,
    start_values,
    store_out,
    take_queries,
    wait_values,
)
from flashtile.ops.attention.hopper.forward_walk import visit_key_tiles
from flashtile.ops.attention.hopper.pieces import (
    LN_2,
    PAIRS_TOGETHER,
    WARPGROUP,
    Chunks,
    HeadRows,
    M,
    barriers,
    closing_lines,
    consumer_key_tiles,
    declare_flag,
    finish_numbers,
    key_tile_ranges,
    locate_tile,
    make_ring,
    make_tile_queue,
    next_number,
    place_of,
    product_layout,
    publish_tile,
    receive_tile,
    release,
    tile_in_order,
)
from flashtile.ops.attention.hopper.scores import load_slope


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
    """`..._tail_desc`: of the second chunk of columns, or None. `rows_q`, `rows_k`: seq_q and seq_k, or the totals of
    a packed call. `group`: query heads per key/value head. `tiles` (packed: slots) on each of `lines`. `dynamic`:
    programs take tiles as they come, through the two zeros at `counter_ptr`. `scale_log2`: scale · log2(e) > 0, or with
    a soft cap softcap · log2(e), and then `cap_scale`: scale / softcap. `block_...`, `TILE_...`: of the block mask
    (`blocks`). Descale factors of 8-bit inputs are of a sequence and key/value head; `descale_group` is `group` once
    more. What a call does not have is None.
    """
    EIGHT_BITS: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    form = Form(
        EIGHT_BITS, CONSUMERS, Q_IN_REGISTERS, AHEAD, IN_TURN, OUT_PLACES, QUERY_PLACES, PACKED,
        HAS_LEFT, HAS_RIGHT, TOP_LEFT, TILE_Q, TILE_K,
    )  # fmt: skip
    q = make_ring(Chunks(q_desc, q_tail_desc), QUERY_PLACES, 1, CONSUMERS)
    k = make_ring(Chunks(k_desc, k_tail_desc), STAGES, CONSUMERS)
    v = make_ring(Chunks(v_desc, v_tail_desc), STAGES, CONSUMERS)
    out = gl.allocate_shared_memory(out_desc.dtype, [OUT_PLACES] + out_desc.block_shape, out_desc.layout)
    out_tail = out
    if out_tail_desc is not None:
        out_tail = gl.allocate_shared_memory(
            out_desc.dtype, [OUT_PLACES] + out_tail_desc.block_shape, out_tail_desc.layout
        )
    out_free = barriers(CONSUMERS, WARPGROUP)
    queue = make_tile_queue(CONSUMERS)
    blocks = BlockLists(
        block_lists_ptr, block_offsets, block_tiles, block_kinds, block_bits,
        stride_block_batch, stride_block_head, block_order,
    )  # fmt: skip
    if TILE_K > 0:
        listing = (blocks, make_tile_info(STAGES))
    else:
        listing = (blocks, block_lists_ptr)
    descales = (
        (descale_q_ptr, stride_descale_q_batch, stride_descale_q_head, descale_group),
        (descale_k_ptr, stride_descale_k_batch, stride_descale_k_head, descale_group),
        (descale_v_ptr, stride_descale_v_batch, stride_descale_v_head, descale_group),
    )
    fence_async_shared()
    order = (counter_ptr, tiles, lines, dynamic)
    producing = (
        form, queue, order, q, k, v, q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc,
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, group, rows_q, rows_k, window_left, window_right, listing,
    )  # fmt: skip
    sizes = (batch, heads, rows_q, rows_k)
    units = (scale_log2, cap_scale, alibi_slopes_ptr, stride_alibi_batch)
    places = (out, out_tail, out_free, out_desc, out_tail_desc)
    consuming = (
        form, queue, q, k, v, places, lse_ptr, sinks_ptr, sizes, window_left, window_right, units,
        listing, descales,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, consuming)), (_consumer, (1, consuming)), (_producer, (producing,))],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, consuming)),
                (_consumer, (1, consuming)),
                (_consumer, (2, consuming)),
                (_producer, (producing,)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _producer(inputs):
    """Finds the tiles of this program, and loads what they need as soon as there is a place for it."""
    form, queue, order = inputs[:3]
    counter_ptr, tiles, lines, dynamic = order
    tiles_published = 0
    pair = 0
    number = gl.program_id(0)
    while number < tiles * lines:
        tiles_published, pair, number = _bring(number, tiles_published, pair, inputs)
    publish_tile(queue, tiles_published, _numbers(-1, 0, 0, 0, 0, 0, 0, form))
    finish_numbers(counter_ptr, dynamic)


@gluon.jit
def _bring(number, tiles_published, pair, inputs):
    """Publishes a tile to the consumers, if it has rows, and loads it. Returns how many tiles were published, how
    many key tiles were loaded, and the number of the next tile."""
    (
        form, queue, order, q, k, v, q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc,
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, group, rows_q, rows_k, window_left, window_right, listing,
    ) = inputs  # fmt: skip
    counter_ptr, tiles, lines, dynamic = order
    ROWS: gl.constexpr = form.CONSUMERS * M
    UNEVEN: gl.constexpr = form.PACKED or form.HAS_LEFT or form.HAS_RIGHT or form.TILE_Q > 0
    following = number
    tile, line = tile_in_order(number, tiles, lines, PAIRS_TOGETHER, closing_lines(tiles), UNEVEN)
    if form.TILE_Q > 0:
        tile = longest_line_first(listing[0], tile, line // heads, line % heads, ROWS, form.TILE_Q)
    sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
        tile, line, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, rows_k, ROWS, form.PACKED
    )
    if first < seq_q:
        listed = 0
        if form.TILE_Q > 0:
            entry, last_entry = line_entries(listing[0], sequence, head, first // form.TILE_Q)
            listed = (last_entry - entry) * (form.TILE_K // k.ROWS)
        publish_tile(queue, tiles_published, _numbers(first, sequence, head, begin_q, seq_q, seq_k, listed, form))
        queries = HeadRows(sequence, head, begin_q, seq_q)
        for which in gl.static_range(form.CONSUMERS):
            slot = q.slot(tiles_published, which)
            q.fill(slot, Chunks(q_desc, q_tail_desc), queries, first + which * M, form.PACKED)
        tiles_published += 1
        shift = 0 if form.TOP_LEFT else seq_k - seq_q
        key_begin, _, _, key_end = key_tile_ranges(
            first, seq_q, shift, seq_k, window_left, window_right, ROWS, k.ROWS, form.HAS_LEFT, form.HAS_RIGHT
        )
        if form.TILE_Q > 0:
            key_begin = 0
            key_end = gl.maximum(listed, 1)
        for done in range(0, key_end - key_begin):
            n = key_end - 1 - done
            if form.TILE_Q > 0:
                n, kind = listed_tile(listing[0], entry, n, listed > 0, k.ROWS, form.TILE_K)
            row = n * k.ROWS
            slot = k.slot(pair)
            k.wait_empty(slot)
            if form.TILE_Q > 0:
                write_tile_info(listing[1], slot.place, TILE_NUMBER, n)
                write_tile_info(listing[1], slot.place, TILE_KIND, kind)
            keys = HeadRows(sequence, head // group, begin_k, seq_k)
            k.load(slot, Chunks(k_desc, k_tail_desc), keys, row, form.PACKED)
            v.fill(slot, Chunks(v_desc, v_tail_desc), keys, row, form.PACKED)
            pair += 1
            if done == 0:  # the answer takes time: ask early, but not before there is work for the consumers
                following = next_number(number, counter_ptr, dynamic)
    else:
        following = next_number(number, counter_ptr, dynamic)
    return tiles_published, pair, following


@gluon.jit
def _numbers(first, sequence, head, begin, seq_q, seq_k, listed, form):
    """What is published of a tile: its first row (-1: no more tiles), sequence and head; packed, where the
    sequence's queries begin, and how many queries and keys it has; with a block mask, how many key tiles it lists."""
    if form.PACKED:
        numbers = (first, sequence, head, begin, seq_q, seq_k)
    elif form.TILE_Q > 0:
        numbers = (first, sequence, head, listed)
    else:
        numbers = (first, sequence, head)
    return numbers


@gluon.jit
def _consumer(WHICH: gl.constexpr, inputs):
    """Computes the `WHICH`-th 64 rows of each tile. It visits the key tiles that some of these rows see."""
    form, queue = inputs[:2]
    declare_flag(WHICH)
    tiles_received = 0
    pair = 0
    if form.IN_TURN and WHICH == form.CONSUMERS - 1:
        end_turn(WHICH, form.CONSUMERS)
    tile = receive_tile(queue, tiles_received, _published_fields(form))
    while tile[0] >= 0:
        tiles_received += 1
        tile, pair = _compute(tile, tiles_received, pair, WHICH, inputs)
    tma_store_wait(0)


@gluon.constexpr_function
def _published_fields(form):
    """How many numbers are published of a tile."""
    return 6 if form.PACKED else 4 if form.TILE_Q > 0 else 3


@gluon.jit
def _compute(tile, tiles_received, pair, WHICH: gl.constexpr, inputs):
    """Computes 64 rows of a tile, the `tiles_received`-th counted from 1, and stores them. Returns what was
    published of the next tile, and the number of key tiles taken from the rings so far."""
    (
        form, queue, q, k, v, places, lse_ptr, sinks_ptr, sizes, window_left, window_right, units,
        listing, descales,
    ) = inputs  # fmt: skip
    batch, _heads, rows_q, rows_k = sizes
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    # Where a tile has more rows than a key tile has keys, a band often hides whole key tiles from a consumer.
    SKIPS: gl.constexpr = (form.HAS_LEFT or form.HAS_RIGHT) and form.TILE_Q == 0 and form.CONSUMERS * M > k.ROWS
    first = tile[0]
    sequence = tile[1]
    head = tile[2]
    begin = 0
    seq_q = rows_q
    seq_k = rows_k
    if form.PACKED:
        begin = tile[3]
        seq_q = tile[4]
        seq_k = tile[5]
    shift = 0 if form.TOP_LEFT else seq_k - seq_q
    my_first = first + WHICH * M
    row = my_first + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    visited, before, after = consumer_key_tiles(
        first, my_first, seq_q, shift, seq_k, window_left, window_right, form.CONSUMERS * M, k.ROWS,
        form.HAS_LEFT, form.HAS_RIGHT, SKIPS,
    )  # fmt: skip
    key_begin = visited.begin
    key_end = visited.end
    if SKIPS:
        pair = skip_key_tiles(before, k, v, pair, form, WHICH)
    if form.TILE_Q > 0:
        key_begin = 0
        key_end = gl.maximum(tile[3], 1)
    scale_log2, cap_scale, alibi_slopes_ptr, stride_alibi_batch = units
    seen = sequence < batch
    unit = scale_log2
    cap_unit = cap_scale
    if form.EIGHT_BITS:
        factor = load_descale(descales[0], sequence, head, seen)
        factor *= load_descale(descales[1], sequence, head, seen)
        if cap_scale is not None:
            cap_unit = cap_scale * factor
        else:
            unit = scale_log2 * factor
            unit = gl.where(gl.abs(unit) < LEAST_UNIT, LEAST_UNIT, unit)
    slope = alibi_slopes_ptr  # None stays None
    if alibi_slopes_ptr is not None:
        slope = load_slope(alibi_slopes_ptr, stride_alibi_batch, sequence, head, unit, seen)
    place, phase = place_of(tiles_received - 1, form.QUERY_PLACES)
    mine = place * form.CONSUMERS + WHICH
    mbarrier.wait(q.full.index(mine), phase)
    q_tile, q_tail = take_queries(q, mine, s_layout, form)
    view = (
        row, shift, seq_k, window_left, window_right, visited.full_begin, visited.full_end, my_first, listing,
        seq_k - seq_q,
    )  # fmt: skip
    p, o, o_tail, row_sum, reference, pair, last_stage, last_phase = visit_key_tiles(
        q_tile, q_tail, k, v, pair, key_begin, key_end, unit, cap_unit, slope, view, form, WHICH
    )
    mbarrier.wait(v.full.index(last_stage), last_phase)
    o, o_tail = start_values(p, o, o_tail, v, last_stage)
    if not form.Q_IN_REGISTERS:
        release(q.empty.index(mine))
    # While the last product is in flight: what comes next, and the statistics.
    tile = receive_tile(queue, tiles_received, _published_fields(form))
    inverse = _statistics(
        row_sum, reference, row, sequence, head, begin, seq_q, lse_ptr, sinks_ptr, sizes, descales, form
    )
    o, o_tail = wait_values(o, o_tail, v)
    release(v.empty.index(last_stage))
    pair += 1
    if SKIPS and form.HAS_LEFT:
        pair = skip_key_tiles(after, k, v, pair, form, WHICH)
    _hand_out(o, o_tail, inverse, places, sequence, head, begin, seq_q, my_first, tiles_received, v, form, WHICH)
    return tile, pair


@gluon.jit
def _statistics(
    row_sum, reference, row, sequence, head, begin, seq_q, lse_ptr, sinks_ptr, sizes, descales, form
):  # fmt: skip
    """Stores lse. Returns what `o` is to be multiplied by."""
    batch, heads, rows_q, _ = sizes
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row.type.layout)
    own = 1.0
    if sinks_ptr is not None:
        row_sum, reference, own = join_sink(row_sum, reference, sinks_ptr, sequence, head, batch)
    if form.EIGHT_BITS:
        own *= load_descale(descales[2], sequence, head, sequence < batch)
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
    if form.PACKED:
        offset = head.to(gl.int64) * rows_q + begin
    else:
        offset = (sequence.to(gl.int64) * heads + head) * rows_q
    gl.store(lse_ptr + offset + row, lse, mask=row < seq_q)
    return inverse


@gluon.jit
def _hand_out(
    o, o_tail, inverse, places, sequence, head, begin, seq_q, my_first, tiles_received, v, form, WHICH: gl.constexpr
):  # fmt: skip
    """Stores 64 rows of out through the consumer's place, or through the one that all share, each in its turn."""
    out, out_tail, out_free, out_desc, out_tail_desc = places
    if form.OUT_PLACES > 1:
        OUT: gl.constexpr = WHICH
    else:
        OUT: gl.constexpr = 0
        # The consumer before this one has stored this tile; the first waits for the last one and the tile before.
        mbarrier.wait(out_free.index(WHICH), ((tiles_received - 1) & 1) ^ (1 if WHICH == 0 else 0))
    store_out(
        o, o_tail, inverse, out.index(OUT), out_tail.index(OUT), out_desc, out_tail_desc,
        sequence, head, begin, seq_q, my_first, v, form,
    )  # fmt: skip
    if form.OUT_PLACES == 1:
        tma_store_wait(0)
        release(out_free.index((WHICH + 1) % form.CONSUMERS))
