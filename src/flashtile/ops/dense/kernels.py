"""The backend for GPUs between the matrix products: activation, its backward with the sum over rows, and sums over
rows; how the kernels are cut, and their launches.

Shapes: M = ROWS rows of a tile, N = BLOCK_N columns of a tile; hidden and dhidden are matrices `[rows, WIDTH]`, pre and
dpre too, gated `[rows, 2 · WIDTH]`: values in the first half of a row, gates in the second. All are contiguous. See
`ops/dense/spec.py` for the formulas.

Sums over rows: programs stay, each with a strip of N columns, and walk over tiles of rows in steps of `splits`. Each
stores its part in a row of `[splits, columns]`, which one more launch adds up in order: no atomics, and the same result
in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import DeviceFacts, device_facts, multiprocessors
from flashtile._backends.launch import Parameter, int32, named_constants, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.kernels import reduce_partial
from flashtile.ops.common.tiles import REDUCE, RowTile
from flashtile.ops.dense.spec import NO_ACTIVATION, ActivationGradients, ActivationSpec, Wanted

LOG2_E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
#: gelu_tanh(x) = x · sigmoid(u) with u = x · (GELU_LINEAR + GELU_CUBIC · x²), for 1 + tanh(u / 2) = 2 · sigmoid(u).
GELU_LINEAR = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.044715 * 1.5957691216057308)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def gelu_sigmoid(x):
    # The factor of exp2 is in the constants.
    return 1.0 / (1.0 + tl.exp2(x * (-LOG2_E * GELU_LINEAR - LOG2_E * GELU_CUBIC * (x * x))))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of float32 x. Comparisons are such that NaN stays."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == "squared_relu":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        return x * gelu_sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "gelu")
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))


@triton.jit
def derivative(upstream, x, ACTIVATION: tl.constexpr):
    """The gradient of x from that of its activation, float32. No gradient passes where relu is 0, whatever it is."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, upstream)
    elif ACTIVATION == "squared_relu":
        return tl.where(x <= 0.0, 0.0, 2.0 * upstream * x)
    elif ACTIVATION == "silu":
        s = sigmoid(x)
        value = x * s
        return upstream * (s + (value - value * s))
    elif ACTIVATION == "gelu_tanh":
        s = gelu_sigmoid(x)
        value = x * s  # before the slope: far from 0 that is large, and the value 0
        return upstream * (s + (value - value * s) * (GELU_LINEAR + 3.0 * GELU_CUBIC * (x * x)))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        density = INVERSE_SQRT_2_PI * tl.exp2(x * x * (-0.5 * LOG2_E))
        return upstream * (0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * density)


@triton.jit
def tile_places(row, columns, rows, WIDTH: tl.constexpr, GATED: tl.constexpr):
    """Offsets of a tile in hidden and in pre, int64 `[M, N]`, and which of its elements exist."""
    row_start = row.to(tl.int64)[:, None] * WIDTH
    inside = (row < rows)[:, None] & (columns < WIDTH)[None, :]
    if GATED:
        return row_start + columns[None, :], 2 * row_start + columns[None, :], inside
    else:
        return row_start + columns[None, :], row_start + columns[None, :], inside


@triton.jit
def activate_kernel(
    pre_ptr, hidden_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    strips: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // strips * ROWS + tl.arange(0, ROWS)  # [M]
    columns = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    hidden_places, pre_places, inside = tile_places(row, columns, rows, WIDTH, GATED)
    pre = tl.load(pre_ptr + pre_places, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(pre_ptr + pre_places + WIDTH, mask=inside, other=0.0).to(tl.float32)
        hidden = pre * activated(gate, ACTIVATION)
    else:
        hidden = activated(pre, ACTIVATION)
    tl.store(hidden_ptr + hidden_places, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activate_backward_kernel(
    dhidden_ptr, pre_ptr, dpre_ptr, hidden_ptr, partial_ptr, rows, splits, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    SUMS_BIAS: tl.constexpr, STORES_HIDDEN: tl.constexpr,
):  # fmt: skip
    strips: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    split = tl.program_id(0) // strips
    columns = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    dbias = tl.zeros([ROWS, BLOCK_N], tl.float32)
    dbias_gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(split, tl.cdiv(rows, ROWS), splits, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)  # [M]
        hidden_places, pre_places, inside = tile_places(row, columns, rows, WIDTH, GATED)
        dhidden = tl.load(dhidden_ptr + hidden_places, mask=inside, other=0.0).to(tl.float32)
        pre = tl.load(pre_ptr + pre_places, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(pre_ptr + pre_places + WIDTH, mask=inside, other=0.0).to(tl.float32)
            factor = activated(gate, ACTIVATION)
            hidden = pre * factor
            dgate = derivative(dhidden * pre, gate, ACTIVATION)
            dpre = dhidden * factor
            tl.store(dpre_ptr + pre_places + WIDTH, dgate.to(dpre_ptr.dtype.element_ty), mask=inside)
            dbias_gate += dgate
        else:
            hidden = activated(pre, ACTIVATION)
            dpre = derivative(dhidden, pre, ACTIVATION)
        tl.store(dpre_ptr + pre_places, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
        dbias += dpre
        if STORES_HIDDEN:
            tl.store(hidden_ptr + hidden_places, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)
    if SUMS_BIAS:
        store_partial(partial_ptr, dbias, split, columns, WIDTH, GATED, 0)
        if GATED:
            store_partial(partial_ptr, dbias_gate, split, columns, WIDTH, GATED, WIDTH)


@triton.jit
def store_partial(
    partial_ptr, tile, split, columns, WIDTH: tl.constexpr, GATED: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Stores the sum over the rows of a tile `[M, N]` in row `split` of the partial sums, from column FIRST on."""
    row_width: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    places = split.to(tl.int64) * row_width + FIRST + columns
    tl.store(partial_ptr + places, tl.sum(tile, axis=0), mask=columns < WIDTH)


@triton.jit
def column_sum_kernel(
    x_ptr, partial_ptr, rows, splits, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums of a contiguous x `[rows, WIDTH]`."""
    strips: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    split = tl.program_id(0) // strips
    columns = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for tile in tl.range(split, tl.cdiv(rows, ROWS), splits, num_stages=STAGES):
        places, _, inside = tile_places(tile * ROWS + tl.arange(0, ROWS), columns, rows, WIDTH, False)
        total += tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    store_partial(partial_ptr, total, split, columns, WIDTH, False, 0)


@triton.jit
def reduce_kernel(
    partial_ptr, sum_ptr, splits, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Adds partial sums `[splits, WIDTH]` in their order, N columns to a program."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    reduce_partial(partial_ptr, sum_ptr, columns, splits, WIDTH, ROWS, True)


# --- how the kernels are cut, and their launches ---------------------------------------------------------------------

#: They do little with each element, so what counts is bytes in flight. 16 elements to a thread are two loads of 16
#: bytes for each 16-bit tensor; a multiprocessor of an H200 needs about 40 KB under way to reach the bandwidth of its
#: memory. The numbers follow from that and from registers; none was measured yet. A row of the tile is 1 KB, of 16-bit
#: elements, in one piece.
_ACTIVATE = RowTile(rows=8, block_n=512, num_warps=8)
#: 16 elements to a thread, as many partial sums, and two programs of 128 registers to a multiprocessor.
_BACKWARD = RowTile(rows=16, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)
#: With a gate there is twice as much of each element: 8 to a thread.
_BACKWARD_GATED = RowTile(rows=8, block_n=256, num_warps=8, num_stages=3, programs_per_multiprocessor=2)


def activate_config(width: int, device: DeviceFacts) -> RowTile:
    return _ACTIVATE.narrowed(width).on(device)


def backward_config(width: int, gated: bool, bytes_per_column: int, device: DeviceFacts) -> RowTile:
    """The cut of a kernel that sums over rows of `width` columns, each of `bytes_per_column` to load."""
    config = (_BACKWARD_GATED if gated else _BACKWARD).narrowed(width).on(device)
    # Beside the tiles in flight warps exchange their sums.
    tile = config.rows * config.block_n
    return config.staged(device, tile * bytes_per_column, 4 * tile)


@launched(Tensor)
def activate(given: Any, spec: ActivationSpec, *, at: int, device: torch.device) -> Pipeline:
    """hidden `[R, F]` of contiguous pre."""
    (rows, columns), _, dtype = given.pre
    width = spec.width(columns)
    check_rows("x", rows)
    config = activate_config(max(width, 1), device_facts(device))
    programs = -(-rows // config.rows) * -(-width // config.block_n)
    parameters = {**_tensors(dtype, at), "rows": int32(rows)}
    constants = {**_constants(width, config), "ACTIVATION": spec.activation, "GATED": spec.gated}
    kernel = Kernel(activate_kernel, parameters, constants, programs, **config.compiled)
    return Pipeline(device, {"activate": kernel}, given, {"hidden": contiguous((rows, width), dtype)})


@launched(ActivationGradients)
def activate_backward(given: Any, spec: ActivationSpec, wanted: Wanted, *, at: int, device: torch.device) -> Pipeline:
    """See `spec.ActivationGradients`; dhidden and pre are contiguous."""
    return _sum_pipeline(given, at, spec, wanted, device)


@launched(Tensor)
def column_sum(given: Any, *, at: int, device: torch.device) -> Pipeline:
    """The sum over rows of contiguous x, in its dtype."""
    return _sum_pipeline(given, at, NO_ACTIVATION, Wanted(True, False), device)


def _sum_pipeline(
    given: Any, misalignment: int, spec: ActivationSpec, wanted: Wanted, device: torch.device
) -> Pipeline:
    """The launches of a kernel that may sum over rows. `given`: the layouts of `ActivationUpstream` or `Summed`."""
    shape, _, dtype = given[0]
    rows, width = shape
    check_rows("x", rows)
    sums_alone = spec == NO_ACTIVATION
    tensors = 1 if sums_alone else 3 if spec.gated else 2
    config = backward_config(max(width, 1), spec.gated, tensors * dtype.itemsize, device_facts(device))
    strips, tiles = -(-width // config.block_n), -(-rows // config.rows)
    resident = multiprocessors(device) * config.programs_per_multiprocessor
    splits = min(tiles, max(1, resident // strips)) if strips else 0
    columns = 2 * width if spec.gated else width
    outputs = {
        "dpre": None if sums_alone else contiguous((rows, columns), dtype),
        "dbias": contiguous((columns,), dtype) if wanted.wants_bias else None,
        "hidden": contiguous(shape, dtype) if wanted.wants_hidden else None,
    }
    parameters = {**_tensors(dtype, misalignment), "rows": int32(rows), "splits": int32(splits)}
    constants = {
        **_constants(width, config),
        "STAGES": config.num_stages,
        "ACTIVATION": spec.activation,
        "GATED": spec.gated,
        "SUMS_BIAS": wanted.wants_bias,
        "STORES_HIDDEN": wanted.wants_hidden,
    }
    function = column_sum_kernel if sums_alone else activate_backward_kernel
    kernels = {"main": Kernel(function, parameters, constants, strips * splits, **config.compiled)}
    if wanted.wants_bias:
        parameters = {**_tensors(dtype, 0), "splits": int32(splits)}
        programs = -(-columns // REDUCE.block_n) if splits else 0
        kernels["reduce"] = Kernel(
            reduce_kernel, parameters, _constants(columns, REDUCE), programs, {"sum_ptr": "dbias"}, **REDUCE.compiled
        )
    zeroed = () if splits else ("dbias",)
    scratch = {"partial": splits * columns} if wanted.wants_bias and splits else None
    return Pipeline(device, kernels, given, outputs, scratch, zeroed, unused={"partial"})


def _tensors(dtype: torch.dtype, misalignment: int) -> dict[str, Parameter]:
    """`misalignment`: all addresses modulo 16, put together."""
    names = ("pre_ptr", "hidden_ptr", "dhidden_ptr", "dpre_ptr", "x_ptr", "sum_ptr")
    tensor = pointer_to(dtype, power_of_two_factor(misalignment))
    return {**dict.fromkeys(names, tensor), "partial_ptr": pointer_to(torch.float32, 16)}


def _constants(width: int, config: RowTile) -> dict[str, Any]:
    return {"WIDTH": width, **named_constants(config)}
