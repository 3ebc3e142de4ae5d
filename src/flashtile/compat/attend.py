"""Calls of FlashAttention-3 and FlashAttention-4, which always compute a log-sum-exp.

Beside the arguments of version 2 they have chunks of positions, a second product in the scores, and 8-bit inputs that
may require grad.

    B batch or sequences, H query heads, Sq queries
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.compat.arguments import refuse
from flashtile.compat.calls import (
    Call,
    Packed,
    as_dense,
    computed,
    equal_lengths,
    with_longest,
    with_packed_keys,
)
from flashtile.compat.chunks import chunks_of
from flashtile.compat.rows import only_used_rows
from flashtile.compat.second_product import attend_with_second_product

#: The widest heads of q and k that flashtile's kernels take.
_WIDEST = 512


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Packed | None,
    call: Call,
    *,
    used: Tensor | None = None,
    chunk: int = 0,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a dense batch, or with a layout of packed sequences.

    Args:
        q, k, v: as `flashtile.attention` and `attention_varlen`; with pages in the layout k and v are pages.
        layout: where packed sequences lie, or None.
        call: the options; block_mask and score_mod go without chunks and qv. Without a scale it is
            `1/sqrt(columns of q and qv)`.
        used: `[B]`, how many queries of each packed sequence there are, or None for all. Other rows are 0 and -inf.
        chunk: positions of a chunk, 0 for no chunks (`flashtile.compat.chunks`).
        qv: in the shape of q with the columns of v: scores are those of `q kᵀ + qv vᵀ`.

    Returns:
        out and lse `[B, H, Sq]`, packed `[H, total_q]`.
    """
    if q.dtype is not torch.float8_e4m3fn:
        return _of_used_rows(q, k, v, layout, call, used, chunk, qv)
    if qv is not None:
        refuse("qv", "None beside float8_e4m3fn inputs", qv, "pass 16-bit q, k, v and qv")
    inputs = q, k, v, *(descale for descale in call.descales if descale is not None)
    with torch.no_grad():
        results = _of_used_rows(q, k, v, layout, call, used, chunk, None)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _WithoutBackward.apply(*results, *inputs) if recorded else results


def _of_used_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Packed | None,
    call: Call,
    used: Tensor | None,
    chunk: int,
    qv: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if layout is None:
        return _attend(q, k, v, None, call, chunk, qv)
    k, v, packed = with_packed_keys(k, v, with_longest(layout))
    assert packed is not None
    layout = packed
    if used is None:
        return _attend(q, k, v, layout, call, chunk, qv)
    rows = only_used_rows(q, layout.cu_seqlens_q, used)
    qv = None if qv is None else only_used_rows(qv, layout.cu_seqlens_q, used).x
    return rows.back(*_attend(rows.x, k, v, layout._replace(cu_seqlens_q=rows.cu_seqlens), call, chunk, qv))


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Packed | None,
    call: Call,
    chunk: int,
    qv: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if chunk:
        if chunk < 0:
            refuse("attention_chunk", "at least 0, which is no chunks", chunk, "it counts positions")
        if layout is None:
            return _dense_in_chunks(q, k, v, call, chunk, qv)
        call, layout = _in_chunks(call, layout, q.shape[0], k.shape[0], chunk)
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
            return attend_with_second_product(q, k, v, qv, layout, call)
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    return computed(q, k, v, layout, call, return_lse=True)


def _dense_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, call: Call, chunk: int, qv: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A dense call in chunks, as a packed one of its batch entries."""
    (batch, seq_q), seq_k = q.shape[:2], k.shape[1]
    if seq_q <= seq_k <= chunk:
        return _attend(q, k, v, None, call, 0, qv)
    layout = Packed(equal_lengths(q), equal_lengths(k), seq_q, seq_k)
    q, k, v, qv = (None if tensor is None else tensor.flatten(0, 1) for tensor in (q, k, v, qv))  # type: ignore
    out, lse = _attend(q, k, v, layout, call, chunk, qv)
    return as_dense(out, lse, batch, seq_q)


def _in_chunks(call: Call, layout: Packed, total_q: int, total_k: int, chunk: int) -> tuple[Call, Packed]:
    """Options and layout of a packed call whose sequences are chunks."""
    chunks = chunks_of(*layout[:4], (total_q, total_k), chunk)
    descales = tuple(None if descale is None else descale.index_select(0, chunks.sequence) for descale in call.descales)
    return call._replace(descales=descales), Packed(*chunks[:4])
