"""Patterns of blocks: packed sequences, sequences that share prefixes and are packed so that each shared prefix is
computed once, and layouts of square blocks. `made` builds every pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask, from_bounds
from flashtile.ops.attention.intervals import tile_bounds
from flashtile.ops.attention.mask_sources import (
    Predicate,
    check_count,
    checked_shape,
    mapped,
    resolved_device,
    stored_tile,
)
from flashtile.ops.attention.tile_lists import Bounds, Grid, Shape, Tiles
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

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_query, of_key = ids[batch, q], ids[batch, k]
        seen = (of_query == of_key) & (of_key >= 0)
        return seen & (k <= q) if causal else seen

    return made((batch, 1, seq, seq), tile, ids.device, visible, max_partial_tiles=max_partial_tiles)


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
    shape: Shape, tile: tuple[int, int], device: Device, visible: Predicate,
    key: Callable[[Tiles], Tensor] | None = None, bounds: Callable[[Tiles], Bounds] | None = None,
    max_partial_tiles: int | None = None,
) -> BlockMask:  # fmt: skip
    """A mask of the pairs that `visible` shows. `key`: equal for tiles that look alike. `bounds`: what is known of
    tiles, for a function of which intervals tell nothing."""
    grid = Grid(checked_shape(*shape), stored_tile(tile))
    known = bounds or tile_bounds(visible)

    def bounds_and_key(tiles: Tiles) -> Bounds:
        return known(tiles) if key is None else known(tiles)._replace(key=key(tiles))

    return from_bounds(grid, resolved_device(device), bounds_and_key, mapped(visible, grid), max_partial_tiles)


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


def tree(
    lengths: Sequence[int],
    parents: Sequence[int],
    *,
    tile: tuple[int, int] = TILE,
    device: Device = None,
) -> BlockMask:
    """Tokens see the earlier tokens of their own segment, and all tokens of the segments above it.

    ::

        lengths=[2, 2, 1, 2], parents=[-1, 0, 1, 0]:

        x . . . . . .     segment 0, a prompt of 2 tokens
        x x . . . . .
        x x x . . . .     segment 1 continues segment 0
        x x x x . . .
        x x x x x . .     segment 2 continues segment 1
        x x . . . x .     segment 3 continues segment 0
        x x . . . x x

    Each path from a root to a segment is a sequence. Its tokens get the out that the sequence gets alone, with causal
    attention, and gradients are the sums over all sequences that share a token. A prompt with eight answers is computed
    once instead of eight times. `tree_positions` gives the positions for rotary embeddings.

    Args:
        lengths: number of tokens of each segment, `[segments]`. The segments follow one another in the sequence.
        parents: for each segment the number of the segment that it continues, or -1 if it begins a sequence. A segment
            stands after its parent.
        tile: tile of the lists, multiples of 16.
        device: device of the result.

    Raises:
        TypeError: lengths or parents is not a list or tuple of ints.
        ValueError: a length is negative, or a parent is not a segment that stands before its child.
    """
    _checked(lengths, parents)
    device = resolved_device(device)
    enter, leave = _intervals(parents)
    repeats = torch.tensor(lengths, dtype=torch.int64, device=device)

    def by_token(numbers: list[int]) -> Tensor:
        """`[1, tokens]`, from a number for each segment."""
        return torch.repeat_interleave(torch.tensor(numbers, dtype=torch.int64, device=device), repeats)[None]

    entered, left = by_token(enter), by_token(leave)
    tokens = entered.shape[1]

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment = entered[0, q]
        return (k <= q) & (entered[0, k] <= segment) & (segment < left[0, k])

    return made((1, 1, tokens, tokens), tile, device, visible)


def tree_positions(lengths: Sequence[int], parents: Sequence[int], *, device: Device = None) -> Tensor:
    """The position of each token in its own sequences, from 0 at the root: for rotary embeddings.

    Args:
        lengths: number of tokens of each segment, as in `tree`.
        parents: for each segment the number of the segment that it continues, or -1, as in `tree`.
        device: device of the result.

    Returns:
        int64 `[tokens]`.

    Raises:
        TypeError, ValueError: as in `tree`.
    """
    _checked(lengths, parents)
    ends: list[int] = []
    parts = []
    for length, parent in zip(lengths, parents):
        start = 0 if parent < 0 else ends[parent]
        ends.append(start + length)
        parts.append(torch.arange(start, start + length, device=resolved_device(device)))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=resolved_device(device))


def _checked(lengths: Sequence[int], parents: Sequence[int]) -> None:
    for name, values in (("lengths", lengths), ("parents", parents)):
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{name}: expected a list of ints, got {type(values).__name__}; one int for each segment")
    if len(lengths) != len(parents):
        raise ValueError(f"parents: expected one for each of the {len(lengths)} lengths, got {len(parents)}")
    for segment, (length, parent) in enumerate(zip(lengths, parents)):
        check_count("lengths", length, 0, "it is the number of tokens of a segment")
        check_count("parents", parent, -1, "-1 begins a sequence")
        if parent >= segment:
            raise ValueError(
                f"parents: expected segments before segment {segment}, or -1, got {parent}; put parents before children"
            )


def _intervals(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers of the segments in depth-first order, and behind each the number after its last descendant.

    A segment is another one's ancestor, or itself, if its interval holds the other's number.
    """
    descendants = [1] * len(parents)
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            descendants[parents[segment]] += descendants[segment]
    enter: list[int] = []
    free_below: list[int] = []
    free = 0
    for segment, parent in enumerate(parents):
        first = free if parent < 0 else free_below[parent]
        enter.append(first)
        free_below.append(first + 1)
        if parent < 0:
            free += descendants[segment]
        else:
            free_below[parent] += descendants[segment]
    return enter, [first + count for first, count in zip(enter, descendants)]


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
        return Bounds(possible, possible & whole, (tiles.q_tile == tiles.k_tile).long())

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
