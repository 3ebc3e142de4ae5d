"""What the patterns share: their way to a mask, and checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, from_bounds
from flashtile.ops.attention.block_mask_arguments import checked_shape, resolved_device, stored_tile
from flashtile.ops.attention.mask_functions import Predicate, mapped
from flashtile.ops.attention.tile_lists import Bounds, Grid, Shape, Tiles
from flashtile.ops.common import checks
from flashtile.ops.common.checks import INDEX_DTYPES

Device = torch.device | str | None
#: Unless the caller says otherwise.
TILE = (128, 128)


def made(
    shape: Shape,
    tile: tuple[int, int],
    device: Device,
    bounds: Callable[[Tiles], Bounds],
    visible: Predicate,
    max_partial_tiles: int | None = None,
) -> BlockMask:
    grid = Grid(checked_shape(*shape), stored_tile(tile))
    return from_bounds(grid, resolved_device(device), bounds, mapped(visible, grid), max_partial_tiles)


def check_count(name: str, count: int, least: int, remedy: str) -> None:
    """For a number that no exported program may leave open, because masks are built from it."""
    if isinstance(count, torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {count!r}; {remedy}")
    checks.check_count(name, count, remedy, least)


def integers(
    name: str, values: Sequence[int] | Tensor | None, ranks: tuple[int, ...], shape: str, device: Device
) -> Tensor:
    """A tensor of integers, made of a sequence where it is none."""
    if not isinstance(values, (Tensor, list, tuple)):
        raise TypeError(f"{name}: expected a tensor or a list of ints, got {type(values).__name__}; shape {shape}")
    if isinstance(values, Tensor):
        tensor = values if device is None else values.to(device)
    else:
        for value in values:
            check_count(name, value, 0, "a list holds lengths")
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {tensor.dtype}; cast it")
    if tensor.dim() not in ranks:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}; reshape it")
    return tensor


def extremes(numbers: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest of numbers `[batch, seq]` in each tile, `[batch, tiles]`."""
    batch, seq = numbers.shape
    if seq % tile:
        numbers = torch.cat((numbers, numbers[:, -1:].expand(batch, -seq % tile)), dim=1)
    by_tile = numbers.reshape(batch, -(-seq // tile), tile)
    return by_tile.amin(dim=2), by_tile.amax(dim=2)
