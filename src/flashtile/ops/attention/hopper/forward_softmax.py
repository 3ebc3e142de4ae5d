"""The consumers' arithmetic in the Hopper forward: products, what changes scores, an online softmax whose references
rarely move, and the epilogue.

The reference `r` `[M]` cancels out of `o / l`. It only keeps powers of two within range, so it need not follow the
running maximum of a row. It moves when weights would leave the range of their dtype, and then `o` and `l` are rescaled.

bfloat16 weights have all their bits from 2⁻¹²⁶ to 2¹²⁷. The reference is placed well above the first scores that a row
sees, and stays until a weight passes 2³². The sums of a tile show that before the tile is multiplied by `v`, so the
loop needs no maxima, shuffles or rescaling, a third of the usual instructions. A tile with such a weight is
exponentiated once more, against new references.

float16 weights have all their bits from 2⁻¹⁴ to 2¹⁵. The reference is the maximum of the first tile, and stays until a
score is larger by 15 in log2. The loop compares the maximum of each tile before it takes exponentials.

Whether a reference moves is decided for each row by its own scores, so the bits of a row do not depend on other rows,
nor on tiles that are hidden from it (`first_reference`, `first_sums`). A warp that has nothing to raise does not wait
for one that has.

FlashAttention-4 rescales lazily too, at a threshold of 8.

Modifiers of scores and weights are applied in this order, each an object that `modifiers` or `blocks` has:

- once for a tile of queries, what belongs to its head (`consume_tile` in `forward`);
- for each key tile, before the wait for the product: `load_table_tiles`, so that their latency passes meanwhile;
- after the wait: `modify_scores`, and after the exponentials and row sums `drop_weights`.

The epilogue stores lse, with the sink of a head where there is one, and out. Letters are those of `primitives` and
`forward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.cache import cache_factor
from flashtile.ops.attention.hopper.modifiers import (
    FULL,
    LEAST_UNIT,
    LOG2_E,
    TableTiles,
    add_bias,
    capped,
    head_dropout,
    hide_by_mask,
    hide_outside_tree,
    join_row_logit,
    kept_weights,
    load_descale,
    load_row_logit,
    load_slope,
    load_table,
    lowered_by_distance,
    moved_bias,
    raised_to_near,
    where_visible,
)
from flashtile.ops.attention.hopper.primitives import (
    LN_2,
    Chunks,
    M,
    any_above,
    coordinates,
    join_columns,
    mask_scores,
    matrix,
    pack,
    pin_before_wait,
    release,
    row_maxima,
    row_maximum,
    row_sums,
    scale_rows,
    split_off,
    tile_slice,
    wait_products,
)

#: How far above a row's largest score its reference is placed, in log2, with bfloat16 weights; and the largest weight,
#: or sum of a tile's weights in a thread. Between them is room for scores that rise by 50 (natural logarithm). Products
#: with values of `v` from 2⁻⁷⁸ to 2⁸² stay within the range of float32.
HEADROOM = gl.constexpr(40.0)
LARGEST_WEIGHT = gl.constexpr(2.0**32)

#: The largest sum whose exponent tells by how much to raise a reference. Above, weights may be infinite.
_LARGEST_FINITE = gl.constexpr(2.0**126)

#: The largest float16 weight, in log2.
LARGEST_FLOAT16_EXPONENT = gl.constexpr(15.0)

#: The reference of a row that has seen nothing: whatever it sees first is too large for it.
NOTHING_SEEN = gl.constexpr(-(2.0**100))


class Softmax(NamedTuple):
    """Statistics of rows: references `[M]`, in units of log2, and in parts sums of weights `[M, 8]` and, where they are
    asked for, the largest weights `[M, 4]`."""

    reference: Any
    row_sum: Any
    largest: Any


# Products


@gluon.jit
def query_operand(q, slot, s_layout: gl.constexpr, config):
    """The queries as an operand, in registers or where they lie. In registers, their slot is free for the next tile."""
    query = q.operand(slot)
    main = query.main
    tail = query.tail
    if config.Q_IN_REGISTERS:
        layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 32 // q.tiles.dtype.primitive_bitwidth)
        main = main.load(layout)
        if q.TAIL > 0:
            tail = tail.load(layout)
        q.release(slot)
    return Chunks(main, tail)


@gluon.jit
def start_scores(query, rings, slot, zeros, config):
    """Starts `s = q kᵀ` `[M, N]`. Columns past the head are left out: a tile of 256 is 128, 64 and 32 where heads have
    224. Queries in registers are not cut."""
    k = rings.k
    keys = k.main_operand(slot)
    s = zeros
    if config.Q_IN_REGISTERS:
        s = warpgroup_mma(query.main, keys.permute([1, 0]), s, use_acc=False, is_async=True)
    else:
        for halvings in gl.static_range(5):
            s = _start_columns(query.main, keys, s, config.SCORE_COLUMNS, 256 >> halvings)
    if k.TAIL > 0:
        s = warpgroup_mma(query.tail, k.tail_operand(slot).permute([1, 0]), s, is_async=True)
    if rings.k_tail is not None:
        rings.k_tail.acquire(slot)
        s = warpgroup_mma(query.tail, rings.k_tail.main_operand(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _start_columns(q, k, s, COLUMNS: gl.constexpr, COUNT: gl.constexpr):
    """Adds the product of `COUNT` columns to `s` if `COLUMNS` has that power of two; larger ones come before."""
    if COLUMNS & COUNT:
        FIRST: gl.constexpr = COLUMNS - COLUMNS % (2 * COUNT)
        columns = tile_slice(k, FIRST, COUNT, 1).permute([1, 0])
        s = warpgroup_mma(tile_slice(q, FIRST, COUNT, 1), columns, s, use_acc=FIRST > 0, is_async=True)
    return s


@gluon.jit
def wait_scores(scores, rings, slot, AFTER: gl.constexpr):
    """Waits for scores, with `AFTER` products in flight that were started after them. Keys are released as soon as
    they have been multiplied: where a tail has a ring of its own, the first chunk before it."""
    if rings.k_tail is not None:
        wait_products(AFTER + 1)
        rings.k.release(slot)
    s = warpgroup_mma_wait(AFTER, [scores])
    if rings.k_tail is not None:
        rings.k_tail.release(slot)
    else:
        rings.k.release(slot)
    return s


@gluon.jit
def start_values(p, out, v, slot):
    """Starts `o += p v` `[M, E]`."""
    main = warpgroup_mma(p, v.main_operand(slot), out.main, is_async=True)
    tail = out.tail
    if v.TAIL > 0:
        layout: gl.constexpr = gl.DotOperandLayout(0, tail.type.layout, p.type.layout.k_width)
        p = gl.convert_layout(p, layout, assert_trivial=True)
        tail = warpgroup_mma(p, v.tail_operand(slot), tail, is_async=True)
    return Chunks(main, tail)


@gluon.jit
def wait_values(out, v):
    """Waits until no product is in flight."""
    main = out.main
    tail = out.tail
    if v.TAIL > 0:
        main, tail = warpgroup_mma_wait(0, [main, tail])
    else:
        main = warpgroup_mma_wait(0, [main])
    return Chunks(main, tail)


# Weights, and the references that they are taken against


@gluon.jit
def first_reference(highest, dtype: gl.constexpr):
    """The references `[M]` after the first tile, whose largest scores are `highest`, in units of log2: those that
    `raised_references` gives a row which sees its first keys in a later tile. The maximum keeps the product in
    `highest` and this sum from becoming one operation here alone."""
    reference = gl.maximum(highest, NOTHING_SEEN)
    if dtype != gl.float16:
        reference += HEADROOM
    return reference


@gluon.jit
def exponents(s, scale_log2, reference):
    """log2 of weights `[M, N]`. One operation, which rounds once: of two, the compiler makes one in some kernels and
    places alone, and the bits of a row would depend on where it is computed."""
    return gl.fma(s, scale_log2, -reference[:, None])


@gluon.jit
def first_sums(probs, dtype: gl.constexpr, config):
    """The sums of the weights of the first tile, in parts, added in the order in which a later tile adds those of a row
    that sees its first keys there: of float16 in the pieces of `exponentials`."""
    if dtype == gl.float16 and config.AHEAD > 0:
        pieces = split_off(probs, config.AHEAD)
        for i in gl.static_range(len(pieces)):
            if i == 0:
                tile_sum = row_sums(pieces[i])
            else:
                tile_sum += row_sums(pieces[i])
    else:
        tile_sum = row_sums(probs)
    return tile_sum


@gluon.jit
def weights_by_sums(
    s, n, modifiers, view, softmax, in_flight, v, v_slot, p_layout: gl.constexpr, config, WHICH: gl.constexpr
):  # fmt: skip
    """bfloat16 weights of the `n`-th key tile, statistics, and `out` when its product has ended. Weights come first,
    because they show in which rows they are too large."""
    scale_log2 = modifiers.scale_log2
    row_sum = softmax.row_sum
    reference = softmax.reference
    largest = softmax.largest
    probs, out, tile_sum, tile_largest = exponentials(s, scale_log2, reference, in_flight, v, v_slot, config)
    p = gl.convert_layout(pack(drop_weights(probs, n, modifiers, view), gl.bfloat16), p_layout)
    if any_above(tile_sum, LARGEST_WEIGHT, WHICH):
        reference, alpha = raised_references(s, scale_log2, row_sum, tile_sum, reference, WHICH)
        again = gl.exp2(exponents(s, scale_log2, reference))
        # The random bits are computed once more, for they would be too many to be kept.
        p = gl.convert_layout(pack(drop_weights(again, n, modifiers, view), gl.bfloat16), p_layout)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        row_sum *= factor
        tile_sum = gl.where(factor == 1.0, tile_sum, row_sums(again))
        if config.MAX_SCORES:
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, largest.type.layout))[:, None]
            largest *= factor
            tile_largest = gl.where(factor == 1.0, tile_largest, row_maxima(again))
        out = scale_rows(out, alpha, v)
    return p, Softmax(reference, row_sum + tile_sum, larger(largest, tile_largest, config)), out


@gluon.jit
def raised_references(s, scale_log2, row_sum, tile_sum, reference, WHICH: gl.constexpr):
    """New references of the rows with a weight that is too large, the old ones of the others, and the factors `[M]`
    that lead from the old unit to the new one, which are 1 for these others alone.

    A row is raised by a whole number, so its sums and `o` keep their bits, or to its largest score where weights are
    infinite.
    """
    layout: gl.constexpr = reference.type.layout
    largest = gl.convert_layout(gl.max(tile_sum, 1), layout)
    raised = reference + (exponent(largest) + HEADROOM)
    if any_above(tile_sum, _LARGEST_FINITE, WHICH):
        summed = reference + (exponent(gl.convert_layout(gl.max(row_sum, 1), layout)) + 1.0)
        highest = gl.maximum(row_maximum(s) * scale_log2, summed)
        raised = gl.where(largest > _LARGEST_FINITE, highest + HEADROOM, raised)
    too_large = largest > LARGEST_WEIGHT
    raised = gl.where(too_large, raised, reference)
    return raised, gl.where(too_large, gl.exp2(reference - raised), 1.0)


@gluon.jit
def exponent(x):
    """The integer part of log2 of numbers that are not negative; of 0 it is -127."""
    return ((x.to(gl.int32, bitcast=True) >> 23) - 127).to(gl.float32)


@gluon.jit
def weights_by_maxima(
    s, n, modifiers, view, softmax, in_flight, v, v_slot, p_layout: gl.constexpr, config, WHICH: gl.constexpr
):  # fmt: skip
    """float16 weights of the `n`-th key tile, statistics, and `out` when its product has ended. Scores come first,
    because references follow those that are too large."""
    scale_log2 = modifiers.scale_log2
    row_sum = softmax.row_sum
    reference = softmax.reference
    largest = softmax.largest
    highest = gl.maximum(row_maximum(s) * scale_log2, NOTHING_SEEN)  # so that no difference takes the product in
    rises = any_above(highest - reference, LARGEST_FLOAT16_EXPONENT, WHICH)
    alpha = gl.full([M], 1.0, gl.float32, reference.type.layout)
    if rises:
        raised = gl.where(highest - reference > LARGEST_FLOAT16_EXPONENT, highest, reference)
        alpha = gl.exp2(reference - raised)
        row_sum *= gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        if config.MAX_SCORES:
            largest *= gl.convert_layout(alpha, gl.SliceLayout(1, largest.type.layout))[:, None]
        reference = raised
    probs, out, tile_sum, tile_largest = exponentials(s, scale_log2, reference, in_flight, v, v_slot, config)
    p = gl.convert_layout(pack(drop_weights(probs, n, modifiers, view), gl.float16), p_layout)
    if rises:
        out = scale_rows(out, alpha, v)
    return p, Softmax(reference, row_sum + tile_sum, larger(largest, tile_largest, config)), out


@gluon.jit
def exponentials(s, scale_log2, reference, in_flight, v, v_slot, config):
    """Weights of a tile in float32, `out` when its product `in_flight` has come to an end (0 without one), and sums
    and largest of the weights, in parts.

    Only some of the exponentials come while `p v` is in flight, the others among the conversions: the units for
    exponentials work while the others do.
    """
    out = gl.to_tensor(0)
    if config.AHEAD > 0:
        pieces = split_off(exponents(s, scale_log2, reference), config.AHEAD)
        for i in gl.static_range(len(pieces)):
            piece = gl.exp2(pieces[i])
            if i == 0:
                probs = piece
                tile_sum = row_sums(probs)
                if in_flight is not None:
                    tile_sum = pin_before_wait(tile_sum)
                tile_largest = largest_weights(probs, config)
                if in_flight is not None:
                    out = wait_values(in_flight, v)
                    v.release(v_slot)
            else:
                tile_sum += row_sums(piece)
                tile_largest = larger(tile_largest, largest_weights(piece, config), config)
                probs = join_columns(probs, piece)
    else:
        if in_flight is not None:
            out = wait_values(in_flight, v)
            v.release(v_slot)
        probs = gl.exp2(exponents(s, scale_log2, reference))
        tile_sum = row_sums(probs)
        tile_largest = largest_weights(probs, config)
    return probs, out, tile_sum, tile_largest


@gluon.jit
def largest_weights(probs, config):
    """The largest weights of rows, in parts: the largest scores by distance from the reference; or 0."""
    largest = gl.to_tensor(0)
    if config.MAX_SCORES:
        largest = row_maxima(probs)
    return largest


@gluon.jit
def larger(one, other, config):
    """The larger weights of either, where anybody asks for them."""
    if config.MAX_SCORES:
        one = gl.maximum(one, other)
    return one


class HeadModifiers(NamedTuple):
    """The modifiers of the scores of one head of one sequence.

    Attributes:
        numbers: `parameters.SideNumbers`.
        scale_log2, cap_scale: `scores.ScoreUnits`, with the factors of 8-bit inputs.
        slope: of ALiBi, in units of scores; None without.
        bias, mask: pointers (`tables.head_table`); None without.
        dropout: `dropout.HeadDropout`; None without.
        function: `FunctionInputs`.
        tree: `cache.Tree`; None without.
    """

    numbers: Any
    scale_log2: Any
    cap_scale: Any
    slope: Any
    bias: Any
    mask: Any
    dropout: Any
    function: Any
    tree: Any


class FunctionInputs(NamedTuple):
    """A score function's inputs: `function_scale` of `ScoreUnits`, addresses and sizes of tensors, or None."""

    scale: Any
    sequence: Any
    head: Any
    captured: Any
    sizes: Any


@gluon.jit
def score_factor(problem, sequence, head, exists, config):
    """The factor of the scores of a head of 8-bit inputs, or of keys in a cache; None for others."""
    factor = None
    if config.CACHED:
        factor = cache_factor(problem.cache.k_factors, problem.cache_numbers.k_factors, head // problem.group)
    if config.EIGHT_BITS:
        side = problem.side
        descales = problem.numbers.descales
        factor = load_descale(side.descale_q, descales.q, descales.group, sequence, head, exists)
        factor *= load_descale(side.descale_k, descales.k, descales.group, sequence, head, exists)
    return factor


@gluon.jit
def head_cap_scale(units, factor):
    """The `cap_scale` of a head; None without a soft cap."""
    cap_scale = units.cap_scale
    if factor is not None and units.cap_scale is not None:
        cap_scale = units.cap_scale * factor
    return cap_scale


@gluon.jit
def head_scale(units, factor):
    """The `scale_log2` of a head."""
    unit = units.scale_log2
    if factor is not None and units.cap_scale is None:
        unit = units.scale_log2 * factor
        unit = gl.where(gl.abs(unit) < LEAST_UNIT, LEAST_UNIT, unit)
    return unit


@gluon.jit
def head_slope(problem, sequence, head, unit, exists):
    """ALiBi's slope of a head, in units of its scores; None without ALiBi."""
    slope = load_slope(problem.side, problem.numbers, sequence, head, exists)
    if slope is not None:
        slope *= LOG2_E / unit
    return slope


@gluon.jit
def forward_dropout(problem, sequence, head):
    """The `HeadDropout` of a head; None without dropout."""
    dropout = None
    if problem.side.dropout_seed is not None:
        dropout = head_dropout(problem.side, problem.numbers, sequence, head, problem.heads)
    return dropout


@gluon.jit
def function_scores(s, first_key, read, function, view, config):
    """The user's function of scores `[M, N]`, without the factor of the exponential, and of its reads."""
    key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return config.SCORE_FUNCTION(
        s * function.scale, batch=function.sequence, head=function.head, q_index=view.row[:, None],
        k_index=key[None, :], first_q=view.first, first_k=first_key, captured=function.captured, sizes=function.sizes,
        reads=read,
    )  # fmt: skip


@gluon.jit
def load_table_tiles(n, slot, modifiers, view, rings, config, layout: gl.constexpr, WHICH: gl.constexpr):
    """Tiles of tables, and a score function's reads, for the `n`-th key tile in `slot`, as scores lie."""
    N: gl.constexpr = rings.k.ROWS
    bias = 0
    mask = 0
    if rings.bias is not None:
        bias = moved_bias(rings.bias.index(slot.place * config.CONSUMERS + WHICH), 0, M, layout, False)
    elif modifiers.bias is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        bias = load_table(
            modifiers.bias, modifiers.numbers.bias, config.BIAS_COLUMN, view.first, n * N, M, N, layout=layout,
            OTHER=float("nan"), TRANSPOSED=False,
        )  # fmt: skip
    if modifiers.mask is not None:
        mask = load_table(
            modifiers.mask, modifiers.numbers.mask, config.MASK_COLUMN, view.first, n * N, M, N, layout=layout, OTHER=0,
            TRANSPOSED=False,
        )  # fmt: skip
    read = 0
    if config.SCORE_READS is not None:
        function = modifiers.function
        first_key = n * N
        key = first_key + gl.arange(0, N, gl.SliceLayout(0, layout))
        read = config.SCORE_READS(
            batch=function.sequence, head=function.head, q_index=view.row[:, None], k_index=key[None, :],
            first_q=view.first, first_k=first_key, captured=function.captured, sizes=function.sizes,
        )  # fmt: skip
    return TableTiles(bias, mask, read)


@gluon.jit
def modify_scores(s, n, kind, bits, tables, modifiers, view, MAY_CUT: gl.constexpr, config):
    """Scores `[M, N]` of the `n`-th key tile with what changes them, and -inf where a row does not see the key."""
    first_key = n * s.shape[1]
    if modifiers.cap_scale is not None:
        s = capped(s, modifiers.cap_scale)
    if config.SCORE_FUNCTION is not None:
        s = function_scores(s, first_key, tables.read, modifiers.function, view, config)
    if modifiers.bias is not None:
        s = add_bias(s, tables.bias, LOG2_E / modifiers.scale_log2)
    if modifiers.slope is not None:
        s = lowered_by_distance(s, view.row + view.near_shift, first_key, modifiers.slope)
    if modifiers.mask is not None:
        s = hide_by_mask(s, tables.mask)
    if modifiers.tree is not None:
        if first_key + s.shape[1] > view.shift:
            s = hide_outside_tree(s, modifiers.tree, view.first, first_key - view.shift)
    if config.TILE_Q > 0:
        if kind != FULL:
            s = where_visible(bits, s, float("-inf"))
    if MAY_CUT:
        if (n < view.tiles.full_begin) | (n >= view.tiles.full_end):
            s = mask_scores(
                s, view.row, n * s.shape[1], view.shift, view.keys, view.window_left, view.window_right,
                HAS_LEFT=config.HAS_LEFT, HAS_RIGHT=config.HAS_RIGHT,
            )  # fmt: skip
    return s


@gluon.jit
def drop_weights(probs, n, modifiers, view):
    """Weights `[M, N]` of the `n`-th key tile, 0 where dropout drops them. What is kept is not scaled here, but once
    with the division by the row sums."""
    if modifiers.dropout is not None:
        N: gl.constexpr = probs.shape[1]
        layout: gl.constexpr = probs.type.layout
        kept = kept_weights(modifiers.dropout, view.first, n * N, M, N, layout, False)
        probs = gl.where(kept, probs, 0.0)
    return probs


class Output(NamedTuple):
    """Places for results: `tiles` in shared memory on their way out, as `Chunks`, which consumers that share one use in
    turn (`free`), or None where out leaves through the place of the queries; `descriptors` of out; lse; and the largest
    scores, or None."""

    tiles: Any
    free: Any
    descriptors: Any
    lse_ptr: Any
    max_scores_ptr: Any


@gluon.jit
def make_out_tiles(descriptors, config):
    """Room in shared memory for out on its way to device memory: for each consumer, or for one after the other."""
    desc = descriptors.main
    tail_desc = descriptors.tail
    main = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + desc.block_shape, desc.layout)
    tail = main
    if tail_desc is not None:
        tail = gl.allocate_shared_memory(desc.dtype, [config.OUT_PLACES] + tail_desc.block_shape, tail_desc.layout)
    return Chunks(main, tail)


@gluon.jit
def store_statistics(softmax, rows, view, part, split, problem, output, config):
    """Stores lse, and the largest scores if they are asked for, with the first part of the values. Returns what `o` is
    to be multiplied by. A sink belongs to the first split of the keys."""
    row = view.row
    row_sum = gl.convert_layout(gl.sum(softmax.row_sum, 1), row.type.layout)
    reference = softmax.reference
    own = 1.0
    side = problem.side
    slope = load_slope(side, problem.numbers, rows.sequence, rows.head, rows.sequence < problem.batch)
    logit = load_row_logit(side, rows.head, rows.sequence < problem.batch)
    if logit is not None:
        if problem.splits is not None:
            logit = gl.where(split == 0, logit, float("-inf"))
        row_sum, reference, own = join_row_logit(row_sum, reference, _raised_to_near(logit, slope, view, 1))
    if config.EIGHT_BITS:
        descales = problem.numbers.descales
        exists = rows.sequence < problem.batch
        own *= load_descale(side.descale_v, descales.v, descales.group, rows.sequence, rows.head, exists)
    if config.CACHED:
        factor = cache_factor(problem.cache.v_factors, problem.cache_numbers.v_factors, rows.head // problem.group)
        if factor is not None:
            own *= factor
    inverse = gl.where(row_sum == 0.0, 0.0, own / row_sum)
    if side.dropout_seed is not None:
        inverse *= problem.numbers.dropout.scale
    lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
    lse = _raised_to_near(lse, slope, view, -1)
    if config.PACKED:
        offset = rows.head.to(gl.int64) * problem.rows_q + rows.begin
    else:
        offset = (rows.sequence.to(gl.int64) * problem.heads + rows.head) * problem.rows_q
    stored = row < rows.length
    if problem.splits is not None:
        size = problem.heads.to(gl.int64) * problem.rows_q
        offset += split * (size if config.PACKED else size * problem.batch)
    if config.CACHED:
        if problem.cache.token_starts is not None:
            # By heads, of which the rows are some.
            row = (rows.head * problem.rows_q + row).to(gl.int64) * problem.batch
            offset = rows.sequence
    if config.VALUE_PARTS > 1:
        stored &= part == 0
    gl.store(output.lse_ptr + offset + row, lse, mask=stored)
    if config.MAX_SCORES:
        largest = gl.convert_layout(gl.max(softmax.largest, 1), row.type.layout)
        score = _raised_to_near(softmax.reference * LN_2 + gl.log(largest), slope, view, -1)
        gl.store(output.max_scores_ptr + offset + row, score, mask=stored)
    return inverse


@gluon.jit
def _raised_to_near(statistic, slope, view, SIGN: gl.constexpr):
    """`raised_to_near` of a tile's rows; without ALiBi (`slope` is None) what it is given."""
    if slope is not None:
        statistic = raised_to_near(statistic, slope, view.distance_shift, view.near_shift, SIGN)
    return statistic


@gluon.jit
def store_epilogue(
    out, inverse, rows, first, column, tiles_received, rings, q_slot, output, config, WHICH: gl.constexpr
):  # fmt: skip
    """Divides 64 rows by their sums and starts the store, from `column` on: through the consumer's place in shared
    memory, through the one that all share, each in its turn, or through that of its queries, which this releases. Rows
    past the end are not written."""
    PLACE: gl.constexpr = WHICH if config.OUT_PLACES > 1 else 0
    SHARED: gl.constexpr = config.OUT_PLACES == 1 and config.CONSUMERS > 1
    q = rings.q
    v = rings.v
    if SHARED:
        # The consumer before this one has stored this tile; the first waits for the last one and the tile before.
        mbarrier.wait(output.free.index(WHICH), ((tiles_received - 1) & 1) ^ (1 if WHICH == 0 else 0))
    if config.OUT_PLACES == 0:
        main = as_box(q.tiles.index(q_slot.place), output.descriptors.main)
        tail = main
        if v.TAIL > 0:
            tail = as_box(q.tail.index(q_slot.place), output.descriptors.tail)
    else:
        main = output.tiles.main.index(PLACE)
        tail = output.tiles.tail.index(PLACE)
    out = scale_rows(out, inverse, v)
    tma_store_wait(0)  # until the tile before has been read from there
    matrix(main, M, v.WIDTH).store(out.main.to(main.dtype))
    if v.TAIL > 0:
        matrix(tail, M, v.TAIL).store(out.tail.to(main.dtype))
    fence_async_shared()
    tma_store(output.descriptors.main, coordinates(rows, first, column, config.PACKED), main)
    if v.TAIL > 0:
        tma_store(output.descriptors.tail, coordinates(rows, first, column + v.WIDTH, config.PACKED), tail)
    if SHARED:
        tma_store_wait(0)
        release(output.free.index((WHICH + 1) % config.CONSUMERS))
    if config.OUT_PLACES == 0:
        tma_store_wait(0)
        q.release(q_slot)


@gluon.jit
def as_box(tile, desc):
    """The beginning of a tile as a place for what a descriptor moves at a time."""
    return reinterpret(tile, desc.dtype, desc.block_shape, desc.layout)
