"""Whether tensors that are written in place have an address of its own for each element."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

#: By a stride, how far a dimension leads at least and at most.
_Step = tuple[int, int, int]


def check_writable(name: str, tensor: Tensor, remedy: str) -> None:
    """Checks a tensor that kernels write: it holds its own numbers, each at an address of its own. Nothing is checked
    under torch.compile, which has neither addresses nor lazy negation."""
    if torch.compiler.is_compiling():
        return
    check_own_numbers(name, tensor, remedy)
    if overlaps_itself(tensor):
        raise ValueError(
            f"{name}: expected memory of its own for each element, because it is written in place, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}, where elements share memory; {remedy}, or make it "
            "with .contiguous()"
        )


def check_own_numbers(name: str, tensor: Tensor, remedy: str) -> None:
    """Checks that PyTorch does not negate a tensor when it is read. An operator would be given a copy of such a one."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(
            f"{name}: expected a tensor that holds its own numbers, because it is written in place, got one that "
            f"PyTorch negates when it is read, such as z.conj().imag; {remedy}, or call resolve_neg() first"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor have one address."""
    return not tensor.is_contiguous() and _overlaps_itself(tuple(tensor.shape), tensor.stride())


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether an element of each, of one dtype, have the same address. Under torch.compile there are none."""
    if torch.compiler.is_compiling():
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    if one.is_contiguous() and other.is_contiguous():
        return start < other_start + other.nbytes and other_start < start + one.nbytes
    distance, rest = divmod(other_start - start, one.element_size())
    return not rest and _meet(distance, tuple(one.shape), tuple(other.shape), one.stride(), other.stride())


@functools.lru_cache(maxsize=1024)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    steps = sorted((stride, 1 - size, size - 1) for size, stride in zip(shape, strides) if size > 1)
    # Two elements lie apart by some of the largest stride by which they differ, and by less in smaller ones.
    return any(
        _is_sum(-number * stride, steps[:place])
        for place, (stride, _, most) in enumerate(steps)
        for number in range(1, min(most, _reach(steps[:place]) // max(stride, 1)) + 1)
    )


def _reach(steps: Sequence[_Step]) -> int:
    """How far steps lead together; at least 1, so that a stride of 0 is tried."""
    return max(1, sum(stride * most for stride, _, most in steps))


@functools.lru_cache(maxsize=1024)
def _meet(
    distance: int,
    shape: tuple[int, ...],
    other_shape: tuple[int, ...],
    strides: tuple[int, ...],
    other_strides: tuple[int, ...],
) -> bool:
    """Whether two tensors, so many elements apart, have elements at one address."""
    if 0 in shape or 0 in other_shape:
        return False
    # How far each stride leads from an element of one tensor to one of the other. Equal strides are one step.
    ends: dict[int, tuple[int, int]] = {}
    for size, stride in zip(shape, strides):
        least, most = ends.get(stride, (0, 0))
        ends[stride] = least, most + size - 1
    for size, stride in zip(other_shape, other_strides):
        least, most = ends.get(stride, (0, 0))
        ends[stride] = least - size + 1, most
    ends.pop(0, None)
    return _is_sum(distance, sorted((stride, least, most) for stride, (least, most) in ends.items() if least < most))


def _is_sum(distance: int, steps: Sequence[_Step]) -> bool:
    """Whether a distance is a sum of multiples of strides, between the least and the largest number of each. The steps
    are sorted by stride: in the usual layouts all before one lead less far than it, and few numbers are tried."""
    if not steps:
        return distance == 0
    *smaller, (stride, least, most) = steps
    if not stride:
        return distance == 0
    low = sum(each * down for each, down, _ in smaller)
    high = sum(each * up for each, _, up in smaller)
    first, last = max(least, -((high - distance) // stride)), min(most, (distance - low) // stride)
    return any(_is_sum(distance - number * stride, smaller) for number in range(first, last + 1))
