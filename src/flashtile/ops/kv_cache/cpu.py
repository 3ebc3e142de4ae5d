"""The CPU backend: new rows of all sequences at once, then the CPU kernels of `flashtile.attention`.

Neighbouring sequences that have the same rows of a cache without pages are one call of it. Others are a call each,
because their diagonals end at different rows. Keys and values are read where they are, unless pages are out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from flashtile.ops.attention.api import forward_of_checked, forward_of_unmasked
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, lengths_before, lse_dtype, places
from flashtile.ops.rotary.api import apply_rotary


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`. `num_splits` is not used: PyTorch's threads work on
    different heads."""
    q, slopes = call.q, call.alibi_slopes
    if call.k is not None:
        before = lengths_before(call, spec)
        _append(call, spec, before)
        q = _rotated_queries(call, spec, before)
    results = [
        forward_of_checked(
            q[sequences],
            keys,
            values,
            (spec.window_left, spec.window_right),
            spec.scale,
            spec.softcap,
            slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes,
            call.sinks,
            "cpu",
        )
        for sequences, keys, values in _pieces(call, spec)
    ]
    if len(results) == 1:
        return results[0]
    if not results:
        batch, seq_q, heads, _ = q.shape
        empty = q.new_empty(batch, heads, seq_q, dtype=lse_dtype(q.dtype))
        return q.new_empty(batch, seq_q, heads, call.v_cache.shape[-1]), empty
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def prepare_steps(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """What computes steps of one query over these caches in one piece; None where they are not computed alike."""
    return forward_of_unmasked(q, k_cache, v_cache, scale, "cpu")


def _append(call: CacheCall, spec: CacheSpec, before: Tensor) -> None:
    if call.k is None or call.v is None or not call.k.shape[1]:
        return
    rows = before[:, None] + torch.arange(call.seq_new, device="cpu")  # [B, S]
    where = places(call, torch.arange(rows.shape[0], device="cpu")[:, None].expand_as(rows), rows)
    call.k_cache[where] = _rotated(call.k, call, spec, before)
    call.v_cache[where] = call.v


def _rotated_queries(call: CacheCall, spec: CacheSpec, before: Tensor) -> Tensor:
    q = call.q
    if spec.banded or not q.numel() or call.rotary_cos is None:
        return _rotated(q, call, spec, before)
    # All rows at one position: as heads of a single row.
    return _rotated(q.flatten(1, 2)[:, None], call, spec, before).view(q.shape)


def _rotated(x: Tensor, call: CacheCall, spec: CacheSpec, position: Tensor) -> Tensor:
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    return apply_rotary(x, call.rotary_cos, call.rotary_sin, spec.interleaved, seqlen_offsets=position, backend="cpu")


def _pieces(call: CacheCall, spec: CacheSpec) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Sequences, and their keys and values `[sequences, length, heads, head_dim]`."""
    batch = call.q.shape[0]
    lengths = [spec.length] * batch if call.cache_lengths is None else call.cache_lengths.tolist()
    ends = [length + call.seq_new for length in lengths]
    if call.block_table is call.cache_batch_indices is call.cache_left_padding is None and len(set(ends)) == 1:
        # The commonest call: it need not be searched for runs of alike sequences.
        yield slice(0, batch), call.k_cache[:, : ends[0]], call.v_cache[:, : ends[0]]
        return
    left = [0] * batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    spans = [(min(first, end), end) for first, end in zip(left, ends)]
    if call.block_table is not None:
        for sequence, (start, end) in enumerate(spans):
            pages = call.block_table[sequence, : -(-end // call.k_cache.shape[1])]
            keys, values = _in_order(pages, call.k_cache, call.v_cache)
            yield slice(sequence, sequence + 1), keys[:, start:end], values[:, start:end]
        return
    entries = range(batch) if call.cache_batch_indices is None else call.cache_batch_indices.tolist()
    # Neighbours in the batch that are neighbours in the cache have the same difference of both numbers.
    alike = groupby(range(batch), lambda b: (spans[b], entries[b] - b))
    for ((start, end), shift), members in alike:
        first, *others = members
        sequences = slice(first, first + 1 + len(others))
        where = slice(sequences.start + shift, sequences.stop + shift), slice(start, end)
        yield sequences, call.k_cache[where], call.v_cache[where]


def _in_order(pages: Tensor, *caches: Tensor) -> Iterator[Tensor]:
    """The rows of some pages of each cache, `[1, rows, heads, head_dim]`: a view where the pages follow one another."""
    numbers = pages.tolist()
    first, count = numbers[0] if numbers else 0, len(numbers)
    in_one_piece = numbers == list(range(first, first + count))
    for cache in caches:
        chosen = cache[first : first + count] if in_one_piece else cache.index_select(0, pages)
        yield chosen.flatten(0, 1)[None]
