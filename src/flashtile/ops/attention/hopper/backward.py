"""Backward kernels for Hopper: statistics, then dk, dv and the sums of dq in one kernel, then dq in its own dtype.

Programs of the main kernel stay on their multiprocessors and take one tile of keys after another. A producer warp finds
the tile, tells the others, and loads its keys and values, and one tile of queries after another with its dout and
statistics: the first ones of the next tile of keys while this one is still being worked on. Per query tile, everything
transposed, with `c = scale · log2(e)` (letters as in `pieces`; N keys, M queries)::

    sᵀ  = k qᵀ                  [N, M]
    pᵀ  = exp2(c·sᵀ - lse)      [N, M]
    dpᵀ = v doutᵀ               [N, M]
    dsᵀ = pᵀ · (dpᵀ - delta)    [N, M]      delta = rowsum(dout · out) - dlse
    dv += pᵀ dout               [N, E]
    dk += dsᵀ q                 [N, D]
    dq += ds k                  [M, D]      over all key tiles: added up in device memory

Three warpgroups share the work. Two compute the gradients of keys and values; they pass `dsᵀ` on through shared memory
to the third, which multiplies it by the keys and adds the product to a float32 buffer (`backward_pieces.add_to_sums`).
None of them waits for another but through these rings. Where dk and dv of 64 keys fit a warpgroup's registers (heads of
up to 128 columns, or of 192 and 128 for v), each of the two takes 64 keys; the latter need the producer's registers
too, and the third warpgroup loads. Wider heads: there are 64 keys, one warpgroup computes `pᵀ` and dv, the other `dsᵀ`
and dk.

The time of the inner loop is that of the shared-memory pipe more than that of the tensor cores. So lse and delta are
taken off by products more, or stored in the order in which threads hold them (`backward_pieces.less_statistics`).

Reference: Dao et al., "FlashAttention" (2022), algorithm 4; Shah et al., "FlashAttention-3" (2024), section 3.
"""

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.backward_loads import load_keys, load_step, load_tiles, receive_step
from flashtile.ops.attention.hopper.backward_pieces import (
    ROWS,
    add_to_sums,
    begin_turn,
    chunks_of,
    columns_of,
    end_turn,
    less_statistics,
    make_statistics,
    mask_probs,
    modified_scores,
    pin_pairs_before_product,
    products_of_sum,
    slice_of,
    start_sum,
    start_transposed,
    store_rows,
    unpack,
    wait_sum,
    wide_zeros,
)
from flashtile.ops.attention.hopper.backward_split import sum_dk, sum_dv
from flashtile.ops.attention.hopper.backward_walk import (
    Form,
    adders_before,
    await_last_sum,
    find_keys,
    first_number,
    keys_of,
    receive_keys,
    receive_next_keys,
    step_after,
    step_of,
    turned_tile,
    walk_of,
)
from flashtile.ops.attention.hopper.blocks import (
    FULL,
    TILE_HEAD,
    TILE_NUMBER,
    TILE_TURN,
    BlockLists,
    load_bits,
    make_tile_info,
    read_tile_info,
    where_visible,
)
from flashtile.ops.attention.hopper.pieces import (
    WARPGROUP,
    Chunks,
    barriers,
    make_ring,
    make_tile_queue,
    matrix_layout,
    pack,
    place_of,
    release,
)


@gluon.jit
def attention_backward_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, dout_desc, dout_tail_desc,
    statistics_desc, sums_desc, dk_desc, dk_tail_desc, dv_desc, dv_tail_desc,
    sums_ptr, turns_ptr, counter_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, block_lists_ptr,
    batch, heads_kv, group, shares, rows_q, rows_k, tiles, query_tiles, window_left, window_right, scale,
    scale_log2, cap_scale, stride_alibi_batch,
    block_offsets, block_tiles, block_kinds, block_bits, stride_block_batch, stride_block_head,
    KEYS: gl.constexpr, M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    SUM_COLUMNS: gl.constexpr, HANDOVERS: gl.constexpr, SPLIT_ROLES: gl.constexpr, PRODUCER: gl.constexpr,
    ORDERED: gl.constexpr, ALTERNATES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr,
    MAY_CUT: gl.constexpr, CUT_LAST: gl.constexpr, TURNS: gl.constexpr, MEETS: gl.constexpr,
    STATISTICS_MULTIPLIED: gl.constexpr, SUMS_BY_TMA: gl.constexpr, TILE_Q: gl.constexpr, TILE_K: gl.constexpr,
):  # fmt: skip
    """`..._tail_desc`: of the second chunk of columns, or None. `heads_kv` counts each key/value head `shares` times,
    once for each share of its query heads, `group` of them, which has dk and dv of its own. `tiles` key tiles (packed:
    slots) on each line of such a head, `query_tiles` likewise of a query head. `turns_ptr`: for each query tile how
    many key tiles have added to its dq, zeros at the start; None if not ORDERED. `counter_ptr`: how many tiles have
    been taken, unless ORDERED beside each program's first, zero at the start; if MEETS, with a zero for each line
    behind it (`backward_walk.meeting_point`). `scale` > 0. Other arguments as in the forward kernel."""
    WARPGROUPS: gl.constexpr = KEYS // ROWS
    blocks = BlockLists(
        block_lists_ptr, block_offsets, block_tiles, block_kinds, block_bits,
        stride_block_batch, stride_block_head, None,
    )  # fmt: skip
    form = Form(
        KEYS, M, PARTS, SUM_COLUMNS, HANDOVERS, KEY_STAGES, PRODUCER, ORDERED, ALTERNATES, PACKED, HAS_LEFT, HAS_RIGHT,
        TOP_LEFT, MAY_CUT, CUT_LAST, TURNS, MEETS, STATISTICS_MULTIPLIED, SUMS_BY_TMA, TILE_Q, TILE_K,
    )  # fmt: skip
    call = (
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_kv, group, rows_q, rows_k, tiles, query_tiles,
        window_left, window_right, blocks, shares,
    )  # fmt: skip
    READERS: gl.constexpr = 2
    k = make_ring(Chunks(k_desc, k_tail_desc), KEY_STAGES * WARPGROUPS, 2 if SPLIT_ROLES else 1)
    v = make_ring(Chunks(v_desc, v_tail_desc), KEY_STAGES * WARPGROUPS, 1)
    q = make_ring(Chunks(q_desc, q_tail_desc), STAGES, READERS)
    dout = make_ring(Chunks(dout_desc, dout_tail_desc), STAGES, READERS)
    statistics = make_statistics(statistics_desc, STAGES, STATISTICS_MULTIPLIED)
    sums = (sums_ptr, sums_desc, sums_ptr)
    if SUMS_BY_TMA:
        sums = (sums_ptr, sums_desc, gl.allocate_shared_memory(gl.float32, sums_desc.block_shape, sums_desc.layout))
    dscores = gl.allocate_shared_memory(q_desc.dtype, [HANDOVERS * WARPGROUPS, ROWS, M], matrix_layout(M))
    dscores_full = barriers(HANDOVERS, WARPGROUPS)
    dscores_empty = barriers(HANDOVERS, WARPGROUP)
    if TILE_K > 0:
        # `_sum_dq` may still read of a tile whose place in the ring is taken already, but for no longer than handovers.
        listing = (blocks, make_tile_info(STAGES + HANDOVERS))
    else:
        listing = (blocks, block_lists_ptr)
    queue = make_tile_queue(3 if PRODUCER else 2)
    loading = (
        q, dout, statistics[0], q_desc, q_tail_desc, dout_desc, dout_tail_desc, statistics_desc, listing[1]
    )  # fmt: skip
    producing = (
        form, loading, k, v, k_desc, k_tail_desc, v_desc, v_tail_desc, queue, counter_ptr, call
    )  # fmt: skip
    summing = (
        form, k, dscores, dscores_full, dscores_empty, sums, turns_ptr, listing, queue, call
    )  # fmt: skip
    storing = (dk_desc, dk_tail_desc, dv_desc, dv_tail_desc)
    changing = (scale_log2, cap_scale, alibi_slopes_ptr, stride_alibi_batch)
    if SPLIT_ROLES:
        probs = gl.allocate_shared_memory(q_desc.dtype, [HANDOVERS, ROWS, M], matrix_layout(M))
        probs_full = barriers(HANDOVERS, 1)
        probs_empty = barriers(HANDOVERS, WARPGROUP)
        fence_async_shared()
        scoring = (
            form, k, v, q, dout, statistics, probs, probs_full, probs_empty, listing, changing, storing, queue, call,
        )  # fmt: skip
        grading = (
            form, k, v, q, dout, statistics, probs, probs_full, probs_empty,
            dscores, dscores_full, dscores_empty, scale, storing, queue, call,
        )  # fmt: skip
        gl.warp_specialize(
            [
                (_sum_dq, (False, summing, producing)),
                (sum_dv, (scoring,)),
                (sum_dk, (grading,)),
                (load_tiles, (producing,)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        fence_async_shared()
        stepping = (
            form, q, dout, statistics, dscores, dscores_full, dscores_empty, listing, changing,
            window_left, window_right,
        )  # fmt: skip
        working = (form, k, v, q, dout, dscores_empty, scale, storing, queue, call, stepping)
        if PRODUCER:
            gl.warp_specialize(
                [
                    (_sum_dq, (False, summing, producing)),
                    (_sum_dk_dv, (0, working)),
                    (_sum_dk_dv, (1, working)),
                    (load_tiles, (producing,)),
                ],
                [4, 4, 1],
                [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [(_sum_dq, (True, summing, producing)), (_sum_dk_dv, (0, working)), (_sum_dk_dv, (1, working))],
                [4, 4],
                [REGISTERS, REGISTERS],
            )


@gluon.jit
def _sum_dk_dv(WHICH: gl.constexpr, inputs):
    """dk and dv of the `WHICH`-th 64 keys of each tile, and their part of `dsᵀ` for `_sum_dq`."""
    form, k, v, q, dout, dscores_empty, scale, storing, queue, call, stepping = inputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.M // form.PARTS, 16])
    count = 0
    before = 0
    found = receive_keys(queue, count, form)
    while found[0] >= 0:
        walk = walk_of(found, call, form)
        row = walk.first + WHICH * ROWS
        key = row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        mine, key_phase = keys_of(count, WHICH, form)
        k_tile, k_tail = chunks_of(k, mine)
        v_tile, v_tail = chunks_of(v, mine)
        dk, dk_tail = wide_zeros(q)
        dv, dv_tail = wide_zeros(dout)
        mbarrier.wait(k.full.index(mine), key_phase)
        mbarrier.wait(v.full.index(mine), key_phase)
        step = step_of(walk, 0)
        sums = (dk, dk_tail, dv, dv_tail)
        keys = (row, key, k_tile, k_tail, v_tile, v_tail)
        uncut = 0
        if form.CUT_LAST:
            uncut = walk.uncut
            for it in range(uncut):
                step, sums = _add_step(it, step, sums, before, walk, keys, stepping, False, WHICH)
        for it in range(uncut, walk.total):
            step, sums = _add_step(it, step, sums, before, walk, keys, stepping, form.MAY_CUT, WHICH)
        dk, dk_tail, dv, dv_tail = sums
        dk_desc, dk_tail_desc, dv_desc, dv_tail_desc = storing
        store_rows(dv_desc, dv_tail_desc, v, mine, dv, dv_tail, walk, row, form.PACKED)
        before += walk.total
        count += 1
        await_last_sum(walk, before, form, dscores_empty)
        dk = dk * scale
        dk_tail = dk_tail * scale
        # Keys are what the next tile needs first: where both gradients fit there, they leave through the values' place.
        if k.WIDTH == v.WIDTH and k.TAIL == v.TAIL:
            release(k.empty.index(mine))
            store_rows(dk_desc, dk_tail_desc, v, mine, dk, dk_tail, walk, row, form.PACKED)
            found = receive_next_keys(found, queue, count, form)
            tma_store_wait(0)
        else:
            store_rows(dk_desc, dk_tail_desc, k, mine, dk, dk_tail, walk, row, form.PACKED)
            found = receive_next_keys(found, queue, count, form)
            tma_store_wait(0)
            release(k.empty.index(mine))
        release(v.empty.index(mine))


@gluon.jit
def _add_step(it, step, sums, before, walk, keys, stepping, CUT: gl.constexpr, WHICH: gl.constexpr):
    """Step `it` of a walk: its part of dk and dv, and `dsᵀ` for `_sum_dq`. Returns the next step and the sums.

    CUT: a mask may cut its tile.
    """
    (
        form, q, dout, statistics, dscores, dscores_full, dscores_empty, listing, changing, window_left, window_right
    ) = stepping  # fmt: skip
    head, tile = step
    dk, dk_tail, dv, dv_tail = sums
    row, key, k_tile, k_tail, v_tile, v_tail = keys
    dtype: gl.constexpr = q.tiles.dtype
    WARPGROUPS: gl.constexpr = form.KEYS // ROWS
    QUERIES: gl.constexpr = form.M // form.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    zeros = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    stage, phase = place_of(before + it, q.STAGES)
    place, place_phase = place_of(before + it, form.HANDOVERS)
    q_tile, q_tail = chunks_of(q, stage)
    dout_tile, dout_tail = chunks_of(dout, stage)
    mbarrier.wait(q.full.index(stage), phase)
    for part in gl.static_range(form.PARTS):
        s = start_transposed(k_tile, k_tail, q_tile, q_tail, part * QUERIES, zeros, q.TAIL)
        s, lse = less_statistics(s, statistics, stage, 0, part * QUERIES, QUERIES, form)
        if form.TILE_K > 0:
            if part == 0:
                head, tile, kind = receive_step(listing, before + it, q, form)
        s = warpgroup_mma_wait(0, [s])
        query = tile * form.M + part * QUERIES
        seen = turned_tile(walk, tile, form) * form.M + part * QUERIES
        s, tanh = modified_scores(s, key, seen, head, walk, changing)
        if form.TILE_K > 0:
            if kind != FULL:
                column = tile * form.PARTS + part
                bits = load_bits(listing[0], kind, row, column, QUERIES, form.TILE_K, form.TILE_Q)
                s = where_visible(bits, s, float("-inf"))
        p = gl.exp2(s * changing[0] - lse[None, :])
        if CUT:
            if (tile < walk.full_begin) | (tile >= walk.full_end):
                p = mask_probs(p, key, query, walk.shift, walk.seq_k, window_left, window_right, form)
        probs = pack(p, dtype)
        if form.STATISTICS_MULTIPLIED and not CUT:
            probs = pin_pairs_before_product(probs)
        factors = probs
        if changing[1] is not None:
            factors = pack(p * (1.0 - tanh * tanh), dtype)
        if part == 0:
            mbarrier.wait(dout.full.index(stage), phase)
        dp = start_transposed(v_tile, v_tail, dout_tile, dout_tail, part * QUERIES, zeros, dout.TAIL)
        dp, delta = less_statistics(dp, statistics, stage, 1, part * QUERIES, QUERIES, form)
        dv, dv_tail = start_sum(probs, dout_tile, dout_tail, part * QUERIES, dv, dv_tail, dout.TAIL)
        dp = warpgroup_mma_wait(products_of_sum(dout), [dp])
        ds = pack(unpack(factors, dtype) * (dp - delta[None, :]), dtype)
        if part == 0:
            mbarrier.wait(dscores_empty.index(place), place_phase ^ 1)
        slice_of(dscores.index(place * WARPGROUPS + WHICH), part * QUERIES, QUERIES, 1).store(ds)
        if part == form.PARTS - 1:
            fence_async_shared()
            mbarrier.arrive(dscores_full.index(place), count=1)
        dk, dk_tail = start_sum(ds, q_tile, q_tail, part * QUERIES, dk, dk_tail, q.TAIL)
        dv, dv_tail = wait_sum(products_of_sum(q), dout, dv, dv_tail)
        if part == form.PARTS - 1:
            release(dout.empty.index(stage))
        dk, dk_tail = wait_sum(0, q, dk, dk_tail)
    release(q.empty.index(stage))
    return step_after(walk, head, tile), (dk, dk_tail, dv, dv_tail)


@gluon.jit
def _sum_dq(LOADS: gl.constexpr, summing, producing):
    """Multiplies each `ds` by the keys, 64 queries and `SUM_COLUMNS` columns at a time, and adds it to the sums.

    `LOADS`: it also does what `load_tiles` does else. The tile after the next takes the place of the one before, which
    the others have done with by the time that they give the next `ds`.
    """
    (
        form, k, dscores, dscores_full, dscores_empty, sums, turns_ptr, listing, queue, call
    ) = summing  # fmt: skip
    STAGES: gl.constexpr = producing[1][0].STAGES
    WARPGROUPS: gl.constexpr = form.KEYS // ROWS
    PARTS: gl.constexpr = form.M // ROWS
    WIDTH: gl.constexpr = k.WIDTH + k.TAIL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, form.SUM_COLUMNS, 16])
    zeros = gl.zeros([ROWS, form.SUM_COLUMNS], gl.float32, layout)
    window_left, window_right = call[9], call[10]
    count = 0
    before = 0
    if LOADS:
        _, found = find_keys(first_number(producing[9], form), (queue, count, producing[9], call), form)
    else:
        found = receive_keys(queue, count, form)
    while found[0] >= 0:
        walk = walk_of(found, call, form)
        if LOADS:
            for it in range(gl.minimum(walk.total, STAGES)):
                load_step(walk, it, before, producing)
            load_keys(walk, count, producing)
        # It does not wait for the keys: they are there when others give the first `ds`, and where no query sees them
        # they may be gone before it looks.
        first_keys, _ = keys_of(count, 0, form)
        number_before = 0
        head, tile = step_of(walk, 0)
        for it in range(walk.total):
            if LOADS:
                if (it > 0) & (it + STAGES - 1 < walk.total):
                    load_step(walk, it + STAGES - 1, before, producing)
            place, phase = place_of(before + it, form.HANDOVERS)
            number = walk.place + head * walk.line + turned_tile(walk, tile, form)
            if form.ORDERED and form.TILE_K == 0:
                turn_seen = gl.load(turns_ptr + number, volatile=True)
            mbarrier.wait(dscores_full.index(place), phase)
            if form.TILE_K > 0:
                at = (before + it) % (STAGES + form.HANDOVERS)
                number = (
                    walk.place
                    + read_tile_info(listing[1], at, TILE_HEAD) * walk.line
                    + read_tile_info(listing[1], at, TILE_NUMBER)
                )
                if form.ORDERED:
                    turn = read_tile_info(listing[1], at, TILE_TURN)
                    turn_seen = gl.load(turns_ptr + number, volatile=True)
            for part in gl.static_range(PARTS):
                for column in gl.static_range(0, WIDTH, form.SUM_COLUMNS):
                    dq = zeros
                    for which in gl.static_range(WARPGROUPS):
                        ds = dscores.index(place * WARPGROUPS + which).permute([1, 0])
                        if PARTS > 1:
                            ds = ds.slice(part * ROWS, ROWS)
                        k_tile = columns_of(k, first_keys + which, column, form.SUM_COLUMNS)
                        dq = warpgroup_mma(ds, k_tile, dq, use_acc=which > 0, is_async=True)
                    if form.ORDERED and part == 0 and column == 0:
                        if it > 0:  # while this product is computed
                            end_turn(turns_ptr + number_before)
                    dq = warpgroup_mma_wait(0, [dq])
                    if (part == PARTS - 1) and (column == WIDTH - form.SUM_COLUMNS):
                        release(dscores_empty.index(place))
                    if form.ORDERED and part == 0 and column == 0:
                        if form.TILE_K == 0:
                            turn = adders_before(walk, tile, window_left, window_right, form)
                        begin_turn(turns_ptr + number, turn_seen, turn)
                    add_to_sums(sums, dq, (number * PARTS + part) * WIDTH + column, form)
            head, tile = step_after(walk, head, tile)
            number_before = number
        if form.ORDERED:
            if walk.total > 0:
                end_turn(turns_ptr + number_before)
        before += walk.total
        count += 1
        found = receive_next_keys(found, queue, count, form)
    tma_store_wait(0)
