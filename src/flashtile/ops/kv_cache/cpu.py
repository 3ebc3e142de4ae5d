"""The CPU backend: new rows of all sequences at once, then the CPU kernels of `flashtile.attention`.

Neighbouring sequences that have the same rows of a cache without pages are one call of it. Others are a call each,
because their diagonals end at different rows. Keys and values are read where they are, unless pages are out of order.
Those of 8 bits are widened first, the rows in use of a sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.api import unmasked_forward
from flashtile.ops.kv_cache import spec as formulas
from flashtile.ops.kv_cache.rows import append, attend
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec


class _Piece(NamedTuple):
    """Sequences that are computed in one call: neighbours with as many queries each.

    Attributes:
        keys, values: `[sequences, length, heads, head_dim]`.
    """

    sequences: slice
    keys: Tensor
    values: Tensor


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`. `num_splits` is not used: PyTorch's threads work on
    different heads."""
    q = append(call, spec, "cpu")
    if call.cu_seqlens_q is not None:
        return _packed(q, call, spec)
    tree = call.tree_mask
    results = [
        _attend(q[piece.sequences], piece, call, spec, None if tree is None else tree[piece.sequences])
        for piece in _pieces(call, spec)
    ]
    if len(results) == 1:
        return results[0]
    if not results:
        batch, seq_q, heads, _ = q.shape
        empty = q.new_empty(batch, heads, seq_q, dtype=formulas.lse_dtype(q.dtype))
        return q.new_empty(batch, seq_q, heads, call.v_cache.shape[-1]), empty
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _packed(q: Tensor, call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    total_q, heads, head_dim = q.shape
    out = q.new_zeros(total_q, heads, call.v_cache.shape[-1])
    lse = q.new_full((heads, total_q), float("-inf"), dtype=formulas.lse_dtype(q.dtype))
    counts = formulas.query_counts(call)
    first = 0
    for piece in _pieces(call, spec, counts):
        sequences, seq_q = piece.keys.shape[0], counts[piece.sequences.start]
        rows = slice(first, first := first + sequences * seq_q)
        if seq_q:
            queries = q[rows].view(sequences, seq_q, heads, head_dim)
            tree = None if call.tree_mask is None else call.tree_mask[rows, :seq_q].unflatten(0, (sequences, seq_q))
            result, result_lse = _attend(queries, piece, call, spec, tree)
            out[rows] = result.flatten(0, 1)
            lse[:, rows] = result_lse.transpose(0, 1).flatten(1)
    return out, lse


def _attend(q: Tensor, piece: _Piece, call: CacheCall, spec: CacheSpec, tree: Tensor | None) -> tuple[Tensor, Tensor]:
    """`tree`: `[sequences, seq_q, seq_q]`, or None."""
    return attend(q, piece.keys, piece.values, call, spec, sequences=piece.sequences, tree=tree, backend="cpu")


def prepare_calls(call: CacheCall, spec: CacheSpec) -> Callable[..., tuple[Tensor, Tensor] | None] | None:
    """What computes steps of one query like this one in one piece, if their lengths are alike; None for other calls.
    Only these lengths are to be checked."""
    q, k_cache, v_cache = call[:3]
    if (
        any(each is not None for each in (call.k, *call[6:]))
        or k_cache.dtype is not q.dtype
        or q.shape[1] != 1
        or spec != CacheSpec(spec.length, spec.scale, None, spec.window_right and 0)
    ):
        return None
    attend, capacity = unmasked_forward(q, k_cache, v_cache, spec.scale, "cpu"), call.capacity
    if attend is None:
        return None

    def serve(given: tuple, length: int) -> tuple[Tensor, Tensor] | None:
        q, k_cache, v_cache, _, _, lengths, *_ = given
        if lengths is not None:
            length, *others = lengths.tolist()
            if others.count(length) != len(others):
                return None
        if not 1 <= length <= capacity:
            return None
        if length < capacity:
            k_cache, v_cache = k_cache[:, :length], v_cache[:, :length]
        return attend(q, k_cache, v_cache)

    return serve


def _pieces(call: CacheCall, spec: CacheSpec, counts: list[int] | None = None) -> Iterator[_Piece]:
    """All sequences in their order. `counts`: queries of each, where they differ."""
    batch = call.batch
    lengths = [spec.length] * batch if call.cache_lengths is None else call.cache_lengths.tolist()
    ends = [length + new for length, new in zip(lengths, formulas.new_counts(call))]
    one_count = counts is None or len(set(counts)) == 1
    everywhere = call.block_table is call.cache_batch_indices is call.cache_left_padding is None
    if everywhere and one_count and len(set(ends)) == 1:
        # The commonest call: it need not be searched for runs of alike sequences.
        yield _piece(call, slice(0, batch), [tensor[:, : ends[0]] for tensor in _caches(call)])
        return
    left = [0] * batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    spans = [(min(first, end), end) for first, end in zip(left, ends)]
    if call.block_table is not None:
        for sequence, (start, end) in enumerate(spans):
            pages = call.block_table[sequence, : -(-end // call.k_cache.shape[1])]
            in_order = [rows[:, start:end] for rows in _in_order(pages, *_caches(call))]
            yield _piece(call, slice(sequence, sequence + 1), in_order)
        return
    entries = range(batch) if call.cache_batch_indices is None else call.cache_batch_indices.tolist()
    # Neighbours in the batch that are neighbours in the cache have the same difference of both numbers.
    alike = groupby(range(batch), lambda b: (spans[b], entries[b] - b, counts[b] if counts else None))
    for ((start, end), shift, _), members in alike:
        first, *others = members
        sequences = slice(first, first + 1 + len(others))
        where = slice(sequences.start + shift, sequences.stop + shift), slice(start, end)
        yield _piece(call, sequences, [tensor[where] for tensor in _caches(call)])


def _caches(call: CacheCall) -> tuple[Tensor, ...]:
    """Both caches, and the factors of those that have some."""
    factors = (each for each in (call.descale_k, call.descale_v) if each is not None)
    return call.k_cache, call.v_cache, *factors


def _piece(call: CacheCall, sequences: slice, parts: list[Tensor]) -> _Piece:
    """`parts`: those of `_caches`."""
    keys, values, *factors = parts
    descale_k = None if call.descale_k is None else factors[0]
    descale_v = None if call.descale_v is None else factors[-1]
    dtype = call.q.dtype
    return _Piece(sequences, formulas.widened(keys, descale_k, dtype), formulas.widened(values, descale_v, dtype))


def _in_order(pages: Tensor, *caches: Tensor) -> Iterator[Tensor]:
    """The rows of some pages of each cache, `[1, rows, heads, head_dim]`: a view where the pages follow one another."""
    numbers = pages.tolist()
    first, count = numbers[0] if numbers else 0, len(numbers)
    in_one_piece = numbers == list(range(first, first + count))
    for cache in caches:
        chosen = cache[first : first + count] if in_one_piece else formulas.indexable(cache).index_select(0, pages)
        yield chosen.view(cache.dtype).flatten(0, 1)[None]
