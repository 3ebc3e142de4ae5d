"""How the work for the gradient of a bias is cut into programs."""

from __future__ import annotations

import math
from typing import NamedTuple

from flashtile.ops.attention.plans import Table
from flashtile.ops.attention.triton.configs import TileConfig

#: Programs that fill any GPU.
_FILLING = 512


class BiasWork(NamedTuple):
    """The cut of one call.

    Attributes:
        own: tiles of the bias itself: of a direction in which it broadcasts, one.
        sharing: tiles of scores that share one of them.
        parts: programs that share these, so that even a small bias fills a GPU.
        longest: how many queries and keys a sequence has at most, as far as a bias tells.
    """

    own: int = 1
    sharing: int = 1
    parts: int = 1
    longest: tuple[int, int] = (0, 0)

    @property
    def many(self) -> bool:
        """Whether the kernel's loop, of two steps for each of those that share, counts past 32 bits."""
        return self.sharing >= 2**30

    def scalars(self, bias: Table) -> dict[str, int]:
        names = ("sums_batch", "sums_heads", "sums_rows", "sums_columns")
        longest = dict(zip(("longest_q", "longest_k"), self.longest))
        return {**dict(zip(names, bias.shape)), **longest, "sharing": self.sharing, "parts": self.parts}


def cut_work(bias: Table, shapes: tuple[tuple[int, ...], ...], batch: int, tiles: TileConfig) -> BiasWork:
    """`shapes` of q, k and v."""
    longest = shapes[0][-3], shapes[1][-3]
    if len(shapes[0]) == 3:
        longest_q, longest_k = (size if size != 1 else rows for size, rows in zip(bias.shape[2:], longest))
        longest = longest_q, longest_k
    blocks = -(-longest[0] // tiles.block_m), -(-longest[1] // tiles.block_n)
    own_blocks = (1 if size == 1 else count for size, count in zip(bias.shape[2:], blocks))
    own = bias.shape[0] * bias.shape[1] * math.prod(own_blocks)
    sharing = batch * shapes[0][-2] * math.prod(blocks) // max(own, 1)
    return BiasWork(own, sharing, max(1, min(sharing, -(-_FILLING // max(own, 1)))), longest)
