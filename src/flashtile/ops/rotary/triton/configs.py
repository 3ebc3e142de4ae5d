"""How the rotary kernel is cut: a pure function of the heads.

A thread of the four warps of a program has a load of 16 bytes of either half of a head in flight: 8 pairs of a 16-bit
tensor. (H200, 16,384 rows of 32 heads of 128, forward: 65.0 µs; twice as many pairs 67.1.) Heads share
the angles of their row, so heads come first: a program of one row keeps its angles in registers for all of them. Rows
come together where there are too few heads.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.tiles import power_of_two

#: Pairs of a tile: 8 for each of 128 threads.
_PAIRS = 1024


class RotaryConfig(NamedTuple):
    """How the kernel is cut.

    Attributes:
        block_s: rows of a tile.
        block_h: heads of a tile.
        block_half: pairs of a tile.
        block_rest: elements past the pairs.
        num_warps: warps per program.
    """

    block_s: int
    block_h: int
    block_half: int
    block_rest: int
    num_warps: int


def rotary_config(heads: int, head_dim: int, half: int, device: DeviceFacts) -> RotaryConfig:
    block_half = power_of_two(half)
    block_h = max(1, min(power_of_two(heads), _PAIRS // block_half))
    block_s = max(1, _PAIRS // (block_half * block_h))
    return RotaryConfig(block_s, block_h, block_half, power_of_two(head_dim - 2 * half), 128 // device.warp_size)
