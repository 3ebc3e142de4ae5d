"""Backward kernels for Hopper of float32, in products of bfloat16: dv, and dk or dq.

They multiply the parts of q, k, v and dout (`convert`), `WIDTH` columns each. A tile is one part of 64 rows.

Formulas, roles and walks are those of `wide_backward`. Otherwise:

- Partial products are added from the smallest on. NaN in their sum becomes 0 before the product of the high parts,
  because the rest of an infinite number is NaN.
- The tensor core adds up one step, from zero. It cuts its sums, so the steps are added in ordinary float32.
- Weights and gradients of scores pass from one warpgroup to the other in float32.
- Gradients are stored out of registers.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flashtile.ops.attention.hopper.backward_pieces import DELTA, LSE, ROWS
from flashtile.ops.attention.hopper.convert import HIGH, LOW, MIDDLE, PARTS, split_bf16x3, without_nan
from flashtile.ops.attention.hopper.primitives import (
    Chunks,
    HeadRows,
    Slot,
    barriers,
    hidden_zero,
    make_ring,
    matrix_layout,
    product_layout,
    tile_slice,
)
from flashtile.ops.attention.hopper.wide_backward import (
    Exchange,
    Operands,
    Shared,
    compute_p,
    dense_config,
    first_step,
    load_statistic,
    step_after,
    tile_work,
)

#: Columns of a tile, whatever head_dim is; past it they are zeros.
WIDTH = gl.constexpr(128)


class Turn(NamedTuple):
    """A step, as the tiles of its parts see it: the phase of their barriers, and a zero that no compiler sees."""

    phase: Any
    zero: Any


@gluon.jit
def attention_float32_dv_kernel(
    k_desc, q_desc, dout_desc, dv_ptr, statistics_ptr, problem,
    HEAD_DIM_V: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dv of 128 keys, 64 of each of two warpgroups. Constants: `wide_backward.KernelConfig`."""
    config = dense_config(True, 2 * ROWS, 1, 1, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS=MASKS)
    keys = make_ring(Chunks(k_desc, None), 2 * PARTS, 0)
    visited = Operands(
        of_scores=make_ring(Chunks(q_desc, None), PARTS, 2), of_values=make_ring(Chunks(dout_desc, None), PARTS, 2)
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_values, (0, config, keys, visited, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (sum_values, (1, config, keys, visited, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (load_parts, (2, config, keys, visited.of_scores, k_desc, q_desc, problem)),
            (load_parts, (0, config, keys, visited.of_values, k_desc, dout_desc, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def attention_float32_dk_dq_kernel(
    own_scores_desc, own_values_desc, visited_scores_desc, visited_values_desc, gradient_ptr, statistics_ptr, problem,
    HEAD_DIM: gl.constexpr, OF_KEYS: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dk of 64 keys, or dq of 64 queries. Constants: `wide_backward.KernelConfig`."""
    config = dense_config(OF_KEYS, ROWS, 1, 1, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS=MASKS)
    shared = Shared(
        own=Operands(
            of_scores=make_ring(Chunks(own_scores_desc, None), PARTS, 0),
            of_values=make_ring(Chunks(own_values_desc, None), PARTS, 0),
        ),
        visited=Operands(
            of_scores=make_ring(Chunks(visited_scores_desc, None), PARTS, 2),
            of_values=make_ring(Chunks(visited_values_desc, None), PARTS, 1),
        ),
        exchange=Exchange(
            place=gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], matrix_layout(ROWS, 32)),
            weights_there=barriers(1, 1),
            gradients_there=barriers(1, 1),
        ),
    )
    own, visited = shared.own, shared.visited
    fence_async_shared()
    gl.warp_specialize(
        [
            (weigh, (config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (differentiate, (config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (load_parts, (1, config, own.of_scores, visited.of_scores, own_scores_desc, visited_scores_desc, problem)),
            (load_parts, (1, config, own.of_values, visited.of_values, own_values_desc, visited_values_desc, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def load_parts(OWN_TILES: gl.constexpr, config, own, visited, own_desc, visited_desc, problem):
    """Producer of one operand: of so many tiles of own rows, and then of the visited rows of each step."""
    work = tile_work(problem, config)
    rows = HeadRows(work.sequence, work.own_head, 0, 0)
    for tile in gl.static_range(OWN_TILES):
        for part in gl.static_range(PARTS):
            slot = Slot(tile * PARTS + part, 0)
            own.load(slot, Chunks(own_desc, None), rows, work.first + tile * ROWS, False, part * WIDTH)
    step = first_step(work)
    for index in range(work.steps):
        rows = HeadRows(work.sequence, step.head, 0, 0)
        for part in gl.static_range(PARTS):
            slot = Slot(part, index & 1)
            visited.fill(slot, Chunks(visited_desc, None), rows, step.tile * ROWS, False, part * WIDTH)
        step = step_after(work, step, config)


# Consumers


@gluon.jit
def sum_values(
    WHICH: gl.constexpr, config, keys, visited, dv_ptr, statistics_ptr, problem, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Consumer: dv of 64 keys."""
    FIRST: gl.constexpr = WHICH * PARTS
    work = tile_work(problem, config)
    first = work.first + WHICH * ROWS
    total = gl.zeros([ROWS, WIDTH], gl.float32, product_layout(WIDTH))
    acquire_own(keys, FIRST)
    step = first_step(work)
    for index in range(work.steps):
        turn = step_turn(index, step)
        lse = load_statistic(statistics_ptr, LSE, first, step, work, problem, config)
        s = chunked_product(keys, FIRST, visited.of_scores, turn, True)
        p = compute_p(s, lse, first, step, work, problem, config)
        total = add_product(total, p, visited.of_values, turn, 0)
        step = step_after(work, step, config)
    store_sums(total, 1.0, 0, dv_ptr, first, work, problem, config=config, HEAD_DIM=HEAD_DIM_V)


@gluon.jit
def weigh(config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr):
    """Consumer: weights, and the first half of the columns of dk or dq."""
    own, visited, exchange = shared.own, shared.visited, shared.exchange
    HALF: gl.constexpr = WIDTH // 2
    work = tile_work(problem, config)
    total = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    acquire_own(own.of_scores, 0)
    step = first_step(work)
    for index in range(work.steps):
        turn = step_turn(index, step)
        lse = load_statistic(statistics_ptr, LSE, work.first, step, work, problem, config)
        s = chunked_product(own.of_scores, 0, visited.of_scores, turn, False)
        p = compute_p(s, lse, work.first, step, work, problem, config)
        exchange.place.store(p)
        mbarrier.arrive(exchange.weights_there.index(0), count=1)
        mbarrier.wait(exchange.gradients_there.index(0), index & 1)
        ds = exchange.place.load(product_layout(ROWS))
        total = add_product(total, ds, visited.of_scores, turn, 0)
        step = step_after(work, step, config)
    store_sums(total, problem.scale, 0, gradient_ptr, work.first, work, problem, config=config, HEAD_DIM=HEAD_DIM)


@gluon.jit
def differentiate(config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr):
    """Consumer: gradients of the scores, and the second half of the columns of dk or dq. Its product of values comes
    while the other waits for the next operands of scores, which nobody can load before they have been multiplied."""
    own, visited, exchange = shared.own, shared.visited, shared.exchange
    HALF: gl.constexpr = WIDTH // 2
    work = tile_work(problem, config)
    total = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    acquire_own(own.of_values, 0)
    step = first_step(work)
    for index in range(work.steps):
        turn = step_turn(index, step)
        delta = load_statistic(statistics_ptr, DELTA, work.first, step, work, problem, config)
        dp = chunked_product(own.of_values, 0, visited.of_values, turn, True)
        mbarrier.wait(exchange.weights_there.index(0), index & 1)
        ds = exchange.place.load(dp.type.layout) * (dp - delta)
        exchange.place.store(ds)
        mbarrier.arrive(exchange.gradients_there.index(0), count=1)
        total = add_product(total, ds, visited.of_scores, turn, HALF)
        step = step_after(work, step, config)
    store_sums(total, problem.scale, HALF, gradient_ptr, work.first, work, problem, config=config, HEAD_DIM=HEAD_DIM)


# Products of parts


@gluon.jit
def step_turn(index, step):
    """The turn in which step `index` comes. That a tile's number is not negative, no compiler can see."""
    return Turn(index & 1, hidden_zero(step.tile))


@gluon.jit
def part_slot(turn, PLACE: gl.constexpr):
    """The slot of a part in its turn, at a constant place, because a ring has one for each part of a step. If the
    compiler saw that, it would keep the descriptors of all products in registers."""
    return Slot(PLACE + turn.zero, turn.phase)


@gluon.jit
def acquire_own(ring, FIRST: gl.constexpr):
    """Waits for own rows, which are loaded once."""
    for part in gl.static_range(PARTS):
        ring.acquire(Slot(FIRST + part, 0))


@gluon.jit
def chunked_product(own, FIRST: gl.constexpr, visited, turn, RELEASES: gl.constexpr):
    """`a bᵀ` `[64, 64]` over all columns: own parts from `FIRST` on, visited ones, which it RELEASES or not."""
    for part in gl.static_range(PARTS):
        visited.acquire(part_slot(turn, part))
    total = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    total = start_product(total, own, FIRST + MIDDLE, visited, MIDDLE, turn, False)
    total = start_product(total, own, FIRST + LOW, visited, HIGH, turn, True)
    total = start_product(total, own, FIRST + HIGH, visited, LOW, turn, True)
    total = start_product(total, own, FIRST + MIDDLE, visited, HIGH, turn, True)
    total = start_product(total, own, FIRST + HIGH, visited, MIDDLE, turn, True)
    total = without_nan(warpgroup_mma_wait(0, [total]))
    if RELEASES:
        visited.release(part_slot(turn, MIDDLE))
        visited.release(part_slot(turn, LOW))
    total = start_product(total, own, FIRST + HIGH, visited, HIGH, turn, True)
    total = warpgroup_mma_wait(0, [total])
    if RELEASES:
        visited.release(part_slot(turn, HIGH))
    return total


@gluon.jit
def start_product(total, own, OWN: gl.constexpr, visited, VISITED: gl.constexpr, turn, ADDS: gl.constexpr):
    """Starts the product of a part of the own rows and one of the visited. ADDS: to the total."""
    b = visited.main_operand(part_slot(turn, VISITED)).permute([1, 0])
    return warpgroup_mma(own.main_operand(part_slot(turn, OWN)), b, total, use_acc=ADDS, is_async=True)


@gluon.jit
def add_product(total, a, visited, turn, COLUMN: gl.constexpr):
    """The sums plus `a b` (a float32, in registers), of b's columns from `COLUMN` on. Releases b."""
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    high, middle, low = split_bf16x3(a)
    high = gl.convert_layout(high, operand, assert_trivial=True)
    middle = gl.convert_layout(middle, operand, assert_trivial=True)
    low = gl.convert_layout(low, operand, assert_trivial=True)
    for part in gl.static_range(PARTS):
        visited.acquire(part_slot(turn, part))
    COLUMNS: gl.constexpr = total.shape[1]
    product = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    product = start_columns(product, middle, visited, MIDDLE, turn, COLUMN, COLUMNS, ADDS=False)
    product = start_columns(product, low, visited, HIGH, turn, COLUMN, COLUMNS, ADDS=True)
    product = start_columns(product, high, visited, LOW, turn, COLUMN, COLUMNS, ADDS=True)
    product = start_columns(product, middle, visited, HIGH, turn, COLUMN, COLUMNS, ADDS=True)
    product = start_columns(product, high, visited, MIDDLE, turn, COLUMN, COLUMNS, ADDS=True)
    product = without_nan(warpgroup_mma_wait(0, [product]))
    visited.release(part_slot(turn, MIDDLE))
    visited.release(part_slot(turn, LOW))
    product = start_columns(product, high, visited, HIGH, turn, COLUMN, COLUMNS, ADDS=True)
    product = warpgroup_mma_wait(0, [product])
    visited.release(part_slot(turn, HIGH))
    return total + product


@gluon.jit
def start_columns(
    product, a, visited, PART: gl.constexpr, turn, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, ADDS: gl.constexpr
):  # fmt: skip
    """Starts the product of `a`, in registers, and columns of a part of the visited rows. ADDS: to the product."""
    b = tile_slice(visited.main_operand(part_slot(turn, PART)), COLUMN, COLUMNS, 1)
    return warpgroup_mma(a, b, product, use_acc=ADDS, is_async=True)


@gluon.jit
def store_sums(
    total, scale, COLUMN: gl.constexpr, gradient_ptr, first, work, problem, config, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Stores the sums of 64 rows from `first` on, times `scale`, whose columns begin at `COLUMN`."""
    layout: gl.constexpr = total.type.layout
    heads = problem.heads_kv if config.OF_KEYS else problem.heads
    rows = problem.rows_k if config.OF_KEYS else problem.rows_q
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = COLUMN + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))
    line = ((work.sequence.to(gl.int64) * rows + row) * heads + work.gradient_head) * HEAD_DIM
    exists = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    gl.store(gradient_ptr + line[:, None] + column[None, :], total * scale, mask=exists)
