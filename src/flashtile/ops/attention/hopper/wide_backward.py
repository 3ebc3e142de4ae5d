"""Backward kernels for Hopper of heads wider than 256 columns: dv, and dk or dq. `backward_dq` has the kernel before
them.

dk and dv of 64 keys and 512 columns would take all registers of a multiprocessor, so each gradient has a launch of its
own, and computes the scores again. A thread block has the sum of its *own* rows in registers, and *visits* the rows of
the other side, 64 at a time. With `c = scale · log2(e)` (letters as in `backward`)::

    dv of 128 keys, up to 320 columns        dk of 64 keys, all columns      dq of 64 queries, all columns

    sᵀ  = k qᵀ                               sᵀ  = k qᵀ                      s  = q kᵀ
    pᵀ  = exp2(c·sᵀ - lse)                   pᵀ  = exp2(c·sᵀ - lse)          p  = exp2(c·s - lse)
                                             dpᵀ = v doutᵀ                   dp = dout vᵀ
                                             dsᵀ = pᵀ · (dpᵀ - delta)        ds = p · (dp - delta)
    dv += pᵀ dout                            dk += dsᵀ q                     dq += ds k

dk and dq are one kernel. In either, an operand *of scores* (q or k, `D` columns) is multiplied twice, and one *of
values* (dout or v, `E` columns) once.

Everything comes in *chunks* of 64 rows and 64 columns, each with a place and barriers of its own, so a place is filled
again as soon as its chunk has been multiplied, and heads of any width are cut alike. TMA fills in zeros past the last
column, and past the last row that a sequence has or that its key length leaves (`primitives.coordinates`).

With a soft cap `c` is `softcap · log2(e)`, and `s` the tanh of products times `scale / softcap`. The weights that pass
to the gradients of scores are then those times `1 - s²`.

Roles of dv: `sum_values`, twice, each for 64 keys, and `load_for_values`, one warp. More columns of dv are divided over
thread blocks, as those of the output are in the forward (`KernelConfig.PARTS`).

Roles of dk and dq: `weigh` computes weights and the first half of the columns, `differentiate` gradients of scores and
the second half, and `load_operand`, twice one warp, loads the operands of scores and those of values. Weights and
gradients of scores pass through one place on chip (`Exchange`).

Nobody adds to what another one adds to, so all sums have a fixed order.
"""

from typing import Any, NamedTuple

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
from flashtile._backends.launch import float32, int32
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import SidePointers, key_batch_strides, window_parameters
from flashtile.ops.attention.hopper.backward_pieces import DELTA, LSE, ROWS, query_tile_ranges
from flashtile.ops.attention.hopper.modifiers import ScoreUnits, capped
from flashtile.ops.attention.hopper.primitives import (
    Chunks,
    HeadRows,
    Slot,
    barriers,
    coordinates,
    hidden_zero,
    key_tile_ranges,
    make_ring,
    matrix_layout,
    pack,
    product_layout,
    wait_products,
)
from flashtile.ops.attention.hopper.schedule import locate_tile, tile_in_order

#: Columns of a chunk.
CHUNK = gl.constexpr(64)

#: Queries whose statistics lie side by side (`backward_dq.attention_begin_kernel` with so many rows).
STATISTIC_ROWS = gl.constexpr(16)

#: Tiles that run at once, about.
_TILES_AT_ONCE = gl.constexpr(128)


@aggregate
class KernelConfig:
    """The constants of a compiled kernel.

    OF_KEYS: the own rows are keys. OWN_ROWS: rows of a thread block. CHUNKS, VALUE_CHUNKS: chunks of a row of q and k,
    and of dout and v. PARTS: so many thread blocks have the same rows and each a part of the columns, in SUM_CHUNKS
    chunks. KEY_LENGTHS: keys of a sequence may end before its tensors do. MASKS: a band or the end of the keys may cut
    a tile.
    """

    OF_KEYS: gl.constexpr
    OWN_ROWS: gl.constexpr
    CHUNKS: gl.constexpr
    VALUE_CHUNKS: gl.constexpr
    PARTS: gl.constexpr
    SUM_CHUNKS: gl.constexpr
    PACKED: gl.constexpr
    KEY_LENGTHS: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    MASKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


@gluon.jit
def dense_config(
    OF_KEYS: gl.constexpr, OWN_ROWS: gl.constexpr, CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """The configuration of a kernel for dense calls without key lengths, whose thread blocks have all columns."""
    return KernelConfig(
        OF_KEYS=OF_KEYS,
        OWN_ROWS=OWN_ROWS,
        CHUNKS=CHUNKS,
        VALUE_CHUNKS=VALUE_CHUNKS,
        PARTS=1,
        SUM_CHUNKS=VALUE_CHUNKS,
        PACKED=False,
        KEY_LENGTHS=False,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        MASKS=MASKS,
    )


class Problem(NamedTuple):
    """The facts of the call that every role knows.

    Attributes:
        side: the side inputs (`parameters`), of which these kernels read sequences and key lengths.
        heads_kv: counts each key/value head `shares` times, once for each share of its query heads, `group` of them.
        own_tiles: (packed: slots) on each line of own rows.
        statistic_tiles: of `STATISTIC_ROWS` queries, of a head (packed: of all sequences).
        k_rows_apart, v_rows_apart, others: as in `forward.Problem`.
    """

    side: Any
    batch: Any
    heads: Any
    heads_kv: Any
    group: Any
    shares: Any
    rows_q: Any
    rows_k: Any
    own_tiles: Any
    statistic_tiles: Any
    window: Any
    units: Any
    scale: Any
    k_rows_apart: Any
    v_rows_apart: Any

    @staticmethod
    def from_call(call: Call, side: SidePointers, shares: int = 1, own_tiles: int = 0, statistic_tiles: int = 0) -> Any:
        """Describes it for a kernel."""
        numbers = {"batch": call.batch, "heads": call.heads, "heads_kv": call.heads_kv * shares, "shares": shares}
        numbers |= {"group": call.group // shares, "own_tiles": own_tiles, "statistic_tiles": statistic_tiles}
        return Problem(
            side=side,
            **{name: int32(number) for name, number in numbers.items()},
            rows_q=int32(call.rows_q),
            rows_k=int32(call.rows_k),
            window=window_parameters(call.spec),
            units=ScoreUnits.from_spec(call.spec),
            scale=float32(call.spec.scale),
            **key_batch_strides(call),
        )


class Operands(NamedTuple):
    """Descriptors or rings of one side's rows. `of_scores`: of q or k, `of_values`: of dout or v."""

    of_scores: Any
    of_values: Any


class Exchange(NamedTuple):
    """The place through which `weigh` hands the weights of a step to `differentiate`, and gets the gradients of the
    scores back. A thread of either reads and writes the same elements, so one place does for both. `weights_there`,
    `gradients_there`: barriers."""

    place: Any
    weights_there: Any
    gradients_there: Any


class Shared(NamedTuple):
    """The memory that the roles of dk and dq share on chip: rings of either side's `Operands`, and the `Exchange`. The
    own rows are loaded once."""

    own: Any
    visited: Any
    exchange: Any


class Work(NamedTuple):
    """The work of a thread block: `steps` steps, for each tile of 64 visited rows one for each of `heads` heads.

    `first`: the first of the own rows; `own_head`: theirs. `gradient_head`: that of the gradient, which differs where
    heads have shares. `visited_head`: the first of the heads. `begin_q`, `seq_q`, `begin_k`, `seq_k`: where the rows of
    the sequence begin, and how many there are; `keys`: how many keys its key length leaves. `shift`: the key on the
    diagonal of query 0. `first_tile`: the visited tile that comes first. Tiles in `[full_begin, full_end)` need no
    mask. `part`: of the columns.
    """

    sequence: Any
    begin_q: Any
    seq_q: Any
    begin_k: Any
    seq_k: Any
    keys: Any
    first: Any
    own_head: Any
    gradient_head: Any
    visited_head: Any
    heads: Any
    shift: Any
    first_tile: Any
    full_begin: Any
    full_end: Any
    steps: Any
    part: Any


class Step(NamedTuple):
    """A visited head and tile."""

    head: Any
    tile: Any


@gluon.jit
def attention_wide_dv_kernel(
    k_desc, q_desc, dout_desc, dv_desc, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, PARTS: gl.constexpr, PLACES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """`PLACES`: for visited chunks. The others: `KernelConfig`."""
    config = KernelConfig(
        OF_KEYS=True,
        OWN_ROWS=2 * ROWS,
        CHUNKS=CHUNKS,
        VALUE_CHUNKS=VALUE_CHUNKS,
        PARTS=PARTS,
        SUM_CHUNKS=(VALUE_CHUNKS + PARTS - 1) // PARTS,
        PACKED=problem.side.cu_seqlens_q is not None,
        KEY_LENGTHS=problem.side.key_lengths is not None,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        MASKS=MASKS,
    )
    keys = make_ring(Chunks(k_desc, None), 2 * key_places(config), 0)
    visited = make_ring(Chunks(q_desc, None), PLACES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_values, (0, config, keys, visited, dv_desc, statistics_ptr, problem)),
            (sum_values, (1, config, keys, visited, dv_desc, statistics_ptr, problem)),
            (load_for_values, (config, keys, visited, k_desc, Operands(q_desc, dout_desc), problem)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def attention_wide_dk_dq_kernel(
    own_scores_desc, own_values_desc, visited_scores_desc, visited_values_desc, gradient_desc, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, SCORE_PLACES: gl.constexpr, VALUE_PLACES: gl.constexpr,
    OF_KEYS: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """`SCORE_PLACES`, `VALUE_PLACES`: for visited chunks. The others: `KernelConfig`."""
    config = KernelConfig(
        OF_KEYS=OF_KEYS,
        OWN_ROWS=ROWS,
        CHUNKS=CHUNKS,
        VALUE_CHUNKS=VALUE_CHUNKS,
        PARTS=1,
        SUM_CHUNKS=CHUNKS,
        PACKED=problem.side.cu_seqlens_q is not None,
        KEY_LENGTHS=problem.side.key_lengths is not None,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        MASKS=MASKS,
    )
    dtype: gl.constexpr = own_scores_desc.dtype
    shared = Shared(
        own=Operands(
            of_scores=make_ring(Chunks(own_scores_desc, None), CHUNKS, 0),
            of_values=make_ring(Chunks(own_values_desc, None), VALUE_CHUNKS, 0),
        ),
        visited=Operands(
            of_scores=make_ring(Chunks(visited_scores_desc, None), SCORE_PLACES, 1),
            of_values=make_ring(Chunks(visited_values_desc, None), VALUE_PLACES, 1),
        ),
        exchange=Exchange(
            place=gl.allocate_shared_memory(dtype, [ROWS, ROWS], matrix_layout(ROWS)),
            weights_there=barriers(1, 1),
            gradients_there=barriers(1, 1),
        ),
    )
    own, visited = shared.own, shared.visited
    fence_async_shared()
    gl.warp_specialize(
        [
            (weigh, (config, shared, gradient_desc, statistics_ptr, problem)),
            (differentiate, (config, shared, gradient_desc, statistics_ptr, problem)),
            (
                load_operand,
                (False, config, own.of_scores, visited.of_scores, own_scores_desc, visited_scores_desc, problem),
            ),
            (
                load_operand,
                (True, config, own.of_values, visited.of_values, own_values_desc, visited_values_desc, problem),
            ),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


# What a thread block does


@gluon.jit
def tile_work(problem, config):
    """The work of this thread block. If tiles are uneven, those with the most steps come first."""
    UNEVEN: gl.constexpr = config.PACKED or config.HAS_LEFT or config.HAS_RIGHT
    number = gl.program_id(0)
    part = number % config.PARTS
    number = number // config.PARTS
    tiles = problem.own_tiles
    own_heads = problem.heads_kv if config.OF_KEYS else problem.heads
    lines = own_heads if config.PACKED else problem.batch * own_heads
    together = gl.maximum(_TILES_AT_ONCE // tiles, 1)
    tile, line = tile_in_order(number, tiles, lines, together, 1, UNEVEN)
    if config.OF_KEYS and config.HAS_RIGHT:
        tile = tiles - 1 - tile  # the first keys are seen by the most queries
    if config.OF_KEYS:
        sequence, head, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
            tile, line, problem.side.cu_seqlens_k, problem.side.cu_seqlens_q, problem.batch, own_heads, problem.rows_k,
            other_rows=problem.rows_q, ROWS=config.OWN_ROWS, PACKED=config.PACKED,
        )  # fmt: skip
        exists = first < seq_k
    else:
        sequence, head, first, begin_q, seq_q, begin_k, seq_k = locate_tile(
            tile, line, problem.side.cu_seqlens_q, problem.side.cu_seqlens_k, problem.batch, own_heads, problem.rows_q,
            other_rows=problem.rows_k, ROWS=config.OWN_ROWS, PACKED=config.PACKED,
        )  # fmt: skip
        exists = first < seq_q
    shift = gl.to_tensor(0) if config.TOP_LEFT else seq_k - seq_q
    keys = seq_k
    if config.KEY_LENGTHS:
        # A length may be more than 32 bits. What is behind the last sequence has none.
        counted = gl.load(problem.side.key_lengths + sequence, mask=sequence < problem.batch, other=0)
        keys = gl.maximum(gl.minimum(counted, seq_k), 0).to(gl.int32)
        if config.OF_KEYS:
            exists &= first < keys
        if not config.PACKED:
            begin_k = sequence * problem.rows_k
    left, right = problem.window.left, problem.window.right
    if config.OF_KEYS:
        begin, full_begin, full_end, end = query_tile_ranges(
            first, keys, shift, seq_q, left, right, config.OWN_ROWS, M=ROWS, HAS_LEFT=config.HAS_LEFT,
            HAS_RIGHT=config.HAS_RIGHT,
        )  # fmt: skip
        heads = problem.group
        own_head = head // problem.shares
        visited_head = head * problem.group
        first_tile = end - 1
    else:
        begin, full_begin, full_end, end = key_tile_ranges(
            first, seq_q, shift, keys, left, right, config.OWN_ROWS, N=ROWS, HAS_LEFT=config.HAS_LEFT,
            HAS_RIGHT=config.HAS_RIGHT,
        )  # fmt: skip
        heads = gl.to_tensor(1)
        own_head = head
        visited_head = head // (problem.group * problem.shares)
        first_tile = begin
    if config.PACKED or config.KEY_LENGTHS:
        heads = gl.where(exists, heads, 0)  # there are no steps
    return Work(
        sequence=sequence,
        begin_q=begin_q,
        seq_q=seq_q,
        begin_k=begin_k,
        seq_k=seq_k,
        keys=keys,
        first=first,
        own_head=own_head,
        gradient_head=head,
        visited_head=visited_head,
        heads=heads,
        shift=shift,
        first_tile=first_tile,
        full_begin=full_begin,
        full_end=full_end,
        steps=(end - begin) * heads,
        part=part,
    )


@gluon.jit
def first_step(work):
    """Thread blocks of a line begin at the same tile, the last queries or the first keys, so that they read the same at
    the same time."""
    return Step(work.visited_head, work.first_tile)


@gluon.jit
def step_after(work, step, config):
    """The step that follows one: all heads of a tile come before the next tile."""
    done = step.head + 1 == work.visited_head + work.heads
    direction = -1 if config.OF_KEYS else 1
    return Step(gl.where(done, work.visited_head, step.head + 1), step.tile + gl.where(done, direction, 0))


# Rows as TMA finds them


@gluon.constexpr_function
def ends_rows(config, OF_KEYS):
    """Whether TMA ends keys (or queries) with their sequence (`primitives.coordinates`)."""
    return config.PACKED or (OF_KEYS and config.KEY_LENGTHS)


@gluon.jit
def head_rows(work, head, rows_apart, config, OF_KEYS: gl.constexpr):
    """The keys or the queries of a head that are read. `rows_apart`: of the tensor, where they are keys."""
    if OF_KEYS:
        begin = work.begin_k
        if config.KEY_LENGTHS and not config.PACKED:
            begin = work.sequence * rows_apart
        rows = HeadRows(work.sequence, head, begin, work.keys)
    else:
        rows = HeadRows(work.sequence, head, work.begin_q, work.seq_q)
    return rows


# Producers


@gluon.jit
def load_for_values(config, keys, visited, k_desc, descriptors, problem):
    """Loads the keys of dv, and then for each step the queries, and the part of dout."""
    KEYS_END: gl.constexpr = ends_rows(config, True)
    work = tile_work(problem, config)
    own = head_rows(work, work.own_head, problem.k_rows_apart, config, True)
    for which in gl.static_range(2):
        for chunk in range(config.CHUNKS):
            slot = keys.slot(which * key_places(config) + chunk)
            keys.load(slot, Chunks(k_desc, None), own, work.first + which * ROWS, KEYS_END, chunk * CHUNK)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = head_rows(work, step.head, None, config, False)
        first = step.tile * ROWS
        for chunk in range(config.CHUNKS):
            column = chunk * CHUNK
            visited.fill(visited.slot(loaded), Chunks(descriptors.of_scores, None), rows, first, config.PACKED, column)
            loaded += 1
        for chunk in range(config.SUM_CHUNKS):
            column = (work.part * config.SUM_CHUNKS + chunk) * CHUNK
            visited.fill(visited.slot(loaded), Chunks(descriptors.of_values, None), rows, first, config.PACKED, column)
            loaded += 1
        step = step_after(work, step, config)


@gluon.jit
def load_operand(VALUES: gl.constexpr, config, own, visited, own_desc, visited_desc, problem):
    """Loads one operand of dk or dq, of scores or VALUES: all chunks of the own rows, and then for each step those of
    the visited ones."""
    COUNT: gl.constexpr = config.VALUE_CHUNKS if VALUES else config.CHUNKS
    OWN_END: gl.constexpr = ends_rows(config, config.OF_KEYS)
    VISITED_END: gl.constexpr = ends_rows(config, not config.OF_KEYS)
    rows_apart = problem.v_rows_apart if VALUES else problem.k_rows_apart
    work = tile_work(problem, config)
    rows = head_rows(work, work.own_head, rows_apart, config, config.OF_KEYS)
    for chunk in range(COUNT):
        own.load(own.slot(chunk), Chunks(own_desc, None), rows, work.first, OWN_END, chunk * CHUNK)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = head_rows(work, step.head, rows_apart, config, not config.OF_KEYS)
        for chunk in range(COUNT):
            place = visited.slot(loaded)
            visited.fill(place, Chunks(visited_desc, None), rows, step.tile * ROWS, VISITED_END, chunk * CHUNK)
            loaded += 1
        step = step_after(work, step, config)


# dv


@gluon.constexpr_function
def key_places(config):
    """Chunks on chip of 64 keys of dv, through whose places their sums leave."""
    return max(config.CHUNKS, config.SUM_CHUNKS)


@gluon.jit
def sum_values(WHICH: gl.constexpr, config, keys, visited, dv_desc, statistics_ptr, problem):
    """Consumer: a part of the columns of dv of 64 keys."""
    FIRST: gl.constexpr = WHICH * key_places(config)
    dtype: gl.constexpr = visited.tiles.dtype
    work = tile_work(problem, config)
    first = work.first + WHICH * ROWS
    total = zero_sums(config.SUM_CHUNKS)
    acquire_chunks(keys, FIRST, config.CHUNKS)
    read = 0
    step = first_step(work)
    for _ in range(work.steps):
        lse = load_statistic(statistics_ptr, LSE, first, step, work, problem, config)
        s = chunked_product(keys, FIRST, visited, read, config.CHUNKS, True)
        p = compute_p(s, lse, first, step, work, problem, config)
        read += config.CHUNKS
        total = add_products(total, pack(p, dtype), visited, read)
        read += config.SUM_CHUNKS
        step = step_after(work, step, config)
    column = work.part * (config.SUM_CHUNKS * CHUNK)
    store_sums(total, 1.0, keys, FIRST, dv_desc, first, column, work=work, config=config)


# dk and dq


@gluon.jit
def weigh(config, shared, gradient_desc, statistics_ptr, problem):
    """Consumer: weights, and the first half of the columns of dk or dq."""
    own, visited, exchange = shared.own, shared.visited, shared.exchange
    dtype: gl.constexpr = visited.of_scores.tiles.dtype
    layout: gl.constexpr = product_layout(ROWS)
    work = tile_work(problem, config)
    total = zero_sums((config.CHUNKS + 1) // 2)
    acquire_chunks(own.of_scores, 0, config.CHUNKS)
    step = first_step(work)
    for index in range(work.steps):
        lse = load_statistic(statistics_ptr, LSE, work.first, step, work, problem, config)
        s = chunked_product(own.of_scores, 0, visited.of_scores, index * config.CHUNKS, config.CHUNKS, False)
        p = compute_p(s, lse, work.first, step, work, problem, config, TIMES_DERIVATIVES=True)
        exchange.place.store(pack(p, dtype))
        mbarrier.arrive(exchange.weights_there.index(0), count=1)
        mbarrier.wait(exchange.gradients_there.index(0), index & 1)
        ds = exchange.place.load(layout)
        total = add_products(total, ds, visited.of_scores, index * config.CHUNKS)
        step = step_after(work, step, config)
    store_sums(total, problem.scale, own.of_scores, 0, gradient_desc, work.first, 0, work=work, config=config)


@gluon.jit
def differentiate(config, shared, gradient_desc, statistics_ptr, problem):
    """Consumer: gradients of the scores, and the second half of the columns of dk or dq."""
    own, visited, exchange = shared.own, shared.visited, shared.exchange
    dtype: gl.constexpr = visited.of_scores.tiles.dtype
    FIRST: gl.constexpr = (config.CHUNKS + 1) // 2
    work = tile_work(problem, config)
    total = zero_sums(config.CHUNKS - FIRST)
    acquire_chunks(own.of_values, 0, config.VALUE_CHUNKS)
    acquire_chunks(own.of_scores, FIRST, config.CHUNKS - FIRST)  # through whose places the sums leave
    step = first_step(work)
    if work.steps > 0:
        delta = load_statistic(statistics_ptr, DELTA, work.first, step, work, problem, config)
        dp = chunked_product(own.of_values, 0, visited.of_values, 0, config.VALUE_CHUNKS, True)
        for index in range(work.steps - 1):
            ds = hand_over_gradients(dp, delta, index, exchange, dtype)
            step = step_after(work, step, config)
            delta = load_statistic(statistics_ptr, DELTA, work.first, step, work, problem, config)
            total, dp = add_products_and_next(
                total, ds, visited.of_scores, index * config.CHUNKS + FIRST, own.of_values, visited.of_values,
                (index + 1) * config.VALUE_CHUNKS, VALUE_CHUNKS=config.VALUE_CHUNKS,
            )  # fmt: skip
        ds = hand_over_gradients(dp, delta, work.steps - 1, exchange, dtype)
        total = add_products(total, ds, visited.of_scores, (work.steps - 1) * config.CHUNKS + FIRST)
    store_sums(
        total, problem.scale, own.of_scores, FIRST, gradient_desc, work.first, FIRST * CHUNK, work=work, config=config
    )


@gluon.jit
def hand_over_gradients(dp, delta, index, exchange, dtype: gl.constexpr):
    """The gradients of the scores of a step, in 16 bits, which `weigh` finds in the place of its weights."""
    mbarrier.wait(exchange.weights_there.index(0), index & 1)
    p = exchange.place.load(dp.type.layout).to(gl.float32)
    ds = pack(p * (dp - delta), dtype)
    exchange.place.store(ds)
    mbarrier.arrive(exchange.gradients_there.index(0), count=1)
    return ds


# Pieces


@gluon.jit
def acquire_chunks(ring, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Waits for chunks that are loaded once."""
    for chunk in gl.static_range(FIRST, FIRST + COUNT):
        ring.acquire(ring.slot(chunk))


@gluon.jit
def zero_sums(COUNT: gl.constexpr):
    """Sums of 64 rows, one for each chunk of columns."""
    total = ()
    for _ in gl.static_range(COUNT):
        total = total + (gl.zeros([ROWS, CHUNK], gl.float32, product_layout(CHUNK)),)
    return total


@gluon.jit
def chunked_product(own, FIRST: gl.constexpr, visited, count, COUNT: gl.constexpr, RELEASES: gl.constexpr):
    """`a bᵀ` `[64, 64]` over all columns: of the own chunks from `FIRST` on, and as many visited ones from number
    `count` on. RELEASES: each visited chunk is released as soon as it has been multiplied.

    Own chunks lie at constant places. If the compiler saw that, it would keep the descriptors of all products in
    registers, which the loop does not have.
    """
    hidden = hidden_zero(count)
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    for chunk in gl.static_range(COUNT):
        total = start_product(total, own, FIRST + chunk + hidden, visited, count + chunk, chunk > 0)
        if RELEASES and chunk > 0:
            wait_products(1)
            visited.release(visited.slot(count + chunk - 1))
    total = warpgroup_mma_wait(0, [total])
    if RELEASES:
        visited.release(visited.slot(count + COUNT - 1))
    return total


@gluon.jit
def start_product(total, own, place, visited, number, ADDS: gl.constexpr):
    """Waits for a visited chunk, and starts its product with the own chunk at `place`. ADDS: to the total."""
    slot = visited.slot(number)
    visited.acquire(slot)
    b = visited.main_operand(slot).permute([1, 0])
    return warpgroup_mma(own.main_operand(Slot(place, 0)), b, total, use_acc=ADDS, is_async=True)


@gluon.jit
def add_products(total, a, visited, count):
    """The sums plus `a b`, where b has as many chunks as there are sums, from number `count` on. It releases them. `a`:
    of 16 bits, in registers."""
    COUNT: gl.constexpr = len(total)
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    a = gl.convert_layout(a, operand, assert_trivial=True)
    sums = ()
    for chunk in gl.static_range(COUNT):
        slot = visited.slot(count + chunk)
        visited.acquire(slot)
        sums = sums + (warpgroup_mma(a, visited.main_operand(slot), total[chunk], is_async=True),)
    for chunk in gl.static_range(COUNT - 1):
        wait_products(COUNT - 1 - chunk)
        visited.release(visited.slot(count + chunk))
    if COUNT == 1:
        total = (warpgroup_mma_wait(0, sums),)
    else:
        total = warpgroup_mma_wait(0, sums)
    visited.release(visited.slot(count + COUNT - 1))
    return total


@gluon.jit
def add_products_and_next(
    total, a, visited, count, own_values, visited_values, value_count, VALUE_CHUNKS: gl.constexpr
):  # fmt: skip
    """`add_products`, and beside them `chunked_product` of the values of the next step, which does not need what they
    free, so values are loaded meanwhile.

    Chunks of values for which there was no place in time come behind all sums: nobody waits for them with a chunk of
    the scores' operands in hand, of which there may be a single step on chip.
    """
    COUNT: gl.constexpr = len(total)
    AHEAD: gl.constexpr = min(COUNT, visited_values.STAGES, VALUE_CHUNKS)
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    a = gl.convert_layout(a, operand, assert_trivial=True)
    hidden = hidden_zero(value_count)
    product = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    sums = ()
    for chunk in gl.static_range(COUNT):
        slot = visited.slot(count + chunk)
        visited.acquire(slot)
        sums = sums + (warpgroup_mma(a, visited.main_operand(slot), total[chunk], is_async=True),)
        if chunk < AHEAD:
            product = start_product(product, own_values, chunk + hidden, visited_values, value_count + chunk, chunk > 0)
        wait_products(1 if chunk < AHEAD else 0)
        visited.release(slot)
        if 0 < chunk and chunk <= AHEAD:  # the product of values before this one has ended
            visited_values.release(visited_values.slot(value_count + chunk - 1))
    for chunk in gl.static_range(AHEAD, VALUE_CHUNKS):
        product = start_product(product, own_values, chunk + hidden, visited_values, value_count + chunk, chunk > 0)
        if chunk > AHEAD or AHEAD == COUNT:  # else the chunk before has been released above
            wait_products(1)
            visited_values.release(visited_values.slot(value_count + chunk - 1))
    results = warpgroup_mma_wait(0, sums + (product,))
    if not (AHEAD == VALUE_CHUNKS and AHEAD < COUNT):  # else the last one has been, too
        visited_values.release(visited_values.slot(value_count + VALUE_CHUNKS - 1))
    total = ()
    for chunk in gl.static_range(COUNT):
        total = total + (results[chunk],)
    return total, results[COUNT]


@gluon.jit
def load_statistic(statistics_ptr, KIND: gl.constexpr, own_first, step, work, problem, config):
    """lse (in units of log2) or delta of the queries of a product, `[1, 64]` of visited and `[64, 1]` of own ones.

    They are stored as `backward_pieces.subtract_statistic` reads them, by tiles of `STATISTIC_ROWS`: four numbers that
    a thread has of visited queries lie side by side.
    """
    layout: gl.constexpr = product_layout(ROWS)
    if config.OF_KEYS:
        number = first_statistics(step.head, work, problem, config) + step.tile * (ROWS // STATISTIC_ROWS)
        # By sixteens, two bits of a thread's place in its row, halves, and elements.
        quads: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64]
        )
        place = gl.arange(0, ROWS, quads)
        place = place // STATISTIC_ROWS * (2 * STATISTIC_ROWS) + place % STATISTIC_ROWS
        base = statistics_ptr + number.to(gl.int64) * (2 * STATISTIC_ROWS) + KIND * STATISTIC_ROWS
        numbers = gl.permute(gl.reshape(gl.load(base + place), [ROWS // 16, 4, 2, 2]), [0, 2, 1, 3])
        numbers = gl.reshape(numbers, [ROWS])
        statistic = gl.convert_layout(numbers, gl.SliceLayout(0, layout), assert_trivial=True)[None, :]
    else:
        number = first_statistics(work.own_head, work, problem, config) + own_first // STATISTIC_ROWS
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        place = row // 16 * (2 * STATISTIC_ROWS) + row % 8 // 2 * 4 + row % 16 // 8 * 2 + row % 2
        base = statistics_ptr + number.to(gl.int64) * (2 * STATISTIC_ROWS) + KIND * STATISTIC_ROWS
        statistic = gl.load(base + place)[:, None]
    return statistic


@gluon.jit
def first_statistics(head, work, problem, config):
    """The number of the first tile of statistics of a head of a sequence (`backward_dq`)."""
    if config.PACKED:
        tiles_before = (work.begin_q // ROWS + work.sequence) * (ROWS // STATISTIC_ROWS)
        number = head * problem.statistic_tiles + tiles_before
    else:
        number = (work.sequence * problem.heads + head) * problem.statistic_tiles
    return number


@gluon.jit
def compute_p(s, lse, own_first, step, work, problem, config, TIMES_DERIVATIVES: gl.constexpr = False):
    """The weights of a step, `[own rows, visited rows]`, from its products. TIMES_DERIVATIVES: times those of the
    scores, which a soft cap has. They come before the mask, because behind its branch both would take registers."""
    CAPPED: gl.constexpr = problem.units.cap_scale is not None
    if CAPPED:
        s = capped(s, problem.units.cap_scale)
    p = gl.exp2(s * problem.units.scale_log2 - lse)
    if CAPPED and TIMES_DERIVATIVES:
        p *= 1.0 - s * s
    if config.MASKS:
        if (step.tile < work.full_begin) | (step.tile >= work.full_end):
            p = hide(p, 0.0, own_first, step.tile * ROWS, work, problem, config)
    return p


@gluon.jit
def hide(x, HIDDEN: gl.constexpr, own_first, visited_first, work, problem, config):
    """Weights or scores of own and visited rows, `HIDDEN` where the query does not see the key."""
    own = (own_first + gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout)))[:, None]
    visited = (visited_first + gl.arange(0, ROWS, gl.SliceLayout(0, x.type.layout)))[None, :]
    key = own if config.OF_KEYS else visited
    query = visited if config.OF_KEYS else own
    last = work.keys - 1 + query * 0
    if config.HAS_RIGHT:
        last = gl.minimum(last, query + (work.shift + problem.window.right))
    visible = key <= last
    if config.HAS_LEFT:
        visible &= key >= query + (work.shift - problem.window.left)
    return gl.where(visible, x, HIDDEN)


@gluon.jit
def store_sums(total, scale, ring, FIRST: gl.constexpr, descriptor, row, column, work, config):
    """Stores sums of 64 rows, times `scale`, through places of the own rows from `FIRST` on, which nobody reads any
    more. Rows past the end of the sequence, and columns past the last, are not written."""
    ROWS_END: gl.constexpr = ends_rows(config, config.OF_KEYS)
    if config.OF_KEYS:
        rows = HeadRows(work.sequence, work.gradient_head, work.begin_k, work.seq_k)
    else:
        rows = HeadRows(work.sequence, work.gradient_head, work.begin_q, work.seq_q)
    for chunk in gl.static_range(len(total)):
        ring.main_operand(ring.slot(FIRST + chunk)).store((total[chunk] * scale).to(ring.tiles.dtype))
    fence_async_shared()
    for chunk in gl.static_range(len(total)):
        place = ring.tiles.index(FIRST + chunk)
        tma_store(descriptor, coordinates(rows, row, column + chunk * CHUNK, ROWS_END), place)
    tma_store_wait(0)
