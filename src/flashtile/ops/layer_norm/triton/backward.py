"""Backward kernels of the norms: gradients of rows, with partial sums of the parameters' gradients; and their sum.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile, R = `rows` rows of x, WIDTH columns
of a row, P programs.
Every tensor but dz, dz1, dx and x is contiguous. With `dxhat = dz · weight + dz1 · weight1`::

    dsum = rstd · (dxhat - mean(dxhat) - xhat · mean(dxhat · xhat)) + dx      RMS norm: without mean(dxhat)
    dx0  = dsum · factor          dlayerscale = Σ dsum · x0 · factor / layerscale
    dweight = Σ dz · xhat         dbias = Σ dz                                Σ over rows

Programs stay and walk over rows in steps of P, so that each keeps its part of the Σ. Row M of the partial sums
`[sums, P, WIDTH]` belongs to one program: no atomics, and the same result in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.ops.common.triton.partial_sums import reduce_partial
from flashtile.ops.common.triton.philox import load_seed
from flashtile.ops.layer_norm.triton.rows import branch_factor, load_parameter, source_rows, tile_mask


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def load_upstream(
    dz_ptr, dz1_ptr, x_ptr, weight, weight1, out_subset_ptr, stride_dz, stride_dz1, stride_x, mean, rstd, row, columns,
    rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    """dz, dz1, xhat and dxhat of a tile, float32 `[M, N]`, 0 outside."""
    inside = tile_mask(row, columns, rows, WIDTH, ROWS)
    target = source_rows(out_subset_ptr, row, rows)
    there = inside
    if out_subset_ptr is not None:
        there = inside & (target >= 0)[:, None]
    x_offsets = row.to(tl.int64)[:, None] * stride_x + columns[None, :]
    x = tl.load(x_ptr + x_offsets, mask=inside, other=0.0).to(tl.float32)
    dz = tl.load(dz_ptr + target[:, None] * stride_dz + columns[None, :], mask=there, other=0.0).to(tl.float32)
    dz1 = dz
    dxhat = dz * weight
    if dz1_ptr is not None:
        dz1 = tl.load(dz1_ptr + target[:, None] * stride_dz1 + columns[None, :], mask=there, other=0.0).to(tl.float32)
        dxhat += dz1 * weight1
    if RMS:
        xhat = x * rstd[:, None]
    else:
        # Where dz is 0 (outside), xhat need not be.
        xhat = (x - mean[:, None]) * rstd[:, None]
    return dz, dz1, xhat, dxhat


@triton.jit
def store_gradients(
    dsum, dx_ptr, dsum_ptr, dx0_ptr, dx1_ptr, x0_ptr, rowscale_ptr, layerscale_ptr, x0_subset_ptr, seed, offset,
    stride_dx, stride_x0, row, columns, first_column, rows, threshold, scale_x0, scale_x1,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Adds dx to the gradient of the norm, stores the gradients of the summands; returns layerscale's `[M, N]`."""
    inside = tile_mask(row, columns, rows, WIDTH, ROWS)
    offsets = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    if dx_ptr is not None:
        dx_offsets = row.to(tl.int64)[:, None] * stride_dx + columns[None, :]
        dsum += tl.load(dx_ptr + dx_offsets, mask=inside, other=0.0).to(tl.float32)
    if dsum_ptr is not None:
        tl.store(dsum_ptr + offsets, dsum.to(dsum_ptr.dtype.element_ty), mask=inside)
    if dx1_ptr is not None:
        dx1 = dsum
        if DROPOUT:
            dx1 = dsum * branch_factor(
                None, None, seed, offset, row.to(tl.int64), row < rows, columns, first_column,
                threshold, scale_x1, 1, WIDTH, ROWS, BLOCK_N, DROPOUT,
            )  # fmt: skip
        tl.store(dx1_ptr + offsets, dx1.to(dx1_ptr.dtype.element_ty), mask=inside)
    dlayerscale = dsum
    if dx0_ptr is not None:
        source = source_rows(x0_subset_ptr, row, rows)
        there = inside
        if x0_subset_ptr is not None:
            there = inside & (source >= 0)[:, None]
        dx0 = dsum
        if SCALED:
            dx0 = dsum * branch_factor(
                rowscale_ptr, None, seed, offset, source, row < rows, columns, first_column, threshold,
                scale_x0, 0, WIDTH, ROWS, BLOCK_N, DROPOUT,
            )  # fmt: skip
        if SUMS_LAYERSCALE:
            x0 = tl.load(x0_ptr + source[:, None] * stride_x0 + columns[None, :], mask=there, other=0.0)
            dlayerscale = dx0 * x0.to(tl.float32)
        if layerscale_ptr is not None:
            dx0 *= load_parameter(layerscale_ptr, columns, WIDTH, 1.0, 0.0)
        x0_offsets = source[:, None] * WIDTH + columns[None, :]
        tl.store(dx0_ptr + x0_offsets, dx0.to(dx0_ptr.dtype.element_ty), mask=there)
    return dlayerscale


@triton.jit
def load_row_statistics(mean_ptr, rstd_ptr, row, rows, RMS: tl.constexpr):
    """mean and rstd `[M]`, 0 past the last row."""
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    mean = rstd
    if not RMS:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    return mean, rstd


@triton.jit
def norm_backward_kernel(
    dz_ptr, dz1_ptr, dx_ptr, x_ptr, x0_ptr, mean_ptr, rstd_ptr, weight_ptr, weight1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, dsum_ptr, dx0_ptr, dx1_ptr, partial_ptr,
    stride_dz, stride_dz1, stride_dx, stride_x, stride_x0, rows, threshold, scale_x0, scale_x1,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    DROPOUT: tl.constexpr, RMS: tl.constexpr,
    WEIGHT_ADD: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr, SUMS_WEIGHT1: tl.constexpr,
    SUMS_BIAS1: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Rows that registers hold: each is read once, and so are the next ones while it is worked on."""
    columns = tl.arange(0, BLOCK_N)  # [N]
    weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
    weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
    nothing = tl.zeros([ROWS, BLOCK_N], tl.float32)
    dweight, dbias, dweight1, dbias1, dlayerscale = nothing, nothing, nothing, nothing, nothing
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)  # [M]
        mean, rstd = load_row_statistics(mean_ptr, rstd_ptr, row, rows, RMS)
        dz, dz1, xhat, dxhat = load_upstream(
            dz_ptr, dz1_ptr, x_ptr, weight, weight1, out_subset_ptr, stride_dz, stride_dz1, stride_x, mean, rstd, row,
            columns, rows, WIDTH, ROWS, RMS,
        )  # fmt: skip
        # Both sums in one exchange between warps.
        along, constant = tl.reduce((dxhat * xhat, dxhat), 1, _add_pairs)  # [M]
        dsum = dxhat - xhat * (along / WIDTH)[:, None]
        if not RMS:
            dsum -= (constant / WIDTH)[:, None]
        # Again for each tile: the keys that Philox makes of the seed would stay in registers, which the sums need.
        seed, offset = load_seed(seed_ptr, DROPOUT)
        of_layerscale = store_gradients(
            dsum * rstd[:, None], dx_ptr, dsum_ptr, dx0_ptr, dx1_ptr, x0_ptr, rowscale_ptr, layerscale_ptr,
            x0_subset_ptr, seed, offset, stride_dx, stride_x0, row, columns, 0, rows, threshold, scale_x0, scale_x1,
            WIDTH, ROWS, BLOCK_N, SCALED, DROPOUT, SUMS_LAYERSCALE,
        )  # fmt: skip
        if SUMS_WEIGHT:
            dweight += dz * xhat
        if SUMS_BIAS:
            dbias += dz
        if SUMS_WEIGHT1:
            dweight1 += dz1 * xhat
        if SUMS_BIAS1:
            dbias1 += dz1
        if SUMS_LAYERSCALE:
            dlayerscale += of_layerscale

    plane = tl.num_programs(0).to(tl.int64) * WIDTH
    partial_ptr += tl.program_id(0).to(tl.int64) * WIDTH
    partial_ptr = _store_partial(partial_ptr, dweight, columns, plane, WIDTH, SUMS_WEIGHT)
    partial_ptr = _store_partial(partial_ptr, dbias, columns, plane, WIDTH, SUMS_BIAS)
    partial_ptr = _store_partial(partial_ptr, dweight1, columns, plane, WIDTH, SUMS_WEIGHT1)
    partial_ptr = _store_partial(partial_ptr, dbias1, columns, plane, WIDTH, SUMS_BIAS1)
    _store_partial(partial_ptr, dlayerscale, columns, plane, WIDTH, SUMS_LAYERSCALE)


@triton.jit
def _store_partial(partial_ptr, tile, columns, plane, WIDTH: tl.constexpr, PRESENT: tl.constexpr):
    """Stores the sum over rows of a tile `[M, N]`; returns where the next one goes."""
    if PRESENT:
        tl.store(partial_ptr + columns, tl.sum(tile, axis=0), mask=columns < WIDTH)
        partial_ptr += plane
    return partial_ptr


@triton.jit
def norm_backward_looped_kernel(
    dz_ptr, dz1_ptr, dx_ptr, x_ptr, x0_ptr, mean_ptr, rstd_ptr, weight_ptr, weight1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, dsum_ptr, dx0_ptr, dx1_ptr, partial_ptr,
    stride_dz, stride_dz1, stride_dx, stride_x, stride_x0, rows, threshold, scale_x0, scale_x1,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    DROPOUT: tl.constexpr, RMS: tl.constexpr,
    WEIGHT_ADD: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr, SUMS_WEIGHT1: tl.constexpr,
    SUMS_BIAS1: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Longer rows: M rows at a time, N columns at a time, first for the two means, then, out of the L2 cache, for the
    gradients. The program's partial sums are in memory, and M rows share each reading and writing of them."""
    plane = tl.num_programs(0).to(tl.int64) * WIDTH
    partial_ptr += tl.program_id(0).to(tl.int64) * WIDTH
    seed, offset = load_seed(seed_ptr, DROPOUT)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)  # [M]
        started = tile >= tl.num_programs(0)
        mean, rstd = load_row_statistics(mean_ptr, rstd_ptr, row, rows, RMS)
        along_place = tl.zeros([ROWS, BLOCK_N], tl.float32)
        constant_place = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in tl.range(0, WIDTH, BLOCK_N, num_stages=STAGES):
            columns = first + tl.arange(0, BLOCK_N)
            weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
            weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
            dz, dz1, xhat, dxhat = load_upstream(
                dz_ptr, dz1_ptr, x_ptr, weight, weight1, out_subset_ptr, stride_dz, stride_dz1, stride_x, mean, rstd,
                row, columns, rows, WIDTH, ROWS, RMS,
            )  # fmt: skip
            along_place += dxhat * xhat
            constant_place += dxhat
        along, constant = tl.reduce((along_place, constant_place), 1, _add_pairs)  # [M]
        tl.debug_barrier()  # partial sums are read back, maybe by other threads than those that stored them
        for first in tl.range(0, WIDTH, BLOCK_N, num_stages=STAGES):
            columns = first + tl.arange(0, BLOCK_N)
            weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
            weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
            dz, dz1, xhat, dxhat = load_upstream(
                dz_ptr, dz1_ptr, x_ptr, weight, weight1, out_subset_ptr, stride_dz, stride_dz1, stride_x, mean, rstd,
                row, columns, rows, WIDTH, ROWS, RMS,
            )  # fmt: skip
            dsum = dxhat - xhat * (along / WIDTH)[:, None]
            if not RMS:
                dsum -= (constant / WIDTH)[:, None]
            of_layerscale = store_gradients(
                dsum * rstd[:, None], dx_ptr, dsum_ptr, dx0_ptr, dx1_ptr, x0_ptr, rowscale_ptr, layerscale_ptr,
                x0_subset_ptr, seed, offset, stride_dx, stride_x0, row, columns, first, rows, threshold, scale_x0,
                scale_x1, WIDTH, ROWS, BLOCK_N, SCALED, DROPOUT, SUMS_LAYERSCALE,
            )  # fmt: skip
            sums_ptr = _add_partial(partial_ptr, dz * xhat, columns, plane, started, WIDTH, SUMS_WEIGHT)
            sums_ptr = _add_partial(sums_ptr, dz, columns, plane, started, WIDTH, SUMS_BIAS)
            sums_ptr = _add_partial(sums_ptr, dz1 * xhat, columns, plane, started, WIDTH, SUMS_WEIGHT1)
            sums_ptr = _add_partial(sums_ptr, dz1, columns, plane, started, WIDTH, SUMS_BIAS1)
            _add_partial(sums_ptr, of_layerscale, columns, plane, started, WIDTH, SUMS_LAYERSCALE)


@triton.jit
def _add_partial(partial_ptr, tile, columns, plane, started, WIDTH: tl.constexpr, PRESENT: tl.constexpr):
    """Adds the sum over rows of a tile `[M, N]` to partial sums, or starts them; returns where the next one goes."""
    if PRESENT:
        # A matrix of one row, like those of the parameters, so that its elements lie in the threads of their columns.
        places = partial_ptr + columns[None, :]
        inside = (columns < WIDTH)[None, :]
        before = tl.load(places, mask=inside & started, other=0.0)
        tl.store(places, before + tl.sum(tile, axis=0, keep_dims=True), mask=inside)
        partial_ptr += plane
    return partial_ptr


@triton.jit
def norm_reduce_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, dweight1_ptr, dbias1_ptr, dlayerscale_ptr, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
    SUMS_WEIGHT1: tl.constexpr, SUMS_BIAS1: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of all programs, in their order, N columns to a program."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr = reduce_partial(partial_ptr, dweight_ptr, columns, programs, WIDTH, ROWS, BLOCK_N, SUMS_WEIGHT)
    partial_ptr = reduce_partial(partial_ptr, dbias_ptr, columns, programs, WIDTH, ROWS, BLOCK_N, SUMS_BIAS)
    partial_ptr = reduce_partial(partial_ptr, dweight1_ptr, columns, programs, WIDTH, ROWS, BLOCK_N, SUMS_WEIGHT1)
    partial_ptr = reduce_partial(partial_ptr, dbias1_ptr, columns, programs, WIDTH, ROWS, BLOCK_N, SUMS_BIAS1)
    reduce_partial(partial_ptr, dlayerscale_ptr, columns, programs, WIDTH, ROWS, BLOCK_N, SUMS_LAYERSCALE)
