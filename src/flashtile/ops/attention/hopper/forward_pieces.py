"""Pieces of the forward kernel for Hopper: its form, its operands and products, sinks, and the store of out.

Letters as in `pieces` and `forward`.
"""

from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.pieces import (
    Chunks,
    HeadRows,
    M,
    coordinates,
    matrix,
    place_of,
    release,
    scale_rows,
)
from flashtile.ops.attention.hopper.scores import LOG2_E, capped, lowered_by_distance


@aggregate
class Form:
    """What the compiled kernel is specialised for; meanings as in `configs.HopperConfig` and `launch.Variant`."""

    EIGHT_BITS: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    AHEAD: gl.constexpr
    IN_TURN: gl.constexpr
    OUT_PLACES: gl.constexpr
    QUERY_PLACES: gl.constexpr
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, EIGHT_BITS, CONSUMERS, Q_IN_REGISTERS, AHEAD, IN_TURN, OUT_PLACES, QUERY_PLACES,
        PACKED, HAS_LEFT, HAS_RIGHT, TOP_LEFT, TILE_Q, TILE_K,
    ):  # fmt: skip
        self.EIGHT_BITS = gl.constexpr(EIGHT_BITS)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.Q_IN_REGISTERS = gl.constexpr(Q_IN_REGISTERS)
        self.AHEAD = gl.constexpr(AHEAD)
        self.IN_TURN = gl.constexpr(IN_TURN)
        self.OUT_PLACES = gl.constexpr(OUT_PLACES)
        self.QUERY_PLACES = gl.constexpr(QUERY_PLACES)
        self.PACKED = gl.constexpr(PACKED)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.TOP_LEFT = gl.constexpr(TOP_LEFT)
        self.TILE_Q = gl.constexpr(TILE_Q)
        self.TILE_K = gl.constexpr(TILE_K)


@gluon.jit
def take_queries(q, place, s_layout: gl.constexpr, form):
    """The operand of the scores, in registers or where it lies; in registers its place is free for the next tile."""
    q_tile = matrix(q.tiles.index(place), M, q.WIDTH)
    q_tail = q_tile
    if q.TAIL > 0:
        q_tail = matrix(q.tail.index(place), M, q.TAIL)
    if form.Q_IN_REGISTERS:
        layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 32 // q.tiles.dtype.primitive_bitwidth)
        q_tile = q_tile.load(layout)
        if q.TAIL > 0:
            q_tail = q_tail.load(layout)
        release(q.empty.index(place))
    return q_tile, q_tail


@gluon.jit
def start_scores(q_tile, q_tail, k, stage, zeros):
    """Starts `s = q kᵀ` with the keys in a place of the ring."""
    keys = matrix(k.tiles.index(stage), k.ROWS, k.WIDTH)
    s = warpgroup_mma(q_tile, keys.permute([1, 0]), zeros, use_acc=False, is_async=True)
    if k.TAIL > 0:
        keys = matrix(k.tail.index(stage), k.ROWS, k.TAIL)
        s = warpgroup_mma(q_tail, keys.permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def start_values(p, o, o_tail, v, stage):
    """Starts `o += p v` with the values in a place of the ring."""
    o = warpgroup_mma(p, matrix(v.tiles.index(stage), v.ROWS, v.WIDTH), o, is_async=True)
    if v.TAIL > 0:
        layout: gl.constexpr = gl.DotOperandLayout(0, o_tail.type.layout, p.type.layout.k_width)
        p = gl.convert_layout(p, layout, assert_trivial=True)
        o_tail = warpgroup_mma(p, matrix(v.tail.index(stage), v.ROWS, v.TAIL), o_tail, is_async=True)
    return o, o_tail


@gluon.jit
def wait_values(o, o_tail, v):
    """Waits until no product is in flight."""
    if v.TAIL > 0:
        o, o_tail = warpgroup_mma_wait(0, [o, o_tail])
    else:
        o = warpgroup_mma_wait(0, [o])
    return o, o_tail


@gluon.jit
def skip_key_tiles(count, k, v, pair, form, WHICH: gl.constexpr):
    """Releases the next key tiles without a look, and lets the other consumers have its turns. Returns the number of
    tiles taken from the rings so far."""
    for _ in range(count):
        stage, phase = place_of(pair, k.STAGES)
        mbarrier.wait(k.full.index(stage), phase)
        release(k.empty.index(stage))
        mbarrier.wait(v.full.index(stage), phase)
        release(v.empty.index(stage))
        pair += 1
        if form.IN_TURN:
            begin_turn(WHICH)
            end_turn(WHICH, form.CONSUMERS)
    return pair


@gluon.jit
def begin_turn(WHICH: gl.constexpr):
    """Waits until the consumer before this one has started its products. Every consumer has as many turns."""
    gl.inline_asm_elementwise(_named_barrier("sync", WHICH), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_turn(WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """The consumer after this one may start."""
    NEXT: gl.constexpr = (WHICH + 1) % CONSUMERS
    gl.inline_asm_elementwise(_named_barrier("arrive", NEXT), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _named_barrier(action, consumer):
    """PTX of the barrier of a consumer and the one before it. Triton counts its own barriers from 0."""
    return f"barrier.cta.{action}.aligned {8 + consumer}, 256; mov.b32 $0, 0;"


@gluon.jit
def modified(s, diagonal, first_key, cap_scale, slope):
    """Scores with what changes them. `diagonal` `[M]`: the key that lies at no distance from each row."""
    if cap_scale is not None:
        s = capped(s, cap_scale)
    if slope is not None:
        s = lowered_by_distance(s, diagonal, first_key, slope)
    return s


@gluon.jit
def join_sink(row_sum, reference, sinks_ptr, sequence, head, batch):
    """Row sums and maxima with the sink among them, and the factor that leads from a row's old unit to the new one. The
    rows past the end of a packed call (sequence number `batch`) have no sink."""
    sink = gl.load(sinks_ptr + head, mask=sequence < batch, other=float("-inf")) * LOG2_E
    seen = gl.where(row_sum == 0.0, float("-inf"), reference)
    top = finite(gl.maximum(seen, sink))
    own = gl.exp2(seen - top)
    return row_sum * own + gl.exp2(sink - top), top, own


@gluon.jit
def finite(m):
    """While a row has seen nothing its maximum is -inf; the difference is then taken against 0, or it would be NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def store_out(
    o, o_tail, inverse, out, out_tail, out_desc, out_tail_desc, sequence, head, begin, seq_q, row, v, form
):  # fmt: skip
    """Divides by the row sums and starts the store, through shared memory. Rows past the end are not written."""
    dtype: gl.constexpr = out.dtype
    o, o_tail = scale_rows(Chunks(o, o_tail), inverse, v)
    tma_store_wait(0)  # of the tile before: until it has been read from there
    matrix(out, M, v.WIDTH).store(o.to(dtype))
    if v.TAIL > 0:
        matrix(out_tail, M, v.TAIL).store(o_tail.to(dtype))
    fence_async_shared()
    tma_store(out_desc, coordinates(HeadRows(sequence, head, begin, seq_q), row, 0, form.PACKED), out)
    if v.TAIL > 0:
        rows = HeadRows(sequence, head, begin, seq_q)
        tma_store(out_tail_desc, coordinates(rows, row, v.WIDTH, form.PACKED), out_tail)
