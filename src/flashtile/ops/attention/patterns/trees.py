"""Sequences that share prefixes, packed so that each shared prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.mask_sources import resolved_device, stored_tile
from flashtile.ops.attention.patterns.packing import TILE, Device, check_count, extremes, made
from flashtile.ops.attention.tile_lists import Bounds, Tiles


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

    def of_tokens(numbers: list[int]) -> Tensor:
        """`[1, tokens]`, from a number for each segment."""
        return torch.repeat_interleave(torch.tensor(numbers, dtype=torch.int64, device=device), repeats)[None]

    entered, left = of_tokens(enter), of_tokens(leave)
    tokens = entered.shape[1]
    tile_q, tile_k = stored_tile(tile)
    queries = _Ends(*extremes(entered, tile_q))
    keys_entered, keys_left = _Ends(*extremes(entered, tile_k)), _Ends(*extremes(left, tile_k))

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        segment = entered[0, q]
        return (k <= q) & (entered[0, k] <= segment) & (segment < left[0, k])

    def bounds(tiles: Tiles) -> Bounds:
        q, k = (0, tiles.q_tile), (0, tiles.k_tile)
        possible = (keys_entered.least[k] <= queries.most[q]) & (queries.least[q] < keys_left.most[k])
        certain = (keys_entered.most[k] <= queries.least[q]) & (queries.most[q] < keys_left.least[k])
        return Bounds(possible & (tiles.first_k <= tiles.last_q), certain & (tiles.last_k <= tiles.first_q))

    return made((1, 1, tokens, tokens), tile, device, bounds, visible)


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


class _Ends(NamedTuple):
    """The least and the greatest number in each tile, `[1, tiles]`."""

    least: Tensor
    most: Tensor


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
