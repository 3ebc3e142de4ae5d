"""The rectangle of a block mask that a part of a call reads."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, from_bounds
from flashtile.ops.attention.tile_lists import Bounds, Grid, Tiles


class Rectangle(NamedTuple):
    """Where a part lies in a mask: pairs of a first number and a count. Those of batch entries and heads count where
    the mask has more than one."""

    batch: tuple[int, int]
    heads: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]


#: Rectangles of masks, with the mask, so that its number stays its own; the oldest go first. Making one reads values on
#: the host, and a model takes the same ones in every layer.
_known: OrderedDict[tuple[int, Rectangle], tuple[BlockMask, BlockMask]] = OrderedDict()
_MOST_KNOWN = 128


def part_of_mask(mask: BlockMask, place: Rectangle) -> BlockMask:
    """The mask of a rectangle, which must lie within the mask. Its tiles are those of the mask."""
    if _is_whole(mask, place):
        return mask
    key = id(mask), place
    if key not in _known:
        _known[key] = mask, _made(mask, place)
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return _known[key][1]


def _is_whole(mask: BlockMask, place: Rectangle) -> bool:
    return all(
        (first, count) == (0, size) or (dim < 2 and size == 1)
        for dim, ((first, count), size) in enumerate(zip(place, mask.shape))
    )


def _made(mask: BlockMask, place: Rectangle) -> BlockMask:
    (tile_q, tile_k), (row, column) = mask.tile, (place.rows[0], place.columns[0])
    table = mask.kind_table().view(*mask.shape[:2], mask.grid.tiles_q, mask.grid.tiles_k)
    for dim, (first, count) in enumerate(place[:2]):
        table = table if table.shape[dim] == 1 else table.narrow(dim, first, count)
    masks = mask.masks_with_ends().bool()
    empty, full = masks.shape[0] - 2, masks.shape[0] - 1
    grid = Grid((*table.shape[:2], place.rows[1], place.columns[1]), mask.tile)
    aligned = row % tile_q == 0 and column % tile_k == 0

    def bounds(tiles: Tiles) -> Bounds:
        rows = [(of + row) // tile_q for of in (tiles.first_q, tiles.last_q)]
        columns = [(of + column) // tile_k for of in (tiles.first_k, tiles.last_k)]
        kinds = [table[tiles.batch, tiles.head, q_tile, k_tile] for q_tile in rows for k_tile in columns]
        alike = torch.stack(torch.broadcast_tensors(*kinds))
        return Bounds((alike != empty).any(0), (alike == full).all(0), kinds[0] if aligned else None)

    def elements(tiles: Tiles) -> Tensor:
        within_q, within_k = (torch.arange(size, device=mask.device) for size in mask.tile)
        q = (tiles.first_q[:, None] + within_q).clamp(max=place.rows[1] - 1)[:, :, None] + row
        k = (tiles.first_k[:, None] + within_k).clamp(max=place.columns[1] - 1)[:, None, :] + column
        kind = table[tiles.batch[:, None, None], tiles.head[:, None, None], q // tile_q, k // tile_k]
        return masks[kind, q % tile_q, k % tile_k]

    return from_bounds(grid, mask.device, bounds, elements)
