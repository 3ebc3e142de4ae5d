"""What attention over a key/value cache means, apart from the numbers in its tensors.

Sequence `b` owns the rows from `left[b]` to `length[b]` of its part of the cache. New keys and values, where there are
any, go to the rows from `length[b]` on, and the sequence is `seq_new` longer before anything is read::

    k_cache[b, length + i] = rotated(k[b, i], position = length + i)         v_cache[b, length + i] = v[b, i]
    q[b, i]                = rotated(q[b, i], position = length + i, without a band: length)
    total                  = length + seq_new

`seq_new` and `seq_q` are numbers of one sequence: in a packed call each has its own. Query `i` lies at row
`i + total - seq_q`, and sees row `j` when::

    left <= j < total  and  diagonal - window_left <= j <= diagonal + window_right        diagonal = i + total - seq_q

Scores are those of `flashtile.attention`, with the distances of ALiBi counted from that diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Largest head dimension (of q/k, and separately of v) that any backend takes.
MAX_HEAD_DIM = 512


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
    """

    length: int
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    interleaved: bool = False
    num_splits: int = 0
    max_seqlen_q: int = 0

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
        v: the same with head_dim_v.
        cache_lengths: `[batch]` integers, rows of each sequence that are in the cache already.
        cache_batch_indices: `[batch]` integers, the entry of the cache that belongs to each sequence.
        cache_left_padding: `[batch]` integers, the first row of each sequence.
        block_table: `[batch, max_pages]` integers, the pages of each sequence in their order.
        rotary_cos, rotary_sin: `[positions, rotary_dim / 2]`.
        alibi_slopes: `[heads_q]` or `[batch, heads_q]`, in the dtype of lse.
        sinks: `[heads_q]`, in the dtype of lse.
        cu_seqlens_q: `[batch + 1]` integers, where the queries of each sequence begin in a packed call.
        cu_seqlens_new: the same for k and v; None without them.
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


def lengths_before(call: CacheCall, spec: CacheSpec) -> Tensor:
    """Rows of each sequence before anything is appended: `[batch]` int64."""
    if call.cache_lengths is not None:
        return call.cache_lengths.long()
    return torch.full((call.batch,), spec.length, device=call.q.device)


def query_counts(call: CacheCall) -> list[int]:
    """Queries of each sequence. Like all that follow, for backends and checks that read values on the host."""
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


def results_of(call: CacheCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) as the call returns them, from those of all queries one after another: `[total_q, heads_q,
    head_dim_v]` and `[heads_q, total_q]`."""
    if call.cu_seqlens_q is not None:
        return out, lse
    batch, seq_q, heads, _ = call.q.shape
    return out.view(batch, seq_q, heads, out.shape[-1]), lse.view(heads, batch, seq_q).transpose(0, 1).contiguous()
