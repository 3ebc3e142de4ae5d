"""The masks that cases name: which pairs they show, and how many, as layout, as lengths and as a `BlockMask`.

`tiles128:0.1` shows random tiles of 128 queries and 128 keys, about a tenth of them. `documents768` shows each token
the tokens of its own document; their lengths have the median 768 and a long tail. These two are block masks. The others
are tensors of booleans: `padding` hides the last keys of each batch entry, up to half of them, and `random0.5` shows
half of all pairs.
"""

from __future__ import annotations

import functools
import math
import random

import torch
from torch import Tensor

from flashtile import BlockMask, patterns

_DOCUMENTS = "documents"
_TILES = "tiles"
_RANDOM = "random"
#: The mask of keys that pad short sequences.
PADDING = "padding"


def long_tailed_lengths(total: int = 65536, median: int = 768) -> list[int]:
    """Lengths from 16 to 16,384 of log-normal distribution (sigma 1.4), always the same, `total` tokens."""
    generator = random.Random(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = round(generator.lognormvariate(math.log(median), 1.4))
        lengths.append(min(max(drawn, 16), 16384, left))
    return lengths


def document_lengths(mask: str | None, seq: int) -> tuple[int, ...] | None:
    """Lengths of the documents that a mask keeps apart; None for another mask, or none."""
    if mask is None or not mask.startswith(_DOCUMENTS):
        return None
    return tuple(long_tailed_lengths(seq, int(mask.removeprefix(_DOCUMENTS))))


def padded_lengths(batch: int, keys: int) -> list[int]:
    """How many keys each batch entry has under the mask of padding: all of them, down to a little more than half."""
    return [keys - keys * entry // (2 * batch) for entry in range(batch)]


def is_tensor(mask: str) -> bool:
    """Whether a mask is a tensor of booleans, not a block mask."""
    return mask == PADDING or mask.startswith(_RANDOM)


def visible_in_tensor(mask: str, batch: int, queries: int, keys: int) -> int:
    """Pairs that a tensor shows over the batch; of random pairs, how many are expected."""
    if mask == PADDING:
        return queries * sum(padded_lengths(batch, keys))
    return round(batch * queries * keys * float(mask.removeprefix(_RANDOM)))


def mask_tensor(mask: str, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool `[batch, 1, 1, keys]` of padding, `[1, 1, queries, keys]` of random pairs; true is visible.

    Every query sees a key.
    """
    if mask == PADDING:
        lengths = torch.tensor(padded_lengths(batch, keys), device=device)
        return (torch.arange(keys, device=device) < lengths[:, None])[:, None, None]
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.rand(queries, keys, generator=generator, device=device) < float(mask.removeprefix(_RANDOM))
    drawn[:, 0] = True
    return drawn[None, None]


def parse_tiles(mask: str) -> tuple[int, float]:
    """Tile and density of a mask of random tiles."""
    tile, _, density = mask.removeprefix(_TILES).partition(":")
    return int(tile), float(density)


def visible_tiles(tiles: int, density: float) -> int:
    """How many of `tiles · tiles` are visible: those on the diagonal at least."""
    return max(tiles, round(density * tiles**2))


@functools.cache
def tile_layout(seq: int, mask: str) -> Tensor:
    """Which tiles a mask shows: bool `[tiles, tiles]` on the CPU, always the same for a name.

    All on the diagonal, so that every query sees a key and every key is seen, and others at random.
    """
    tile, density = parse_tiles(mask)
    tiles = seq // tile
    aside = [cell for cell in range(tiles**2) if cell % (tiles + 1)]
    drawn = random.Random(0).sample(aside, visible_tiles(tiles, density) - tiles)
    layout = torch.eye(tiles, dtype=torch.bool, device="cpu")
    layout.view(-1)[torch.tensor(drawn, dtype=torch.long, device="cpu")] = True
    return layout


def tile_rows(seq: int, mask: str, rows: range, device: torch.device) -> Tensor:
    """What some queries see of random tiles: bool `[rows, seq]`."""
    tile, _ = parse_tiles(mask)
    by_row = torch.arange(rows.start, rows.stop, device="cpu") // tile
    return tile_layout(seq, mask)[by_row].to(device).repeat_interleave(tile, dim=1)


@functools.lru_cache(maxsize=2)
def block_mask(mask: str, seq: int, causal: bool, device: torch.device) -> BlockMask:
    """The mask as flashtile takes it, `causal` included."""
    lengths = document_lengths(mask, seq)
    if lengths is not None:
        return patterns.documents(lengths=lengths, causal=causal, device=device)
    tile, _ = parse_tiles(mask)
    return BlockMask.from_layout(tile_layout(seq, mask).to(device), (tile, tile), seq, seq)
