"""Gradients of the tensors that a score function reads, on Hopper: the scores' gradients, computed once more, and added
up in memory.

The main kernel has no registers left for them. This one takes the same key tiles in the same order (`backward_loads`),
and computes of each query tile, with the pieces of the main kernel (letters as in `backward`)::

    sᵀ  = k qᵀ                  [N, M]
    pᵀ  = exp2(c·sᵀ - lse)      [N, M]
    dpᵀ = v doutᵀ               [N, M]
    dsᵀ = pᵀ · (dpᵀ - delta)    [N, M]      the gradient behind the function

A function that is written for the call (`score_source.additions_source`) multiplies `dsᵀ` by the derivative with
respect to each entry that the score function has read, adds up what belongs to one entry, and adds it to float32 sums.
Nothing is rounded before that. Thread blocks add in no fixed order. Entries by the distance of query and key are those
of diagonals (`modifiers.diagonal_sums`), because a memory that adds 4,096 numbers takes longer than the products.

Roles: `add_gradients`, twice, and the main kernel's `produce`, one warp. If a tile has 128 keys, each warpgroup takes
64 of them. If it has 64, each takes every second query tile, and half of the places that these have on chip: to a
warpgroup that left out a phase of a barrier, the next one would look complete from the start.
"""

import torch

from flashtile._backends.gluon import fence_async_shared, gl, gluon
from flashtile._backends.launch import ABSENT, named_constants, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import captured_parameters, side_parameters
from flashtile.ops.attention.gpu.score_writer import score_bounds
from flashtile.ops.attention.hopper.backward import Descriptors, Shared, score_change
from flashtile.ops.attention.hopper.backward_configs import captured_gradient_config
from flashtile.ops.attention.hopper.backward_loads import BUFFERS, moved_tensors, produce
from flashtile.ops.attention.hopper.backward_pieces import ROWS
from flashtile.ops.attention.hopper.backward_tiles import (
    Problem,
    key_tile_step,
    receive_key_tile,
    tile_work,
    visited_tile,
)
from flashtile.ops.attention.hopper.bias_gradient import recompute_gradients, recomputing_config
from flashtile.ops.attention.hopper.modifiers import (
    BlockLists,
    MovedBias,
    gluon_additions,
    make_bias_tiles,
    make_tile_info,
)
from flashtile.ops.attention.hopper.primitives import Chunks, Slot, hidden_zero, make_ring, make_tile_queue
from flashtile.ops.attention.hopper.schedule import NO_LOOPS, BackwardSchedule

#: Warpgroups that compute.
_CONSUMERS = gl.constexpr(2)


@gluon.jit
def attention_captured_gradient_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, dout_desc, dout_tail_desc, statistics_desc,
    bias_desc, counter_ptr, captured_sums, problem, constants, loops,
    KEYS: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PACKED: gl.constexpr, TOP_LEFT: gl.constexpr, ADD_GRADIENTS: gl.constexpr,
):  # fmt: skip
    """Arguments as of the main kernel. `captured_sums`: where gradients of captured tensors are added up, None for
    those that are not wanted. `ADD_GRADIENTS`: the function that does."""
    TILES: gl.constexpr = KEYS // ROWS
    READERS: gl.constexpr = _CONSUMERS // TILES
    config = recomputing_config(
        problem, constants, loops, KEYS, M, KEY_STAGES, PERSISTENT=True, PACKED=PACKED, TOP_LEFT=TOP_LEFT
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
    bias, tile_info = None, None
    if bias_desc is not None:
        bias = make_bias_tiles(bias_desc, STAGES, TILES)
    if config.TILE_K > 0:
        tile_info = make_tile_info(STAGES)
    shared = Shared(
        q=make_ring(descriptors.q, STAGES, TILES),
        k=make_ring(descriptors.k, KEY_STAGES, READERS, TILES),
        v=make_ring(descriptors.v, KEY_STAGES, READERS, TILES),
        dout=make_ring(descriptors.dout, STAGES, TILES),
        statistics=statistics,
        bias=bias,
        dscores=None,
        probs=None,
        derivatives=None,
        tile_info=tile_info,
        queue=make_tile_queue(_CONSUMERS, PACKED and config.TILE_K > 0),
    )
    blocks = BlockLists(problem.side.block_lists, problem.numbers.blocks)
    fence_async_shared()
    gl.warp_specialize(
        [
            (add_gradients, (0, ADD_GRADIENTS, config, shared, problem, captured_sums)),
            (add_gradients, (1, ADD_GRADIENTS, config, shared, problem, captured_sums)),
            (produce, (config, shared, descriptors, problem, blocks, counter_ptr)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def add_gradients(WHICH: gl.constexpr, ADD_GRADIENTS: gl.constexpr, config, shared, problem, captured_sums):
    """Consumer number `WHICH`: 64 keys of each tile, and all query tiles or every second one."""
    TILES: gl.constexpr = config.KEYS // ROWS
    PART: gl.constexpr = WHICH % TILES
    SHARED_KEYS: gl.constexpr = TILES < _CONSUMERS
    gl.static_assert(not SHARED_KEYS or shared.q.STAGES % _CONSUMERS == 0)
    tiles_done = 0
    steps_done = 0
    tile = receive_key_tile(shared.queue, tiles_done, config)
    while tile.first_key >= 0:
        work = tile_work(tile, problem, config)
        key_slot = shared.k.slot(tiles_done, PART)
        shared.k.acquire(key_slot)
        shared.v.acquire(key_slot)
        first = 0
        if SHARED_KEYS:
            first = (steps_done + WHICH) % _CONSUMERS
        for index in range(first, work.steps, _CONSUMERS // TILES):
            _add_step(
                steps_done + index, index, key_slot, work, config, shared, problem, captured_sums=captured_sums,
                PART=PART, ADD_GRADIENTS=ADD_GRADIENTS,
            )  # fmt: skip
        shared.k.release(key_slot)
        shared.v.release(key_slot)
        steps_done += work.steps
        tiles_done += 1
        tile = receive_key_tile(shared.queue, tiles_done, config)


@gluon.jit
def _add_step(
    count, index, key_slot, work, config, shared, problem, captured_sums, PART: gl.constexpr,
    ADD_GRADIENTS: gl.constexpr,
):  # fmt: skip
    """Step number `index` of a key tile, the thread block's number `count`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.M, 16])
    slot = shared.q.slot(count)
    # If a compiler saw that these are the keys of the step before, it would keep the descriptors of all products.
    key_slot = Slot(key_slot.place + hidden_zero(count), key_slot.phase)
    step = key_tile_step(work, index, config)
    ds, p, inner, step = recompute_gradients(
        count, slot, key_slot, slot, step, shared.bias, work, config=config, shared=shared, problem=problem, WHICH=PART
    )
    first_key = work.first_key + PART * ROWS
    first_query = visited_tile(work, step.tile, config) * config.M
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    query = first_query + gl.arange(0, config.M, gl.SliceLayout(0, s_layout))
    ADD_GRADIENTS(
        inner * problem.units.function_scale, batch=work.sequence, head=work.first_head + step.head,
        q_index=query[None, :], k_index=key[:, None], first_q=first_query, first_k=first_key, upstream=ds,
        hidden=p == 0.0, captured=problem.score_change.captured, sizes=problem.score_change.sizes, sums=captured_sums,
    )  # fmt: skip


def captured_gradient_kernel(call: Call, schedule: BackwardSchedule) -> Kernel:
    """The kernel of the gradients of captured tensors. It reads the statistics of the main kernel."""
    text = call.spec.score_program
    assert text is not None
    cut = captured_gradient_config(schedule.config, call)
    config, loops, covered = schedule.config, schedule.loops, schedule.is_covered(call)
    side = side_parameters(call, covered=covered, by_column=True, staged=True)
    problem = Problem.from_call(call, schedule, side, score_change(call, covered))
    wanted = call.wanted.captured
    parameters = {
        **moved_tensors(call, schedule),
        "counter_ptr": pointer_to(torch.int32),
        "problem": problem._replace(slope_sums_ptr=ABSENT),
        "captured_sums": captured_parameters(call.aux.captured, wanted)["captured_sums"],
        "constants": side.constants,
        "loops": NO_LOOPS._replace(
            MASKS=loops.MASKS, REVERSES_WALKS=loops.REVERSES_WALKS, ROTATES_WALKS=loops.ROTATES_WALKS
        ),
    }
    constants = {
        **named_constants(cut),
        "KEYS": config.block_n,
        "M": config.block_m,
        "PACKED": call.packed,
        "TOP_LEFT": call.spec.banded and call.spec.top_left,
        "ADD_GRADIENTS": gluon_additions(text, wanted, score_bounds(call) if covered else None),
    }
    return Kernel(
        attention_captured_gradient_kernel, parameters, constants, schedule.programs(call),
        {**BUFFERS, "counter_ptr": "captured_counter"}, max_registers=cut.max_registers,
    )  # fmt: skip
