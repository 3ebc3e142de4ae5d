"""Modifiers of scores and weights: soft cap, bias, ALiBi, mask, dropout and sinks.

Each has its state, a NamedTuple of one head of one sequence, and its functions side by side in this file; `Modifiers`
and `modified_scores` list those that change scores. A new one gets a NamedTuple and functions here, a field of
`Modifiers`, and a line in `modified_scores`. The state of what a call does not have is None, which costs nothing.

Tiles are `[M, N]`, in the dk/dv kernel (TRANSPOSED) `[N, M]`. `first_row` and `first_column` number the first query and
the first key of a tile within their sequence.

A user's function of scores is compiled here too. If the gradients of what it reads are summed in a fixed order, the
entries to which a tile adds may be any, and many elements may belong to one, so each thread block has sums of its own,
to which it adds row by row: elements of a row with the same entry are summed first, by comparing all pairs, and one of
them writes. Sums of all thread blocks could take too much memory, so the call comes in waves: launches that follow one
another on the stream, whose thread blocks go on with the sums of those before.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.ops.attention.gpu.score_source import SINE_SOURCE, compiled, derivative_source, function_source
from flashtile.ops.attention.gpu.score_writer import ScoreBounds
from flashtile.ops.attention.gpu.tiles import LOG2_E
from flashtile.ops.common.kernels import kept_words, tanh
from flashtile.ops.common.kernels import tanh as hyperbolic_tangent


class Distance(NamedTuple):
    """The term of one head that depends on the distance (ALiBi): `-slope · |i + diagonal - j|`."""

    slope: Any
    diagonal: Any


class ScoreFunction(NamedTuple):
    """Addresses and sizes of the tensors that a user's score function reads, and where their gradients are added up;
    None where there is nothing of the kind. The function itself is a constant, which no tuple can hold."""

    captured: Any
    sizes: Any
    sums: Any


class TableColumns(NamedTuple):
    """Strides of the columns of bias and mask, in elements; 0 where they broadcast."""

    bias: Any
    mask: Any


class Modifiers(NamedTuple):
    """Modifiers of the scores and weights of one head of one sequence.

    Attributes:
        side, numbers: the side inputs (`parameters`).
        columns: `TableColumns`.
        softcap, function: None without one.
        distance: `load_distance`.
        near_keys: how many keys may be visible, if distances are relative to the nearest of them (`near_diagonal`);
            None if they are as they are.
        dropout_matrix: `dropout_matrix`.
    """

    side: Any
    numbers: Any
    columns: Any
    softcap: Any
    function: Any
    sequence: Any
    head: Any
    distance: Any
    near_keys: Any
    dropout_matrix: Any


@triton.jit
def tile_scores(
    products, scale, first_row, first_column, modifiers, kind, constants, MODIFIED: tl.constexpr,
    PRECISE: tl.constexpr, TRANSPOSED: tl.constexpr, SCORE_FUNCTION: tl.constexpr, BRANCHES: tl.constexpr,
    bias_tile=None,
):  # fmt: skip
    """Scores of a tile of products, -inf where the pattern of a block mask hides them, and the tanh of the soft cap.
    Bands come after them. If nothing changes scores (not MODIFIED), they still lack the scale. `kind`: of the tile,
    in a block mask with patterns. `BRANCHES`: a branch leads around the pattern of a full tile (`apply_pattern` says
    where that is faster). Other arguments as in `modified_scores`."""
    scores, tanh = products, products
    if MODIFIED:
        scores, tanh = modified_scores(
            products, scale, first_row, first_column, modifiers, PRECISE, TRANSPOSED, SCORE_FUNCTION=SCORE_FUNCTION,
            bias_tile=bias_tile,
        )  # fmt: skip
    if modifiers.side.block_patterns is not None:
        if BRANCHES:
            if kind >= 0:
                scores = apply_pattern(scores, modifiers.side, constants, kind, first_row, first_column, TRANSPOSED)
        else:
            scores = apply_pattern(scores, modifiers.side, constants, kind, first_row, first_column, TRANSPOSED)
    return scores, tanh


@triton.jit
def modified_scores(
    products, scale, first_row, first_column, modifiers, PRECISE: tl.constexpr, TRANSPOSED: tl.constexpr,
    SCORE_FUNCTION: tl.constexpr, bias_tile=None,
):  # fmt: skip
    """Scores of a tile of products, and the tanh of the soft cap (the products themselves without one). `PRECISE`: they
    are products of float32 tensors. `SCORE_FUNCTION`: the user's, or None. `bias_tile`: the tile of the bias, where it
    is on chip already."""
    BLOCK_M: tl.constexpr = products.shape[1 if TRANSPOSED else 0]
    BLOCK_N: tl.constexpr = products.shape[0 if TRANSPOSED else 1]
    scores, tanh = capped_scores(products, scale, modifiers.softcap, PRECISE)
    if SCORE_FUNCTION is not None:
        scores = function_scores(scores, first_row, first_column, modifiers, TRANSPOSED, SCORE_FUNCTION)
    if bias_tile is not None:
        scores += bias_tile.to(tl.float32)
    elif modifiers.side.bias is not None:
        # Past the end of the table NaN, so that too small a table is seen; rows past those of q count for nothing.
        tile = load_table(
            modifiers.side.bias, modifiers.numbers.bias, modifiers.columns.bias, modifiers.sequence, modifiers.head,
            first_row, first_column, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, OTHER=float("nan"), TRANSPOSED=TRANSPOSED,
        )  # fmt: skip
        scores += tile.to(tl.float32)
    if modifiers.distance is not None:
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        diagonal = row + modifiers.distance.diagonal
        if modifiers.near_keys is not None:
            diagonal = near_diagonal(row, modifiers.distance, modifiers.near_keys)
        scores -= modifiers.distance.slope * _distances(diagonal, column, TRANSPOSED)
    if modifiers.side.mask is not None:
        shown = load_table(
            modifiers.side.mask, modifiers.numbers.mask, modifiers.columns.mask, modifiers.sequence, modifiers.head,
            first_row, first_column, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, OTHER=0, TRANSPOSED=TRANSPOSED,
        )  # fmt: skip
        scores = tl.where(shown != 0, scores, float("-inf"))
    return scores, tanh


# Soft cap


@triton.jit
def capped_scores(products, scale, softcap, PRECISE: tl.constexpr):
    """`softcap · tanh(scale · products / softcap)` and the tanh; without a soft cap the scaled products and these."""
    tanh = products
    if softcap is not None:
        tanh = hyperbolic_tangent(products * (scale / softcap), PRECISE)
        scores = tanh * softcap
    else:
        scores = products * scale
    return scores, tanh


@triton.jit
def uncapped_gradient(dscores, tanh, modifiers):
    """The gradient in front of the soft cap, from the one behind it."""
    if modifiers.softcap is not None:
        dscores = dscores * (1.0 - tanh * tanh)
    return dscores


# Score functions


@triton.jit
def function_scores(
    scores, first_row, first_column, modifiers, TRANSPOSED: tl.constexpr, SCORE_FUNCTION: tl.constexpr
):  # fmt: skip
    """A tile after the user's function."""
    row, column = _positions(scores, first_row, first_column, TRANSPOSED)
    function = modifiers.function
    return SCORE_FUNCTION(
        scores, batch=modifiers.sequence, head=modifiers.head, q_index=row, k_index=column, first_q=first_row,
        first_k=first_column, captured=function.captured, sizes=function.sizes,
    )  # fmt: skip


@triton.jit
def function_gradient(
    dscores, hidden, tanh, scale, first_row, first_column, modifiers,
    TRANSPOSED: tl.constexpr, SCORE_DERIVATIVE: tl.constexpr,
):  # fmt: skip
    """The gradient in front of the user's function, from the one behind it. Adds the gradients of captured tensors to
    their sums. `hidden`: where the derivative may be anything. `tanh`: as `modified_scores` returns it."""
    scores = tanh * scale
    if modifiers.softcap is not None:
        scores = tanh * modifiers.softcap
    row, column = _positions(dscores, first_row, first_column, TRANSPOSED)
    function = modifiers.function
    return SCORE_DERIVATIVE(
        scores, batch=modifiers.sequence, head=modifiers.head, q_index=row, k_index=column, first_q=first_row,
        first_k=first_column, upstream=dscores, hidden=hidden, captured=function.captured, sizes=function.sizes,
        sums=function.sums,
    )  # fmt: skip


@triton.jit
def _positions(tile, first_row, first_column, TRANSPOSED: tl.constexpr):
    """The numbers of queries and keys of a tile: `[M, 1]` and `[1, N]`, transposed `[1, M]` and `[N, 1]`."""
    if TRANSPOSED:
        row = (first_row + tl.arange(0, tile.shape[1]))[None, :]
        column = (first_column + tl.arange(0, tile.shape[0]))[:, None]
    else:
        row = (first_row + tl.arange(0, tile.shape[0]))[:, None]
        column = (first_column + tl.arange(0, tile.shape[1]))[None, :]
    return row, column


# Bias and mask


@triton.jit
def load_table(
    pointer, numbers, stride_column, sequence, head, first_row, first_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile `[M, N]` of a bias or a mask (`parameters.TableNumbers`), `OTHER` past its end."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    # Wide arithmetic for the first entry; the others need it only once, where the loop stays in their rows.
    corner = tl.cast(sequence, tl.int64) * numbers.stride_batch + tl.cast(head, tl.int64) * numbers.stride_head
    corner += tl.cast(first_row, tl.int64) * numbers.stride_row + tl.cast(first_column, tl.int64) * stride_column
    pointers = (
        pointer
        + corner
        + (row.to(tl.int64) * numbers.stride_row)[:, None]
        + (column.to(tl.int64) * stride_column)[None, :]
    )
    if numbers.rows is not None:
        inside = (first_row + row < numbers.rows)[:, None] & (first_column + column < numbers.columns)[None, :]
        tile = tl.load(pointers, mask=inside, other=OTHER)
    else:
        tile = tl.load(pointers)
    # The tile is read by rows and transposed on chip, because reads by columns are not fetched ahead. Split and join
    # leave it as it is, but make the compiler change the layout first: only then does it fetch into shared memory.
    if TRANSPOSED:
        low, high = tl.split(tl.reshape(tile, (BLOCK_M, BLOCK_N // 2, 2)))
        tile = tl.reshape(tl.join(low, high), (BLOCK_M, BLOCK_N))
        return tl.trans(tile)
    else:
        return tile


# ALiBi


@triton.jit
def load_distance(side, numbers, sequence, head, batch, seq_q, seq_k):
    """`Distance` of one head of one sequence; None without slopes. Rows past the end have slope 0."""
    distance = None
    if side.alibi_slopes is not None:
        place = side.alibi_slopes + sequence * numbers.stride_slopes_batch + head
        slope = tl.load(place, mask=sequence < batch, other=0.0)
        diagonal = seq_k - seq_q
        if numbers.origin.diagonal is not None:
            diagonal += numbers.origin.diagonal
        distance = Distance(slope, diagonal)
    return distance


@triton.jit
def near_diagonal(row, distance, keys):
    """The keys at no distance from some rows, but no farther away than the first or the last key. All keys of such a
    row lie on one side of it: their distances are less by the same number, so weights stay the same, and scores are
    small numbers, which float32 holds exactly enough."""
    return tl.minimum(tl.maximum(row + distance.diagonal, 0), tl.maximum(keys - 1, 0))


@triton.jit
def raised_to_near(statistic, row, modifiers, SIGN: tl.constexpr):
    """A row statistic of scores (natural logarithm) as one relative to `near_diagonal` for SIGN 1, for -1 the other way
    round: one operation, which rounds once."""
    if modifiers.distance is not None:
        apart = apart_from_near(row, modifiers.distance, modifiers.near_keys)
        statistic = tl.fma(apart, SIGN * modifiers.distance.slope, statistic)
    return statistic


@triton.jit
def apart_from_near(row, distance, keys):
    """By how much `near_diagonal` differs from the keys at no distance; None without slopes."""
    apart = None
    if distance is not None:
        apart = tl.abs(row + distance.diagonal - near_diagonal(row, distance, keys)).to(tl.float32)
    return apart


@triton.jit
def moved_near(distance, keys, ROWS: tl.constexpr):
    """`Distance` of the first `ROWS` queries, moved until one of them is at no distance from the nearest key if all
    keys lie on one side of them, and by how much."""
    diagonal = tl.minimum(tl.maximum(distance.diagonal, 1 - ROWS), tl.maximum(keys - 1, 0))
    return Distance(distance.slope, diagonal), tl.abs(distance.diagonal - diagonal).to(tl.float32)


@triton.jit
def _distances(diagonal, column, TRANSPOSED: tl.constexpr):
    """`|diagonal - j|`."""
    if TRANSPOSED:
        distance = diagonal[None, :] - column[:, None]
    else:
        distance = diagonal[:, None] - column[None, :]
    return tl.abs(distance).to(tl.float32)


@triton.jit
def slope_gradients(dscores, row, column, distance, apart=None):
    """A tile's part `[M, N]` of minus the slope's gradient, by rows. `apart`: what `moved_near` took off."""
    distances = _distances(row + distance.diagonal, column, TRANSPOSED=False)
    if apart is not None:
        distances += apart
    return tl.sum(dscores * distances, 1)


@triton.jit
def statistic_column(side, second):
    """The column where the dq kernel stores a row's delta (`second` 1) or lse, relative to the nearest key."""
    column = second
    if side.alibi_slopes is not None:
        column = 3 - 2 * second
    return column


# Sinks


@triton.jit
def start_softmax(modifiers, first_row, batch, BLOCK_M: tl.constexpr):
    """Maximum (log2) and sum of M rows before the first key: those of the sink, if any. Rows past the end have none."""
    if modifiers.side.sinks is not None:
        sink = tl.load(modifiers.side.sinks + modifiers.head, mask=modifiers.sequence < batch, other=float("-inf"))
        sink = raised_to_near(sink, first_row + tl.arange(0, BLOCK_M), modifiers, 1) * LOG2_E
        row_max = tl.full((BLOCK_M,), 0.0, tl.float32) + sink
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    else:
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
    return row_max, row_sum


@triton.jit
def sees_logit_alone(lse, side, head, out_tile):
    """Rows `[M]` that see their sink alone: `out = 0`, and the sink as lse (log2). None without sinks."""
    alone = None
    if side.sinks is not None:
        sink = tl.load(side.sinks + head)
        near = tl.abs(sink * LOG2_E - lse) <= 1e-6 + 1e-6 * tl.abs(lse)
        alone = near & (tl.sum(tl.abs(out_tile.to(tl.float32)), 1) == 0.0)
    return alone


# Dropout


@triton.jit
def dropout_matrix(origin, sequence, head, heads):
    """`sequence · heads + head`, numbered as in the whole call, of which `origin` says where this one lies."""
    if origin.matrix is not None:
        matrix = origin.matrix + sequence * origin.heads + head
    else:
        matrix = sequence * heads + head
    return matrix


@triton.jit
def kept_weights(
    modifiers, first_row, first_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The attention weights that dropout keeps: bool `[M, N]`. Philox scheme as in `flashtile.ops.attention.philox`.

    `ALIGNED`: a tile starts at multiples of 16 in the whole call too, so that one call of Philox serves four elements.
    """
    origin = modifiers.numbers.origin
    threshold = modifiers.numbers.dropout.threshold
    if origin.row is not None:
        first_row += origin.row
        first_column += origin.column
    seed = tl.load(modifiers.side.dropout_seed)
    offset = tl.load(modifiers.side.dropout_seed + 1).to(tl.int32)
    if ALIGNED:
        row_group = (first_row // 2 + tl.arange(0, BLOCK_M // 2))[:, None]
        column_group = (first_column // 2 + tl.arange(0, BLOCK_N // 2))[None, :]
    else:
        row = (first_row + tl.arange(0, BLOCK_M))[:, None]
        column = (first_column + tl.arange(0, BLOCK_N))[None, :]
        row_group = row // 16 * 8 + row % 8
        column_group = column // 16 * 8 + column % 8
    # [M / 2, N / 2], [M, N] where not aligned
    top, bottom = _pair_words(
        seed, offset, modifiers.dropout_matrix, row_group.to(tl.uint32), column_group.to(tl.uint32)
    )
    top_left, top_right, bottom_left, bottom_right = top << 16, top, bottom << 16, bottom
    if ALIGNED:
        top = tl.join(kept_words(top_left, threshold), kept_words(top_right, threshold))
        bottom = tl.join(kept_words(bottom_left, threshold), kept_words(bottom_right, threshold))
        kept = tl.reshape(tl.join(top, bottom), (BLOCK_M // 16, 8, BLOCK_N // 16, 8, 2, 2))
        # (row / 16, row % 8, column / 16, column % 8, column + 8?, row + 8?) -> (rows, columns)
        kept = tl.reshape(tl.permute(kept, (0, 5, 1, 2, 4, 3)), (BLOCK_M, BLOCK_N))
    else:
        left = tl.where(row // 8 % 2 == 0, top_left, bottom_left)
        right = tl.where(row // 8 % 2 == 0, top_right, bottom_right)
        kept = kept_words(tl.where(column // 8 % 2 == 0, left, right), threshold)
    return kept != 0


@triton.jit
def _pair_words(seed, offset, matrix, row_group, column_group):
    """The two words of each call of Philox2x32-7, with the key and the first counters of the matrix."""
    key, first_column, first_row, _ = tl.philox(seed, matrix, matrix * 0, matrix * 0, offset)
    left = column_group ^ first_column.to(tl.uint32)
    right = row_group ^ first_row.to(tl.uint32)
    key = key.to(tl.uint32)
    for _ in tl.static_range(7):
        # Both halves of a product are one instruction this way, and two as a product and its upper half.
        product = left.to(tl.uint64) * 0xD256D193
        left = (product >> 32).to(tl.uint32) ^ key ^ right
        right = product.to(tl.uint32)
        key += 0x9E3779B9
    return left, right


#: As in `flashtile.ops.attention.tile_lists`.
FULL = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)


class BlockLine(NamedTuple):
    """One line. `tiles_ptr`, `kinds_ptr`: its first entry."""

    entries: Any
    tiles_ptr: Any
    kinds_ptr: Any


@triton.jit
def load_line(side, numbers, sequence, head, line):
    """The `BlockLine` of a number, among those of one head of one sequence, from the side inputs."""
    blocks = numbers.blocks
    pointer = side.block_lists + blocks.offsets + sequence * blocks.stride_batch + head * blocks.stride_head + line
    first, end = tl.load(pointer), tl.load(pointer + 1)
    tiles_ptr = side.block_lists + blocks.tiles + first
    kinds_ptr = side.block_lists + blocks.kinds + first
    return BlockLine(end - first, tiles_ptr, kinds_ptr)


@triton.jit
def listed_tile(blocks, step, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The first row or key of tile number `step / BLOCK` of a line, and the kind of the stored one that it is in."""
    step = tl.cast(step, tl.int32)  # the interpreter's loops count in Python's numbers
    entry = step // TILE
    start = tl.load(blocks.tiles_ptr + entry) * TILE + step % TILE
    return tl.multiple_of(start, BLOCK), tl.load(blocks.kinds_ptr + entry)


@triton.jit
def apply_pattern(scores, side, constants, kind, first_row, first_column, TRANSPOSED: tl.constexpr):
    """Hides what a partly visible tile does not show. A full tile stays as it is, and nothing is read for it.
    `side.block_patterns`: `[P, TILE_Q, TILE_K]`. `constants`: `parameters.CallConstants`.

    The backward branches around it and is faster so (dk/dv 0.31 ms against 0.44). In the forward ptxas takes a branch
    for a reason to serialise the matrix products of Hopper (its message C7515; 2.4 ms against 0.3).
    """
    TILE_Q: tl.constexpr = constants.TILE_Q
    TILE_K: tl.constexpr = constants.TILE_K
    BLOCK_M: tl.constexpr = scores.shape[1 if TRANSPOSED else 0]
    BLOCK_N: tl.constexpr = scores.shape[0 if TRANSPOSED else 1]
    row = first_row % TILE_Q + tl.arange(0, BLOCK_M)
    column = tl.multiple_of(first_column % TILE_K, BLOCK_N) + tl.arange(0, BLOCK_N)
    pattern = side.block_patterns + kind.to(tl.int64) * (TILE_Q * TILE_K)
    pointers = pattern + row[:, None] * TILE_K + column[None, :]
    shown = tl.load(pointers, mask=kind + tl.zeros((BLOCK_M, BLOCK_N), tl.int32) >= 0, other=0)
    shown = tl.trans(shown) if TRANSPOSED else shown
    # kind >> 31: all bits of a full tile, none of another.
    return tl.where((shown.to(tl.int32) | (kind >> 31)) != 0, scores, float("-inf"))


@triton.jit
def load_tile_kind(blocks, tile):
    """The kind of one tile of a line; EMPTY where it is not listed."""
    CHUNK: tl.constexpr = 64
    kind = EMPTY
    for first in range(0, blocks.entries, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        listed = tl.load(blocks.tiles_ptr + entry, mask=entry < blocks.entries, other=-1)
        kinds = tl.load(blocks.kinds_ptr + entry, mask=entry < blocks.entries, other=EMPTY)
        kind = tl.maximum(kind, tl.max(tl.where(listed == tile, kinds, EMPTY), 0))
    return kind


@triton.jit
def _constant(value: tl.constexpr, dtype: tl.constexpr):
    return tl.full((1, 1), value, dtype)


#: Bytes that the sums of all slots may take, and the fewest slots, whatever they take: a wave of few thread blocks
#: leaves most multiprocessors idle.
_MEMORY = 2**28
_LEAST_SLOTS = 64


@triton.jit
def _add_to_entries(sums_ptr, offsets, values, inside):
    """Adds values to the sums at offsets, both `[M, N]`, where they lie inside, in no fixed order."""
    tl.atomic_add(sums_ptr + offsets, values, mask=inside, sem="relaxed")


@triton.jit
def add_in_order(sums_ptr, offsets, values, inside):
    """Adds values to the sums at offsets, both `[M, N]`, where they lie inside."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)
    for step in range(ROWS):
        here = row == step
        offset = tl.sum(tl.where(here, offsets, 0), 0)  # [N]
        counts = tl.sum(tl.where(here & inside, 1, 0), 0) > 0
        value = tl.sum(tl.where(here & inside, values, 0.0), 0)
        same = (offset[:, None] == offset[None, :]) & counts[:, None]  # [N, N]
        added = tl.sum(tl.where(same, value[:, None], 0.0), 0)
        first = tl.min(tl.where(same, column[:, None], COLUMNS), 0)
        writes = counts & (first == column)
        # Values that other threads wrote for the row before are read here.
        tl.debug_barrier()
        before = tl.load(sums_ptr + offset, mask=writes, other=0.0)
        tl.store(sums_ptr + offset, before + added, mask=writes)


@triton.jit
def wave_program(wave_ptr):
    """The number of this thread block in the whole call, and whether the call has so many."""
    program = tl.program_id(0) + tl.load(wave_ptr)
    programs = tl.load(wave_ptr + 1)
    return tl.minimum(program, programs - 1), program < programs


def slots_for(numel: int, programs: int) -> int:
    """How many thread blocks a wave has, and so how many sums of `numel` entries there are."""
    return min(programs, max(_LEAST_SLOTS, _MEMORY // max(1, 4 * numel)))


def wave_starts(slots: int, programs: int, device: torch.device) -> Tensor:
    """For each launch of so many thread blocks, the number of the first one, and of all: int32 `[waves, 2]`."""
    first = torch.arange(0, programs, slots, dtype=torch.int32, device=device)
    return torch.stack((first, torch.full_like(first, programs)), dim=1)


#: Names that the source of functions uses.
_NAMES = {
    "tl": tl,
    "constant": _constant,
    "hyperbolic_tangent": tanh,
    "sine": compiled(SINE_SOURCE, triton.jit, {"tl": tl}),
    "add_to_entries": _add_to_entries,
    "add_in_order": add_in_order,
}


@functools.lru_cache(maxsize=1024)
def triton_function(text: str, bounds: ScoreBounds | None = None) -> Any:
    """The `@triton.jit` function of a program: see `score_source.function_source`."""
    return compiled(function_source(text, bounds), triton.jit, _NAMES)


@functools.lru_cache(maxsize=1024)
def triton_derivative(
    text: str, summed: tuple[bool, ...] = (), in_order: bool = False, bounds: ScoreBounds | None = None
) -> Any:
    """That of its derivative: see `score_source.derivative_source`."""
    return compiled(derivative_source(text, summed, in_order, bounds), triton.jit, _NAMES)
