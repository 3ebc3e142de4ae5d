"""The backend for GPUs: the kernels of the norms, how they are cut, and their launches.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile, R = `rows` rows of x, WIDTH columns of a row, P
programs. See `ops/layer_norm/spec.py` for the formulas. Every tensor but x0, x1, residual, dz, dz1, dx and x is
contiguous. In the backward, with `dxhat = dz · weight + dz1 · weight1`::

    dsum = rstd · (dxhat - mean(dxhat) - xhat · mean(dxhat · xhat)) + dx      RMS norm: without mean(dxhat)
    dx0  = dsum · factor          dlayerscale = Σ dsum · x0 · factor / layerscale
    dweight = Σ dz · xhat         dbias = Σ dz                                Σ over rows

Programs stay and walk over rows in steps of P, so that each keeps its part of the Σ. Row M of the partial sums
`[sums, P, WIDTH]` belongs to one program: no atomics, and the same result in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import DeviceFacts, device_facts, multiprocessors
from flashtile._backends.launch import (
    Parameter,
    float32,
    int32,
    int64,
    named_constants,
    pointer_to,
)
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile._backends.tuned import choose
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.kernels import kept_in_rows, load_dropout, reduce_partial
from flashtile.ops.common.philox import keep_threshold
from flashtile.ops.common.tiles import REDUCE, RowTile, held_row_tile, row_tile
from flashtile.ops.layer_norm.spec import (
    Gradients,
    Normalised,
    NormSpec,
    Wanted,
    makes_sum,
    present_gradients,
)

# --- what the kernels share: addresses of rows, the sum that is normalised, statistics, parameters --------------------


class Tile(NamedTuple):
    """A tile of a matrix `[rows, WIDTH]`: its rows `[M]`, its columns `[N]` and the first of them."""

    row: Any
    columns: Any
    first_column: Any
    rows: Any


class Summands(NamedTuple):
    """Pointers to what x is the sum of, and to the factors of x0, None for what a call does not have; elements from one
    row to the next; and the constant factors of x0 and x1."""

    x0: Any
    x1: Any
    residual: Any
    rowscale: Any
    layerscale: Any
    subset: Any
    stride_x0: Any
    stride_x1: Any
    stride_residual: Any
    scale_x0: Any
    scale_x1: Any


class Outputs(NamedTuple):
    """Pointers to the results of a norm, to the parameters that make them of xhat, and to the rows of z."""

    weight: Any
    bias: Any
    weight1: Any
    bias1: Any
    subset: Any
    z: Any
    z1: Any


@triton.jit
def tile_mask(tile, WIDTH: tl.constexpr):
    """The elements of a tile that exist: bool `[M, N]`. A tile of one row is never past the last."""
    inside = (tile.columns < WIDTH)[None, :]
    if tile.row.shape[0] > 1:
        inside = inside & (tile.row < tile.rows)[:, None]
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
def branch_factor(rowscale_ptr, layerscale_ptr, source, scale, stream, dropout, tile, WIDTH: tl.constexpr):
    """The factor on an element of x0 (stream 0) or x1 (stream 1), of rows `source`, on its way into the sum: `[M, N]`
    or less. `dropout`: None for none."""
    factor = tl.full([tile.row.shape[0], 1], 1.0, tl.float32) * scale
    if rowscale_ptr is not None:
        there = (tile.row < tile.rows) & (source >= 0)
        factor *= tl.load(rowscale_ptr + source, mask=there, other=0.0).to(tl.float32)[:, None]
    if layerscale_ptr is not None:
        factor = factor * load_parameter(layerscale_ptr, tile.columns, WIDTH, 1.0, 0.0)
    if dropout is not None:
        kept = kept_in_rows(dropout, stream, source.to(tl.int32), tile.first_column, tile.columns.shape[0])
        factor = tl.where(kept, factor, 0.0)
    return factor


@triton.jit
def load_sum(summands, dropout, x_ptr, tile, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """A tile of x `[M, N]` in float32, rounded to x's dtype and stored where it is not x0; 0 outside. x0 is read past
    the L2 cache only alone and in short rows (1,024 columns on an H200: 17.3 µs against 18.4; else 5 % slower)."""
    ALONE: tl.constexpr = summands.x1 is None and summands.residual is None
    POLICY: tl.constexpr = "evict_first" if ALONE and WIDTH <= 2048 else ""
    row, columns = tile.row, tile.columns
    inside = tile_mask(tile, WIDTH)
    source = source_rows(summands.subset, row, tile.rows)
    there = inside
    if summands.subset is not None:
        there = inside & (source >= 0)[:, None]
    x0_pointers = summands.x0 + source[:, None] * summands.stride_x0 + columns[None, :]
    x = tl.load(x0_pointers, mask=there, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if SCALED:
        x *= branch_factor(
            summands.rowscale, summands.layerscale, source, summands.scale_x0, 0, dropout, tile, WIDTH=WIDTH
        )
    if summands.x1 is not None:
        offsets = row.to(tl.int64)[:, None] * summands.stride_x1 + columns[None, :]
        x1 = tl.load(summands.x1 + offsets, mask=inside, other=0.0).to(tl.float32)
        if dropout is not None:
            x1 *= branch_factor(None, None, row.to(tl.int64), summands.scale_x1, 1, dropout, tile, WIDTH=WIDTH)
        x += x1
    if summands.residual is not None:
        offsets = row.to(tl.int64)[:, None] * summands.stride_residual + columns[None, :]
        x += tl.load(summands.residual + offsets, mask=inside, other=0.0).to(tl.float32)
    if x_ptr is not None:
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :], rounded, mask=inside)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def store_outputs(xhat, outputs, tile, WIDTH: tl.constexpr, WEIGHT_ADD: tl.constexpr):
    """z and z1 of a tile of xhat `[M, N]`."""
    columns = tile.columns
    inside = tile_mask(tile, WIDTH)
    target = source_rows(outputs.subset, tile.row, tile.rows)
    if outputs.subset is not None:
        inside = inside & (target >= 0)[:, None]
    offsets = target[:, None] * WIDTH + columns[None, :]
    z = xhat * load_parameter(outputs.weight, columns, WIDTH, 1.0, WEIGHT_ADD)
    z += load_parameter(outputs.bias, columns, WIDTH, 0.0, 0.0)
    tl.store(outputs.z + offsets, z.to(outputs.z.dtype.element_ty), mask=inside)
    if outputs.weight1 is not None:
        z1 = xhat * load_parameter(outputs.weight1, columns, WIDTH, 1.0, WEIGHT_ADD)
        z1 += load_parameter(outputs.bias1, columns, WIDTH, 0.0, 0.0)
        tl.store(outputs.z1 + offsets, z1.to(outputs.z1.dtype.element_ty), mask=inside)


@triton.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, rows, RMS: tl.constexpr):
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not RMS:
        tl.store(mean_ptr + row, mean, mask=row < rows)


# --- forward ----------------------------------------------------------------------------------------------------------


@triton.jit
def norm_forward_kernel(
    x0_ptr, x1_ptr, residual_ptr, weight_ptr, bias_ptr, weight1_ptr, bias1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, z_ptr, z1_ptr, x_ptr, mean_ptr, rstd_ptr,
    stride_x0, stride_x1, stride_residual, rows, threshold, scale_x0, scale_x1, epsilon,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, DROPOUT: tl.constexpr,
    RMS: tl.constexpr, WEIGHT_ADD: tl.constexpr,
):  # fmt: skip
    """M rows to a program. Rows that registers hold are read once.

    Longer ones are read N columns at a time, first for the statistics, then, out of the L2 cache, for the outputs.
    Each of the N places of a tile keeps the running mean and sum of squares of what passes it (Welford 1962). They are
    put together once, at the end (Chan, Golub, LeVeque 1979).
    """
    summands = Summands(
        x0=x0_ptr, x1=x1_ptr, residual=residual_ptr, rowscale=rowscale_ptr, layerscale=layerscale_ptr,
        subset=x0_subset_ptr, stride_x0=stride_x0, stride_x1=stride_x1, stride_residual=stride_residual,
        scale_x0=scale_x0, scale_x1=scale_x1,
    )  # fmt: skip
    outputs = Outputs(
        weight=weight_ptr, bias=bias_ptr, weight1=weight1_ptr, bias1=bias1_ptr, subset=out_subset_ptr, z=z_ptr,
        z1=z1_ptr,
    )  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    if BLOCK_N >= WIDTH:
        columns = tl.arange(0, BLOCK_N)  # [N]
        tile = Tile(row, columns, first_column=0, rows=rows)
        dropout = load_dropout(seed_ptr, threshold, DROPOUT)
        x = load_sum(summands, dropout, x_ptr, tile, WIDTH, SCALED)
        # The mean is taken off before squaring: E[x²] - E[x]² would lose a small variance on a large mean.
        mean = row.to(tl.float32) * 0.0
        if not RMS:
            mean = tl.sum(x, axis=1) / WIDTH  # [M]
            x = x - mean[:, None]
            if BLOCK_N > WIDTH:
                x = tl.where((columns < WIDTH)[None, :], x, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)  # [M]
        store_statistics(mean_ptr, rstd_ptr, mean, rstd, row, rows, RMS)
        store_outputs(x * rstd[:, None], outputs, tile, WIDTH, WEIGHT_ADD)
    else:
        dropout = load_dropout(seed_ptr, threshold, DROPOUT)
        place_mean = tl.zeros([ROWS, BLOCK_N], tl.float32)
        place_squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in range(0, WIDTH, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            tile = Tile(row, columns, first, rows)
            x = load_sum(summands, dropout, x_ptr, tile, WIDTH, SCALED)
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
            tile = Tile(row, columns, first, rows)
            offsets = row.to(tl.int64)[:, None] * stride_again + columns[None, :]
            x = tl.load(again_ptr + offsets, mask=tile_mask(tile, WIDTH), other=0.0).to(tl.float32)
            store_outputs((x - mean[:, None]) * rstd[:, None], outputs, tile, WIDTH, WEIGHT_ADD)


# --- backward: gradients of rows, with partial sums of the parameters' gradients; and their sum -----------------------


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


class Above(NamedTuple):
    """Pointers to what the gradient of a norm is made of, and to the rows of z; elements from one row to the next."""

    dz: Any
    dz1: Any
    x: Any
    subset: Any
    stride_dz: Any
    stride_dz1: Any
    stride_x: Any


class SummandGradients(NamedTuple):
    """Pointers to dx, which is read, with elements from one of its rows to the next, and to the gradients of the sum
    and of the summands, which are written; None for what a call does not have."""

    dx: Any
    stride_dx: Any
    dsum: Any
    dx0: Any
    dx1: Any


@triton.jit
def load_upstream(above, weight, weight1, mean, rstd, tile, WIDTH: tl.constexpr, RMS: tl.constexpr):
    """dz, dz1, xhat and dxhat of a tile, float32 `[M, N]`, 0 outside."""
    row, columns = tile.row, tile.columns
    inside = tile_mask(tile, WIDTH)
    target = source_rows(above.subset, row, tile.rows)
    there = inside
    if above.subset is not None:
        there = inside & (target >= 0)[:, None]
    x_offsets = row.to(tl.int64)[:, None] * above.stride_x + columns[None, :]
    x = tl.load(above.x + x_offsets, mask=inside, other=0.0).to(tl.float32)
    dz_offsets = target[:, None] * above.stride_dz
    dz = tl.load(above.dz + dz_offsets + columns[None, :], mask=there, other=0.0).to(tl.float32)
    dz1 = dz
    dxhat = dz * weight
    if above.dz1 is not None:
        dz1_offsets = target[:, None] * above.stride_dz1
        dz1 = tl.load(above.dz1 + dz1_offsets + columns[None, :], mask=there, other=0.0).to(tl.float32)
        dxhat += dz1 * weight1
    if RMS:
        xhat = x * rstd[:, None]
    else:
        # xhat need not be 0 where dz is (outside).
        xhat = (x - mean[:, None]) * rstd[:, None]
    return dz, dz1, xhat, dxhat


@triton.jit
def store_gradients(
    dsum, gradients, summands, dropout, tile, WIDTH: tl.constexpr, SCALED: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr
):  # fmt: skip
    """Adds dx to the gradient of the norm, stores the gradients of the summands; returns layerscale's `[M, N]`."""
    row, columns = tile.row, tile.columns
    inside = tile_mask(tile, WIDTH)
    offsets = row.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    if gradients.dx is not None:
        dx_offsets = row.to(tl.int64)[:, None] * gradients.stride_dx + columns[None, :]
        dsum += tl.load(gradients.dx + dx_offsets, mask=inside, other=0.0).to(tl.float32)
    if gradients.dsum is not None:
        tl.store(gradients.dsum + offsets, dsum.to(gradients.dsum.dtype.element_ty), mask=inside)
    if gradients.dx1 is not None:
        dx1 = dsum
        if dropout is not None:
            dx1 = dsum * branch_factor(None, None, row.to(tl.int64), summands.scale_x1, 1, dropout, tile, WIDTH=WIDTH)
        tl.store(gradients.dx1 + offsets, dx1.to(gradients.dx1.dtype.element_ty), mask=inside)
    dlayerscale = dsum
    if gradients.dx0 is not None:
        source = source_rows(summands.subset, row, tile.rows)
        there = inside
        if summands.subset is not None:
            there = inside & (source >= 0)[:, None]
        dx0 = dsum
        if SCALED:
            dx0 = dsum * branch_factor(
                summands.rowscale, None, source, summands.scale_x0, 0, dropout, tile, WIDTH=WIDTH
            )
        if SUMS_LAYERSCALE:
            x0_pointers = summands.x0 + source[:, None] * summands.stride_x0 + columns[None, :]
            dlayerscale = dx0 * tl.load(x0_pointers, mask=there, other=0.0).to(tl.float32)
        if summands.layerscale is not None:
            dx0 *= load_parameter(summands.layerscale, columns, WIDTH, 1.0, 0.0)
        x0_offsets = source[:, None] * WIDTH + columns[None, :]
        tl.store(gradients.dx0 + x0_offsets, dx0.to(gradients.dx0.dtype.element_ty), mask=there)
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
def _store_partial(partial_ptr, tile, columns, plane, WIDTH: tl.constexpr, PRESENT: tl.constexpr):
    """Stores the sum over rows of a tile `[M, N]`; returns where the next one goes."""
    if PRESENT:
        tl.store(partial_ptr + columns, tl.sum(tile, axis=0), mask=columns < WIDTH)
        partial_ptr += plane
    return partial_ptr


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
def norm_backward_kernel(
    dz_ptr, dz1_ptr, dx_ptr, x_ptr, x0_ptr, mean_ptr, rstd_ptr, weight_ptr, weight1_ptr, rowscale_ptr, layerscale_ptr,
    x0_subset_ptr, out_subset_ptr, seed_ptr, dsum_ptr, dx0_ptr, dx1_ptr, partial_ptr,
    stride_dz, stride_dz1, stride_dx, stride_x, stride_x0, rows, threshold, scale_x0, scale_x1,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
    DROPOUT: tl.constexpr, RMS: tl.constexpr,
    WEIGHT_ADD: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr, SUMS_WEIGHT1: tl.constexpr,
    SUMS_BIAS1: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Rows that registers hold are read once, and so are the next ones while they are worked on.

    Longer rows are read M at a time, N columns at a time, first for the two means, then, out of the L2 cache, for
    the gradients. The program's partial sums are in memory then, and M rows share each reading and writing of them.
    """
    above = Above(
        dz=dz_ptr, dz1=dz1_ptr, x=x_ptr, subset=out_subset_ptr, stride_dz=stride_dz, stride_dz1=stride_dz1,
        stride_x=stride_x,
    )  # fmt: skip
    gradients = SummandGradients(dx=dx_ptr, stride_dx=stride_dx, dsum=dsum_ptr, dx0=dx0_ptr, dx1=dx1_ptr)
    summands = Summands(
        x0=x0_ptr, x1=None, residual=None, rowscale=rowscale_ptr, layerscale=layerscale_ptr, subset=x0_subset_ptr,
        stride_x0=stride_x0, stride_x1=None, stride_residual=None, scale_x0=scale_x0, scale_x1=scale_x1,
    )  # fmt: skip
    if BLOCK_N >= WIDTH:
        columns = tl.arange(0, BLOCK_N)  # [N]
        weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
        weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
        nothing = tl.zeros([ROWS, BLOCK_N], tl.float32)
        dweight, dbias, dweight1, dbias1, dlayerscale = nothing, nothing, nothing, nothing, nothing
        for number in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
            row = number * ROWS + tl.arange(0, ROWS)  # [M]
            tile = Tile(row, columns, first_column=0, rows=rows)
            mean, rstd = load_row_statistics(mean_ptr, rstd_ptr, row, rows, RMS)
            dz, dz1, xhat, dxhat = load_upstream(above, weight, weight1, mean, rstd, tile, WIDTH=WIDTH, RMS=RMS)
            # Both sums in one exchange between warps.
            along, constant = tl.reduce((dxhat * xhat, dxhat), 1, _add_pairs)  # [M]
            dsum = dxhat - xhat * (along / WIDTH)[:, None]
            if not RMS:
                dsum -= (constant / WIDTH)[:, None]
            # Again for each tile: the keys that Philox makes of the seed would stay in registers, which the sums need.
            dropout = load_dropout(seed_ptr, threshold, DROPOUT)
            of_layerscale = store_gradients(
                dsum * rstd[:, None], gradients, summands, dropout, tile, WIDTH=WIDTH, SCALED=SCALED,
                SUMS_LAYERSCALE=SUMS_LAYERSCALE,
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
    else:
        plane = tl.num_programs(0).to(tl.int64) * WIDTH
        partial_ptr += tl.program_id(0).to(tl.int64) * WIDTH
        dropout = load_dropout(seed_ptr, threshold, DROPOUT)
        for number in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
            row = number * ROWS + tl.arange(0, ROWS)  # [M]
            started = number >= tl.num_programs(0)
            mean, rstd = load_row_statistics(mean_ptr, rstd_ptr, row, rows, RMS)
            along_place = tl.zeros([ROWS, BLOCK_N], tl.float32)
            constant_place = tl.zeros([ROWS, BLOCK_N], tl.float32)
            for first in tl.range(0, WIDTH, BLOCK_N, num_stages=STAGES):
                columns = first + tl.arange(0, BLOCK_N)
                tile = Tile(row, columns, first, rows)
                weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
                weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
                dz, dz1, xhat, dxhat = load_upstream(above, weight, weight1, mean, rstd, tile, WIDTH=WIDTH, RMS=RMS)
                along_place += dxhat * xhat
                constant_place += dxhat
            along, constant = tl.reduce((along_place, constant_place), 1, _add_pairs)  # [M]
            tl.debug_barrier()  # partial sums are read back, maybe by other threads than those that stored them
            for first in tl.range(0, WIDTH, BLOCK_N, num_stages=STAGES):
                columns = first + tl.arange(0, BLOCK_N)
                tile = Tile(row, columns, first, rows)
                weight = load_parameter(weight_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
                weight1 = load_parameter(weight1_ptr, columns, WIDTH, 1.0, WEIGHT_ADD)
                dz, dz1, xhat, dxhat = load_upstream(above, weight, weight1, mean, rstd, tile, WIDTH=WIDTH, RMS=RMS)
                dsum = dxhat - xhat * (along / WIDTH)[:, None]
                if not RMS:
                    dsum -= (constant / WIDTH)[:, None]
                of_layerscale = store_gradients(
                    dsum * rstd[:, None], gradients, summands, dropout, tile, WIDTH=WIDTH, SCALED=SCALED,
                    SUMS_LAYERSCALE=SUMS_LAYERSCALE,
                )  # fmt: skip
                sums_ptr = _add_partial(partial_ptr, dz * xhat, columns, plane, started, WIDTH, SUMS_WEIGHT)
                sums_ptr = _add_partial(sums_ptr, dz, columns, plane, started, WIDTH, SUMS_BIAS)
                sums_ptr = _add_partial(sums_ptr, dz1 * xhat, columns, plane, started, WIDTH, SUMS_WEIGHT1)
                sums_ptr = _add_partial(sums_ptr, dz1, columns, plane, started, WIDTH, SUMS_BIAS1)
                _add_partial(sums_ptr, of_layerscale, columns, plane, started, WIDTH, SUMS_LAYERSCALE)


@triton.jit
def norm_reduce_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, dweight1_ptr, dbias1_ptr, dlayerscale_ptr, programs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SUMS_WEIGHT: tl.constexpr, SUMS_BIAS: tl.constexpr,
    SUMS_WEIGHT1: tl.constexpr, SUMS_BIAS1: tl.constexpr, SUMS_LAYERSCALE: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of all programs, in their order, N columns to a program."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr = reduce_partial(partial_ptr, dweight_ptr, columns, programs, WIDTH, ROWS, SUMS_WEIGHT)
    partial_ptr = reduce_partial(partial_ptr, dbias_ptr, columns, programs, WIDTH, ROWS, SUMS_BIAS)
    partial_ptr = reduce_partial(partial_ptr, dweight1_ptr, columns, programs, WIDTH, ROWS, SUMS_WEIGHT1)
    partial_ptr = reduce_partial(partial_ptr, dbias1_ptr, columns, programs, WIDTH, ROWS, SUMS_BIAS1)
    reduce_partial(partial_ptr, dlayerscale_ptr, columns, programs, WIDTH, ROWS, SUMS_LAYERSCALE)


# --- how the kernels are cut ------------------------------------------------------------------------------------------

#: (widest row in columns, its cut), as those of the forward, with sums over rows: each takes as many registers as the
#: tile itself, and the tile is in them several times. 16 elements to a thread take 128 registers, and programs of 16
#: warps together fill the register file.
_BACKWARD = (
    (2048, RowTile(rows=1, block_n=2048, num_warps=4, num_stages=3, programs_per_multiprocessor=4)),
    (4096, RowTile(rows=1, block_n=4096, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
    (8192, RowTile(rows=1, block_n=8192, num_warps=16, num_stages=3, programs_per_multiprocessor=1)),
    # looped; four rows share the traffic of the partial sums
    (65536, RowTile(rows=4, block_n=1024, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
)

#: Much in registers (more than two sums, dropout, or a float32 stream with a gradient from above): half as many.
#: In a loop a warp has 256 columns of all rows of the tile, so that their sums need no exchange between warps.
_BACKWARD_HEAVY = (
    (1024, RowTile(rows=1, block_n=1024, num_warps=4, num_stages=3, programs_per_multiprocessor=4)),
    (2048, RowTile(rows=1, block_n=2048, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
    (4096, RowTile(rows=1, block_n=4096, num_warps=16, num_stages=3, programs_per_multiprocessor=1)),
    (65536, RowTile(rows=2, block_n=2048, num_warps=8, num_stages=3, programs_per_multiprocessor=2)),
)

#: With up to three sums longer rows are better held too: they spill a little, but are read and met at barriers once.
_HEAVY_WHOLE = RowTile(rows=1, block_n=8192, num_warps=16, num_stages=3, programs_per_multiprocessor=1)


class ForwardKey(NamedTuple):
    """What the cut of the forward looks at: columns of a row."""

    width: int


class BackwardKey(NamedTuple):
    """What the cut of the backward looks at.

    Attributes:
        width: columns of a row.
        sums: how many gradients are sums over rows.
        bytes_per_column: of all that the kernel loads for one element.
        dropout: whether it makes dropout's bits.
    """

    width: int
    sums: int
    bytes_per_column: int
    dropout: bool


def forward_config(key: ForwardKey, device: DeviceFacts) -> RowTile:
    """The cut of the forward kernel."""
    return choose("norm.forward", device, key, held_row_tile(key.width, device))


def backward_config(key: BackwardKey, device: DeviceFacts) -> RowTile:
    """The cut of the backward kernel."""
    return choose("norm.backward", device, key, _shipped_backward_config(*key, device))


def _shipped_backward_config(
    width: int, sums: int, bytes_per_column: int, dropout: bool, device: DeviceFacts
) -> RowTile:
    table: tuple[tuple[int, RowTile], ...] = (
        _BACKWARD_HEAVY if sums > 2 or bytes_per_column > 8 or dropout else _BACKWARD
    )
    if table is _BACKWARD_HEAVY and sums <= 3:
        table = (*table[:-1], (8192, _HEAVY_WHOLE), table[-1])
    config = row_tile(table, width, device)
    # In a loop partial sums and parameters of their columns are in flight too. Beside them warps exchange sums of rows
    # and what lies in other threads.
    tile, looped = config.rows * config.block_n, config.looped(width)
    in_flight = tile * bytes_per_column + (4 * config.block_n * (sums + (sums + 1) // 2) if looped else 0)
    return config.staged(device, in_flight, 4 * tile if looped else 4096)


# --- launches ---------------------------------------------------------------------------------------------------------

#: Inputs whose gradients are sums over rows.
_SUMMED = ("weight", "bias", "weight1", "bias1", "layerscale")
#: The parameter that is not called as its tensor.
_SEED = {"seed_ptr": "dropout_seed"}


@launched(Normalised)
def forward(operands: Any, spec: NormSpec, *, at: int, device: torch.device) -> Pipeline:
    """z, x and statistics, of rows that are contiguous in themselves."""
    rows, width = operands.rows, operands.x0.shape[1]
    check_rows("x0", rows)
    config = forward_config(ForwardKey(width), device_facts(device))
    z, statistics = contiguous((spec.out_rows, width), operands.x0.dtype), contiguous((rows,), torch.float32)
    outputs = {
        "z": z,
        "z1": operands.weight1 and z,
        "x": contiguous((rows, width), spec.sum_dtype) if makes_sum(operands, spec) else None,
        "mean": None if spec.rms else statistics,
        "rstd": statistics,
    }
    parameters, constants = _shared(operands, outputs, ("x0", "x1", "residual"), at, rows, spec, config)
    parameters["epsilon"] = float32(spec.epsilon)
    programs = -(-rows // config.rows)
    kernel = Kernel(norm_forward_kernel, parameters, constants, programs, _SEED, **config.compiled)
    zeroed = ("z", "z1") if operands.out_subset else ()
    return Pipeline(device, {"forward": kernel}, operands, outputs, zeroed=zeroed)


@launched(Gradients)
def backward(given: Any, spec: NormSpec, wanted: Wanted, *, at: int, device: torch.device) -> Pipeline:
    """The gradients, and where there are some of parameters, the sums of their parts."""
    (rows, width), present = given.x.shape, present_gradients(given, spec, wanted)
    sums, dtype = dict(zip(_SUMMED, present[3:], strict=True)), given.dz.dtype
    layouts: dict[str, Any] = {
        "dsum": contiguous((rows, width), given.x.dtype),
        "dx0": contiguous((wanted.x0_rows, width), dtype),
        "dx1": contiguous((rows, width), dtype),
        **{f"d{name}": there and contiguous((width,), getattr(given, name).dtype) for name, there in sums.items()},
    }
    outputs = {name: layout if there else None for (name, layout), there in zip(layouts.items(), present)}
    matrices, count = ("dz", "dz1", "dx", "x", "x0"), sum(sums.values())
    bytes_per_column = sum(matrix.dtype.itemsize for name in matrices if (matrix := getattr(given, name)))
    key = BackwardKey(width, count, bytes_per_column, spec.dropout_p > 0)
    config = backward_config(key, device_facts(device))
    statistic = contiguous((), torch.float32)
    parameters, constants = _shared(given, {**outputs, "partial": statistic}, matrices, at, rows, spec, config)
    summed = {f"SUMS_{name.upper()}": there for name, there in sums.items()}
    constants |= {**summed, "STAGES": config.num_stages}
    programs = min(-(-rows // config.rows), multiprocessors(device) * config.programs_per_multiprocessor)
    kernels = {"main": Kernel(norm_backward_kernel, parameters, constants, programs, _SEED, **config.compiled)}
    totals = [f"d{name}" for name in sums]
    if count:
        parameters = {f"{name}_ptr": pointer_to((outputs[name] or statistic).dtype, 16) for name in totals}
        parameters |= {"partial_ptr": pointer_to(torch.float32, 16), "programs": int32(programs)}
        constants = {**summed, "WIDTH": width, **named_constants(REDUCE)}
        strips = -(-width // REDUCE.block_n) if programs else 0
        kernels["reduce"] = Kernel(norm_reduce_kernel, parameters, constants, strips, **REDUCE.compiled)
    zeroed = [*(["dx0"] if given.x0_subset else []), *([] if programs else totals)]
    scratch = {"partial": count * programs * width} if count and programs else None
    return Pipeline(device, kernels, given, outputs, scratch, zeroed, unused={"partial"})


def _shared(
    tensors: Any,
    others: Mapping[str, Layout | None],
    matrices: Sequence[str],
    misalignment: int,
    rows: int,
    spec: NormSpec,
    config: RowTile,
) -> tuple[dict[str, Parameter], dict[str, Any]]:
    """The parameters and constants that forward and backward share. `tensors`: the layouts of those of a call; `others`
    by name; `matrices`: the names of those with strides."""
    strides = {name: matrix.strides[0] if (matrix := getattr(tensors, name)) else 0 for name in matrices}
    multiple, apart = power_of_two_factor(misalignment), power_of_two_factor(*strides.values())
    keep_scale, dropout, scaled = 1 / (1 - spec.dropout_p), spec.dropout_p > 0, tensors.rowscale or tensors.layerscale
    pointers = {**tensors._asdict(), **others, "seed": tensors.dropout_seed}
    parameters = {
        **{f"{name}_ptr": pointer_to(layout and layout.dtype, multiple) for name, layout in pointers.items()},
        **{f"stride_{name}": int64(stride, apart) for name, stride in strides.items()},
        "rows": int32(rows),
        "threshold": int32(keep_threshold(spec.dropout_p)),
        "scale_x0": float32(spec.rowscale_const * keep_scale),
        "scale_x1": float32(keep_scale),
    }
    constants = {
        "WIDTH": tensors[0].shape[-1],
        **named_constants(config),
        "SCALED": scaled is not None or dropout or spec.rowscale_const != 1.0,
        "DROPOUT": dropout,
        "RMS": spec.rms,
        "WEIGHT_ADD": float(spec.zero_centered),
    }
    return parameters, constants
