"""Kernel that adds up dk and dv where the query heads of a key/value head, or their queries, have shares."""

import triton
import triton.language as tl


@triton.jit
def attention_shares_kernel(
    dk_shares_ptr, dv_shares_ptr, dk_ptr, dv_ptr, lines, shares, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, APART: tl.constexpr, APART_V: tl.constexpr,
    LINES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv `[lines, head_dim]`, sums of `[lines, shares, head_dim]`, in a fixed order.

    The first `tiles` programs have `LINES` lines of dk each, the others of dv. `APART`, `APART_V`: numbers from a line
    of a share to the next. `D`, `E`: powers of two that hold a line."""
    program = tl.program_id(0)
    if program < tiles:
        _add_up(dk_shares_ptr, dk_ptr, program, lines, shares, HEAD_DIM, APART, LINES, D)
    else:
        _add_up(dv_shares_ptr, dv_ptr, program - tiles, lines, shares, HEAD_DIM_V, APART_V, LINES, E)


@triton.jit
def _add_up(
    shares_ptr, sum_ptr, tile, lines, shares,
    COLUMNS: tl.constexpr, APART: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    line = tile.to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    exists = (line < lines) & (column < COLUMNS)
    total = tl.zeros((LINES, WIDTH), tl.float32)
    for share in range(shares):
        numbers = tl.load(shares_ptr + (line * shares + share) * APART + column, mask=exists, other=0.0)
        total += numbers.to(tl.float32)
    tl.store(sum_ptr + line * COLUMNS + column, total.to(sum_ptr.dtype.element_ty), mask=exists)
