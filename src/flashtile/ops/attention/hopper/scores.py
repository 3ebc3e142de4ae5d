"""What becomes of the products on their way to the softmax in the Hopper kernels: soft cap and ALiBi.

Both kernels hold scores in units in which a factor of `scale_log2` is left to the exponential: products `q kᵀ`, or with
a soft cap `tanh(q kᵀ · scale / softcap)`. What a call does not have is None when the kernel compiles.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)


class ScoreUnits(NamedTuple):
    """`scale_log2`: the factor that is left to the exponential. `cap_scale`: scale / softcap; None without a cap.
    `function_scale`: the factor that makes scores of products, or of their tanh, for a score function, behind which
    they need no other than `log2(e)`; None without a function."""

    scale_log2: Any
    cap_scale: Any
    function_scale: Any


@gluon.jit
def load_slope(side, numbers, sequence, head, seen):
    """ALiBi's slope of one head of one sequence; 0 where `seen` says that nothing is there."""
    place = side.alibi_slopes + sequence * numbers.stride_alibi_batch + head
    return gl.load(place, mask=seen, other=0.0)


@gluon.jit
def distance_shift(seq_q, seq_k, origin):
    """The key at no distance from query 0, as ALiBi counts. `origin`: `spec.Origin`."""
    shift = seq_k - seq_q
    if origin.diagonal is not None:
        shift += origin.diagonal
    return shift


@gluon.jit
def near_shift(shift, first, keys, ROWS: gl.constexpr):
    """`distance_shift` as it is, or where all `keys` lie on one side of `ROWS` queries from `first` on, moved until one
    of these is at no distance from the nearest key. Distances of all keys are then less by the same number, so weights
    stay the same, and scores are small numbers, which float32 holds exactly enough."""
    return gl.minimum(gl.maximum(first + shift, 1 - ROWS), gl.maximum(keys - 1, 0)) - first


@gluon.jit
def raised_to_near(statistic, slope, shift, near, SIGN: gl.constexpr):
    """A row statistic of scores (natural logarithm) as one of scores with the `near_shift` for `shift`, for SIGN 1; for
    -1 the other way round. One operation, which rounds once."""
    return gl.fma(gl.abs(shift - near).to(gl.float32), SIGN * slope, statistic)


@gluon.jit
def capped(products, cap_scale):
    """`tanh(products · cap_scale)`, to about 2⁻¹¹ of its value: less than 16-bit scores are rounded by. One instruction
    of the unit for exponentials, where `1 - 2 / (1 + exp 2x)` is two."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [products * cap_scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def in_eights_and_distances(x, position, first):
    """`x` `[R, C]` as `[R, C / 8, 8]`, and of each element `position - (first + c)`, where `position` `[R]` and `first`
    count alike.

    Columns are taken in eights: which eight is known when the kernel compiles, only the place within needs registers.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    eights = gl.reshape(x, [x.shape[0], COLUMNS // 8, 8])
    layout: gl.constexpr = eights.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout))).to(gl.float32) * 8.0
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout))).to(gl.float32)
    here = gl.convert_layout((position - first).to(gl.float32), of_row)
    return eights, (here[:, None, None] - within[None, None, :]) - eight[None, :, None]


@gluon.jit
def lowered_by_distance(scores, position, first, slope):
    """Scores `[R, C]` minus `slope · |position - (first + c)|` (`in_eights_and_distances`).

    As one operation: of two, Triton 3.9 computes the second again where a mask follows, from what must then be kept.
    """
    eights, distance = in_eights_and_distances(scores, position, first)
    lowered = gl.reshape(gl.fma(gl.abs(distance), -slope, eights), scores.shape)
    return gl.convert_layout(lowered, scores.type.layout, assert_trivial=True)
