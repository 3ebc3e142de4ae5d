"""How the kernels between the matrix products are cut: one table, and the pure functions that read it.

They do little with each element, so what counts is bytes in flight. 16 elements to a thread are two loads of 16 bytes
for each 16-bit tensor; a multiprocessor of an H200 needs about 40 KB under way to reach the bandwidth of its memory.
The numbers follow from that and from registers; none was measured yet.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts


class TileConfig(NamedTuple):
    """How a kernel is cut.

    Attributes:
        rows: rows of a tile.
        block_n: columns of a tile.
        num_warps: warps of a program.
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


#: Registers of a multiprocessor of any NVIDIA GPU since 2018.
_REGISTERS = 65536

#: 16 elements to a thread. A row of the tile is 1 KB, of 16-bit elements, in one piece.
_ACTIVATE = TileConfig(rows=8, block_n=512, num_warps=8)
#: 16 elements to a thread, as many partial sums, and two programs of 128 registers to a multiprocessor.
_BACKWARD = TileConfig(rows=16, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)
#: With a gate there is twice as much of each element: 8 to a thread.
_BACKWARD_GATED = TileConfig(rows=8, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)

#: The sum of the partial sums: 16 elements to a thread, and as many programs as columns allow.
REDUCE = TileConfig(rows=64, block_n=32, num_warps=4)


def activate_config(width: int, device: DeviceFacts) -> TileConfig:
    return _fitted(_ACTIVATE, width, device)


def backward_config(width: int, gated: bool, bytes_per_column: int, device: DeviceFacts) -> TileConfig:
    """The cut of a kernel that sums over rows.

    Args:
        width: columns of the matrix that a tile is cut from.
        gated: there is a gate for each column.
        bytes_per_column: of all that the kernel loads for one element.
        device: facts.
    """
    config = _fitted(_BACKWARD_GATED if gated else _BACKWARD, width, device)
    # Tiles in flight wait in shared memory, those of all programs on a multiprocessor together; beside them warps
    # exchange their sums.
    tile = config.rows * config.block_n
    room = device.shared_memory // config.programs_per_multiprocessor - 4 * tile
    return config._replace(num_stages=max(1, min(config.num_stages, 1 + room // (tile * bytes_per_column))))


def _fitted(config: TileConfig, width: int, device: DeviceFacts) -> TileConfig:
    """The same number of elements in rows of a width; a program has as many threads whatever the size of a warp."""
    block_n = min(config.block_n, max(16, 1 << (width - 1).bit_length()))
    rows = config.rows * config.block_n // block_n
    return config._replace(rows=rows, block_n=block_n, num_warps=config.num_warps * 32 // device.warp_size)
