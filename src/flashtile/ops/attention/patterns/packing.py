"""Several documents in one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, from_bounds
from flashtile.ops.attention.mask_sources import Predicate, checked_shape, mapped, resolved_device, stored_tile
from flashtile.ops.attention.tile_lists import Bounds, Grid, Shape, Tiles
from flashtile.ops.common import checks
from flashtile.ops.common.checks import INDEX_DTYPES, check_tensors, raise_not_bool

Device = torch.device | str | None
#: Unless the caller says otherwise.
TILE = (128, 128)


def documents(
    *,
    lengths: Sequence[int] | Tensor | None = None,
    ids: Tensor | None = None,
    causal: bool = False,
    tile: tuple[int, int] = TILE,
    device: Device = None,
    max_partial_tiles: int | None = None,
) -> BlockMask:
    """Tokens see the tokens of their own document.

    ::

        lengths=[2, 3, 1]     x x . . . .      causal     x . . . . .
                              x x . . . .                 x x . . . .
                              . . x x x .                 . . x . . .
                              . . x x x .                 . . x x . .
                              . . x x x .                 . . x x x .
                              . . . . . x                 . . . . . x

    Args:
        lengths: lengths of documents that follow one another, `[documents]`; their sum is the number of tokens.
        ids: the document of each token, int32 or int64 `[seq]`, or `[batch, seq]`; in any order. A token with a
            negative id belongs to no document: it sees nothing and is not seen. Pass either lengths or ids.
        causal: tokens see no later tokens.
        tile: tile of the lists, multiples of 16.
        device: device of the result; None = that of lengths or ids if they are tensors.
        max_partial_tiles: as for `BlockMask.from_predicate`; then ids are not read on the host. Lengths in a tensor
            are.

    Raises:
        TypeError, ValueError: both or none of lengths and ids, or a dtype, a shape, a length or the tile is wrong.

    Reference:
        Krell, Kosec, Perez, Fitzgibbon, "Efficient Sequence Packing without Cross-contamination" (2021).
    """
    raise_not_bool(causal=causal)
    ids = _document_ids(lengths, ids, device)
    batch, seq = ids.shape
    shape = (batch, 1, seq, seq)
    grid = Grid(shape, stored_tile(tile))
    least_q, most_q = extremes(ids, grid.tile[0])
    least_k, most_k = extremes(ids, grid.tile[1])

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        document = ids[batch, q]
        seen = (document == ids[batch, k]) & (document >= 0)
        return seen & (k <= q) if causal else seen

    def bounds(tiles: Tiles) -> Bounds:
        at_q, at_k = (tiles.batch, tiles.q_tile), (tiles.batch, tiles.k_tile)
        # Tiles share no document if their ids do not overlap; and only one if all are equal.
        possible = (least_q[at_q] <= most_k[at_k]) & (least_k[at_k] <= most_q[at_q]) & (most_k[at_k] >= 0)
        certain = (least_q[at_q] == most_k[at_k]) & (least_k[at_k] == most_q[at_q]) & (least_k[at_k] >= 0)
        if causal:
            possible = possible & (tiles.first_k <= tiles.last_q)
            certain = certain & (tiles.last_k <= tiles.first_q)
        return Bounds(possible, certain)

    return made(shape, tile, ids.device, bounds, visible, max_partial_tiles)


def _document_ids(lengths: Sequence[int] | Tensor | None, ids: Tensor | None, device: Device) -> Tensor:
    """The document of each token, `[batch, seq]`."""
    if (lengths is None) == (ids is None):
        raise ValueError(
            f"lengths, ids: expected one of them, got {'neither' if ids is None else 'both'}; lengths are of documents "
            "one behind the other, ids tell the document of each token"
        )
    if lengths is not None:
        lengths = integers("lengths", lengths, (1,), "[documents]", device)
        if bool((lengths < 0).any()):
            raise ValueError(
                f"lengths: expected at least 0, got {int(lengths.min())}; use ids for tokens of no document"
            )
        return torch.repeat_interleave(lengths.long())[None]
    assert ids is not None
    check_tensors(ids=ids)
    ids = integers("ids", ids, (1, 2), "[seq] or [batch, seq]", device)
    return ids if ids.dim() == 2 else ids[None]


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
