"""`flash_attn_combine` of FlashAttention-3 and 4: attention over disjoint keys, put together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import flashtile
from flashtile.compat.rows import locate_rows


def combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Puts together attention over disjoint keys, by `flashtile.logsumexp_merge`.

    Args:
        out_partial: float32 `[parts, batch, seq, heads, head_dim]`, packed `[parts, total, heads, head_dim]`.
        lse_partial: float32 `[parts, batch, seq, heads]`, packed `[parts, total, heads]`.
        out: a buffer for the result.
        out_dtype: of the result; default that of out_partial.
        cu_seqlens: `[batch + 1]` of packed rows; read only beside seqused.
        seqused: `[batch]`, how many rows of each sequence there are. Other rows are 0, or as they are in `out`, and
            their lse is -inf.

    Returns:
        out `[batch, seq, heads, head_dim]` and lse `[batch, seq, heads]`, packed `[total, ...]`.
    """
    merged, lse = flashtile.logsumexp_merge(out_partial.unbind(0), lse_partial.transpose(-1, -2).unbind(0))
    lse = lse.transpose(-1, -2)
    merged = merged.to(out_partial.dtype if out_dtype is None else out_dtype)
    if out is not None and (out.shape != merged.shape or (out_dtype is not None and out.dtype is not out_dtype)):
        raise ValueError(
            f"out: expected {merged.dtype} {list(merged.shape)}, got {out.dtype} {list(out.shape)}; the result is "
            "written to it"
        )
    if seqused is not None:
        there = _used(merged, cu_seqlens, seqused)
        lse = lse.masked_fill(~there[..., None], -math.inf)
        merged = torch.where(there[..., None, None], merged, 0 if out is None else out.to(merged.dtype))
    return merged if out is None else out.copy_(merged), lse


def _used(merged: Tensor, cu_seqlens: Tensor | None, seqused: Tensor) -> Tensor:
    """Which rows count: bool in the shape of the rows."""
    if merged.dim() == 4:
        return torch.arange(merged.shape[1], device=merged.device) < seqused[:, None]
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: expected [batch + 1] beside seqused of packed rows, got None; say where they lie")
    sequence, within, inside = locate_rows(cu_seqlens, merged.shape[0])
    return inside & (within < seqused[sequence])
