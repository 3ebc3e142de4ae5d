"""How the kernels between the matrix products are cut: one table, and the pure functions that read it.

They do little with each element, so what counts is bytes in flight. 16 elements to a thread are two loads of 16 bytes
for each 16-bit tensor; a multiprocessor of an H200 needs about 40 KB under way to reach the bandwidth of its memory.
The numbers follow from that and from registers; none was measured yet.
"""

from __future__ import annotations

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.row_tiles import RowTile

#: 16 elements to a thread. A row of the tile is 1 KB, of 16-bit elements, in one piece.
_ACTIVATE = RowTile(rows=8, block_n=512, num_warps=8)
#: 16 elements to a thread, as many partial sums, and two programs of 128 registers to a multiprocessor.
_BACKWARD = RowTile(rows=16, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)
#: With a gate there is twice as much of each element: 8 to a thread.
_BACKWARD_GATED = RowTile(rows=8, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)

#: The sum of the partial sums: 16 elements to a thread, and as many programs as columns allow.
REDUCE = RowTile(rows=64, block_n=32, num_warps=4)


def activate_config(width: int, device: DeviceFacts) -> RowTile:
    return _ACTIVATE.narrowed(width).on(device)


def backward_config(width: int, gated: bool, bytes_per_column: int, device: DeviceFacts) -> RowTile:
    """The cut of a kernel that sums over rows.

    Args:
        width: columns of the matrix that a tile is cut from.
        gated: there is a gate for each column.
        bytes_per_column: of all that the kernel loads for one element.
        device: facts.
    """
    config = (_BACKWARD_GATED if gated else _BACKWARD).narrowed(width).on(device)
    # Tiles in flight wait in shared memory, those of all programs on a multiprocessor together; beside them warps
    # exchange their sums.
    tile = config.rows * config.block_n
    room = device.shared_memory // config.programs_per_multiprocessor - 4 * tile
    return config._replace(num_stages=max(1, min(config.num_stages, 1 + room // (tile * bytes_per_column))))
