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
from flashtile.ops.attention.hopper.dropout import kept_weights
from flashtile.ops.attention.hopper.pieces import M, mask_scores
from flashtile.ops.attention.hopper.scores import LOG2_E, capped, lowered_by_distance
from flashtile.ops.attention.hopper.tables import TableTiles, add_bias, hide_by_mask, load_table


class Modifiers(NamedTuple):
    """What changes scores, for all heads: units, soft cap, ALiBi, tables, dropout, and the factors of 8-bit inputs."""

    scale_log2: Any
    cap_scale: Any
    alibi_slopes_ptr: Any
    stride_alibi_batch: Any
    bias: Any
    mask: Any
    dropout: Any
    descale_q: Any
    descale_k: Any
    descale_v: Any


class HeadModifiers(NamedTuple):
    """What changes the scores of one head. `cap_scale`, `slope` of ALiBi and `dropout` are None where a call has none,
    as are the pointers of `bias` and `mask` (`Table`)."""

    scale_log2: Any
    cap_scale: Any
    slope: Any
    bias: Any
    mask: Any
    dropout: Any


@gluon.jit
def load_table_tiles(n, modifiers, view, config, N: gl.constexpr, layout: gl.constexpr):
    """The tiles of the tables that belong to the `n`-th key tile, in the layout of scores."""
    bias = 0
    mask = 0
    if modifiers.bias.pointer is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        bias = load_table(modifiers.bias, config.BIAS_COLUMN, view.first, n * N, M, N, layout, float("nan"), False)
    if modifiers.mask.pointer is not None:
        mask = load_table(modifiers.mask, config.MASK_COLUMN, view.first, n * N, M, N, layout, 0, False)
    return TableTiles(bias, mask)


@gluon.jit
def modify_scores(s, n, kind, bits, tables, modifiers, view, MAY_CUT: gl.constexpr, config):
    """Scores `[M, N]` of the `n`-th key tile with what changes them, and -inf where a row does not see the key."""
    first_key = n * s.shape[1]
    diagonal = view.row + view.alibi_shift
    if modifiers.cap_scale is not None:
        s = capped(s, modifiers.cap_scale)
    if modifiers.bias.pointer is not None:
        s = add_bias(s, tables.bias, LOG2_E / modifiers.scale_log2)
    if modifiers.slope is not None:
        s = lowered_by_distance(s, diagonal, first_key, modifiers.slope)
    if modifiers.mask.pointer is not None:
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
