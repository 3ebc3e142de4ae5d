"""Backward kernels for Hopper of float32: dv, and dk or dq, in products of bfloat16, of operands in parts
(`float32_forward`). Formulas, walks and roles are those of `wide_backward`; in dv two warpgroups share 64 keys."""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier
from flashtile.ops.attention.hopper.backward_pieces import DELTA, LSE, ROWS
from flashtile.ops.attention.hopper.convert import PARTS
from flashtile.ops.attention.hopper.float32_backward import store_sums
from flashtile.ops.attention.hopper.float32_forward import (
    SHARERS,
    Loads,
    acquire_staying,
    add_products,
    chunked_product,
    first_result_chunk,
    load_operands,
    load_share,
    make_partial_scores,
    make_rings,
    resident_chunks,
    step_scores,
    warpgroup_chunks,
)
from flashtile.ops.attention.hopper.primitives import Chunks, barriers, make_ring, matrix_layout, product_layout
from flashtile.ops.attention.hopper.wide_backward import (
    CHUNK,
    Exchange,
    compute_p,
    dense_config,
    first_step,
    load_statistic,
    step_after,
    tile_work,
    zero_sums,
)


class Shared(NamedTuple):
    """Shared by the roles of dk and dq: own chunks that stay, the streams of either consumer, and the `Exchange`."""

    own_scores: Any
    own_values: Any
    for_weights: Any
    for_gradients: Any
    exchange: Any


@gluon.jit
def attention_float32_wide_dv_kernel(
    k_desc, q_desc, dout_desc, dv_ptr, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, STAYING: gl.constexpr, PLACES: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dv of 64 keys. `STAYING`: chunks of keys of each warpgroup that stay on chip. `PLACES`: for the tiles that stream
    to each. The others: `KernelConfig`."""
    config = dense_config(True, ROWS, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS=MASKS)
    loads = Loads(k_desc, q_desc, dout_desc)
    first = make_rings(0, loads, config, STAYING, PLACES)
    second = make_rings(1, loads, config, STAYING, PLACES)
    partial = make_partial_scores()
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_values, (0, STAYING, config, first, partial, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (sum_values, (1, STAYING, config, second, partial, dv_ptr, statistics_ptr, problem, HEAD_DIM_V)),
            (load_share, (0, STAYING, config, first, loads, problem)),
            (load_share, (1, STAYING, config, second, loads, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def attention_float32_wide_dk_dq_kernel(
    own_scores_desc, own_values_desc, visited_scores_desc, visited_values_desc, gradient_ptr, statistics_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, STAYING_SCORES: gl.constexpr, STAYING_VALUES: gl.constexpr,
    WEIGHT_PLACES: gl.constexpr, GRADIENT_PLACES: gl.constexpr, HEAD_DIM: gl.constexpr, OF_KEYS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dk of 64 keys, or dq of 64 queries. `STAYING_SCORES`, `STAYING_VALUES`: own chunks that stay on chip.
    `WEIGHT_PLACES`, `GRADIENT_PLACES`: for the tiles that stream to either consumer. The others: `KernelConfig`."""
    config = dense_config(OF_KEYS, ROWS, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS=MASKS)
    shared = Shared(
        own_scores=make_ring(Chunks(own_scores_desc, None), STAYING_SCORES * PARTS, 0),
        own_values=make_ring(Chunks(own_values_desc, None), STAYING_VALUES * PARTS, 0),
        for_weights=make_ring(Chunks(visited_scores_desc, None), WEIGHT_PLACES, 1),
        for_gradients=make_ring(Chunks(visited_values_desc, None), GRADIENT_PLACES, 1),
        exchange=Exchange(
            place=gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], matrix_layout(ROWS, 32)),
            weights_there=barriers(1, 1),
            gradients_there=barriers(1, 1),
        ),
    )
    of_weights = Loads(own_scores_desc, visited_scores_desc, visited_scores_desc)
    of_gradients = Loads(own_values_desc, visited_values_desc, visited_scores_desc)
    fence_async_shared()
    gl.warp_specialize(
        [
            (weigh, (STAYING_SCORES, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (differentiate, (STAYING_VALUES, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM)),
            (load_for_weights, (STAYING_SCORES, config, shared, of_weights, problem)),
            (load_for_gradients, (STAYING_VALUES, config, shared, of_gradients, problem)),
        ],
        [4, 1, 1],
        [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


# Producers of dk and dq


@gluon.jit
def load_for_weights(STAYING: gl.constexpr, config, shared, loads, problem):
    """Loads what `weigh` multiplies."""
    load_operands(
        STAYING, 0, config.CHUNKS, 0, first_half(config), config.CHUNKS, 1, config=config, own_ring=shared.own_scores,
        stream=shared.for_weights, loads=loads, problem=problem,
    )  # fmt: skip


@gluon.jit
def load_for_gradients(STAYING: gl.constexpr, config, shared, loads, problem):
    """Loads what `differentiate` multiplies."""
    load_operands(
        STAYING, 0, config.VALUE_CHUNKS, first_half(config), config.CHUNKS, config.CHUNKS, 1, config=config,
        own_ring=shared.own_values, stream=shared.for_gradients, loads=loads, problem=problem,
    )  # fmt: skip


# Consumers


@gluon.jit
def sum_values(
    WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, partial, dv_ptr, statistics_ptr, problem,
    HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Consumer: all weights, and its chunks of dv."""
    work = tile_work(problem, config)
    total = zero_sums(warpgroup_chunks(first_result_chunk(WHICH), config.VALUE_CHUNKS))
    acquire_staying(rings.own, resident_chunks(WHICH, STAYING, config.CHUNKS))
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        lse = load_statistic(statistics_ptr, LSE, work.first, step, work, problem, config)
        s, read = step_scores(WHICH, STAYING, config, rings, partial, index, read)
        p = compute_p(s, lse, work.first, step, work, problem, config)
        total, read = add_products(total, None, p, rings.stream, read)
        step = step_after(work, step, config)
    store_chunks(
        total, 1.0, first_result_chunk(WHICH), SHARERS, dv_ptr, work, problem, config=config, HEAD_DIM=HEAD_DIM_V
    )


@gluon.constexpr_function
def first_half(config):
    """The chunks of dk or dq that `weigh` sums; `differentiate` sums the rest."""
    return (config.CHUNKS + 1) // 2


@gluon.jit
def weigh(STAYING: gl.constexpr, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr):
    """Consumer: weights, and the first half of the columns of dk or dq."""
    own, stream, exchange = shared.own_scores, shared.for_weights, shared.exchange
    work = tile_work(problem, config)
    total = zero_sums(first_half(config))
    acquire_staying(own, STAYING)
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        lse = load_statistic(statistics_ptr, LSE, work.first, step, work, problem, config)
        s, read = chunked_product(own, STAYING, stream, read, config.CHUNKS)
        p = compute_p(s, lse, work.first, step, work, problem, config)
        exchange.place.store(p)
        mbarrier.arrive(exchange.weights_there.index(0), count=1)
        mbarrier.wait(exchange.gradients_there.index(0), index & 1)
        ds = exchange.place.load(product_layout(ROWS))
        total, read = add_products(total, None, ds, stream, read)
        step = step_after(work, step, config)
    store_chunks(total, problem.scale, 0, 1, gradient_ptr, work, problem, config=config, HEAD_DIM=HEAD_DIM)


@gluon.jit
def differentiate(
    STAYING: gl.constexpr, config, shared, gradient_ptr, statistics_ptr, problem, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Consumer: gradients of the scores, and the second half of the columns of dk or dq."""
    own, stream, exchange = shared.own_values, shared.for_gradients, shared.exchange
    work = tile_work(problem, config)
    total = zero_sums(config.CHUNKS - first_half(config))
    acquire_staying(own, STAYING)
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        delta = load_statistic(statistics_ptr, DELTA, work.first, step, work, problem, config)
        dp, read = chunked_product(own, STAYING, stream, read, config.VALUE_CHUNKS)
        mbarrier.wait(exchange.weights_there.index(0), index & 1)
        ds = exchange.place.load(dp.type.layout) * (dp - delta)
        exchange.place.store(ds)
        mbarrier.arrive(exchange.gradients_there.index(0), count=1)
        total, read = add_products(total, None, ds, stream, read)
        step = step_after(work, step, config)
    store_chunks(
        total, problem.scale, first_half(config), 1, gradient_ptr, work, problem, config=config, HEAD_DIM=HEAD_DIM
    )


@gluon.jit
def store_chunks(
    total, scale, FIRST: gl.constexpr, STRIDE: gl.constexpr, gradient_ptr, work, problem, config,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Stores the sums of the own rows, times `scale`: every `STRIDE`-th chunk of the gradient from `FIRST` on."""
    for chunk in gl.static_range(len(total)):
        store_sums(
            total[chunk], scale, (FIRST + chunk * STRIDE) * CHUNK, gradient_ptr, work.first, work, problem,
            config=config, HEAD_DIM=HEAD_DIM,
        )  # fmt: skip
