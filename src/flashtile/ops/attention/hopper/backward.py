"""Backward kernel for Hopper: dk, dv and the sums of dq. `backward_dq` has the kernels before and after it.

A thread block stays on its multiprocessor and takes one tile of keys after another (`backward_tiles`). For each query
tile it computes, everything transposed, with `c = scale · log2(e)` (letters as in `primitives`; N keys, M queries)::

    sᵀ  = k qᵀ                  [N, M]
    pᵀ  = exp2(c·sᵀ - lse)      [N, M]
    dpᵀ = v doutᵀ               [N, M]
    dsᵀ = pᵀ · (dpᵀ - delta)    [N, M]      delta = rowsum(dout · out) - dlse
    dv += pᵀ dout               [N, E]
    dk += dsᵀ q                 [N, D]
    dq += ds k                  [M, D]      over all key tiles

Roles, one for each warpgroup, and a warp that loads:

- `sum_dk_dv`, twice: dk and dv of 64 keys each, and `dsᵀ`, which it hands to `sum_dq` through shared memory.
- `sum_dv` and `sum_dk`, instead of these, where dk and dv of 64 keys do not fit the registers of one warpgroup (heads
  wider than 160, apart from 192 with 128 for v; with dropout and the like wider than 128): there are 64 keys. One
  computes `pᵀ` and dv, and hands `pᵀ` to the other, which computes `dsᵀ` and dk.
- `sum_dq`: multiplies `ds` by the keys and adds the product to a float32 buffer in device memory
  (`backward_dq.add_to_dq`). If all keys of a sequence fit one tile it stores dq itself (`store_dq`). If key tiles
  are few and there are lines enough, the thread block takes all key tiles of a line (a key/value head of a sequence).
  Then it keeps the sums for itself, and stores dq with the last key tile.
- `produce`, one warp: finds the key tiles, publishes them to the others, and loads keys, values, queries, dout and
  statistics. It loads the first queries of the next key tile while the others still work on this one. Heads of 129 to
  160 and of 192 (v: 128) need its registers too, so `sum_dq` loads there.

They wait for one another only through the rings in `Shared`.

The inner loop takes the time of the shared-memory pipe more than that of the tensor cores, so lse and delta are taken
off by one more product each, or stored in the order in which threads hold them (`backward_pieces.subtract_statistic`).

Reference: Dao et al., "FlashAttention" (2022), algorithm 4; Shah et al., "FlashAttention-3" (2024), section 3.
"""

from typing import Any, NamedTuple

import torch

from flashtile._backends.gluon import fence_async_shared, gl, gluon, tma_store_wait, warpgroup_mma_wait
from flashtile._backends.launch import ABSENT, int32, named_constants, optional, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import captured_parameters, side_parameters
from flashtile.ops.attention.gpu.score_writer import score_bounds
from flashtile.ops.attention.hopper.backward_configs import has_function_derivative, separates_derivatives
from flashtile.ops.attention.hopper.backward_dq import (
    BiasStores,
    DqStores,
    DqSums,
    Outputs,
    dq_staging,
    make_sums_staging,
    sum_dq,
)
from flashtile.ops.attention.hopper.backward_loads import BUFFERS, moved_tensors, produce
from flashtile.ops.attention.hopper.backward_pieces import (
    DELTA,
    LSE,
    ROWS,
    compute_ds,
    gradient_factors,
    make_handover,
    make_ones,
    pin_pairs_before_product,
    products_per_sum,
    scaled,
    scaled_by_dropout,
    score_gradients,
    start_store,
    start_sum,
    start_transposed,
    subtract_statistic,
    unpack,
    wait_sum,
    wide_zeros,
)
from flashtile.ops.attention.hopper.backward_tiles import (
    KernelConfig,
    Problem,
    ScoreChange,
    add_to_slope_sums,
    compute_p,
    group_head_dropout,
    key_tile_step,
    listed_step,
    load_tables,
    receive_key_tile,
    receive_next_key_tile,
    step_after,
    step_dropout,
    tile_work,
    with_dropout,
)
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.modifiers import (
    FULL,
    BlockLists,
    MovedBias,
    gluon_derivative,
    gluon_reads,
    make_bias_tiles,
    make_tile_info,
)
from flashtile.ops.attention.hopper.primitives import (
    Chunks,
    make_ring,
    make_tile_queue,
    matrix_layout,
    pack,
    tile_slice,
)
from flashtile.ops.attention.hopper.schedule import BackwardSchedule


class Descriptors(NamedTuple):
    """TMA descriptors, of tensors with a head_dim as `Chunks`; `bias`: a `MovedBias`."""

    q: Any
    k: Any
    v: Any
    dout: Any
    statistics: Any
    dk: Any
    dv: Any
    bias: Any


class Shared(NamedTuple):
    """The memory that the roles share on chip.

    `q`, `k`, `v`, `dout`: rings that the producer fills. Keys and values have a tile for each 64 keys, queries and dout
    one of M rows. `statistics` arrive with the queries, and so do the tiles of a `bias`, one for each 64 keys, if TMA
    brings them (`tables`); else None. `dscores`: `dsᵀ` on its way to `sum_dq`. `probs`: with split roles, `pᵀ` on its
    way from `sum_dv` to `sum_dk`; else None. `derivatives`: tiles that go with those of `probs`, if DERIVATIVES_APART;
    else None. `tile_info`: with a block mask, what the producer publishes of each step; else None. `queue`: key tiles.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    statistics: Any
    bias: Any
    dscores: Any
    probs: Any
    derivatives: Any
    tile_info: Any
    queue: Any


class KeyOperands(NamedTuple):
    """64 keys of a key tile and their values. `first`: the first of them in the sequence, `positions`: all, `[64]`.
    `ones`: what multiplies statistics for these keys, if they are operands (`make_ones`)."""

    first: Any
    positions: Any
    k: Any
    v: Any
    ones: Any


class KeyGradients(NamedTuple):
    """Sums of dk and dv of 64 keys, dk still without the scale."""

    dk: Any
    dv: Any


@gluon.jit
def attention_backward_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, dout_desc, dout_tail_desc,
    statistics_desc, sums_desc, dq_desc, dq_tail_desc, dk_desc, dk_tail_desc, dv_desc, dv_tail_desc,
    bias_desc, bias_gradient_desc, sums_ptr, turns_ptr, counter_ptr, problem, constants, loops,
    KEYS: gl.constexpr, M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    SUM_COLUMNS: gl.constexpr, DSCORE_STAGES: gl.constexpr, SPLIT_ROLES: gl.constexpr, PRODUCER: gl.constexpr,
    ORDERED: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, STATISTICS_MULTIPLIED: gl.constexpr, SUMS_BY_TMA: gl.constexpr,
):  # fmt: skip
    """`..._tail_desc`: of the second chunk of head_dim, or None. `turns_ptr`: for each query tile how many key tiles
    have added to its dq, zeros at the start; None if not ORDERED. `counter_ptr`: how many tiles have been taken, unless
    ORDERED besides the first of each thread block, zero at the start. If SHARES_PROGRESS, a zero for each line follows
    it (`backward_tiles.shared_progress`). `loops`: `Loops`. The forward kernel explains the others."""
    WARPGROUPS: gl.constexpr = KEYS // ROWS
    TILE_K: gl.constexpr = constants.TILE_K
    config = KernelConfig(
        KEYS=KEYS,
        M=M,
        PARTS=PARTS,
        SUM_COLUMNS=SUM_COLUMNS,
        DSCORE_STAGES=DSCORE_STAGES,
        KEY_STAGES=KEY_STAGES,
        PERSISTENT=PRODUCER,
        ORDERED=ORDERED,
        REVERSES_LINES=loops.REVERSES_LINES,
        PACKED=PACKED,
        HAS_LEFT=constants.HAS_LEFT,
        HAS_RIGHT=constants.HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        MASKS=loops.MASKS,
        MASKS_LAST=loops.MASKS_LAST,
        REVERSES_WALKS=loops.REVERSES_WALKS,
        SHARES_PROGRESS=loops.SHARES_PROGRESS,
        ROTATES_WALKS=loops.ROTATES_WALKS,
        SINGLE_KEY_TILE=loops.SINGLE_KEY_TILE,
        WHOLE_LINES=loops.WHOLE_LINES,
        STATISTICS_MULTIPLIED=STATISTICS_MULTIPLIED,
        SUMS_BY_TMA=SUMS_BY_TMA,
        TILE_Q=constants.TILE_Q,
        TILE_K=TILE_K,
        KEY_LENGTHS=problem.side.key_lengths is not None,
        BIAS_COLUMN=constants.BIAS_COLUMN,
        MASK_COLUMN=constants.MASK_COLUMN,
        SCORE_FUNCTION=problem.score_change.SCORE_FUNCTION,
        SCORE_READS=problem.score_change.SCORE_READS,
        FUNCTION_DERIVATIVE=problem.score_change.FUNCTION_DERIVATIVE,
        DERIVATIVES=problem.score_change.DERIVATIVES,
        DERIVATIVES_APART=problem.score_change.DERIVATIVES_APART,
    )
    blocks = BlockLists(problem.side.block_lists, problem.numbers.blocks)
    descriptors = Descriptors(
        q=Chunks(q_desc, q_tail_desc),
        k=Chunks(k_desc, k_tail_desc),
        v=Chunks(v_desc, v_tail_desc),
        dout=Chunks(dout_desc, dout_tail_desc),
        statistics=statistics_desc,
        dk=Chunks(dk_desc, dk_tail_desc),
        dv=Chunks(dv_desc, dv_tail_desc),
        bias=MovedBias(bias_desc, problem.numbers.bias),
    )

    READERS: gl.constexpr = 2
    k = make_ring(descriptors.k, KEY_STAGES, 2 if SPLIT_ROLES else 1, WARPGROUPS)
    v = make_ring(descriptors.v, KEY_STAGES, 1, WARPGROUPS)
    q = make_ring(descriptors.q, STAGES, READERS)
    dout = make_ring(descriptors.dout, STAGES, READERS)
    statistics = gl.allocate_shared_memory(
        statistics_desc.dtype, [STAGES] + statistics_desc.block_shape, statistics_desc.layout
    )
    bias = None
    if bias_desc is not None:
        bias = make_bias_tiles(bias_desc, STAGES, WARPGROUPS)
    sums_staging, dq_stores = None, None
    if sums_desc is not None:
        sums_staging = make_sums_staging(sums_desc, config)
    if dq_desc is not None:
        tail_place = None
        if dq_tail_desc is not None:
            tail_place = dq_staging(dq_tail_desc, sums_staging)
        dq_stores = DqStores(Chunks(dq_desc, dq_tail_desc), Chunks(dq_staging(dq_desc, sums_staging), tail_place))
    bias_stores = None
    if bias_gradient_desc is not None:
        place = gl.allocate_shared_memory(q_desc.dtype, bias_gradient_desc.block_shape, bias_gradient_desc.layout)
        bias_stores = BiasStores(bias_gradient_desc, place)
    outputs = Outputs(DqSums(sums_ptr, sums_desc, sums_staging, turns_ptr), dq_stores, bias_stores)
    dscores = make_handover(q_desc.dtype, M, DSCORE_STAGES, WARPGROUPS)
    tile_info = None
    if TILE_K > 0:
        # `sum_dq` may still read the info of a step whose stage is filled anew, for at most DSCORE_STAGES steps.
        tile_info = make_tile_info(STAGES + DSCORE_STAGES)
    queue = make_tile_queue(3 if PRODUCER else 2, PACKED and TILE_K > 0)
    probs, derivatives = None, None
    if SPLIT_ROLES:
        probs = make_handover(q_desc.dtype, M, DSCORE_STAGES, 1)
        if config.DERIVATIVES_APART:
            derivatives = gl.allocate_shared_memory(q_desc.dtype, [DSCORE_STAGES, ROWS, M], matrix_layout(M))
    shared = Shared(
        q=q,
        k=k,
        v=v,
        dout=dout,
        statistics=statistics,
        bias=bias,
        dscores=dscores,
        probs=probs,
        derivatives=derivatives,
        tile_info=tile_info,
        queue=queue,
    )
    fence_async_shared()

    if SPLIT_ROLES:
        gl.warp_specialize(
            [
                (sum_dq, (False, config, shared, descriptors, outputs, problem, blocks, counter_ptr)),
                (sum_dv, (config, shared, descriptors, problem, blocks)),
                (sum_dk, (config, shared, descriptors, problem)),
                (produce, (config, shared, descriptors, problem, blocks, counter_ptr)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        if PRODUCER:
            gl.warp_specialize(
                [
                    (sum_dq, (False, config, shared, descriptors, outputs, problem, blocks, counter_ptr)),
                    (sum_dk_dv, (0, config, shared, descriptors, problem, blocks)),
                    (sum_dk_dv, (1, config, shared, descriptors, problem, blocks)),
                    (produce, (config, shared, descriptors, problem, blocks, counter_ptr)),
                ],
                [4, 4, 1],
                [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (sum_dq, (True, config, shared, descriptors, outputs, problem, blocks, counter_ptr)),
                    (sum_dk_dv, (0, config, shared, descriptors, problem, blocks)),
                    (sum_dk_dv, (1, config, shared, descriptors, problem, blocks)),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )


# dk and dv, both by each of two warpgroups


@gluon.jit
def sum_dk_dv(WHICH: gl.constexpr, config, shared, descriptors, problem, blocks):
    """Consumer: dk and dv of the `WHICH`-th 64 keys of each tile, and their part of `dsᵀ` for `sum_dq`."""
    k, v = shared.k, shared.v
    BOUNDED: gl.constexpr = config.PACKED or config.KEY_LENGTHS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M // config.PARTS, 16])
    tiles_done = 0
    steps_done = 0
    tile = receive_key_tile(shared.queue, tiles_done, config)
    while tile.first_key >= 0:
        work = tile_work(tile, problem, config)
        first_key = work.first_key + WHICH * ROWS
        positions = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        slot = k.slot(tiles_done, WHICH)
        ones = None
        if config.STATISTICS_MULTIPLIED:
            ones = make_ones(first_key, work.keys, config.M // config.PARTS)
        keys = KeyOperands(first_key, positions, k.operand(slot), v.operand(slot), ones)
        dk, dv = wide_zeros(shared.q), wide_zeros(shared.dout)
        k.acquire(slot)
        v.acquire(slot)
        step = key_tile_step(work, 0, config)
        dropout = group_head_dropout(0, work, problem)
        sums = KeyGradients(dk, dv)
        unmasked = 0
        if config.MASKS_LAST:
            unmasked = work.unmasked_steps
            for index in range(unmasked):
                step, dropout, sums = _add_step(
                    steps_done + index, step, dropout, sums, keys, work, config, shared=shared, problem=problem,
                    blocks=blocks, MASK=False, WHICH=WHICH,
                )  # fmt: skip
        for index in range(unmasked, work.steps):
            step, dropout, sums = _add_step(
                steps_done + index, step, dropout, sums, keys, work, config, shared=shared, problem=problem,
                blocks=blocks, MASK=config.MASKS, WHICH=WHICH,
            )  # fmt: skip
        dv = scaled_by_dropout(sums.dv, problem)
        start_store(descriptors.dv, v, slot, dv, work, first_key, BOUNDED)
        steps_done += work.steps
        tiles_done += 1
        _wait_dq_summed(work, steps_done, shared)
        dk = scaled(sums.dk, problem.scale)
        # The next tile needs its keys first, so dk leaves through the place of the values too where it fits there.
        if k.WIDTH == v.WIDTH and k.TAIL == v.TAIL:
            k.release(slot)
            start_store(descriptors.dk, v, slot, dk, work, first_key, BOUNDED)
            tile = receive_next_key_tile(tile, shared.queue, tiles_done, config)
            tma_store_wait(0)
        else:
            start_store(descriptors.dk, k, slot, dk, work, first_key, BOUNDED)
            tile = receive_next_key_tile(tile, shared.queue, tiles_done, config)
            tma_store_wait(0)
            k.release(slot)
        v.release(slot)


@gluon.jit
def _wait_dq_summed(work, steps_done, shared):
    """Waits until `sum_dq` has read the keys for the last time. `steps_done`: with those of this key tile."""
    if work.steps > 0:
        shared.dscores.wait_released(shared.dscores.slot(steps_done - 1))


@gluon.jit
def _add_step(
    count, step, dropout, sums, keys, work, config, shared, problem, blocks, MASK: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The thread block's step number `count`: adds its part of dk and dv, and hands `dsᵀ` to `sum_dq`. Returns the next
    step, what `step_dropout` takes for it, and the sums. MASK: a band or the end of the keys may cut its tile."""
    q, dout, dscores = shared.q, shared.dout, shared.dscores
    dk, dv = sums.dk, sums.dv
    dtype: gl.constexpr = q.tiles.dtype
    QUERIES: gl.constexpr = config.M // config.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    zeros = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    slot = q.slot(count)
    ds_slot = dscores.slot(count)
    q_tile = q.operand(slot)
    dout_tile = dout.operand(slot)
    kind = FULL
    q.acquire(slot)
    for part in gl.static_range(config.PARTS):
        s = start_transposed(keys.k, q_tile, part * QUERIES, zeros, q.TAIL)  # [64, QUERIES]
        s, lse = subtract_statistic(s, keys.ones, shared.statistics, slot, LSE, part * QUERIES, QUERIES, config=config)
        if config.TILE_K > 0:
            if part == 0:
                step, kind = listed_step(count, config, shared)
        if part == 0:
            dropout = step_dropout(dropout, step, work, problem, config)
        tables = load_tables(keys.first, slot, step, part, work, shared.bias, problem, config=config, WHICH=WHICH)
        s = warpgroup_mma_wait(0, [s])
        p, inner = compute_p(
            s, lse, keys.positions, keys.first, step, kind, tables, part=part, work=work, config=config,
            problem=problem, blocks=blocks, MASK=MASK,
        )  # fmt: skip
        weights, p = with_dropout(p, dropout, keys.first, step, part, work, config, problem=problem)
        probs = pack(weights, dtype)
        if config.STATISTICS_MULTIPLIED and not MASK:
            probs = pin_pairs_before_product(probs)
        factors = gradient_factors(p, inner, probs, problem, config)
        if config.DERIVATIVES_APART:
            derivatives = pack(compute_ds(inner, config), dtype)
        if part == 0:
            dout.acquire(slot)
        dp = start_transposed(keys.v, dout_tile, part * QUERIES, zeros, dout.TAIL)  # [64, QUERIES]
        dp, delta = subtract_statistic(
            dp, keys.ones, shared.statistics, slot, DELTA, part * QUERIES, QUERIES, config=config
        )
        dv = start_sum(probs, dout_tile, part * QUERIES, dv, dout.TAIL)
        dp = warpgroup_mma_wait(products_per_sum(dout), [dp])
        ds = score_gradients(unpack(factors, dtype), dp, delta, dtype, problem, config)
        if problem.slope_sums_ptr is not None:
            add_to_slope_sums(ds, keys.positions, step, part, work, config, problem)
        if config.DERIVATIVES_APART:
            ds = ds * unpack(derivatives, dtype)
        ds = pack(ds, dtype)
        if part == 0:
            dscores.wait_empty(ds_slot)
        tile_slice(dscores.tile(ds_slot, WHICH), part * QUERIES, QUERIES, 1).store(ds)
        if part == config.PARTS - 1:
            fence_async_shared()
            dscores.publish(ds_slot)
        dk = start_sum(ds, q_tile, part * QUERIES, dk, q.TAIL)
        dv = wait_sum(products_per_sum(q), dout, dv)
        if part == config.PARTS - 1:
            dout.release(slot)
        dk = wait_sum(0, q, dk)
    q.release(slot)
    return step_after(work, step, config), dropout, KeyGradients(dk, dv)


# dv and dk, each by a warpgroup of its own


@gluon.jit
def sum_dv(config, shared, descriptors, problem, blocks):
    """Consumer: dv of all keys. It hands `sum_dk` the factors of `dpᵀ - delta` (`gradient_factors`)."""
    q, k, v, dout, probs = shared.q, shared.k, shared.v, shared.dout, shared.probs
    BOUNDED: gl.constexpr = config.PACKED or config.KEY_LENGTHS
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M, 16])
    zeros = gl.zeros([ROWS, config.M], gl.float32, s_layout)
    tiles_done = 0
    steps_done = 0
    tile = receive_key_tile(shared.queue, tiles_done, config)
    while tile.first_key >= 0:
        work = tile_work(tile, problem, config)
        positions = work.first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        key_slot = k.slot(tiles_done)
        k_tile = k.operand(key_slot)
        dv = wide_zeros(dout)
        k.acquire(key_slot)
        step = key_tile_step(work, 0, config)
        dropout = group_head_dropout(0, work, problem)
        for index in range(work.steps):
            slot = q.slot(steps_done + index)
            probs_slot = probs.slot(steps_done + index)
            kind = FULL
            q_tile = q.operand(slot)
            q.acquire(slot)
            s = start_transposed(k_tile, q_tile, 0, zeros, q.TAIL)  # [64, M]
            s, lse = subtract_statistic(s, None, shared.statistics, slot, LSE, 0, config.M, config=config)
            if config.TILE_K > 0:
                step, kind = listed_step(steps_done + index, config, shared)
            dropout = step_dropout(dropout, step, work, problem, config)
            tables = load_tables(work.first_key, slot, step, 0, work, shared.bias, problem, config=config, WHICH=0)
            s = warpgroup_mma_wait(0, [s])
            p, inner = compute_p(
                s, lse, positions, work.first_key, step, kind, tables, part=0, work=work, config=config,
                problem=problem, blocks=blocks, MASK=config.MASKS,
            )  # fmt: skip
            q.release(slot)
            kept, p = with_dropout(p, dropout, work.first_key, step, 0, work, config, problem=problem)
            weights = pack(kept, dtype)
            probs.wait_empty(probs_slot)
            probs.tile(probs_slot).store(gradient_factors(p, inner, weights, problem, config))
            if config.DERIVATIVES_APART:
                shared.derivatives.index(probs_slot.place).store(pack(compute_ds(inner, config), dtype))
            probs.publish(probs_slot)
            dout.acquire(slot)
            dout_tile = dout.operand(slot)
            dv = start_sum(weights, dout_tile, 0, dv, dout.TAIL)
            dv = wait_sum(0, dout, dv)
            dout.release(slot)
            step = step_after(work, step, config)
        steps_done += work.steps
        if work.steps > 0:  # `sum_dk` has read the values for the last time before it took the last weights
            probs.wait_released(probs.slot(steps_done - 1))
        else:
            v.acquire(key_slot)
        k.release(key_slot)
        tiles_done += 1
        dv = scaled_by_dropout(dv, problem)
        start_store(descriptors.dv, v, key_slot, dv, work, work.first_key, BOUNDED)
        tile = receive_next_key_tile(tile, shared.queue, tiles_done, config)
        tma_store_wait(0)
        v.release(key_slot)


@gluon.jit
def sum_dk(config, shared, descriptors, problem):
    """Consumer: dk of all keys, and `dsᵀ` for `sum_dq`, from the weights of `sum_dv`."""
    q, k, v, dout = shared.q, shared.k, shared.v, shared.dout
    probs, dscores = shared.probs, shared.dscores
    BOUNDED: gl.constexpr = config.PACKED or config.KEY_LENGTHS
    dtype: gl.constexpr = q.tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M, 16])
    zeros = gl.zeros([ROWS, config.M], gl.float32, s_layout)
    tiles_done = 0
    steps_done = 0
    tile = receive_key_tile(shared.queue, tiles_done, config)
    while tile.first_key >= 0:
        work = tile_work(tile, problem, config)
        key_slot = k.slot(tiles_done)
        v_tile = v.operand(key_slot)
        dk = wide_zeros(q)
        v.acquire(key_slot)
        if problem.slope_sums_ptr is not None:
            positions = work.first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
            step = key_tile_step(work, 0, config)
        for index in range(work.steps):
            slot = q.slot(steps_done + index)
            ds_slot = dscores.slot(steps_done + index)
            dout_tile = dout.operand(slot)
            dout.acquire(slot)
            dp = start_transposed(v_tile, dout_tile, 0, zeros, dout.TAIL)  # [64, M]
            q.acquire(slot)
            dp, delta = subtract_statistic(dp, None, shared.statistics, slot, DELTA, 0, config.M, config=config)
            dp = warpgroup_mma_wait(0, [dp])
            dout.release(slot)
            probs.acquire(ds_slot)
            p = probs.tile(ds_slot).load(s_layout).to(gl.float32)
            if config.DERIVATIVES_APART:
                derivatives = shared.derivatives.index(ds_slot.place).load(s_layout).to(gl.float32)
            probs.release(ds_slot)
            ds = score_gradients(p, dp, delta, dtype, problem, config)
            if problem.slope_sums_ptr is not None:
                if config.TILE_K > 0:
                    step, _ = listed_step(steps_done + index, config, shared)
                add_to_slope_sums(ds, positions, step, 0, work, config, problem)
                step = step_after(work, step, config)
            if config.DERIVATIVES_APART:
                ds = ds * derivatives
            ds = pack(ds, dtype)
            dscores.wait_empty(ds_slot)
            dscores.tile(ds_slot).store(ds)
            fence_async_shared()
            dscores.publish(ds_slot)
            q_tile = q.operand(slot)
            dk = start_sum(ds, q_tile, 0, dk, q.TAIL)
            dk = wait_sum(0, q, dk)
            q.release(slot)
        k.acquire(key_slot)
        steps_done += work.steps
        tiles_done += 1
        _wait_dq_summed(work, steps_done, shared)
        # `sum_dv` has read the keys before it handed over the last weights.
        start_store(descriptors.dk, k, key_slot, scaled(dk, problem.scale), work, work.first_key, BOUNDED)
        tile = receive_next_key_tile(tile, shared.queue, tiles_done, config)
        tma_store_wait(0)
        k.release(key_slot)


def main_kernel(call: Call, schedule: BackwardSchedule) -> Kernel:
    """The kernel of dq, dk and dv."""
    config, covered = schedule.config, schedule.is_covered(call)
    side = side_parameters(call, covered=covered, by_column=True, staged=True)
    sums = not schedule.loops.SINGLE_KEY_TILE
    parameters = {
        **moved_tensors(call, schedule),
        "sums_ptr": optional(sums, pointer_to(torch.float32, 16)),
        "turns_ptr": optional(schedule.is_ordered(call), pointer_to(torch.int32)),
        "counter_ptr": pointer_to(torch.int32),
        "problem": Problem.from_call(call, schedule, side, score_change(call, covered)),
        "constants": side.constants,
        "loops": schedule.loops,
    }
    constants = {
        **named_constants(config),
        "KEYS": config.block_n,
        "M": config.block_m,
        "ORDERED": schedule.is_ordered(call),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "PACKED": call.packed,
        "TOP_LEFT": call.spec.banded and call.spec.top_left,
    }
    programs = schedule.programs(call)
    return Kernel(
        attention_backward_kernel, parameters, constants, programs, BUFFERS, max_registers=config.max_registers
    )


def score_change(call: Call, covered: bool) -> ScoreChange:
    """The score function, and whether it or the soft cap has derivatives. `covered`: tiles divide queries and keys."""
    program, softcap = call.spec.score_program, call.spec.softcap > 0
    apart = separates_derivatives(call)
    if program is None:
        return ScoreChange(
            captured=ABSENT,
            sizes=int32(None),
            SCORE_FUNCTION=None,
            SCORE_READS=None,
            FUNCTION_DERIVATIVE=False,
            DERIVATIVES=softcap,
            DERIVATIVES_APART=apart,
        )
    bounds = score_bounds(call) if covered else None
    read = captured_parameters(call.aux.captured)
    has_derivative = has_function_derivative(program)
    return ScoreChange(
        captured=read["captured"],
        sizes=read["captured_sizes"],
        SCORE_FUNCTION=gluon_derivative(program, bounds),
        SCORE_READS=gluon_reads(program, bounds, with_derivative=True),
        FUNCTION_DERIVATIVE=has_derivative,
        DERIVATIVES=softcap or has_derivative,
        DERIVATIVES_APART=apart,
    )
