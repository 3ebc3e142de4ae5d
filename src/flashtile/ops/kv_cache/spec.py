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

from typing import NamedTuple

import torch
from torch import Tensor

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


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
