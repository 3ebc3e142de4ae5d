"""Forward kernel for Hopper of float32, heads of 65 to 512 columns, in products of bfloat16.

A thread block has 64 queries, whose columns two warpgroups share. Operands come and are multiplied in parts
(`convert`). Formulas and letters are those of `forward`; `r` is the largest score so far.
"""

from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import Layout
from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flashtile._backends.launch import named_constants, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import side_parameters
from flashtile.ops.attention.hopper.backward_pieces import ROWS
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, PRODUCER_REGISTERS
from flashtile.ops.attention.hopper.convert import (
    HIGH,
    LOW,
    MIDDLE,
    PARTS,
    Operand,
    split_bf16x3,
    split_operands,
    without_nan,
)
from flashtile.ops.attention.hopper.modifiers import finite, join_row_logit, load_row_logit
from flashtile.ops.attention.hopper.primitives import (
    LN_2,
    Chunks,
    HeadRows,
    M,
    Slot,
    barriers,
    hidden_zero,
    make_ring,
    matrix_layout,
    product_layout,
    row_maximum,
    wait_products,
)
from flashtile.ops.attention.hopper.separate_configs import MAX_REGISTERS, REGISTERS, choose_float32_forward_config
from flashtile.ops.attention.hopper.wide_backward import (
    CHUNK,
    Problem,
    dense_config,
    first_step,
    hide,
    step_after,
    tile_work,
    zero_sums,
)
from flashtile.ops.common.checks import check_programs


class Results(NamedTuple):
    """Addresses of out and lse."""

    out_ptr: Any
    lse_ptr: Any


@gluon.jit
def attention_float32_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAYING: gl.constexpr,
    PLACES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """`STAYING`: chunks of queries of each warpgroup that stay on chip. `PLACES`: for the tiles that stream to each.
    The others: `KernelConfig`."""
    config = dense_config(False, M, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS=MASKS)
    loads = Loads(q_desc, k_desc, v_desc)
    first = make_rings(0, loads, config, STAYING, PLACES)
    second = make_rings(1, loads, config, STAYING, PLACES)
    partial = make_partial_scores()
    results = Results(out_ptr, lse_ptr)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (0, STAYING, config, first, partial, results, problem, HEAD_DIM_V)),
            (attend, (1, STAYING, config, second, partial, results, problem, HEAD_DIM_V)),
            (load_share, (0, STAYING, config, first, loads, problem)),
            (load_share, (1, STAYING, config, second, loads, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def attend(
    WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, partial, results, problem, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Consumer: all weights, and its chunks of the output."""
    layout: gl.constexpr = product_layout(M)
    work = tile_work(problem, config)
    out = zero_sums(warpgroup_chunks(first_result_chunk(WHICH), config.VALUE_CHUNKS))
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.zeros([M], gl.float32, gl.SliceLayout(1, layout))
    acquire_staying(rings.own, resident_chunks(WHICH, STAYING, config.CHUNKS))
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        s, read = step_scores(WHICH, STAYING, config, rings, partial, index, read)
        if config.MASKS:
            if (step.tile < work.full_begin) | (step.tile >= work.full_end):
                s = hide(s, float("-inf"), work.first, step.tile * M, work, problem, config)
        before = top
        top = gl.maximum(top, row_maximum(s) * problem.units.scale_log2)
        reference = finite(top)
        p = gl.exp2(s * problem.units.scale_log2 - reference[:, None])
        decay = gl.exp2(before - reference)
        row_sum = row_sum * decay + gl.sum(p, 1)
        out, read = add_products(out, decay, p, rings.stream, read)
        step = step_after(work, step, config)
    store_results(WHICH, out, row_sum, top, results, work, problem, config=config, HEAD_DIM_V=HEAD_DIM_V)


@gluon.jit
def store_results(
    WHICH: gl.constexpr, out, row_sum, top, results, work, problem, config, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Stores the own chunks of out, and the first warpgroup lse. Rows and columns past the end are not written."""
    layout: gl.constexpr = product_layout(CHUNK)
    reference = finite(top)
    own = 1.0
    logit = load_row_logit(problem.side, work.own_head, work.sequence < problem.batch)
    if logit is not None:
        row_sum, reference, own = join_row_logit(row_sum, reference, logit)
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    row = work.first + gl.arange(0, M, gl.SliceLayout(1, layout))
    exists = row < problem.rows_q
    if WHICH == 0:
        lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
        line = (work.sequence.to(gl.int64) * problem.heads + work.own_head) * problem.rows_q
        gl.store(results.lse_ptr + line + row, lse, mask=exists)
    line = ((work.sequence.to(gl.int64) * problem.rows_q + row) * problem.heads + work.own_head) * HEAD_DIM_V
    for chunk in gl.static_range(len(out)):
        column = (first_result_chunk(WHICH) + chunk * SHARERS) * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        place = results.out_ptr + line[:, None] + column[None, :]
        gl.store(place, out[chunk] * inverse[:, None], mask=exists[:, None] & (column < HEAD_DIM_V)[None, :])


class Parts(NamedTuple):
    """An operand of products: tiles on chip or numbers in registers."""

    low: Any
    middle: Any
    high: Any


# Loads


class Loads(NamedTuple):
    """Descriptors of the parts of own rows, of the visited ones times them, and of the sums' operand."""

    own: Any
    visited: Any
    summed: Any


@gluon.jit
def load_operands(
    STAYING: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, SUM_FIRST: gl.constexpr, SUM_LAST: gl.constexpr,
    SUM_COUNT: gl.constexpr, STRIDE: gl.constexpr, config, own_ring, stream, loads, problem,
):  # fmt: skip
    """Producer: loads what a consumer multiplies, in its order.

    First the `STAYING` chunks of own rows that stay. In each step, every `STRIDE`-th chunk of visited rows from `FIRST`
    on, of the `COUNT` of a row, behind those of own rows that do not stay; then every `STRIDE`-th chunk of the sums'
    operand from `SUM_FIRST` up to `SUM_LAST`, of the `SUM_COUNT` of a row.
    """
    STREAMING: gl.constexpr = FIRST + STAYING * STRIDE
    work = tile_work(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    load_staying(own_ring, STAYING, FIRST, STRIDE, COUNT, loads.own, own, row=work.first)
    loaded = 0
    step = first_step(work)
    for _ in range(work.steps):
        rows = HeadRows(work.sequence, step.head, 0, 0)
        row = step.tile * ROWS
        for chunk in range(FIRST, STREAMING, STRIDE):
            loaded = load_chunk(stream, loaded, chunk, COUNT, loads.visited, rows, row)
        for chunk in range(STREAMING, COUNT, STRIDE):
            loaded = load_chunk(stream, loaded, chunk, COUNT, loads.own, own, work.first)
            loaded = load_chunk(stream, loaded, chunk, COUNT, loads.visited, rows, row)
        for chunk in range(SUM_FIRST, SUM_LAST, STRIDE):
            loaded = load_chunk(stream, loaded, chunk, SUM_COUNT, loads.summed, rows, row)
        step = step_after(work, step, config)


@gluon.jit
def load_staying(
    ring, STAYING: gl.constexpr, FIRST: gl.constexpr, STRIDE: gl.constexpr, COUNT: gl.constexpr, descriptor, rows, row
):  # fmt: skip
    """Loads so many chunks of own rows, which stay: of the `COUNT` of a row every `STRIDE`-th from `FIRST` on. How many
    they are, no compiler sees: unrolled, the loop would need more registers than a producer has."""
    for index in range(STAYING + hidden_zero(row)):
        for part in gl.static_range(PARTS):
            column = parts_column(FIRST + index * STRIDE, part, COUNT)
            ring.load(Slot(index * PARTS + part, 0), Chunks(descriptor, None), rows, row, False, column)


@gluon.jit
def load_chunk(stream, loaded, chunk, COUNT: gl.constexpr, descriptor, rows, row):
    """Loads a chunk of the `COUNT` of a row, after `loaded` tiles. Returns how many are loaded then."""
    for part in gl.static_range(PARTS):
        slot = stream.slot(loaded + part)
        stream.fill(slot, Chunks(descriptor, None), rows, row, False, parts_column(chunk, part, COUNT))
    return loaded + PARTS


@gluon.jit
def parts_column(chunk, PART: gl.constexpr, COUNT: gl.constexpr):
    """The begin of a tile in a row of parts of `COUNT` chunks each."""
    return PART * (COUNT * CHUNK) + chunk * CHUNK


@gluon.jit
def acquire_staying(ring, STAYING: gl.constexpr):
    """Waits for own chunks, which are loaded once."""
    for place in gl.static_range(STAYING * PARTS):
        ring.acquire(Slot(place, 0))


# Products


@gluon.jit
def chunked_product(own, STAYING: gl.constexpr, stream, read, COUNT: gl.constexpr):
    """`a bᵀ` `[64, 64]` over `COUNT` chunks of own rows, of which `own` has those that stay, and of visited ones, after
    `read` tiles of the stream. Returns it, and how many tiles are read then."""
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    for chunk in range(STAYING):
        place = chunk * PARTS
        a = load_operand(own, Parts(Slot(place + LOW, 0), Slot(place + MIDDLE, 0), Slot(place + HIGH, 0)))
        total += bf16x3_product(a, stream, read, True)
        read += PARTS
    for _ in range(STAYING, COUNT):
        slots = chunk_slots(stream, read)
        stream.acquire(slots.low)
        stream.acquire(slots.middle)
        stream.acquire(slots.high)
        total += bf16x3_product(load_operand(stream, slots), stream, read + PARTS, True)
        stream.release(slots.low)
        stream.release(slots.middle)
        stream.release(slots.high)
        read += 2 * PARTS
    return total, read


@gluon.jit
def load_operand(ring, slots):
    return Parts(ring.main_operand(slots.low), ring.main_operand(slots.middle), ring.main_operand(slots.high))


@gluon.jit
def add_products(total, decay, a, stream, read):
    """The sums times `decay` (None is 1) plus `a b`, with a chunk of b for each sum, after `read` tiles of the stream.
    `a`: float32, in registers. Returns the sums, and how many tiles are read then."""
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    high, middle, low = split_bf16x3(a)
    parts = Parts(
        gl.convert_layout(low, operand, assert_trivial=True),
        gl.convert_layout(middle, operand, assert_trivial=True),
        gl.convert_layout(high, operand, assert_trivial=True),
    )
    sums = ()
    for chunk in gl.static_range(len(total)):
        sums = sums + (add_now(total[chunk], decay, bf16x3_product(parts, stream, read + chunk * PARTS, False)),)
    return sums, read + len(total) * PARTS


@gluon.jit
def add_now(total, decay, product):
    """`total·decay + product`, before whatever comes after this. The compiler would put off all additions to the end of
    the step, and have no registers for the products that wait for theirs."""
    if decay is None:
        total = gl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [total, product], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        total = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [total, decay[:, None], product],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return total


@gluon.jit
def bf16x3_product(a, stream, read, TRANSPOSED: gl.constexpr):
    """`a b`, `[64, 64]`, where b is the chunk after `read` tiles of the stream, transposed if so. It releases b."""
    place = chunk_slots(stream, read)
    product = gl.zeros([ROWS, CHUNK], gl.float32, product_layout(CHUNK))
    stream.acquire(place.low)
    product = start_product(product, a.high, stream, place.low, TRANSPOSED, False)
    stream.acquire(place.middle)
    product = start_product(product, a.middle, stream, place.middle, TRANSPOSED, True)
    product = start_product(product, a.high, stream, place.middle, TRANSPOSED, True)
    wait_products(2)
    stream.release(place.low)
    stream.acquire(place.high)
    product = start_product(product, a.low, stream, place.high, TRANSPOSED, True)
    product = start_product(product, a.middle, stream, place.high, TRANSPOSED, True)
    product = without_nan(warpgroup_mma_wait(0, [product]))
    stream.release(place.middle)
    product = start_product(product, a.high, stream, place.high, TRANSPOSED, True)
    product = warpgroup_mma_wait(0, [product])
    stream.release(place.high)
    return product


@gluon.jit
def chunk_slots(stream, read):
    """The slots of the chunk after `read` tiles of the stream."""
    return Parts(stream.slot(read + LOW), stream.slot(read + MIDDLE), stream.slot(read + HIGH))


@gluon.jit
def start_product(product, a, stream, slot, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr):
    """Starts the product of a part and a tile of the stream. ADDS: to the product."""
    b = stream.main_operand(slot)
    if TRANSPOSED:
        b = b.permute([1, 0])
    return warpgroup_mma(a, b, product, use_acc=ADDS, is_async=True)


#: Warpgroups that share rows.
SHARERS = gl.constexpr(2)


class Rings(NamedTuple):
    """Tiles of a warpgroup: own chunks that stay, and its stream."""

    own: Any
    stream: Any


class PartialScores(NamedTuple):
    """A place for each warpgroup, which it writes and the other one reads. `there`, `taken`: barriers of each."""

    places: Any
    there: Any
    taken: Any


@gluon.constexpr_function
def warpgroup_chunks(first, chunks):
    """How many chunks a warpgroup has, from its first one on."""
    return (chunks + SHARERS - 1 - first) // SHARERS


@gluon.constexpr_function
def first_result_chunk(which):
    """The first chunk of a warpgroup in the result."""
    return SHARERS - 1 - which


@gluon.constexpr_function
def resident_chunks(which, staying, chunks):
    """How many own chunks of a warpgroup stay, if `staying` of each do that have so many."""
    return min(staying, warpgroup_chunks(which, chunks))


@gluon.jit
def make_rings(WHICH: gl.constexpr, loads, config, STAYING: gl.constexpr, PLACES: gl.constexpr):
    OWN: gl.constexpr = resident_chunks(WHICH, STAYING, config.CHUNKS)
    return Rings(
        own=make_ring(Chunks(loads.own, None), OWN * PARTS, 0),
        stream=make_ring(Chunks(loads.visited, None), PLACES, 1),
    )


@gluon.jit
def make_partial_scores():
    return PartialScores(
        places=gl.allocate_shared_memory(gl.float32, [SHARERS, ROWS, ROWS], matrix_layout(ROWS, 32)),
        there=barriers(SHARERS, 1),
        taken=barriers(SHARERS, 1),
    )


@gluon.jit
def load_share(WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, loads, problem):
    """Producer of a warpgroup: its chunks."""
    load_operands(
        resident_chunks(WHICH, STAYING, config.CHUNKS), WHICH, config.CHUNKS, first_result_chunk(WHICH),
        config.VALUE_CHUNKS, config.VALUE_CHUNKS, SHARERS, config=config, own_ring=rings.own, stream=rings.stream,
        loads=loads, problem=problem,
    )  # fmt: skip


@gluon.jit
def step_scores(WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, partial, index, read):
    """The products of own and visited rows in step `index`, the same bits for both warpgroups. `read`: tiles of the
    stream that are read before; returns how many are after it."""
    OTHER: gl.constexpr = 1 - WHICH
    OWN: gl.constexpr = resident_chunks(WHICH, STAYING, config.CHUNKS)
    s, read = chunked_product(rings.own, OWN, rings.stream, read, warpgroup_chunks(WHICH, config.CHUNKS))
    mbarrier.wait(partial.taken.index(WHICH), (index & 1) ^ 1)
    partial.places.index(WHICH).store(s)
    mbarrier.arrive(partial.there.index(WHICH), count=1)
    mbarrier.wait(partial.there.index(OTHER), index & 1)
    s += partial.places.index(OTHER).load(s.type.layout)
    mbarrier.arrive(partial.taken.index(OTHER), count=1)
    return s, read


def float32_forward_kernels(call: Call) -> tuple[dict[str, Kernel], dict[str, Layout | None]]:
    """The kernels of a forward as a pipeline launches them, and the layouts of the parts of q, k and v."""
    spec, config = call.spec, choose_float32_forward_config(*call.head_dims)
    tiles = -(-call.rows_q // CONSUMER_ROWS)
    programs = tiles * call.lines if call.rows_k else 0
    check_programs("q", programs)
    width, value_width = CHUNK.value * config.chunks, CHUNK.value * config.value_chunks
    operands = {
        name: Operand(name, of.shape, of.strides, value_width if name == "v" else width)
        for name, of in (("q", call.q), ("k", call.k), ("v", call.v))
    }
    split = split_operands(operands, CONSUMER_ROWS, CHUNK.value)
    side = side_parameters(call, covered=False, by_column=False, staged=True)
    parameters: dict[str, Any] = {
        **{f"{name}_desc": moved for name, moved in split.moved.items()},
        **dict.fromkeys(("out_ptr", "lse_ptr"), pointer_to(torch.float32, 16)),
        "problem": Problem.from_call(call, side.pointers, own_tiles=tiles),
    }
    constants = {
        **named_constants(config),
        "HEAD_DIM_V": call.head_dims[1],
        "REGISTERS": REGISTERS,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "HAS_LEFT": spec.window_left is not None,
        "HAS_RIGHT": spec.window_right is not None,
        "TOP_LEFT": spec.banded and spec.top_left,
        "MASKS": spec.banded or call.rows_k % CONSUMER_ROWS != 0,
    }
    kernel = Kernel(attention_float32_forward_kernel, parameters, constants, programs, max_registers=MAX_REGISTERS)
    return ({**split.kernels, "forward": kernel}, split.layouts) if programs else ({"forward": kernel}, {})
