"""dq of the Hopper backward: a warpgroup multiplies `ds` by the keys, sums the products, and stores them.

Letters as in `pieces` and `backward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    thread_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.backward_loads import load_keys, load_step
from flashtile.ops.attention.hopper.backward_pieces import ROWS, by_rows, by_threads, columns_of
from flashtile.ops.attention.hopper.backward_tiles import (
    adding_tiles,
    dq_turn,
    first_tile_number,
    place_of_info,
    place_of_sums,
    publish_key_tile,
    receive_key_tile,
    receive_next_key_tile,
    step_after,
    step_of,
    visited_tile,
    work_of,
)
from flashtile.ops.attention.hopper.blocks import TILE_HEAD, TILE_NUMBER, TILE_TURN, read_tile_info
from flashtile.ops.attention.hopper.pieces import (
    HeadRows,
    Slot,
    await_stores,
    coordinates,
    matrix,
    product_layout,
    slice_of,
)


class DqSums(NamedTuple):
    """The float32 buffer in which dq is summed, of all query tiles, or of one line for each thread block
    (WHOLE_LINES). `desc` and `staging`: how TMA gets there, or None. `turns_ptr`: how many key tiles have added to the
    dq of each query tile; None where they add in no order."""

    sums_ptr: Any
    desc: Any
    staging: Any
    turns_ptr: Any


class BiasStores(NamedTuple):
    """How the gradient of a bias that no two scores share leaves: by TMA, through a place on chip for 64 queries and
    keys."""

    descriptor: Any
    place: Any


class Outputs(NamedTuple):
    """How what `sum_dq` makes leaves: dq by `DqSums` or `DqStores`, the gradient of a bias by `BiasStores`. None for
    those that a call does not need."""

    sums: Any
    stores: Any
    bias: Any


class DqStores(NamedTuple):
    """How dq leaves that no second key tile adds to: by TMA, through places on chip for 64 queries and the columns of a
    product. Both are `Chunks`; the tail is of the last columns, where these are fewer."""

    descriptors: Any
    places: Any


@gluon.jit
def make_sums_staging(desc, config):
    """The place on chip from which TMA adds."""
    TOGETHER: gl.constexpr = desc.block_shape[0]
    if TOGETHER == config.SUM_COLUMNS:
        staging = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    else:
        places: gl.constexpr = [config.SUM_COLUMNS // TOGETHER] + desc.block_shape
        staging = gl.allocate_shared_memory(gl.float32, places, desc.layout)
    return staging


@gluon.jit
def place_of_dq(desc, staging):
    """A place on chip from which TMA stores dq. `staging`: that of the sums, which are not added to meanwhile; None
    where nothing is summed."""
    if staging is None:
        place = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    else:
        place = reinterpret(staging, desc.dtype, desc.block_shape, desc.layout)
    return place


@gluon.jit
def sum_dq(LOADS: gl.constexpr, config, shared, descriptors, outputs, problem, blocks, counter_ptr):
    """Multiplies each `ds` by the keys, 64 queries and `SUM_COLUMNS` columns at a time, and adds the product to dq.

    Where queries see a single key tile the product is dq, and is stored as such. Where this thread block takes whole
    lines, it begins the product with the sum of the key tiles before, which it has kept, and stores dq with the last of
    them. `ds` is the gradient of a bias that no two scores share, and is stored too (`outputs.bias`).

    LOADS: it also does the work of `produce`. The query tile after the next takes the place of the one before, which
    the others no longer read by the time that they hand over the next `ds`.
    """
    k, dscores, dq_sums = shared.k, shared.dscores, outputs.sums
    STAGES: gl.constexpr = shared.q.STAGES
    PARTS: gl.constexpr = config.M // ROWS
    WIDTH: gl.constexpr = k.WIDTH + k.TAIL
    tiles_done = 0
    steps_done = 0
    if LOADS:
        first_number = first_tile_number(counter_ptr, problem, config)
        _, tile = publish_key_tile(first_number, tiles_done, shared.queue, counter_ptr, problem, blocks, config)
    else:
        tile = receive_key_tile(shared.queue, tiles_done, config)
    while tile.first_key >= 0:
        work = work_of(tile, problem, config)
        if LOADS:
            for index in range(gl.minimum(work.steps, STAGES)):
                load_step(work, index, steps_done, config, shared, descriptors, problem, counter_ptr)
            load_keys(work, tiles_done, config, shared, descriptors, problem)
        # It does not wait for the keys. They are there when the others hand over the first `ds`, and where no query
        # sees them they may be gone before it looks.
        key_slot = k.slot(tiles_done)
        number_before = 0
        step = step_of(work, 0, config)
        for index in range(work.steps):
            if LOADS:
                if (index > 0) & (index + STAGES - 1 < work.steps):
                    load_step(work, index + STAGES - 1, steps_done, config, shared, descriptors, problem, counter_ptr)
            slot = dscores.slot(steps_done + index)
            tile_visited = visited_tile(work, step.tile, config)
            head = step.head
            number = place_of_sums(work, head, tile_visited, config)
            if config.ORDERED and config.TILE_K == 0:
                turn_seen = gl.load(dq_sums.turns_ptr + number, volatile=True)
            sum_before, is_complete = None, None
            if problem.lone_tiles is not None:
                is_complete = tile_visited < problem.lone_tiles
            if config.WHOLE_LINES:
                first_tile, last_tile = adding_tiles(work, tile_visited, problem, config)
                begun = work.first_key // config.KEYS > first_tile
                is_complete = work.first_key // config.KEYS == last_tile
                sum_before = load_sum(dq_sums, number * PARTS * WIDTH, begun, 0, WIDTH, config)
            dscores.acquire(slot)
            if config.TILE_K > 0:
                place = place_of_info(steps_done + index, config, shared)
                head = read_tile_info(shared.tile_info, place, TILE_HEAD)
                tile_visited = read_tile_info(shared.tile_info, place, TILE_NUMBER)
                number = place_of_sums(work, head, tile_visited, config)
                if config.ORDERED:
                    turn = read_tile_info(shared.tile_info, place, TILE_TURN)
                    turn_seen = gl.load(dq_sums.turns_ptr + number, volatile=True)
            if outputs.bias is not None:
                store_bias_gradient(
                    outputs.bias, dscores, slot, work.sequence, work.first_head + head, tile_visited * config.M,
                    work.first_key, config,
                )  # fmt: skip
            for part in gl.static_range(PARTS):
                for column in gl.static_range(0, WIDTH, config.SUM_COLUMNS):
                    line = (number * PARTS + part) * WIDTH
                    if config.WHOLE_LINES and part + column > 0:
                        sum_before = load_sum(dq_sums, line, begun, column, WIDTH, config)
                    # [64, SUM_COLUMNS], or the tail
                    dq = start_dq(sum_before, slot, key_slot, part, column, config, shared)
                    if config.ORDERED and part == 0 and column == 0:
                        if index > 0:  # while this product is computed
                            pass_dq_turn(dq_sums.turns_ptr + number_before)
                    dq = warpgroup_mma_wait(0, [dq])
                    if (part == PARTS - 1) and (column + config.SUM_COLUMNS >= WIDTH):
                        dscores.release(slot)
                    if config.ORDERED and part == 0 and column == 0:
                        if config.TILE_K == 0:
                            turn = dq_turn(work, step.tile, problem, config)
                        wait_dq_turn(dq_sums.turns_ptr + number, turn_seen, turn)
                    rows = HeadRows(work.sequence, work.first_head + step.head, work.begin_q, work.seq_q)
                    hand_over_dq(outputs, dq, rows, tile_visited, part, line, column, is_complete, problem, config)
            step = step_after(work, step, config)
            number_before = number
        if config.ORDERED:
            if work.steps > 0:
                pass_dq_turn(dq_sums.turns_ptr + number_before)
        steps_done += work.steps
        tiles_done += 1
        tile = receive_next_key_tile(tile, shared.queue, tiles_done, config)
    tma_store_wait(0)


@gluon.jit
def start_dq(sum_before, slot, key_slot, part: gl.constexpr, column: gl.constexpr, config, shared):
    """Starts `ds k` of 64 queries, `part`, and `SUM_COLUMNS` columns from `column` on or as many as are left, over all
    keys of the tile. `key_slot`: of the first 64 keys. `sum_before`: what it is added to, or None."""
    k, dscores = shared.k, shared.dscores
    COLUMNS: gl.constexpr = min(config.SUM_COLUMNS, k.WIDTH + k.TAIL - column)
    dq = sum_before
    if sum_before is None:
        dq = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    for which in gl.static_range(dscores.WRITERS):
        ds = dscores.tile(slot, which).permute([1, 0])
        if config.M > ROWS:
            ds = ds.slice(part * ROWS, ROWS)
        k_tile = columns_of(k, Slot(key_slot.place + which, key_slot.phase), column, COLUMNS)
        dq = warpgroup_mma(ds, k_tile, dq, use_acc=config.WHOLE_LINES or which > 0, is_async=True)
    return dq


@gluon.jit
def hand_over_dq(outputs, dq, rows, tile, part, line, COLUMN: gl.constexpr, is_complete, problem, config):
    """Stores a `[64, columns]` block of dq, of part `part` of query tile `tile` of a head (`HeadRows`); or adds it to
    the sums, whose part begins at line `line` of 64 numbers. `is_complete`: whether no other key tile adds to it; None
    where one always does, or never does (SINGLE_KEY_TILE)."""
    row = tile * config.M + part * ROWS
    if config.SINGLE_KEY_TILE:
        store_dq(outputs.stores, dq * problem.scale, rows, row, COLUMN, config)
    elif is_complete is None:
        add_to_dq(outputs.sums, dq, line + COLUMN, config)
    else:
        if is_complete:
            store_dq(outputs.stores, dq * problem.scale, rows, row, COLUMN, config)
        elif config.WHOLE_LINES:
            keep_sum(outputs.sums, dq, line + COLUMN)
        else:
            add_to_dq(outputs.sums, dq, line + COLUMN, config)


@gluon.constexpr_function
def _kept_layout(COLUMNS):
    """The layout of a block of sums as they lie in memory. Each thread has those that it adds up."""
    eights = [[512 << bit] for bit in range((COLUMNS // 8).bit_length() - 1)]
    lanes = [[4], [8], [16], [32], [64]]
    return gl.DistributedLinearLayout([[1], [2], *eights], lanes, [[128], [256]], [], [ROWS.value * COLUMNS])


@gluon.jit
def load_sum(sums, line, begun, COLUMN: gl.constexpr, WIDTH: gl.constexpr, config):
    """A `[64, columns]` block of dq as this warpgroup has kept it (`keep_sum`), from column `COLUMN` of `WIDTH` on.
    Zeros unless `begun`. `line`: of 64 numbers, the first of the part."""
    COLUMNS: gl.constexpr = min(config.SUM_COLUMNS, WIDTH - COLUMN)
    place = gl.arange(0, ROWS * COLUMNS, _kept_layout(COLUMNS))
    numbers = gl.load(sums.sums_ptr + (line + COLUMN).to(gl.int64) * 64 + place, mask=begun, other=0.0)
    return gl.convert_layout(by_rows(numbers), product_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def keep_sum(sums, dq, line):
    """Stores a `[64, columns]` block of dq as `add_to_dq` would have added it to zeros. The threads that store it load
    it again, so nothing has to be waited for."""
    COLUMNS: gl.constexpr = dq.shape[1]
    layout: gl.constexpr = _kept_layout(COLUMNS)
    numbers = gl.convert_layout(gl.reshape(by_threads(dq), [ROWS * COLUMNS]), layout, assert_trivial=True)
    gl.store(sums.sums_ptr + line.to(gl.int64) * 64 + gl.arange(0, ROWS * COLUMNS, layout), numbers)


@gluon.jit
def add_to_dq(sums, dq, line, config):
    """Adds a `[64, columns]` block of dq to the sums, from line `line` of 64 numbers on, in the order of `by_threads`.
    So threads write four numbers side by side, into shared memory without bank conflicts."""
    BLOCKS: gl.constexpr = dq.shape[1] // 8
    if config.SUMS_BY_TMA:
        tma_store_wait(0)  # until the block before has been read from there
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
        places = reinterpret(sums.staging, gl.float32, [config.SUM_COLUMNS // 8, 4, 8, 4, 2, 2], plain)
        slice_of(places, 0, BLOCKS, 0).store(by_threads(dq))
        fence_async_shared()
        TOGETHER: gl.constexpr = sums.desc.block_shape[0]
        if TOGETHER == config.SUM_COLUMNS:
            tma_reduce_add(sums.desc, (line, 0), sums.staging)
        else:
            for some in gl.static_range(dq.shape[1] // TOGETHER):
                tma_reduce_add(sums.desc, (line + some * TOGETHER, 0), sums.staging.index(some))
    else:
        ADDITIONS: gl.constexpr = _additions(BLOCKS)
        OPERANDS: gl.constexpr = _addition_operands(BLOCKS)
        base = (sums.sums_ptr + line.to(gl.int64) * 64).to(gl.int64)
        gl.inline_asm_elementwise(ADDITIONS, OPERANDS, [dq, base], dtype=gl.int32, is_pure=False, pack=4 * BLOCKS)


@gluon.jit
def store_dq(stores, dq, rows, row, COLUMN: gl.constexpr, config):
    """Stores a `[64, columns]` block of dq, which no other key tile adds to, from `row` of a sequence (`HeadRows`) and
    column `COLUMN` on. Rows past the end are not written."""
    COLUMNS: gl.constexpr = dq.shape[1]
    tma_store_wait(0)  # until the block before has been read from there
    descriptor = stores.descriptors.main if COLUMNS == config.SUM_COLUMNS else stores.descriptors.tail
    place = stores.places.main if COLUMNS == config.SUM_COLUMNS else stores.places.tail
    matrix(place, ROWS, COLUMNS).store(dq.to(place.dtype))
    fence_async_shared()
    tma_store(descriptor, coordinates(rows, row, COLUMN, config.PACKED), place)


@gluon.jit
def store_bias_gradient(stores, dscores, slot, sequence, head, first_query, first_key, config):
    """Stores the `ds` of a step, from its transposed tiles, as the gradient of a head's bias."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    for which in gl.static_range(dscores.WRITERS):
        for part in gl.static_range(config.M // ROWS):
            ds = slice_of(dscores.tile(slot, which), part * ROWS, ROWS, 1).permute([1, 0]).load(layout)
            tma_store_wait(0)  # until the tile before has been read from there
            matrix(stores.place, ROWS, ROWS).store(ds)
            fence_async_shared()
            place = (sequence, head, first_query + part * ROWS, first_key + which * ROWS)
            tma_store(stores.descriptor, place, stores.place)


@gluon.constexpr_function
def _additions(BLOCKS):
    """PTX that adds four numbers at a time to the place of a thread. The barrier keeps ptxas from starting the next
    block's product before it: with two blocks in registers, all products would wait for one another (C7512)."""
    count = 4 * BLOCKS
    place = ["mov.u32 thread, %tid.x;", "and.b32 thread, thread, 127;", "mul.wide.u32 place, thread, 16;"]
    place += [f"add.u64 place, place, ${2 * count};"]
    numbers = [", ".join(f"${count + 4 * block + i}" for i in range(4)) for block in range(BLOCKS)]
    additions = [
        f"red.relaxed.gpu.global.add.v4.f32 [place + {2048 * block}], {{{four}}};" for block, four in enumerate(numbers)
    ]
    results = [f"mov.b32 ${i}, 0;" for i in range(count)]  # nobody reads them
    lines = [".reg .b32 thread;", ".reg .b64 place;", *place, *additions, "bar.warp.sync 0xffffffff;", *results]
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _addition_operands(BLOCKS):
    return ",".join(["=r"] * (4 * BLOCKS) + ["f"] * (4 * BLOCKS) + ["l"] * (4 * BLOCKS))


@gluon.jit
def wait_dq_turn(turn_ptr, seen, turn):
    """Waits until `turn` key tiles have added to the dq of a query tile. `seen`: how many had, a while ago."""
    while seen < turn:
        seen = gl.load(turn_ptr, volatile=True)


@gluon.jit
def pass_dq_turn(turn_ptr):
    """Lets the next key tile add, once what TMA has added is in the L2 cache, where all additions meet.

    So the turn needs no release. The fence of a release would wait for everything that the thread block has under way:
    16 % of all cycles.
    """
    await_stores()
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="relaxed")
