"""Facts that a compiler may be told of addresses and strides. No formulas of any operation."""

from __future__ import annotations

import functools

from torch import Tensor


def power_of_two_factor(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all the numbers."""
    bits = functools.reduce(int.__or__, numbers, 16)
    return bits & -bits


def misalignment(*tensors: Tensor | None) -> int:
    """Addresses modulo 16, put together: 0 where all are multiples of 16."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses & 15


def used_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, but 0 in the place of those of dimensions of one that 16 does not divide: they lead nowhere, and
    PyTorch lets them be any number, also of a contiguous tensor."""
    return tuple(0 if size == 1 and stride % 16 else stride for size, stride in zip(shape, strides))


def batch_row_head(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The used strides of the first dimensions of `[batch, rows, heads, head_dim]`; 0 for the batch of `[rows, heads,
    head_dim]`."""
    return (0, *used_strides(shape, strides))[-4:-1]


def aligned(*tensors: Tensor) -> bool:
    """Whether TMA can read 16-bit or 8-bit tensors `[..., rows, heads, head_dim]`: addresses and strides are multiples
    of 16 bytes, but those of dimensions of one."""
    bits = 0
    for tensor in tensors:
        strides = tensor.stride()
        bits |= tensor.data_ptr() | tensor.itemsize * (strides[0] | strides[1] | strides[-2])
    return bits % 16 == 0 or all(map(_aligned_where_used, tensors))


def _aligned_where_used(tensor: Tensor) -> bool:
    bits = tensor.data_ptr()
    for stride in used_strides(tensor.shape[:-1], tensor.stride()):
        bits |= tensor.itemsize * stride
    return bits % 16 == 0
