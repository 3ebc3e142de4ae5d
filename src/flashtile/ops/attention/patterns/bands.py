"""Visibility by the distance from the diagonal, and tokens at the start that all see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.block_mask_arguments import checked_shape
from flashtile.ops.attention.patterns.pieces import TILE, Device, check_count, integers, made
from flashtile.ops.attention.tile_lists import Bounds, Tiles
from flashtile.ops.common.checks import check_choice

Align = Literal["bottom_right", "top_left"]


def causal(
    seq_q: int,
    seq_k: int | None = None,
    align: Align = "bottom_right",
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """Hides the keys right of the diagonal, as `flashtile.attention` does with `causal=True`, which needs no lists.

    ::

        x . . .
        x x . .
        x x x .
        x x x x

    Args:
        seq_q: number of queries.
        seq_k: number of keys; None = seq_q.
        align: where the diagonal lies if they differ, as in `flashtile.attention`.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size, the alignment or the tile is wrong.
    """
    return sliding_window(seq_q, seq_k, None, 0, align=align, tile=tile, device=device)


def sliding_window(
    seq_q: int,
    seq_k: int | None = None,
    left: int | None = None,
    right: int | None = None,
    global_tokens: int = 0,
    align: Align = "bottom_right",
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """A band around the diagonal, and tokens at the start that see all and are seen by all.

    ::

        left=1, right=1      global_tokens=1      left=1, right=0, global_tokens=1
        x x . . . .          x x x x x x          x . . . . .
        x x x . . .          x x x . . .          x x . . . .
        . x x x . .          x x x x . .          x x x . . .
        . . x x x .          x . x x x .          x . x x . .
        . . . x x x          x . . x x x          x . . x x .
        . . . . x x          x . . . x x          x . . . x x

    With `right=0` the mask is causal, and global tokens see no later tokens either.

    Args:
        seq_q: number of queries.
        seq_k: number of keys; None = seq_q.
        left: number of keys visible left of the diagonal, None = all.
        right: number of keys visible right of the diagonal, None = all.
        global_tokens: how many tokens at the start are global, as keys and as queries. If the lengths differ, a query
            is the token at the key where the diagonal passes it.
        align: where the diagonal lies if the lengths differ, as in `flashtile.attention`.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size, the alignment or the tile is wrong.

    Reference:
        Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer" (2020), section 3.1.
    """
    _, _, seq_q, seq_k = checked_shape(1, 1, seq_q, seq_q if seq_k is None else seq_k)
    check_choice("align", align, ("bottom_right", "top_left"))
    for name, keys in (("left", left), ("right", right)):
        if keys is not None:
            check_count(name, keys, 0, "use None for an unlimited side")
    check_count("global_tokens", global_tokens, 0, "use 0 for none")
    offset = seq_k - seq_q if align == "bottom_right" else 0
    # Any finite number at least as large will do for an unlimited side.
    left = seq_q + seq_k if left is None else left
    limit = seq_q + seq_k if right is None else right

    def within(earliest: Tensor, latest: Tensor) -> Tensor:
        """Whether keys minus diagonal, between its least and greatest value, may lie in the band."""
        return (earliest <= limit) & (latest >= -left)

    def is_global(low_q: Tensor, high_q: Tensor, low_k: Tensor) -> Tensor:
        """By a query before `low_q` and not before 0 `high_q`, and a key before `low_k`."""
        key = low_k < global_tokens
        return key if right == 0 else key | ((low_q < global_tokens) & (high_q >= 0))

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        diagonal = q + offset
        band = within(k - diagonal, k - diagonal)
        if not global_tokens:
            return band
        wide = is_global(diagonal, diagonal, k)
        return band | (wide & (k <= diagonal) if right == 0 else wide)

    def bounds(tiles: Tiles) -> Bounds:
        first, last = tiles.first_q + offset, tiles.last_q + offset
        earliest, latest = tiles.first_k - last, tiles.last_k - first
        possible, certain = within(earliest, latest), within(latest, earliest)
        if global_tokens:
            may, must = is_global(first, last, tiles.first_k), is_global(last, first, tiles.last_k)
            if right == 0:
                may, must = may & (earliest <= 0), must & (latest <= 0)
            possible, certain = possible | may, certain | must
        return Bounds(possible, certain)

    return made((1, 1, seq_q, seq_k), tile, device, bounds, visible)


def prefix_lm(
    seq: int,
    prefix_lengths: int | Sequence[int] | Tensor,
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
    max_partial_tiles: int | None = None,
) -> BlockMask:
    """Tokens of the prefix see the whole prefix, and later tokens see everything before them.

    ::

        prefix_lengths=3     x x x . .
                             x x x . .
                             x x x . .
                             x x x x .
                             x x x x x

    Args:
        seq: number of tokens.
        prefix_lengths: length of the prefix, or int32 or int64 `[batch]`, one for each batch entry; 0 is plain causal.
        tile: tile of the lists, multiples of 16.
        device: device of the result; None = that of prefix_lengths if it is a tensor.
        max_partial_tiles: as for `BlockMask.from_predicate`; then prefix_lengths are not read on the host.

    Raises:
        TypeError, ValueError: a size, a dtype, a shape or the tile is wrong.

    Reference:
        Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2019),
        section 3.2.1.
    """
    if isinstance(prefix_lengths, int):
        check_count("prefix_lengths", prefix_lengths, 0, "0 is plain causal")
        prefix_lengths = [prefix_lengths]
    lengths = integers("prefix_lengths", prefix_lengths, (1,), "[batch]", device)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) | (k < lengths[batch])

    def bounds(tiles: Tiles) -> Bounds:
        prefix = lengths[tiles.batch]
        return Bounds(
            (tiles.first_k <= tiles.last_q) | (tiles.first_k < prefix),
            (tiles.last_k <= tiles.first_q) | (tiles.last_k < prefix),
        )

    return made((lengths.shape[0], 1, seq, seq), tile, lengths.device, bounds, visible, max_partial_tiles)
