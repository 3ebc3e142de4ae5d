"""How the Hopper kernels of float32 load and multiply: parts of numbers, in streams of tiles.

A *tile* is one part (`convert`) of 64 rows and of a *chunk*, 64 columns. Each consumer has a *stream*: a ring
through which its tiles come in the order in which it multiplies them. A chunk that is multiplied twice comes twice. So
no tile stays longer than its products, and loads go on while the consumer waits for somebody else. Of *own* rows, which
are multiplied in each step, the first chunks *stay* on chip, as many as there is room for; the others come through the
stream as well.

A product of two numbers is six products of parts. They are added from the smallest on, from zero in each step and
chunk. The low part of a chunk comes first, and each part is multiplied with all that it meets at once: the low one with
the other side's high part, the middle one with its middle and high, the high one with all three. NaN in the sum of the
first five becomes 0 before the product of the high parts, because the rest of an infinite number is NaN. The tensor
core cuts its sums, so those of steps and chunks are added up in ordinary float32.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from flashtile.ops.attention.hopper.backward_pieces import ROWS
from flashtile.ops.attention.hopper.convert import HIGH, LOW, MIDDLE, PARTS, parts_of, without_nan
from flashtile.ops.attention.hopper.pieces import Chunks, HeadRows, Slot, hidden_zero, product_layout, wait_products
from flashtile.ops.attention.hopper.wide_backward import CHUNK, first_step, step_after, work_of


class Parts(NamedTuple):
    """An operand of products: tiles on chip or numbers in registers."""

    low: Any
    middle: Any
    high: Any


# Loads


class Loads(NamedTuple):
    """Descriptors of the parts of what a producer loads: own rows, the visited ones that they are multiplied with, and
    those that are multiplied into the sums."""

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
    work = work_of(problem, config)
    own = HeadRows(work.sequence, work.own_head, 0, 0)
    load_staying(own_ring, STAYING, FIRST, STRIDE, COUNT, loads.own, own, work.first)
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
            column = column_of(FIRST + index * STRIDE, part, COUNT)
            ring.load(Slot(index * PARTS + part, 0), Chunks(descriptor, None), rows, row, False, column)


@gluon.jit
def load_chunk(stream, loaded, chunk, COUNT: gl.constexpr, descriptor, rows, row):
    """Loads a chunk of the `COUNT` of a row, after `loaded` tiles. Returns how many are loaded then."""
    for part in gl.static_range(PARTS):
        slot = stream.slot(loaded + part)
        stream.fill(slot, Chunks(descriptor, None), rows, row, False, column_of(chunk, part, COUNT))
    return loaded + PARTS


@gluon.jit
def column_of(chunk, PART: gl.constexpr, COUNT: gl.constexpr):
    """Where a tile begins in a row of parts of `COUNT` chunks each."""
    return PART * (COUNT * CHUNK) + chunk * CHUNK


@gluon.jit
def acquire_staying(ring, STAYING: gl.constexpr):
    """Waits for own chunks, which are loaded once."""
    for place in gl.static_range(STAYING * PARTS):
        ring.acquire(Slot(place, 0))


# Products


@gluon.jit
def product_of_rows(own, STAYING: gl.constexpr, stream, read, COUNT: gl.constexpr):
    """`a bᵀ` `[64, 64]` over `COUNT` chunks, of own rows and of visited ones, which come after `read` tiles of the
    stream. Returns it, and how many tiles are read then. `own`: those that stay."""
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    for chunk in range(STAYING):
        place = chunk * PARTS
        a = operand_of(own, Parts(Slot(place + LOW, 0), Slot(place + MIDDLE, 0), Slot(place + HIGH, 0)))
        total += product_of_parts(a, stream, read, True)
        read += PARTS
    for _ in range(STAYING, COUNT):
        slots = slots_of(stream, read)
        stream.acquire(slots.low)
        stream.acquire(slots.middle)
        stream.acquire(slots.high)
        total += product_of_parts(operand_of(stream, slots), stream, read + PARTS, True)
        stream.release(slots.low)
        stream.release(slots.middle)
        stream.release(slots.high)
        read += 2 * PARTS
    return total, read


@gluon.jit
def operand_of(ring, slots):
    return Parts(ring.main_operand(slots.low), ring.main_operand(slots.middle), ring.main_operand(slots.high))


@gluon.jit
def add_products(total, decay, a, stream, read):
    """The sums times `decay` (None is 1) plus `a b`, where b has as many chunks as there are sums, after `read` tiles
    of the stream. Returns them, and how many tiles are read then. `a`: float32, in registers."""
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    high, middle, low = parts_of(a)
    parts = Parts(
        gl.convert_layout(low, operand, assert_trivial=True),
        gl.convert_layout(middle, operand, assert_trivial=True),
        gl.convert_layout(high, operand, assert_trivial=True),
    )
    sums = ()
    for chunk in gl.static_range(len(total)):
        sums = sums + (add_now(total[chunk], decay, product_of_parts(parts, stream, read + chunk * PARTS, False)),)
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
def product_of_parts(a, stream, read, TRANSPOSED: gl.constexpr):
    """`a b`, `[64, 64]`, where b is the chunk after `read` tiles of the stream, transposed if so. It releases b."""
    place = slots_of(stream, read)
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
def slots_of(stream, read):
    """The slots of the chunk after `read` tiles of the stream."""
    return Parts(stream.slot(read + LOW), stream.slot(read + MIDDLE), stream.slot(read + HIGH))


@gluon.jit
def start_product(product, a, stream, slot, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr):
    """Starts the product of a part and a tile of the stream. ADDS: to the product."""
    b = stream.main_operand(slot)
    if TRANSPOSED:
        b = b.permute([1, 0])
    return warpgroup_mma(a, b, product, use_acc=ADDS, is_async=True)
