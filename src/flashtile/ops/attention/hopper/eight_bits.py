"""What the forward does otherwise where q, k and v have 8 bits (e4m3).

Scores are products of 8-bit numbers, for which the tensor cores take half the time of 16-bit ones. Weights and values
are multiplied in bfloat16: a kernel of `convert` writes the values so before the forward runs, each number as it is.
8-bit weights would have 3 bits after the leading one, and span so few powers of two that each tile needs the maximum of
its rows, which takes the time that the faster product saves (decisions/hopper_forward.md has both).
"""

from flashtile._backends.gluon import gl, gluon

#: The smallest unit of scores: less, as factors may make it, is 0 or has few bits, and hidden scores times 0 are NaN.
LEAST_UNIT = gl.constexpr(2.0**-126)


@gluon.jit
def load_descale(pointer, strides, group, sequence, head, exists):
    """The factor of a query head, 1 where there is none. `group` query heads share one. `exists`: whether there is such
    a sequence."""
    factor = gl.to_tensor(1.0)
    if pointer is not None:
        place = sequence.to(gl.int64) * strides.batch + head // group * strides.head
        factor = gl.load(pointer + place, mask=exists, other=1.0)
    return factor
