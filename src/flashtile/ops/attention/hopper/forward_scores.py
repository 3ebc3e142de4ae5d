"""What changes scores and weights in the Hopper forward, in the order in which it does.

A kind of modifier is an object: a `NamedTuple` of what the call has of it, all None where it has none, and functions
that apply it to a tile. Soft cap and ALiBi are in `scores`, bias and mask in `tables`, dropout in `dropout`, the block
mask in `blocks`, and the band in `pieces`. Here stands when each is loaded and applied:

- once for a tile of queries, what belongs to its head (`consume_tile` in `forward`);
- for each key tile, before the wait for the product: `load_table_tiles`, so that their latency passes meanwhile;
- after the wait: `modify_scores`, and after the exponentials and row sums `drop_weights`.

Letters are those of `pieces` and `forward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.blocks import FULL, where_visible
from flashtile.ops.attention.hopper.dropout import dropout_of_head, kept_weights
from flashtile.ops.attention.hopper.eight_bits import LEAST_UNIT, load_descale
from flashtile.ops.attention.hopper.pieces import M, mask_scores
from flashtile.ops.attention.hopper.scores import LOG2_E, capped, load_slope, lowered_by_distance
from flashtile.ops.attention.hopper.tables import TableTiles, add_bias, hide_by_mask, load_table, moved_bias


class HeadModifiers(NamedTuple):
    """What changes the scores of one head of one sequence.

    Attributes:
        numbers: `parameters.SideNumbers`.
        scale_log2, cap_scale: `scores.ScoreUnits`, with the factors of 8-bit inputs.
        slope: of ALiBi, in units of scores; None without.
        bias, mask: pointers (`tables.table_of_head`); None without.
        dropout: `dropout.HeadDropout`; None without.
        function: `FunctionInputs`.
    """

    numbers: Any
    scale_log2: Any
    cap_scale: Any
    slope: Any
    bias: Any
    mask: Any
    dropout: Any
    function: Any


class FunctionInputs(NamedTuple):
    """The inputs of a score function; without one nobody reads them. `scale`: `function_scale` of `scores.ScoreUnits`.
    `captured`, `sizes`: addresses and sizes of the tensors; None without any."""

    scale: Any
    sequence: Any
    head: Any
    captured: Any
    sizes: Any


@gluon.jit
def score_factor(problem, sequence, head, exists, config):
    """The factor of the scores of a head of 8-bit inputs; None for others."""
    factor = None
    if config.EIGHT_BITS:
        side = problem.side
        descales = problem.numbers.descales
        factor = load_descale(side.descale_q, descales.q, descales.group, sequence, head, exists)
        factor *= load_descale(side.descale_k, descales.k, descales.group, sequence, head, exists)
    return factor


@gluon.jit
def cap_scale_of_head(units, factor):
    """The `cap_scale` of a head; None without a soft cap."""
    cap_scale = units.cap_scale
    if factor is not None and units.cap_scale is not None:
        cap_scale = units.cap_scale * factor
    return cap_scale


@gluon.jit
def scale_of_head(units, factor):
    """The `scale_log2` of a head."""
    unit = units.scale_log2
    if factor is not None and units.cap_scale is None:
        unit = units.scale_log2 * factor
        unit = gl.where(gl.abs(unit) < LEAST_UNIT, LEAST_UNIT, unit)
    return unit


@gluon.jit
def slope_of_head(problem, sequence, head, unit, exists):
    """ALiBi's slope of a head, in units of its scores; None without ALiBi."""
    slope = None
    if problem.side.alibi_slopes is not None:
        slope = load_slope(problem.side, problem.numbers, sequence, head, exists) * (LOG2_E / unit)
    return slope


@gluon.jit
def forward_dropout(problem, sequence, head):
    """The `HeadDropout` of a head; None without dropout."""
    dropout = None
    if problem.side.dropout_seed is not None:
        dropout = dropout_of_head(problem.side, problem.numbers, sequence, head, problem.heads)
    return dropout


@gluon.jit
def function_scores(s, first_key, read, function, view, config):
    """The scores of the user's function, from scores `[M, N]` without the factor of the exponential and from its
    reads."""
    key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return config.SCORE_FUNCTION(
        s * function.scale, function.sequence, function.head, view.row[:, None], key[None, :], view.first, first_key,
        function.captured, function.sizes, read,
    )  # fmt: skip


@gluon.jit
def load_table_tiles(n, slot, modifiers, view, rings, config, layout: gl.constexpr, WHICH: gl.constexpr):
    """The tiles of the tables that belong to the `n`-th key tile, which lies in `slot`, in the layout of scores, and
    what a score function reads for it."""
    N: gl.constexpr = rings.k.ROWS
    bias = 0
    mask = 0
    if rings.bias is not None:
        bias = moved_bias(rings.bias.index(slot.place * config.CONSUMERS + WHICH), 0, M, layout, False)
    elif modifiers.bias is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        bias = load_table(
            modifiers.bias, modifiers.numbers.bias, config.BIAS_COLUMN, view.first, n * N, M, N, layout, float("nan"),
            False,
        )  # fmt: skip
    if modifiers.mask is not None:
        mask = load_table(
            modifiers.mask, modifiers.numbers.mask, config.MASK_COLUMN, view.first, n * N, M, N, layout, 0, False
        )
    read = 0
    if config.SCORE_READS is not None:
        function = modifiers.function
        first_key = n * N
        key = first_key + gl.arange(0, N, gl.SliceLayout(0, layout))
        read = config.SCORE_READS(
            function.sequence, function.head, view.row[:, None], key[None, :], view.first, first_key, function.captured,
            function.sizes,
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
    if config.TILE_Q > 0:
        if kind != FULL:
            s = where_visible(bits, s, float("-inf"))
    if MAY_CUT:
        if (n < view.tiles.full_begin) | (n >= view.tiles.full_end):
            s = mask_scores(
                s, view.row, n * s.shape[1], view.shift, view.keys, view.window_left, view.window_right,
                config.HAS_LEFT, config.HAS_RIGHT,
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
