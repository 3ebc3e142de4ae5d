"""What attention over a key/value cache means, apart from the numbers in its tensors.

Sequence `b` owns the rows from `left[b]` to `length[b]` of its part of the cache. New keys and values, where there are
any, go to the rows from `length[b]` on, and the sequence is `seq_new` longer before anything is read::

    k_cache[b, length + i] = rotated(k[b, i], position = length + i)         v_cache[b, length + i] = v[b, i]
    q[b, i]                = rotated(q[b, i], position = length + i, without a band: length)
    total                  = length + seq_new

`seq_new` and `seq_q` are numbers of one sequence: in a packed call each has its own. Query `i` lies at row
`i + total - seq_q`, and sees row `j` when::

    left <= j < total  and  diagonal - window_left <= j <= diagonal + window_right        diagonal = i + total - seq_q

With a tree, query `i` sees all rows before the last `seq_q`, and of these, `j = total - seq_q + m`, those where
`tree[b, i, m]` is true.

The numbers of a cache of 8 bits stand for themselves times a factor: `k_cache · descale_k`, `v_cache · descale_v`. New
rows are divided by it, and rounded. Where each row and head has a factor, the call finds those of new rows: the largest
magnitude of the row's head becomes the largest number of the dtype.

Scores are those of `flashtile.attention`, with the distances of ALiBi counted from that diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common.eight_bits import EIGHT_BITS, factors_for, rounded
from flashtile.ops.common.rows import compute_dtype as lse_dtype

#: Largest head dimension of q and k that any backend takes: that of multi-head latent attention. And that of v.
MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512


class CacheSpec(NamedTuple):
    """The meaning of a call: scalars only, hashable, canonical.

    Attributes:
        length: rows of every sequence that are in the cache already, where no tensor says so.
        scale: factor on `q kᵀ`.
        window_left: keys visible left of the diagonal; `None` = all.
        window_right: keys visible right of the diagonal; `None` = all, 0 = causal.
        softcap: bound of the scores before ALiBi; 0 = none.
        interleaved: which elements of a head are a pair of the rotation.
        num_splits: parts of the keys that are computed side by side on a GPU; 0 = chosen from the sizes.
        max_seqlen_q: queries of a sequence at most, of a packed call.
        factors_of_rows: each row and head of an 8-bit cache has a factor, and the call writes those of new rows.
        batch_invariant: as in `attention.spec.AttentionSpec`.
        shared_rows: so many first rows are those of sequence 0, for all sequences.
    """

    length: int
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    interleaved: bool = False
    num_splits: int = 0
    max_seqlen_q: int = 0
    factors_of_rows: bool = False
    batch_invariant: bool = False
    shared_rows: int = 0

    @property
    def banded(self) -> bool:
        """Whether visibility depends on the distance from the diagonal."""
        return self.window_left is not None or self.window_right is not None


class CacheCall(NamedTuple):
    """The tensors of a call. What a call does not have is None.

    Attributes:
        q: `[batch, seq_q, heads_q, head_dim]`; of a packed call `[total_q, heads_q, head_dim]`.
        k_cache: `[cache_batch, capacity, heads_kv, head_dim]`, paged `[pages, page_size, heads_kv, head_dim]`.
        v_cache: the same with head_dim_v.
        k: `[batch, seq_new, heads_kv, head_dim]`, what is appended; packed `[total_new, heads_kv, head_dim]`.
        v: the same with head_dim_v. None where values are the first columns of the keys' rows.
        cache_lengths: `[batch]` integers, rows of each sequence that are in the cache already.
        cache_batch_indices: `[batch]` integers, the entry of the cache that belongs to each sequence.
        cache_left_padding: `[batch]` integers, the first row of each sequence.
        block_table: `[batch, max_pages]` integers, the pages of each sequence in their order.
        rotary_cos, rotary_sin: `[positions, rotary_dim / 2]`.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, in the dtype of lse.
        sinks: `[heads_q]`, in the dtype of lse.
        cu_seqlens_q: `[batch + 1]` integers, where the queries of each sequence begin in a packed call.
        cu_seqlens_new: the same for k and v; None without them.
        descale_k, descale_v: `[entries or pages, rows, heads_kv]` float32 of any strides, factors of 8-bit caches; None
            for 1.
        tree_mask: bool `[batch, seq_q, seq_q]`, packed `[total_q, max_seqlen_q or more]`: which of the last rows of its
            sequence a query sees.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    cache_lengths: Tensor | None = None
    cache_batch_indices: Tensor | None = None
    cache_left_padding: Tensor | None = None
    block_table: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_new: Tensor | None = None
    descale_k: Tensor | None = None
    descale_v: Tensor | None = None
    tree_mask: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Rows that a sequence can have."""
        if self.block_table is None:
            return self.k_cache.shape[1]
        return self.block_table.shape[1] * self.k_cache.shape[1]


# --- rows of packed sequences and of caches, for backends and checks that read values on the host ---------------------


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
    x = x.to(lse_dtype(x.dtype))
    return rounded(x if descale is None else x / descale[..., None], dtype)


def widened(rows: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What rows `[..., heads, head_dim]` of a cache stand for, in the dtype of q."""
    if rows.dtype is dtype:
        return rows
    wide = rows.to(lse_dtype(dtype))
    return (wide if descale is None else wide * descale[..., None]).to(dtype)


def indexable(cache: Tensor) -> Tensor:
    """The same memory in a dtype that PyTorch indexes everywhere."""
    return cache.view(torch.uint8) if cache.dtype in EIGHT_BITS else cache


def are_columns(keys: Tensor, values: Tensor) -> bool:
    """Whether values are the first columns of the keys' rows, which are stored once."""
    return (
        values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride() and values.shape[-1] <= keys.shape[-1]
    )


def address_facts(tensors: Sequence[Any]) -> tuple[int, int, bool, bool]:
    """All that is decided by addresses, from the tensors of `CacheCall`: those of q, caches and new rows modulo 16,
    those of the angles' tables modulo 16, and whether both caches, and both factors, begin at one."""
    q, k_cache, v_cache, k, v = tensors[:5]
    descale_k, descale_v = tensors[15:17]
    keys, values = k_cache.data_ptr(), v_cache.data_ptr()
    bits, of_tables = q.data_ptr() | keys | values, 0
    if k is not None:
        bits |= k.data_ptr()
    if v is not None:
        bits |= v.data_ptr()
    cos, sin = tensors[9:11]
    if cos is not None and sin is not None:
        of_tables = cos.data_ptr() | sin.data_ptr()
    one_factor = descale_k is descale_v
    if not one_factor and descale_k is not None and descale_v is not None:
        one_factor = descale_k.data_ptr() == descale_v.data_ptr()
    return bits & 15, of_tables & 15, keys == values, one_factor


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
