"""Checks of what the builders of block masks are given: sizes, tiles, layouts and masks of elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtile.ops.attention.tile_lists import STORED_TILE, Shape
from flashtile.ops.common.checks import LARGEST_COUNT, check_device, check_tensors, type_name

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

#: A user's tile is a multiple of this.
USER_TILE = 16


def checked_shape(batch: int, heads: int, seq_q: int, seq_k: int) -> Shape:
    for name, size in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {size!r}; pass a number")
        if size < 0:
            raise ValueError(f"{name}: expected a size of at least 0, got {size}; pass the length of the call")
        if size >= LARGEST_COUNT:
            raise ValueError(f"{name}: expected a size below 2**62, got {size}; pass the length of the call")
    return batch, heads, seq_q, seq_k


def checked_room(tiles: int) -> int:
    if isinstance(tiles, bool) or not isinstance(tiles, int):
        raise TypeError(f"max_partial_tiles: expected an int or None, got {tiles!r}; it is a number of tiles")
    if tiles < 0:
        raise ValueError(f"max_partial_tiles: expected at least 0, got {tiles}; it is a number of tiles")
    return tiles


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
    """Which tiles a layout names, bool with all four dimensions."""
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
