"""Score functions as Triton functions, and sums in a fixed order for the gradients of what they read.

The entries to which a tile adds may be any, and many elements may belong to one. So each thread block has sums of its
own, to which it adds row by row: elements of a row with the same entry are summed first, by comparing all pairs, and
one of them writes. Sums of all thread blocks could take too much memory. So the call comes in waves, launches that
follow one another on the stream, and the thread blocks of a wave go on with the sums of the one before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.ops.attention.gpu.score_functions import compiled
from flashtile.ops.attention.gpu.score_source import SINE_SOURCE, derivative_source, function_source
from flashtile.ops.attention.gpu.score_writer import ScoreBounds
from flashtile.ops.common.triton.functions import tanh


@triton.jit
def _constant(value: tl.constexpr, dtype: tl.constexpr):
    return tl.full((1, 1), value, dtype)


#: Bytes that the sums of all slots may take, and the fewest slots, whatever they take: a wave of few thread blocks
#: leaves most multiprocessors idle.
_MEMORY = 2**28
_LEAST_SLOTS = 64


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
        # What other threads wrote for the row before is read here.
        tl.debug_barrier()
        before = tl.load(sums_ptr + offset, mask=writes, other=0.0)
        tl.store(sums_ptr + offset, before + added, mask=writes)


@triton.jit
def program_of_wave(wave_ptr):
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


#: What the source of functions uses.
_NAMES = {
    "tl": tl,
    "constant": _constant,
    "hyperbolic_tangent": tanh,
    "sine": compiled(SINE_SOURCE, triton.jit, {"tl": tl}),
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
