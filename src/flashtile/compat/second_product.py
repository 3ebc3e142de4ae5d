"""Scores of two products, `q kᵀ + qv vᵀ`, where their columns together are more than flashtile's kernels take.

PyTorch's own operations compute a few rows at a time. The memory is that of a few rows of scores, in a backward too,
which computes the scores again.

    B batch or sequences   H query heads   G key/value heads   R rows   Sq, Sk (longest) lengths   D, Dv columns
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtile.compat.arguments import window
from flashtile.compat.calls import Call, Packed
from flashtile.compat.rows import locate_rows

#: Scores that are in memory at a time.
_SCORES = 1 << 25


def attend_with_second_product(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, layout: Packed | None, call: Call
) -> tuple[Tensor, Tensor]:
    """out and lse of a dense or packed call, differentiable in its four tensors.

    Args:
        q: `[B, Sq, H, D]`, packed `[total_q, H, D]`; k `[B, Sk, G, D]` and v `[B, Sk, G, Dv]`, or packed.
        qv: as q, with Dv columns.
        layout: where packed sequences lie, one after another, or None.
        call: scale, causal, window and soft cap count; the others have their defaults.
    """
    if layout is None:
        return _attend(q, k, v, qv, None, call)
    longest_q = q.shape[0] if layout.max_seqlen_q is None else layout.max_seqlen_q
    longest_k = k.shape[0] if layout.max_seqlen_k is None else layout.max_seqlen_k
    # [B, longest]: the row in each place, the number of all rows where there is none.
    rows_q = _aligned_rows(layout.cu_seqlens_q, longest_q, q.shape[0])
    rows_k = _aligned_rows(layout.cu_seqlens_k, longest_k, k.shape[0])
    out, lse = _attend(
        _taken(q, rows_q), _taken(k, rows_k), _taken(v, rows_k), _taken(qv, rows_q), rows_k < k.shape[0], call
    )
    sequence, within, there = locate_rows(layout.cu_seqlens_q, q.shape[0])
    place = (sequence + 1) * longest_q - layout.cu_seqlens_q.diff()[sequence] + within
    place = torch.where(there, place, rows_q.numel())
    return _taken(out.flatten(0, 1), place), _taken(
        lse.transpose(1, 2).flatten(0, 1), place, -math.inf
    ).t().contiguous()


def _aligned_rows(cu_seqlens: Tensor, longest: int, total: int) -> Tensor:
    """The rows of each sequence, its last one in the last place, so that all diagonals are one."""
    row = cu_seqlens[1:, None] - longest + torch.arange(longest, device=cu_seqlens.device)
    return torch.where(row >= cu_seqlens[:-1, None], row, total).long()


def _taken(x: Tensor, rows: Tensor, otherwise: float = 0.0) -> Tensor:
    """Rows of x by their numbers; a number past the end takes a row of `otherwise`."""
    padded = torch.cat((x, x.new_full((1, *x.shape[1:]), otherwise)))
    return padded.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, qv: Tensor, there: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Dense, the last query at the last key. `there`: bool `[B, Sk]`, which keys there are."""
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).transpose(1, 2) for x in (k, v))  # [B, G, Sk, ...]
    count = max(_SCORES // max(batch * heads * seq_k, 1), 1)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, qv))
    left, right = window(call.window_size)
    right = 0 if call.causal else right
    parts = [(v.new_zeros(batch, 0, heads, v.shape[-1], dtype=wide), v.new_zeros(batch, heads, 0, dtype=wide))]
    for first in range(0, seq_q, count):
        row = torch.arange(first, min(first + count, seq_q), device=q.device)
        distance = torch.arange(seq_k, device=q.device) - seq_k - (row[:, None] - seq_q)
        visible = torch.ones_like(distance, dtype=torch.bool)
        visible = visible if left is None else visible & (distance >= -left)
        visible = visible if right is None else visible & (distance <= right)
        visible = visible if there is None else visible & there[:, None, None, None]
        few = slice(first, first + count)
        inputs = q[:, few].to(wide), qv[:, few].to(wide), keys, values, visible, call
        parts.append(checkpoint(_part, *inputs, use_reentrant=False) if recorded else _part(*inputs))
    outs, lses = zip(*parts)
    return torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 2)


def _part(q: Tensor, qv: Tensor, keys: Tensor, values: Tensor, visible: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Some rows: q `[B, R, H, D]`, qv `[B, R, H, Dv]`, keys `[B, G, Sk, D]`, values `[B, G, Sk, Dv]`, all float32;
    visible broadcasts to `[B, 1, 1, R, Sk]`.

    Returns:
        out `[B, R, H, Dv]` and lse `[B, H, R]`.
    """
    rows, heads = q.shape[1:3]
    shape = heads // keys.shape[1], rows

    def by_group(x: Tensor) -> Tensor:  # [B, G, H / G · R, ...]
        return x.transpose(1, 2).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)

    assert call.softmax_scale is not None
    scores = by_group(q) @ keys.transpose(2, 3) + by_group(qv) @ values.transpose(2, 3)
    scores = scores.unflatten(2, shape) * call.softmax_scale  # [B, G, H / G, R, Sk]
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(blind, 0)
    lse = scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)
    out = (scores.softmax(-1).masked_fill(blind, 0).flatten(2, 3) @ values).unflatten(2, shape)
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)
