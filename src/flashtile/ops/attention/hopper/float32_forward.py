"""Forward kernel for Hopper of float32, heads of 65 to 512 columns, in products of bfloat16.

Numbers come in three *parts*, and a product of two numbers is six products of parts (`float32_parts`). They are added
from the smallest on, from zero in each step, as in `float32_backward`. A tile is one part of 64 rows and of a *chunk*,
64 columns, and has a place and barriers of its own.

A thread block has 64 queries. Its two warpgroups divide the columns: each multiplies every second chunk of q and k,
and each has every second chunk of the output. Their partial scores pass through shared memory (`Exchange`), and both
add them up and exponentiate, so both know the weights. Per 64 keys (letters and formulas as in `forward`)::

    s = q kᵀ, over the own chunks, plus that of the other warpgroup
    p = exp2(c·s - r)
    o = o·exp2(r₀ - r) + p v, of the own chunks

`r` is the largest score so far, `r₀` that before.

Each warpgroup has a warp that loads its tiles (`load_chunks`). The queries stay on chip if they leave room for other
tiles; else they are loaded again for each tile of keys.
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
from flashtile.ops.attention.hopper.float32_parts import HIGH, LOW, MIDDLE, PARTS, parts_of, without_nan
from flashtile.ops.attention.hopper.forward_epilogue import finite, join_sink
from flashtile.ops.attention.hopper.pieces import (
    LN_2,
    Chunks,
    HeadRows,
    M,
    barriers,
    make_ring,
    matrix_layout,
    product_layout,
    row_maximum,
)
from flashtile.ops.attention.hopper.wide_backward import (
    CHUNK,
    KernelConfig,
    first_step,
    hide,
    step_after,
    work_of,
    zero_sums,
)

#: Warpgroups among which columns are divided.
SHARERS = gl.constexpr(2)


class Tensors(NamedTuple):
    """Descriptors of the parts of q, k and v."""

    q: Any
    k: Any
    v: Any


class Rings(NamedTuple):
    """Tiles of a warpgroup: its queries, and those that it visits in turn, which include the queries if these do not
    stay."""

    queries: Any
    visited: Any


class Exchange(NamedTuple):
    """Partial scores of a step: a place for each warpgroup, which it writes and the other one reads. `there`, `taken`:
    barriers of each."""

    places: Any
    there: Any
    taken: Any


class Results(NamedTuple):
    """Where out and lse go, and the sinks or None."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any


@gluon.jit
def attention_float32_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, HEAD_DIM_V: gl.constexpr, QUERIES_STAY: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """`QUERIES_STAY`: on chip. `STAGES`: chunks on chip that each warpgroup visits. The others: `KernelConfig`."""
    config = KernelConfig(
        OF_KEYS=False,
        OWN_ROWS=M,
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
    tensors = Tensors(q_desc, k_desc, v_desc)
    first = make_rings(0, tensors, config, QUERIES_STAY, STAGES)
    second = make_rings(1, tensors, config, QUERIES_STAY, STAGES)
    exchange = Exchange(
        places=gl.allocate_shared_memory(gl.float32, [SHARERS, M, M], matrix_layout(M, 32)),
        there=barriers(SHARERS, 1),
        taken=barriers(SHARERS, 1),
    )
    results = Results(out_ptr, lse_ptr, sinks_ptr)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (0, QUERIES_STAY, config, first, exchange, results, problem, HEAD_DIM_V)),
            (attend, (1, QUERIES_STAY, config, second, exchange, results, problem, HEAD_DIM_V)),
            (load_chunks, (0, QUERIES_STAY, config, first, tensors, problem)),
            (load_chunks, (1, QUERIES_STAY, config, second, tensors, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.constexpr_function
def chunks_of(which, chunks):
    """How many chunks a warpgroup has: every second one."""
    return (chunks + SHARERS - 1 - which) // SHARERS


@gluon.jit
def make_rings(WHICH: gl.constexpr, tensors, config, QUERIES_STAY: gl.constexpr, STAGES: gl.constexpr):
    visited = make_ring(Chunks(tensors.k, None), STAGES, 1, PARTS)
    queries = visited
    if QUERIES_STAY:
        queries = make_ring(Chunks(tensors.q, None), chunks_of(WHICH, config.CHUNKS), 0, PARTS)
    return Rings(queries, visited)


@gluon.jit
def load_chunks(WHICH: gl.constexpr, QUERIES_STAY: gl.constexpr, config, rings, tensors, problem):
    """Producer of a warpgroup: its chunks, in the order in which it reads them."""
    queries, visited = rings.queries, rings.visited
    work = work_of(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    if QUERIES_STAY:
        for chunk in range(chunks_of(WHICH, config.CHUNKS)):
            for part in gl.static_range(PARTS):
                column = column_of(chunk, part, WHICH, config.CHUNKS)
                queries.load(queries.slot(chunk, part), Chunks(tensors.q, None), own, work.first, False, column)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = HeadRows(work.sequence, step.head, 0, 0)
        for chunk in range(chunks_of(WHICH, config.CHUNKS)):
            if not QUERIES_STAY:
                fill(visited, loaded, tensors.q, own, work.first, chunk, WHICH, config.CHUNKS)
                loaded += 1
            fill(visited, loaded, tensors.k, rows, step.tile * M, chunk, WHICH, config.CHUNKS)
            loaded += 1
        for chunk in range(chunks_of(WHICH, config.VALUE_CHUNKS)):
            fill(visited, loaded, tensors.v, rows, step.tile * M, chunk, WHICH, config.VALUE_CHUNKS)
            loaded += 1
        step = step_after(work, step, config)


@gluon.jit
def fill(visited, count, descriptor, rows, row, chunk, WHICH: gl.constexpr, CHUNKS: gl.constexpr):
    """Loads the parts of a chunk, number `count` of those that a warpgroup visits, as soon as there is room."""
    for part in gl.static_range(PARTS):
        column = column_of(chunk, part, WHICH, CHUNKS)
        visited.fill(visited.slot(count, part), Chunks(descriptor, None), rows, row, False, column)


@gluon.jit
def column_of(chunk, PART: gl.constexpr, WHICH: gl.constexpr, CHUNKS: gl.constexpr):
    """Where a part of a warpgroup's chunk begins in a row, each part of which has `CHUNKS` chunks."""
    return (PART * CHUNKS + chunk * SHARERS + WHICH) * CHUNK


@gluon.jit
def attend(
    WHICH: gl.constexpr, QUERIES_STAY: gl.constexpr, config, rings, exchange, results, problem, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Consumer: the scores of its chunks of q and k, all weights, and its chunks of the output."""
    visited = rings.visited
    COUNT: gl.constexpr = chunks_of(WHICH, config.CHUNKS)
    layout: gl.constexpr = product_layout(M)
    work = work_of(problem, config)
    out = zero_sums(chunks_of(WHICH, config.VALUE_CHUNKS))
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.zeros([M], gl.float32, gl.SliceLayout(1, layout))
    if QUERIES_STAY:
        for own in gl.static_range(COUNT):
            acquire_chunk(rings.queries, own)
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        s = gl.zeros([M, M], gl.float32, layout)
        for chunk in range(COUNT):
            product, read = product_of_rows(rings, chunk, read, QUERIES_STAY)
            s += product
        s = sum_of_both(WHICH, s, exchange, index)
        if config.MASKS:
            if (step.tile < work.full_begin) | (step.tile >= work.full_end):
                s = hide(s, float("-inf"), work.first, step.tile * M, work, problem, config)
        before = top
        top = gl.maximum(top, row_maximum(s) * problem.units.scale_log2)
        reference = finite(top)
        p = gl.exp2(s * problem.units.scale_log2 - reference[:, None])
        decay = gl.exp2(before - reference)
        row_sum = row_sum * decay + gl.sum(p, 1)
        out, read = add_products(out, decay, p, visited, read)
        step = step_after(work, step, config)
    store_results(WHICH, out, row_sum, top, results, work, problem, config, HEAD_DIM_V)


@gluon.jit
def product_of_rows(rings, chunk, read, QUERIES_STAY: gl.constexpr):
    """`q kᵀ` over the columns of a chunk, and how many chunks have been visited after it. `read`: before."""
    queries, visited = rings.queries, rings.visited
    of_queries = chunk
    if not QUERIES_STAY:
        of_queries = read
        acquire_chunk(queries, read)
        read += 1
    acquire_chunk(visited, read)
    product = gl.zeros([M, M], gl.float32, product_layout(M))
    product = start_product(product, queries, of_queries, MIDDLE, visited, read, MIDDLE, False)
    product = start_product(product, queries, of_queries, LOW, visited, read, HIGH, True)
    product = start_product(product, queries, of_queries, HIGH, visited, read, LOW, True)
    product = start_product(product, queries, of_queries, MIDDLE, visited, read, HIGH, True)
    product = start_product(product, queries, of_queries, HIGH, visited, read, MIDDLE, True)
    product = without_nan(warpgroup_mma_wait(0, [product]))
    product = start_product(product, queries, of_queries, HIGH, visited, read, HIGH, True)
    product = warpgroup_mma_wait(0, [product])
    if not QUERIES_STAY:
        release_chunk(queries, of_queries)
    release_chunk(visited, read)
    return product, read + 1


@gluon.jit
def start_product(
    product, queries, of_queries, QUERY_PART: gl.constexpr, visited, read, KEY_PART: gl.constexpr, ADDS: gl.constexpr
):  # fmt: skip
    """Starts the product of a part of the queries and one of the keys. ADDS: to the product."""
    a = queries.main_operand(queries.slot(of_queries, QUERY_PART))
    b = visited.main_operand(visited.slot(read, KEY_PART)).permute([1, 0])
    return warpgroup_mma(a, b, product, use_acc=ADDS, is_async=True)


@gluon.jit
def acquire_chunk(ring, count):
    for part in gl.static_range(PARTS):
        ring.acquire(ring.slot(count, part))


@gluon.jit
def release_chunk(ring, count):
    for part in gl.static_range(PARTS):
        ring.release(ring.slot(count, part))


@gluon.jit
def sum_of_both(WHICH: gl.constexpr, s, exchange, index):
    """The scores of a step: the partial ones of both warpgroups. Both get the same bits."""
    OTHER: gl.constexpr = 1 - WHICH
    mbarrier.wait(exchange.taken.index(WHICH), (index & 1) ^ 1)
    exchange.places.index(WHICH).store(s)
    mbarrier.arrive(exchange.there.index(WHICH), count=1)
    mbarrier.wait(exchange.there.index(OTHER), index & 1)
    s += exchange.places.index(OTHER).load(s.type.layout)
    mbarrier.arrive(exchange.taken.index(OTHER), count=1)
    return s


@gluon.jit
def add_products(out, decay, p, visited, read):
    """The output times `decay`, plus `p v`, and how many chunks have been visited after those of v."""
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    high, middle, low = parts_of(p)
    high = gl.convert_layout(high, operand, assert_trivial=True)
    middle = gl.convert_layout(middle, operand, assert_trivial=True)
    low = gl.convert_layout(low, operand, assert_trivial=True)
    sums = ()
    for chunk in gl.static_range(len(out)):
        acquire_chunk(visited, read)
        product = gl.zeros([M, CHUNK], gl.float32, product_layout(CHUNK))
        product = start_values(product, middle, visited, read, MIDDLE, False)
        product = start_values(product, low, visited, read, HIGH, True)
        product = start_values(product, high, visited, read, LOW, True)
        product = start_values(product, middle, visited, read, HIGH, True)
        product = start_values(product, high, visited, read, MIDDLE, True)
        product = without_nan(warpgroup_mma_wait(0, [product]))
        product = start_values(product, high, visited, read, HIGH, True)
        product = warpgroup_mma_wait(0, [product])
        release_chunk(visited, read)
        read += 1
        sums = sums + (decayed_sum(out[chunk], decay, product),)
    return sums, read


@gluon.jit
def decayed_sum(total, decay, product):
    """`total·decay + product`, here and now: LLVM would put off all chunks' sums until the last product, and with them
    the registers of the products."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [total, decay[:, None], product],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def start_values(product, p, visited, read, PART: gl.constexpr, ADDS: gl.constexpr):
    """Starts the product of a part of the weights, in registers, and one of the values. ADDS: to the product."""
    return warpgroup_mma(p, visited.main_operand(visited.slot(read, PART)), product, use_acc=ADDS, is_async=True)


@gluon.jit
def store_results(
    WHICH: gl.constexpr, out, row_sum, top, results, work, problem, config, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Stores the own chunks of out, and the first warpgroup lse. Rows and columns past the end are not written."""
    layout: gl.constexpr = product_layout(CHUNK)
    reference = finite(top)
    own = 1.0
    if results.sinks_ptr is not None:
        rows = HeadRows(work.sequence, work.own_head, 0, 0)
        row_sum, reference, own = join_sink(row_sum, reference, results.sinks_ptr, rows, problem.batch)
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    row = work.first + gl.arange(0, M, gl.SliceLayout(1, layout))
    exists = row < problem.rows_q
    if WHICH == 0:
        lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
        line = (work.sequence.to(gl.int64) * problem.heads + work.own_head) * problem.rows_q
        gl.store(results.lse_ptr + line + row, lse, mask=exists)
    line = ((work.sequence.to(gl.int64) * problem.rows_q + row) * problem.heads + work.own_head) * HEAD_DIM_V
    for chunk in gl.static_range(len(out)):
        column = (chunk * SHARERS + WHICH) * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        place = results.out_ptr + line[:, None] + column[None, :]
        gl.store(place, out[chunk] * inverse[:, None], mask=exists[:, None] & (column < HEAD_DIM_V)[None, :])
