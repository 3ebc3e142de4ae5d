"""How a kernel that works on rows is cut into tiles, and the cut that fits a width and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts

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
    def compiled(self) -> tuple[int, int, int | None]:
        """The last arguments of `make_plan`: warps, stages and registers."""
        return self.num_warps, self.num_stages, self.max_registers

    def looped(self, width: int) -> bool:
        """Whether a row takes several tiles."""
        return width > self.block_n

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
