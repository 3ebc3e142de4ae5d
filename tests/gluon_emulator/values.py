"""What kernels compute with: numbers and tensors of a program, with Triton's types and integer arithmetic.

Whole numbers and truth values are Python's, because most operations of a kernel are theirs, and tensors of one element
take several times as long.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DType:
    """An element type; `held_as`: the type of the tensors here, which for uint32 is a wider one."""

    name: str
    held_as: torch.dtype
    primitive_bitwidth: int

    @functools.cached_property
    def itemsize(self) -> int:
        return self.primitive_bitwidth // 8

    @functools.cached_property
    def is_floating(self) -> bool:
        return self.held_as.is_floating_point


int1 = DType("int1", torch.bool, 8)
int8 = DType("int8", torch.int8, 8)
int16 = DType("int16", torch.int16, 16)
int32 = DType("int32", torch.int32, 32)
uint32 = DType("uint32", torch.int64, 32)
int64 = DType("int64", torch.int64, 64)
uint8 = DType("uint8", torch.uint8, 8)
float8e4nv = DType("float8e4nv", torch.float8_e4m3fn, 8)
float16 = DType("float16", torch.float16, 16)
bfloat16 = DType("bfloat16", torch.bfloat16, 16)
float32 = DType("float32", torch.float32, 32)
float64 = DType("float64", torch.float64, 64)

#: By the names that Triton's signatures have.
BY_SIGNATURE = {
    "fp8e4nv": float8e4nv, "fp16": float16, "bf16": bfloat16, "fp32": float32, "fp64": float64,
    "u8": uint8, "i8": int8, "i16": int16, "i32": int32, "i64": int64,
}  # fmt: skip
BY_TORCH = {
    dtype.held_as: dtype
    for dtype in (float8e4nv, float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64)
}
_INTEGERS = (int1, int8, uint8, int16, int32, uint32, int64)


@dataclass(frozen=True)
class Pointer:
    """The type of addresses, in bytes, of elements."""

    element_ty: DType
    held_as: torch.dtype = torch.int64


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


#: What functions of tensors are for Python's numbers.
_OF_NUMBERS = {
    torch.add: operator.add, torch.sub: operator.sub, torch.mul: operator.mul, _truncated: _quotient,
    torch.fmod: lambda a, b: a - b * _quotient(a, b), torch.maximum: max, torch.minimum: min,
    torch.bitwise_and: operator.and_, torch.bitwise_or: operator.or_, torch.bitwise_xor: operator.xor,
    torch.bitwise_left_shift: operator.lshift, torch.bitwise_right_shift: operator.rshift,
    torch.lt: operator.lt, torch.le: operator.le, torch.eq: operator.eq, torch.ne: operator.ne,
}  # fmt: skip


def _operator(function: Any, gives: DType | None = None, real: bool = False) -> tuple[Any, Any]:
    """`function` (`binary`) as an operator, and the one whose right operand is the value: `a < b` is `b > a`."""
    of_numbers = None if real else _OF_NUMBERS[function]

    def apply(value: Value, other: Any) -> Value:
        first, dtype = value._data, value.dtype
        second = other._data if isinstance(other, Value) and other.dtype is dtype else other
        if type(first) is int and isinstance(second, int) and of_numbers and type(dtype) is DType:  # most operations
            return Value(_in_range(of_numbers(first, second), gives or dtype), gives or dtype)
        return binary(function, value, other, gives, real)

    return apply, lambda value, other: binary(function, other, value, gives, real)


class Value:
    """A number or tensor of a program. `layout`: who holds what, as far as kernels ask for it."""

    __slots__ = ("_data", "_layout", "dtype")

    def __init__(self, data: Tensor | int, dtype: Any, layout: Any = None) -> None:
        self._data, self.dtype, self._layout = data, dtype, layout

    @property
    def number(self) -> int | None:
        """The value, if it is a whole number or a truth value."""
        return None if isinstance(self._data, Tensor) else self._data

    @property
    def data(self) -> Tensor:
        return self._data if isinstance(self._data, Tensor) else _tensor_of(self._data, self.dtype.held_as)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self._layout)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        if self.number is not None and not dtype.is_floating and not bitcast:
            return Value(_in_range(self.number, dtype), dtype, self._layout)
        if bitcast:
            data = self.data.to(int32.held_as) if self.dtype is uint32 else self.data  # the same 32 bits
            return Value(data.view(dtype.held_as), dtype, self._layout)
        return Value(_wrapped(self.data.to(dtype.held_as), dtype), dtype, self._layout)

    def with_layout(self, layout: Any) -> Value:
        return Value(self._data, self.dtype, layout)

    def __getitem__(self, key: Any) -> Value:
        """Only new dimensions of one. Where the layout is a slice along it, it is the sliced one again."""
        keys = key if isinstance(key, tuple) else (key,)
        layout = self._layout
        for axis, each in enumerate(keys):
            if each is None:
                layout = layout.parent if getattr(layout, "dim", None) == axis else None
        return Value(self.data[key], self.dtype, layout)

    def __bool__(self) -> bool:
        return bool(self.data if self.number is None else self.number)

    def __index__(self) -> int:
        assert not self.dtype.is_floating
        return int(self.data if self.number is None else self.number)

    def __neg__(self) -> Value:
        return 0 - self

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype, self._layout)

    __add__, __radd__ = _operator(torch.add)
    __sub__, __rsub__ = _operator(torch.sub)
    __mul__, __rmul__ = _operator(torch.mul)
    __truediv__, __rtruediv__ = _operator(torch.div, real=True)
    __floordiv__, __rfloordiv__ = _operator(_truncated)
    __mod__, __rmod__ = _operator(torch.fmod)
    __and__, __rand__ = _operator(torch.bitwise_and)
    __or__, __ror__ = _operator(torch.bitwise_or)
    __xor__, __rxor__ = _operator(torch.bitwise_xor)
    __lshift__ = _operator(torch.bitwise_left_shift)[0]
    __rshift__ = _operator(torch.bitwise_right_shift)[0]
    __lt__, __gt__ = _operator(torch.lt, gives=int1)
    __le__, __ge__ = _operator(torch.le, gives=int1)
    __eq__ = _operator(torch.eq, gives=int1)[0]  # type: ignore[assignment]
    __ne__ = _operator(torch.ne, gives=int1)[0]  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def as_value(number: Any, dtype: DType | None = None) -> Value:
    """A number as Triton takes it: an int as int32 where it fits, a float as float32."""
    if isinstance(number, Value):
        return number if dtype is None or number.dtype is dtype else number.to(dtype)
    if dtype is None:
        whole = int32 if -(2**31) <= number < 2**31 else int64
        dtype = int1 if isinstance(number, bool) else whole if isinstance(number, int) else float32
    if isinstance(number, int) and not dtype.is_floating:
        return Value(_in_range(number, dtype), dtype)
    return Value(_tensor_of(number, dtype.held_as, math.copysign(1, number)), dtype)


@functools.lru_cache(maxsize=4096)
def _tensor_of(number: float, dtype: torch.dtype, sign: float = 1.0) -> Tensor:
    """The same tensor for the same number: nothing writes to a value. `sign`: 0.0 and -0.0 are two."""
    return torch.tensor(number, dtype=dtype)


def _wrapped(data: Tensor, dtype: Any) -> Tensor:
    return data & 0xFFFFFFFF if dtype is uint32 else data


def _in_range(number: int, dtype: DType) -> int:
    """What is left of a number in the bits of a type."""
    if -(2**31) <= number < 2**31 and (dtype is int32 or dtype is int64):
        return number
    if dtype is int1:
        return bool(number)
    count = 1 << dtype.primitive_bitwidth
    if dtype in (uint32, uint8):
        return number % count
    return number if -count <= 2 * number < count else (number + count // 2) % count - count // 2


def common_dtype(a: Any, b: Any) -> DType:
    """The dtype of two operands: a number takes the type of the other value, if it can."""
    if not isinstance(a, Value) and not isinstance(b, Value):
        return common_dtype(as_value(a), b)
    if not isinstance(a, Value):
        a, b = b, a
    if not isinstance(b, Value):
        if isinstance(b, float) and not a.dtype.is_floating:
            return float32
        return int32 if a.dtype is int1 and not isinstance(b, bool) else a.dtype
    if a.dtype is b.dtype:
        return a.dtype
    if a.dtype.is_floating and b.dtype.is_floating:
        return float32
    if a.dtype.is_floating or b.dtype.is_floating:
        return a.dtype if a.dtype.is_floating else b.dtype
    return max(a.dtype, b.dtype, key=_INTEGERS.index)


def binary(function: Any, a: Any, b: Any, gives: DType | None = None, real: bool = False) -> Value:
    """`function` of two operands in their common type; `real`: at least in float32."""
    left = a.dtype if isinstance(a, Value) else None
    right = b.dtype if isinstance(b, Value) else None
    if type(left) is Pointer or type(right) is Pointer:
        pointer, other = (a, b) if type(left) is Pointer else (b, a)
        assert function is torch.add and not isinstance(getattr(other, "dtype", None), Pointer)
        offset, itemsize = as_value(other), pointer.dtype.element_ty.itemsize
        if pointer.number is not None and offset.number is not None:
            return Value(_in_range(pointer.number + offset.number * itemsize, int64), pointer.dtype)
        moved = pointer.data + offset.data.to(torch.int64) * itemsize
        return Value(moved, pointer.dtype, blockmask_layout(pointer, other))
    dtype = left if left is right and left is not None else common_dtype(a, b)
    if real and not dtype.is_floating:
        dtype = float32
    if not dtype.is_floating:
        first, second = (a if left is None else a._data), (b if right is None else b._data)
        if isinstance(first, int) and isinstance(second, int):
            result = _OF_NUMBERS[function](first, second)
            return Value(_in_range(result, gives or dtype), gives or dtype)
    left_data = a.data if left is dtype else as_value(a, dtype).data
    right_data = b.data if right is dtype else as_value(b, dtype).data
    gives = gives or dtype
    return Value(_wrapped(function(left_data, right_data), gives), gives, blockmask_layout(a, b))


def blockmask_layout(*operands: Any) -> Any:
    """The layout of the first operand with the most dimensions."""
    values = [each for each in operands if isinstance(each, Value) and each._layout is not None]
    if not values or all(value._layout is values[0]._layout for value in values):
        return values[0]._layout if values else None
    return max(values, key=lambda value: value.data.dim())._layout


class InFlight(Value):
    """The result of a product that has been started. It has a type, but its numbers may not be looked at."""

    def __init__(self, product: Any, shape: tuple[int, ...], layout: Any) -> None:
        super().__init__(None, float32, layout)  # type: ignore[arg-type]
        self.product, self._shape = product, list(shape)

    @property
    def shape(self) -> list[int]:
        return self._shape

    @property
    def data(self) -> Tensor:
        raise AssertionError("the result of a product is used before warpgroup_mma_wait")
