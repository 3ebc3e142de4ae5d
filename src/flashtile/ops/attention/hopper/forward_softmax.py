"""The consumers' arithmetic in the Hopper forward: products, and an online softmax whose references rarely move.

The reference `r` `[M]` cancels out of `o / l`. It only keeps powers of two within range, so it need not follow the
running maximum of a row. It moves when weights would leave the range of their dtype, and then `o` and `l` are rescaled.

bfloat16 weights have all their bits from 2⁻¹²⁶ to 2¹²⁷. The reference is placed well above the first scores that a row
sees, and stays until a weight passes 2³². The sums of a tile show that before the tile is multiplied by `v`. So the
loop needs no maxima, shuffles or rescaling, a third of the usual instructions. A tile with such a weight is
exponentiated once more, against new references.

float16 weights have all their bits from 2⁻¹⁴ to 2¹⁵. The reference is the maximum of the first tile, and stays until a
score is larger by 15 in log2. The loop compares the maximum of each tile before it takes exponentials.

Whether a reference moves is decided for each row by its own scores. So the bits of a row do not depend on other rows. A
warp that has nothing to raise does not wait for one that has.

FlashAttention-4 rescales lazily too, at a threshold of 8. Letters are those of `pieces` and `forward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from flashtile.ops.attention.hopper.forward_scores import drop_weights
from flashtile.ops.attention.hopper.pieces import (
    Chunks,
    M,
    any_above,
    join_columns,
    pack,
    pin_before_wait,
    row_maxima,
    row_maximum,
    row_sums,
    scale_rows,
    slice_of,
    split_off,
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
    """Adds the product of `COUNT` columns, a power of two, to `s` if it is one of those that sum to `COLUMNS`. Larger
    ones come before it."""
    if COLUMNS & COUNT:
        FIRST: gl.constexpr = COLUMNS - COLUMNS % (2 * COUNT)
        columns = slice_of(k, FIRST, COUNT, 1).permute([1, 0])
        s = warpgroup_mma(slice_of(q, FIRST, COUNT, 1), columns, s, use_acc=FIRST > 0, is_async=True)
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
    """The references `[M]` after the first tile, whose largest scores are `highest`, in units of log2."""
    if dtype != gl.float16:
        highest += HEADROOM
    return gl.where(highest == float("-inf"), NOTHING_SEEN, highest)


@gluon.jit
def weights_by_sums(
    s, n, modifiers, view, softmax, in_flight, v, v_slot, p_layout: gl.constexpr, config, WHICH: gl.constexpr
):  # fmt: skip
    """bfloat16 weights of the `n`-th key tile, the statistics with them, and `out` when its product has come to an end.
    Weights come first: they show in which rows they are too large."""
    scale_log2 = modifiers.scale_log2
    row_sum = softmax.row_sum
    reference = softmax.reference
    largest = softmax.largest
    probs, out, tile_sum, tile_largest = exponentials(s, scale_log2, reference, in_flight, v, v_slot, config)
    p = gl.convert_layout(pack(drop_weights(probs, n, modifiers, view), gl.bfloat16), p_layout)
    if any_above(tile_sum, LARGEST_WEIGHT, WHICH):
        reference, alpha = raised_references(s, scale_log2, row_sum, tile_sum, reference, WHICH)
        again = gl.exp2(s * scale_log2 - reference[:, None])
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
    """float16 weights of the `n`-th key tile, the statistics with them, and `out` when its product has come to an end.
    Scores come first: references follow those that are too large."""
    scale_log2 = modifiers.scale_log2
    row_sum = softmax.row_sum
    reference = softmax.reference
    largest = softmax.largest
    highest = row_maximum(s) * scale_log2
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
    """Weights of a tile in float32, `out` when its product `in_flight` has come to an end, and sums and largest of the
    weights, in parts.

    Only some of the exponentials come while `p v` is in flight, the others among the conversions: the units for
    exponentials work while the others do.
    """
    if config.AHEAD > 0:
        pieces = split_off(s * scale_log2 - reference[:, None], config.AHEAD)
        for i in gl.static_range(len(pieces)):
            piece = gl.exp2(pieces[i])
            if i == 0:
                probs = piece
                tile_sum = pin_before_wait(row_sums(probs))
                tile_largest = largest_weights(probs, config)
                out = wait_values(in_flight, v)
                v.release(v_slot)
            else:
                tile_sum += row_sums(piece)
                tile_largest = larger(tile_largest, largest_weights(piece, config), config)
                probs = join_columns(probs, piece)
    else:
        out = wait_values(in_flight, v)
        v.release(v_slot)
        probs = gl.exp2(s * scale_log2 - reference[:, None])
        tile_sum = row_sums(probs)
        tile_largest = largest_weights(probs, config)
    return probs, out, tile_sum, tile_largest


@gluon.jit
def largest_weights(probs, config):
    """The largest weights of rows, in parts; 0 where nobody asks for them. They tell the largest scores: the logarithm
    of a row's largest weight is its distance from the reference."""
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
