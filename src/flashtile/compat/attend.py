"""Calls of FlashAttention-3 and 4, which always compute a log-sum-exp.

Beside the arguments of version 2 they have chunks of positions, a second product in the scores, and 8-bit inputs that
may require grad. Position `i + seq_k - seq_q` of a query and position `j` of a key are cut into chunks, and a query
sees the keys of its own chunk only. The queries of a chunk are neighbours, and so are its keys, and its last query
lies at its last key: each chunk is a sequence of its own, and only what is visible is computed.

    B batch or sequences, N chunks of all of them, H query heads, G key/value heads, R rows, Sq, Sk (longest) lengths,
    D, Dv columns
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtile.compat.adapter import refuse
from flashtile.compat.calls import (
    Call,
    Packed,
    as_dense,
    computed,
    equal_lengths,
    window,
    with_longest,
    with_packed_keys,
)
from flashtile.compat.rows import locate_rows, only_used_rows

#: The widest heads of q and k that flashtile's kernels take.
_WIDEST = 512
#: Scores of a second product that are in memory at a time.
_SCORES = 1 << 25


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed | None, call: Call, *, used: Tensor | None = None, chunk: int = 0,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a dense batch, or with a layout of packed sequences.

    Args:
        q, k, v: as `flashtile.attention` and `attention_varlen`; with pages in the layout k and v are pages.
        layout: where packed sequences lie, or None.
        call: the options; block_mask and score_mod go without chunks. Without a scale it is
            `1/sqrt(columns of q and qv)`.
        used: `[B]`, how many queries of each packed sequence there are, or None for all. Other rows are 0 and -inf.
        chunk: positions of a chunk, 0 for no chunks.
        qv: in the shape of q with the columns of v: scores are those of `q kᵀ + qv vᵀ`.

    Returns:
        out and lse `[B, H, Sq]`, packed `[H, total_q]`.
    """
    if chunk < 0:
        refuse("attention_chunk", "at least 0, which is no chunks", chunk, "it counts positions")
    if q.dtype is not torch.float8_e4m3fn:
        return _attend(q, k, v, layout, call, used=used, chunk=chunk, qv=qv)
    if qv is not None:
        refuse("qv", "None beside float8_e4m3fn inputs", qv, "pass 16-bit q, k, v and qv")
    inputs = q, k, v, *(descale for descale in call.descales if descale is not None)
    with torch.no_grad():
        results = _attend(q, k, v, layout, call, used=used, chunk=chunk)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _WithoutBackward.apply(*results, *inputs) if recorded else results


class _WithoutBackward(torch.autograd.Function):
    """The results of a forward that has no backward: they require grad, and only a backward raises."""

    @staticmethod
    def forward(ctx, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return out.detach(), lse.detach()

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        raise NotImplementedError(
            "q, k, v: expected 16-bit inputs where a backward runs, got float8_e4m3fn, which has a forward only; cast "
            "them, or detach the result"
        )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Packed | None, call: Call, *, used: Tensor | None = None, chunk: int,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if layout is None and chunk and not q.shape[1] <= k.shape[1] <= chunk:
        layout = Packed(equal_lengths(q), equal_lengths(k), q.shape[1], k.shape[1])
        of_qv = None if qv is None else qv.flatten(0, 1)
        batch, rows = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return as_dense(*_attend(q, k, v, layout, call, chunk=chunk, qv=of_qv), batch, rows)
    if layout is not None:
        k, v, layout = with_packed_keys(k, v, with_longest(layout))
        assert layout is not None
        if used is not None:
            rows_of_q, ends, back = only_used_rows(q, layout.cu_seqlens_q, used)
            of_qv = None if qv is None else only_used_rows(qv, layout.cu_seqlens_q, used)[0]
            return back(*_attend(rows_of_q, k, v, layout._replace(cu_seqlens_q=ends), call, chunk=chunk, qv=of_qv))
        if chunk:
            layout, sequence = _chunks(layout, (q.shape[0], k.shape[0]), chunk)
            descales = tuple(None if one is None else one.index_select(0, sequence) for one in call.descales)
            call = call._replace(descales=descales)
    if qv is not None:
        if qv.shape != (*q.shape[:-1], v.shape[-1]) or qv.dtype is not q.dtype:
            raise ValueError(
                f"qv: expected {q.dtype} {[*q.shape[:-1], v.shape[-1]]}, the rows and heads of q with the columns of "
                f"v, got {qv.dtype} {list(qv.shape)}"
            )
        columns = q.shape[-1] + v.shape[-1]
        if call.softmax_scale is None:
            call = call._replace(softmax_scale=columns**-0.5)
        if columns > _WIDEST:
            for name in ("sinks", "score_mod", "block_mask"):
                if (given := getattr(call, name)) is not None:
                    refuse(name, f"None beside q and qv of {columns} columns", given, f"up to {_WIDEST} it is served")
            return _with_second_product(q, k, v, qv, layout, call)
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    return computed(q, k, v, layout, call, return_lse=True)


def _chunks(layout: Packed, totals: tuple[int, int], chunk: int) -> tuple[Packed, Tensor]:
    """Cuts packed sequences, of so many rows of queries and of keys, into chunks of so many positions: their layout,
    and the sequence of each, `[N]` int64. Nothing waits for the GPU: N is an upper bound, and the rest are empty."""
    ends_q, ends_k, *longest = layout[:4]
    longest_q, longest_k = (total if most is None else most for most, total in zip(longest, totals))
    batch = ends_q.shape[0] - 1
    lengths_q, lengths_k = ends_q.diff().long(), ends_k.diff().long()
    shift = lengths_k - lengths_q  # position of the first query; below 0 there are chunks without keys
    first = shift.div(chunk, rounding_mode="floor").clamp(max=0)
    counts = -(-lengths_k).div(chunk, rounding_mode="floor") - first
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))  # [B + 1], where the chunks of each sequence begin
    # A sequence has at most max(queries, keys) / chunk + 2 of them.
    bound = min(sum(totals) // chunk, batch * (max(longest_q, longest_k) // chunk)) + 2 * batch
    slot = torch.arange(bound, device=ends_q.device)
    sequence = (torch.searchsorted(begins, slot, right=True) - 1).clamp(max=max(batch - 1, 0))
    position = (slot - begins[sequence] + first[sequence]) * chunk  # [N], where each chunk begins

    def cut(ends: Tensor, position: Tensor, lengths: Tensor) -> Tensor:
        row = ends[:-1].long()[sequence] + torch.minimum(position.clamp(min=0), lengths[sequence])
        return torch.cat((row.to(ends.dtype), ends[-1:]))

    cut_q, cut_k = cut(ends_q, position - shift[sequence], lengths_q), cut(ends_k, position, lengths_k)
    return Packed(cut_q, cut_k, min(longest_q, chunk), min(longest_k, chunk)), sequence


def chunk_begins(lengths: Tensor, left_padding: Tensor | None, chunk: int) -> Tensor:
    """The first key that the last query of each sequence sees, `[B]`, counted as `lengths` are. `left_padding`: `[B]`,
    how many of these keys at the beginning do not count and have no position, or None."""
    padding = torch.zeros_like(lengths) if left_padding is None else left_padding.to(lengths.dtype)
    last = (lengths - padding - 1).clamp(min=0)
    return padding + last - last % chunk


def _with_second_product(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, layout: Packed | None, call: Call
) -> tuple[Tensor, Tensor]:
    """out and lse where the columns of q and qv are more than flashtile's kernels take; differentiable. PyTorch's
    operations compute a few rows at a time, and again in a backward. The options scale, causal, window and soft cap
    count."""
    if layout is None:
        return _scored(q, k, v, qv, None, call)
    longest_q = q.shape[0] if layout.max_seqlen_q is None else layout.max_seqlen_q
    longest_k = k.shape[0] if layout.max_seqlen_k is None else layout.max_seqlen_k
    # [B, longest]: the row in each place, the number of all rows where there is none.
    rows_q = _aligned_rows(layout.cu_seqlens_q, longest_q, q.shape[0])
    rows_k = _aligned_rows(layout.cu_seqlens_k, longest_k, k.shape[0])
    out, lse = _scored(
        _taken(q, rows_q), _taken(k, rows_k), _taken(v, rows_k), _taken(qv, rows_q), rows_k < k.shape[0], call
    )
    sequence, within, there = locate_rows(layout.cu_seqlens_q, q.shape[0])
    place = (sequence + 1) * longest_q - layout.cu_seqlens_q.diff()[sequence] + within
    place, lse = torch.where(there, place, rows_q.numel()), lse.transpose(1, 2).flatten(0, 1)
    return _taken(out.flatten(0, 1), place), _taken(lse, place, -math.inf).t().contiguous()


def _aligned_rows(cu_seqlens: Tensor, longest: int, total: int) -> Tensor:
    """The rows of each sequence, its last one in the last place, so that all diagonals are one."""
    row = cu_seqlens[1:, None] - longest + torch.arange(longest, device=cu_seqlens.device)
    return torch.where(row >= cu_seqlens[:-1, None], row, total).long()


def _taken(x: Tensor, rows: Tensor, otherwise: float = 0.0) -> Tensor:
    """Rows of x by their numbers; a number past the end takes a row of `otherwise`."""
    padded = torch.cat((x, x.new_full((1, *x.shape[1:]), otherwise)))
    return padded.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _scored(q: Tensor, k: Tensor, v: Tensor, qv: Tensor, there: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
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
    """out `[B, R, H, Dv]` and lse `[B, H, R]` of some rows: q `[B, R, H, D]`, qv `[B, R, H, Dv]`, keys `[B, G, Sk, D]`,
    values `[B, G, Sk, Dv]`, all float32; visible broadcasts to `[B, 1, 1, R, Sk]`."""
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
