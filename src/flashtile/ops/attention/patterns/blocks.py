"""Patterns of whole blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.mask_sources import checked_shape, resolved_device, stored_tile
from flashtile.ops.attention.patterns.packing import TILE, Device, check_count, made
from flashtile.ops.attention.tile_lists import Bounds, Tiles
from flashtile.ops.common.checks import raise_not_bool


def butterfly(seq: int, block: int = 64, *, device: Device = None) -> BlockMask:
    """Blocks whose numbers differ in at most one binary digit.

    ::

        x x x . x . . .      block rows and columns 0 to 7
        x x . x . x . .
        x . x x . . x .
        . x x x . . . x
        x . . . x x x .
        . x . . x x . x
        . . x . x . x x
        . . . x . x x x

    Block `(i, j)` is visible if `i ^ j` is 0 or a power of two. This is the sum of all factors of a butterfly matrix:
    the factor of level `m` connects blocks `2**m` apart, and the product of the factors would connect all. Each row has
    at most `1 + log2(blocks)` blocks. If the number of blocks is not a power of two, blocks that do not exist are left
    out.

    Args:
        seq: number of tokens.
        block: tokens in a block, a multiple of 16.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size or the block is wrong.

    Reference:
        Dao et al., "FlashAttention" (2022), section 3.3; Dao et al., "Pixelated Butterfly: Simple and Efficient Sparse
        Training for Neural Network Models" (2021), section 3.2: the flat butterfly.
    """
    tile = _checked_block(block)
    # A stored tile is 1, 2 or 4 blocks wide: it holds visible ones just if its number is such a number too.
    whole = stored_tile(tile) == tile

    def at_most_one_digit(first: Tensor, second: Tensor) -> Tensor:
        digits = first ^ second
        return digits & (digits - 1) == 0

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return at_most_one_digit(q // block, k // block)

    def bounds(tiles: Tiles) -> Bounds:
        possible = at_most_one_digit(tiles.q_tile, tiles.k_tile)
        return Bounds(possible, possible if whole else None, (tiles.q_tile == tiles.k_tile).long())

    return made((1, 1, seq, seq), tile, device, visible, bounds=bounds)


def big_bird(
    seq: int,
    block: int = 64,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
    heads: int | None = None,
    *,
    device: Device = None,
) -> BlockMask:
    """A window of blocks, blocks that see all and are seen by all, and random blocks in each row.

    ::

        x x x x x x x x      window_blocks=3, global_blocks=1, random_blocks=1
        x x x x . . . .
        x x x x . . x .
        x . x x x x . .
        x x . x x x . .
        x . . . x x x x
        x . . . x x x x
        x . x . . . x x

    Args:
        seq: number of tokens.
        block: tokens in a block, a multiple of 16.
        window_blocks: blocks around the diagonal, an odd number.
        global_blocks: how many blocks at the start are global, as keys and as queries.
        random_blocks: blocks that each row of blocks draws from those it would not see; all of these if there are
            fewer.
        seed: seed of the draw, which is the same on every device.
        heads: number of heads with a draw of their own; None = one draw for all heads.
        device: device of the result.

    Raises:
        TypeError, ValueError: a size, a number of blocks or the seed is wrong.

    Reference:
        Zaheer et al., "Big Bird: Transformers for Longer Sequences" (2020), section 2 and appendix D.
    """
    tile = _checked_block(block)
    check_count("window_blocks", window_blocks, 1, "1 is the diagonal alone")
    if window_blocks % 2 == 0:
        raise ValueError(f"window_blocks: expected an odd number, got {window_blocks}; the middle one is the diagonal")
    for name, count in (("global_blocks", global_blocks), ("random_blocks", random_blocks)):
        check_count(name, count, 0, "use 0 for none")
    check_count("seed", seed, 0, "any such number will do")
    drawn = 1 if heads is None else heads
    check_count("heads", drawn, 1, "None is one pattern for all")
    checked_shape(1, drawn, seq, seq)
    # On the CPU, whose generator gives the same numbers everywhere.
    number = torch.arange(-(-seq // block), device="cpu")
    row, column = number[:, None], number[None, :]
    seen = ((row - column).abs() <= window_blocks // 2) | (torch.minimum(row, column) < global_blocks)
    generator = torch.Generator("cpu").manual_seed(seed)
    layout = torch.stack([seen | _drawn(seen, random_blocks, generator) for _ in range(drawn)])
    return BlockMask.from_layout(layout[None].to(resolved_device(device)), tile, seq, seq)


def _drawn(seen: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """In each row, `count` of the places that are not seen, or all there are."""
    order = torch.rand(seen.shape, dtype=torch.float64, generator=generator, device="cpu").masked_fill_(seen, 2.0)
    chosen = order.topk(min(count, seen.shape[1]), largest=False)
    return torch.zeros_like(seen).scatter_(1, chosen.indices, chosen.values < 2)


def _checked_block(block: int) -> tuple[int, int]:
    """The tile of a square block."""
    check_count("block", block, 16, "64 is usual")
    if block % 16:
        raise ValueError(f"block: expected a multiple of 16, got {block}; 64 is usual")
    return block, block


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
