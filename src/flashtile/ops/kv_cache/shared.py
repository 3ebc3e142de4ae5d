"""Sequences with a common prefix: its rows are read once for all of them, and the results are merged.

The queries of all sequences are those of a single one that attends to the prefix, and each sequence attends to the rows
behind it. Every query stands behind the prefix, so it sees all of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common.checks import readable
from flashtile.ops.kv_cache.operator import run_with_cache
from flashtile.ops.kv_cache.rows import lengths_before, new_counts, query_counts
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
from flashtile.ops.softmax.merge import finish_attention, merge_attention_


def resolve_shared_rows(shared_rows: int, capacity: int, refused: Mapping[str, object]) -> int:
    """The number of common rows. `refused`: arguments that a call with such rows does not take."""
    if isinstance(shared_rows, bool) or not isinstance(shared_rows, int):
        raise TypeError(f"shared_rows: expected an int or None, got {shared_rows!r}; it is the same for all sequences")
    if not 0 <= shared_rows <= capacity:
        raise ValueError(
            f"shared_rows: expected from 0 to {capacity}, the rows of a sequence, got {shared_rows}; it is how many "
            "first rows all sequences have in common"
        )
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None beside shared_rows, got {type(value).__name__}; what depends on the position "
                "of a query is not the same for all sequences"
            )
    return shared_rows


def run_with_shared_rows(call: CacheCall, spec: CacheSpec, shared: int, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) as of `run_with_cache`."""
    if not shared or not call.batch:
        return run_with_cache(call, spec, backend)
    _check_values(call, spec, shared)
    left = torch.full((call.batch,), shared, dtype=torch.int32, device=call.q.device)
    own, own_lse = run_with_cache(call._replace(cache_left_padding=left), spec, backend)
    of_prefix, prefix_lse = run_with_cache(*_prefix_call(call, spec, shared), backend)
    packed, (heads, width) = call.cu_seqlens_q is not None, own.shape[-2:]
    batch, rows = (1, call.q.shape[0]) if packed else call.q.shape[:2]
    acc = own.new_empty((batch, rows, heads, width), dtype=own_lse.dtype)
    row_max, row_sum = own_lse.new_empty((2, batch, heads, rows))
    parts = (
        (of_prefix, prefix_lse.view(heads, batch, rows).transpose(0, 1)),
        (own, own_lse.view(batch, heads, rows)),
    )
    for number, (part, lse) in enumerate(parts):
        merge_attention_(acc, row_max, row_sum, part.view(acc.shape), lse, first=not number, backend=backend)
    out, lse = finish_attention(acc, row_max, row_sum, own.dtype, backend=backend)
    return out.view(own.shape), lse.view(own_lse.shape)


def _prefix_call(call: CacheCall, spec: CacheSpec, shared: int) -> tuple[CacheCall, CacheSpec]:
    """The call in which all queries attend to the prefix, where sequence 0 has it."""
    q, starts, longest = call.q, call.cu_seqlens_q, 0
    if starts is None:
        q = q.flatten(0, 1)[None]
    else:
        starts, longest = starts[:: call.batch], q.shape[0]  # the first and the last
    prefix = CacheCall(
        q, call.k_cache, call.v_cache,
        cache_batch_indices=_first(call.cache_batch_indices), block_table=_first(call.block_table),
        cu_seqlens_q=starts, descale_k=call.descale_k, descale_v=call.descale_v,
    )  # fmt: skip
    if prefix.block_table is prefix.cache_batch_indices is None:
        caches = ("k_cache", "v_cache", "descale_k", "descale_v")
        prefix = prefix._replace(**{name: _first(getattr(call, name)) for name in caches})
    return prefix, spec._replace(length=shared, window_left=None, window_right=None, max_seqlen_q=longest)


def _first(tensor: Tensor | None) -> Any:
    """The part of sequence 0."""
    return None if tensor is None else tensor[:1]


def _check_values(call: CacheCall, spec: CacheSpec, shared: int) -> None:
    """Whether all queries stand behind the common rows, as checks of values are."""
    if torch.compiler.is_compiling() or not readable(call.q):
        return
    before = lengths_before(call, spec).tolist()
    firsts = [
        min(length, length + new - queries)
        for length, new, queries in zip(before, new_counts(call), query_counts(call))
        if new or queries
    ]
    if firsts and min(firsts) < shared:
        raise ValueError(
            f"shared_rows: expected at most {max(min(firsts), 0)}, the rows before the first new row and the first "
            f"query of each sequence, got {shared}; pass fewer"
        )
