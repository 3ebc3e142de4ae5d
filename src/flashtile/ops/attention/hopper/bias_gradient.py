"""The gradient of a bias on Hopper: the scores' gradients, computed once more and summed over all that share an entry.

A tile of the bias, of up to three times 64 keys and one or two times 64 queries, belongs to PARTS thread blocks. Each
walks over its part of the sequences and heads that share the tile, in a fixed order: no atomics, and no buffer larger
than PARTS times the bias. For each sequence and head it computes, with the pieces of the main kernel (letters as in
`backward`)::

    sᵀ  = k qᵀ                  [N, M]
    pᵀ  = exp2(c·sᵀ - lse)      [N, M]
    dpᵀ = v doutᵀ               [N, M]
    dbᵀ += pᵀ · (dpᵀ - delta)   [N, M]

Nothing stays on chip from one step to the next but the bias and the sums, so the L2 cache is the limit: with D columns
a thread block reads 8·D bytes for each key and each query of a tile. That is why tiles are as large as registers allow.

Roles: `sum_tile`, up to three times, for 64 keys each, and `load_tiles`, one warp. They wait for one another only
through the rings in `Shared`.

In packed calls and with a block mask some sequences and heads have nothing to add to a tile: it lies past their end, or
the mask hides it. `load_tiles` finds those that have, and publishes each to the others, as the main kernel's producer
publishes key tiles. The order stays fixed.

A score function's derivative is no part of this, because the bias is added after the function. The portable kernel
(`gpu.bias_gradient`) serves biases that TMA does not bring.
"""

import math
from typing import Any, NamedTuple

import torch

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma_wait
from flashtile._backends.launch import ABSENT, named_constants, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import side_parameters
from flashtile.ops.attention.gpu.reductions import BiasWork
from flashtile.ops.attention.hopper.backward import Descriptors, Shared, score_change
from flashtile.ops.attention.hopper.backward_configs import BIAS_QUERIES, bias_config, bias_programs_together
from flashtile.ops.attention.hopper.backward_loads import BUFFERS, load_keys, load_queries, moved_tensors
from flashtile.ops.attention.hopper.backward_pieces import (
    DELTA,
    LSE,
    ROWS,
    query_tile_ranges,
    score_gradients,
    start_transposed,
    subtract_statistic,
)
from flashtile.ops.attention.hopper.backward_tiles import (
    KernelConfig,
    KeyTile,
    Problem,
    Step,
    compute_p,
    group_head_dropout,
    listed_step,
    load_tables,
    tile_work,
    with_dropout,
)
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.modifiers import (
    EMPTY,
    FULL,
    BlockLists,
    MovedBias,
    bias_bytes,
    line_entries,
    load_tile_kind,
    make_bias_tiles,
    make_tile_info,
    move_bias,
)
from flashtile.ops.attention.hopper.primitives import (
    Chunks,
    Slot,
    barriers,
    hidden_zero,
    make_ring,
    make_tile_queue,
    publish_tile,
    receive_tile,
)
from flashtile.ops.attention.hopper.schedule import NO_LOOPS, BackwardSchedule, sequence_rows
from flashtile.ops.attention.spec import NOTHING_WANTED


class BiasTile(NamedTuple):
    """A thread block's tile of the bias: its place among the parts, sequences and heads of the bias, its first key and
    its first tile of queries. Sequences and heads that share it have numbers, `shared_heads` for each sequence. The
    thread block takes the numbers from `begin` to `end`."""

    part: Any
    sequence: Any
    head: Any
    first_key: Any
    first_query_tile: Any
    begin: Any
    end: Any
    shared_heads: Any


class Sharer(NamedTuple):
    """A sequence and query head that share a tile of the bias (negative after the last), and packed rows."""

    sequence: Any
    head: Any
    begin_q: Any = 0
    seq_q: Any = 0
    begin_k: Any = 0
    seq_k: Any = 0


class BiasOnChip(NamedTuple):
    """The tiles of the bias, and the barrier that says that they are there."""

    tiles: Any
    full: Any


@gluon.jit
def attention_bias_gradient_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, dout_desc, dout_tail_desc, statistics_desc,
    bias_desc, gradient_ptr, problem, constants, loops, work,
    KEYS: gl.constexpr, M: gl.constexpr, QUERY_TILES: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr,
    SHARED_BY_HEADS: gl.constexpr,
):  # fmt: skip
    """Arguments as of the main kernel. `gradient_ptr`: `[parts, batch, heads, rows, columns]`, the sizes of the bias
    (`work`, a `reductions.WorkNumbers`). `QUERY_TILES`: tiles of M queries of a thread block, one or two; one if
    `_leaves_out`. `SHARED_BY_HEADS`: the bias has one head, and the call has more."""
    WARPGROUPS: gl.constexpr = KEYS // ROWS
    config = recomputing_config(
        problem, constants, loops, KEYS, M, KEY_STAGES, PERSISTENT=False, PACKED=PACKED, TOP_LEFT=TOP_LEFT
    )
    descriptors = Descriptors(
        q=Chunks(q_desc, q_tail_desc),
        k=Chunks(k_desc, k_tail_desc),
        v=Chunks(v_desc, v_tail_desc),
        dout=Chunks(dout_desc, dout_tail_desc),
        statistics=statistics_desc,
        dk=None,
        dv=None,
        bias=MovedBias(bias_desc, problem.numbers.bias),
    )
    statistics = gl.allocate_shared_memory(
        statistics_desc.dtype, [STAGES] + statistics_desc.block_shape, statistics_desc.layout
    )
    tile_info, queue = None, None
    if config.TILE_K > 0:
        tile_info = make_tile_info(STAGES)
    if _leaves_out(config):
        gl.static_assert(QUERY_TILES == 1)
        queue = make_tile_queue(WARPGROUPS, False)
    # The bias comes once, not with each tile of queries.
    shared = Shared(
        q=make_ring(descriptors.q, STAGES, WARPGROUPS),
        k=make_ring(descriptors.k, KEY_STAGES, 1, WARPGROUPS),
        v=make_ring(descriptors.v, KEY_STAGES, 1, WARPGROUPS),
        dout=make_ring(descriptors.dout, STAGES, WARPGROUPS),
        statistics=statistics,
        bias=None,
        dscores=None,
        probs=None,
        derivatives=None,
        tile_info=tile_info,
        queue=queue,
    )
    bias = BiasOnChip(make_bias_tiles(bias_desc, QUERY_TILES, WARPGROUPS), barriers(1, 1))
    tile = _own_tile(problem, work, config, QUERY_TILES)
    fence_async_shared()
    SHARES: gl.constexpr = SHARED_BY_HEADS
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (sum_tile, (0, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (sum_tile, (1, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (sum_tile, (2, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (load_tiles, (QUERY_TILES, SHARES, tile, config, shared, bias, descriptors, problem)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (sum_tile, (0, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (sum_tile, (1, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (load_tiles, (QUERY_TILES, SHARES, tile, config, shared, bias, descriptors, problem)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (sum_tile, (0, QUERY_TILES, SHARES, tile, config, shared, bias, gradient_ptr, problem, work)),
                (load_tiles, (QUERY_TILES, SHARES, tile, config, shared, bias, descriptors, problem)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )


@gluon.jit
def recomputing_config(
    problem, constants, loops, KEYS: gl.constexpr, M: gl.constexpr, KEY_STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
    PACKED: gl.constexpr, TOP_LEFT: gl.constexpr,
):  # fmt: skip
    """The configuration of a kernel that computes the scores' gradients once more, but no dq, dk and dv."""
    return KernelConfig(
        KEYS=KEYS,
        M=M,
        PARTS=1,
        SUM_COLUMNS=0,
        DSCORE_STAGES=0,
        KEY_STAGES=KEY_STAGES,
        PERSISTENT=PERSISTENT,
        ORDERED=False,
        REVERSES_LINES=False,
        PACKED=PACKED,
        HAS_LEFT=constants.HAS_LEFT,
        HAS_RIGHT=constants.HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        MASKS=loops.MASKS,
        MASKS_LAST=False,
        REVERSES_WALKS=loops.REVERSES_WALKS,
        SHARES_PROGRESS=False,
        ROTATES_WALKS=loops.ROTATES_WALKS,
        SINGLE_KEY_TILE=False,
        WHOLE_LINES=False,
        STATISTICS_MULTIPLIED=False,
        SUMS_BY_TMA=False,
        TILE_Q=constants.TILE_Q,
        TILE_K=constants.TILE_K,
        KEY_LENGTHS=problem.side.key_lengths is not None,
        BIAS_COLUMN=constants.BIAS_COLUMN,
        MASK_COLUMN=constants.MASK_COLUMN,
        SCORE_FUNCTION=problem.score_change.SCORE_FUNCTION,
        SCORE_READS=problem.score_change.SCORE_READS,
        FUNCTION_DERIVATIVE=False,
        DERIVATIVES=False,
        DERIVATIVES_APART=False,
    )


@gluon.constexpr_function
def _leaves_out(config):
    """Whether `load_tiles` leaves out sequences and heads that have nothing to add, and publishes the others."""
    return config.PACKED or config.TILE_K > 0


@gluon.jit
def _own_tile(problem, work, config, QUERY_TILES: gl.constexpr):
    """The tile of this thread block. The next thread block has the next keys of the same head. A tile that a band hides
    has nothing to sum; in a packed call the band lies elsewhere in each sequence."""
    KEYS: gl.constexpr = config.KEYS
    number = gl.program_id(0)
    key_tiles = gl.cdiv(work.columns, KEYS)
    row_tiles = gl.cdiv(work.rows, config.M * QUERY_TILES)
    lines = number // key_tiles
    planes = lines // row_tiles
    sequences = planes // work.heads
    part = sequences // work.batch
    first_key = number % key_tiles * KEYS
    first_query_tile = lines % row_tiles * QUERY_TILES
    sharing = gl.to_tensor(work.sharing).to(gl.int64)
    begin = (sharing * part // work.parts).to(gl.int32)
    end = (sharing * (part + 1) // work.parts).to(gl.int32)
    if (config.HAS_LEFT or config.HAS_RIGHT) and not config.PACKED:
        shift = 0 if config.TOP_LEFT else problem.rows_k - problem.rows_q
        seen_begin, _, _, seen_end = query_tile_ranges(
            first_key, problem.rows_k, shift, problem.rows_q, problem.window.left, problem.window.right, KEYS,
            M=config.M, HAS_LEFT=config.HAS_LEFT, HAS_RIGHT=config.HAS_RIGHT,
        )  # fmt: skip
        hidden = (first_query_tile >= seen_end) | (first_query_tile + QUERY_TILES <= seen_begin)
        end = gl.where(hidden, begin, end)
    return BiasTile(
        part=part,
        sequence=sequences % work.batch,
        head=planes % work.heads,
        first_key=first_key,
        first_query_tile=first_query_tile,
        begin=begin,
        end=end,
        shared_heads=problem.heads_kv * problem.group // work.heads,
    )


@gluon.jit
def _sharer(tile, number, problem, config, SHARED_BY_HEADS: gl.constexpr):
    """Sequence and head `number` of those that share the tile."""
    # A division takes the one warp that loads as long as several copies.
    head = tile.head
    sequence = tile.sequence + number
    if SHARED_BY_HEADS:
        head = number % tile.shared_heads
        sequence = tile.sequence + number // tile.shared_heads
    if config.PACKED:
        begin_q, seq_q = sequence_rows(problem.side.cu_seqlens_q, sequence, problem.batch, problem.rows_q)
        begin_k, seq_k = sequence_rows(problem.side.cu_seqlens_k, sequence, problem.batch, problem.rows_k)
        sharer = Sharer(sequence, head, begin_q, seq_q, begin_k, seq_k)
    else:
        sharer = Sharer(sequence, head)
    return sharer


@gluon.jit
def _key_tile_work(tile, sharer, problem, config):
    """The main kernel's work with these keys of a sequence and head, and which of that work's heads this one is."""
    key_tile = KeyTile(
        tile.first_key, sharer.sequence, sharer.head // problem.group, sharer.begin_q, sharer.seq_q, sharer.begin_k,
        sharer.seq_k,
    )  # fmt: skip
    return tile_work(key_tile, problem, config), sharer.head % problem.group


@gluon.constexpr_function
def _told(config):
    """The fields of a `Sharer` that mean something, in their order."""
    return (True, True, config.PACKED, config.PACKED, config.PACKED, config.PACKED)


@gluon.jit
def _receive_sharer(queue, count, config):
    """The `count`-th of those that share the tile, as `load_tiles` published it."""
    return Sharer(*receive_tile(queue, count, _told(config)))


@gluon.jit
def _hidden(slot, count, shared):
    """The slot. If all rings have a single stage it has an address that no compiler sees: ptxas would keep the
    descriptors of all products in registers, of which there are too few, and get some wrong."""
    if shared.q.STAGES == 1:
        slot = Slot(slot.place + hidden_zero(count), slot.phase)
    return slot


@gluon.jit
def _query_tile(tile, which: gl.constexpr, problem):
    """The number of a tile of queries. Past the last one it is that once more, and nobody stores what comes of it."""
    return gl.minimum(tile.first_query_tile + which, problem.query_tiles - 1)


@gluon.jit
def load_tiles(
    QUERY_TILES: gl.constexpr, SHARED_BY_HEADS: gl.constexpr, tile, config, shared, bias, descriptors, problem
):  # fmt: skip
    """Producer warp: loads the bias, and for each sequence and head keys, values, queries, dout and statistics."""
    WARPGROUPS: gl.constexpr = config.KEYS // ROWS
    full = bias.full.index(0)
    mbarrier.expect(full, bias_bytes(bias.tiles, QUERY_TILES * WARPGROUPS))
    for which in gl.static_range(QUERY_TILES):
        move_bias(
            descriptors.bias, bias.tiles, which, tile.sequence, tile.head, _query_tile(tile, which, problem) * config.M,
            tile.first_key, barrier=full, PARTS=WARPGROUPS, ALONG_KEYS=True,
        )  # fmt: skip
    if _leaves_out(config):
        _load_visited(SHARED_BY_HEADS, tile, config, shared, descriptors, problem)
    else:
        for number in range(tile.begin, tile.end):
            count = number - tile.begin
            sharer = _sharer(tile, number, problem, config, SHARED_BY_HEADS)
            work, head = _key_tile_work(tile, sharer, problem, config)
            load_keys(work, count, config, shared, descriptors, problem)
            for which in gl.static_range(QUERY_TILES):
                step = Step(head, _query_tile(tile, which, problem))
                load_queries(work, count * QUERY_TILES + which, step, FULL, 0, config, shared, descriptors=descriptors)


@gluon.jit
def _load_visited(SHARED_BY_HEADS: gl.constexpr, tile, config, shared, descriptors, problem):
    """Publishes and loads the sequences and heads in which the tile has something visible, and publishes the end."""
    blocks = BlockLists(problem.side.block_lists, problem.numbers.blocks)
    query_tile = tile.first_query_tile
    count = 0
    kind = gl.to_tensor(FULL)
    first_searched, last_searched = gl.to_tensor(-1), gl.to_tensor(-1)
    for number in range(tile.begin, tile.end):
        sharer = _sharer(tile, number, problem, config, SHARED_BY_HEADS)
        work, head = _key_tile_work(tile, sharer, problem, config)
        visited = (tile.first_key < work.keys) & (query_tile >= work.begin) & (query_tile < work.begin + work.tiles)
        if config.TILE_K > 0:
            entry, last_entry = line_entries(blocks, sharer.sequence, sharer.head, tile.first_key // config.TILE_K)
            if (entry != first_searched) | (last_entry != last_searched):  # the lists may be the same for all
                kind = load_tile_kind(blocks, entry, last_entry, query_tile // (config.TILE_Q // config.M))
                first_searched, last_searched = entry, last_entry
            visited &= kind != EMPTY
        if visited:
            publish_tile(shared.queue, count, sharer, _told(config))
            load_keys(work, count, config, shared, descriptors, problem)
            load_queries(work, count, Step(head, query_tile), kind, 0, config, shared, descriptors=descriptors)
            count += 1
    publish_tile(shared.queue, count, Sharer(-1, 0), _told(config))


@gluon.jit
def sum_tile(
    WHICH: gl.constexpr, QUERY_TILES: gl.constexpr, SHARED_BY_HEADS: gl.constexpr, tile, config, shared, bias,
    gradient_ptr, problem, work,
):  # fmt: skip
    """Consumer: the `WHICH`-th 64 keys of the tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M, 16])
    first = gl.zeros([ROWS, config.M], gl.float32, s_layout)
    second = gl.to_tensor(0)
    if QUERY_TILES > 1:
        second = gl.zeros([ROWS, config.M], gl.float32, s_layout)
    mbarrier.wait(bias.full.index(0), 0)
    if _leaves_out(config):
        count = 0
        sharer = _receive_sharer(shared.queue, count, config)
        while sharer.sequence >= 0:
            first, second = _add_sharer(
                first, second, count, sharer, QUERY_TILES, tile, config, shared=shared, bias_tiles=bias.tiles,
                problem=problem, WHICH=WHICH,
            )  # fmt: skip
            count += 1
            sharer = _receive_sharer(shared.queue, count, config)
    else:
        for number in range(tile.begin, tile.end):
            count = number - tile.begin
            sharer = _sharer(tile, number, problem, config, SHARED_BY_HEADS)
            first, second = _add_sharer(
                first, second, count, sharer, QUERY_TILES, tile, config, shared=shared, bias_tiles=bias.tiles,
                problem=problem, WHICH=WHICH,
            )  # fmt: skip
    _store(first, 0, tile, gradient_ptr, config, work, WHICH)
    if QUERY_TILES > 1:
        _store(second, 1, tile, gradient_ptr, config, work, WHICH)


@gluon.jit
def _add_sharer(
    first, second, count, sharer, QUERY_TILES: gl.constexpr, tile, config, shared, bias_tiles, problem,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The sums of both tiles of queries, with what the `count`-th sequence and head add."""
    work, head = _key_tile_work(tile, sharer, problem, config)
    slot = _hidden(shared.k.slot(count, WHICH), count, shared)
    shared.k.acquire(slot)
    shared.v.acquire(slot)
    first += _score_gradients(
        count, 0, QUERY_TILES, head, slot, tile, work, config=config, shared=shared, bias_tiles=bias_tiles,
        problem=problem, WHICH=WHICH,
    )  # fmt: skip
    if QUERY_TILES > 1:
        second += _score_gradients(
            count, 1, QUERY_TILES, head, slot, tile, work, config=config, shared=shared, bias_tiles=bias_tiles,
            problem=problem, WHICH=WHICH,
        )  # fmt: skip
    shared.k.release(slot)
    shared.v.release(slot)
    return first, second


@gluon.jit
def _score_gradients(
    count, which: gl.constexpr, QUERY_TILES: gl.constexpr, head, key_slot, tile, work, config, shared, bias_tiles,
    problem, WHICH: gl.constexpr,
):  # fmt: skip
    """`dsᵀ` of 64 keys, in `key_slot`, and of the `which`-th tile of queries."""
    step = Step(head, _query_tile(tile, which, problem))
    slot = _hidden(shared.q.slot(count * QUERY_TILES + which), count, shared)
    ds, _, _, _ = recompute_gradients(
        count, slot, key_slot, Slot(which, 0), step, bias_tiles, work, config=config, shared=shared, problem=problem,
        WHICH=WHICH,
    )  # fmt: skip
    return ds


@gluon.jit
def recompute_gradients(
    count, slot, key_slot, bias_slot, step, bias_tiles, work, config, shared, problem, WHICH: gl.constexpr
):  # fmt: skip
    """`dsᵀ` of the `WHICH`-th 64 keys, in `key_slot`, and of a tile of queries, in `slot`; their weights `pᵀ`, with a
    minus before those that dropout drops; what `modified_scores` returns beside the scores; and the step, which with a
    block mask is the one that was published as number `count`."""
    q, dout = shared.q, shared.dout
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M, 16])
    zeros = gl.zeros([ROWS, config.M], gl.float32, s_layout)
    kind = FULL
    blocks = BlockLists(problem.side.block_lists, problem.numbers.blocks)
    first_key = work.first_key + WHICH * ROWS
    positions = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    q.acquire(slot)
    if config.TILE_K > 0:
        step, kind = listed_step(count, config, shared)
    s = start_transposed(shared.k.operand(key_slot), q.operand(slot), 0, zeros, q.TAIL)  # [64, M]
    dout.acquire(slot)
    dp = start_transposed(shared.v.operand(key_slot), dout.operand(slot), 0, zeros, dout.TAIL)  # [64, M]
    s, lse = subtract_statistic(s, None, shared.statistics, slot, LSE, 0, config.M, config=config)
    dropout = group_head_dropout(step.head, work, problem)
    tables = load_tables(first_key, bias_slot, step, 0, work, bias_tiles, problem, config=config, WHICH=WHICH)
    s = warpgroup_mma_wait(2 if dout.TAIL > 0 else 1, [s])
    p, inner = compute_p(
        s, lse, positions, first_key, step, kind, tables, part=0, work=work, config=config, problem=problem,
        blocks=blocks, MASK=config.MASKS,
    )  # fmt: skip
    _, p = with_dropout(p, dropout, first_key, step, 0, work, config, problem=problem)
    dp, delta = subtract_statistic(dp, None, shared.statistics, slot, DELTA, 0, config.M, config=config)
    dp = warpgroup_mma_wait(0, [dp])
    dout.release(slot)
    q.release(slot)
    return score_gradients(p, dp, delta, dtype, problem, config), p, inner, step


@gluon.jit
def _store(total, which: gl.constexpr, tile, gradient_ptr, config, work, WHICH: gl.constexpr):
    """Stores the sums of 64 keys and of the `which`-th tile of queries."""
    layout: gl.constexpr = total.type.layout
    row = (tile.first_query_tile + which) * config.M + gl.arange(0, config.M, gl.SliceLayout(0, layout))
    column = tile.first_key + WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    plane = (gl.to_tensor(tile.part).to(gl.int64) * work.batch + tile.sequence) * work.heads + tile.head
    places = (plane * work.rows + row[None, :]) * work.columns + column[:, None]
    inside = (row < work.rows)[None, :] & (column < work.columns)[:, None]
    gl.store(gradient_ptr + places, total.to(gradient_ptr.dtype.element_ty), mask=inside)


#: Parts of a bias at most: each costs a write and a read of the whole bias in float32.
_MOST_PARTS = 8

#: The share of the time for which multiprocessors shall be busy.
_BUSY = 7 / 8


def bias_gradient_kernel(call: Call, schedule: BackwardSchedule, work: BiasWork) -> Kernel:
    """The kernel of the gradient of a bias that scores share. It reads the statistics of the main kernel."""
    bias = call.aux.bias
    assert bias is not None
    cut = bias_config(call)
    covered = call.is_covered(*_bias_block(call))
    side = side_parameters(call, covered=covered, by_column=True, staged=True)
    in_parts = work.parts > 1
    change = score_change(call._replace(wanted=NOTHING_WANTED), covered)
    moved = moved_tensors(call, schedule._replace(config=schedule.config._replace(bias_by_tma=True)))
    problem = Problem.from_call(call, schedule, side, change)
    parameters = {
        **moved,
        "gradient_ptr": pointer_to(torch.float32 if in_parts else call.dtype, 16),
        "problem": problem._replace(order_ptr=ABSENT, slope_sums_ptr=ABSENT),
        "constants": side.constants,
        "loops": NO_LOOPS._replace(MASKS=call.spec.banded or call.bounded),
        "work": work.numbers(bias.shape),
    }
    constants = {
        **named_constants(cut),
        "KEYS": cut.keys,
        "M": BIAS_QUERIES,
        "REGISTERS": cut.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "PACKED": call.packed,
        "TOP_LEFT": call.spec.banded and call.spec.top_left,
        "SHARED_BY_HEADS": bias.shape[1] < call.heads,
    }
    buffers = {**BUFFERS, "gradient_ptr": "bias_parts" if in_parts else "dbias"}
    return Kernel(
        attention_bias_gradient_kernel, parameters, constants, work.own * work.parts, buffers,
        max_registers=cut.max_registers,
    )  # fmt: skip


def cut_bias_work(call: Call) -> BiasWork:
    """The work for the gradient of a bias: so many parts that multiprocessors are busy."""
    bias = call.aux.bias
    assert bias is not None
    at_once = call.multiprocessors * bias_programs_together(bias_config(call), *call.head_dims)
    planes = bias.shape[0] * bias.shape[1]
    own = planes * math.prod(-(-size // along) for size, along in zip(bias.shape[2:], _bias_block(call)))
    sharing = call.batch * call.heads // planes
    candidates = range(1, min(sharing, _MOST_PARTS) + 1)
    parts = next((parts for parts in candidates if _busy(own * parts, at_once) >= _BUSY), candidates[-1])
    return BiasWork(own, sharing, parts)


def _bias_block(call: Call) -> tuple[int, int]:
    """Queries and keys of a program of the gradient of a bias."""
    cut = bias_config(call)
    return BIAS_QUERIES * cut.query_tiles, cut.keys


def _busy(tiles: int, programs: int) -> float:
    """The share of the time for which so many multiprocessors compute so many equal tiles."""
    return tiles / (-(-tiles // programs) * programs)
