"""Walking over the tiles of a block mask: its lists name, for each line of tiles, those with something visible.

A *line* is a row of tiles of one head of one batch entry or packed sequence, or in the dk/dv kernel a column. Stored
tiles are TILE_Q × TILE_K; those of a kernel divide them. TILE_Q = 0: there is no block mask. In a packed call the lists
are made for the longest sequence, and tiles past the end of a shorter one are hidden like any key that is not there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.ops.attention.plans import BlockSizes, block_places
from flashtile.ops.attention.spec import AttentionSpec
from flashtile.ops.attention.triton.configs import OWN_KEYS, Kernel

#: As in `flashtile.ops.attention.tile_lists`.
FULL = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)

#: What tells a kernel where its part of a block mask's lists is.
BLOCK_SCALARS = ("block_offsets", "block_tiles", "block_kinds", "stride_block_batch", "stride_block_head")


def block_scalars(kernel: Kernel, spec: AttentionSpec, sizes: BlockSizes | None) -> dict[str, int | None]:
    """Where in a block mask's lists (`BlockMask.lists`) the kernel's lines, tiles and kinds are; None without one."""
    places = block_places(spec, sizes, kernel in OWN_KEYS)
    return {name: getattr(places, name) for name in BLOCK_SCALARS}


class BlockLists(NamedTuple):
    """The lists of a block mask, as a kernel walks over them.

    Attributes:
        ptr: the lists.
        offsets, tiles, kinds: where in the lists the offsets of the lines, the tiles and their kinds begin.
        stride_batch, stride_head: lines from one batch entry, or head, to the next; 0 where they share lines.
    """

    ptr: Any
    offsets: Any
    tiles: Any
    kinds: Any
    stride_batch: Any
    stride_head: Any


class BlockLine(NamedTuple):
    """One line. `tiles_ptr`, `kinds_ptr`: its first entry."""

    entries: Any
    tiles_ptr: Any
    kinds_ptr: Any


@triton.jit
def load_line(lists, sequence, head, line):
    """The `BlockLine` of a number, among those of one head of one sequence."""
    pointer = lists.ptr + lists.offsets + sequence * lists.stride_batch + head * lists.stride_head + line
    first, end = tl.load(pointer), tl.load(pointer + 1)
    tiles_ptr = lists.ptr + lists.tiles + first
    kinds_ptr = lists.ptr + lists.kinds + first
    return BlockLine(end - first, tiles_ptr, kinds_ptr)


@triton.jit
def listed_tile(blocks, step, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the kernel's tile number `step / BLOCK` of a line begins, and the kind of the stored one that it is in."""
    entry = step // TILE
    start = tl.load(blocks.tiles_ptr + entry) * TILE + step % TILE
    return tl.multiple_of(start, BLOCK), tl.load(blocks.kinds_ptr + entry)


@triton.jit
def apply_pattern(
    scores, patterns_ptr, kind, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Hides what a partly visible tile does not show. A full tile stays as it is, and nothing is read for it.
    `patterns_ptr`: `[P, TILE_Q, TILE_K]`.

    The backward branches around it and is faster so (dk/dv 0.31 ms against 0.44). In the forward ptxas takes a branch
    for a reason to serialise the matrix products of Hopper (its message C7515; 2.4 ms against 0.3).
    """
    row = first_row % TILE_Q + tl.arange(0, BLOCK_M)
    column = tl.multiple_of(first_column % TILE_K, BLOCK_N) + tl.arange(0, BLOCK_N)
    pattern = patterns_ptr + kind.to(tl.int64) * (TILE_Q * TILE_K)
    pointers = pattern + row[:, None] * TILE_K + column[None, :]
    shown = tl.load(pointers, mask=kind + tl.zeros((BLOCK_M, BLOCK_N), tl.int32) >= 0, other=0)
    shown = tl.trans(shown) if TRANSPOSED else shown
    # kind >> 31: all bits of a full tile, none of another.
    return tl.where((shown.to(tl.int32) | (kind >> 31)) != 0, scores, float("-inf"))


@triton.jit
def kind_of_tile(blocks, tile):
    """The kind of one tile of a line; EMPTY where it is not listed."""
    CHUNK: tl.constexpr = 64
    kind = EMPTY
    for first in range(0, blocks.entries, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        listed = tl.load(blocks.tiles_ptr + entry, mask=entry < blocks.entries, other=-1)
        kinds = tl.load(blocks.kinds_ptr + entry, mask=entry < blocks.entries, other=EMPTY)
        kind = tl.maximum(kind, tl.max(tl.where(listed == tile, kinds, EMPTY), 0))
    return kind
