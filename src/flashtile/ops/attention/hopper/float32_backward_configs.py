"""How the Hopper backward of float32 is cut (`float32_backward`). Nothing here needs Triton."""

from __future__ import annotations

import torch

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS

#: Parts of a number, and columns of each in a row, whatever head_dim is.
PARTS, WIDTH = 3, 128

#: Queries and keys of up to so many columns take the portable kernels: half of the sums of dk and dq would be empty.
NARROW = 64

#: Tiles on chip of the visited rows of a step, of q and dout or of k and v. The own rows have as many.
VISITED_TILES = 2 * PARTS

#: Bytes of a tile, and of the place of weights and gradients of scores.
_TILE_BYTES, _EXCHANGE_BYTES = 2 * WIDTH * CONSUMER_ROWS, 4 * CONSUMER_ROWS**2

#: Barriers, and what Triton passes to its partitions.
_OVERHEAD = 1024


def float32_shared_memory() -> tuple[int, int]:
    """Estimates of the shared memory of a program in bytes: of the kernel of dv, and of that of dk and dq."""
    of_values = 2 * VISITED_TILES * _TILE_BYTES + _OVERHEAD
    return of_values, of_values + _EXCHANGE_BYTES


def serves_float32(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels of `float32_backward` are for a backward."""
    return dtype is torch.float32 and NARROW < head_dim <= WIDTH and head_dim_v <= WIDTH
