"""Forward kernels of the norms.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile, R = `rows` rows of x, WIDTH columns of a row.
Every tensor but x0, x1 and residual is contiguous. See `ops/layer_norm/spec.py` for the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.common.triton.philox import load_seed
from flashtile.ops.layer_norm.triton.rows import load_sum, store_outputs, store_statistics, tile_mask


@triton.jit
def norm_forward_kernel(
    x0_ptr, x1_ptr, residual_ptr, weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, z_ptr, z1_ptr, x_ptr, mean_ptr, rstd_ptr,
    stride_x0, stride_x1, stride_residual, rows, threshold, scale_x0, scale_x1, epsilon,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    RMS: tl.constexpr, WEIGHT_ADD: tl.constexpr,
):  # fmt: skip
    """Rows that registers hold: each is read once, M rows to a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    columns = tl.arange(0, BLOCK_N)  # [N]
    seed, offset = load_seed(seed_ptr, DROPOUT)
    x = load_sum(
        x0_ptr, x1_ptr, residual_ptr, rowscale_ptr, layerscale_ptr, x0_subset_ptr, seed, offset, x_ptr,
        stride_x0, stride_x1, stride_residual, row, columns, 0, rows, threshold, scale_x0, scale_x1,
        WIDTH, ROWS, BLOCK_N, SCALED, DROPOUT,
    )  # fmt: skip
    # The mean is taken off before squaring: E[x²] - E[x]² would lose a small variance on a large mean.
    mean = row.to(tl.float32) * 0.0
    if not RMS:
        mean = tl.sum(x, axis=1) / WIDTH  # [M]
        x = x - mean[:, None]
        if BLOCK_N > WIDTH:
            x = tl.where((columns < WIDTH)[None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)  # [M]
    store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, rows, RMS)
    store_outputs(
        x * rstd[:, None], weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, out_subset_ptr, z_ptr, z1_ptr, row, columns,
        rows, WIDTH, ROWS, WEIGHT_ADD,
    )  # fmt: skip


@triton.jit
def norm_forward_looped_kernel(
    x0_ptr, x1_ptr, residual_ptr, weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, z_ptr, z1_ptr, x_ptr, mean_ptr, rstd_ptr,
    stride_x0, stride_x1, stride_residual, rows, threshold, scale_x0, scale_x1, epsilon,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    RMS: tl.constexpr, WEIGHT_ADD: tl.constexpr,
):  # fmt: skip
    """Longer rows: N columns at a time, first for the statistics, then, out of the L2 cache, for the outputs.

    Each of the N places of a tile keeps the running mean and sum of squares of what passes it (Welford 1962); they are
    put together once, at the end (Chan, Golub, LeVeque 1979).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    seed, offset = load_seed(seed_ptr, DROPOUT)
    place_mean = tl.zeros([ROWS, BLOCK_N], tl.float32)
    place_squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        x = load_sum(
            x0_ptr, x1_ptr, residual_ptr, rowscale_ptr, layerscale_ptr, x0_subset_ptr, seed, offset, x_ptr,
            stride_x0, stride_x1, stride_residual, row, columns, first, rows, threshold, scale_x0, scale_x1,
            WIDTH, ROWS, BLOCK_N, SCALED, DROPOUT,
        )  # fmt: skip
        if RMS:
            place_squares += x * x
        else:
            inside = (columns < WIDTH)[None, :]
            change = tl.where(inside, x - place_mean, 0.0)
            place_mean += change * (1.0 / (first // BLOCK_N + 1))
            place_squares += tl.where(inside, change * (x - place_mean), 0.0)

    mean = row.to(tl.float32) * 0.0
    if RMS:
        rstd = tl.rsqrt(tl.sum(place_squares, axis=1) / WIDTH + epsilon)
    else:
        # How many elements passed each place: all have WIDTH // N, and the first WIDTH % N one more.
        more = tl.where(tl.arange(0, BLOCK_N) < WIDTH % BLOCK_N, 1.0, 0.0)
        passed = (WIDTH // BLOCK_N + more)[None, :]
        mean = tl.sum(place_mean * passed, axis=1) / WIDTH
        apart = place_mean - mean[:, None]
        rstd = tl.rsqrt(tl.sum(place_squares + apart * apart * passed, axis=1) / WIDTH + epsilon)
    store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, rows, RMS)

    if x_ptr is not None:
        tl.debug_barrier()  # x is read back, maybe by other threads than those that stored it
        again_ptr, stride_again = x_ptr, WIDTH
    else:
        again_ptr, stride_again = x0_ptr, stride_x0
    for first in range(0, WIDTH, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        offsets = row.to(tl.int64)[:, None] * stride_again + columns[None, :]
        inside = tile_mask(row, columns, rows, WIDTH, ROWS)
        x = tl.load(again_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        store_outputs(
            (x - mean[:, None]) * rstd[:, None], weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, out_subset_ptr, z_ptr,
            z1_ptr, row, columns, rows, WIDTH, ROWS, WEIGHT_ADD,
        )  # fmt: skip
