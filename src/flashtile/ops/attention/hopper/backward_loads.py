"""The producer of the Hopper backward: tiles of keys, and for each the tiles of queries that its walk visits.

Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import gl, gluon, mbarrier, tma_load
from flashtile.ops.attention.hopper.backward_pieces import ROWS, STATISTIC_COLUMNS
from flashtile.ops.attention.hopper.backward_walk import (
    find_keys,
    first_number,
    keys_of,
    meeting_point,
    number_after,
    step_of,
    turned_tile,
    walk_of,
)
from flashtile.ops.attention.hopper.blocks import (
    FULL,
    TILE_HEAD,
    TILE_KIND,
    TILE_NUMBER,
    TILE_TURN,
    line_entries,
    listed_rank,
    listed_tile,
    read_tile_info,
    write_tile_info,
)
from flashtile.ops.attention.hopper.pieces import Chunks, HeadRows, Slot, coordinates, place_of


@gluon.jit
def load_tiles(producing):
    """Finds the key tiles of this program, and loads what they need as soon as there is a place for it. Where there is
    one place for keys and values the first queries come before them, for the gradients of the tile before leave it
    last."""
    form, loading, _, _, _, _, _, _, queue, counter_ptr, call = producing
    q = loading[0]
    count = 0
    before = 0
    number, found = find_keys(first_number(counter_ptr, form), (queue, count, counter_ptr, call), form)
    while found[0] >= 0:
        walk = walk_of(found, call, form)
        if form.TILE_K > 0:
            _load_listed(walk, count, before, producing)
        else:
            ahead = 0
            if form.KEY_STAGES == 1:
                ahead = gl.minimum(walk.total, q.STAGES)
            for it in range(ahead):
                load_step(walk, it, before, producing)
            load_keys(walk, count, producing)
            for it in range(ahead, walk.total):
                load_step(walk, it, before, producing)
        count += 1
        before += walk.total
        number = number_after(number, counter_ptr, form)
        number, found = find_keys(number, (queue, count, counter_ptr, call), form)


@gluon.jit
def _load_listed(walk, count, before, producing):
    """The loads of a key tile with a block mask."""
    form, loading, call = producing[0], producing[1], producing[10]
    group, blocks = call[4], call[11]
    AHEAD: gl.constexpr = loading[0].STAGES if form.KEY_STAGES == 1 else 0
    it = 0
    for head in range(group):
        entry, last_entry = line_entries(blocks, walk.sequence, walk.first_head + head, walk.first // form.TILE_K)
        steps = (last_entry - entry) * (form.TILE_Q // form.M)
        for step in range(steps):
            if it == AHEAD:
                load_keys(walk, count, producing)
            turn = 0
            if form.ORDERED:
                step = steps - 1 - step
                rank = listed_rank(blocks, entry, step, form.M, form.TILE_Q)
                turn = rank * (form.TILE_K // form.KEYS) + walk.first % form.TILE_K // form.KEYS
            tile, kind = listed_tile(blocks, entry, step, True, form.M, form.TILE_Q)
            _load_queries(walk, form, loading, before + it, head, tile, kind, turn)
            it += 1
    if it <= AHEAD:
        load_keys(walk, count, producing)


@gluon.jit
def load_keys(walk, count, producing):
    """Loads keys and values of the `count`-th tile."""
    form, _, k, v, k_desc, k_tail_desc, v_desc, v_tail_desc, _, _, call = producing
    head = walk.head_kv // call[12]
    _load_rows_of_keys(k, Chunks(k_desc, k_tail_desc), walk, head, count, form)
    _load_rows_of_keys(v, Chunks(v_desc, v_tail_desc), walk, head, count, form)


@gluon.jit
def _load_rows_of_keys(ring, descriptors, walk, head, count, form):
    rows = HeadRows(walk.sequence, head, walk.begin_k, walk.seq_k)
    for which in gl.static_range(form.KEYS // ROWS):
        row = walk.first + which * ROWS
        place, phase = keys_of(count, which, form)
        ring.fill(Slot(place, phase), descriptors, rows, row, form.PACKED)


@gluon.jit
def load_step(walk, it, before, producing):
    """Loads queries, statistics and dout of step `it` of a walk without a list, before which there were `before`."""
    form, loading, counter_ptr, call = producing[0], producing[1], producing[9], producing[10]
    head, tile = step_of(walk, it)
    tile = turned_tile(walk, tile, form)
    if form.MEETS:
        if head == 0:
            found = (walk.first, walk.sequence, walk.head_kv)
            gl.store(meeting_point(counter_ptr, found, call), walk.line - 1 - tile)
    _load_queries(walk, form, loading, before + it, head, tile, FULL, 0)


@gluon.jit
def _load_queries(walk, form, loading, it, head, tile, kind, turn):
    """What step `it`, counted from the first tile of the program, needs of a query tile."""
    q, dout, statistics, q_desc, q_tail_desc, dout_desc, dout_tail_desc, statistics_desc, tile_info = loading
    stage, phase = place_of(it, q.STAGES)
    row = tile * form.M
    mbarrier.wait(q.empty.index(stage), phase ^ 1)
    if form.TILE_K > 0:
        place = it % (q.STAGES + form.HANDOVERS)
        write_tile_info(tile_info, place, TILE_NUMBER, tile)
        write_tile_info(tile_info, place, TILE_KIND, kind)
        write_tile_info(tile_info, place, TILE_HEAD, head)
        if form.ORDERED:
            write_tile_info(tile_info, place, TILE_TURN, turn)
    full = q.full.index(stage)
    STATISTICS: gl.constexpr = 4 * STATISTIC_COLUMNS if form.STATISTICS_MULTIPLIED else 8
    mbarrier.expect(full, form.M * (2 * (q.WIDTH + q.TAIL) + STATISTICS))
    rows = HeadRows(walk.sequence, walk.first_head + head, walk.begin_q, walk.seq_q)
    tma_load(q_desc, coordinates(rows, row, 0, form.PACKED), full, q.tiles.index(stage))
    if q.TAIL > 0:
        tma_load(q_tail_desc, coordinates(rows, row, q.WIDTH, form.PACKED), full, q.tail.index(stage))
    place = walk.place + head * walk.line + tile
    tma_load(statistics_desc, (statistics_desc.block_shape[0] * place, 0), full, statistics.index(stage))
    dout.fill(Slot(stage, phase), Chunks(dout_desc, dout_tail_desc), rows, row, form.PACKED)


@gluon.jit
def receive_step(listing, it, q, form):
    """Head (from the first one), query tile and kind of step `it`, counted from the first tile of the program."""
    tile_info = listing[1]
    place = it % (q.STAGES + form.HANDOVERS)
    tile = read_tile_info(tile_info, place, TILE_NUMBER)
    kind = read_tile_info(tile_info, place, TILE_KIND)
    return read_tile_info(tile_info, place, TILE_HEAD), tile, kind
