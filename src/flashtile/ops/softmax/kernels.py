"""The backend for GPUs: the softmax kernels, how they are cut, and their launches.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile; x, out, dout and dx are matrices `[rows, WIDTH]`, where
row r is query `r % seq_q`. The mask has strides of its own. Only what is visible is read, all is written. See
`ops/softmax/spec.py` for the formulas.

A merge joins a partial result of attention to a running one in one pass over memory: M rows of a tile, D = BLOCK_D
columns; acc and out `[batch, rows, heads, WIDTH]`, row_max, row_sum and lse `[batch, heads, rows]`. See
`ops/softmax/merge.py` for its formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.alignment import misalignment, power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import device_facts
from flashtile._backends.launch import (
    float32,
    int32,
    named_constants,
    pointer_to,
    stride_parameters,
)
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile.ops.common.checks import check_programs, check_rows
from flashtile.ops.common.tiles import held_row_tile
from flashtile.ops.softmax.spec import IsFirst, Merged, OutputType, SoftmaxSpec

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_ends(row, seq_q, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys each row `[M]` may see."""
    if CAUSAL:
        return tl.maximum(tl.minimum(row % seq_q + (WIDTH - seq_q) + 1, WIDTH), 0)
    else:
        return row * 0 + WIDTH


class Tile(NamedTuple):
    """A tile of a matrix: its rows `[M]` (of `rows`), columns `[N]`, and where visible keys of each row end."""

    row: Any
    columns: Any
    ends: Any
    rows: Any


class Mask(NamedTuple):
    """Pointer and strides of a mask, and how many heads and queries the rows of x are."""

    pointer: Any
    stride_batch: Any
    stride_head: Any
    stride_row: Any
    heads: Any
    seq_q: Any


@triton.jit
def readable(tile, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """The elements of a tile to read: bool `[M, N]`. Up to 15 more than are visible, so that vectors stay whole."""
    inside = (tile.row < tile.rows)[:, None] & (tile.columns < WIDTH)[None, :]
    if CAUSAL:
        inside = inside & (tile.columns[None, :] < ((tile.ends + 15) // 16 * 16)[:, None])
    return inside


@triton.jit
def load_scores(
    x_ptr, scale, mask, tile, MASK_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """A tile of scores: float32 `[M, N]`, -inf where nothing is visible. `mask`: None for none."""
    row, columns = tile.row, tile.columns
    inside = readable(tile, WIDTH, CAUSAL)
    visible = inside & (columns[None, :] < tile.ends[:, None])
    if mask is not None:
        matrix, query = row // mask.seq_q, (row % mask.seq_q).to(tl.int64)
        batch, head = (matrix // mask.heads).to(tl.int64), (matrix % mask.heads).to(tl.int64)
        mask_rows = batch * mask.stride_batch + head * mask.stride_head + query * mask.stride_row
        offsets = mask_rows[:, None] + columns[None, :].to(tl.int64) * MASK_COLUMNS
        visible = visible & (tl.load(mask.pointer + offsets, mask=inside, other=1) == 0)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    return tl.where(visible, x.to(tl.float32) * scale, float("-inf"))


@triton.jit
def exponentials(scores, row_max):
    """exp of scores `[M, N]` against their maximum `[M]`; 0 in a row that sees nothing. Units of log2 are for the
    difference alone: in these the largest numbers would be infinite."""
    return tl.exp2((scores - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None]) * LOG2_E)


@triton.jit
def store_rows(pointer, value, tile, WIDTH: tl.constexpr):
    offsets = tile.row.to(tl.int64)[:, None] * WIDTH + tile.columns[None, :]
    inside = (tile.row < tile.rows)[:, None] & (tile.columns < WIDTH)[None, :]
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def softmax_forward_kernel(
    x_ptr, mask_ptr, out_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, rows, heads,
    seq_q, scale, MASK_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    ends = visible_ends(row, seq_q, WIDTH, CAUSAL)
    mask = None
    if HAS_MASK:
        mask = Mask(mask_ptr, stride_mask_batch, stride_mask_head, stride_mask_row, heads=heads, seq_q=seq_q)
    if BLOCK_N >= WIDTH:
        tile = Tile(row, tl.arange(0, BLOCK_N), ends, rows)
        scores = load_scores(x_ptr, scale, mask, tile, MASK_COLUMNS, WIDTH, CAUSAL)
        p = exponentials(scores, tl.max(scores, axis=1))
        row_sum = tl.sum(p, axis=1)
        p = p * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        store_rows(out_ptr, p, tile, WIDTH)
    else:
        # Longer rows: maximum and sum of each place of a tile, put together at the end; then a second reading.
        place_max = tl.full([ROWS, BLOCK_N], float("-inf"), tl.float32)
        place_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
        last = tl.max(ends, axis=0)
        for first in range(0, last, BLOCK_N):
            tile = Tile(row, first + tl.arange(0, BLOCK_N), ends, rows)
            scores = load_scores(x_ptr, scale, mask, tile, MASK_COLUMNS, WIDTH, CAUSAL)
            larger = tl.maximum(place_max, scores)
            against = tl.where(larger == float("-inf"), 0.0, larger)
            place_sum = place_sum * tl.exp2((place_max - against) * LOG2_E) + tl.exp2((scores - against) * LOG2_E)
            place_max = larger
        row_max = tl.max(place_max, axis=1)
        row_sum = tl.sum(place_sum * exponentials(place_max, row_max), axis=1)
        factor = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
        for first in range(0, WIDTH, BLOCK_N):
            tile = Tile(row, first + tl.arange(0, BLOCK_N), ends, rows)
            scores = load_scores(x_ptr, scale, mask, tile, MASK_COLUMNS, WIDTH, CAUSAL)
            store_rows(out_ptr, exponentials(scores, row_max) * factor[:, None], tile, WIDTH)


@triton.jit
def load_product(dout_ptr, out_ptr, tile, WIDTH: tl.constexpr, CAUSAL: tl.constexpr):
    """p and p · dout of a tile, float32 `[M, N]`. No gradient passes where p is 0, whatever comes from above."""
    offsets = tile.row.to(tl.int64)[:, None] * WIDTH + tile.columns[None, :]
    inside = readable(tile, WIDTH, CAUSAL)
    p = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return p, tl.where(p == 0.0, 0.0, p * dout)


@triton.jit
def softmax_backward_kernel(
    dout_ptr, out_ptr, dx_ptr, rows, seq_q, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [M]
    ends = visible_ends(row, seq_q, WIDTH, CAUSAL)
    if BLOCK_N >= WIDTH:
        tile = Tile(row, tl.arange(0, BLOCK_N), ends, rows)
        p, product = load_product(dout_ptr, out_ptr, tile, WIDTH, CAUSAL)
        dx = (product - p * tl.sum(product, axis=1)[:, None]) * scale
        store_rows(dx_ptr, dx, tile, WIDTH)
    else:
        place_sum = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in range(0, tl.max(ends, axis=0), BLOCK_N):
            tile = Tile(row, first + tl.arange(0, BLOCK_N), ends, rows)
            _, product = load_product(dout_ptr, out_ptr, tile, WIDTH, CAUSAL)
            place_sum += product
        total = tl.sum(place_sum, axis=1)
        for first in range(0, WIDTH, BLOCK_N):
            tile = Tile(row, first + tl.arange(0, BLOCK_N), ends, rows)
            p, product = load_product(dout_ptr, out_ptr, tile, WIDTH, CAUSAL)
            store_rows(dx_ptr, (product - p * total[:, None]) * scale, tile, WIDTH)


@triton.jit
def _place(rows, heads, ROWS: tl.constexpr):
    """Batch entry, head and rows `[M]` of a program. Heads are the fastest, as in memory."""
    program = tl.program_id(0)
    tiles = tl.cdiv(rows, ROWS)
    row = program // heads % tiles * ROWS + tl.arange(0, ROWS)
    return (program // heads // tiles).to(tl.int64), (program % heads).to(tl.int64), row


@triton.jit
def merge_part_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr,
    stride_acc_batch, stride_acc_row, stride_acc_head, stride_out_batch, stride_out_row, stride_out_head,
    stride_max_batch, stride_max_head, stride_lse_batch, stride_lse_head, rows, heads,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """row_sum has the strides of row_max. FIRST: there is nothing to join yet."""
    batch, head, row = _place(rows, heads, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    statistics = batch * stride_max_batch + head * stride_max_head + row
    lse = tl.load(lse_ptr + batch * stride_lse_batch + head * stride_lse_head + row, mask=inside, other=0.0)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    wide = row.to(tl.int64)[:, None]
    acc_pointers = acc_ptr + batch * stride_acc_batch + head * stride_acc_head + wide * stride_acc_row + column[None, :]
    out_pointers = out_ptr + batch * stride_out_batch + head * stride_out_head + wide * stride_out_row + column[None, :]
    if FIRST:
        tl.store(max_ptr + statistics, lse, mask=inside)
        tl.store(sum_ptr + statistics, tl.where(lse == float("-inf"), 0.0, 1.0), mask=inside)
        tl.store(acc_pointers, tl.load(out_pointers, mask=mask, other=0.0).to(tl.float32), mask=mask)
        return
    row_max = tl.load(max_ptr + statistics, mask=inside, other=0.0)
    row_sum = tl.load(sum_ptr + statistics, mask=inside, other=0.0)
    largest = tl.maximum(row_max, lse)
    # While a row has seen nothing, the difference is taken against 0: -inf - -inf would be NaN.
    against = tl.where(largest == float("-inf"), 0.0, largest)
    decay = tl.exp2((row_max - against) * LOG2_E)  # [M]
    weight = tl.exp2((lse - against) * LOG2_E)
    # Several threads hold the same row: all of them have read it before one writes.
    tl.debug_barrier()
    tl.store(max_ptr + statistics, largest, mask=inside)
    tl.store(sum_ptr + statistics, row_sum * decay + weight, mask=inside)
    acc = tl.load(acc_pointers, mask=mask, other=0.0)  # [M, D]
    out = tl.load(out_pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(acc_pointers, acc * decay[:, None] + out * weight[:, None], mask=mask)


@triton.jit
def merge_finish_kernel(
    acc_ptr, max_ptr, sum_ptr, out_ptr, lse_ptr,
    stride_acc_batch, stride_acc_row, stride_acc_head, stride_max_batch, stride_max_head, rows, heads,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out and lse are contiguous."""
    batch, head, row = _place(rows, heads, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = row < rows
    statistics = batch * stride_max_batch + head * stride_max_head + row
    row_max = tl.load(max_ptr + statistics, mask=inside, other=0.0)
    row_sum = tl.load(sum_ptr + statistics, mask=inside, other=1.0)
    total = tl.where(row_sum == 0.0, 1.0, row_sum)
    # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
    infinite = (row_sum == 0.0) | (row_max == float("inf"))
    tl.store(
        lse_ptr + (batch * heads + head) * rows + row, tl.where(infinite, row_max, row_max + tl.log(total)), inside
    )
    mask = inside[:, None] & (column < WIDTH)[None, :]
    wide = row.to(tl.int64)[:, None]
    acc_pointers = acc_ptr + batch * stride_acc_batch + head * stride_acc_head + wide * stride_acc_row + column[None, :]
    acc = tl.load(acc_pointers, mask=mask, other=0.0)  # [M, D]
    out_pointers = out_ptr + ((batch * rows + wide) * heads + head) * WIDTH + column[None, :]
    tl.store(out_pointers, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


# --- launches ---------------------------------------------------------------------------------------------------------


@launched(Tensor, addresses=lambda inputs: (*map(misalignment, inputs),))
def forward(inputs: Any, spec: SoftmaxSpec, *, at: tuple[int, int], device: torch.device) -> Pipeline:
    """The softmax of a contiguous x; a mask has any strides."""
    return _pipeline("forward", inputs, at, spec, device)


@launched(Tensor)
def backward(given: Any, spec: SoftmaxSpec, *, at: int, device: torch.device) -> Pipeline:
    """The gradient of x, of contiguous tensors."""
    return _pipeline("backward", given, (at, 0), spec, device)


def _pipeline(
    step: str, tensors: Any, misalignments: tuple[int, int], spec: SoftmaxSpec, device: torch.device
) -> Pipeline:
    """`tensors`: the layouts of those of the step; `misalignments` of the scores, and of the mask."""
    forward, (shape, _, dtype) = step == "forward", tensors[0]
    mask = tensors.mask if forward else None
    batch, heads, seq_q, seq_k = shape
    rows = batch * heads * seq_q
    check_rows("x", rows)
    config = held_row_tile(max(seq_k, 1), device_facts(device))
    *of_rows, of_columns = (0, 0, 0, 0) if mask is None else mask.strides
    mask_multiple = power_of_two_factor(misalignments[1], *of_rows)
    tensor = pointer_to(dtype, power_of_two_factor(misalignments[0]))
    parameters = {
        **dict.fromkeys(("x_ptr", "out_ptr", "dout_ptr", "dx_ptr"), tensor),
        "mask_ptr": pointer_to(torch.uint8, mask_multiple),
        **stride_parameters("mask", dict(zip(("batch", "head", "row"), of_rows)), mask_multiple),
        "rows": int32(rows),
        "heads": int32(max(heads, 1)),
        "seq_q": int32(seq_q),
        "scale": float32(spec.scale),
    }
    constants = {
        "MASK_COLUMNS": of_columns,
        "WIDTH": seq_k,
        **named_constants(config),
        "CAUSAL": spec.causal,
        "HAS_MASK": mask is not None,
    }
    programs = -(-rows // config.rows) if seq_k else 0
    kernel = Kernel(
        softmax_forward_kernel if forward else softmax_backward_kernel, parameters, constants, programs,
        **config.compiled,
    )  # fmt: skip
    return Pipeline(device, {step: kernel}, tensors, {"out" if forward else "dx": contiguous(shape, dtype)})


#: Elements of a tile of the merge: 32 for each thread of 4 warps, eight loads of 16 bytes of float32.
_MERGED_ELEMENTS, _MERGE_WARPS = 4096, 4


@launched(None, addresses=lambda part: misalignment(part.acc, part.out))
def merge_part(part: Any, spec: IsFirst, *, at: int, device: torch.device) -> Pipeline:
    """Joins a part to a running merge, in place."""
    return _merge_pipeline("first" if spec.first else "next", part, at, {}, device)


@launched(Merged, addresses=lambda merge: misalignment(merge.acc))
def merge_finish(merge: Any, spec: OutputType, *, at: int, device: torch.device) -> Pipeline:
    """The result of a running merge."""
    shapes = {"out": contiguous(merge.acc.shape, spec.dtype), "lse": contiguous(merge.row_max.shape, torch.float32)}
    return _merge_pipeline("finish", merge, at, shapes, device)


def _merge_pipeline(
    step: str, tensors: tuple[Layout, ...], misalignment: int, outputs: dict[str, Layout], device: torch.device
) -> Pipeline:
    """`tensors`: the layouts of `MergedPart`, or of `Merge`, whose result are the `outputs`; `misalignment` of acc and
    out."""
    acc, row_max, _, out, lse = (*tensors, *outputs.values())
    batch, rows, heads, width = acc.shape
    check_rows("acc", rows)
    tile_rows, columns = merge_tile(width)
    programs = batch * heads * -(-rows // tile_rows) if width else 0
    check_programs("acc", programs)
    # A result goes to contiguous memory.
    of_columns = acc.strides[:3] if step == "finish" else (*acc.strides[:3], *out.strides[:3])
    alignment, multiple = power_of_two_factor(misalignment), power_of_two_factor(*of_columns)
    dimensions = "batch", "row", "head"
    parameters = {
        "acc_ptr": pointer_to(torch.float32, alignment),
        "out_ptr": pointer_to(out.dtype, alignment),
        **dict.fromkeys(("max_ptr", "sum_ptr", "lse_ptr"), pointer_to(torch.float32)),
        **stride_parameters("acc", dict(zip(dimensions, acc.strides)), multiple),
        **stride_parameters("out", dict(zip(dimensions, out.strides)), multiple),
        **stride_parameters("max", dict(zip(("batch", "head"), row_max.strides))),
        **stride_parameters("lse", dict(zip(("batch", "head"), lse.strides))),
        "rows": int32(rows),
        "heads": int32(heads),
    }
    constants = {"WIDTH": width, "ROWS": tile_rows, "BLOCK_D": columns, "FIRST": step == "first"}
    function = merge_finish_kernel if step == "finish" else merge_part_kernel
    num_warps = max(1, _MERGE_WARPS * 32 // device_facts(device).warp_size)
    buffers = {"max_ptr": "row_max", "sum_ptr": "row_sum"}
    kernel = Kernel(function, parameters, constants, programs, buffers, num_warps)
    return Pipeline(device, {step: kernel}, tensors, outputs)


def merge_tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = max(16, 1 << (width - 1).bit_length())
    return max(1, _MERGED_ELEMENTS // columns), columns
