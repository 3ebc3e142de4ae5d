"""Patterns of whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.block_mask_arguments import checked_shape, resolved_device, stored_tile
from flashtile.ops.attention.patterns.pieces import Device, check_count, made
from flashtile.ops.attention.tile_lists import Bounds, Tiles


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

    return made((1, 1, seq, seq), tile, device, bounds, visible)


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
