"""TMA descriptors: what Hopper's copy engine needs to know of a tensor. Made once for an address and a layout.

A kernel parameter of type `descriptor_type` says which box of a tensor a copy moves, and how it lies in shared memory.
Outside of the tensor a copy reads zeros, or NaN if the layout says so, and writes nothing.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashtile._backends.alignment import used_strides
from flashtile._backends.launch import ABSENT, ELEMENT_TYPES, Parameter
from flashtile._backends.launcher import Descriptor, Launcher, call_again, driver, launcher, word_addresses

#: CUDA's CUtensorMapDataType.
_DATA_TYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # 0: bytes
#: CUDA's CUtensorMapSwizzle, by the bytes of a row.
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
#: One of CUDA's CUtensorMapL2promotion.
_PROMOTION_TO_128_BYTES = 2

#: Rows of a packed tensor in its descriptor, and the size of the dimensions that only carry coordinates.
PACKED_ROWS = 2**30
_UNBOUNDED = 0x7FFF0000


class TensorLayout(NamedTuple):
    """Shape and strides of a tensor in elements, and what is read outside of it: 0, or NaN."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nan_outside: bool = False


def strided_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorLayout:
    """The layout of a tensor whose last dimension is contiguous."""
    return TensorLayout(shape, (*used_strides(shape, strides)[:-1], 1))


def broadcast_layout(shape: tuple[int, ...], strides: tuple[int, ...], nan_outside: bool = False) -> TensorLayout:
    """The same of a tensor that may broadcast: a dimension without a stride has one element."""
    once = tuple(1 if stride == 0 else size for size, stride in zip(shape, strides))
    return strided_layout(once, strides)._replace(nan_outside=nan_outside)


def packed_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorLayout:
    """A packed tensor `[total, heads, head_dim]` with its rows three times, for the bounds check of one sequence.

    Row `r` of the sequence that has the rows from `begin` to `begin + length` lies at the coordinates
    `(2³⁰, begin + length, 2³⁰ - length + r)`: the last is out of bounds exactly for `r >= length`. Times their strides
    they sum to `(begin + r) · stride`, because `2³⁰ · 2³⁴` elements of any size wrap around 64 bits to 0.
    """
    _, heads, head_dim = shape
    row_stride, head_stride, _ = used_strides(shape, strides)
    return TensorLayout(
        (_UNBOUNDED, _UNBOUNDED, PACKED_ROWS, heads, head_dim),
        (2**34 - row_stride, row_stride, row_stride, head_stride, 1),
    )


def row_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """For `[batch, rows, heads, head_dim]`: elements from one row to the next, and rows from one batch entry to the
    next."""
    if shape[1] == 1:
        return strides[0], 1
    return strides[1], strides[0] // strides[1] if shape[0] > 1 and strides[1] else 0


def row_layout(shape: tuple[int, ...], strides: tuple[int, ...], bounded: bool) -> TensorLayout:
    """A tensor with rows of heads. `bounded`: a packed tensor, or a dense one taken as a packed tensor, whose sequences
    end where the host need not know."""
    if not bounded:
        return strided_layout(shape, strides)
    if len(shape) == 3:
        return packed_layout(shape, strides)
    batch, rows, *others = shape
    return packed_layout((batch * rows, *others), (row_strides(shape, strides)[0], *strides[2:]))


def swizzle_bytes(dtype: torch.dtype, box: tuple[int, ...], swizzled: bool = True) -> int:
    """Bytes of a row of the box that are swizzled together: those of a wgmma operand; 0 where rows lie as they are."""
    return min(128, box[-1] * dtype.itemsize) if swizzled else 0


@functools.cache
def descriptor_type(dtype: torch.dtype, box: tuple[int, ...], swizzled: bool = True) -> str:
    """The type of a kernel parameter, as Triton writes it."""
    return f"tensordesc<{ELEMENT_TYPES[dtype]}[{', '.join(map(str, box))}],{_shared_layout(dtype, box, swizzled)!r}>"


def descriptor_parameter(dtype: torch.dtype, box: tuple[int, ...] | None, swizzled: bool = True) -> Parameter:
    """A descriptor, which each launch is given; None: the specialisation has none."""
    return ABSENT if box is None else Parameter(descriptor_type(dtype, box, swizzled))


def descriptor_maker(
    dtype: torch.dtype, box: tuple[int, ...], layout: TensorLayout, swizzled: bool = True
) -> Callable[[int], tuple]:
    """A function from the address of a tensor to what a launch takes for a parameter of `descriptor_type`.

    It remembers its last answers: encoding a descriptor takes longer than the rest of a launch.
    """
    make = _described if launcher() is Launcher.OBJECT else _encoded
    return functools.lru_cache(maxsize=64)(functools.partial(make, dtype, box, layout, swizzled))


class TmaTensor(NamedTuple):
    """A tensor as TMA moves it, through a descriptor that a kernel takes.

    Attributes:
        buffer: its name in a pipeline.
        box: what one copy moves; None: this specialisation has no such descriptor.
        layout: None for a specialisation that is not launched.
        swizzled: it is an operand of matrix products.
    """

    buffer: str
    dtype: torch.dtype
    box: tuple[int, ...] | None
    layout: TensorLayout | None
    swizzled: bool = True

    @property
    def parameter(self) -> Parameter:
        return descriptor_parameter(self.dtype, self.box, self.swizzled)

    def maker(self) -> Callable[[int], tuple]:
        """The function that makes the descriptor from an address."""
        assert self.box is not None and self.layout is not None, f"{self.buffer}: nothing moves it"
        return descriptor_maker(self.dtype, self.box, self.layout, self.swizzled)


def _encoded(dtype: torch.dtype, box: tuple[int, ...], layout: TensorLayout, swizzled: bool, address: int) -> tuple:
    """For the driver."""
    swizzle = swizzle_bytes(dtype, box, swizzled)
    # Triton moves wider boxes in several messages.
    message = (*box[:-1], swizzle // dtype.itemsize) if swizzle else box
    return (_encode(address, _SWIZZLES[swizzle], dtype.itemsize, _DATA_TYPES[dtype], message, *layout),)


def _encode(
    address: int, swizzle: int, itemsize: int, data_type: int, box: Sequence[int], shape: Sequence[int],
    strides: Sequence[int], nan_outside: bool,
) -> Descriptor:  # fmt: skip
    """Has the driver encode a descriptor, with the options of Triton."""
    told, of_kernel, kept = _sizes_and_strides(tuple(box), shape, strides, itemsize)
    memory = array("Q", _ROOM)
    place = -(-memory.buffer_info()[0] // 64) * 64
    arguments = (
        ctypes.c_void_p(place), data_type, len(box), ctypes.c_void_p(address), *told, 0, swizzle,
        _PROMOTION_TO_128_BYTES, int(nan_outside),
    )  # fmt: skip
    encode = driver().cuTensorMapEncodeTiled
    if encode(*arguments):
        call_again(encode, arguments)
    return Descriptor(array("Q", (place,)) + of_kernel, (memory, kept))


#: Memory for a descriptor of 128 bytes at a multiple of 64.
_ROOM = bytes(192)


@functools.lru_cache(maxsize=4096)
def _sizes_and_strides(
    box: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[list[ctypes.c_void_p], array[int], Any]:
    """Pointers to what is told to the driver, innermost dimension first, and addresses of what a kernel takes; then
    what keeps both."""
    in_bytes = [stride * itemsize for stride in strides[-2::-1]]
    told = array("Q", shape[::-1]), array("Q", in_bytes), array("I", box[::-1]), array("I", [1] * len(box))
    of_kernel = array("q", (*shape, *strides))
    pointers = [ctypes.c_void_p(each.buffer_info()[0]) for each in told]
    return pointers, word_addresses(of_kernel), (told, of_kernel)


def _described(dtype: torch.dtype, box: tuple[int, ...], layout: TensorLayout, swizzled: bool, address: int) -> tuple:
    """For Triton's launcher object, which encodes descriptors itself."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    base = _Address(address, dtype)
    return (
        TensorDescriptor(
            base,
            list(layout.shape),
            list(layout.strides),
            list(box),
            _shared_layout(dtype, box, swizzled),
            "nan" if layout.nan_outside else "zero",
        ),
    )


class _Address(NamedTuple):
    """The part of a tensor that a descriptor reads, without keeping the tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _shared_layout(dtype: torch.dtype, box: tuple[int, ...], swizzled: bool) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_bytes(dtype, box, swizzled), 8 * dtype.itemsize, len(box))
