"""Score functions as Gluon functions, from the source that the portable kernels have of them."""

from __future__ import annotations

import functools
from typing import Any

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.gpu.score_functions import compiled
from flashtile.ops.attention.gpu.score_source import SINE_SOURCE, function_source, reads_source, with_derivative_source
from flashtile.ops.attention.gpu.score_writer import ScoreBounds


@gluon.jit
def _constant(value, dtype: gl.constexpr):
    return gl.to_tensor(value).to(dtype)


@gluon.jit
def _hyperbolic_tangent(x, PRECISE: gl.constexpr):
    """To a few units of 2⁻²⁴, as the portable backward computes it. A division would multiply twice more, to be right
    for denormal numbers."""
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + gl.exp2(x * 2.8853900817779268)], dtype=gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return 1.0 - 2.0 * inverse


_NAMES = {
    "tl": gl,
    "constant": _constant,
    "hyperbolic_tangent": _hyperbolic_tangent,
    "sine": compiled(SINE_SOURCE, gluon.jit, {"tl": gl}),
}


@functools.lru_cache(maxsize=1024)
def gluon_function(text: str, bounds: ScoreBounds | None) -> Any:
    """The `@gluon.jit` function of a program: see `score_source.function_source`."""
    return compiled(function_source(text, bounds, reads_before=True), gluon.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def gluon_derivative(text: str, bounds: ScoreBounds | None) -> Any:
    """The same with its derivative: see `score_source.with_derivative_source`."""
    return compiled(with_derivative_source(text, bounds), gluon.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def gluon_reads(text: str, bounds: ScoreBounds | None, with_derivative: bool = False) -> Any:
    """The `@gluon.jit` function of its reads before the scores are there; None where there are none."""
    source = reads_source(text, bounds, with_derivative)
    return None if source is None else compiled(source, gluon.jit, _NAMES)
