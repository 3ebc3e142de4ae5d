"""How the cross-entropy kernels are cut: frozen rows, and the pure function that reads them.

The numbers follow from bytes in flight: a thread has four loads of 16 bytes in a tile of the widest kind, and programs
of four warps are so small that many are on a multiprocessor at once, where one's loads cover another's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts

_TILE_BYTES, _WARP_BYTES = 8192, 2048

#: Columns of a tile, and warps, of the sum over all rows, and of the multiplication of a gradient.
REDUCE = (4096, 8)
MULTIPLY = (4096, 4)


class TileConfig(NamedTuple):
    """How a kernel is cut.

    Attributes:
        block_n: columns of a tile.
        vector: columns that one thread loads at once.
        num_warps: warps of a program.
    """

    block_n: int
    vector: int
    num_warps: int


def tile_config(width: int, itemsize: int, vector: int, device: DeviceFacts) -> TileConfig:
    """The cut for rows of a width.

    Args:
        width: columns of a row.
        itemsize: bytes of an element.
        vector: columns that can be read and written at once, a power of two of at most 16 bytes.
        device: facts.
    """
    reach = 1 << (width + vector - 2).bit_length()
    block_n = max(32 * vector, min(reach, _TILE_BYTES // itemsize))
    num_warps = max(1, block_n * itemsize // _WARP_BYTES)
    return TileConfig(block_n, vector, max(1, num_warps * 32 // device.warp_size))
