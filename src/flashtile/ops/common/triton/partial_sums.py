"""Sums over rows without atomics: each program stores its part, and these are added in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reduce_partial(
    partial_ptr, out_ptr, columns, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PRESENT: tl.constexpr,
):  # fmt: skip
    """Stores the sum over programs of parts `[programs, WIDTH]`; returns where those of the next sum begin."""
    if PRESENT:
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        inside = (columns < WIDTH)[None, :]
        for first in range(0, programs, ROWS):
            program = first + tl.arange(0, ROWS)
            offsets = program.to(tl.int64)[:, None] * WIDTH + columns[None, :]
            total += tl.load(partial_ptr + offsets, mask=inside & (program < programs)[:, None], other=0.0)
        sums = tl.sum(total, axis=0)
        tl.store(out_ptr + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)
        partial_ptr += programs.to(tl.int64) * WIDTH
    return partial_ptr
