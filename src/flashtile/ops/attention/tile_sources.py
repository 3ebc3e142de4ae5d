"""What the elements of tiles are made from: a matrix, a layout, FlexAttention's blocks, other masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.mask_functions import mapped
from flashtile.ops.attention.tile_lists import Bounds, Elements, Grid, Tiles

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def anywhere(tiles: Tiles) -> Bounds:
    """Nothing is known."""
    return Bounds(torch.ones((1, 1), dtype=torch.bool, device=tiles.batch.device))


def looked_up(matrix: Tensor, tile: tuple[int, int]) -> Elements:
    """What lies in the tiles of a `[batch | 1, heads | 1, rows, columns]`; 0 past its ends."""
    batch, heads, rows, columns = matrix.shape
    if rows % tile[0] or columns % tile[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles_q, tiles_k = matrix.shape[2] // tile[0], matrix.shape[3] // tile[1]
    by_tile = matrix.reshape(batch, heads, tiles_q, tile[0], tiles_k, tile[1]).transpose(3, 4)
    return lambda tiles: by_tile[tiles.batch * (batch > 1), tiles.head * (heads > 1), tiles.q_tile, tiles.k_tile]


class Source(NamedTuple):
    """What `tile_lists.build` needs: what is known of tiles, and the elements of those in doubt."""

    bounds: Callable[[Tiles], Bounds]
    elements: Elements


def of_kinds(table: Tensor, masks: Tensor, tile: tuple[int, int]) -> Source:
    """A mask that is there already, in tiles of `tile`, which hold one or several of its own.

    `table` `[batch | 1, heads | 1, tiles_q, tiles_k]` says which of `masks` `[kinds, own tile_q, own tile_k]` each of
    its tiles has. The last two are an empty and a full one.
    """
    per_tile = tile[0] // masks.shape[1], tile[1] // masks.shape[2]
    kinds, empty, full = looked_up(table, per_tile), masks.shape[0] - 2, masks.shape[0] - 1

    def bounds(tiles: Tiles) -> Bounds:
        kind = kinds(tiles).flatten(-2)
        # One tile of a kind looks like the next one.
        key = kind.squeeze(-1) if per_tile == (1, 1) else None
        return Bounds((kind != empty).any(dim=-1), (kind == full).all(dim=-1), key)

    def elements(tiles: Tiles) -> Tensor:
        # [tiles, n, m, own tile_q, own tile_k]
        return masks[kinds(tiles)].transpose(2, 3).reshape(-1, *tile)

    return Source(bounds, elements)


def both(first: Source, second: Source) -> Source:
    """The pairs that both show."""

    def bounds(tiles: Tiles) -> Bounds:
        a, b = first.bounds(tiles), second.bounds(tiles)
        assert a.certain is not None and b.certain is not None
        return Bounds(a.possible & b.possible, a.certain & b.certain, _paired(a.key, b.key))

    return Source(bounds, lambda tiles: first.elements(tiles) & second.elements(tiles))


def either(first: Source, second: Source) -> Source:
    """The pairs that one of them shows."""
    return inverted(both(inverted(first), inverted(second)))


def inverted(source: Source) -> Source:
    """The pairs that a mask hides."""

    def bounds(tiles: Tiles) -> Bounds:
        known = source.bounds(tiles)
        assert known.certain is not None
        return Bounds(~known.certain, ~known.possible, known.key)

    return Source(bounds, lambda tiles: ~source.elements(tiles))


def _paired(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """A number for each pair of kinds, of which there are fewer than 2**30."""
    return None if first is None or second is None else first * 2**30 + second


def of_layout(
    within: Elements, elements: Elements | None, small: tuple[int, int]
) -> tuple[Callable[[Tiles], Bounds], Elements]:
    """Bounds and elements of the stored tiles, given which of the small tiles in them are named."""

    def bounds(tiles: Tiles) -> Bounds:
        named = within(tiles).flatten(-2)
        return Bounds(named.any(dim=-1), named.all(dim=-1) if elements is None else None)

    def visible(tiles: Tiles) -> Tensor:
        named = _enlarged(within(tiles), small)
        return named if elements is None else named & elements(tiles)

    return bounds, visible


def _enlarged(named: Tensor, small: tuple[int, int]) -> Tensor:
    """`[tiles, n, m]` with each element as often as the small tile is large: `[tiles, n · small_q, m · small_k]`."""
    return named.repeat_interleave(small[0], dim=1).repeat_interleave(small[1], dim=2)


def of_listed_masks(masks: Tensor, named: Tensor, stored: tuple[int, int]) -> Elements:
    """The elements out of one mask `[small_q, small_k]` for each small tile that the layout names."""
    number = (named.flatten().cumsum(0) - 1).clamp(min=0).view(named.shape)
    numbers = looked_up(number, (stored[0] // masks.shape[1], stored[1] // masks.shape[2]))
    # [tiles, n, m, small_q, small_k]: those not named show some other mask, and are left out by the caller.
    return lambda tiles: masks[numbers(tiles)].transpose(2, 3).reshape(-1, *stored)


def flex_blocks(num_blocks: Tensor | None, indices: Tensor | None, tiles_k: int) -> Tensor | None:
    """FlexAttention's lists as bool `[batch, heads, tiles_q, tiles_k]`."""
    if num_blocks is None or indices is None:
        return None
    used = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    # What lies past the number of blocks goes to a column that is cut off.
    columns = torch.where(used, indices, tiles_k).long()
    tiles = torch.zeros((*indices.shape[:-1], tiles_k + 1), dtype=torch.bool, device=indices.device)
    tiles = tiles.scatter_(-1, columns, True)[..., :tiles_k]
    return tiles[(None,) * (4 - tiles.dim())]


def flex_list(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool `[..., tiles_k]` as FlexAttention's lists: how many there are, and their indices before all others."""
    indices = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), indices.int()


def of_flex(
    block_mask: FlexBlockMask, partial: Tensor, full: Tensor, grid: Grid
) -> tuple[Callable[[Tiles], Bounds], Elements]:
    """Bounds and elements, given which blocks FlexAttention looks into and which it takes whole."""
    small = block_mask.BLOCK_SIZE
    per_tile = grid.tile[0] // small[0], grid.tile[1] // small[1]
    looked_into, whole = looked_up(partial & ~full, per_tile), looked_up(full, per_tile)

    def bounds(tiles: Tiles) -> Bounds:
        taken = whole(tiles).flatten(-2)
        return Bounds(taken.any(dim=-1) | looked_into(tiles).flatten(-2).any(dim=-1), taken.all(dim=-1))

    visible = mapped(block_mask.mask_mod, grid)

    def elements(tiles: Tiles) -> Tensor:
        return visible(tiles) & _enlarged(looked_into(tiles), small) | _enlarged(whole(tiles), small)

    return bounds, elements
