"""Forward kernel for Hopper of float32, heads of 65 to 512 columns, in products of bfloat16.

A thread block has 64 queries, whose columns two warpgroups share (`float32_shares`). Operands come and are multiplied
in parts (`float32_streams`). Per 64 keys (letters and formulas as in `forward`)::

    s = q kᵀ
    p = exp2(c·s - r)
    o = o·exp2(r₀ - r) + p v

`r` is the largest score so far, `r₀` that before.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon
from flashtile.ops.attention.hopper.float32_shares import (
    SHARERS,
    chunks_of,
    first_of_result,
    load_share,
    make_partial_scores,
    make_rings,
    scores_of_step,
    staying_of,
)
from flashtile.ops.attention.hopper.float32_streams import Loads, acquire_staying, add_products
from flashtile.ops.attention.hopper.forward_epilogue import finite, join_sink, load_sink
from flashtile.ops.attention.hopper.pieces import LN_2, HeadRows, M, product_layout, row_maximum
from flashtile.ops.attention.hopper.wide_backward import (
    CHUNK,
    dense_config,
    first_step,
    hide,
    step_after,
    work_of,
    zero_sums,
)


class Results(NamedTuple):
    """Where out and lse go, and the sinks or None."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any


@gluon.jit
def attention_float32_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, problem,
    CHUNKS: gl.constexpr, VALUE_CHUNKS: gl.constexpr, HEAD_DIM_V: gl.constexpr, STAYING: gl.constexpr,
    PLACES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, TOP_LEFT: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """`STAYING`: chunks of queries of each warpgroup that stay on chip. `PLACES`: for the tiles that stream to each.
    The others: `KernelConfig`."""
    config = dense_config(False, M, CHUNKS, VALUE_CHUNKS, HAS_LEFT, HAS_RIGHT, TOP_LEFT, MASKS)
    loads = Loads(q_desc, k_desc, v_desc)
    first = make_rings(0, loads, config, STAYING, PLACES)
    second = make_rings(1, loads, config, STAYING, PLACES)
    partial = make_partial_scores()
    results = Results(out_ptr, lse_ptr, sinks_ptr)
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
    work = work_of(problem, config)
    out = zero_sums(chunks_of(first_of_result(WHICH), config.VALUE_CHUNKS))
    top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    row_sum = gl.zeros([M], gl.float32, gl.SliceLayout(1, layout))
    acquire_staying(rings.own, staying_of(WHICH, STAYING, config.CHUNKS))
    read = 0
    step = first_step(work)
    for index in range(work.steps):
        s, read = scores_of_step(WHICH, STAYING, config, rings, partial, index, read)
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
    store_results(WHICH, out, row_sum, top, results, work, problem, config, HEAD_DIM_V)


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
        row_sum, reference, own = join_sink(row_sum, reference, load_sink(results.sinks_ptr, rows, problem.batch))
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    row = work.first + gl.arange(0, M, gl.SliceLayout(1, layout))
    exists = row < problem.rows_q
    if WHICH == 0:
        lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
        line = (work.sequence.to(gl.int64) * problem.heads + work.own_head) * problem.rows_q
        gl.store(results.lse_ptr + line + row, lse, mask=exists)
    line = ((work.sequence.to(gl.int64) * problem.rows_q + row) * problem.heads + work.own_head) * HEAD_DIM_V
    for chunk in gl.static_range(len(out)):
        column = (first_of_result(WHICH) + chunk * SHARERS) * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        place = results.out_ptr + line[:, None] + column[None, :]
        gl.store(place, out[chunk] * inverse[:, None], mask=exists[:, None] & (column < HEAD_DIM_V)[None, :])
