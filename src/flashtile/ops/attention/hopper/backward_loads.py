"""The loads of the Hopper backward: keys, values, queries, dout and statistics. A warp does nothing else (`produce`).

Letters as in `primitives` and `backward`.
"""

from flashtile._backends.gluon import gl, gluon, mbarrier, tma_load
from flashtile.ops.attention.hopper.backward_pieces import ROWS, STATISTIC_COLUMNS
from flashtile.ops.attention.hopper.backward_tiles import (
    Step,
    first_statistics_tile,
    info_slot,
    key_tile_step,
    line_steps,
    publish_key_tile,
    tile_work,
    visited_tile,
)
from flashtile.ops.attention.hopper.modifiers import (
    FULL,
    TILE_HEAD,
    TILE_KIND,
    TILE_NUMBER,
    TILE_TURN,
    bias_bytes,
    listed_rank,
    listed_tile,
    move_bias,
    write_tile_info,
)
from flashtile.ops.attention.hopper.primitives import HeadRows, coordinates
from flashtile.ops.attention.hopper.schedule import first_tile_number, next_tile_number, shared_progress


@gluon.jit
def produce(config, shared, descriptors, problem, blocks, counter_ptr):
    """Finds the key tiles of this thread block, and loads what they need as soon as there is a place for it.

    If there is one place for keys and values, the first queries come before them, because the gradients of the tile
    before leave through that place last.
    """
    tiles_done = 0
    steps_done = 0
    number = first_tile_number(counter_ptr, problem, config)
    number, tile = publish_key_tile(number, tiles_done, shared.queue, counter_ptr, problem, blocks, config)
    while tile.first_key >= 0:
        work = tile_work(tile, problem, config)
        if config.TILE_K > 0:
            _load_listed(work, tiles_done, steps_done, config, shared, descriptors, problem, blocks=blocks)
        else:
            ahead = 0
            if config.KEY_STAGES == 1:
                ahead = gl.minimum(work.steps, shared.q.STAGES)
            for index in range(ahead):
                load_step(work, index, steps_done, config, shared, descriptors, problem, counter_ptr=counter_ptr)
            load_keys(work, tiles_done, config, shared, descriptors, problem)
            for index in range(ahead, work.steps):
                load_step(work, index, steps_done, config, shared, descriptors, problem, counter_ptr=counter_ptr)
        tiles_done += 1
        steps_done += work.steps
        number = next_tile_number(number, counter_ptr, problem, config)
        number, tile = publish_key_tile(number, tiles_done, shared.queue, counter_ptr, problem, blocks, config)


@gluon.jit
def _load_listed(work, tiles_done, steps_done, config, shared, descriptors, problem, blocks):
    """The loads of a key tile with a block mask."""
    AHEAD: gl.constexpr = shared.q.STAGES if config.KEY_STAGES == 1 else 0
    index = 0
    for head in range(problem.group):
        entry, steps = line_steps(
            work.sequence, work.first_head + head, work.first_key, work.seq_q, problem, blocks, config
        )
        for step in range(steps):
            if index == AHEAD:
                load_keys(work, tiles_done, config, shared, descriptors, problem)
            turn = 0
            if config.ORDERED:
                step = steps - 1 - step
                rank = listed_rank(blocks, entry, step, config.M, config.TILE_Q)
                turn = rank * (config.TILE_K // config.KEYS) + work.first_key % config.TILE_K // config.KEYS
            tile, kind = listed_tile(blocks, entry, step, True, config.M, config.TILE_Q)
            load_queries(
                work, steps_done + index, Step(head, tile), kind, turn, config, shared, descriptors=descriptors
            )
            index += 1
    if index <= AHEAD:
        load_keys(work, tiles_done, config, shared, descriptors, problem)


@gluon.jit
def load_keys(work, tiles_done, config, shared, descriptors, problem):
    """Loads keys and values of a key tile, before which the thread block had `tiles_done`."""
    k_begin = work.begin_k
    v_begin = work.begin_k
    if config.KEY_LENGTHS and not config.PACKED:
        k_begin = work.sequence * problem.k_rows_apart
        v_begin = work.sequence * problem.v_rows_apart
    head = work.head_kv // problem.shares
    k_rows = HeadRows(work.sequence, head, k_begin, work.keys)
    v_rows = HeadRows(work.sequence, head, v_begin, work.keys)
    _load_all_keys(shared.k, descriptors.k, k_rows, work.first_key, tiles_done, config)
    _load_all_keys(shared.v, descriptors.v, v_rows, work.first_key, tiles_done, config)


@gluon.jit
def _load_all_keys(ring, descriptors, rows, first_key, tiles_done, config):
    for which in gl.static_range(config.KEYS // ROWS):
        slot = ring.slot(tiles_done, which)
        ring.fill(slot, descriptors, rows, first_key + which * ROWS, config.PACKED or config.KEY_LENGTHS)


@gluon.jit
def load_step(work, index, steps_done, config, shared, descriptors, problem, counter_ptr):
    """Loads queries, statistics and dout of step `index` of a key tile without a block mask. The thread block had
    `steps_done` steps before this key tile."""
    step = key_tile_step(work, index, config)
    tile = visited_tile(work, step.tile, config)
    if config.SHARES_PROGRESS:
        if step.head == 0:
            progress = shared_progress(counter_ptr, work.sequence, work.head_kv, problem)
            gl.store(progress, work.query_tiles - 1 - tile)
    load_queries(work, steps_done + index, Step(step.head, tile), FULL, 0, config, shared, descriptors=descriptors)


@gluon.jit
def load_queries(work, count, step, kind, turn, config, shared, descriptors):
    """Loads what the thread block's step number `count` needs of a query tile. The statistics complete the same barrier
    as the queries."""
    q = shared.q
    slot = q.slot(count)
    row = step.tile * config.M
    q.wait_empty(slot)
    if config.TILE_K > 0:
        place = info_slot(count, config, shared)
        write_tile_info(shared.tile_info, place, TILE_NUMBER, step.tile)
        write_tile_info(shared.tile_info, place, TILE_KIND, kind)
        write_tile_info(shared.tile_info, place, TILE_HEAD, step.head)
        if config.ORDERED:
            write_tile_info(shared.tile_info, place, TILE_TURN, turn)
    full = q.full.index(slot.place)
    STATISTICS: gl.constexpr = 4 * STATISTIC_COLUMNS if config.STATISTICS_MULTIPLIED else 8
    TILES: gl.constexpr = config.KEYS // ROWS
    mbarrier.expect(full, config.M * (2 * (q.WIDTH + q.TAIL) + STATISTICS) + bias_bytes(shared.bias, TILES))
    rows = HeadRows(work.sequence, work.first_head + step.head, work.begin_q, work.seq_q)
    tma_load(descriptors.q.main, coordinates(rows, row, 0, config.PACKED), full, q.tiles.index(slot.place))
    if q.TAIL > 0:
        tma_load(descriptors.q.tail, coordinates(rows, row, q.WIDTH, config.PACKED), full, q.tail.index(slot.place))
    number = first_statistics_tile(work, step.head) + step.tile
    statistics_row = shared.statistics.shape[1] * number
    tma_load(descriptors.statistics, (statistics_row, 0), full, shared.statistics.index(slot.place))
    if shared.bias is not None:
        move_bias(
            descriptors.bias, shared.bias, slot.place, work.sequence, rows.head, row, work.first_key, barrier=full,
            PARTS=TILES, ALONG_KEYS=True,
        )  # fmt: skip
    shared.dout.fill(shared.dout.slot(count), descriptors.dout, rows, row, config.PACKED)
