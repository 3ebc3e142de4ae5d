"""How the norm kernels are cut: frozen rows, and the pure functions that read them.

Nothing is tuned on a user's machine. The numbers follow from registers: a program holds whole rows in float32, and a
thread should have from 8 to 32 of their elements, which is one to four loads of 16 bytes of a 16-bit tensor. Fewer
leave too little in flight, more spill.
"""

from __future__ import annotations

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.row_tiles import RowTile, row_tile

#: (widest row in columns, its cut). Rows that are shorter than those of the first line share its tile.
_FORWARD = (
    (2048, RowTile(rows=1, block_n=2048, num_warps=4)),  # 16 elements to a thread, 16 programs to a multiprocessor
    (4096, RowTile(rows=1, block_n=4096, num_warps=8)),  # the same
    # 32 elements: the exchange of the two sums costs less among fewer warps
    (8192, RowTile(rows=1, block_n=8192, num_warps=8)),
    (16384, RowTile(rows=1, block_n=16384, num_warps=16)),  # the same; 64 would spill
    (65536, RowTile(rows=1, block_n=4096, num_warps=8)),  # looped
)

#: The same with sums over rows: each takes as many registers as the tile itself, and the tile is in them several
#: times. 16 elements to a thread take 128 registers, and programs of 16 warps together fill the register file.
_BACKWARD = (
    (2048, RowTile(rows=1, block_n=2048, num_warps=4, num_stages=3, programs_per_multiprocessor=4)),
    (4096, RowTile(rows=1, block_n=4096, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
    (8192, RowTile(rows=1, block_n=8192, num_warps=16, num_stages=3, programs_per_multiprocessor=1)),
    # looped; four rows share the traffic of the partial sums
    (65536, RowTile(rows=4, block_n=1024, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
)

#: Much in registers (more than two sums, dropout, or a float32 stream with a gradient from above): half as many.
#: In a loop a warp has 256 columns of all rows of the tile, so that their sums need no exchange between warps.
_BACKWARD_HEAVY = (
    (1024, RowTile(rows=1, block_n=1024, num_warps=4, num_stages=3, programs_per_multiprocessor=4)),
    (2048, RowTile(rows=1, block_n=2048, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
    (4096, RowTile(rows=1, block_n=4096, num_warps=16, num_stages=3, programs_per_multiprocessor=1)),
    (65536, RowTile(rows=2, block_n=2048, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
)

#: With up to three sums longer rows are better held too: they spill a little, but are read and met at barriers once.
_HEAVY_WHOLE = RowTile(rows=1, block_n=8192, num_warps=16, num_stages=3, programs_per_multiprocessor=1)

#: The sum of the partial sums: 16 elements to a thread, and as many programs as columns allow.
REDUCE = RowTile(rows=64, block_n=32, num_warps=4)


def forward_config(width: int, device: DeviceFacts) -> RowTile:
    return row_tile(_FORWARD, width, device)


def backward_config(width: int, sums: int, bytes_per_column: int, dropout: bool, device: DeviceFacts) -> RowTile:
    """The cut of the backward kernel.

    Args:
        width: columns of a row.
        sums: how many sums over rows the kernel keeps.
        bytes_per_column: of all that it loads for one element.
        dropout: whether it makes dropout bits.
        device: facts.
    """
    table: tuple[tuple[int, RowTile], ...] = (
        _BACKWARD_HEAVY if sums > 2 or bytes_per_column > 8 or dropout else _BACKWARD
    )
    if table is _BACKWARD_HEAVY and sums <= 3:
        table = (*table[:-1], (8192, _HEAVY_WHOLE), table[-1])
    config = row_tile(table, width, device)
    # Tiles in flight wait in shared memory, those of all programs on a multiprocessor together, in a loop with partial
    # sums and parameters of their columns. Beside them warps exchange sums of rows and what lies in other threads.
    tile, looped = config.rows * config.block_n, config.looped(width)
    in_flight = tile * bytes_per_column + (4 * config.block_n * (sums + (sums + 1) // 2) if looped else 0)
    room = device.shared_memory // config.programs_per_multiprocessor - (4 * tile if looped else 4096)
    return config._replace(num_stages=max(1, min(config.num_stages, 1 + room // in_flight)))
