"""The loops over key tiles of the forward for Hopper: with running maxima, and against one reference.

Per key tile, with `c = scale · log2(e)` (letters as in `pieces`), the online softmax computes::

    s     = q kᵀ                      [M, N]
    m'    = max(m, rowmax(s))         [M]
    p     = exp2(c·s - c·m')          [M, N]
    alpha = exp2(c·m - c·m')          [M]
    l     = alpha·l + rowsum(p)       [M], kept as [M, 8]: each thread's own part
    o     = alpha·o + p v             [M, E]

`c·m` cancels out of `o / l`: it is there only to keep powers of two within range. So any reference near the maximum
will do, and a floating-point weight has as many bits whatever its exponent. `_steadily` takes the maximum over the
first key tile for all of them: a third of the instructions (comparisons, shuffles, rescaling) are not there, and
exponentials begin as soon as there are scores. It takes a chance: a later score may be so much larger that sums
overflow, and a row that sees nothing of the first tile has 0 for a reference, from which scores may be far. What came
out tells (`trustworthy`), and a tile where it went wrong is computed once more with running maxima (`repeats`). So
results depend on the inputs alone, and are as exact as the others.

`p v` of the tile before is in flight while some exponentials of a tile are computed (`AHEAD`, `STEADY_AHEAD`). Key
tiles come from the last to the first, so that the masked ones of the diagonal come first. Each way is one loop with a
branch for masks; one without it, behind a loop for the masked tiles, was no faster.

References: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), for the running maxima; Shah et
al., "FlashAttention-3" (2024), algorithm 2, for the products in flight.
"""

from flashtile._backends.gluon import gl, gluon, mbarrier, warpgroup_mma_wait
from flashtile.ops.attention.hopper.blocks import FULL, hear_listed, where_shown
from flashtile.ops.attention.hopper.forward_pieces import (
    begin_turn,
    end_turn,
    finite,
    modified,
    start_scores,
    start_values,
    wait_values,
)
from flashtile.ops.attention.hopper.pieces import (
    M,
    join_columns,
    mask_scores,
    place_of,
    product_layout,
    release,
    row_maximum,
    row_sums,
    scale_rows,
    settled,
    split_off,
)

#: Key tiles from which on a chance pays: fewer are over before the check at the end has.
LEAST_TILES = gl.constexpr(3)

#: A float16 weight ends at 2¹⁶ and has all its bits down to 2⁻¹⁴. So references are so much higher there, in log2, and
#: later scores may be larger by 23.
FLOAT16_MARGIN = gl.constexpr(8.0)


@gluon.jit
def visit_key_tiles(
    q_tile, q_rest, k, v, pair, key_begin, key_end, scale_log2, cap_scale, slope, view, steady,
    form, WHICH: gl.constexpr,
):  # fmt: skip
    """The online softmax over the key tiles from the last to `key_begin`; `view`: as `_seen` takes it. `steady`:
    whether to take a chance.

    Returns the weights of the last tile, which are still to be multiplied, `o` and its second chunk, the row sums in
    parts, the references in units of log2, how many tiles came out of the rings before the last one, and where that is.
    """
    dtype: gl.constexpr = v.tiles.dtype
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    o_layout: gl.constexpr = product_layout(v.WIDTH)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([M, k.ROWS], gl.float32, s_layout)
    o = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    o_rest = gl.to_tensor(0)
    if v.REST > 0:
        o_rest = gl.zeros([M, v.REST], gl.float32, product_layout(v.REST))

    stage, phase = place_of(pair, k.STAGES)
    mbarrier.wait(k.full.index(stage), phase)
    n, kind, bits = _tile_of(key_end - 1, view, stage, k, form)
    s = warpgroup_mma_wait(0, [start_scores(q_tile, q_rest, k, stage, zeros)])
    release(k.empty.index(stage))
    s = _seen(s, n, kind, bits, cap_scale, slope, view, True, form)
    m = row_maximum(s)
    m_scaled = finite(m * scale_log2)
    if form.STEADY and dtype == gl.float16:
        m_scaled += gl.where(steady, FLOAT16_MARGIN, 0.0)
    first_probs = gl.exp2(s * scale_log2 - m_scaled[:, None])
    row_sum = row_sums(first_probs)
    p = gl.convert_layout(first_probs.to(dtype), p_layout)

    walk = (q_tile, q_rest, k, v, key_begin, key_end, scale_log2, zeros, view)
    if steady:
        p, o, o_rest, row_sum, pair, stage, phase = _steadily(
            walk, cap_scale, slope, pair, stage, phase, p, o, o_rest, row_sum, m_scaled, form, WHICH
        )
    else:
        p, o, o_rest, row_sum, m_scaled, pair, stage, phase = _with_running_maxima(
            walk, cap_scale, slope, pair, stage, phase, p, o, o_rest, row_sum, m, m_scaled, form, WHICH
        )
    return p, o, o_rest, row_sum, m_scaled, pair, stage, phase


@gluon.jit
def trustworthy(row_sum, o, o_rest, v, dtype: gl.constexpr):
    """Of each row that was computed steadily, `[M]`: whether nothing overflowed and no bits were lost.

    No weight is larger than their sum. Below, a sum is small only where the first tile showed a row nothing.
    """
    MOST: gl.constexpr = 2.0**15 if dtype == gl.float16 else 2.0**64
    LEAST: gl.constexpr = 2.0**-9 if dtype == gl.float16 else 2.0**-40
    overflow = gl.convert_layout(gl.sum(o * 0.0, 1), row_sum.type.layout)  # 0, or not a number
    if v.REST > 0:
        overflow += gl.convert_layout(gl.sum(o_rest * 0.0, 1), row_sum.type.layout)
    return (row_sum >= LEAST) & (row_sum <= MOST) & (overflow == 0.0)


@gluon.jit
def _steadily(
    walk, cap_scale, slope, pair, stage, phase, p, o, o_rest, row_sum, m_scaled, form, WHICH: gl.constexpr
):  # fmt: skip
    """The loop over the key tiles after the first one, against one reference."""
    _, _, _, v, key_begin, key_end, scale_log2, _, _ = walk
    for done in range(key_begin + 1, key_end):
        v_stage = stage
        s, o, o_rest, pair, stage, phase = _scores_beside_values(
            walk, cap_scale, slope, done, pair, stage, phase, p, o, o_rest, form, WHICH
        )
        probs, row_sum, o, o_rest = _weights_beside_values(
            s, scale_log2, m_scaled, row_sum, o, o_rest, v, v_stage, form.STEADY_AHEAD
        )
        p = gl.convert_layout(probs.to(v.tiles.dtype), p.type.layout)
    return p, o, o_rest, row_sum, pair, stage, phase


@gluon.jit
def _with_running_maxima(
    walk, cap_scale, slope, pair, stage, phase, p, o, o_rest, row_sum, m, m_scaled,
    form, WHICH: gl.constexpr,
):  # fmt: skip
    """The loop over the key tiles after the first one, against the maximum so far."""
    _, _, _, v, key_begin, key_end, scale_log2, _, _ = walk
    for done in range(key_begin + 1, key_end):
        v_stage = stage
        s, o, o_rest, pair, stage, phase = _scores_beside_values(
            walk, cap_scale, slope, done, pair, stage, phase, p, o, o_rest, form, WHICH
        )
        m_new = gl.maximum(m, row_maximum(s))
        m_scaled = finite(m_new * scale_log2)
        alpha = gl.exp2(m * scale_log2 - m_scaled)
        m = m_new
        row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        probs, row_sum, o, o_rest = _weights_beside_values(
            s, scale_log2, m_scaled, row_sum, o, o_rest, v, v_stage, form.AHEAD
        )
        p = gl.convert_layout(probs.to(v.tiles.dtype), p.type.layout)
        o, o_rest = scale_rows(o, o_rest, alpha, v)
    return p, o, o_rest, row_sum, m_scaled, pair, stage, phase


@gluon.jit
def _scores_beside_values(
    walk, cap_scale, slope, done, pair, v_stage, v_phase, p, o, o_rest, form, WHICH: gl.constexpr
):  # fmt: skip
    """Starts the scores of the next key tile and `p v` of the one in place `v_stage`, and waits for the scores. Returns
    these, `o` with that product in flight, and how many tiles came out of the rings before the next one, and where that
    is."""
    q_tile, q_rest, k, v, key_begin, key_end, _, zeros, view = walk
    PRODUCTS: gl.constexpr = 2 if v.REST > 0 else 1
    # Without a band only the last tile of keys can be cut, and that comes first. A branch that is never taken would
    # still keep the loop in pieces, which costs 7 % at 64 columns.
    MAY_CUT: gl.constexpr = form.HAS_LEFT or form.HAS_RIGHT or form.TILE_Q > 0
    pair += 1
    stage, phase = place_of(pair, k.STAGES)
    mbarrier.wait(k.full.index(stage), phase)
    if form.IN_TURN:
        begin_turn(WHICH)
    scores = start_scores(q_tile, q_rest, k, stage, zeros)
    mbarrier.wait(v.full.index(v_stage), v_phase)
    o, o_rest = start_values(p, o, o_rest, v, v_stage)
    if form.IN_TURN:
        end_turn(WHICH, form.CONSUMERS)
    n, kind, bits = _tile_of(key_begin + key_end - 1 - done, view, stage, k, form)
    s = warpgroup_mma_wait(PRODUCTS, [scores])
    release(k.empty.index(stage))
    s = _seen(s, n, kind, bits, cap_scale, slope, view, MAY_CUT, form)
    return s, o, o_rest, pair, stage, phase


@gluon.jit
def _tile_of(n, view, stage, k, form):
    """Number of a key tile; with a block mask, which one it is that was loaded there, its kind, and its bits."""
    kind = FULL
    bits = 0
    if form.TILE_Q > 0:
        n, kind, bits = hear_listed(view[8], stage, view[7], k, form)
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
            s = where_shown(bits, s, float("-inf"))
    if MAY_CUT:
        if (n < full_begin) | (n >= full_end):
            s = mask_scores(s, row, n * N, shift, keys, window_left, window_right, form.HAS_LEFT, form.HAS_RIGHT)
    return s


@gluon.jit
def _weights_beside_values(s, scale_log2, m_scaled, row_sum, o, o_rest, v, v_stage, AHEAD: gl.constexpr):
    """Weights of a tile, the row sums with them, and `o` when its product has come to an end.

    Only some of the exponentials come while `p v` is in flight, the others among the conversions and the rescaling: the
    units for exponentials work while the others do.
    """
    if AHEAD > 0:
        pieces = split_off(s * scale_log2 - m_scaled[:, None], AHEAD)
        probs = gl.exp2(pieces[0])
        row_sum = settled(row_sum + row_sums(probs))
        o, o_rest = wait_values(o, o_rest, v)
        release(v.empty.index(v_stage))
        for i in gl.static_range(1, len(pieces)):
            more = gl.exp2(pieces[i])
            row_sum += row_sums(more)
            probs = join_columns(probs, more)
    else:
        o, o_rest = wait_values(o, o_rest, v)
        release(v.empty.index(v_stage))
        probs = gl.exp2(s * scale_log2 - m_scaled[:, None])
        row_sum += row_sums(probs)
    return probs, row_sum, o, o_rest
