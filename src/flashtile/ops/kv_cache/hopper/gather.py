"""Gathering the rows of a cache once, for all tiles of queries: dense keys and values of 16 bits, whatever pages and
dtype they have in the cache. A latent cache has keys alone, whose first columns are the values.

Shapes: N = BLOCK_N rows of a sequence, D = BLOCK_D columns of a head of k, E = BLOCK_E of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import contiguous
from flashtile._backends.devices import multiprocessors
from flashtile._backends.launch import GIVEN, Parameter, int32, int64, pointer_to, pointers
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile.ops.common.checks import MAX_POSITIONS
from flashtile.ops.common.split_keys.plan import SplitCall, factor_strides
from flashtile.ops.common.split_keys.rows import CacheStrides, Descales, Sequences, packed_rows, sequence_lengths
from flashtile.ops.common.tiles import power_of_two

#: Numbers of keys, and of values, that a program moves at a time, and its warps.
_MOVED, _WARPS = 4096, 4
#: Programs for each multiprocessor: many, because those of places that no sequence has end at once.
_PROGRAMS = 64


class Gather(NamedTuple):
    """The launch that gathers the rows of a call, and the call behind it.

    Attributes:
        pipeline: its outputs are keys, values if they are not columns of these, and of packed calls entries of the
            sequences, int32 `[batch]`, negative for those whose rows are not gathered. Without entries all are, in
            order.
        call: that of attention to these.
    """

    pipeline: Pipeline
    call: SplitCall

    def run(
        self, caches: Sequence[Any], indices: Sequence[Any], factors: Sequence[Any], length: int
    ) -> tuple[list[Any], tuple[Any, ...], list[Any]]:
        """Keys and values, indices and factors of the call behind, from those of the call itself. `indices`: what
        `rows.Sequences` has. `caches`: of a latent cache the keys alone."""
        lengths, entries, left, table, starts, new_starts, tree = indices
        later = [None if strides is None else of for of, strides in zip(factors, self.call.descale_strides)]
        now = [of if after is None else None for of, after in zip(factors, later)][: len(caches)]
        given = pointers((*caches, lengths, entries, left, table, starts, new_starts, *now))
        made = self.pipeline.run(*given, length)
        entries = made[-1] if len(made) > len(caches) else None
        return made[: len(caches)], (lengths, entries, left, None, starts, new_starts, tree), later


def plan_gather(call: SplitCall, least: int, sequences: int, device: torch.device, keys_alone: bool = False) -> Gather:
    """Everything that can be decided before the tensors' contents are known. So many sequences have their rows
    gathered, of packed ones those of `least` queries or more. `keys_alone`: the values are columns of the keys, and
    have the same factors."""
    batch, seq_q, _, heads_kv, head_dim, head_dim_v = call.shape
    packed = call.total_q is not None
    keys, values = (
        contiguous((sequences, call.capacity, heads_kv, columns), call.dtype) for columns in (head_dim, head_dim_v)
    )
    values = keys if keys_alone else values
    # A factor that all rows of a head share is one of scores, or of out.
    now = [strides if strides is not None and any(strides[:2]) else None for strides in call.descale_strides]
    later = tuple(None if of is not None else strides for of, strides in zip(now, call.descale_strides))
    lengths, entries, left, table, starts, new_starts, tree = call.index_dtypes
    places = torch.int32 if packed else None
    behind = call._replace(
        strides=(call.strides[0], keys.strides[:3], values.strides[:3]),
        index_dtypes=(lengths, places, left, None, starts, new_starts, tree),
        page_size=0,
        pages=0,
        stride_table=0,
        cache_dtype=None,
        descale_strides=later,
        values_in_keys=keys_alone,
    )
    if keys_alone:
        now[1] = None
    window_left = call.window_left
    block_d, block_e = power_of_two(head_dim), power_of_two(head_dim_v)
    block_n = max(1, _MOVED // max(block_d, block_e))
    parts = min(-(-call.capacity // block_n), -(-_PROGRAMS * multiprocessors(device) // sequences))
    multiple = power_of_two_factor(*(stride for strides in call.cache_strides for stride in strides))
    cache = pointer_to(call.cache_dtype or call.dtype, 16)
    strides = (CacheStrides(*(int64(stride, multiple) for stride in of)) for of in call.cache_strides)
    parameters = {
        "k_cache_ptr": cache,
        "v_cache_ptr": pointer_to(None) if keys_alone else cache,
        "keys_ptr": pointer_to(call.dtype, 16),
        "values_ptr": pointer_to(None if keys_alone else call.dtype, 16),
        "places_ptr": pointer_to(places, 16),
        "sequences": Sequences(*map(pointer_to, (lengths, entries, left, table, starts, new_starts, None))),
        "descales": Descales(*(pointer_to(None if of is None else torch.float32) for of in now)),
        "length": Parameter("i32", 1, GIVEN),
        **dict(zip(("k_strides", "v_strides"), strides)),
        "k_descale_strides": factor_strides(now[0]),
        "v_descale_strides": factor_strides(now[1]),
        "stride_table": int64(call.stride_table if table else None),
        "batch": int32(batch if packed else None),
        "least": int32(least if packed else None),
        "heads_kv": int32(heads_kv),
        "seq_q": int32(None if packed else seq_q),
        "seq_new": int32(call.seq_new if new_starts is None else None),
        "capacity": int32(call.capacity),
        "window_left": int32(None if window_left is None else max(-MAX_POSITIONS, min(window_left, MAX_POSITIONS))),
        "parts": int32(parts),
    }
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "PAGE_SIZE": call.page_size,
    }
    programs = sequences * parts
    kernel = Kernel(gather_kernel, parameters, constants, programs, {"k": "descale_k", "v": "descale_v"}, _WARPS)
    optional = {
        "v_cache": None if keys_alone else call.dtype, "lengths": lengths, "entries": entries, "left": left,
        "table": table, "starts": starts, "new_starts": new_starts, **dict(zip(("descale_k", "descale_v"), now)),
    }  # fmt: skip
    given = ["k_cache", *(name for name, there in optional.items() if there is not None), "length"]
    made = {
        "keys": keys,
        "values": None if keys_alone else values,
        "places": contiguous((batch,), torch.int32) if packed else None,
    }
    return Gather(Pipeline(device, {"gather": kernel}, given, made), behind)


@triton.jit
def gather_kernel(
    k_cache_ptr, v_cache_ptr, keys_ptr, values_ptr, places_ptr, sequences, descales, length,
    k_strides, v_strides, k_descale_strides, v_descale_strides, stride_table,
    batch, least, heads_kv, seq_q, seq_new, capacity, window_left, parts,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Copies the rows of sequences that some query sees to `keys` and `values`, `[.., capacity, heads_kv, head_dim]`,
    times the factors of rows. `parts` programs share a sequence. Without `v_cache` there are no values.

    `sequences`: `Sequences`. `k_strides`, `v_strides`, and those of factors (`descales`, `Descales`): `CacheStrides`.
    `places` `[batch]`, of packed sequences: those of `least` queries or more have places, in order. It gets the place
    of each, -1 for those without.
    """
    place = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    sequence = place
    queries = seq_q
    if places_ptr is not None:
        if tl.program_id(0) == 0:
            number_sequences(sequences.starts, places_ptr, place, batch, least)
        sequence = number_sequences(sequences.starts, None, place, batch, least)
        if sequence < 0:
            return  # there are no more
    if sequences.starts is not None:
        _, queries = packed_rows(sequences.starts, sequence, batch, 0)
    new = seq_new
    if sequences.new_starts is not None:
        _, new = packed_rows(sequences.new_starts, sequence, batch, 0)
    _, total = sequence_lengths(sequences.lengths, sequence, length, new, capacity)
    seen = 0
    if window_left is not None:
        seen = tl.maximum(total - queries - window_left, 0)
    if sequences.left is not None:
        # 32 bits wide only after that, like a length.
        seen = tl.maximum(seen, tl.minimum(tl.load(sequences.left + sequence), total).to(tl.int32))
    entry = tl.cast(sequence, tl.int64)
    pages = None
    if sequences.table is not None:
        pages = sequences.table + entry * stride_table
    if sequences.entries is not None:
        entry = tl.load(sequences.entries + sequence).to(tl.int64)
    for tile in range(seen // BLOCK_N + part, tl.cdiv(total, BLOCK_N), parts):
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (row >= seen) & (row < total)
        outer = entry
        inner = row.to(tl.int64)
        if pages is not None:
            outer = tl.load(pages + row // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
            inner = (row % PAGE_SIZE).to(tl.int64)
        target = (tl.cast(place, tl.int64) * capacity + row) * heads_kv
        k_factors = None
        if descales.k is not None:
            k_factors = row_pointers(descales.k, k_descale_strides, outer, inner)
        k_rows = row_pointers(k_cache_ptr, k_strides, outer, inner)
        k_source = SourceRows(k_rows, k_factors, k_strides.head, k_descale_strides.head)
        if v_cache_ptr is not None:
            v_factors = None
            if descales.v is not None:
                v_factors = row_pointers(descales.v, v_descale_strides, outer, inner)
            v_rows = row_pointers(v_cache_ptr, v_strides, outer, inner)
            v_source = SourceRows(v_rows, v_factors, v_strides.head, v_descale_strides.head)
        for head in range(0, heads_kv):
            k, k_there = load_rows(k_source, head, valid, HEAD_DIM, BLOCK_D)
            if v_cache_ptr is not None:
                v, v_there = load_rows(v_source, head, valid, HEAD_DIM_V, BLOCK_E)
                to_values = values_ptr + (target + head)[:, None] * HEAD_DIM_V + tl.arange(0, BLOCK_E)[None, :]
            to_keys = keys_ptr + (target + head)[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
            tl.store(to_keys, k.to(keys_ptr.dtype.element_ty), mask=k_there)
            if v_cache_ptr is not None:
                tl.store(to_values, v.to(values_ptr.dtype.element_ty), mask=v_there)


class SourceRows(NamedTuple):
    """Pointers `[N]` to the first head of rows in a cache, and to its factors, None without; and elements from one head
    to the next, in both."""

    rows: Any
    factors: Any
    head: Any
    factor_head: Any


@triton.jit
def row_pointers(pointer, strides, outer, inner):
    """Pointers `[N]` to the first head of rows `inner` of entries or pages `outer`. `strides`: `CacheStrides`."""
    return pointer + (outer * strides.outer + inner * strides.row)


@triton.jit
def load_rows(source, head, valid, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """A head of rows, and which numbers are there: `[N, BLOCK]`. Of 8 bits as float32, times the factors of rows."""
    column = tl.arange(0, BLOCK)[None, :]
    there = valid[:, None] & (column < COLUMNS)
    tile = tl.load(source.rows[:, None] + (head * source.head + column), mask=there, other=0.0)
    if source.rows.dtype.element_ty.primitive_bitwidth == 8:
        tile = tile.to(tl.float32)
        if source.factors is not None:
            tile *= tl.load(source.factors + head * source.factor_head, mask=valid, other=0.0)[:, None]
    return tile, there


@triton.jit
def number_sequences(starts_ptr, places_ptr, wanted, batch, least):
    """The packed sequence that has a number, among those with `least` queries or more; -1: there are not so many. It
    writes the numbers, if it is given an address for them, and -1 for the others."""
    found = -1
    before = 0
    for begin in range(0, batch, 256):
        sequence = begin + tl.arange(0, 256)
        there = sequence < batch
        start = tl.load(starts_ptr + sequence, mask=there, other=0)
        end = tl.load(starts_ptr + sequence + 1, mask=there, other=0)
        counted = there & (end - start >= least)
        counts = counted.to(tl.int32)
        number = before + tl.cumsum(counts, 0) - 1
        if places_ptr is not None:
            tl.store(places_ptr + sequence, tl.where(counted, number, -1), mask=there)
        found = tl.maximum(found, tl.max(tl.where(counted & (number == wanted), sequence, -1), 0))
        before += tl.sum(counts, 0)
    return found
