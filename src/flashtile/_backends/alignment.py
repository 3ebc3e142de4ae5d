"""What a compiler may be told of addresses and strides. No formulas of any operation."""

from __future__ import annotations

import functools


def power_of_two_factor(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all the numbers."""
    bits = functools.reduce(int.__or__, numbers, 16)
    return bits & -bits


def used_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, but 0 in the place of those of dimensions of one that 16 does not divide: they lead nowhere, and
    PyTorch lets them be any number, also of a contiguous tensor."""
    return tuple(0 if size == 1 and stride % 16 else stride for size, stride in zip(shape, strides))
