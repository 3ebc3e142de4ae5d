"""Kernels that convert operands ahead: float32 into three bfloat16 parts, 8-bit values into bfloat16.

A float32 number is the sum of three bfloat16 numbers, its *parts*: high, middle and low. A product of two is six
products of parts; the other three are at most 2⁻²⁵ of it. `attention_parts_kernel` writes the parts of a tensor: the
low ones of a row, then the middle and the high ones, each as wide as the kernels read.
"""

from __future__ import annotations

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

#: Numbers that a thread splits at a time: it writes 16 bytes of each part, next to those of its neighbours.
_VALUES = gl.constexpr(8)


@gluon.jit
def attention_parts_kernel(
    numbers_ptr, parts_ptr, stride_numbers_batch, stride_numbers_row, stride_numbers_head, heads, rows, tiles,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Writes the parts of `ROWS` rows of one head, `[batch, rows, heads, 3 · WIDTH]`, contiguous; past `HEAD_DIM` they
    are zeros. `tiles`: of so many rows, in a sequence. Addresses and strides are multiples of 16 bytes."""
    ACROSS: gl.constexpr = min(COLUMNS // _VALUES, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, _VALUES], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    number = gl.program_id(0)
    head = number % heads
    tile = number // heads
    sequence = (tile // tiles).to(gl.int64)
    row = tile % tiles * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    exists = (row < rows)[:, None]
    begin = numbers_ptr + sequence * stride_numbers_batch + head * stride_numbers_head
    numbers = gl.load(
        begin + (row * stride_numbers_row)[:, None] + column, mask=exists & (column < HEAD_DIM), other=0.0
    )
    line = (sequence * rows + row) * heads + head
    place = parts_ptr + (line * (PARTS * WIDTH))[:, None] + column
    written = exists & (column < WIDTH)
    high, middle, low = split_bf16x3(numbers)
    gl.store(place + HIGH * WIDTH, high, mask=written)
    gl.store(place + MIDDLE * WIDTH, middle, mask=written)
    gl.store(place + LOW * WIDTH, low, mask=written)


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


@gluon.jit
def attention_widen_kernel(
    v_ptr, out_ptr, stride_v_batch, stride_v_row, stride_v_head, heads_kv, rows_k, tiles,
    HEAD_DIM_V: gl.constexpr, E: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Writes `ROWS` rows of one head's values in bfloat16; `out` is `[batch, rows_k, heads_kv, HEAD_DIM_V]`,
    contiguous. `E`: a power of two, no less than `HEAD_DIM_V`. `tiles`: of so many rows, in a sequence. Addresses and
    strides are multiples of 16 bytes."""
    ACROSS: gl.constexpr = E // _VALUES
    layout: gl.constexpr = gl.BlockedLayout([1, _VALUES], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    number = gl.program_id(0)
    head = number % heads_kv
    tile = number // heads_kv
    sequence = (tile // tiles).to(gl.int64)
    row = tile % tiles * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, E, gl.SliceLayout(0, layout))
    there = (row < rows_k)[:, None] & (column < HEAD_DIM_V)[None, :]
    begin = v_ptr + sequence * stride_v_batch + head * stride_v_head
    values = gl.load(begin + (row * stride_v_row)[:, None] + column[None, :], mask=there)
    line = (sequence * rows_k + row) * heads_kv + head
    gl.store(out_ptr + (line * HEAD_DIM_V)[:, None] + column[None, :], values.to(gl.bfloat16), mask=there)


#: Values of a program: eight loads of each thread.
_WIDENED_VALUES = 8192


def widen_kernel(shape: tuple[int, ...], strides: tuple[int, ...]) -> Kernel:
    """Writes "wide_v" from values `[batch, rows_k, heads_kv, head_dim_v]`, or packed without the batch."""
    *batch, rows_k, heads_kv, head_dim_v = shape
    sequences = batch[0] if batch else 1
    rows, columns = _tile(head_dim_v)
    tiles = -(-rows_k // rows)
    programs = sequences * tiles * heads_kv
    check_programs("v", programs)
    apart = batch_row_head(shape, strides)
    # Addresses and strides are multiples of 16 bytes.
    parameters = {
        "v_ptr": pointer_to(torch.float8_e4m3fn, 16),
        "out_ptr": pointer_to(torch.bfloat16, 16),
        **stride_parameters("v", dict(zip(("batch", "row", "head"), apart)), 16),
        "heads_kv": int32(heads_kv),
        "rows_k": int32(rows_k),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM_V": head_dim_v, "E": columns, "ROWS": rows}
    return Kernel(attention_widen_kernel, parameters, constants, programs, {"out_ptr": "wide_v"})


def _tile(head_dim_v: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = max(8, 1 << (head_dim_v - 1).bit_length())
    return _WIDENED_VALUES // columns, columns


#: Numbers that a program splits: of so many rows and the power of two that holds a row.
_SPLIT_NUMBERS = 8192


class Operand(NamedTuple):
    """A tensor `[batch, rows, heads, head_dim]`, in `buffer`, that is split into parts of `width` columns each."""

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
    for name, (buffer, shape, strides, width) in operands.items():
        parts = f"{name}_parts"
        split.layouts[parts] = layout = contiguous((*shape[:-1], PARTS.value * width), torch.bfloat16)
        split.kernels[f"parts_{name}"] = _parts_kernel(buffer, parts, shape, strides, width)
        moved = strided_layout(layout.shape, layout.strides)
        split.moved[name] = TmaTensor(parts, torch.bfloat16, (1, rows, 1, columns), moved)
    return split


def _parts_kernel(numbers: str, parts: str, shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> Kernel:
    batch, rows, heads, head_dim = shape
    apart = dict(zip(("batch", "row", "head"), batch_row_head(shape, strides)))
    rows_together = _SPLIT_NUMBERS >> (width - 1).bit_length()
    tiles = -(-rows // rows_together)
    programs = batch * tiles * heads
    check_programs("q", programs)
    parameters = {
        "numbers_ptr": pointer_to(torch.float32, 16),
        "parts_ptr": pointer_to(torch.bfloat16, 16),
        **stride_parameters("numbers", apart, 4),  # multiples of 16 bytes
        "heads": int32(heads),
        "rows": int32(rows),
        "tiles": int32(tiles),
    }
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "COLUMNS": power_of_two(width), "ROWS": rows_together}
    buffers = {"numbers_ptr": numbers, "parts_ptr": parts}
    return Kernel(attention_parts_kernel, parameters, constants, programs, buffers)
