"""Forward kernel for Hopper: a producer warp that loads, and warpgroups that multiply and exponentiate ("consumers").

Each program stays on its multiprocessor and takes one tile of query rows after another. Its producer finds the tile,
tells the consumers, and loads queries, keys and values by TMA into rings; each consumer computes 64 query rows. Per key
tile, with `c = scale · log2(e)` (letters as in `pieces`)::

    s     = q kᵀ                      [M, N]
    m'    = max(m, rowmax(s))         [M]
    p     = exp2(c·s - c·m')          [M, N]
    alpha = exp2(c·m - c·m')          [M]
    l     = alpha·l + rowsum(p)       [M], kept as [M, 8]: each thread's own part
    o     = alpha·o + p v             [M, E]

and in the end `out = o / l`, `lse = c·m·ln 2 + ln l`. Soft cap and ALiBi change `s` (`scores`); a sink joins `l` at the
end; where operands have 8 bits, `p` is rounded otherwise and `p v` added up otherwise (`eight_bits`). `p v` of the tile
before is in flight while some exponentials of a tile are computed (`AHEAD`). Key tiles come from the last to the first,
so that the masked ones of the diagonal come first. It is one loop with a branch for masks; one without it, behind a
loop for the masked tiles, was no faster.

Reference: Shah et al., "FlashAttention-3" (2024), algorithm 2.
"""

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.blocks import (
    FULL,
    hear_listed,
    line_entries,
    listed_tile,
    longest_first,
    make_news,
    tell,
    where_shown,
)
from flashtile.ops.attention.hopper.eight_bits import (
    WEIGHT_SCALE_LOG2,
    add_product,
    load_descale,
    load_values,
    rounded_weights,
)
from flashtile.ops.attention.hopper.forward_pieces import (
    Form,
    begin_turn,
    end_turn,
    finite,
    join_sink,
    modified,
    skip_key_tiles,
    start_scores,
    start_values,
    store_out,
    take_queries,
    wait_values,
)
from flashtile.ops.attention.hopper.pieces import (
    LN_2,
    PAIRS_TOGETHER,
    WARPGROUP,
    M,
    barriers,
    consumer_key_tiles,
    finish_numbers,
    hear_tile,
    join_columns,
    key_tile_ranges,
    load_tile,
    locate_tile,
    make_mailbox,
    make_ring,
    mask_scores,
    next_number,
    place_of,
    product_layout,
    release,
    row_maximum,
    row_sums,
    scale_rows,
    settled,
    split_off,
    tell_tile,
    tile_in_order,
)
from flashtile.ops.attention.hopper.scores import load_slope


@gluon.jit
def attention_forward_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, out_desc, out_rest_desc,
    lse_ptr, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr, block_lists_ptr,
    descale_q_ptr, descale_k_ptr, descale_v_ptr,
    batch, heads, group, rows_q, rows_k, tiles, lines, dynamic, window_left, window_right,
    scale_log2, cap_scale, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, block_bits, stride_block_batch, stride_block_head, block_order,
    stride_descale_q_batch, stride_descale_q_head, stride_descale_k_batch, stride_descale_k_head,
    stride_descale_v_batch, stride_descale_v_head, descale_group,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr, IN_TURN: gl.constexpr,
    OUT_PLACES: gl.constexpr, QUERY_PLACES: gl.constexpr,
    PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr,
    TILE_Q: gl.constexpr, TILE_K: gl.constexpr,
):  # fmt: skip
    """`..._rest_desc`: of the second chunk of columns, or None. `rows_q`, `rows_k`: seq_q and seq_k, or the totals of
    a packed call. `group`: query heads per key/value head. `tiles` (packed: slots) on each of `lines`. `dynamic`:
    programs take tiles as they come, through the two zeros at `counter_ptr`. `scale_log2`: scale · log2(e) > 0, or with
    a soft cap softcap · log2(e), and then `cap_scale`: scale / softcap. `block_...`, `TILE_...`: of the block mask
    (`blocks`). With 8-bit operands `v_desc` is of the transposed values (`eight_bits`), and descale factors are of a
    sequence and key/value head; `descale_group` is `group` once more. What a call does not have is None.
    """
    EIGHT_BITS: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    form = Form(
        EIGHT_BITS, CONSUMERS, Q_IN_REGISTERS, AHEAD, IN_TURN, OUT_PLACES, QUERY_PLACES, PACKED, HAS_LEFT, HAS_RIGHT,
        TOP_LEFT, TILE_Q, TILE_K,
    )  # fmt: skip
    q = make_ring(q_desc, q_rest_desc, CONSUMERS * QUERY_PLACES, 1)
    k = make_ring(k_desc, k_rest_desc, STAGES, CONSUMERS)
    v = make_ring(v_desc, v_rest_desc, STAGES, CONSUMERS, TRANSPOSED=EIGHT_BITS)
    out = gl.allocate_shared_memory(out_desc.dtype, [OUT_PLACES] + out_desc.block_shape, out_desc.layout)
    out_rest = out
    if out_rest_desc is not None:
        out_rest = gl.allocate_shared_memory(
            out_desc.dtype, [OUT_PLACES] + out_rest_desc.block_shape, out_rest_desc.layout
        )
    out_free = barriers(CONSUMERS, WARPGROUP)
    mailbox = make_mailbox(CONSUMERS)
    blocks = (
        block_lists_ptr, block_offsets, block_tiles, block_kinds, block_bits,
        stride_block_batch, stride_block_head, block_order,
    )  # fmt: skip
    if TILE_K > 0:
        listing = (blocks, make_news(STAGES))
    else:
        listing = (blocks, block_lists_ptr)
    descales = (
        (descale_q_ptr, stride_descale_q_batch, stride_descale_q_head, descale_group),
        (descale_k_ptr, stride_descale_k_batch, stride_descale_k_head, descale_group),
        (descale_v_ptr, stride_descale_v_batch, stride_descale_v_head, descale_group),
    )
    fence_async_shared()
    producing = (
        form, q, k, v, mailbox, q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc,
        counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
        batch, heads, group, rows_q, rows_k, tiles, lines, dynamic, window_left, window_right, listing,
    )  # fmt: skip
    consuming = (
        form, q, k, v, mailbox, out, out_rest, out_free, out_desc, out_rest_desc, lse_ptr, alibi_slopes_ptr, sinks_ptr,
        batch, heads, rows_q, rows_k, window_left, window_right, scale_log2, cap_scale, stride_alibi_batch,
        listing, descales,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, consuming)), (_consumer, (1, consuming)), (_producer, producing)],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, consuming)),
                (_consumer, (1, consuming)),
                (_consumer, (2, consuming)),
                (_producer, producing),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _producer(
    form, q, k, v, mailbox, q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc,
    counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    batch, heads, group, rows_q, rows_k, tiles, lines, dynamic, window_left, window_right, listing,
):  # fmt: skip
    """Finds the tiles of this program, and loads what they need as soon as there is a place for it."""
    ROWS: gl.constexpr = form.CONSUMERS * M
    UNEVEN: gl.constexpr = form.PACKED or form.HAS_LEFT or form.HAS_RIGHT or form.TILE_Q > 0
    told = 0
    pair = 0
    number = gl.program_id(0)
    while number < tiles * lines:
        tile, line = tile_in_order(number, tiles, lines, PAIRS_TOGETHER, UNEVEN)
        if form.TILE_Q > 0:
            tile = longest_first(listing[0], tile, line // heads, line % heads, ROWS, form.TILE_Q)
        sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
            tile, line, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, rows_k, ROWS, form.PACKED
        )
        if first < seq_q:
            listed = 0
            if form.TILE_Q > 0:
                entry, last_entry = line_entries(listing[0], sequence, head, first // form.TILE_Q)
                listed = (last_entry - entry) * (form.TILE_K // k.ROWS)
            tell_tile(mailbox, told, _numbers(first, sequence, head, begin_q, seq_q, seq_k, listed, form))
            place, phase = place_of(told, form.QUERY_PLACES)
            for which in gl.static_range(form.CONSUMERS):
                mine = place * form.CONSUMERS + which
                row = first + which * M
                mbarrier.wait(q.empty.index(mine), phase ^ 1)
                load_tile(q, mine, q_desc, q_rest_desc, sequence, head, begin_q, seq_q, row, form.PACKED)
            told += 1
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
                stage, phase = place_of(pair, k.STAGES)
                mbarrier.wait(k.empty.index(stage), phase ^ 1)
                if form.TILE_Q > 0:
                    tell(listing[1], stage, 0, n)
                    tell(listing[1], stage, 1, kind)
                load_tile(k, stage, k_desc, k_rest_desc, sequence, head // group, begin_k, seq_k, row, form.PACKED)
                mbarrier.wait(v.empty.index(stage), phase ^ 1)
                if form.EIGHT_BITS:
                    load_values(v, stage, v_desc, v_rest_desc, sequence, head // group, begin_k, row, form.PACKED)
                else:
                    load_tile(v, stage, v_desc, v_rest_desc, sequence, head // group, begin_k, seq_k, row, form.PACKED)
                pair += 1
                if done == 0:  # the answer takes time: ask early, but not before there is work for the consumers
                    number = next_number(number, counter_ptr, dynamic)
        else:
            number = next_number(number, counter_ptr, dynamic)
    tell_tile(mailbox, told, _numbers(-1, 0, 0, 0, 0, 0, 0, form))
    finish_numbers(counter_ptr, dynamic)


@gluon.jit
def _numbers(first, sequence, head, begin, seq_q, seq_k, listed, form):
    """What consumers are told of a tile: its first row (-1: no more tiles), sequence and head; packed, where the
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
    (
        form, q, k, v, mailbox, out, out_rest, out_free, out_desc, out_rest_desc, lse_ptr, alibi_slopes_ptr, sinks_ptr,
        batch, heads, rows_q, rows_k, window_left, window_right, scale_log2, cap_scale, stride_alibi_batch,
        listing, descales,
    ) = inputs  # fmt: skip
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    NUMBERS: gl.constexpr = 6 if form.PACKED else 4 if form.TILE_Q > 0 else 3
    # Where a tile has more rows than a key tile has keys, a band often hides whole key tiles from a consumer.
    SKIPS: gl.constexpr = (form.HAS_LEFT or form.HAS_RIGHT) and form.TILE_Q == 0 and form.CONSUMERS * M > k.ROWS
    heard = 0
    pair = 0
    begin = 0
    seq_q = rows_q
    seq_k = rows_k
    if form.IN_TURN and WHICH == form.CONSUMERS - 1:
        end_turn(WHICH, form.CONSUMERS)
    tile = hear_tile(mailbox, 0, NUMBERS)
    while tile[0] >= 0:
        first = tile[0]
        sequence = tile[1]
        head = tile[2]
        if form.PACKED:
            begin = tile[3]
            seq_q = tile[4]
            seq_k = tile[5]
        shift = 0 if form.TOP_LEFT else seq_k - seq_q
        my_first = first + WHICH * M
        row = my_first + gl.arange(0, M, gl.SliceLayout(1, s_layout))
        key_begin, full_begin, full_end, key_end, before, after = consumer_key_tiles(
            first, my_first, seq_q, shift, seq_k, window_left, window_right, form.CONSUMERS * M, k.ROWS,
            form.HAS_LEFT, form.HAS_RIGHT, SKIPS,
        )  # fmt: skip
        if SKIPS:
            pair = skip_key_tiles(before, k, v, pair, form, WHICH)
        if form.TILE_Q > 0:
            key_begin = 0
            key_end = gl.maximum(tile[3], 1)
        unit = scale_log2
        cap_unit = cap_scale
        if form.EIGHT_BITS:
            factor = load_descale(descales[0], sequence, head, sequence < batch)
            factor *= load_descale(descales[1], sequence, head, sequence < batch)
            if cap_scale is not None:
                cap_unit = cap_scale * factor
            else:
                unit = scale_log2 * factor
        slope = alibi_slopes_ptr  # None stays None
        if alibi_slopes_ptr is not None:
            slope = load_slope(alibi_slopes_ptr, stride_alibi_batch, sequence, head, unit, sequence < batch)
        place, phase = place_of(heard, form.QUERY_PLACES)
        mine = place * form.CONSUMERS + WHICH
        mbarrier.wait(q.full.index(mine), phase)
        q_tile, q_rest = take_queries(q, mine, s_layout, form)
        o, o_rest, earlier, row_sum, m_scaled, pair = _visit_key_tiles(
            q_tile, q_rest, k, v, pair, key_begin, full_begin, full_end, key_end,
            row, shift, seq_k, window_left, window_right, unit,
            seq_k - seq_q, cap_unit, slope, my_first, listing, form, WHICH,
        )  # fmt: skip
        if not form.Q_IN_REGISTERS:
            release(q.empty.index(mine))
        # While the last product is in flight: what comes next, and the statistics.
        heard += 1
        tile = hear_tile(mailbox, heard, NUMBERS)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), row.type.layout)
        own = 1.0
        if sinks_ptr is not None:
            row_sum, m_scaled, own = join_sink(row_sum, m_scaled, sinks_ptr, sequence, head, batch)
        if form.EIGHT_BITS:
            own *= load_descale(descales[2], sequence, head, sequence < batch)
        inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
        lse = gl.where(row_sum == 0.0, float("-inf"), m_scaled * LN_2 + gl.log(row_sum))
        if form.PACKED:
            offset = head.to(gl.int64) * rows_q + begin
        else:
            offset = (sequence.to(gl.int64) * heads + head) * rows_q
        gl.store(lse_ptr + offset + row, lse, mask=row < seq_q)
        o, o_rest = wait_values(o, o_rest, v)
        last_stage, _ = place_of(pair - 1, v.STAGES)
        release(v.empty.index(last_stage))
        if SKIPS and form.HAS_LEFT:
            pair = skip_key_tiles(after, k, v, pair, form, WHICH)
        if form.EIGHT_BITS:
            o, o_rest = add_product(earlier, o, o_rest, v)
        if form.OUT_PLACES > 1:
            OUT: gl.constexpr = WHICH
        else:
            OUT: gl.constexpr = 0
            # The consumer before this one has stored this tile; the first waits for the last one and the tile before.
            mbarrier.wait(out_free.index(WHICH), ((heard - 1) & 1) ^ (1 if WHICH == 0 else 0))
        store_out(
            o, o_rest, inverse, out.index(OUT), out_rest.index(OUT), out_desc, out_rest_desc,
            sequence, head, begin, seq_q, my_first, v, form,
        )  # fmt: skip
        if form.OUT_PLACES == 1:
            tma_store_wait(0)
            release(out_free.index((WHICH + 1) % form.CONSUMERS))
    tma_store_wait(0)


@gluon.jit
def _visit_key_tiles(
    q_tile, q_rest, k, v, pair, key_begin, full_begin, full_end, key_end,
    row, shift, keys, window_left, window_right, scale_log2,
    diagonal, cap_scale, slope, my_first, listing, form, WHICH: gl.constexpr,
):  # fmt: skip
    """The online softmax over the key tiles from the last to `key_begin`, or over so many of which `news` tells.

    Returns o and its second chunk with the last product in flight; with 8-bit operands, where these are that product
    alone, what it is to be added to; the row sums in parts, the row maxima in units of log2, and the number
    of tiles taken from the rings so far.
    """
    dtype: gl.constexpr = v.tiles.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    s_layout: gl.constexpr = product_layout(k.ROWS, BITS)
    o_layout: gl.constexpr = product_layout(v.WIDTH, BITS)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    PRODUCTS: gl.constexpr = 2 if v.REST > 0 else 1
    # Without a band only the last tile of keys can be cut, and that comes first. A branch that is never taken would
    # still keep the loop in pieces, which costs 7 % at 64 columns.
    MAY_CUT: gl.constexpr = form.HAS_LEFT or form.HAS_RIGHT or form.TILE_Q > 0
    zeros = gl.zeros([M, k.ROWS], gl.float32, s_layout)
    o = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    o_rest = gl.to_tensor(0)
    if v.REST > 0:
        o_rest = gl.zeros([M, v.REST], gl.float32, product_layout(v.REST, BITS))

    stage, phase = place_of(pair, k.STAGES)
    mbarrier.wait(k.full.index(stage), phase)
    n = key_end - 1
    if form.TILE_Q > 0:
        n, kind, bits = hear_listed(listing, stage, my_first, k, form)
    s = warpgroup_mma_wait(0, [start_scores(q_tile, q_rest, k, stage, zeros)])
    release(k.empty.index(stage))
    s = modified(s, row + diagonal, n * k.ROWS, cap_scale, slope)
    if form.TILE_Q > 0:
        if kind != FULL:
            s = where_shown(bits, s, float("-inf"))
    if (n < full_begin) | (n >= full_end):
        s = mask_scores(
            s, row, n * k.ROWS, shift, keys, window_left, window_right, form.HAS_LEFT, form.HAS_RIGHT
        )  # fmt: skip
    m = row_maximum(s)
    m_scaled = finite(m * scale_log2)
    earlier = gl.to_tensor(0)
    if form.EIGHT_BITS:
        m_scaled -= WEIGHT_SCALE_LOG2
        earlier = (o, o_rest, gl.full([M], 1.0, gl.float32, m.type.layout))
    first_probs = gl.exp2(s * scale_log2 - m_scaled[:, None])
    row_sum = row_sums(first_probs)
    if form.EIGHT_BITS:
        p = rounded_weights(first_probs)
    else:
        p = gl.convert_layout(first_probs.to(dtype), p_layout)

    for done in range(key_begin + 1, key_end):
        n = key_begin + key_end - 1 - done
        v_stage = stage
        v_phase = phase
        pair += 1
        stage, phase = place_of(pair, k.STAGES)
        mbarrier.wait(k.full.index(stage), phase)
        if form.IN_TURN:
            begin_turn(WHICH)
        scores = start_scores(q_tile, q_rest, k, stage, zeros)
        mbarrier.wait(v.full.index(v_stage), v_phase)
        o, o_rest = start_values(p, o, o_rest, v, v_stage, form)
        if form.IN_TURN:
            end_turn(WHICH, form.CONSUMERS)
        if form.TILE_Q > 0:
            n, kind, bits = hear_listed(listing, stage, my_first, k, form)
        s = warpgroup_mma_wait(PRODUCTS, [scores])
        release(k.empty.index(stage))
        s = modified(s, row + diagonal, n * k.ROWS, cap_scale, slope)
        if form.TILE_Q > 0:
            if kind != FULL:
                s = where_shown(bits, s, float("-inf"))
        if MAY_CUT:
            if (n < full_begin) | (n >= full_end):
                s = mask_scores(
                    s, row, n * k.ROWS, shift, keys, window_left, window_right, form.HAS_LEFT, form.HAS_RIGHT
                )  # fmt: skip
        m_new = gl.maximum(m, row_maximum(s))
        m_scaled = finite(m_new * scale_log2)
        alpha = gl.exp2(m * scale_log2 - m_scaled)
        m = m_new
        if form.EIGHT_BITS:
            m_scaled -= WEIGHT_SCALE_LOG2
        row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        if form.AHEAD > 0:
            # Only some of the exponentials come while `p v` is in flight, the others among the conversions and the
            # rescaling: the units for exponentials work while the others do.
            pieces = split_off(s * scale_log2 - m_scaled[:, None], form.AHEAD)
            probs = gl.exp2(pieces[0])
            row_sum = settled(row_sum + row_sums(probs))
            o, o_rest = wait_values(o, o_rest, v)
            release(v.empty.index(v_stage))
            for i in gl.static_range(1, len(pieces)):
                more = gl.exp2(pieces[i])
                row_sum += row_sums(more)
                probs = join_columns(probs, more)
        else:
            o, o_rest = wait_values(o, o_rest, v)
            release(v.empty.index(v_stage))
            probs = gl.exp2(s * scale_log2 - m_scaled[:, None])
            row_sum += row_sums(probs)
        if form.EIGHT_BITS:
            p = rounded_weights(gl.convert_layout(probs, s_layout, assert_trivial=True))
            total, total_rest = add_product(earlier, o, o_rest, v)
            earlier = (total, total_rest, alpha)
        else:
            p = gl.convert_layout(probs.to(dtype), p_layout)
            o, o_rest = scale_rows(o, o_rest, alpha, v)

    mbarrier.wait(v.full.index(stage), phase)
    o, o_rest = start_values(p, o, o_rest, v, stage, form)
    return o, o_rest, earlier, row_sum, m_scaled, pair + 1
