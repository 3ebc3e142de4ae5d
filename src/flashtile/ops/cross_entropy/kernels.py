"""The backend for GPUs: the cross-entropy kernels, how they are cut, and their launches.

Shapes: a tile is `[G, VECTOR]`, G = BLOCK_N / VECTOR groups of neighbouring columns; each group lies in one thread,
which loads it at once. Logits are `[rows, WIDTH]`, rows at any distance.

A row of an odd number of columns begins anywhere. Its first tile begins at the last multiple of 16 bytes at or before
its first element, so that every load is a whole vector. The vectors at both ends also hold elements of neighbouring
rows, or of nothing: what lies in 16 aligned bytes with an element that is there can be read. They are masked out in
registers, in the first and the last tile alone. See `ops/cross_entropy/spec.py` for the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile._backends.alignment import misalignment, power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import DeviceFacts, device_facts
from flashtile._backends.launch import (
    Parameter,
    float32,
    int32,
    int64,
    named_constants,
    plan_cache,
    pointer_to,
)
from flashtile._backends.pipeline import Kernel, Pipeline, launched
from flashtile._backends.tuned import choose
from flashtile.ops.common.checks import check_rows
from flashtile.ops.common.kernels import tanh
from flashtile.ops.cross_entropy.spec import (
    CrossEntropySpec,
    Results,
    Statistics,
    gradient_strides,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_start(offset, lead, VECTOR: tl.constexpr):
    """How far a row's first element lies after the vector that holds it begins; `lead` is that of the tensor's."""
    return ((offset + lead) % VECTOR).to(tl.int32)


@triton.jit
def tile_columns(tile, start, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr):
    """The columns of a tile: first of each group `[G, 1]`, and all `[G, VECTOR]`; negative before the row."""
    group = (tile * BLOCK_N + tl.arange(0, BLOCK_N // VECTOR) * VECTOR)[:, None]
    return group, group + tl.arange(0, VECTOR)[None, :] - start


@triton.jit
def load_tile(row_ptr, group, end, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a row as float32 `[G, VECTOR]`. `row_ptr` is at the start of a vector, `end` counts from there."""
    pointers = row_ptr + group + tl.arange(0, VECTOR)[None, :]
    if WHOLE:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=group < end, other=0.0).to(tl.float32)


class Cap(NamedTuple):
    """What makes scores of logits under a soft cap."""

    logit_scale: Any
    softcap: Any


class ClassWeights(NamedTuple):
    """Pointer to the weights of all classes, and the class of the first column."""

    pointer: Any
    first: Any


class Row(NamedTuple):
    """A row of logits: pointer to the vector that holds its first element, how far after it the row begins, what
    differences of logits are multiplied by in the exponent, and what differences are taken from."""

    pointer: Any
    start: Any
    scale: Any
    anchor: Any


class Running(NamedTuple):
    """What each place of a tile `[G]` keeps of what passes it: the largest logit, the sum of exponentials, and for
    smoothing the sums of differences from the anchor and of class weights."""

    max: Any
    sum: Any
    total: Any
    weight: Any


@triton.jit
def capped_logits(x, cap):
    """Scores under a soft cap; without one (None), the logits as they are."""
    if cap is not None:
        x = cap.softcap * tanh(x * (cap.logit_scale / cap.softcap), True)
    return x


@triton.jit
def online_step(x, place_max, place_sum, scale):
    """Joins a tile `[G, VECTOR]` to the running maximum and sum of exp2 `[G]` of each place. Products come after
    differences, because that of two rounded products would be as wrong as large logits are large."""
    larger = tl.maximum(place_max, tl.max(x, axis=1))
    against = tl.where(larger == float("-inf"), 0.0, larger)
    added = tl.sum(tl.exp2((x - against[:, None]) * scale), axis=1)
    return larger, place_sum * tl.exp2((place_max - against) * scale) + added


@triton.jit
def add_tile(
    row, tile, running, cap, class_weights, WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr, SMOOTHING: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Joins a tile of a row to what is `Running`. Unless it is WHOLE, it has columns that are not of this row."""
    group, columns = tile_columns(tile, row.start, BLOCK_N, VECTOR)
    inside = (columns >= 0) & (columns < WIDTH)
    total, weight = running.total, running.weight
    x = capped_logits(load_tile(row.pointer, group, row.start + WIDTH, VECTOR, WHOLE), cap) * SIGN
    if SMOOTHING:
        differences = x - row.anchor
        if not WHOLE:
            differences = tl.where(inside, differences, 0.0)
        if class_weights is not None:
            pointers = class_weights.pointer + class_weights.first + columns
            if WHOLE:
                weights = tl.load(pointers)
            else:
                weights = tl.load(pointers, mask=inside, other=0.0)
            differences *= weights
            weight += tl.sum(weights, axis=1)
        total += tl.sum(differences, axis=1)
    if not WHOLE:
        x = tl.where(inside, x, float("-inf"))
    place_max, place_sum = online_step(x, running.max, running.sum, row.scale)
    return Running(place_max, place_sum, total, weight)


@triton.jit
def read_row(
    logits_ptr, offset, lead, factor, cap, class_weights, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr, SMOOTHING: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Pivot and exp_sum of a row and, with smoothing, the sum of its logits' differences from the pivot, each times its
    class weight. Each logit is read once."""
    # With the sign of the factor, logits have the order of scores: the factor itself is part of the exponent's. That is
    # not 0, which would make NaN of the columns outside of the row.
    scale = factor * (SIGN * LOG2_E)
    if SIGN == 0:
        scale = LOG2_E
    ALIGNMENT: tl.constexpr = VECTOR * logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    start = row_start(offset, lead, VECTOR)
    row_ptr = tl.multiple_of(logits_ptr + (offset - start), ALIGNMENT)
    G: tl.constexpr = BLOCK_N // VECTOR
    nothing = tl.zeros([G], tl.float32)
    running = Running(tl.full([G], float("-inf"), tl.float32), nothing, nothing, nothing)
    anchor = 0.0
    if SMOOTHING:
        # Until the largest logit is known, differences are taken from the first one: a sum of the logits themselves is
        # as wrong as their common offset is large.
        anchor = capped_logits(tl.load(logits_ptr + offset).to(tl.float32), cap) * SIGN
        anchor = tl.where(tl.abs(anchor) < float("inf"), anchor, 0.0)
    row = Row(row_ptr, start, scale, anchor)
    running = add_tile(
        row, 0, running, cap, class_weights, WHOLE=False, WIDTH=WIDTH, BLOCK_N=BLOCK_N, VECTOR=VECTOR,
        SMOOTHING=SMOOTHING, SIGN=SIGN,
    )  # fmt: skip
    last = (start + WIDTH - 1) // BLOCK_N
    for tile in range(1, last):
        running = add_tile(
            row, tile, running, cap, class_weights, WHOLE=True, WIDTH=WIDTH, BLOCK_N=BLOCK_N, VECTOR=VECTOR,
            SMOOTHING=SMOOTHING, SIGN=SIGN,
        )  # fmt: skip
    if last > 0:
        running = add_tile(
            row, last, running, cap, class_weights, WHOLE=False, WIDTH=WIDTH, BLOCK_N=BLOCK_N, VECTOR=VECTOR,
            SMOOTHING=SMOOTHING, SIGN=SIGN,
        )  # fmt: skip
    row_max = tl.max(running.max, axis=0)
    against = tl.where(row_max == float("-inf"), 0.0, row_max)
    exp_sum = tl.sum(running.sum * tl.exp2((running.max - against) * scale), axis=0)
    weight = tl.sum(running.weight, axis=0) if class_weights is not None else WIDTH
    total = tl.sum(running.total, axis=0) + weight * (anchor - against)
    return row_max * SIGN, exp_sum, total * SIGN


@triton.jit
def log_sum_exp(pivot, exp_sum, factor):
    return pivot * factor + tl.log2(exp_sum) * LN_2


@triton.jit
def row_shares(weights_ptr, label, known, vocabulary, smoothing, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr):
    """The factors that the loss of a row has on the score of its label, and on lse."""
    of_label, of_lse = 1.0 - smoothing, 1.0
    if WEIGHTED:
        of_label *= tl.load(weights_ptr + tl.where(known, label, 0), mask=known, other=0.0)
        of_lse = of_label
        if SMOOTHING:
            of_lse += smoothing * (tl.load(weights_ptr + vocabulary) / vocabulary)
    return of_label, of_lse


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, labels_ptr, weights_ptr, loss_ptr, z_ptr, normaliser_ptr, stride_row, lead, ignore_index, first,
    vocabulary, logit_scale, factor, softcap, smoothing, lse_square_scale, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr, SMOOTHING: tl.constexpr, SIGN: tl.constexpr, PARTIAL: tl.constexpr, HAS_Z: tl.constexpr,
    CAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One row per program. With PARTIAL, what it stores in the place of loss and z is the label's logit and the sum of
    differences from the pivot, to be put together with those of other columns."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    loss, z, pivot, exp_sum = 0.0, 0.0, 0.0, 1.0
    cap = None
    if CAPPED:
        cap = Cap(logit_scale, softcap)
    class_weights = None
    if WEIGHTED:
        class_weights = ClassWeights(weights_ptr, first)
    if label != ignore_index:  # the row of a label that does not count is not read
        offset = row * stride_row
        pivot, exp_sum, total = read_row(
            logits_ptr, offset, lead, factor, cap, class_weights, WIDTH=WIDTH, BLOCK_N=BLOCK_N, VECTOR=VECTOR,
            SMOOTHING=SMOOTHING, SIGN=SIGN,
        )  # fmt: skip
        column = label - first
        here = (column >= 0) & (column < WIDTH)
        target = tl.load(logits_ptr + offset + tl.where(here, column, 0), mask=here, other=0.0)
        target = capped_logits(target.to(tl.float32), cap)
        if PARTIAL:
            loss, z = target, total
        else:
            lse = log_sum_exp(pivot, exp_sum, factor)
            z = lse_square_scale * lse * lse
            known = (label >= 0) & (label < vocabulary)
            of_label, of_lse = row_shares(weights_ptr, label, known, vocabulary, smoothing, SMOOTHING, WEIGHTED)
            loss = of_lse * (tl.log2(exp_sum) * LN_2) - of_label * ((target - pivot) * factor) + z
            if SMOOTHING:
                loss -= smoothing * (total * factor / vocabulary)
            loss, z = tl.where(known, loss, float("nan")), tl.where(known, z, float("nan"))
    tl.store(loss_ptr + row, loss)
    if HAS_Z:
        tl.store(z_ptr + row, z)
    tl.store(normaliser_ptr + 2 * row, pivot)
    tl.store(normaliser_ptr + 2 * row + 1, exp_sum)


@triton.jit
def cross_entropy_reduce_kernel(
    loss_ptr, z_ptr, labels_ptr, weights_ptr, loss_out_ptr, z_out_ptr, scale_ptr, rows, ignore_index, vocabulary,
    BLOCK_N: tl.constexpr, MEAN: tl.constexpr, HAS_Z: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One program: the sum of all rows' losses, in the same order in every run, or their mean."""
    loss_sum = tl.zeros([BLOCK_N], tl.float32)
    z_sum = tl.zeros([BLOCK_N], tl.float32)
    count = tl.zeros([BLOCK_N], tl.float32 if WEIGHTED else tl.int32)
    for first in range(0, rows, BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        inside = row < rows
        loss_sum += tl.load(loss_ptr + row, mask=inside, other=0.0)
        if HAS_Z:
            z_sum += tl.load(z_ptr + row, mask=inside, other=0.0)
        if MEAN:
            labels = tl.load(labels_ptr + row, mask=inside, other=0).to(tl.int64)
            counts = inside & (labels != ignore_index)
            if WEIGHTED:
                counts &= (labels >= 0) & (labels < vocabulary)
                count += tl.load(weights_ptr + labels, mask=counts, other=0.0)
            else:
                count += counts.to(tl.int32)
    loss, z, scale = tl.sum(loss_sum, axis=0), tl.sum(z_sum, axis=0), 1.0
    if MEAN:
        scale = 1.0 / tl.sum(count, axis=0).to(tl.float32)
        tl.store(scale_ptr, scale)
    tl.store(loss_out_ptr, loss * scale)
    if HAS_Z:
        tl.store(z_out_ptr, z * scale)


@triton.jit
def cross_entropy_backward_kernel(
    dloss_ptr, scale_ptr, logits_ptr, labels_ptr, weights_ptr, normaliser_ptr, dlogits_ptr, stride_dloss, stride_row,
    stride_drow, lead, ignore_index, first, vocabulary, logit_scale, factor, softcap, smoothing, lse_square_scale,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr, TILES: tl.constexpr, SMOOTHING: tl.constexpr,
    HAS_SCALE: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One tile of a row per program; dlogits may be the logits: what is written was read by the same thread before."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    offset = row * stride_row
    ALIGNMENT: tl.constexpr = VECTOR * logits_ptr.dtype.element_ty.primitive_bitwidth // 8
    start = row_start(offset, lead, VECTOR)
    group, columns = tile_columns(tile, start, BLOCK_N, VECTOR)
    label = tl.load(labels_ptr + row).to(tl.int64)
    dlogits = tl.zeros([BLOCK_N // VECTOR, VECTOR], tl.float32)
    if label != ignore_index:
        pivot, exp_sum = tl.load(normaliser_ptr + 2 * row), tl.load(normaliser_ptr + 2 * row + 1)
        g = tl.load(dloss_ptr + row * stride_dloss) * logit_scale
        if HAS_SCALE:
            g *= tl.load(scale_ptr)
        known = (label >= 0) & (label < vocabulary)
        g = tl.where(known, g, float("nan"))
        row_ptr = tl.multiple_of(logits_ptr + (offset - start), ALIGNMENT)
        x = load_tile(row_ptr, group, start + WIDTH, VECTOR, False)
        if CAPPED:
            x = capped_logits(x, Cap(logit_scale, softcap))
        lse = log_sum_exp(pivot, exp_sum, factor)
        of_label, of_lse = row_shares(weights_ptr, label, known, vocabulary, smoothing, SMOOTHING, WEIGHTED)
        of_exponentials = g * (of_lse + 2.0 * lse_square_scale * lse) / exp_sum
        dlogits = tl.exp2((x - pivot) * (factor * LOG2_E)) * of_exponentials
        if SMOOTHING and WEIGHTED:
            inside = (columns >= 0) & (columns < WIDTH)
            weights = tl.load(weights_ptr + first + columns, mask=inside, other=0.0)
            dlogits -= g * (smoothing / vocabulary) * weights
        elif SMOOTHING:
            dlogits -= g * (smoothing / vocabulary)
        at = tl.maximum(tl.minimum(label - first, WIDTH), -1).to(tl.int32)  # -1 is masked out, WIDTH too
        dlogits -= tl.where(columns == at, g * of_label, 0.0)
        if CAPPED:
            dlogits *= 1.0 - (x / softcap) * (x / softcap)
    out_ptr = tl.multiple_of(dlogits_ptr + (row * stride_drow - start), ALIGNMENT)
    pointers = out_ptr + group + tl.arange(0, VECTOR)[None, :]
    value = dlogits.to(dlogits_ptr.dtype.element_ty)
    if (tile * BLOCK_N >= start) & ((tile + 1) * BLOCK_N <= start + WIDTH):
        tl.store(pointers, value)
    else:
        # Vectors that are of this row as a whole, and what is left at its ends.
        whole = (group >= start) & (group + VECTOR <= start + WIDTH)
        tl.store(pointers, value, mask=whole)
        tl.store(pointers, value, mask=(columns >= 0) & (columns < WIDTH) & (whole == 0))


@triton.jit
def multiply_kernel(gradient_ptr, factor_ptr, size, BLOCK_N: tl.constexpr):
    """Multiplies a contiguous gradient by a scalar in place; by 1, the gradient of most losses, nothing is touched."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK_N
        pointers = gradient_ptr + first + tl.arange(0, BLOCK_N)
        if first + BLOCK_N <= size:
            value = tl.load(pointers).to(tl.float32) * factor
            tl.store(pointers, value.to(gradient_ptr.dtype.element_ty))
        else:
            inside = tl.arange(0, BLOCK_N) < size - first
            value = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(pointers, value.to(gradient_ptr.dtype.element_ty), mask=inside)


# --- how the kernels are cut, and their launches ---------------------------------------------------------------------

#: The numbers follow from bytes in flight: a thread of the forward has four loads of 16 bytes in a tile of the widest
#: kind, and programs are so small that many are on a multiprocessor at once, where one's loads cover another's
#: arithmetic.
_TILE_BYTES, _WARP_BYTES = 8192, 2048

#: Columns of a tile, and warps, of the sum over all rows, and of the multiplication of a gradient.
REDUCE = (4096, 8)
MULTIPLY = (4096, 4)


class TileConfig(NamedTuple):
    """How a kernel is cut. `block_n`: columns of a tile. `vector`: columns that one thread loads at once. `num_warps`:
    warps of a program."""

    block_n: int
    vector: int
    num_warps: int


class TileKey(NamedTuple):
    """What the cut looks at.

    Attributes:
        width: columns of a row.
        itemsize: bytes of a logit.
        vector: columns that can be read and written at once, at most 16 bytes.
        backward: of the kernel of the gradient.
    """

    width: int
    itemsize: int
    vector: int
    backward: bool


def tile_config(key: TileKey, device: DeviceFacts) -> TileConfig:
    """The cut of a kernel."""
    return choose("cross_entropy", device, key, _shipped_config(key, device))


def _shipped_config(key: TileKey, device: DeviceFacts) -> TileConfig:
    width, itemsize, vector, _ = key
    reach = 1 << (width + vector - 2).bit_length()
    block_n = max(32 * vector, min(reach, _TILE_BYTES // itemsize))
    num_warps = max(1, block_n // (_WARP_BYTES // itemsize))
    return TileConfig(block_n, vector, max(1, num_warps * 32 // device.warp_size))


def _gradient_registers(vector_bytes: int, weighted: bool, spec: CrossEntropySpec) -> int | None:
    """Registers of a thread of the gradient; None: as many as ptxas takes, because fewer would spill. With fewer than
    those 95, more programs share a multiprocessor.

    TB/s of bfloat16 on an H200, with 95 registers, with 72, and with half of the elements to a thread, which takes 48:
    8,192 × 50,257 3.31, 3.88 and 3.61, × 128,256 3.52, 4.07 and 3.82, 16,384 × 32,000 4.04, 4.04 and 3.66.
    """
    if vector_bytes < 8 or (weighted and spec.label_smoothing):
        return None
    return 80 if weighted or spec.label_smoothing or spec.softcap else 72


#: Statistics of a row, and sums of them.
_STATISTICS = pointer_to(torch.float32)
#: The parameter that is not called as its tensor.
_WEIGHTS = {"weights_ptr": "class_weights"}


@launched(Results, addresses=lambda inputs: misalignment(inputs.logits))
def forward(inputs: Any, spec: CrossEntropySpec, *, at: int, device: torch.device) -> Pipeline:
    """The losses of logits with contiguous rows."""
    return _forward_pipeline(inputs, at, False, spec, device)


@launched(Statistics, addresses=lambda inputs: misalignment(inputs.logits))
def read(inputs: Any, spec: CrossEntropySpec, *, at: int, device: torch.device) -> Pipeline:
    """The statistics of the columns that are here."""
    return _forward_pipeline(inputs, at, True, spec, device)


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient by a scalar, in place, in float32 whatever its dtype."""
    _multiply_pipeline(gradient.dtype, gradient.numel(), gradient.device).on((gradient, factor))


def _forward_pipeline(
    inputs: Any, misalignment: int, partial: bool, spec: CrossEntropySpec, device: torch.device
) -> Pipeline:
    """`inputs`: layouts of `LossInputs`; `misalignment` of logits; `partial`: of `read`, which wants no losses."""
    logits, labels, weights = inputs
    (rows, width), itemsize = logits.shape, logits.dtype.itemsize
    check_rows("logits", rows)
    config = tile_config(TileKey(width, itemsize, 16 // itemsize, False), device_facts(device))
    parameters = {
        **_parameters(logits.dtype, labels.dtype, spec),
        "stride_row": int64(logits.strides[0]),
        "lead": int32(misalignment // itemsize),
        "rows": int32(rows),
    }
    reduces, mean = not partial and spec.reduction != "none", spec.reduction == "mean"
    constants = {
        "WIDTH": width,
        **named_constants(config),
        **_flags(weights, spec),
        "SIGN": (spec.factor > 0) - (spec.factor < 0),
        "PARTIAL": partial,
        "HAS_Z": partial or spec.z_loss,
        "MEAN": mean,
    }
    names = ("target", "total") if partial else ("losses", "z_losses") if reduces else ("loss", "z_loss")
    losses, of_each = {**dict(zip(("loss_ptr", "z_ptr"), names)), **_WEIGHTS}, contiguous((rows,), torch.float32)
    kernel = Kernel(cross_entropy_forward_kernel, parameters, constants, rows, losses, config.num_warps)
    kernels, normaliser = {"forward": kernel}, contiguous((rows, 2), torch.float32)
    if not reduces:
        outputs = dict(zip(names, (of_each, of_each if partial or spec.z_loss else None)))
        return Pipeline(device, kernels, inputs, {**outputs, "normaliser": normaliser})
    block_n, num_warps = REDUCE
    scalar, constants = contiguous((), torch.float32), {**constants, "BLOCK_N": block_n}
    buffers = {**losses, "loss_out_ptr": "loss", "z_out_ptr": "z_loss"}
    kernels["reduce"] = Kernel(cross_entropy_reduce_kernel, parameters, constants, 1, buffers, num_warps)
    optional = {"z_loss": scalar if spec.z_loss else None, "normaliser": normaliser, "scale": scalar if mean else None}
    scratch = {"losses": rows, "z_losses": rows if spec.z_loss else 0}
    return Pipeline(device, kernels, inputs, {"loss": scalar, **optional}, scratch)


@launched(Tensor, addresses=lambda given: misalignment(given.logits))
def backward(given: Any, spec: CrossEntropySpec, inplace: bool = False, *, at: int, device: torch.device) -> Pipeline:
    """The gradient of logits with contiguous rows; nothing, if it is written to their memory."""
    dloss, scale, logits, labels, weights, _ = given
    (rows, width), itemsize = logits.shape, logits.dtype.itemsize
    strides = logits.strides if inplace else gradient_strides(width, logits.strides[0], itemsize)
    dlogits = Layout(logits.shape, strides, logits.dtype)
    # As many columns as rows of both are equally far from a multiple of. New memory begins at one.
    lead, distance = at // itemsize, logits.strides[0] - dlogits.strides[0]
    vector = min(16 // itemsize, power_of_two_factor(0 if inplace else lead, distance))
    config = tile_config(TileKey(width, itemsize, vector, True), device_facts(device))
    tiles = _tiles(width, config)
    parameters = {
        **_parameters(logits.dtype, labels.dtype, spec),
        "stride_dloss": int64(dloss.strides[0] if dloss.shape else 0),
        "stride_row": int64(logits.strides[0]),
        "stride_drow": int64(dlogits.strides[0]),
        "lead": int32(lead % vector),
    }
    constants = {
        "WIDTH": width,
        **named_constants(config),
        **_flags(weights, spec),
        "TILES": tiles,
        "HAS_SCALE": scale is not None,
    }
    buffers = {**_WEIGHTS, "dlogits_ptr": "logits"} if inplace else _WEIGHTS
    kernel = Kernel(
        cross_entropy_backward_kernel, parameters, constants, rows * tiles, buffers, config.num_warps,
        max_registers=_gradient_registers(vector * itemsize, weights is not None, spec),
    )  # fmt: skip
    return Pipeline(device, {"backward": kernel}, given, {"dlogits": None if inplace else dlogits})


@plan_cache
def _multiply_pipeline(dtype: torch.dtype, size: int, device: torch.device) -> Pipeline:
    block_n, num_warps = MULTIPLY
    # The gradient begins where its memory was allocated.
    parameters = {"gradient_ptr": pointer_to(dtype, 16), "factor_ptr": _STATISTICS, "size": int64(size)}
    kernel = Kernel(multiply_kernel, parameters, {"BLOCK_N": block_n}, -(-size // block_n), num_warps=num_warps)
    return Pipeline(device, {"multiply": kernel}, ["gradient", "factor"], {})


def _flags(weights: Layout | None, spec: CrossEntropySpec) -> dict[str, bool]:
    return {"SMOOTHING": spec.label_smoothing > 0, "CAPPED": spec.softcap > 0, "WEIGHTED": weights is not None}


def _parameters(dtype: torch.dtype, label_dtype: torch.dtype, spec: CrossEntropySpec) -> dict[str, Parameter]:
    """The parameters that the kernels share. Kernels find out the alignment of addresses and strides."""
    statistics = ("weights", "loss", "z", "normaliser", "dloss", "scale", "loss_out", "z_out")
    return {
        **dict.fromkeys(("logits_ptr", "dlogits_ptr"), pointer_to(dtype)),
        **dict.fromkeys((f"{name}_ptr" for name in statistics), _STATISTICS),
        "labels_ptr": pointer_to(label_dtype),
        "ignore_index": int64(spec.ignore_index),
        "first": int32(spec.first),
        "vocabulary": int32(spec.vocabulary),
        "logit_scale": float32(spec.logit_scale),
        "factor": float32(spec.factor),
        "softcap": float32(spec.softcap),
        "smoothing": float32(spec.label_smoothing),
        "lse_square_scale": float32(spec.lse_square_scale),
    }


def _tiles(width: int, config: TileConfig) -> int:
    """Tiles of a row, wherever within a vector it begins."""
    return -(-(width + config.vector - 1) // config.block_n)
