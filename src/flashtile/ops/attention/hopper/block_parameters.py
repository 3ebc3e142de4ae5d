"""The kernels' parameters that a block mask needs: what the launches of forward and backward pass alike."""

from __future__ import annotations

from torch import Tensor

from flashtile.ops.attention.plans import BlockPlaces
from flashtile.ops.attention.spec import SideInputs

#: Powers of two that divide parameters: the bits of patterns lie at multiples of 16 bytes.
BLOCK_MULTIPLES = {"block_lists_ptr": 16, "block_bits": 4}


def block_lists(side: SideInputs) -> Tensor | None:
    """The lists of the block mask, at a multiple of 16 bytes: a copy of those that are not."""
    lists = side.block_lists
    return lists if lists is None or lists.data_ptr() % 16 == 0 else lists.clone()


def block_parameter_types(listed: bool) -> dict[str, str]:
    """Types of the run-time parameters; "constexpr" where there is no block mask."""
    types = {"block_lists_ptr": "*i32"} | dict.fromkeys(BlockPlaces._fields, "i32")
    return types if listed else dict.fromkeys(types, "constexpr")


def block_constants(block_tile: tuple[int, int] | None) -> dict[str, int]:
    """TILE_Q and TILE_K of the kernels; 0 without a block mask."""
    return dict(zip(("TILE_Q", "TILE_K"), block_tile or (0, 0)))


def whole_tiles(rows: int, tile: int | None) -> int:
    """So many rows, up to the end of the last tile of the block mask; `tile` is None without one."""
    return rows if tile is None else -(-rows // tile) * tile
