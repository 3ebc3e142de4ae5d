"""How the work for the gradient of a bias is cut into programs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flashtile._backends.launch import int32, int64
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.triton.tile_tables import TileConfig

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

    def numbers(self, shape: tuple[int, ...] | None) -> WorkNumbers:
        """As the kernel takes it. `shape`: of the bias."""
        batch, heads, rows, columns = shape or (None,) * 4
        longest_q, longest_k = self.longest
        return WorkNumbers(
            batch=int32(batch),
            heads=int32(heads),
            rows=int32(rows),
            columns=int32(columns),
            longest_q=int32(longest_q),
            longest_k=int32(longest_k),
            sharing=(int64 if self.many else int32)(self.sharing),
            parts=int32(self.parts),
        )


class WorkNumbers(NamedTuple):
    """The cut of one call in its kernel: the sizes of the bias, and the fields of `BiasWork`. `sharing` is in 64 bits
    where the loop counts past 32."""

    batch: Any
    heads: Any
    rows: Any
    columns: Any
    longest_q: Any
    longest_k: Any
    sharing: Any
    parts: Any


def cut_matrices(shape: tuple[int, ...], matrices: int) -> BiasWork:
    """The cut of a call whose sequences are one tile each. `shape`: of the bias. `matrices`: sequences times heads."""
    own = shape[0] * shape[1]
    sharing = matrices // max(own, 1)
    return BiasWork(own, sharing, max(1, min(sharing, -(-_FILLING // max(own, 1)))))


def cut_work(bias: TensorFacts, call: Call, tiles: TileConfig) -> BiasWork:
    """The cut of a call with tiles of scores."""
    longest = call.rows_q, call.rows_k
    if call.packed:
        longest_q, longest_k = (size if size != 1 else rows for size, rows in zip(bias.shape[2:], longest))
        longest = longest_q, longest_k
    blocks = -(-longest[0] // tiles.block_m), -(-longest[1] // tiles.block_n)
    own_blocks = (1 if size == 1 else count for size, count in zip(bias.shape[2:], blocks))
    own = bias.shape[0] * bias.shape[1] * math.prod(own_blocks)
    sharing = call.batch * call.heads * math.prod(blocks) // max(own, 1)
    return BiasWork(own, sharing, max(1, min(sharing, -(-_FILLING // max(own, 1)))), longest)
