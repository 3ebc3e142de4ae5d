"""The kernel that converts operands ahead: float32 into three bfloat16 parts, 8-bit values into bfloat16.

A float32 number is the sum of three bfloat16 numbers, its *parts*: high, middle and low. A product of two is six
products of parts; the other three are at most 2⁻²⁵ of it. A row begins with its low parts; the middle and the high
ones follow, each as wide as the kernels read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from flashtile._backends.alignment import batch_row_head
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.gluon import gl, gluon
from flashtile._backends.launch import int32, pointer_to, stride_parameters
from flashtile._backends.pipeline import Kernel
from flashtile._backends.tma import TmaTensor, strided_layout
from flashtile.ops.attention.hopper.primitives import pack
from flashtile.ops.common.checks import check_programs
from flashtile.ops.common.tiles import power_of_two

#: The parts of a number, in the order in which they lie in a row.
LOW, MIDDLE, HIGH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
PARTS = gl.constexpr(3)

#: Numbers that a thread converts at a time: it writes 16 bytes of each part, next to those of its neighbours.
_VALUES = gl.constexpr(8)


@gluon.jit
def attention_convert_kernel(
    numbers_ptr, converted_ptr, stride_numbers_batch, stride_numbers_row, stride_numbers_head, heads, rows, tiles,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Writes `ROWS` rows of one head in bfloat16: float32 in parts, `[batch, rows, heads, 3 · WIDTH]`, which are zeros
    past `HEAD_DIM`; 8 bits as they are, `[batch, rows, heads, HEAD_DIM]`. Both are contiguous. `COLUMNS`: a power of
    two that holds a row. `tiles`: of so many rows, in a sequence. Addresses and strides are multiples of 16 bytes."""
    SPLIT: gl.constexpr = numbers_ptr.dtype.element_ty == gl.float32
    ACROSS: gl.constexpr = min(COLUMNS // _VALUES, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, _VALUES], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    number = gl.program_id(0)
    head = number % heads
    tile = number // heads
    sequence = (tile // tiles).to(gl.int64)
    row = tile % tiles * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    exists = (row < rows)[:, None]
    there = exists & (column < HEAD_DIM)
    begin = numbers_ptr + sequence * stride_numbers_batch + head * stride_numbers_head
    source = begin + (row * stride_numbers_row)[:, None] + column
    numbers = gl.load(source, mask=there, other=0.0 if SPLIT else None)
    line = (sequence * rows + row) * heads + head
    if SPLIT:
        place = converted_ptr + (line * (PARTS * WIDTH))[:, None] + column
        written = exists & (column < WIDTH)
        high, middle, low = split_bf16x3(numbers)
        gl.store(place + HIGH * WIDTH, high, mask=written)
        gl.store(place + MIDDLE * WIDTH, middle, mask=written)
        gl.store(place + LOW * WIDTH, low, mask=written)
    else:
        gl.store(converted_ptr + (line * HEAD_DIM)[:, None] + column, numbers.to(gl.bfloat16), mask=there)


@gluon.jit
def split_bf16x3(numbers):
    """High, middle and low parts, each rounded to the nearest. Their sum is the number, if that is not tiny."""
    high = pack(numbers, gl.bfloat16)
    rest = numbers - high.to(gl.float32)
    middle = pack(rest, gl.bfloat16)
    low = pack(rest - middle.to(gl.float32), gl.bfloat16)
    return high, middle, low


@gluon.jit
def without_nan(numbers):
    """The partial products that are not NaN, and 0: the rest of an infinite number is NaN."""
    return gl.where(numbers == numbers, numbers, 0.0)


#: Numbers that a program converts: so many rows, in the power of two that holds a row.
_NUMBERS = 8192


class Operand(NamedTuple):
    """A tensor `[batch, rows, heads, head_dim]`, packed without the batch, in `buffer`. float32 is split into parts of
    `width` columns each."""

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


class SplitOperands(NamedTuple):
    """By operand: the kernels that write its parts, the layout of buffer `<name>_parts`, and that for TMA."""

    kernels: dict[str, Kernel]
    layouts: dict[str, Layout | None]
    moved: dict[str, TmaTensor]


def split_operands(operands: Mapping[str, Operand], rows: int, columns: int) -> SplitOperands:
    """`rows`, `columns`: of a part, which a copy moves."""
    split = SplitOperands({}, {}, {})
    for name, operand in operands.items():
        parts = f"{name}_parts"
        split.layouts[parts] = layout = contiguous((*operand.shape[:-1], PARTS.value * operand.width), torch.bfloat16)
        split.kernels[f"parts_{name}"] = convert_kernel(name, operand, torch.float32, parts)
        moved = strided_layout(layout.shape, layout.strides)
        split.moved[name] = TmaTensor(parts, torch.bfloat16, (1, rows, 1, columns), moved)
    return split


def convert_kernel(name: str, operand: Operand, dtype: torch.dtype, converted: str) -> Kernel:
    """Writes buffer `converted` from the operand of that name, of float32 or of 8 bits."""
    buffer, shape, strides, width = operand
    *batch, rows, heads, head_dim = shape
    columns = max(_VALUES.value, power_of_two(width))
    rows_together = _NUMBERS // columns
    tiles = -(-rows // rows_together)
    programs = math.prod(batch) * tiles * heads
    check_programs(name, programs)
    apart = dict(zip(("batch", "row", "head"), batch_row_head(shape, strides)))
    parameters = {
        "numbers_ptr": pointer_to(dtype, 16),
        "converted_ptr": pointer_to(torch.bfloat16, 16),
        **stride_parameters("numbers", apart, 16 // dtype.itemsize),  # multiples of 16 bytes
        "heads": int32(heads),
        "rows": int32(rows),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "COLUMNS": columns, "ROWS": rows_together}
    buffers = {"numbers_ptr": buffer, "converted_ptr": converted}
    return Kernel(attention_convert_kernel, parameters, constants, programs, buffers)
