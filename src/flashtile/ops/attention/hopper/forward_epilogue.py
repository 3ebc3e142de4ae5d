"""Results of the Hopper forward: lse, with the sink of a head where there is one, and out on its way to device memory.

Letters are those of `pieces` and `forward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
)
from flashtile.ops.attention.hopper.eight_bits import load_descale
from flashtile.ops.attention.hopper.pieces import LN_2, Chunks, M, coordinates, matrix, release, scale_rows
from flashtile.ops.attention.hopper.scores import LOG2_E, load_slope, raised_to_near


class Output(NamedTuple):
    """Where results go: `tiles` in shared memory on their way out, as `Chunks`, which consumers that share one use in
    turn (`free`), or None where out leaves through the place of the queries; `descriptors` of out; lse; and the largest
    scores, or None."""

    tiles: Any
    free: Any
    descriptors: Any
    lse_ptr: Any
    max_scores_ptr: Any


@gluon.jit
def make_out_tiles(descriptors, config):
    """Room in shared memory for out on its way to device memory: for each consumer, or for one after the other."""
    desc = descriptors.main
    tail_desc = descriptors.tail
    main = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + desc.block_shape, desc.layout)
    tail = main
    if tail_desc is not None:
        tail = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + tail_desc.block_shape, tail_desc.layout)
    return Chunks(main, tail)


@gluon.jit
def store_statistics(softmax, rows, view, part, problem, output, config):
    """Stores lse, and the largest scores if they are asked for, with the first part of the values. Returns what `o` is
    to be multiplied by."""
    row = view.row
    row_sum = gl.convert_layout(gl.sum(softmax.row_sum, 1), row.type.layout)
    reference = softmax.reference
    own = 1.0
    side = problem.side
    slope = None
    if side.alibi_slopes is not None:
        slope = load_slope(side, problem.numbers, rows.sequence, rows.head, rows.sequence < problem.batch)
    if side.sinks is not None:
        sink = _raised_to_near(load_sink(side.sinks, rows, problem.batch), slope, view, 1)
        row_sum, reference, own = join_sink(row_sum, reference, sink)
    if config.EIGHT_BITS:
        descales = problem.numbers.descales
        exists = rows.sequence < problem.batch
        own *= load_descale(side.descale_v, descales.v, descales.group, rows.sequence, rows.head, exists)
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    if side.dropout_seed is not None:
        inverse *= problem.numbers.dropout.scale
    lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
    lse = _raised_to_near(lse, slope, view, -1)
    if config.PACKED:
        offset = rows.head.to(gl.int64) * problem.rows_q + rows.begin
    else:
        offset = (rows.sequence.to(gl.int64) * problem.heads + rows.head) * problem.rows_q
    stored = row < rows.length
    if config.VALUE_PARTS > 1:
        stored &= part == 0
    gl.store(output.lse_ptr + offset + row, lse, mask=stored)
    if config.MAX_SCORES:
        largest = gl.convert_layout(gl.max(softmax.largest, 1), row.type.layout)
        score = _raised_to_near(softmax.reference * LN_2 + gl.log(largest), slope, view, -1)
        gl.store(output.max_scores_ptr + offset + row, score, mask=stored)
    return inverse


@gluon.jit
def _raised_to_near(statistic, slope, view, SIGN: gl.constexpr):
    """`raised_to_near` of a tile's rows; without ALiBi (`slope` is None) what it is given."""
    if slope is not None:
        statistic = raised_to_near(statistic, slope, view.distance_shift, view.near_shift, SIGN)
    return statistic


@gluon.jit
def load_sink(sinks_ptr, rows, batch):
    """The sink of a head. The rows past the end of a packed call (sequence number `batch`) have none."""
    return gl.load(sinks_ptr + rows.head, mask=rows.sequence < batch, other=float("-inf"))


@gluon.jit
def join_sink(row_sum, reference, sink):
    """Row sums and maxima with the sink among them, and the factor that leads from a row's old unit to the new one."""
    sink *= LOG2_E
    seen = gl.where(row_sum == 0.0, float("-inf"), reference)
    top = finite(gl.maximum(seen, sink))
    own = gl.exp2(seen - top)
    return row_sum * own + gl.exp2(sink - top), top, own


@gluon.jit
def finite(m):
    """The maximum of a row, 0 instead of -inf where it has seen nothing: a difference to -inf would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def store_epilogue(
    out, inverse, rows, first, column, tiles_received, rings, q_slot, output, config, WHICH: gl.constexpr
):  # fmt: skip
    """Divides 64 rows by their sums and starts the store, from `column` on: through the consumer's place in shared
    memory, through the one that all share, each in its turn, or through that of its queries, which this releases. Rows
    past the end are not written."""
    PLACE: gl.constexpr = WHICH if config.OUT_PLACES > 1 else 0
    SHARED: gl.constexpr = config.OUT_PLACES == 1 and config.CONSUMERS > 1
    q = rings.q
    v = rings.v
    if SHARED:
        # The consumer before this one has stored this tile; the first waits for the last one and the tile before.
        mbarrier.wait(output.free.index(WHICH), ((tiles_received - 1) & 1) ^ (1 if WHICH == 0 else 0))
    if config.OUT_PLACES == 0:
        main = as_box(q.tiles.index(q_slot.place), output.descriptors.main)
        tail = main
        if v.TAIL > 0:
            tail = as_box(q.tail.index(q_slot.place), output.descriptors.tail)
    else:
        main = output.tiles.main.index(PLACE)
        tail = output.tiles.tail.index(PLACE)
    out = scale_rows(out, inverse, v)
    tma_store_wait(0)  # until the tile before has been read from there
    matrix(main, M, v.WIDTH).store(out.main.to(main.dtype))
    if v.TAIL > 0:
        matrix(tail, M, v.TAIL).store(out.tail.to(main.dtype))
    fence_async_shared()
    tma_store(output.descriptors.main, coordinates(rows, first, column, config.PACKED), main)
    if v.TAIL > 0:
        tma_store(output.descriptors.tail, coordinates(rows, first, column + v.WIDTH, config.PACKED), tail)
    if SHARED:
        tma_store_wait(0)
        release(output.free.index((WHICH + 1) % config.CONSUMERS))
    if config.OUT_PLACES == 0:
        tma_store_wait(0)
        q.release(q_slot)


@gluon.jit
def as_box(tile, desc):
    """The beginning of a tile as a place for what a descriptor moves at a time."""
    return reinterpret(tile, desc.dtype, desc.block_shape, desc.layout)
