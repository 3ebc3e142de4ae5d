"""What changes scores and weights in the Hopper backward, on the transposed tiles `sᵀ` `[keys, queries]`.

The objects are those of the forward (`scores`, `tables`, `dropout`, `blocks`). Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.backward_pieces import ROWS, mask_probs
from flashtile.ops.attention.hopper.backward_tiles import visited_tile
from flashtile.ops.attention.hopper.blocks import FULL, load_bits, where_visible
from flashtile.ops.attention.hopper.dropout import dropout_of_head, kept_weights
from flashtile.ops.attention.hopper.pieces import hidden_zero, pack
from flashtile.ops.attention.hopper.scores import (
    LOG2_E,
    capped,
    distance_shift,
    in_eights_and_distances,
    load_slope,
    lowered_by_distance,
    near_shift,
)
from flashtile.ops.attention.hopper.tables import (
    TableTiles,
    add_bias,
    hide_by_mask,
    load_table,
    moved_bias,
    table_of_head,
)


@gluon.constexpr_function
def _enlargement(dtype, sums_slopes, config):
    """The factor by which weights are handed on larger. In float16 they lose bits below 2⁻¹⁴, which a sum over all of
    them shows, as that of slopes, and a small derivative of a score function. Derivatives may be large, too."""
    if dtype != gl.float16:
        return 1.0
    if sums_slopes:
        return 2.0**14
    return 2.0**6 if config.FUNCTION_DERIVATIVE and not config.DERIVATIVES_APART else 1.0


@gluon.jit
def modified_scores(s, key, first_query, first_key, head, tables, work, problem, config):
    """Scores `sᵀ` with what changes them, and what `derivatives_of` takes: the tanh of the soft cap, or if
    FUNCTION_DERIVATIVE the derivatives. `tables`: what `load_tables` returns."""
    side = problem.side
    units = problem.units
    if units.cap_scale is not None:
        s = capped(s, units.cap_scale)
    inner = s
    if config.SCORE_FUNCTION is not None:
        query = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s, derivatives = config.SCORE_FUNCTION(
            s * units.function_scale, work.sequence, work.first_head + head, query[None, :], key[:, None], first_query,
            first_key, problem.score_change.captured, problem.score_change.sizes, tables.read,
        )  # fmt: skip
        if config.FUNCTION_DERIVATIVE:
            if units.cap_scale is not None:
                derivatives *= 1.0 - inner * inner
            inner = derivatives
    if side.bias is not None:
        s = add_bias(s, tables.bias, LOG2_E / units.scale_log2)
    if side.alibi_slopes is not None:
        slope = load_slope(side, problem.numbers, work.sequence, work.first_head + head, True)
        shift = distance_shift(work.seq_q, work.seq_k, problem.numbers.origin)
        near = near_shift(shift, first_query // config.M * config.M, work.keys, config.M)
        s = lowered_by_distance(s, key, first_query + near, slope * (LOG2_E / units.scale_log2))
    if side.mask is not None:
        s = hide_by_mask(s, tables.mask)
    return s, inner


@gluon.jit
def weights_of(
    s, lse, positions, first_key, step, kind, tables, part: gl.constexpr, work, config, problem, blocks,
    MASK: gl.constexpr,
):  # fmt: skip
    """`pᵀ` `[64, QUERIES]` of part `part` of a step, and what `derivatives_of` takes. `lse` is still to be subtracted
    from the products `s`. `kind`: of the tile in the block mask. `tables`: as `load_tables` returns them."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    query = step.tile * config.M + part * QUERIES
    visited = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    s, inner = modified_scores(s, positions, visited, first_key, step.head, tables, work, problem, config)
    if config.TILE_K > 0:
        if kind != FULL:
            column = step.tile * config.PARTS + part
            bits = load_bits(blocks, kind, first_key, column, QUERIES, config.TILE_K, config.TILE_Q)
            s = where_visible(bits, s, float("-inf"))
    p = gl.exp2(s * problem.units.scale_log2 - lse[None, :])
    if MASK:
        if (step.tile < work.full_begin) | (step.tile >= work.full_end):
            p = mask_probs(p, positions, query, work, problem, config)
    if problem.side.bias is not None or config.SCORE_FUNCTION is not None:
        if visited + QUERIES > work.seq_q:
            p = without_rows_past_end(p, visited, work)
    if config.FUNCTION_DERIVATIVE:
        inner = gl.where(p == 0.0, 0.0, inner)  # what a function says of pairs that nobody sees does not count
    return p, inner


@gluon.jit
def load_tables(
    first_key, slot, step, part: gl.constexpr, work, bias_tiles, problem, config, WHICH: gl.constexpr
):  # fmt: skip
    """The tiles of bias and mask that belong to `sᵀ` of part `part` of a step, whose queries lie in `slot`, and of the
    `WHICH`-th 64 keys, and what a score function reads for them. `bias_tiles`: those that TMA brought, or None."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    side = problem.side
    bias = 0
    mask = 0
    if bias_tiles is not None:
        tile = bias_tiles.index(slot.place * (config.KEYS // ROWS) + WHICH)
        bias = moved_bias(tile, part * QUERIES, QUERIES, s_layout, True)
    elif side.bias is not None:
        bias = _load_table(
            side.bias, problem.numbers.bias, config.BIAS_COLUMN, first_key, step, part, work, config, 0.0
        )
    if side.mask is not None:
        mask = _load_table(side.mask, problem.numbers.mask, config.MASK_COLUMN, first_key, step, part, work, config, 0)
    read = 0
    if config.SCORE_READS is not None:
        first_query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
        query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(0, s_layout))
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        read = config.SCORE_READS(
            work.sequence, work.first_head + step.head, query[None, :], key[:, None], first_query, first_key,
            problem.score_change.captured, problem.score_change.sizes,
        )  # fmt: skip
    return TableTiles(bias, mask, read)


@gluon.jit
def _load_table(
    pointer, numbers, STRIDE_COLUMN: gl.constexpr, first_key, step, part: gl.constexpr, work, config,
    OTHER: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = config.M // config.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    first = table_of_head(pointer, numbers, work.sequence, work.first_head + step.head)
    return load_table(first, numbers, STRIDE_COLUMN, query, first_key, QUERIES, ROWS, s_layout, OTHER, True)


@gluon.jit
def dropout_of(head, work, problem):
    """The `HeadDropout` of a head, counted from the first of the group; 0 without dropout."""
    dropout = 0
    if problem.side.dropout_seed is not None:
        heads = problem.heads_kv * work.group
        dropout = dropout_of_head(problem.side, problem.numbers, work.sequence, work.first_head + head, heads)
    return dropout


@gluon.jit
def dropout_of_step(dropout, step, work, problem, config):
    """The same of a step, from that of the step before. Its words take ten rounds of Philox, one after another, as long
    as a product. So they are computed anew only where several heads visit the keys, and while a product is in flight.
    Beside a score function there are no registers to keep them in."""
    if problem.side.dropout_seed is not None:
        if config.SCORE_FUNCTION is not None:
            dropout = dropout_of(step.head, work, problem)
        elif work.group > 1:
            dropout = dropout_of(step.head, work, problem)
    return dropout


@gluon.jit
def with_dropout(p, dropout, first_key, step, part: gl.constexpr, work, config, problem):
    """The weights for dv, and what is a factor of the scores' gradients (`signed_by_dropout`). `dropout`: of the step's
    head (`dropout_of`)."""
    weights = p
    if problem.side.dropout_seed is not None:
        query = visited_tile(work, step.tile, config) * config.M + part * (config.M // config.PARTS)
        weights, p = signed_by_dropout(p, dropout, query, first_key)
    return weights, p


@gluon.jit
def without_rows_past_end(p, first_query, work):
    """`pᵀ` `[keys, queries]`, 0 for queries past the end, to which a table may say anything."""
    query = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
    return gl.where((query < work.seq_q)[None, :], p, 0.0)


@gluon.jit
def gradient_factors(p, inner, probs, problem, config):
    """The factors of `dpᵀ - delta` in 16 bits: `pᵀ`, or with a soft cap or a function `pᵀ · derivatives_of(inner)`. If
    DERIVATIVES_APART the second factor is no part of them. `probs`: the weights for dv, rounded."""
    LARGER: gl.constexpr = _enlargement(probs.dtype, problem.slope_sums_ptr is not None, config)
    factors = probs
    if config.DERIVATIVES and not config.DERIVATIVES_APART:
        factors = pack(p * derivatives_of(inner, config) * LARGER, probs.dtype)
    elif LARGER > 1 or problem.side.dropout_seed is not None:
        factors = pack(p * LARGER, probs.dtype)
    return factors


@gluon.jit
def derivatives_of(inner, config):
    """The derivatives of scores by products, without the scale. `inner`: as `modified_scores` returns it."""
    if not config.FUNCTION_DERIVATIVE:
        inner = 1.0 - inner * inner
    return inner


@gluon.jit
def signed_by_dropout(p, dropout, first_query, first_key):
    """The weights `pᵀ` that dropout keeps, which it does not scale yet, and all weights, with a minus before those that
    it drops. So which these are takes no registers."""
    layout: gl.constexpr = p.type.layout
    kept = kept_weights(dropout, first_query, first_key, p.shape[1], p.shape[0], layout, True)
    return gl.where(kept, p, 0.0), gl.where(kept, p, -p)


@gluon.jit
def score_gradients(factors, dp, delta, dtype: gl.constexpr, problem, config):
    """`dsᵀ` from `dpᵀ` and the factors of `dpᵀ - delta`: weights, with a minus before those that dropout drops.
    `dtype`: in which the factors were handed on."""
    factors *= 1.0 / _enlargement(dtype, problem.slope_sums_ptr is not None, config)
    if problem.side.dropout_seed is not None:
        kept = gl.where(factors > 0.0, dp * problem.numbers.dropout.scale, 0.0)
        ds = gl.abs(factors) * (kept - delta[None, :])
    else:
        ds = factors * (dp - delta[None, :])
    return ds


@gluon.jit
def add_to_slope_sums(ds, positions, step, part: gl.constexpr, work, config, problem):
    """Adds to minus the gradient of a head's slope what part `part` of a step gives to each key: the sum over queries
    of `dsᵀ · |distance|`. Nobody else adds to these keys of this head, and a thread's additions keep their order. So
    the sums are the same whenever the steps are."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    diagonal = distance_shift(work.seq_q, work.seq_k, problem.numbers.origin)
    # If a compiler saw that these are the distances of the scores, it would keep them in registers meanwhile.
    eights, distance = in_eights_and_distances(ds, positions, query + diagonal + hidden_zero(step.tile))
    sums = gl.sum(gl.sum(eights * gl.abs(distance), 1), 1)
    key = gl.convert_layout(positions, sums.type.layout)
    row = (work.first_head + step.head).to(gl.int64) * problem.rows_k
    if config.PACKED:
        row += work.begin_k
    else:
        row += (work.sequence * (problem.heads_kv * problem.group)).to(gl.int64) * problem.rows_k
    gl.atomic_add(problem.slope_sums_ptr + row + key, sums, mask=key < work.seq_k, sem="relaxed")
