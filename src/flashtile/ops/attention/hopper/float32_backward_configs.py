"""How the Hopper backwards of float32 are cut (`float32_backward`, `float32_wide_backward`). Nothing here needs
Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, SHARED_MEMORY
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

#: Parts of a number. Columns of each in a row of `float32_backward`, whatever head_dim is.
PARTS, WIDTH = 3, 128

#: Queries and keys of up to so many columns take the portable kernels, unless v is wider than `WIDTH`: half of the sums
#: of dk and dq would be empty. Heads have up to `WIDEST` columns.
NARROW, WIDEST = 64, 256

#: Tiles on chip of the visited rows of a step, of q and dout or of k and v. The own rows have as many.
VISITED_TILES = 2 * PARTS

#: Bytes of a tile, and of the place of weights and gradients of scores.
_TILE_BYTES, _EXCHANGE_BYTES = 2 * WIDTH * CONSUMER_ROWS, 4 * CONSUMER_ROWS**2

#: Barriers, and what Triton passes to its partitions.
_OVERHEAD = 1024

#: The same of wide heads: bytes of a tile of `CHUNK` columns, and barriers of up to 28 tiles.
_CHUNK_TILE_BYTES, _WIDE_OVERHEAD = 2 * CHUNK * CONSUMER_ROWS, 2048

#: Own values stay on chip if that leaves so many tiles for what streams.
_STREAMING_TILES = 8


class Float32WideConfig(NamedTuple):
    """How the kernels of `float32_wide_backward` are cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, and of dout and v.
        places: for the tiles that stream in the kernel of dv.
        holds_values: own values of dk and dq stay on chip.
        weight_places, gradient_places: for the tiles that stream to `weigh` and to `differentiate`.
    """

    chunks: int
    value_chunks: int
    places: int
    holds_values: bool
    weight_places: int
    gradient_places: int


def choose_float32_wide_config(head_dim: int, head_dim_v: int) -> Float32WideConfig:
    """The cut of a call: own rows take what they need, and what streams the rest, by how much of it there is."""
    chunks, value_chunks = -(-head_dim // CHUNK), -(-head_dim_v // CHUNK)
    room = (SHARED_MEMORY - _WIDE_OVERHEAD) // _CHUNK_TILE_BYTES
    left = (SHARED_MEMORY - _WIDE_OVERHEAD - _EXCHANGE_BYTES) // _CHUNK_TILE_BYTES - PARTS * chunks
    holds_values = left - PARTS * value_chunks >= _STREAMING_TILES
    if holds_values:
        left -= PARTS * value_chunks
    to_weigh = chunks + (chunks + 1) // 2
    to_differentiate = (1 if holds_values else 2) * value_chunks + chunks // 2
    weight_places = left * to_weigh // (to_weigh + to_differentiate)
    return Float32WideConfig(
        chunks=chunks,
        value_chunks=value_chunks,
        places=room - 2 * PARTS * chunks,
        holds_values=holds_values,
        weight_places=weight_places,
        gradient_places=left - weight_places,
    )


def float32_shared_memory() -> tuple[int, int]:
    """Estimates of the shared memory of a program in bytes: of the kernel of dv, and of that of dk and dq."""
    of_values = 2 * VISITED_TILES * _TILE_BYTES + _OVERHEAD
    return of_values, of_values + _EXCHANGE_BYTES


def float32_wide_shared_memory(config: Float32WideConfig) -> tuple[int, int]:
    """The same of the kernels of wide heads."""
    own = PARTS * config.chunks
    of_scores = own + config.holds_values * PARTS * config.value_chunks + config.weight_places + config.gradient_places
    of_values = (2 * own + config.places) * _CHUNK_TILE_BYTES + _WIDE_OVERHEAD
    return of_values, of_scores * _CHUNK_TILE_BYTES + _EXCHANGE_BYTES + _WIDE_OVERHEAD


def serves_float32(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels of `float32_backward` or `float32_wide_backward` are for a backward."""
    served = NARROW < head_dim <= WIDEST and head_dim_v <= WIDEST
    return dtype is torch.float32 and served


def is_wide_float32(head_dim: int, head_dim_v: int) -> bool:
    """Whether it is those of `float32_wide_backward`."""
    return max(head_dim, head_dim_v) > WIDTH
