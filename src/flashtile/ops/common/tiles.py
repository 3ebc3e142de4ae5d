"""Sizes of tiles, and how kernels that work on rows are cut."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from flashtile._backends.devices import DeviceFacts


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: the next power of two, at least the 16 of a tensor core."""
    return max(16, power_of_two(head_dim))


def box_rows(page_size: int, most: int) -> int:
    """Rows of a page that one TMA copy moves: the largest power of two that divides the page, at most `most`, which is
    one too. Without pages (0) it is `most`."""
    return math.gcd(page_size, most)


#: Registers of a multiprocessor of any NVIDIA GPU since 2018.
_REGISTERS = 65536


class RowTile(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: rows of a tile.
        block_n: columns of a tile.
        num_warps: warps of 32 threads per program.
        num_stages: tiles in flight from device memory, with the one that is worked on.
        programs_per_multiprocessor: of a kernel whose programs stay; 0 = one program for each tile.
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    programs_per_multiprocessor: int = 0

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread, such that all programs of a multiprocessor are there at once; None where free."""
        threads = self.programs_per_multiprocessor * self.num_warps * 32
        return _REGISTERS // threads if threads else None

    @property
    def compiled(self) -> dict[str, Any]:
        """Warps, stages and registers, as a `Kernel` takes them by name."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "max_registers": self.max_registers}

    def looped(self, width: int) -> bool:
        """Whether a row takes several tiles."""
        return width > self.block_n

    def staged(self, device: DeviceFacts, in_flight: int, beside: int) -> RowTile:
        """As many stages as fit. Tiles in flight, each of so many bytes, wait in shared memory, those of all programs
        on a multiprocessor together, `beside` other bytes of each program."""
        room = device.shared_memory // self.programs_per_multiprocessor - beside
        return self._replace(num_stages=max(1, min(self.num_stages, 1 + room // in_flight)))

    def narrowed(self, width: int) -> RowTile:
        """As many elements in tiles that are no wider than rows of `width` need."""
        block_n = min(self.block_n, max(16, 1 << (width - 1).bit_length()))
        return self._replace(rows=self.rows * self.block_n // block_n, block_n=block_n)

    def on(self, device: DeviceFacts) -> RowTile:
        """The same number of threads, whatever the size of a warp."""
        return self._replace(num_warps=max(1, self.num_warps * 32 // device.warp_size))


def row_tile(table: Sequence[tuple[int, RowTile]], width: int, device: DeviceFacts) -> RowTile:
    """The cut of rows of a width, from a table of (widest row, its cut). Rows that are shorter than those of the first
    line share its tile."""
    tile = next(tile for widest, tile in table if width <= widest)
    return (tile.narrowed(width) if width <= table[0][0] else tile).on(device)


#: (widest row in columns, its cut) of kernels that hold whole rows in float32, and longer ones in a loop. A thread
#: should have from 8 to 32 elements, which is one to four loads of 16 bytes of a 16-bit tensor. Fewer leave too little
#: in flight, more spill.
_HELD_ROWS = (
    (2048, RowTile(rows=1, block_n=2048, num_warps=4)),  # 16 elements to a thread, 16 programs to a multiprocessor
    (4096, RowTile(rows=1, block_n=4096, num_warps=8)),  # the same
    # 32 elements: the exchange of maximum and sum, or of two sums, costs less among fewer warps
    (8192, RowTile(rows=1, block_n=8192, num_warps=8)),
    (16384, RowTile(rows=1, block_n=16384, num_warps=16)),  # the same; 64 would spill
    (sys.maxsize, RowTile(rows=1, block_n=4096, num_warps=8)),  # looped
)

#: The sum of the partial sums of columns: 16 elements to a thread, and as many programs as columns allow.
REDUCE = RowTile(rows=64, block_n=32, num_warps=4)


def held_row_tile(width: int, device: DeviceFacts) -> RowTile:
    """The cut of a kernel that holds whole rows."""
    return row_tile(_HELD_ROWS, width, device)
