"""The factorised patterns of the Sparse Transformer, which repeat along the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.block_mask_arguments import stored_tile
from flashtile.ops.attention.patterns.pieces import TILE, Device, check_count, made
from flashtile.ops.attention.tile_lists import Bounds, Tiles
from flashtile.ops.common.checks import raise_not_bool


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

    def bounds(tiles: Tiles) -> Bounds:
        least, most = tiles.first_q - tiles.last_k, tiles.last_q - tiles.first_k
        if causal:
            least = least.clamp(min=0)
        near = (least <= stride) & (most >= -stride)
        # The largest multiple of the stride among the distances of the tile, if there is one.
        possible = (near | (most // stride * stride >= least)) & (most >= least)
        certain = (most <= stride) & (least >= -stride) | (stride == 1)
        if causal:
            certain = certain & (tiles.first_q >= tiles.last_k)
        # Far from the diagonal a tile looks like all at the same distance modulo the stride.
        distance = tiles.first_q - tiles.first_k
        far = stride + 2 * max(stored_tile(tile))
        return Bounds(possible, certain, torch.where(distance.abs() <= far, distance, far + 1 + distance % stride))

    return made((1, 1, seq, seq), tile, device, bounds, visible)


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

    def bounds(tiles: Tiles) -> Bounds:
        least, most = tiles.first_q - tiles.last_k, tiles.last_q - tiles.first_k
        possible = (least <= left * dilation) & (most >= -right * dilation)
        # A tile looks like all at the same distance from the diagonal.
        return Bounds(possible, None, tiles.first_q - tiles.first_k)

    return made((1, 1, seq, seq), tile, device, bounds, visible)


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

    def summaries(end: Tensor) -> Tensor:
        """How many of the keys before `end` sum up a block."""
        return end // stride * expressivity + (end % stride - start).clamp(min=0)

    def bounds(tiles: Tiles) -> Bounds:
        first_q, last_q = tiles.first_q // stride, tiles.last_q // stride
        first_k, last_k = tiles.first_k // stride, tiles.last_k // stride
        among = summaries(tiles.last_k + 1) - summaries(tiles.first_k)
        possible = (among > 0) | (first_q <= last_k) & (first_k <= last_q)
        certain = (among > tiles.last_k - tiles.first_k) | (first_q == last_k) & (first_k == last_q)
        if causal:
            possible = possible & (tiles.first_k <= tiles.last_q)
            certain = certain & (tiles.last_k <= tiles.first_q)
        # A tile looks like all whose keys start at the same place of a block, with queries as far from its start; and
        # where the queries lie before all blocks of its keys, or behind them, like any that do.
        size = max(stored_tile(tile))
        distance = (tiles.first_q - first_k * stride).clamp(-size, 2 * stride + size)
        return Bounds(possible, certain, tiles.first_k % stride * (2 * stride + 2 * size + 1) + distance)

    return made((1, 1, seq, seq), tile, device, bounds, visible)
