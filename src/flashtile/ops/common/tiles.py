"""Sizes of tiles."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def tile_width(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: the next power of two, at least the 16 of a tensor core."""
    return max(16, power_of_two(head_dim))
