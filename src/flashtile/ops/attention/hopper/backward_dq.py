"""dq of the Hopper backward, and the kernels before and after the main one.

A warpgroup of the main kernel multiplies `ds` by the keys, sums the products, and stores them.

The first kernel writes the statistics of the queries, a copy of dout without rows that see no key where there may be
such rows, and the gradient of sinks. The last writes dq in its own dtype, where it was summed. Both are bound by device
memory.

Statistics and sums are stored by tiles of `M` query rows: tile `t` of a line (one head of a sequence; packed: one head)
is number `line · query_tiles + t`, where the tiles of packed sequence `b` begin at `cu_seqlens_q[b] // M + b`. Where
the kernels behind read TOGETHER tiles at once, these are slots of `M · TOGETHER` rows of so many tiles each. Letters as
in `primitives` and `backward`.
"""

from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import batch_row_head
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
from flashtile._backends.launch import Parameter, float32, int32, optional, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.parameters import SidePointers, side_parameters
from flashtile.ops.attention.hopper.backward_configs import tile_width
from flashtile.ops.attention.hopper.backward_loads import BUFFERS, load_keys, load_step
from flashtile.ops.attention.hopper.backward_pieces import (
    HIDDEN,
    ROWS,
    STATISTIC_COLUMNS,
    by_rows,
    by_threads,
    ring_columns,
)
from flashtile.ops.attention.hopper.backward_tiles import (
    adding_tiles,
    dq_sum_tile,
    dq_turn,
    info_slot,
    kept_sum_tile,
    key_tile_step,
    publish_key_tile,
    receive_key_tile,
    receive_next_key_tile,
    step_after,
    tile_work,
    visited_tile,
)
from flashtile.ops.attention.hopper.modifiers import (
    LOG2_E,
    TILE_HEAD,
    TILE_NUMBER,
    TILE_TURN,
    distance_shift,
    load_slope,
    near_shift,
    raised_to_near,
    read_tile_info,
)
from flashtile.ops.attention.hopper.primitives import (
    HeadRows,
    Slot,
    await_stores,
    coordinates,
    matrix,
    product_layout,
    tile_slice,
)
from flashtile.ops.attention.hopper.schedule import (
    BackwardSchedule,
    SequenceOrder,
    first_tile_number,
    is_short,
    locate_tile,
    sequence_rows,
    write_rank,
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
    """How the gradient of a bias that no two scores share leaves: by TMA, through a place for 64 queries and keys."""

    descriptor: Any
    place: Any


class Outputs(NamedTuple):
    """How results of `sum_dq` leave: dq by `DqSums` or `DqStores`, a bias's gradient by `BiasStores`, or None."""

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
def dq_staging(desc, staging):
    """A place on chip from which TMA stores dq: `staging` of the sums, None if nothing is summed."""
    if staging is None:
        place = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    else:
        place = reinterpret(staging, desc.dtype, desc.block_shape, desc.layout)
    return place


@gluon.jit
def sum_dq(LOADS: gl.constexpr, config, shared, descriptors, outputs, problem, blocks, counter_ptr):
    """Multiplies each `ds` by the keys, 64 queries and `SUM_COLUMNS` columns at a time, and adds the product to dq.

    If queries see a single key tile the product is dq, and is stored as such. If this thread block takes whole
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
        work = tile_work(tile, problem, config)
        if LOADS:
            for index in range(gl.minimum(work.steps, STAGES)):
                load_step(work, index, steps_done, config, shared, descriptors, problem, counter_ptr=counter_ptr)
            load_keys(work, tiles_done, config, shared, descriptors, problem)
        # It does not wait for the keys. They are there when the others hand over the first `ds`, and where no query
        # sees them they may be gone before it looks.
        key_slot = k.slot(tiles_done)
        number_before = 0
        step = key_tile_step(work, 0, config)
        for index in range(work.steps):
            if LOADS:
                if (index > 0) & (index + STAGES - 1 < work.steps):
                    load_step(
                        work, index + STAGES - 1, steps_done, config, shared, descriptors, problem,
                        counter_ptr=counter_ptr,
                    )  # fmt: skip
            slot = dscores.slot(steps_done + index)
            tile_visited = visited_tile(work, step.tile, config)
            head = step.head
            number = dq_sum_tile(work, head, tile_visited, config)
            if config.ORDERED and config.TILE_K == 0:
                turn_seen = gl.load(dq_sums.turns_ptr + number, volatile=True)
            sum_before, is_complete, is_kept = None, None, None
            if problem.lone_tiles is not None:
                is_complete = tile_visited < problem.lone_tiles
            if config.WHOLE_LINES or problem.short_rows is not None:
                first_tile, last_tile = adding_tiles(work, tile_visited, problem, config)
                begun = work.first_key // config.KEYS > first_tile
                is_complete = work.first_key // config.KEYS == last_tile
                if problem.short_rows is not None:
                    is_kept = is_short(work.seq_q, work.seq_k, problem.short_rows)
                    begun, is_complete = begun & is_kept, is_complete & is_kept
                    number = gl.where(is_kept, kept_sum_tile(work, head, tile_visited, problem, config), number)
                sum_before = load_sum(dq_sums, number * PARTS * WIDTH, begun, 0, WIDTH, config)
            dscores.acquire(slot)
            if config.TILE_K > 0:
                place = info_slot(steps_done + index, config, shared)
                head = read_tile_info(shared.tile_info, place, TILE_HEAD)
                tile_visited = read_tile_info(shared.tile_info, place, TILE_NUMBER)
                number = dq_sum_tile(work, head, tile_visited, config)
                if config.ORDERED:
                    turn = read_tile_info(shared.tile_info, place, TILE_TURN)
                    turn_seen = gl.load(dq_sums.turns_ptr + number, volatile=True)
            if outputs.bias is not None:
                store_bias_gradient(
                    outputs.bias, dscores, slot, work.sequence, work.first_head + head, tile_visited * config.M,
                    work.first_key, config=config,
                )  # fmt: skip
            for part in gl.static_range(PARTS):
                for column in gl.static_range(0, WIDTH, config.SUM_COLUMNS):
                    line = (number * PARTS + part) * WIDTH
                    if sum_before is not None and part + column > 0:
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
                    hand_over_dq(
                        outputs, dq, rows, tile_visited, part, line, column, is_complete=is_complete, is_kept=is_kept,
                        problem=problem, config=config,
                    )  # fmt: skip
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
    """Starts `ds k` of 64 queries, `part`, and at most `SUM_COLUMNS` columns from `column` on, over all keys of the
    tile. `key_slot`: of the first 64 keys. `sum_before`: what it is added to, or None."""
    k, dscores = shared.k, shared.dscores
    COLUMNS: gl.constexpr = min(config.SUM_COLUMNS, k.WIDTH + k.TAIL - column)
    dq = sum_before
    if sum_before is None:
        dq = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    for which in gl.static_range(dscores.WRITERS):
        ds = dscores.tile(slot, which).permute([1, 0])
        if config.M > ROWS:
            ds = ds.slice(part * ROWS, ROWS)
        k_tile = ring_columns(k, Slot(key_slot.place + which, key_slot.phase), column, COLUMNS)
        dq = warpgroup_mma(ds, k_tile, dq, use_acc=sum_before is not None or which > 0, is_async=True)
    return dq


@gluon.jit
def hand_over_dq(
    outputs, dq, rows, tile, part, line, COLUMN: gl.constexpr, is_complete, is_kept, problem, config
):  # fmt: skip
    """Stores a `[64, columns]` block of dq, of part `part` of query tile `tile` of a head (`HeadRows`); or adds it to
    the sums, whose part begins at line `line` of 64 numbers. `is_complete`: whether no other key tile adds to it; None
    where one always does, or never does (SINGLE_KEY_TILE). `is_kept`: whether the sequence is short, so
    that this thread block keeps the sum; None where none is."""
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
        elif is_kept is None:
            add_to_dq(outputs.sums, dq, line + COLUMN, config)
        else:
            if is_kept:
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
    """Stores a `[64, columns]` block of dq as `add_to_dq` would add it to zeros, for the same threads to load again."""
    COLUMNS: gl.constexpr = dq.shape[1]
    layout: gl.constexpr = _kept_layout(COLUMNS)
    numbers = gl.convert_layout(gl.reshape(by_threads(dq), [ROWS * COLUMNS]), layout, assert_trivial=True)
    gl.store(sums.sums_ptr + line.to(gl.int64) * 64 + gl.arange(0, ROWS * COLUMNS, layout), numbers)


@gluon.jit
def add_to_dq(sums, dq, line, config):
    """Adds a `[64, columns]` block of dq to the sums, from line `line` of 64 numbers on, in the order of `by_threads`,
    so threads write four numbers side by side, into shared memory without bank conflicts."""
    BLOCKS: gl.constexpr = dq.shape[1] // 8
    if config.SUMS_BY_TMA:
        tma_store_wait(0)  # until the block before has been read from there
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
        places = reinterpret(sums.staging, gl.float32, [config.SUM_COLUMNS // 8, 4, 8, 4, 2, 2], plain)
        tile_slice(places, 0, BLOCKS, 0).store(by_threads(dq))
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
            ds = tile_slice(dscores.tile(slot, which), part * ROWS, ROWS, 1).permute([1, 0]).load(layout)
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
    """Lets the next key tile add, once what TMA has added is in the L2 cache, where all additions meet. A release's
    fence would wait for all that the thread block has under way: 16 % of all cycles."""
    await_stores()
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="relaxed")


@gluon.constexpr_function
def _row_layout(WIDTH):
    """Sixteen bytes a thread, rows side by side."""
    lanes = min(32, WIDTH // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _at_least(WIDTH):
    """The next power of two."""
    return 1 << (WIDTH - 1).bit_length()


@gluon.constexpr_function
def _padded(HEAD_DIM):
    """Elements from a row of dq to the next: `backward_loads.padded_strides`."""
    return -(-HEAD_DIM // 8) * 8


@gluon.constexpr_function
def _columns_together(WIDTH):
    """The largest power of two that divides the columns of the sums."""
    return WIDTH & -WIDTH


@gluon.jit
def attention_begin_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, statistics_ptr, cleared_ptr, turns_ptr, counter_ptr, masked_dout_ptr,
    row_logits_ptr, logit_sums_ptr, cu_seqlens_q_ptr, row_statistics_ptr, side, order,
    stride_dout_batch, stride_dout_row, stride_dout_head, batch, heads, rows_q, query_tiles, lone_tiles, short_rows,
    lse_unit, side_numbers, near_rows_k,
    HEAD_DIM_V: gl.constexpr, E: gl.constexpr, D: gl.constexpr, M: gl.constexpr,
    PACKED: gl.constexpr, HAS_DLSE: gl.constexpr, ORDERED: gl.constexpr, SHARES_PROGRESS: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Writes lse and `delta = rowsum(dout · out) - dlse` of one tile, as `backward_pieces.subtract_statistic` reads
    them: lse in units of log2. If they are operands, it writes both in parts and with the opposite sign (`lse_unit`:
    minus one unit of log2, in units of scores).

    It also writes zeros where thread blocks will add up the dq of the tile (`cleared_ptr`, None where they do not; they
    do not for the first `lone_tiles` of a line, and in short sequences of `short_rows`), where key tiles count their
    turns to do so, and where thread blocks count the tiles that they take and say where they are.

    `masked_dout_ptr`: where rows may see no key, dout for the main kernel, in the layout of out, with zeros in these
    rows. Their weights of 0 would not stop NaN there. `row_logits_ptr`: the sinks that lse counts, or None.
    `logit_sums_ptr`: the tile's part of minus their gradient. `row_statistics_ptr`: `[*lse.shape, 4]`, where the
    portable kernel of the bias's gradient reads what its `row_statistics_tile` stores; None where nobody wants that.
    `side`, `side_numbers`, `near_rows_k`: the side inputs and the number of keys, for ALiBi; all None without it.
    `order`: the `SequenceOrder` by which the main kernel of a packed call goes; None of others."""
    number = gl.program_id(0)
    if number == 0:
        gl.store(counter_ptr, 0)
    if SHARES_PROGRESS:
        if number < batch * heads:
            gl.store(counter_ptr + 1 + number, 0)
    if order is not None:
        if number <= batch:
            write_rank(order, number, batch, cu_seqlens_q_ptr, rows_q, short_rows)
    tile = number % query_tiles
    line = number // query_tiles
    cu_seqlens_k_ptr, rows_k = cu_seqlens_q_ptr, rows_q
    if short_rows is not None:
        cu_seqlens_k_ptr, rows_k = order.cu_seqlens_k_ptr, order.rows_k
    sequence, head, first, begin, rows, _, seq_k = locate_tile(
        tile // TOGETHER, line, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, other_rows=rows_k,
        ROWS=M * TOGETHER, PACKED=PACKED,
    )  # fmt: skip
    first += tile % TOGETHER * M
    WIDTH: gl.constexpr = _at_least(E)
    layout: gl.constexpr = _row_layout(WIDTH)
    row = first + gl.arange(0, M, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (row < rows)[:, None] & (column < HEAD_DIM_V)[None, :]
    out_row = (sequence.to(gl.int64) * rows_q if not PACKED else begin.to(gl.int64)) + row
    elements = (out_row * heads + head)[:, None] * HEAD_DIM_V + column[None, :]
    out = gl.load(out_ptr + elements, mask=mask, other=0.0)
    dout_row = (begin.to(gl.int64) if PACKED else gl.to_tensor(0).to(gl.int64)) + row
    dout_base = dout_ptr + head * stride_dout_head.to(gl.int64)
    if not PACKED:
        dout_base += sequence * stride_dout_batch.to(gl.int64)
    dout = gl.load(dout_base + (dout_row * stride_dout_row)[:, None] + column[None, :], mask=mask, other=0.0)
    delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)

    numbers = (head.to(gl.int64) if PACKED else line.to(gl.int64)) * rows_q + (begin if PACKED else 0) + row
    lse = gl.load(lse_ptr + numbers, mask=row < rows, other=float("-inf"))
    if masked_dout_ptr is not None:
        hidden = lse == float("-inf")
        if row_logits_ptr is not None:
            # A row with tiny weights may look like one that sees its sink alone, and has gradients, so finite numbers
            # stay, which do no harm. Because out is 0, delta is NaN where dout is not finite.
            alone = _sees_logit_alone(lse, gl.load(row_logits_ptr + head), out)
            hidden = hidden | (alone & (delta != delta))
        delta = gl.where(hidden, 0.0, delta)
        gl.store(masked_dout_ptr + elements, gl.where(hidden[:, None], 0.0, dout), mask=mask)
    seen = lse > float("-inf")
    if HAS_DLSE:
        # A row that saw no key has no gradient, even where its dlse is NaN (as when two such rows are merged).
        delta -= gl.where(seen, gl.load(dlse_ptr + numbers, mask=row < rows, other=0.0), 0.0)
    if row_logits_ptr is not None:
        # Rows past the last sequence have no sink, whatever their delta is.
        weight = gl.where(lse == float("-inf"), 0.0, gl.exp2((gl.load(row_logits_ptr + head) - lse) * LOG2_E))
        gl.store(logit_sums_ptr + number, gl.sum(gl.where(weight == 0.0, 0.0, weight * delta), 0))
        if HAS_DLSE and masked_dout_ptr is not None:
            # The gradient of lse in a row that sees its sink alone belongs to the sink, to nobody else.
            delta = gl.where(alone, gl.where(gl.abs(delta) < float("inf"), delta, 0.0), delta)
    near_lse = lse
    if near_rows_k is not None:
        seq_k, keys = _count_keys(sequence, batch, side, near_rows_k, PACKED)
        slope = load_slope(side, side_numbers, sequence, head, sequence < batch)
        shift = distance_shift(rows, seq_k, side_numbers.origin)
        near_lse = raised_to_near(lse, slope, shift, near_shift(shift, first, keys, M), 1)
    if row_statistics_ptr is not None:
        gl.store(row_statistics_ptr + 4 * numbers, _in_log2(lse), mask=row < rows)
        gl.store(row_statistics_ptr + 4 * numbers + 1, delta, mask=row < rows)
        if near_rows_k is not None:
            by_row = raised_to_near(lse, slope, shift, near_shift(shift, row, keys, 1), 1)
            gl.store(row_statistics_ptr + 4 * numbers + 3, _in_log2(by_row), mask=row < rows)
    lse = _in_log2(near_lse)
    if lse_unit is not None:
        base = statistics_ptr + number.to(gl.int64) * (2 * M * STATISTIC_COLUMNS)
        _store_parts(base, lse * lse_unit, HIDDEN)
        _store_parts(base + M * STATISTIC_COLUMNS, -delta, 0.0)
    else:
        within = row - first
        place = within // 16 * 16 + within % 8 // 2 * 4 + within % 16 // 8 * 2 + within % 2
        base = statistics_ptr + number.to(gl.int64) * (2 * M)
        gl.store(base + place, lse)
        gl.store(base + M + place, delta)

    if ORDERED:
        gl.store(turns_ptr + number, 0)
    if cleared_ptr is not None:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        BLOCK: gl.constexpr = M * _columns_together(D)
        summed = tile >= lone_tiles
        if short_rows is not None:
            summed = not is_short(rows, seq_k, short_rows)
        if summed:
            for block in gl.static_range(0, M * D, BLOCK):
                sums = cleared_ptr + number.to(gl.int64) * (M * D) + block + gl.arange(0, BLOCK, flat)
                gl.store(sums, gl.zeros([BLOCK], gl.float32, flat))


@gluon.jit
def _in_log2(lse):
    """lse in units of log2; +inf for rows that saw no key, so that their weights are 0. NaN stays NaN."""
    return gl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@gluon.jit
def _count_keys(sequence, batch, side, rows_k, PACKED: gl.constexpr):
    """How many keys a sequence has, and how many of these may be visible."""
    seq_k = rows_k
    if PACKED:
        _, seq_k = sequence_rows(side.cu_seqlens_k, sequence, batch, rows_k)
    keys = seq_k
    if side.key_lengths is not None:
        counted = gl.load(side.key_lengths + sequence, mask=sequence < batch, other=0)
        keys = gl.maximum(gl.minimum(counted, seq_k), 0).to(gl.int32)
    return seq_k, keys


@gluon.jit
def _store_parts(base, numbers, FOURTH: gl.constexpr):
    """Stores each number as the three bfloat16 that it is the sum of; one that is not finite as itself and zeros. Then
    comes `FOURTH`, and zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    numbers = gl.convert_layout(numbers, gl.SliceLayout(1, layout))
    high = numbers.to(gl.bfloat16)
    finite = gl.abs(high.to(gl.float32)) < float("inf")
    left = gl.where(finite, numbers - high.to(gl.float32), 0.0)
    middle = left.to(gl.bfloat16)
    low = (left - middle.to(gl.float32)).to(gl.bfloat16)
    column = gl.arange(0, STATISTIC_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    parts = gl.where(column == 0, high[:, None], gl.where(column == 1, middle[:, None], low[:, None]))
    parts = gl.where(column < 3, parts, gl.where(column == 3, FOURTH, 0.0))
    row = gl.arange(0, numbers.shape[0], gl.SliceLayout(1, layout))
    gl.store(base + row[:, None] * STATISTIC_COLUMNS + column, parts.to(gl.bfloat16))


@gluon.jit
def _sees_logit_alone(lse, logit, out):
    """Whether rows `[M]` see their sink alone: they have `out = 0` and the sink as their lse, up to rounding."""
    near = gl.abs(logit - lse) <= 1e-6 + 1e-6 * gl.abs(lse)
    return near & (gl.sum(gl.abs(out.to(gl.float32)), 1) == 0.0)


@gluon.constexpr_function
def _sum_row_layout(COLUMNS):
    """The layout of a block of sums in which each thread reads eight columns of two rows, 8 apart, which lie side by
    side (`backward_pieces.by_threads`), from 64 columns on also the same of the rows 4 below. It reads four of 16
    columns."""
    if COLUMNS == 16:
        registers, lanes = [[1], [2], [4]], [[8], [512], [16], [32], [64]]
    elif COLUMNS == 32:
        registers, lanes = [[1], [2], [4], [8]], [[512], [1024], [16], [32], [64]]
    else:
        registers = [[1], [2], [4], [8], [64], *([64 << bit] for bit in range(6, (COLUMNS - 1).bit_length()))]
        lanes = [[512], [1024], [2048], [16], [32]]
    return gl.DistributedLinearLayout(registers, lanes, [[128], [256]], [], [ROWS.value * COLUMNS])


@gluon.constexpr_function
def _dq_row_layout(COLUMNS):
    """The same layout by rows and columns, in the order in which a thread writes."""
    if COLUMNS == 16:
        registers, lanes = [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    elif COLUMNS == 32:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    else:
        more = [[0, 1 << bit] for bit in range(6, (COLUMNS - 1).bit_length())]
        registers = [[0, 1], [0, 2], [0, 4], [8, 0], [4, 0], *more]
        lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, COLUMNS])


@gluon.jit
def attention_end_kernel(
    sums_ptr, dq_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, rows_k, query_tiles, lone_tiles,
    short_rows, scale,
    HEAD_DIM: gl.constexpr, D: gl.constexpr, M: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Writes `dq = scale · sums` of one tile, but not of the first `lone_tiles` of a line and of short sequences
    (`short_rows`); rows of dq are padded."""
    number = gl.program_id(0)
    tile = number % query_tiles
    line = number // query_tiles
    if short_rows is None:
        cu_seqlens_k_ptr, rows_k = cu_seqlens_q_ptr, rows_q
    sequence, head, first, begin, rows, _, seq_k = locate_tile(
        tile, line, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads, rows_q, other_rows=rows_k, ROWS=M, PACKED=PACKED
    )
    COLUMNS: gl.constexpr = _columns_together(D)
    target: gl.constexpr = _dq_row_layout(COLUMNS)
    place = gl.arange(0, ROWS * COLUMNS, _sum_row_layout(COLUMNS))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, target))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, target))[None, :]
    summed = tile >= lone_tiles
    if short_rows is not None:
        summed = not is_short(rows, seq_k, short_rows)
    if summed:
        for part in gl.static_range(M // ROWS):
            for left in gl.static_range(0, D, COLUMNS):
                sums = gl.load(sums_ptr + (number.to(gl.int64) * M + part * ROWS) * D + left * ROWS + place)
                dq = gl.convert_layout(by_rows(sums), target, assert_trivial=True)
                mine = first + part * ROWS + row
                dq_row = (begin.to(gl.int64) if PACKED else sequence.to(gl.int64) * rows_q) + mine
                gl.store(
                    dq_ptr + (dq_row * heads + head) * _padded(HEAD_DIM) + (column + left),
                    (dq * scale).to(dq_ptr.dtype.element_ty),
                    mask=(mine < rows) & (column + left < HEAD_DIM),
                )


def begin_kernel(
    call: Call,
    tile: int,
    query_tiles: int,
    *,
    schedule: BackwardSchedule | None = None,
    row_statistics: bool = False,
    together: int = 1,
) -> Kernel:
    """The kernel of statistics, in programs of `tile` queries. `query_tiles`: of a head; of a packed call the slots.
    `schedule`: of the kernel that sums dq; None: each gradient has a kernel. `row_statistics`: the portable kernel of a
    bias's gradient reads them too. `together`: TOGETHER."""
    assert call.dout is not None
    strides = batch_row_head(call.out_shape, call.dout.strides)
    statistics, tensor = pointer_to(torch.float32), pointer_to(call.dtype, 16)
    adds_up, ordered = (False, False) if schedule is None else (schedule.adds_up, schedule.is_ordered(call))
    # Minus one unit of log2 in units of scores, where statistics are operands.
    multiplied = schedule is not None and schedule.config.statistics_multiplied
    unit = -1 / (call.spec.scale * LOG2_E.value) if multiplied else None
    # Multiples of 16 bytes.
    stride_type, multiple = "i64" if max(strides) >= 2**31 else "i32", 16 // call.dtype.itemsize
    parameters = {
        **dict.fromkeys(("out_ptr", "dout_ptr"), tensor),
        "lse_ptr": statistics,
        "dlse_ptr": optional(call.has_dlse, statistics),
        "statistics_ptr": pointer_to(torch.float32 if unit is None else torch.bfloat16, 16),
        "cleared_ptr": optional(adds_up, pointer_to(torch.float32, 16)),
        "turns_ptr": optional(ordered, pointer_to(torch.int32)),
        "counter_ptr": pointer_to(torch.int32),
        "masked_dout_ptr": optional(call.may_hide_rows, tensor),
        **dict.fromkeys(("row_logits_ptr", "logit_sums_ptr"), optional(call.aux.has_row_logit, statistics)),
        "cu_seqlens_q_ptr": _offsets(call.aux.cu_seqlens_q),
        "row_statistics_ptr": optional(row_statistics, statistics),
        **_near_keys(call, covered=schedule is not None and schedule.is_covered(call)),
        "order": _sequence_order(call, schedule),
        **{
            f"stride_dout_{dimension}": Parameter(stride_type, multiple, stride)
            for dimension, stride in zip(("batch", "row", "head"), strides)
        },
        "batch": int32(call.batch),
        "heads": int32(call.heads),
        "rows_q": int32(call.rows_q),
        "query_tiles": int32(query_tiles),
        "lone_tiles": int32(0 if schedule is None else schedule.lone_tiles),
        "short_rows": int32(None if schedule is None else schedule.short_rows or None),
        "lse_unit": float32(unit),
    }
    head_dim, head_dim_v = call.head_dims
    constants = {
        "HEAD_DIM_V": head_dim_v,
        "E": tile_width(head_dim_v),
        "D": tile_width(head_dim),
        "M": tile,
        "PACKED": call.packed,
        "HAS_DLSE": call.has_dlse,
        "ORDERED": ordered,
        "SHARES_PROGRESS": schedule is not None and schedule.loops.SHARES_PROGRESS,
        "TOGETHER": together,
    }
    return Kernel(attention_begin_kernel, parameters, constants, query_tiles * call.lines, BUFFERS)


def _near_keys(call: Call, covered: bool) -> dict[str, Any]:
    """The side inputs as the kernel of statistics takes them, which reads those alone that ALiBi needs."""
    side, present = side_parameters(call, covered=covered, by_column=True, staged=True), call.aux.by_distance
    return {
        "side": SidePointers._make(optional(present, each) for each in side.pointers),
        "side_numbers": side.numbers if present else None,
        "near_rows_k": int32(call.rows_k if present else None),
    }


def _sequence_order(call: Call, schedule: BackwardSchedule | None) -> SequenceOrder | None:
    """The order in which the main kernel takes the sequences of a packed call."""
    if schedule is None or not call.packed:
        return None
    return SequenceOrder(
        pointer_to(torch.int32), _offsets(call.aux.cu_seqlens_k), int32(call.rows_k), int32(schedule.config.block_n)
    )


def end_kernel(call: Call, schedule: BackwardSchedule) -> Kernel:
    """The kernel that rounds the sums of dq."""
    short = schedule.short_rows > 0
    parameters = {
        "sums_ptr": pointer_to(torch.float32, 16),
        "dq_ptr": pointer_to(call.dtype, 16),
        "cu_seqlens_q_ptr": _offsets(call.aux.cu_seqlens_q),
        "cu_seqlens_k_ptr": optional(short, _offsets(call.aux.cu_seqlens_k)),
        "batch": int32(call.batch),
        "heads": int32(call.heads),
        "rows_q": int32(call.rows_q),
        "rows_k": int32(call.rows_k if short else None),
        "query_tiles": int32(schedule.query_tiles),
        "lone_tiles": int32(schedule.lone_tiles),
        "short_rows": int32(schedule.short_rows or None),
        "scale": float32(call.spec.scale),
    }
    head_dim, _ = call.head_dims
    constants = {
        "HEAD_DIM": head_dim,
        "D": tile_width(head_dim),
        "M": schedule.config.block_m,
        "PACKED": call.packed,
    }
    return Kernel(attention_end_kernel, parameters, constants, schedule.query_tiles * call.lines)


def _offsets(facts: TensorFacts | None) -> Parameter:
    return pointer_to(None if facts is None else facts.dtype)
