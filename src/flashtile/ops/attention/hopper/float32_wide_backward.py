"""Backward kernels for Hopper of float32 heads of 129 to 256 columns: dv, and dk or dq.

Parts, the order in which their products are added, and sums of steps are those of `float32_backward`; formulas, roles
and walks those of `wide_backward`.

64 rows of 256 columns take 96 KiB in parts, so one operand stays on chip, perhaps a second, and the others *stream*:
each consumer has one ring, and its tiles come through it in the order in which they are multiplied. A tile that is
multiplied twice comes twice. So loads go on while a consumer waits for the other one, and no tile stays longer than its
products.

A tile is one part of 64 rows and 64 columns. The three tiles of a *chunk* of columns come from the lowest part on, and
each is multiplied with all that it meets at once: the low one with the other side's high part, the middle one with its
middle and high, the high one with all three.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.backward_pieces import DELTA, LSE, ROWS
from flashtile.ops.attention.hopper.float32_backward import store_sums
from flashtile.ops.attention.hopper.float32_parts import PARTS, parts_of, without_nan
from flashtile.ops.attention.hopper.pieces import (
    Chunks,
    HeadRows,
    Slot,
    barriers,
    hidden_zero,
    make_ring,
    matrix_layout,
    product_layout,
    wait_products,
)
from flashtile.ops.attention.hopper.wide_backward import (
    CHUNK,
    Exchange,
    KernelConfig,
    first_step,
    load_statistic,
    step_after,
    weights_of,
    work_of,
    zero_sums,
)

#: The tiles of a chunk, in the order in which they come.
LOW, MIDDLE, HIGH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class Parts(NamedTuple):
    """An operand of products, in parts: tiles on chip or numbers in registers."""

    low: Any
    middle: Any
    high: Any


class Descriptors(NamedTuple):
    """Descriptors of the parts of four tensors. Of scores: of q or k; of values: of dout or v."""

    own_scores: Any
    own_values: Any
    visited_scores: Any
    visited_values: Any


class Shared(NamedTuple):
    """The memory on chip that the roles of dk and dq share.

    `own_scores`, `own_values`: rings of own rows, loaded once; if the values stream, the latter is `for_gradients`
    again. `for_weights`, `for_gradients`: what streams to `weigh` and to `differentiate`.
    """

    own_scores: Any
    own_values: Any
    for_weights: Any
    for_gradients: Any
    exchange: Any


@gluon.jit
def attention_float32_wide_dv_kernel(
    k_desc, q_desc, dout_desc, dv_ptr, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, PLACES: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dv of 128 keys, 64 of each of two warpgroups. `PLACES`: for tiles that stream. The others: `KernelConfig`."""
    config = _config(True, 2 * ROWS, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS)
    keys = make_ring(Chunks(k_desc, None), 2 * CHUNKS * PARTS, 0)
    stream = make_ring(Chunks(q_desc, None), PLACES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_values, (0, config, keys, stream, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (sum_values, (1, config, keys, stream, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (load_for_values, (config, keys, stream, k_desc, q_desc, dout_desc, problem)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def attention_float32_wide_dk_dq_kernel(
    own_scores_desc, own_values_desc, visited_scores_desc, visited_values_desc, gradient_ptr, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, HOLDS_VALUES: gl.constexpr,
    WEIGHT_PLACES: gl.constexpr, GRADIENT_PLACES: gl.constexpr, HEAD_DIM: gl.constexpr, OF_KEYS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dk of 64 keys, or dq of 64 queries. `HOLDS_VALUES`: own values stay on chip. `WEIGHT_PLACES`, `GRADIENT_PLACES`:
    for tiles that stream to either consumer. The others: `KernelConfig`."""
    config = _config(OF_KEYS, ROWS, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS)
    descriptors = Descriptors(own_scores_desc, own_values_desc, visited_scores_desc, visited_values_desc)
    for_gradients = make_ring(Chunks(visited_values_desc, None), GRADIENT_PLACES, 1)
    own_values = for_gradients
    if HOLDS_VALUES:
        own_values = make_ring(Chunks(own_values_desc, None), VALUE_CHUNKS * PARTS, 0)
    shared = Shared(
        own_scores=make_ring(Chunks(own_scores_desc, None), CHUNKS * PARTS, 0),
        own_values=own_values,
        for_weights=make_ring(Chunks(visited_scores_desc, None), WEIGHT_PLACES, 1),
        for_gradients=for_gradients,
        exchange=Exchange(
            place=gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], matrix_layout(ROWS, 32)),
            weights_there=barriers(1, 1),
            gradients_there=barriers(1, 1),
        ),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (weigh, (config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (differentiate, (HOLDS_VALUES, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (load_for_weights, (config, shared.own_scores, shared.for_weights, descriptors, problem)),
            (load_for_gradients, (HOLDS_VALUES, config, own_values, shared.for_gradients, descriptors, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _config(
    OF_KEYS: gl.constexpr, OWN_ROWS: gl.constexpr, CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """What `wide_backward` is told of a kernel."""
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


# Producers


@gluon.jit
def load_for_values(config, keys, stream, k_desc, q_desc, dout_desc, problem):
    """Loads the keys of dv, and then for each step queries and dout."""
    work = work_of(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    for which in gl.static_range(2):
        load_own(keys, which * config.CHUNKS, config.CHUNKS, k_desc, own, work.first + which * ROWS)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = HeadRows(work.sequence, step.head, 0, 0)
        row = step.tile * ROWS
        for chunk in range(config.CHUNKS):
            loaded = load_chunk(stream, loaded, chunk, config.CHUNKS, q_desc, rows, row)
        for chunk in range(config.VALUE_CHUNKS):
            loaded = load_chunk(stream, loaded, chunk, config.VALUE_CHUNKS, dout_desc, rows, row)
        step = step_after(work, step, config)


@gluon.jit
def load_for_weights(config, own_scores, stream, descriptors, problem):
    """Loads what `weigh` multiplies: own rows, and all visited chunks of each step, behind which come those of the sums
    of the step before."""
    work = work_of(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    load_own(own_scores, 0, config.CHUNKS, descriptors.own_scores, own, work.first)
    visited = descriptors.visited_scores
    loaded = 0
    step = first_step(work)
    if work.steps > 0:
        loaded = load_visited(stream, loaded, config.CHUNKS, step, visited, work, config)
    for _ in range(work.steps - 1):
        following = step_after(work, step, config)
        loaded = load_visited(stream, loaded, config.CHUNKS, following, visited, work, config)
        loaded = load_visited(stream, loaded, first_half(config), step, visited, work, config)
        step = following
    if work.steps > 0:
        load_visited(stream, loaded, first_half(config), step, visited, work, config)


@gluon.jit
def load_visited(stream, loaded, COUNT: gl.constexpr, step, descriptor, work, config):
    """Loads the first chunks of the queries or keys of a step, after `loaded` tiles. Returns how many are loaded
    then."""
    rows = HeadRows(work.sequence, step.head, 0, 0)
    for chunk in range(COUNT):
        loaded = load_chunk(stream, loaded, chunk, config.CHUNKS, descriptor, rows, step.tile * ROWS)
    return loaded


@gluon.jit
def load_for_gradients(HOLDS_VALUES: gl.constexpr, config, own_values, stream, descriptors, problem):
    """Loads what `differentiate` multiplies: in each step the chunks of values, each of them behind the own one if that
    streams, and the visited chunks of its sums."""
    work = work_of(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    if HOLDS_VALUES:
        load_own(own_values, 0, config.VALUE_CHUNKS, descriptors.own_values, own, work.first)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = HeadRows(work.sequence, step.head, 0, 0)
        row = step.tile * ROWS
        for chunk in range(config.VALUE_CHUNKS):
            if not HOLDS_VALUES:
                loaded = load_chunk(stream, loaded, chunk, config.VALUE_CHUNKS, descriptors.own_values, own, work.first)
            loaded = load_chunk(stream, loaded, chunk, config.VALUE_CHUNKS, descriptors.visited_values, rows, row)
        for chunk in range(first_half(config), config.CHUNKS):
            loaded = load_chunk(stream, loaded, chunk, config.CHUNKS, descriptors.visited_scores, rows, row)
        step = step_after(work, step, config)


@gluon.jit
def load_own(ring, FIRST: gl.constexpr, COUNT: gl.constexpr, descriptor, rows, row):
    """Loads all chunks of own rows, into the places of chunk `FIRST` of the ring and the following. How many they are,
    no compiler sees: unrolled, the loop would need more registers than a producer has."""
    for chunk in range(COUNT + hidden_zero(row)):
        for part in gl.static_range(PARTS):
            slot = Slot((FIRST + chunk) * PARTS + part, 0)
            ring.load(slot, Chunks(descriptor, None), rows, row, False, column_of(chunk, part, COUNT))


@gluon.jit
def load_chunk(stream, loaded, chunk, COUNT: gl.constexpr, descriptor, rows, row):
    """Loads a chunk of the `COUNT` of a row, after `loaded` tiles. Returns how many are loaded then."""
    for part in gl.static_range(PARTS):
        slot = stream.slot(loaded + part)
        stream.fill(slot, Chunks(descriptor, None), rows, row, False, column_of(chunk, part, COUNT))
    return loaded + PARTS


@gluon.jit
def column_of(chunk, PART: gl.constexpr, COUNT: gl.constexpr):
    """Where a tile begins in a row of parts, of which the high ones come first, of `COUNT` chunks each."""
    return (HIGH - PART) * (COUNT * CHUNK) + chunk * CHUNK


# Consumers


@gluon.constexpr_function
def first_half(config):
    """The chunks of dk or dq that `weigh` sums; `differentiate` sums the rest."""
    return (config.CHUNKS + 1) // 2


@gluon.jit
def sum_values(
    WHICH: gl.constexpr, config, keys, stream, dv_ptr, statistics_ptr, problem, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Consumer: dv of 64 keys."""
    FIRST: gl.constexpr = WHICH * config.CHUNKS
    work = work_of(problem, config)
    first = work.first + WHICH * ROWS
    total = zero_sums(config.VALUE_CHUNKS)
    acquire_own(keys, FIRST, config.CHUNKS)
    read = 0
    step = first_step(work)
    for _ in range(work.steps):
        lse = load_statistic(statistics_ptr, LSE, first, step, work, problem, config)
        s, read = product_of_rows(keys, FIRST, stream, read, config.CHUNKS)
        p = weights_of(s, lse, first, step, work, problem, config)
        total, read = add_products(total, p, stream, read)
        step = step_after(work, step, config)
    store_chunks(total, 1.0, 0, dv_ptr, first, work, problem, config, HEAD_DIM_V)


@gluon.jit
def weigh(config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr):
    """Consumer: weights, and the first half of the columns of dk or dq. It is a step ahead with the weights, so that
    there are products to compute while the other one turns a step's into gradients."""
    own, stream, exchange = shared.own_scores, shared.for_weights, shared.exchange
    work = work_of(problem, config)
    total = zero_sums(first_half(config))
    acquire_own(own, 0, config.CHUNKS)
    read = 0
    step = first_step(work)
    if work.steps > 0:
        p, read = weights_of_step(own, stream, read, step, statistics_ptr, work, problem, config)
        hand_over_weights(p, exchange)
        for index in range(work.steps - 1):
            step = step_after(work, step, config)
            p, read = weights_of_step(own, stream, read, step, statistics_ptr, work, problem, config)
            ds = take_gradients(index, exchange)
            hand_over_weights(p, exchange)
            total, read = add_products(total, ds, stream, read)
        ds = take_gradients(work.steps - 1, exchange)
        total, read = add_products(total, ds, stream, read)
    store_chunks(total, problem.scale, 0, gradient_ptr, work.first, work, problem, config, HEAD_DIM)


@gluon.jit
def weights_of_step(own, stream, read, step, statistics_ptr, work, problem, config):
    """The weights of a step, and how many tiles are read then."""
    lse = load_statistic(statistics_ptr, LSE, work.first, step, work, problem, config)
    s, read = product_of_rows(own, 0, stream, read, config.CHUNKS)
    return weights_of(s, lse, work.first, step, work, problem, config), read


@gluon.jit
def hand_over_weights(p, exchange):
    exchange.place.store(p)
    mbarrier.arrive(exchange.weights_there.index(0), count=1)


@gluon.jit
def take_gradients(index, exchange):
    """The gradients of the scores of step `index`. Their place is free then."""
    mbarrier.wait(exchange.gradients_there.index(0), index & 1)
    return exchange.place.load(product_layout(ROWS))


@gluon.jit
def differentiate(
    HOLDS_VALUES: gl.constexpr, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Consumer: gradients of the scores, and the second half of the columns of dk or dq."""
    own, stream, exchange = shared.own_values, shared.for_gradients, shared.exchange
    work = work_of(problem, config)
    total = zero_sums(config.CHUNKS - first_half(config))
    if HOLDS_VALUES:
        acquire_own(own, 0, config.VALUE_CHUNKS)
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        delta = load_statistic(statistics_ptr, DELTA, work.first, step, work, problem, config)
        if HOLDS_VALUES:
            dp, read = product_of_rows(own, 0, stream, read, config.VALUE_CHUNKS)
        else:
            dp, read = product_of_streams(stream, read, config.VALUE_CHUNKS)
        mbarrier.wait(exchange.weights_there.index(0), index & 1)
        ds = exchange.place.load(dp.type.layout) * (dp - delta)
        exchange.place.store(ds)
        mbarrier.arrive(exchange.gradients_there.index(0), count=1)
        total, read = add_products(total, ds, stream, read)
        step = step_after(work, step, config)
    FIRST: gl.constexpr = first_half(config) * CHUNK
    store_chunks(total, problem.scale, FIRST, gradient_ptr, work.first, work, problem, config, HEAD_DIM)


# Products of parts


@gluon.jit
def acquire_own(ring, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Waits for own rows, which are loaded once."""
    for place in gl.static_range(FIRST * PARTS, (FIRST + COUNT) * PARTS):
        ring.acquire(Slot(place, 0))


@gluon.jit
def product_of_rows(own, FIRST: gl.constexpr, stream, read, COUNT: gl.constexpr):
    """`a bᵀ` `[64, 64]` over all columns, `COUNT` chunks: of own ones, from `FIRST` on, and those that come after
    `read` tiles of the stream. Returns it, and how many tiles are read then."""
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    for chunk in range(COUNT):
        total += product_of_parts(tiles_of(own, (FIRST + chunk) * PARTS), stream, read, True)
        read += PARTS
    return total, read


@gluon.jit
def product_of_streams(stream, read, COUNT: gl.constexpr):
    """`product_of_rows` where own chunks stream too, each ahead of a visited one."""
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    for _ in range(COUNT):
        low, middle, high = stream.slot(read + LOW), stream.slot(read + MIDDLE), stream.slot(read + HIGH)
        stream.acquire(low)
        stream.acquire(middle)
        stream.acquire(high)
        own = Parts(stream.main_operand(low), stream.main_operand(middle), stream.main_operand(high))
        total += product_of_parts(own, stream, read + PARTS, True)
        stream.release(low)
        stream.release(middle)
        stream.release(high)
        read += 2 * PARTS
    return total, read


@gluon.jit
def add_products(total, a, stream, read):
    """The sums plus `a b`, where b has as many chunks as there are sums, after `read` tiles of the stream. Returns
    them, and how many tiles are read then. `a`: float32, in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    high, middle, low = parts_of(a)
    parts = Parts(
        gl.convert_layout(low, operand, assert_trivial=True),
        gl.convert_layout(middle, operand, assert_trivial=True),
        gl.convert_layout(high, operand, assert_trivial=True),
    )
    sums = ()
    for chunk in gl.static_range(len(total)):
        sums = sums + (add_now(total[chunk], product_of_parts(parts, stream, read + chunk * PARTS, False)),)
    return sums, read + len(total) * PARTS


@gluon.jit
def add_now(a, b):
    """`a + b`, added before whatever comes after this. The compiler would put off all additions to the end of the step,
    and have no registers for the products that wait for theirs."""
    return gl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def tiles_of(ring, place):
    """The tiles of own rows from `place` on."""
    return Parts(
        ring.main_operand(Slot(place + LOW, 0)),
        ring.main_operand(Slot(place + MIDDLE, 0)),
        ring.main_operand(Slot(place + HIGH, 0)),
    )


@gluon.jit
def product_of_parts(a, stream, read, TRANSPOSED: gl.constexpr):
    """`a b`, `[64, 64]`, where b is the chunk after `read` tiles of the stream, transposed if so. It releases b."""
    low, middle, high = stream.slot(read + LOW), stream.slot(read + MIDDLE), stream.slot(read + HIGH)
    product = gl.zeros([ROWS, CHUNK], gl.float32, product_layout(CHUNK))
    stream.acquire(low)
    product = start_product(product, a.high, stream, low, TRANSPOSED, False)
    stream.acquire(middle)
    product = start_product(product, a.middle, stream, middle, TRANSPOSED, True)
    product = start_product(product, a.high, stream, middle, TRANSPOSED, True)
    wait_products(2)
    stream.release(low)
    stream.acquire(high)
    product = start_product(product, a.low, stream, high, TRANSPOSED, True)
    product = start_product(product, a.middle, stream, high, TRANSPOSED, True)
    product = without_nan(warpgroup_mma_wait(0, [product]))
    stream.release(middle)
    product = start_product(product, a.high, stream, high, TRANSPOSED, True)
    product = warpgroup_mma_wait(0, [product])
    stream.release(high)
    return product


@gluon.jit
def start_product(product, a, stream, slot, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr):
    """Starts the product of a part and a tile of the stream. ADDS: to the product."""
    b = stream.main_operand(slot)
    if TRANSPOSED:
        b = b.permute([1, 0])
    return warpgroup_mma(a, b, product, use_acc=ADDS, is_async=True)


@gluon.jit
def store_chunks(
    total, scale, COLUMN: gl.constexpr, gradient_ptr, first, work, problem, config, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Stores the sums of 64 rows from `first` on, times `scale`, whose columns begin at `COLUMN`."""
    for chunk in gl.static_range(len(total)):
        store_sums(total[chunk], scale, COLUMN + chunk * CHUNK, gradient_ptr, first, work, problem, config, HEAD_DIM)
