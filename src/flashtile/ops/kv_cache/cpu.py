"""The CPU backend: new rows of all sequences at once, then the CPU kernels of `flashtile.attention`.

Sequences that lie in one piece of the cache, with the same length and first row, are one call of it; others come one by
one, because there the diagonal ends at another row. Pages are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from flashtile.ops.attention.api import attention
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec, lengths_before, lse_dtype, places
from flashtile.ops.rotary.api import apply_rotary


def forward(call: CacheCall, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """(out, lse); shapes as in `flashtile.attention_with_kv_cache`. All parts of the keys are computed in turn, so
    `num_splits` has nothing to say."""
    q = call.q
    batch, seq_q, heads, _ = q.shape
    out = q.new_empty(batch, seq_q, heads, call.v_cache.shape[-1])
    lse = q.new_empty(batch, heads, seq_q, dtype=lse_dtype(q.dtype))
    before = lengths_before(call, spec)
    _append(call, spec, before)
    rotated = _rotated_queries(call, spec, before)
    for sequences, keys, values in _pieces(call, before + call.seq_new):
        slopes = call.alibi_slopes
        out[sequences], lse[sequences] = attention(
            rotated[sequences],
            keys,
            values,
            window=(spec.window_left, spec.window_right),
            scale=spec.scale,
            softcap=spec.softcap,
            alibi_slopes=slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes,
            sinks=call.sinks,
            return_lse=True,
            backend="cpu",
        )
    return out, lse


def _append(call: CacheCall, spec: CacheSpec, before: Tensor) -> None:
    if call.k is None or call.v is None or not call.k.shape[1]:
        return
    rows = before[:, None] + torch.arange(call.seq_new)  # [B, S]
    where = places(call, torch.arange(rows.shape[0])[:, None].expand_as(rows), rows)
    call.k_cache[where] = _rotated(call.k, call, spec, before)
    call.v_cache[where] = call.v


def _rotated_queries(call: CacheCall, spec: CacheSpec, before: Tensor) -> Tensor:
    q = call.q
    if spec.banded or not q.numel():
        return _rotated(q, call, spec, before)
    # All rows at one position: as heads of a single row.
    return _rotated(q.flatten(1, 2)[:, None], call, spec, before).view(q.shape)


def _rotated(x: Tensor, call: CacheCall, spec: CacheSpec, position: Tensor) -> Tensor:
    if call.rotary_cos is None or call.rotary_sin is None:
        return x
    return apply_rotary(x, call.rotary_cos, call.rotary_sin, spec.interleaved, seqlen_offsets=position, backend="cpu")


def _pieces(call: CacheCall, lengths: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Sequences, and their keys and values `[sequences, length, heads, head_dim]`."""
    batch, page_size = lengths.shape[0], call.k_cache.shape[1]
    left = [0] * batch if call.cache_left_padding is None else call.cache_left_padding.tolist()
    entries = None if call.cache_batch_indices is None else call.cache_batch_indices.tolist()
    spans = [slice(min(first, end), end) for first, end in zip(left, lengths.tolist())]
    if call.block_table is None and entries is None:
        for span, group in groupby(range(batch), lambda sequence: (spans[sequence].start, spans[sequence].stop)):
            members = list(group)
            sequences, rows = slice(members[0], members[-1] + 1), slice(*span)
            yield sequences, call.k_cache[sequences, rows], call.v_cache[sequences, rows]
        return
    for sequence, rows in enumerate(spans):
        one = slice(sequence, sequence + 1)
        if call.block_table is None:
            assert entries is not None
            entry = slice(entries[sequence], entries[sequence] + 1)
            yield one, call.k_cache[entry, rows], call.v_cache[entry, rows]
            continue
        pages = call.block_table[sequence, : -(-rows.stop // page_size)].long()
        keys, values = (cache[pages].flatten(0, 1)[None, rows] for cache in (call.k_cache, call.v_cache))
        yield one, keys, values
