"""Known patterns of block-sparse attention, as `BlockMask`s.

A pattern knows which tiles its edges pass through and evaluates only these. Patterns combine with `&`, `|` and `~`. In
the pictures queries go down, keys go to the right, and `x` is visible. Here are patterns by the distance of query and
key, along one dimension or several; `blocks` has the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.mask_sources import check_count, checked_shape, stored_tile
from flashtile.ops.attention.patterns.blocks import (
    TILE,
    Device,
    big_bird,
    butterfly,
    documents,
    integers,
    made,
    tree,
    tree_positions,
)
from flashtile.ops.attention.tile_lists import Tiles
from flashtile.ops.common.checks import check_choice, raise_not_bool

__all__ = [
    "big_bird",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "neighborhood",
    "prefix_lm",
    "sliding_window",
    "strided",
    "tree",
    "tree_positions",
]

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

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        diagonal = q + offset
        ahead = k - diagonal
        band = (ahead <= limit) & (ahead >= -left)
        if not global_tokens:
            return band
        wide = k < global_tokens
        if right == 0:
            return band | (wide & (ahead <= 0))
        return band | wide | ((diagonal < global_tokens) & (diagonal >= 0))

    return made((1, 1, seq_q, seq_k), tile, device, visible)


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

    return made((lengths.shape[0], 1, seq, seq), tile, lengths.device, visible, max_partial_tiles=max_partial_tiles)


def strided(
    seq: int, stride: int, causal: bool = True, *, tile: tuple[int, int] = TILE, device: Device = None
) -> BlockMask:
    """The last `stride` tokens, and before them every token at a multiple of `stride` from the query.

    ::

        stride=3, causal     x . . . . . . .
                             x x . . . . . .
                             x x x . . . . .
                             x x x x . . . .
                             . x x x x . . .
                             . . x x x x . .
                             x . . x x x x .
                             . x . . x x x x

    Key `j` is visible to query `i` if `i - j <= stride` or `(i - j) % stride == 0`, and `j <= i`. Without `causal` the
    same holds for `|i - j|`. Both parts are in one mask, which the paper calls a merged head.

    Args:
        seq: number of tokens.
        stride: usually about the square root of seq.
        causal: tokens see no later tokens.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size or the tile is wrong.

    Reference:
        Child, Gray, Radford, Sutskever, "Generating Long Sequences with Sparse Transformers" (2019), section 4.3.
    """
    check_count("stride", stride, 1, "1 sees all")
    raise_not_bool(causal=causal)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q - k
        seen = (back.abs() <= stride) | (back % stride == 0)
        return seen & (back >= 0) if causal else seen

    def key(tiles: Tiles) -> Tensor:
        # Far from the diagonal a tile looks like all at the same distance modulo the stride.
        distance = tiles.first_q - tiles.first_k
        far = stride + 2 * max(stored_tile(tile))
        return torch.where(distance.abs() <= far, distance, far + 1 + distance % stride)

    return made((1, 1, seq, seq), tile, device, visible, key)


def dilated(
    seq: int,
    left: int,
    right: int,
    dilation: int,
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """A band around the diagonal with gaps: every `dilation`-th token, `left` of them before the query.

    ::

        left=2, right=0, dilation=2     x . . . . . .
                                        . x . . . . .
                                        x . x . . . .
                                        . x . x . . .
                                        x . x . x . .
                                        . x . x . x .
                                        . . x . x . x

    Key `j` is visible to query `i` if `i - j` is a multiple of the dilation, at most `left · dilation` and at least
    `-right · dilation`. In `neighborhood`, windows are shifted inwards at the ends; here they are cut off.

    Args:
        seq: number of tokens.
        left: how many keys are visible before the query.
        right: how many keys are visible after the query.
        dilation: distance between two visible keys.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size or the tile is wrong.

    Reference:
        Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer" (2020), section 3.1: dilated sliding window.
    """
    for name, count in (("left", left), ("right", right)):
        check_count(name, count, 0, "it is a number of keys")
    check_count("dilation", dilation, 1, "1 is a band without gaps")

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q - k
        return (back % dilation == 0) & (back <= left * dilation) & (back >= -right * dilation)

    # A tile looks like all at the same distance from the diagonal.
    return made((1, 1, seq, seq), tile, device, visible, lambda tiles: tiles.first_q - tiles.first_k)


def fixed(
    seq: int,
    stride: int,
    expressivity: int = 8,
    causal: bool = True,
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """The tokens of the query's own block of `stride` tokens, and the last `expressivity` tokens of every block.

    ::

        stride=3, expressivity=1, causal     x . . . . . . .
                                             x x . . . . . .
                                             x x x . . . . .
                                             . . x x . . . .
                                             . . x x x . . .
                                             . . x x x x . .
                                             . . x . . x x .
                                             . . x . . x x x

    Key `j` is visible to query `i` if `i // stride == j // stride` or `j % stride >= stride - expressivity`, and with
    `causal` also `j <= i`.

    Args:
        seq: number of tokens.
        stride: length of a block.
        expressivity: how many tokens at the end of each block summarise it; c in the paper.
        causal: tokens see no later tokens.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size or the tile is wrong.

    Reference:
        Child, Gray, Radford, Sutskever, "Generating Long Sequences with Sparse Transformers" (2019), section 4.3.
    """
    check_count("stride", stride, 1, "it is the length of a block")
    check_count("expressivity", expressivity, 1, "it is how many tokens sum up a block")
    if expressivity > stride:
        raise ValueError(f"expressivity: expected at most the stride, {stride}, got {expressivity}; use a longer block")
    raise_not_bool(causal=causal)
    start = stride - expressivity

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q // stride == k // stride) | (k % stride >= start)
        return seen & (k <= q) if causal else seen

    def key(tiles: Tiles) -> Tensor:
        # A tile looks like all whose keys start at the same place of a block, with queries as far from its start; and
        # where the queries lie before all blocks of its keys, or behind them, like any that do.
        size = max(stored_tile(tile))
        distance = (tiles.first_q - tiles.first_k // stride * stride).clamp(-size, 2 * stride + size)
        return tiles.first_k % stride * (2 * stride + 2 * size + 1) + distance

    return made((1, 1, seq, seq), tile, device, visible, key)


class _Axis(NamedTuple):
    """One dimension of the tokens. `inner` is how many tokens two neighbours along it lie apart in the sequence."""

    size: int
    kernel: int
    dilation: int
    causal: bool
    inner: int

    def coordinate(self, token: Tensor) -> Tensor:
        return token // self.inner % self.size

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """By the coordinates of query and key. Tokens with one remainder of the dilation are numbered on their own."""
        remainder = q % self.dilation
        q_number, k_number = q // self.dilation, k // self.dilation
        if self.causal:
            near = (k_number <= q_number) & (k_number > q_number - self.kernel)
        else:
            count = (self.size - remainder + self.dilation - 1) // self.dilation
            first = (q_number - self.kernel // 2).clamp(min=0).minimum(count - self.kernel)
            near = (k_number >= first) & (k_number < first + self.kernel)
        return near & (remainder == k % self.dilation)


def neighborhood(
    size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """The nearest tokens along each dimension, of which every query has the same number.

    ::

        size=6, kernel_size=3     kernel_size=2, dilation=2     kernel_size=3, causal
        x x x . . .               x . x . . .                   x . . . . .
        x x x . . .               . x . x . .                   x x . . . .
        . x x x . .               x . x . . .                   x x x . . .
        . . x x x .               . x . x . .                   . x x x . .
        . . . x x x               . . x . x .                   . . x x x .
        . . . x x x               . . . x . x                   . . . x x x

    Where a window would extend past an end it is shifted inwards, so that it keeps its size. This is NATTEN's meaning
    of `kernel_size`, `dilation` and `is_causal`. Tokens lie in row-major order: with `size=(height, width)` token
    `y · width + x` is at `(y, x)`. A pair is visible if it is near along every dimension.

    Args:
        size: number of tokens along each dimension, such as `(height, width)` or `(frames, height, width)`.
        kernel_size: length of the window along each dimension; one int for all. An even window has one key more before
            the query than after it.
        dilation: distance between neighbours along each dimension; one int for all.
        causal: along these dimensions a query sees no later coordinate; its window is shorter at the start.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError: an argument is not of the types above.
        ValueError: a number is below 1, the dimensions differ in number, or `kernel_size · dilation` is larger than a
            dimension.

    Reference:
        Hassani, Walton, Li, Li, Shi, "Neighborhood Attention Transformer" (2022), section 3.1; Hassani, Shi, "Dilated
        Neighborhood Attention Transformer" (2022), section 3.2.
    """
    axes = _axes(size, kernel_size, dilation, causal)
    tokens = math.prod(axis.size for axis in axes)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        first, *others = (axis.visible(axis.coordinate(q), axis.coordinate(k)) for axis in axes)
        for near in others:
            first = first & near
        return first

    return made((1, 1, tokens, tokens), tile, device, visible)


def _axes(
    size: int | Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int],
    causal: bool | Sequence[bool],
) -> list[_Axis]:
    sizes = [size] if isinstance(size, int) else list(size)
    if not sizes:
        raise ValueError("size: expected at least one dimension, got none; pass the length of each")

    def by_tile(name: str, values: object) -> list:
        listed = list(values) if isinstance(values, (tuple, list)) else [values] * len(sizes)
        if len(listed) != len(sizes):
            raise ValueError(
                f"{name}: expected one value, or one for each of the {len(sizes)} dimensions of size, got {len(listed)}"
            )
        return listed

    axes = []
    columns = by_tile("kernel_size", kernel_size), by_tile("dilation", dilation), by_tile("causal", causal)
    for place, (length, kernel, step, only_before) in enumerate(zip(sizes, *columns)):
        check_count("size", length, 1, "it is the number of tokens along a dimension")
        check_count("kernel_size", kernel, 1, "it is the number of keys along a dimension")
        check_count("dilation", step, 1, "1 is plain")
        raise_not_bool(causal=only_before)
        if kernel * step > length:
            raise ValueError(
                f"kernel_size: expected kernel_size · dilation of at most {length}, the size of dimension {place}, got "
                f"{kernel} · {step}; use a smaller window"
            )
        axes.append(_Axis(length, kernel, step, only_before, math.prod(sizes[place + 1 :])))
    return axes
