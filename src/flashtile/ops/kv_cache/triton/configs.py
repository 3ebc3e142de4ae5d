"""How the kernel that appends to a cache is cut."""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.devices import DeviceFacts
from flashtile.ops.common.tiles import power_of_two

#: Elements of a row that a program moves at a time.
_APPENDED = 4096


class AppendCut(NamedTuple):
    """How the appending kernel is cut: heads, pairs of a head, columns past the pairs, columns of a value; warps."""

    block_h: int
    block_half: int
    block_rest: int
    block_e: int
    num_warps: int


def append_cut(heads: int, head_dim: int, head_dim_v: int, half: int, device: DeviceFacts) -> AppendCut:
    """`heads`: the most that a row of q or k has."""
    block_half, block_rest = power_of_two(half), power_of_two(head_dim - 2 * half)
    block_e = power_of_two(head_dim_v)
    widest = max(block_half, block_rest, block_e)
    block_h = max(1, min(power_of_two(heads), _APPENDED // widest))
    return AppendCut(block_h, block_half, block_rest, block_e, 256 // device.warp_size)
