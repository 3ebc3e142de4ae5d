"""How the softmax kernels are cut: frozen rows, and the pure function that reads them.

The numbers follow from registers: a program holds whole rows in float32, and a thread should have from 8 to 32 of their
elements, which is one to four loads of 16 bytes of a 16-bit tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts


class RowConfig(NamedTuple):
    """How a kernel is cut: rows and columns of a tile, and warps of a program."""

    rows: int
    block_n: int
    num_warps: int


#: (widest row in columns, its cut). Rows that are shorter than those of the first line share its tile.
_ROWS = (
    (2048, RowConfig(rows=1, block_n=2048, num_warps=4)),  # 16 elements to a thread
    (4096, RowConfig(rows=1, block_n=4096, num_warps=8)),  # the same
    # 32 elements: the exchange of maximum and sum costs less among fewer warps
    (8192, RowConfig(rows=1, block_n=8192, num_warps=8)),
    (16384, RowConfig(rows=1, block_n=16384, num_warps=16)),  # the same; 64 would spill
)
_LOOPED = RowConfig(rows=1, block_n=4096, num_warps=8)


def row_config(width: int, device: DeviceFacts) -> RowConfig:
    config = next((config for widest, config in _ROWS if width <= widest), _LOOPED)
    block_n = max(16, 1 << (width - 1).bit_length())
    if block_n < _ROWS[0][0]:
        config = config._replace(rows=config.block_n // block_n, block_n=block_n)
    return config._replace(num_warps=max(1, config.num_warps * 32 // device.warp_size))
