"""The loads of the Hopper backward, by a warp of its own (`produce`), and the buffers that kernels leave for one
another. Letters as in `primitives` and `backward`."""

import math
from collections.abc import Collection, Mapping

import torch

from flashtile._backends.allocate import Layout, contiguous_strides
from flashtile._backends.gluon import gl, gluon, mbarrier, tma_load
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TensorLayout, TmaTensor, broadcast_layout, row_layout, strided_layout
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import aux_buffers
from flashtile.ops.attention.gpu.reductions import shares_kernel, sum_layouts, without_shares
from flashtile.ops.attention.hopper.backward_configs import backward_chunks, tile_width
from flashtile.ops.attention.hopper.backward_pieces import ROWS, STATISTIC_COLUMNS
from flashtile.ops.attention.hopper.backward_tiles import (
    Step,
    first_statistics_tile,
    info_slot,
    key_tile_step,
    line_steps,
    publish_key_tile,
    publish_next_key_tile,
    tile_work,
    visited_tile,
)
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
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
from flashtile.ops.attention.hopper.schedule import (
    BackwardSchedule,
    first_tile_number,
    shared_progress,
)


@gluon.jit
def produce(config, shared, descriptors, problem, blocks, counter_ptr):
    """Finds the key tiles of this thread block, and loads what they need. With one place for keys and values the first
    queries come before them, because the gradients of the tile before leave through it last."""
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
        number, tile = publish_next_key_tile(
            number, tile, tiles_done, shared.queue, counter_ptr, problem, blocks, config=config
        )


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
    """Loads queries, statistics and dout of a step without a block mask, `steps_done` before this key tile."""
    step = key_tile_step(work, index, config)
    tile = visited_tile(work, step.tile, config)
    if config.SHARES_PROGRESS:
        if step.head == 0:
            progress = shared_progress(counter_ptr, work.sequence, work.head_kv, problem)
            gl.store(progress, work.query_tiles - 1 - tile)
    load_queries(work, steps_done + index, Step(step.head, tile), FULL, 0, config, shared, descriptors=descriptors)


@gluon.jit
def load_queries(work, count, step, kind, turn, config, shared, descriptors):
    """Loads what the thread block's step `count` needs of a query tile; statistics complete the queries' barrier."""
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


#: The tensors that TMA moves in the order of the main kernel's parameters. Tensors with rows of heads may have a second
#: chunk of columns, `<name>_tail`.
_MOVED = ("q", "k", "v", "dout", "statistics", "sums", "dq", "dk", "dv", "bias", "bias_gradient")

#: The buffers of parameters whose names say what a kernel does with them, or of whom they are.
BUFFERS = {"cleared_ptr": "sums", "turns_ptr": "semaphores", "row_logits_ptr": "sinks"}


def padded_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous gradient `[..., head_dim]` whose rows are padded to the 16 bytes of TMA."""
    *outer, head_dim = shape
    return contiguous_strides((*outer, -(-head_dim // 8) * 8))


def gradient_layouts(call: Call, shares: int) -> dict[str, Layout]:
    """dq, and dk and dv of so many shares, side by side like heads, whose rows TMA can write."""
    shapes = {
        "dq": call.q.shape,
        "dk": (*call.k.shape[:-2], call.k.shape[-2] * shares, call.k.shape[-1]),
        "dv": (*call.v.shape[:-2], call.v.shape[-2] * shares, call.v.shape[-1]),
    }
    return {name: Layout(tuple(shape), padded_strides(tuple(shape)), call.dtype) for name, shape in shapes.items()}


def scratch_shapes(call: Call, schedule: BackwardSchedule) -> dict[str, tuple[int, int]]:
    """Shapes of the sums of dq, and of the statistics (`backward_dq`)."""
    rows = schedule.summed_tiles(call) * schedule.config.block_m * tile_width(call.head_dims[0]) // CONSUMER_ROWS
    parts, numbers = statistics_box(schedule)
    return {
        "sums": (rows, CONSUMER_ROWS),
        "statistics": (schedule.query_tiles * call.lines * parts, numbers),
    }


def statistics_box(schedule: BackwardSchedule) -> tuple[int, int]:
    """Statistics of one tile of queries: lse, then delta, of each query a number, or an operand's row."""
    block_m = schedule.config.block_m
    return (2 * block_m, STATISTIC_COLUMNS.value) if schedule.config.statistics_multiplied else (2, block_m)


def moved_tensors(call: Call, schedule: BackwardSchedule) -> dict[str, TmaTensor]:
    """The tensors that TMA moves, by the parameters of the main kernel."""
    layouts, statistics = _layouts(call, schedule), torch.float32
    if schedule.config.statistics_multiplied:
        statistics = torch.bfloat16
    dtypes = {"sums": torch.float32, "statistics": statistics}
    swizzled = {"sums": False, "statistics": schedule.config.statistics_multiplied}
    buffers = {"dout": "masked_dout" if call.may_hide_rows else "dout", "bias_gradient": "dbias"}
    if schedule.shares > 1:
        buffers |= {"dk": "dk_shares", "dv": "dv_shares"}
    return {
        f"{name}{part}_desc": TmaTensor(
            buffers.get(name, name), dtypes.get(name, call.dtype), box, layouts[name], swizzled.get(name, True)
        )
        for name, boxes in _boxes(call, schedule).items()
        for part, box in zip(("", "_tail"), boxes)
    }


def _layouts(call: Call, schedule: BackwardSchedule) -> dict[str, TensorLayout | None]:
    assert call.dout is not None
    dout_strides = contiguous_strides(call.out_shape) if call.may_hide_rows else call.dout.strides
    gradients, bias = gradient_layouts(call, schedule.shares), call.aux.bias
    return {
        "q": row_layout(call.q.shape, call.q.strides, call.packed),
        "k": row_layout(call.k.shape, call.k.strides, call.bounded),
        "v": row_layout(call.v.shape, call.v.strides, call.bounded),
        "dout": row_layout(call.out_shape, dout_strides, call.packed),
        "dq": row_layout(*gradients["dq"][:2], call.packed),
        "dk": row_layout(*gradients["dk"][:2], call.bounded),
        "dv": row_layout(*gradients["dv"][:2], call.bounded),
        "bias": None if bias is None else broadcast_layout(bias.shape, bias.strides),
        "bias_gradient": None if bias is None else strided_layout(bias.shape, padded_strides(bias.shape)),
        **{
            name: TensorLayout(shape, contiguous_strides(shape))
            for name, shape in scratch_shapes(call, schedule).items()
        },
    }


def _boxes(call: Call, schedule: BackwardSchedule) -> Mapping[str, tuple[tuple[int, ...] | None, ...]]:
    """The box that one copy moves, for each tensor of `_MOVED` and chunk of its columns; None if TMA does not."""
    config = schedule.config
    head_dim, head_dim_v = call.head_dims
    boxes: dict[str, tuple[tuple[int, ...] | None, ...]] = {}
    for name in _MOVED:
        if name == "statistics":
            boxes[name] = (statistics_box(schedule),)
        elif name == "sums":
            # Columns of dq that are added at once: those of the tail at most, so that one descriptor serves both.
            together = min(config.sum_columns, backward_chunks(head_dim)[1] or config.sum_columns)
            boxes[name] = ((together, CONSUMER_ROWS) if config.sums_by_tma and schedule.adds_up else None,)
        elif name == "bias_gradient":
            boxes[name] = ((1, 1, CONSUMER_ROWS, CONSUMER_ROWS) if config.bias_stored else None,)
        elif name == "bias":
            boxes[name] = ((1, 1, config.block_m, CONSUMER_ROWS) if config.bias_by_tma else None,)
        elif name == "dq" and schedule.adds_up and not (schedule.lone_tiles or schedule.short_rows):
            boxes[name] = (None, None)
        else:
            whole, tail = backward_chunks(head_dim if name in ("q", "k", "dq", "dk") else head_dim_v)
            if name == "dq":  # leaves as it is multiplied
                whole, tail = config.sum_columns, tail if tail < config.sum_columns else 0
            rows = config.block_m if name in ("q", "dout") else CONSUMER_ROWS
            ends = call.packed if name in ("q", "dout", "dq") else call.bounded
            outer = (1, 1) if ends else (1,)
            boxes[name] = (*outer, rows, 1, whole), (*outer, rows, 1, tail) if tail else None
    return boxes


def backward_pipeline(
    call: Call,
    kernels: dict[str, Kernel],
    gradients: dict[str, Layout],
    shares: int,
    scratch: dict[str, int],
    more: Mapping[str, Layout | None],
    zeroed: Collection[str] = (),
) -> Pipeline:
    """The pipeline of some kernels, and of that which adds up the shares of dk and dv.

    Args:
        gradients: layouts of dq, and of dk and dv in `shares`.
        scratch: sizes of parts in numbers of 32 bits, without masked_dout.
        more: what kernels store beside these: for the gradient of a bias that learns, and for one another.
        zeroed: outputs that are zeros at the start.
    """
    outputs = dict(gradients)
    if shares > 1:
        kernels = {**kernels, "shares": shares_kernel(gradients["dk"], gradients["dv"], shares)}
        more = {**more, "dk_shares": gradients["dk"], "dv_shares": gradients["dv"]}
        outputs |= {name: without_shares(gradients[name], shares) for name in ("dk", "dv")}
    # head_dim_v is a multiple of 8 (`unsupported_reason` of the package): TMA can read the masked dout.
    masked_dout = math.prod(call.out_shape) * call.dtype.itemsize // 4 if call.may_hide_rows else 0
    learned = sum_layouts(call, call.rows_k, kernels["begin"].programs)
    return Pipeline(
        call.device,
        kernels,
        ("q", "k", "v", "out", "lse", *aux_buffers(call), "dout", "dlse"),
        {**outputs, **learned, **more},
        {"sums": 0, "statistics": 0, "masked_dout": masked_dout, "counter": 0, "semaphores": 0, "order": 0, **scratch},
        zeroed,
    )
