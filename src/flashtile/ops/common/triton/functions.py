"""Elementary functions that Triton does not have on every target."""

from __future__ import annotations

import triton
import triton.language as tl

_TWICE_LOG2_E = tl.constexpr(2 * 1.4426950408889634)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """Hyperbolic tangent: to a few units of 2⁻²⁴, or with PRECISE to the last places of float32 near 0 as well, by a
    polynomial where the formula would cancel."""
    value = 1.0 - 2.0 / (1.0 + tl.exp2(x * _TWICE_LOG2_E))
    if PRECISE:
        square = x * x
        series = -0.053968254 + square * (0.021869488 + square * (-0.0088632358 + square * 0.0035921280))
        small = x * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * series)))
        value = tl.where(tl.abs(x) < 0.5, small, value)
    return value
