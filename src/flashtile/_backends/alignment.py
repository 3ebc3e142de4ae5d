"""What a compiler may be told of addresses and strides. No formulas of any operation."""

from __future__ import annotations

import functools


def power_of_two_factor(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all the numbers."""
    bits = functools.reduce(int.__or__, numbers, 16)
    return bits & -bits
