"""What the norm kernels share: addresses of rows, the sum that is normalised, statistics, parameters.

Shapes: M rows of a tile, N columns of a tile, R rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.common.triton.philox import kept_in_rows


@triton.jit
def tile_mask(row, columns, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Which elements of a tile exist: bool `[M, N]`. A tile of one row is never past the last."""
    inside = (columns < WIDTH)[None, :]
    if ROWS > 1:
        inside = inside & (row < rows)[:, None]
    return inside


@triton.jit
def load_parameter(pointer, columns, WIDTH: tl.constexpr, default, ADD: tl.constexpr):
    """A vector over columns as float32 `[1, N]`, plus ADD; `default` where there is none."""
    if pointer is not None:
        # A matrix of one row, like the tiles of long rows, so that its elements lie in the same threads as theirs.
        value = tl.load(pointer + columns[None, :], mask=(columns < WIDTH)[None, :], other=0.0).to(tl.float32) + ADD
    else:
        value = tl.full([1, columns.shape[0]], default, tl.float32)
    return value


@triton.jit
def source_rows(subset_ptr, row, rows):
    """The rows of x0 (or of z) behind rows of x `[M]`: int64, below 0 where there is none. Without a subset those past
    the last row are past the last of x0, too."""
    if subset_ptr is not None:
        return tl.load(subset_ptr + row, mask=row < rows, other=0).to(tl.int64) - 1
    else:
        return row.to(tl.int64)


@triton.jit
def branch_factor(
    rowscale_ptr, layerscale_ptr, seed, offset, source, exists, columns, first_column, threshold, scale, stream,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """What an element of x0 (stream 0) or x1 (stream 1) is multiplied by on its way into the sum: `[M, N]` or less.
    `exists` `[M]`: rows of the tile that are there."""
    factor = tl.full([ROWS, 1], 1.0, tl.float32) * scale
    if rowscale_ptr is not None:
        factor *= tl.load(rowscale_ptr + source, mask=exists & (source >= 0), other=0.0).to(tl.float32)[:, None]
    if layerscale_ptr is not None:
        factor = factor * load_parameter(layerscale_ptr, columns, WIDTH, 1.0, 0.0)
    if DROPOUT:
        kept = kept_in_rows(seed, offset, stream, source.to(tl.int32), first_column, threshold, ROWS, BLOCK_N)
        factor = tl.where(kept, factor, 0.0)
    return factor


@triton.jit
def load_sum(
    x0_ptr, x1_ptr, residual_ptr, rowscale_ptr, layerscale_ptr, x0_subset_ptr, seed, offset, x_ptr,
    stride_x0, stride_x1, stride_residual, row, columns, first_column, rows, threshold, scale_x0, scale_x1,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """A tile of x `[M, N]` in float32, rounded to x's dtype and stored where it is not x0; 0 outside.

    Alone and in short rows, x0 is read past the L2 cache (1,024 columns on an H200: 17.3 µs against 18.4); in longer
    rows and beside other summands that costs 5 %.
    """
    POLICY: tl.constexpr = "" if x1_ptr is not None or residual_ptr is not None or WIDTH > 2048 else "evict_first"
    inside = tile_mask(row, columns, rows, WIDTH, ROWS)
    source = source_rows(x0_subset_ptr, row, rows)
    there = inside
    if x0_subset_ptr is not None:
        there = inside & (source >= 0)[:, None]
    x = tl.load(x0_ptr + source[:, None] * stride_x0 + columns[None, :], mask=there, other=0.0, eviction_policy=POLICY)
    x = x.to(tl.float32)
    if SCALED:
        x *= branch_factor(
            rowscale_ptr, layerscale_ptr, seed, offset, source, row < rows, columns, first_column, threshold, scale_x0,
            0, WIDTH, ROWS, BLOCK_N, DROPOUT,
        )  # fmt: skip
    if x1_ptr is not None:
        offsets = row.to(tl.int64)[:, None] * stride_x1 + columns[None, :]
        x1 = tl.load(x1_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            x1 *= branch_factor(
                None, None, seed, offset, row.to(tl.int64), row < rows, columns, first_column,
                threshold, scale_x1, 1, WIDTH, ROWS, BLOCK_N, DROPOUT,
            )  # fmt: skip
        x += x1
    if residual_ptr is not None:
        offsets = row.to(tl.int64)[:, None] * stride_residual + columns[None, :]
        x += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if x_ptr is not None:
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :], rounded, mask=inside)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def store_outputs(
    xhat, weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, out_subset_ptr, z_ptr, z1_ptr, row, columns, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, WEIGHT_ADD: tl.constexpr,
):  # fmt: skip
    """z and z1 of a tile of xhat `[M, N]`."""
    inside = tile_mask(row, columns, rows, WIDTH, ROWS)
    target = source_rows(out_subset_ptr, row, rows)
    if out_subset_ptr is not None:
        inside = inside & (target >= 0)[:, None]
    offsets = target[:, None] * WIDTH + columns[None, :]
    z = xhat * load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
    z += load_parameter(bias_ptr, columns, WIDTH, 0.0, 0.0)
    tl.store(z_ptr + offsets, z.to(z_ptr.dtype.element_ty), mask=inside)
    if weight1_ptr is not None:
        z1 = xhat * load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
        z1 += load_parameter(bias1_ptr, columns, WIDTH, 0.0, 0.0)
        tl.store(z1_ptr + offsets, z1.to(z1_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, rows, RMS: tl.constexpr):
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not RMS:
        tl.store(mean_ptr + row, mean, mask=row < rows)
