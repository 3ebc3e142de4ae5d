"""Tile sizes of the attention kernels: frozen tables per architecture, and the pure function that reads them.

Nothing is tuned on a user's machine. Rows of the Hopper table were measured (`tools/tune_attention.py`, H200, bf16,
16,384 tokens of 4,096 each, heads · head_dim = 2048); the reason stands beside each. Rows of the others follow from
registers and shared memory. A row that does not fit a device's shared memory is shrunk until it does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from flashtile._backends.devices import DeviceFacts

Kernel = Literal["forward", "dq", "dkdv"]

#: Sequences from this length on fill a device with large tiles too.
LONG = 2048


class TileConfig(NamedTuple):
    """How a kernel is cut.

    Attributes:
        block_m: query rows of a tile.
        block_n: key columns of a tile.
        num_warps: warps per program.
        num_stages: tiles in flight from device memory.
        chunk: columns of the head that are multiplied at a time; 0 = all of them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 0


class Situation(NamedTuple):
    """What the choice of tiles looks at, beside the kernel and the device.

    Attributes:
        dtype: of q, k and v.
        head_dim: of q and k.
        head_dim_v: of v.
        banded: a causal mask or a window: small tiles waste less at its edges.
        long: at least `LONG` queries and keys.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    banded: bool
    long: bool


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: the next power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (head_dim - 1).bit_length())


def choose_tiles(kernel: Kernel, device: DeviceFacts, situation: Situation) -> TileConfig:
    """The tiles of a kernel on a device: the first row of its table that holds the head, shrunk to fit."""
    width = max(tile_width(situation.head_dim), tile_width(situation.head_dim_v))
    if situation.dtype is torch.float32:
        table = _FLOAT32
    elif device.arch == "sm_90":
        table = _HOPPER_BANDED if situation.banded else _HOPPER if situation.long else _HOPPER_SHORT
    elif device.is_cuda:
        table = _TENSOR_CORES
    else:
        table = _AMD
    preferred = next(tiles for widest, tiles in table[kernel] if width <= widest)
    return _fit(kernel, preferred, situation, device.shared_memory)


def shared_memory(kernel: Kernel, tiles: TileConfig, situation: Situation) -> int:
    """Estimate of the shared memory of a program, in bytes; tests compile every row and hold it to the limit."""
    width, width_v = tile_width(situation.head_dim), tile_width(situation.head_dim_v)
    moving, resident = (tiles.block_m, tiles.block_n) if kernel == "dkdv" else (tiles.block_n, tiles.block_m)
    if tiles.chunk:
        elements = tiles.chunk * (moving + resident) + moving * max(width, width_v)
    else:
        resident_width = width if kernel == "forward" else width + width_v
        elements = resident * resident_width + moving * (width + width_v) * tiles.num_stages
    # Beside the tiles: scores that change their layout on the way to the next product, and reductions.
    exchange = max(moving * resident * situation.dtype.itemsize, 2048)
    return situation.dtype.itemsize * elements + exchange


def _fit(kernel: Kernel, tiles: TileConfig, situation: Situation, limit: int) -> TileConfig:
    """Fewer stages first, then narrower tiles on the side that moves, then on the side that stays, then chunks."""
    while shared_memory(kernel, tiles, situation) > limit and not tiles.chunk:
        moving, resident = (tiles.block_m, tiles.block_n) if kernel == "dkdv" else (tiles.block_n, tiles.block_m)
        stages, chunk = tiles.num_stages, 0
        if stages > 2 or (stages > 1 and moving <= 32):
            stages -= 1
        elif moving > 16:
            moving //= 2
        elif resident > 16:
            resident //= 2
        else:
            chunk = 32
        block_m, block_n = (moving, resident) if kernel == "dkdv" else (resident, moving)
        tiles = TileConfig(block_m, block_n, tiles.num_warps, stages, chunk)
    return tiles


_Table = dict[str, tuple[tuple[int, TileConfig], ...]]

#: sm_90, a mask: small tiles, several programs per multiprocessor so that one multiplies while another exponentiates.
_HOPPER_BANDED: _Table = {
    "forward": (
        (64, TileConfig(64, 64, 4, 3)),  # 0.66 ms causal; 128 rows 0.74
        (128, TileConfig(64, 64, 4, 3)),  # 0.62; 128 × 128 on 8 warps 0.67, 256 × 64 on 16 0.71
        (256, TileConfig(128, 64, 8, 2)),  # 0.60; 32 keys 0.72
        (512, TileConfig(64, 32, 8, 1, 64)),
    ),
    "dq": (
        (64, TileConfig(128, 64, 8, 3)),  # 0.75; 64 rows on 4 warps 0.77
        (128, TileConfig(128, 64, 8, 3)),  # 0.84; 128 × 32 on 4 warps 0.87
        (256, TileConfig(128, 32, 8, 3)),  # 0.91; 64 keys in one stage 1.06
        (512, TileConfig(64, 16, 8, 1, 64)),
    ),
    "dkdv": (
        (64, TileConfig(64, 64, 4, 3)),  # 1.14; 128 keys × 32 queries 1.20
        (128, TileConfig(32, 64, 4, 3)),  # 1.04; 128 keys × 64 queries on 8 warps 1.10
        (256, TileConfig(64, 64, 8, 2)),  # 2.11; 32 queries 2.48
        (512, TileConfig(32, 32, 8, 1, 64)),
    ),
}

#: sm_90, no mask, short sequences: as with a mask, but for dk/dv of 128 columns.
_HOPPER_SHORT: _Table = {
    "forward": _HOPPER_BANDED["forward"],
    "dq": _HOPPER_BANDED["dq"],
    "dkdv": (
        (64, TileConfig(64, 64, 4, 3)),  # 2.12 ms full; 128 keys × 32 queries 2.20
        (128, TileConfig(64, 128, 8, 3)),  # 1.92; 64 keys × 32 queries on 4 warps 1.95
        *_HOPPER_BANDED["dkdv"][2:],
    ),
}

#: sm_90, no mask, long sequences.
_HOPPER: _Table = {
    "forward": (
        (64, TileConfig(128, 64, 4, 3)),  # 1.29 ms full; 64 rows 1.37
        (128, TileConfig(256, 64, 16, 3)),  # 1.14; 64 rows on 4 warps 1.17, 128 × 128 on 8 1.17
        *_HOPPER_BANDED["forward"][2:],
    ),
    "dq": _HOPPER_BANDED["dq"],
    "dkdv": _HOPPER_SHORT["dkdv"],
}

#: Other NVIDIA architectures, 16-bit.
_TENSOR_CORES: _Table = {
    "forward": (
        (64, TileConfig(128, 64, 4, 3)),
        (128, TileConfig(128, 64, 8, 3)),
        (256, TileConfig(64, 32, 4, 2)),
        (512, TileConfig(32, 32, 8, 1, 64)),
    ),
    "dq": (
        (64, TileConfig(64, 64, 4, 3)),
        (128, TileConfig(64, 64, 8, 2)),
        (256, TileConfig(64, 32, 8, 2)),
        (512, TileConfig(32, 16, 8, 1, 64)),
    ),
    "dkdv": (
        (64, TileConfig(64, 64, 4, 3)),
        (128, TileConfig(64, 64, 8, 2)),
        (256, TileConfig(32, 32, 8, 1)),
        (512, TileConfig(16, 16, 8, 1, 64)),
    ),
}

#: AMD CDNA and RDNA, 16-bit. Loads go through registers there, so more stages cost registers, not shared memory.
_AMD: _Table = {
    "forward": (
        (64, TileConfig(128, 64, 4, 2)),
        (128, TileConfig(128, 32, 4, 2)),
        (256, TileConfig(64, 32, 4, 1)),
        (512, TileConfig(32, 16, 4, 1, 64)),
    ),
    "dq": (
        (64, TileConfig(64, 64, 4, 2)),
        (128, TileConfig(64, 32, 4, 1)),
        (256, TileConfig(32, 32, 4, 1)),
        (512, TileConfig(16, 16, 4, 1, 64)),
    ),
    "dkdv": (
        (64, TileConfig(64, 64, 4, 2)),
        (128, TileConfig(32, 64, 4, 1)),
        (256, TileConfig(32, 32, 4, 1)),
        (512, TileConfig(16, 16, 4, 1, 64)),
    ),
}

#: float32 everywhere: IEEE products run on the ordinary units, out of registers.
_FLOAT32: _Table = {
    "forward": (
        (64, TileConfig(64, 32, 4, 2)),
        (128, TileConfig(64, 32, 8, 2)),
        (256, TileConfig(32, 16, 8, 2)),
        (512, TileConfig(16, 16, 8, 1, 64)),
    ),
    "dq": (
        (64, TileConfig(64, 32, 8, 2)),
        (128, TileConfig(32, 32, 8, 2)),
        (256, TileConfig(32, 16, 8, 1)),
        (512, TileConfig(16, 16, 8, 1, 64)),
    ),
    "dkdv": (
        (64, TileConfig(32, 64, 8, 2)),
        (128, TileConfig(32, 32, 8, 2)),
        (256, TileConfig(16, 32, 8, 1)),
        (512, TileConfig(16, 16, 8, 1, 64)),
    ),
}
