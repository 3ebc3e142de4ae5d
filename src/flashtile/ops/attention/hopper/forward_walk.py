"""The forward's loop over key tiles: an online softmax whose references rarely move.

Per key tile, with `c = scale · log2(e)` (letters as in `pieces`), the online softmax computes::

    s = q kᵀ               [M, N]
    p = exp2(c·s - r)      [M, N]
    l = l + rowsum(p)      [M], kept as [M, 8]: each thread's own part
    o = o + p v            [M, E]

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

`p v` of the tile before is in flight while `form.AHEAD` columns of a tile are exponentiated. Key tiles come from the
last to the first, so that the masked ones of the diagonal come first.

References: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Shah et al., "FlashAttention-3"
(2024), algorithm 2, for the products in flight; FlashAttention-4 rescales lazily too, at a threshold of 8.
"""

from flashtile._backends.gluon import gl, gluon, mbarrier, warpgroup_mma_wait
from flashtile.ops.attention.hopper.blocks import FULL, TILE_KIND, TILE_NUMBER, load_bits, read_tile_info, where_visible
from flashtile.ops.attention.hopper.forward_pieces import (
    begin_turn,
    end_turn,
    modified,
    start_scores,
    start_values,
    wait_values,
)
from flashtile.ops.attention.hopper.pieces import (
    Chunks,
    M,
    any_above,
    join_columns,
    mask_scores,
    pack,
    pin_before_wait,
    place_of,
    product_layout,
    release,
    row_maximum,
    row_sums,
    scale_rows,
    split_off,
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


@gluon.jit
def visit_key_tiles(
    q_tile, q_tail, k, v, pair, key_begin, key_end, scale_log2, cap_scale, slope, view, form, WHICH: gl.constexpr
):  # fmt: skip
    """The online softmax over the key tiles from the last to `key_begin`; `view`: as `_seen` takes it.

    Returns the weights of the last tile, which are still to be multiplied, `o` and its second chunk, the row sums in
    parts, the references in units of log2, how many tiles came out of the rings before the last one, and where that is.
    """
    dtype: gl.constexpr = v.tiles.dtype
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    o_layout: gl.constexpr = product_layout(v.WIDTH)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([M, k.ROWS], gl.float32, s_layout)
    o = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    o_tail = gl.to_tensor(0)
    if v.TAIL > 0:
        o_tail = gl.zeros([M, v.TAIL], gl.float32, product_layout(v.TAIL))

    stage, phase = place_of(pair, k.STAGES)
    mbarrier.wait(k.full.index(stage), phase)
    n, kind, bits = _tile_of(key_end - 1, view, stage, k, form)
    s = warpgroup_mma_wait(0, [start_scores(q_tile, q_tail, k, stage, zeros)])
    release(k.empty.index(stage))
    s = _seen(s, n, kind, bits, cap_scale, slope, view, True, form)
    reference = _first_reference(row_maximum(s) * scale_log2, dtype)
    probs = gl.exp2(s * scale_log2 - reference[:, None])
    row_sum = row_sums(probs)
    p = gl.convert_layout(pack(probs, dtype), p_layout)

    walk = (q_tile, q_tail, k, v, key_begin, key_end, scale_log2, zeros, view)
    for done in range(key_begin + 1, key_end):
        v_stage = stage
        s, o, o_tail, pair, stage, phase = _scores_beside_values(
            walk, cap_scale, slope, done, pair, stage, phase, p, o, o_tail, form, WHICH
        )
        if dtype == gl.float16:
            p, row_sum, reference, o, o_tail = _weights_by_maxima(
                s, scale_log2, row_sum, reference, o, o_tail, v, v_stage, p_layout, form, WHICH
            )
        else:
            p, row_sum, reference, o, o_tail = _weights_by_sums(
                s, scale_log2, row_sum, reference, o, o_tail, v, v_stage, p_layout, form, WHICH
            )
    return p, o, o_tail, row_sum, reference, pair, stage, phase


@gluon.jit
def _first_reference(highest, dtype: gl.constexpr):
    """The references `[M]` after the first tile, whose largest scores are `highest`, in units of log2."""
    if dtype != gl.float16:
        highest += HEADROOM
    return gl.where(highest == float("-inf"), NOTHING_SEEN, highest)


@gluon.jit
def _weights_by_sums(
    s, scale_log2, row_sum, reference, o, o_tail, v, v_stage, p_layout: gl.constexpr, form, WHICH: gl.constexpr
):  # fmt: skip
    """bfloat16 weights of a tile, the row sums with them, the references, and `o` when its product has come to an end.
    Weights come first: they show in which rows they are too large."""
    probs, tile_sum, o, o_tail = _exponentials(s, scale_log2, reference, o, o_tail, v, v_stage, form)
    p = gl.convert_layout(pack(probs, gl.bfloat16), p_layout)
    if any_above(tile_sum, LARGEST_WEIGHT, WHICH):
        reference, alpha = _raised(s, scale_log2, row_sum, tile_sum, reference, WHICH)
        again = gl.exp2(s * scale_log2 - reference[:, None])
        p = gl.convert_layout(pack(again, gl.bfloat16), p_layout)
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        row_sum *= factor
        tile_sum = gl.where(factor == 1.0, tile_sum, row_sums(again))
        o, o_tail = scale_rows(Chunks(o, o_tail), alpha, v)
    return p, row_sum + tile_sum, reference, o, o_tail


@gluon.jit
def _raised(s, scale_log2, row_sum, tile_sum, reference, WHICH: gl.constexpr):
    """New references of the rows with a weight that is too large, the old ones of the others, and the factors `[M]`
    that lead from the old unit to the new one, which are 1 for these others alone.

    A row is raised by a whole number, so its sums and `o` keep their bits, or to its largest score where weights are
    infinite.
    """
    layout: gl.constexpr = reference.type.layout
    largest = gl.convert_layout(gl.max(tile_sum, 1), layout)
    raised = reference + (_exponent(largest) + HEADROOM)
    if any_above(tile_sum, _LARGEST_FINITE, WHICH):
        summed = reference + (_exponent(gl.convert_layout(gl.max(row_sum, 1), layout)) + 1.0)
        highest = gl.maximum(row_maximum(s) * scale_log2, summed)
        raised = gl.where(largest > _LARGEST_FINITE, highest + HEADROOM, raised)
    too_large = largest > LARGEST_WEIGHT
    raised = gl.where(too_large, raised, reference)
    return raised, gl.where(too_large, gl.exp2(reference - raised), 1.0)


@gluon.jit
def _exponent(x):
    """The integer part of log2 of numbers that are not negative; of 0 it is -127."""
    return ((x.to(gl.int32, bitcast=True) >> 23) - 127).to(gl.float32)


@gluon.jit
def _weights_by_maxima(
    s, scale_log2, row_sum, reference, o, o_tail, v, v_stage, p_layout: gl.constexpr, form, WHICH: gl.constexpr
):  # fmt: skip
    """float16 weights of a tile, the row sums with them, the references, and `o` when its product has come to an end.
    Scores come first: references follow those that are too large."""
    highest = row_maximum(s) * scale_log2
    rises = any_above(highest - reference, LARGEST_FLOAT16_EXPONENT, WHICH)
    alpha = gl.full([M], 1.0, gl.float32, reference.type.layout)
    if rises:
        raised = gl.where(highest - reference > LARGEST_FLOAT16_EXPONENT, highest, reference)
        alpha = gl.exp2(reference - raised)
        row_sum *= gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        reference = raised
    probs, tile_sum, o, o_tail = _exponentials(s, scale_log2, reference, o, o_tail, v, v_stage, form)
    p = gl.convert_layout(pack(probs, gl.float16), p_layout)
    if rises:
        o, o_tail = scale_rows(Chunks(o, o_tail), alpha, v)
    return p, row_sum + tile_sum, reference, o, o_tail


@gluon.jit
def _exponentials(s, scale_log2, reference, o, o_tail, v, v_stage, form):
    """Weights of a tile in float32, their sums in parts, and `o` when its product has come to an end.

    Only some of the exponentials come while `p v` is in flight, the others among the conversions: the units for
    exponentials work while the others do.
    """
    if form.AHEAD > 0:
        pieces = split_off(s * scale_log2 - reference[:, None], form.AHEAD)
        probs = gl.exp2(pieces[0])
        tile_sum = pin_before_wait(row_sums(probs))
        o, o_tail = wait_values(o, o_tail, v)
        release(v.empty.index(v_stage))
        for i in gl.static_range(1, len(pieces)):
            more = gl.exp2(pieces[i])
            tile_sum += row_sums(more)
            probs = join_columns(probs, more)
    else:
        o, o_tail = wait_values(o, o_tail, v)
        release(v.empty.index(v_stage))
        probs = gl.exp2(s * scale_log2 - reference[:, None])
        tile_sum = row_sums(probs)
    return probs, tile_sum, o, o_tail


@gluon.jit
def _scores_beside_values(
    walk, cap_scale, slope, done, pair, v_stage, v_phase, p, o, o_tail, form, WHICH: gl.constexpr
):  # fmt: skip
    """Starts the scores of the next key tile and `p v` of the one in place `v_stage`, and waits for the scores. Returns
    these, `o` with that product in flight, and how many tiles came out of the rings before the next one, and where that
    is."""
    q_tile, q_tail, k, v, key_begin, key_end, _, zeros, view = walk
    PRODUCTS: gl.constexpr = 2 if v.TAIL > 0 else 1
    # Without a band only the last tile of keys can be cut, and that comes first. A branch that is never taken would
    # still keep the loop in pieces, which costs 7 % at 64 columns.
    MAY_CUT: gl.constexpr = form.HAS_LEFT or form.HAS_RIGHT or form.TILE_Q > 0
    pair += 1
    stage, phase = place_of(pair, k.STAGES)
    mbarrier.wait(k.full.index(stage), phase)
    if form.IN_TURN:
        begin_turn(WHICH)
    scores = start_scores(q_tile, q_tail, k, stage, zeros)
    mbarrier.wait(v.full.index(v_stage), v_phase)
    o, o_tail = start_values(p, o, o_tail, v, v_stage)
    if form.IN_TURN:
        end_turn(WHICH, form.CONSUMERS)
    n, kind, bits = _tile_of(key_begin + key_end - 1 - done, view, stage, k, form)
    s = warpgroup_mma_wait(PRODUCTS, [scores])
    release(k.empty.index(stage))
    s = _seen(s, n, kind, bits, cap_scale, slope, view, MAY_CUT, form)
    return s, o, o_tail, pair, stage, phase


@gluon.jit
def _tile_of(n, view, stage, k, form):
    """Number of a key tile; with a block mask, which one it is that was loaded there, its kind, and its bits."""
    kind = FULL
    bits = 0
    if form.TILE_Q > 0:
        blocks, tile_info = view[8]
        n = read_tile_info(tile_info, stage, TILE_NUMBER)
        kind = read_tile_info(tile_info, stage, TILE_KIND)
        bits = load_bits(blocks, kind, view[7], n, k.ROWS, form.TILE_Q, form.TILE_K)
    return n, kind, bits


@gluon.jit
def _seen(s, n, kind, bits, cap_scale, slope, view, MAY_CUT: gl.constexpr, form):
    """Scores of the `n`-th key tile with what changes them, and -inf where a row does not see the key.

    `view`: (rows, shift, keys, left and right end of the window, range of the tiles that all rows see, the consumer's
    first row, the block mask, from each row to the key at no distance).
    """
    row, shift, keys, window_left, window_right, full_begin, full_end, _first, _listing, diagonal = view
    N: gl.constexpr = s.shape[1]
    s = modified(s, row + diagonal, n * N, cap_scale, slope)
    if form.TILE_Q > 0:
        if kind != FULL:
            s = where_visible(bits, s, float("-inf"))
    if MAY_CUT:
        if (n < full_begin) | (n >= full_end):
            s = mask_scores(s, row, n * N, shift, keys, window_left, window_right, form.HAS_LEFT, form.HAS_RIGHT)
    return s
