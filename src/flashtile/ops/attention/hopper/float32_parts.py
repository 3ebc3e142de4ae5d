"""Parts of float32 numbers for Hopper kernels that multiply them in bfloat16.

A float32 number is the sum of three bfloat16 numbers, its *parts*: high, middle and low. A product of two is six
products of parts; the other three are at most 2⁻²⁵ of it. `attention_parts_kernel` writes the parts of a tensor ahead
of the kernels that multiply: the low ones of a row, then the middle and the high ones, each as wide as the kernels
read.
"""

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.pieces import pack

#: The parts of a number, in the order in which they lie in a row.
LOW, MIDDLE, HIGH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
PARTS = gl.constexpr(3)

#: Numbers that a thread splits at a time: it writes 16 bytes of each part, next to those of its neighbours.
_VALUES = gl.constexpr(8)


@gluon.jit
def attention_parts_kernel(
    numbers_ptr, parts_ptr, stride_numbers_batch, stride_numbers_row, stride_numbers_head, heads, rows, tiles,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Writes the parts of `ROWS` rows of one head, `[batch, rows, heads, 3 · WIDTH]`, contiguous; past `HEAD_DIM` they
    are zeros. `tiles`: of so many rows, in a sequence. Addresses and strides are multiples of 16 bytes."""
    COLUMNS: gl.constexpr = power_of_two_from(WIDTH)
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
    high, middle, low = parts_of(numbers)
    gl.store(place + HIGH * WIDTH, high, mask=written)
    gl.store(place + MIDDLE * WIDTH, middle, mask=written)
    gl.store(place + LOW * WIDTH, low, mask=written)


@gluon.constexpr_function
def power_of_two_from(number):
    return 1 << (number - 1).bit_length()


@gluon.jit
def parts_of(numbers):
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
