"""Sources of block masks: functions, matrices, layouts, FlexAttention's blocks, other masks. And their checks.

A mask function is plain Python on four scalars. FlexAttention (PyTorch) has functions of the same signature:
`mask_mod`. Its values for all pairs of some tiles come from `torch.vmap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashtile.ops.attention.tile_lists import STORED_TILE, Bounds, Elements, Grid, Shape, Tiles
from flashtile.ops.common import checks
from flashtile.ops.common.checks import check_device, check_tensors, type_name

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

#: `predicate(batch, head, q_index, k_index)`: bool, of four int64 scalars.
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Functions that read a scalar on the host.
READING = {"__bool__", "__int__", "__index__", "__float__", "__complex__", "item", "tolist", "numpy"}


def mapped(predicate: Predicate, grid: Grid) -> Elements:
    """The elements of tiles by a function of single indices; those past the ends are asked for as the last."""

    def pair_mask(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return _checked(predicate(batch, head, q_index, k_index))

    of_keys = torch.vmap(pair_mask, (None, None, None, 0))
    of_pairs = torch.vmap(of_keys, (None, None, 0, None))
    of_tiles = torch.vmap(of_pairs)

    def elements(tiles: Tiles) -> Tensor:
        within_q, within_k = (torch.arange(size, device=tiles.batch.device) for size in grid.tile)
        q_index = (tiles.first_q[:, None] + within_q).clamp(max=grid.shape[2] - 1)
        k_index = (tiles.first_k[:, None] + within_k).clamp(max=grid.shape[3] - 1)
        with _LookUpByScalars():
            return of_tiles(tiles.batch, tiles.head, q_index, k_index)

    return elements


def _checked(visible: Tensor) -> Tensor:
    if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"predicate: expected a bool tensor, True = visible, got {got}; compare, as q_index >= k_index")
    if visible.dim():
        raise ValueError(
            f"predicate: expected one bool for one pair of indices, got shape {tuple(visible.shape)}; look captured "
            "tensors up by index, as ids[batch, q_index]"
        )
    return visible


class _LookUpByScalars(TorchFunctionMode):
    """Makes `table[i, j]` by integer tensors a gather. Python's indexing would read a scalar on the host. What else
    would read one raises."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READING and torch._C._functorch.is_batchedtensor(args[0]):
            raise TypeError(
                f"predicate: expected operations on tensors alone, got {name}, which needs the value of an index or of "
                "something computed from it; combine conditions by &, | and ~, and choose by torch.where"
            )
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            scalars = any(isinstance(entry, Tensor) for entry in index)
            if scalars and all(_is_index(entry) for entry in index):
                return torch.ops.aten.index(args[0], [on_device(entry, args[0].device) for entry in index])
        return func(*args, **(kwargs or {}))


def on_device(number: Any, device: torch.device) -> Tensor:
    """A number as a tensor, without a copy from the host; a tensor as it is."""
    return number if isinstance(number, Tensor) else torch.full((), number, device=device)


def _is_index(entry: object) -> bool:
    if isinstance(entry, Tensor):
        return entry.dim() == 0 and not entry.is_floating_point() and entry.dtype is not torch.bool
    return isinstance(entry, int) and not isinstance(entry, bool)


def anywhere(tiles: Tiles) -> Bounds:
    """Nothing is known."""
    possible = torch.ones((1, 1), dtype=torch.bool, device=tiles.batch.device)
    return Bounds(possible, ~possible)


def looked_up(matrix: Tensor, tile: tuple[int, int]) -> Elements:
    """The elements of the tiles of a `[batch | 1, heads | 1, rows, columns]`; 0 past its ends."""
    batch, heads, rows, columns = matrix.shape
    if rows % tile[0] or columns % tile[1]:
        matrix = torch.nn.functional.pad(matrix, (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles_q, tiles_k = matrix.shape[2] // tile[0], matrix.shape[3] // tile[1]
    by_tile = matrix.reshape(batch, heads, tiles_q, tile[0], tiles_k, tile[1]).transpose(3, 4)
    return lambda tiles: by_tile[tiles.batch * (batch > 1), tiles.head * (heads > 1), tiles.q_tile, tiles.k_tile]


class Source(NamedTuple):
    """Input of `tile_lists.build`: what is known of tiles, and the elements of those in doubt."""

    bounds: Callable[[Tiles], Bounds]
    elements: Elements


def kinds_source(table: Tensor, masks: Tensor, tile: tuple[int, int]) -> Source:
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
        return Bounds(a.possible & b.possible, a.certain & b.certain, _paired(a.key, b.key))

    return Source(bounds, lambda tiles: first.elements(tiles) & second.elements(tiles))


def either(first: Source, second: Source) -> Source:
    """The pairs that one of them shows."""
    return inverted(both(inverted(first), inverted(second)))


def inverted(source: Source) -> Source:
    """The pairs that a mask hides."""

    def bounds(tiles: Tiles) -> Bounds:
        known = source.bounds(tiles)
        return Bounds(~known.certain, ~known.possible, known.key)

    return Source(bounds, lambda tiles: ~source.elements(tiles))


def _paired(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """A number for each pair of kinds, of which there are fewer than 2**30."""
    return None if first is None or second is None else first * 2**30 + second


def layout_source(named: Tensor, small: tuple[int, int], tile: tuple[int, int], masks: Tensor | None = None) -> Source:
    """The pairs of the tiles of `small` that a layout names, in tiles of `tile`. `masks`: what is visible in each of
    those named, in their order; None = everything."""
    empty, full = empty_and_full(small, named.device).bool()
    if masks is None:
        return kinds_source(named.long(), torch.stack((empty, full)), tile)
    number = (named.flatten().cumsum(0) - 1).view(named.shape)
    kinds = torch.where(named, number, masks.shape[0])
    return kinds_source(kinds, torch.cat((masks, empty[None], full[None])), tile)


def empty_and_full(tile: tuple[int, int], device: torch.device) -> Tensor:
    """Two masks of a tile, uint8 `[2, tile_q, tile_k]`."""
    return torch.arange(2, dtype=torch.uint8, device=device).view(2, 1, 1).expand(2, *tile)


def flex_blocks(num_blocks: Tensor | None, indices: Tensor | None, tiles_k: int) -> Tensor | None:
    """FlexAttention's lists as bool `[batch, heads, tiles_q, tiles_k]`."""
    if num_blocks is None or indices is None:
        return None
    used = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    # Entries past the number of blocks go to a column that is cut off.
    columns = torch.where(used, indices, tiles_k).long()
    tiles = torch.zeros((*indices.shape[:-1], tiles_k + 1), dtype=torch.bool, device=indices.device)
    tiles = tiles.scatter_(-1, columns, True)[..., :tiles_k]
    return tiles[(None,) * (4 - tiles.dim())]


def flex_list(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool `[..., tiles_k]` as FlexAttention's lists: how many there are, and their indices before all others."""
    indices = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), indices.int()


def flex_source(block_mask: FlexBlockMask, partial: Tensor, full: Tensor, grid: Grid) -> Source:
    """A mask of FlexAttention, given which blocks it looks into and which it takes whole."""
    small = block_mask.BLOCK_SIZE
    looked_into = layout_source(partial & ~full, small, grid.tile)
    visible = both(looked_into, Source(anywhere, mapped(block_mask.mask_mod, grid)))
    return either(layout_source(full, small, grid.tile), visible)


#: A user's tile is a multiple of this.
USER_TILE = 16


def check_count(name: str, count: int, least: int, remedy: str) -> None:
    """For a number that no exported program may leave open, because masks are built from it."""
    if isinstance(count, torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {count!r}; {remedy}")
    checks.check_count(name, count, remedy, least)


def checked_shape(batch: int, heads: int, seq_q: int, seq_k: int) -> Shape:
    for name, size in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)):
        check_count(name, size, 0, "pass the length of the call")
    return batch, heads, seq_q, seq_k


def resolved_device(device: torch.device | str | None) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def stored_tile(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile of the lists for that of a user."""
    ints = isinstance(tile, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in tile)
    if not ints or len(tile) != 2:
        raise TypeError(f"tile: expected a pair of ints (tile_q, tile_k), got {tile!r}; (128, 128) is usual")
    if not all(size > 0 and size % USER_TILE == 0 for size in tile):
        raise ValueError(f"tile: expected multiples of {USER_TILE}, got {tuple(tile)}; round them up")
    return math.lcm(tile[0], STORED_TILE), math.lcm(tile[1], STORED_TILE)


def larger_tile(tile: tuple[int, int], own: tuple[int, int]) -> tuple[int, int]:
    """The tile of a mask that is built from one with tiles of `own`."""
    stored_tile(tile)
    if tile[0] % own[0] or tile[1] % own[1]:
        raise ValueError(f"tile: expected multiples of the mask's {own}, got {tuple(tile)}; build another mask")
    return tile[0], tile[1]


def as_four(name: str, mask: Tensor, dims: str) -> Tensor:
    """A bool matrix, or one for each batch entry and head, with all four dimensions."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"{name}: expected dtype bool, True = visible, got {mask.dtype}; use {name} != 0")
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"{name}: expected shape [{dims}] or [batch, heads, {dims}], got {tuple(mask.shape)}; "
            "a batch or heads of 1 stands for any number"
        )
    return mask if mask.dim() == 4 else mask[None, None]


def checked_layout(layout: Tensor, tile: tuple[int, int], seq_q: int, seq_k: int) -> Tensor:
    """The tiles that a layout names, bool with all four dimensions."""
    check_tensors(layout=layout)
    if layout.is_floating_point() or layout.is_complex():
        raise TypeError(f"layout: expected dtype bool or an integer, got {layout.dtype}; use layout != 0")
    expected = -(-seq_q // tile[0]), -(-seq_k // tile[1])
    named = as_four("layout", layout != 0, "tiles_q, tiles_k")
    if named.shape[2:] != expected:
        raise ValueError(
            f"layout: expected {expected} tiles of {tuple(tile)} for {seq_q} queries and {seq_k} keys, "
            f"got {tuple(named.shape[2:])}; check tile, seq_q and seq_k"
        )
    return named


def checked_tiles(masks: Tensor, named: Tensor, tile: tuple[int, int]) -> Tensor:
    """An element mask for each tile that a layout names."""
    if masks.dtype is not torch.bool:
        raise TypeError(f"element_mask: expected dtype bool, True = visible, got {masks.dtype}; use element_mask != 0")
    expected = int(named.sum()), *tile
    if masks.shape != expected:
        raise ValueError(
            f"element_mask: expected {expected}, a mask for each tile that the layout names, got {tuple(masks.shape)}; "
            "order them as layout.nonzero() does"
        )
    check_device("element_mask", masks, named.device, "layout")
    return masks


def checked_elements(mask: Tensor, named: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """An element mask of every pair, beside a layout."""
    mask = as_four("element_mask", mask, "seq_q, seq_k")
    fits = all(own == other or 1 in (own, other) for own, other in zip(mask.shape[:2], named.shape[:2]))
    if not fits or mask.shape[2:] != (seq_q, seq_k):
        raise ValueError(
            f"element_mask: expected {seq_q} × {seq_k} pairs, and the batch and heads of layout, "
            f"{tuple(named.shape[:2])}, or 1, got {tuple(mask.shape)}; cut or expand it"
        )
    check_device("element_mask", mask, named.device, "layout")
    return mask


def check_flex(block_mask: FlexBlockMask) -> None:
    """A mask of FlexAttention with a mask_mod of its own, and blocks for all of its queries: a slice has neither."""
    from torch.nn.attention import flex_attention

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise TypeError(
            f"block_mask: expected a BlockMask of torch.nn.attention.flex_attention, got "
            f"{type_name(block_mask)}; a mask_mod alone goes to BlockMask.from_predicate"
        )
    if block_mask.mask_mod is getattr(flex_attention, "_sliced_mask_mod_error", None):
        raise ValueError(
            "block_mask: expected a mask with a mask_mod, got a slice of one, from which PyTorch takes it away; make "
            "another mask with create_block_mask, or set part.mask_mod to a function that counts from the part's first "
            "entry, head and query, and for a slice of the queries part.seq_lengths"
        )
    seq_q, tile_q = block_mask.shape[-2], block_mask.BLOCK_SIZE[0]
    tiles, expected = block_mask.kv_num_blocks.shape[-1], -(-seq_q // tile_q)
    if tiles < expected:
        raise ValueError(
            f"block_mask: expected blocks for {seq_q} queries, {expected} rows of {tile_q}, got {tiles} as of a slice; "
            "set part.seq_lengths to the queries and keys that it is for, or make another mask with create_block_mask"
        )
