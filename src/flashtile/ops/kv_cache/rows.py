"""Rows of packed sequences and of caches, for backends and checks that read values on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common.eight_bits import EIGHT_BITS, factors_for, rounded
from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec


def lengths_before(call: CacheCall, spec: CacheSpec) -> Tensor:
    """Rows of each sequence before anything is appended: `[batch]` int64."""
    if call.cache_lengths is not None:
        return call.cache_lengths.long()
    return torch.full((call.batch,), spec.length, device=call.q.device)


def query_counts(call: CacheCall) -> list[int]:
    """Queries of each sequence."""
    return _counts(call.q, call.cu_seqlens_q, call)


def new_counts(call: CacheCall) -> list[int]:
    """Rows that are appended to each sequence."""
    return _counts(call.k, call.cu_seqlens_new, call)


def _counts(rows: Tensor | None, cu_seqlens: Tensor | None, call: CacheCall) -> list[int]:
    if cu_seqlens is not None:
        return cu_seqlens.diff().tolist()
    return [0 if rows is None else rows.shape[1]] * call.batch


def numbered(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequence that each row belongs to, and its number there, of rows that are packed: int64 `[sum of counts]`."""
    of_sequences = torch.tensor(counts, dtype=torch.int64, device=device)
    sequence = torch.repeat_interleave(of_sequences)
    first = of_sequences.cumsum(0) - of_sequences
    return sequence, torch.arange(sequence.shape[0], device=device) - first[sequence]


def packed_rows(rows: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Rows of all sequences one after another, `[total, heads, head_dim]`."""
    return rows.flatten(0, 1) if cu_seqlens is None else rows


def places(call: CacheCall, sequence: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Where rows of sequences lie in the cache: int64 (entry or page, row in it) of the shape of both arguments."""
    if call.block_table is not None:
        page_size = call.k_cache.shape[1]
        return call.block_table[sequence, row // page_size].long(), row % page_size
    if call.cache_batch_indices is not None:
        return call.cache_batch_indices[sequence].long(), row
    return sequence, row


def quantized(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows `[..., heads, head_dim]` in 8 bits, divided by the factors `[..., heads]`."""
    x = x if x.dtype is torch.float64 else x.float()
    return rounded(x if descale is None else x / descale[..., None], dtype)


def widened(rows: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What rows `[..., heads, head_dim]` of a cache stand for, in the dtype of q."""
    if rows.dtype is dtype:
        return rows
    wide = rows.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (wide if descale is None else wide * descale[..., None]).to(dtype)


def indexable(cache: Tensor) -> Tensor:
    """The same memory in a dtype that PyTorch indexes everywhere."""
    return cache.view(torch.uint8) if cache.dtype in EIGHT_BITS else cache


def are_columns(keys: Tensor, values: Tensor) -> bool:
    """Whether values are the first columns of the keys' rows, which are stored once."""
    return (
        values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride() and values.shape[-1] <= keys.shape[-1]
    )


def address_facts(tensors: Sequence[Any]) -> tuple[int, int, bool]:
    """All that is decided by addresses, from the tensors of `CacheCall`: those of q, caches and new rows modulo 16,
    those of the angles' tables modulo 16, and whether both caches begin at one."""
    q, k_cache, v_cache, k, v = tensors[:5]
    keys, values = k_cache.data_ptr(), v_cache.data_ptr()
    bits, of_tables = q.data_ptr() | keys | values, 0
    if k is not None:
        bits |= k.data_ptr()
    if v is not None:
        bits |= v.data_ptr()
    cos, sin = tensors[9:11]
    if cos is not None and sin is not None:
        of_tables = cos.data_ptr() | sin.data_ptr()
    return bits & 15, of_tables & 15, keys == values


def store(call: CacheCall, spec: CacheSpec, where: tuple[Tensor, Tensor], k: Tensor, v: Tensor | None) -> None:
    """Writes rotated new rows `[rows, heads, head_dim]` to their places."""
    for new, cache, descale in ((k, call.k_cache, call.descale_k), (v, call.v_cache, call.descale_v)):
        if new is None:
            continue  # columns of the keys
        if cache.dtype in EIGHT_BITS:
            if spec.factors_of_rows and descale is not None:
                descale[where] = factors_for(new.abs().amax(-1), cache.dtype)
            new = quantized(new, None if descale is None else descale[where], cache.dtype).view(torch.uint8)
        indexable(cache)[where] = new


def gathered(cache: Tensor, descale: Tensor | None, where: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Rows of a cache, widened: `[rows, heads, head_dim]`."""
    rows = indexable(cache)[where].view(cache.dtype)
    return widened(rows, None if descale is None else descale[where], dtype)


def visible_in_tree(tree: Tensor, keys: int) -> Tensor:
    """What a tree shows, `[..., seq_q, keys]`, of the last `keys` rows. `tree`: `[..., seq_q, seq_q]`."""
    seq_q = tree.shape[-1]
    if keys <= seq_q:
        return tree[..., seq_q - keys :]
    return torch.cat([tree.new_ones(*tree.shape[:-1], keys - seq_q), tree], dim=-1)


def shaped_results(call: CacheCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) as the call returns them, from those of all queries one after another: `[total_q, heads_q,
    head_dim_v]` and `[heads_q, total_q]`."""
    if call.cu_seqlens_q is not None:
        return out, lse
    batch, seq_q, heads, _ = call.q.shape
    return out.view(batch, seq_q, heads, out.shape[-1]), lse.view(heads, batch, seq_q).transpose(0, 1).contiguous()
