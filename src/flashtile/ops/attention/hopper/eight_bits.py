"""What the forward does otherwise where q, k and v have 8 bits (e4m3).

Scores are products of 8-bit numbers, for which the tensor cores take half the time of 16-bit ones. Weights and values
are multiplied in bfloat16: `attention_widen_kernel` writes the values so before the forward runs, each number as it is.
8-bit weights would have 3 bits after the leading one, and span so few powers of two that each tile needs the maximum of
its rows, which takes the time that the faster product saves (decisions/hopper_forward.md has both).
"""

from flashtile._backends.gluon import gl, gluon

#: The smallest unit of scores: less, as factors may make it, is 0 or has few bits, and hidden scores times 0 are NaN.
LEAST_UNIT = gl.constexpr(2.0**-126)

#: Values that a thread takes at a time: it writes 16 bytes, next to those of its neighbours.
_VALUES = gl.constexpr(8)


@gluon.jit
def load_descale(pointer, strides, group, sequence, head, exists):
    """The factor of a query head, 1 where there is none. `group` query heads share one. `exists`: whether there is such
    a sequence."""
    factor = gl.to_tensor(1.0)
    if pointer is not None:
        place = sequence.to(gl.int64) * strides.batch + head // group * strides.head
        factor = gl.load(pointer + place, mask=exists, other=1.0)
    return factor


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
