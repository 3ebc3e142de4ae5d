"""How the Hopper backwards of float32 are cut (`float32_backward`, `float32_wide_backward`). Nothing here needs
Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS, MAX_HEAD_DIM, SHARED_MEMORY
from flashtile.ops.attention.hopper.float32_configs import (
    EXCHANGE_BYTES,
    OVERHEAD,
    PARTS,
    STREAM_PLACES,
    TILE_BYTES,
    cut_shared_rows,
    memory_of_shared_rows,
)
from flashtile.ops.attention.hopper.wide_backward_configs import CHUNK

#: Columns of each part in a row of `float32_backward`, whatever head_dim is.
WIDTH = 128

#: Queries and keys of up to so many columns take the portable kernels, unless v is wider than `WIDTH`: half of the sums
#: of dk and dq would be empty.
NARROW = 64

#: Tiles on chip of the visited rows of a step, of q and dout or of k and v. The own rows have as many.
VISITED_TILES = 2 * PARTS

#: Bytes of a tile of `WIDTH` columns.
_WIDTH_BYTES = 2 * WIDTH * CONSUMER_ROWS

#: All own chunks of dk and dq stay on chip if that leaves so many places for what streams. Else so many chunks stay.
_PLACES_BESIDE_ALL, _STAYING = 8, 4


class Float32WideConfig(NamedTuple):
    """How the kernels of `float32_wide_backward` are cut.

    Attributes:
        chunks, value_chunks: of a row of q and k, and of dout and v.
        staying, places: chunks of keys of each warpgroup of dv that stay on chip, and places for the tiles that stream
            to each.
        staying_scores, staying_values: own chunks of dk and dq that stay on chip, of scores and of values. The others
            are loaded again for each tile of visited rows.
        weight_places, gradient_places: for the tiles that stream to `weigh` and to `differentiate`.
    """

    chunks: int
    value_chunks: int
    staying: int
    places: int
    staying_scores: int
    staying_values: int
    weight_places: int
    gradient_places: int


def choose_float32_wide_config(head_dim: int, head_dim_v: int) -> Float32WideConfig:
    """The cut of a call. Two streams have places by how many tiles of a step come through them."""
    chunks, value_chunks = -(-head_dim // CHUNK), -(-head_dim_v // CHUNK)
    staying, places = cut_shared_rows(chunks)
    room = (SHARED_MEMORY - OVERHEAD - EXCHANGE_BYTES) // TILE_BYTES
    staying_scores, staying_values = chunks, value_chunks
    all_stay = room - PARTS * (chunks + value_chunks) >= _PLACES_BESIDE_ALL
    if not all_stay:
        staying_scores = min(chunks, max(_STAYING // 2, _STAYING - value_chunks))
        staying_values = min(value_chunks, _STAYING - staying_scores)
    left = room - PARTS * (staying_scores + staying_values)
    to_weigh = 2 * chunks - staying_scores + (chunks + 1) // 2
    to_differentiate = 2 * value_chunks - staying_values + chunks // 2
    share = left * to_weigh // (to_weigh + to_differentiate)
    least = PARTS if all_stay else STREAM_PLACES
    weight_places = min(max(share, least), left - least)
    return Float32WideConfig(
        chunks=chunks,
        value_chunks=value_chunks,
        staying=staying,
        places=places,
        staying_scores=staying_scores,
        staying_values=staying_values,
        weight_places=weight_places,
        gradient_places=left - weight_places,
    )


def float32_shared_memory() -> tuple[int, int]:
    """Estimates of the shared memory of a program in bytes: of the kernel of dv, and of that of dk and dq."""
    of_values = 2 * VISITED_TILES * _WIDTH_BYTES + OVERHEAD
    return of_values, of_values + EXCHANGE_BYTES


def float32_wide_shared_memory(config: Float32WideConfig) -> tuple[int, int]:
    """The same of the kernels of wide heads."""
    staying = config.staying_scores + config.staying_values
    tiles = PARTS * staying + config.weight_places + config.gradient_places
    of_values = memory_of_shared_rows(config.chunks, config.staying, config.places)
    return of_values, tiles * TILE_BYTES + EXCHANGE_BYTES + OVERHEAD


def serves_float32(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernels of `float32_backward` or `float32_wide_backward` are for a backward."""
    served = NARROW < head_dim <= MAX_HEAD_DIM and head_dim_v <= MAX_HEAD_DIM
    return dtype is torch.float32 and served


def is_wide_float32(head_dim: int, head_dim_v: int) -> bool:
    """Whether it is those of `float32_wide_backward`."""
    return max(head_dim, head_dim_v) > WIDTH


def float32_keys_of_dv(head_dim: int, head_dim_v: int) -> int:
    """Keys of a program of dv: each of two warpgroups has 64, or both share them."""
    return CONSUMER_ROWS if is_wide_float32(head_dim, head_dim_v) else 2 * CONSUMER_ROWS
