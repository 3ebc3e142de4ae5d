"""How the softmax kernels are cut: frozen rows, and the pure function that reads them.

The numbers follow from registers: a program holds whole rows in float32, and a thread should have from 8 to 32 of their
elements, which is one to four loads of 16 bytes of a 16-bit tensor.
"""

from __future__ import annotations

import sys

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.row_tiles import RowTile, row_tile

#: (widest row in columns, its cut). Rows that are shorter than those of the first line share its tile.
_ROWS = (
    (2048, RowTile(rows=1, block_n=2048, num_warps=4)),  # 16 elements to a thread
    (4096, RowTile(rows=1, block_n=4096, num_warps=8)),  # the same
    # 32 elements: the exchange of maximum and sum costs less among fewer warps
    (8192, RowTile(rows=1, block_n=8192, num_warps=8)),
    (16384, RowTile(rows=1, block_n=16384, num_warps=16)),  # the same; 64 would spill
    (sys.maxsize, RowTile(rows=1, block_n=4096, num_warps=8)),  # looped
)


def row_config(width: int, device: DeviceFacts) -> RowTile:
    return row_tile(_ROWS, width, device)
