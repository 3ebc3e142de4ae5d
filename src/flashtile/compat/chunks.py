"""`attention_chunk`: a query sees the keys of its own chunk of positions, and of no other.

Position `i + seq_k - seq_q` of a query and position `j` of a key are cut into chunks of `attention_chunk` positions.
The queries of a chunk are neighbours, and so are its keys, and its last query lies at its last key. Each chunk is
therefore a sequence of its own, and attention in chunks is `flashtile.attention_varlen` over these shorter sequences.
So all backends serve it, forward and backward, with causal masks and windows, and compute only what is visible.

    B sequences, N chunks of all of them
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """The chunks of packed sequences as sequences.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: `[N + 1]`, in the dtype of those of the sequences.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        sequence: `[N]` int64, the sequence that each chunk belongs to.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    sequence: Tensor


def chunks_of(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    totals: tuple[int, int],
    chunk: int,
) -> Chunks:
    """Cuts packed sequences into chunks. Nothing waits for the GPU: N is an upper bound, and the rest are empty.

    Args:
        cu_seqlens_q, cu_seqlens_k: `[B + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest, if the host knows it.
        totals: rows of all queries, and of all keys.
        chunk: positions of a chunk, at least 1.
    """
    longest_q, longest_k = (
        total if length is None else length for length, total in zip((max_seqlen_q, max_seqlen_k), totals)
    )
    batch = cu_seqlens_q.shape[0] - 1
    starts_q, starts_k = cu_seqlens_q[:-1].long(), cu_seqlens_k[:-1].long()
    lengths_q, lengths_k = cu_seqlens_q.diff().long(), cu_seqlens_k.diff().long()
    shift = lengths_k - lengths_q  # position of the first query; below 0 there are chunks without keys
    first = shift.div(chunk, rounding_mode="floor").clamp(max=0)
    counts = -(-lengths_k).div(chunk, rounding_mode="floor") - first
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))  # [B + 1], where the chunks of each sequence begin
    # A sequence has at most max(queries, keys) / chunk + 2 of them.
    bound = min((totals[0] + totals[1]) // chunk, batch * (max(longest_q, longest_k) // chunk)) + 2 * batch
    slot = torch.arange(bound, device=cu_seqlens_q.device)
    sequence = (torch.searchsorted(ends, slot, right=True) - 1).clamp(max=max(batch - 1, 0))
    position = (slot - ends[sequence] + first[sequence]) * chunk  # [N], where each chunk begins
    rows_q = starts_q[sequence] + _within(position - shift[sequence], lengths_q[sequence])
    rows_k = starts_k[sequence] + _within(position, lengths_k[sequence])
    return Chunks(
        torch.cat((rows_q.to(cu_seqlens_q.dtype), cu_seqlens_q[-1:])),
        torch.cat((rows_k.to(cu_seqlens_k.dtype), cu_seqlens_k[-1:])),
        min(longest_q, chunk),
        min(longest_k, chunk),
        sequence,
    )


def chunk_begins(lengths: Tensor, left_padding: Tensor | None, chunk: int) -> Tensor:
    """The first key that the last query of each sequence sees, `[B]`, counted as `lengths` are.

    Args:
        lengths: `[B]`, how many keys there are.
        left_padding: `[B]`, how many keys at the beginning do not count and have no position, or None.
    """
    padding = torch.zeros_like(lengths) if left_padding is None else left_padding.to(lengths.dtype)
    last = (lengths - padding - 1).clamp(min=0)
    return padding + last - last % chunk


def _within(row: Tensor, length: Tensor) -> Tensor:
    return torch.minimum(row.clamp(min=0), length)
