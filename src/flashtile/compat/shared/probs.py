"""The attention weights that `return_attn_probs` asks for: a matrix of `seq_q × seq_k`, by its definition.

A weight is `exp(score - maximum of its row)`: the softmax up to a factor of the row. It is negative where dropout took
it out, and 0 where the key is not visible.

    B batch or sequences, H query heads, G key/value heads, D head_dim, Sq, Sk (longest) lengths
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared.arguments import Window


class Scores(NamedTuple):
    """What a call does to its scores.

    Attributes:
        scale: factor; None is `1/sqrt(D)`.
        window: (left, right) keys visible on each side of the diagonal, None = unlimited; causal is (…, 0).
        top_left: the diagonal starts at the first key, else it ends at the last.
        softcap: their bound, 0 = none.
        alibi_slopes: `[H]` or `[B, H]`, or None.
    """

    scale: float | None
    window: Window
    top_left: bool = False
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None


def attention_probs(
    q: Tensor, k: Tensor, scores: Scores, dropout_seed: Tensor | None, dropout_p: float, multiple: tuple[int, int]
) -> Tensor:
    """The weights of a dense call.

    Args:
        q: `[B, Sq, H, D]`.
        k: `[B, Sk, G, D]`.
        scores: what else makes them.
        dropout_seed: of the call, or None where nothing is dropped.
        dropout_p: of the call.
        multiple: rows and columns are padded with 0 to multiples of these.

    Returns:
        `[B, H, Sq', Sk']` in q's dtype.
    """
    lengths_q, lengths_k = (torch.full(x.shape[:1], x.shape[1], device=q.device) for x in (q, k))
    return _weights(q, k, lengths_q, lengths_k, scores, dropout_seed, dropout_p, multiple)


def packed_attention_probs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scores: Scores,
    dropout_seed: Tensor | None,
    dropout_p: float,
    multiple: tuple[int, int],
) -> Tensor:
    """The weights of a packed call, q `[total_q, H, D]` and k `[total_k, G, D]`: those of each sequence from its start.

    Returns:
        `[B, H, max_seqlen_q', max_seqlen_k']` in q's dtype; other arguments as `attention_probs`.
    """
    if max_seqlen_q is None or max_seqlen_k is None:
        raise TypeError(
            "max_seqlen: expected ints with return_attn_probs, got a tensor on a GPU; reading it would synchronise"
        )
    dense_q = padded_rows(q, cu_seqlens_q, max_seqlen_q)
    dense_k = padded_rows(k, cu_seqlens_k, max_seqlen_k)
    lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    return _weights(dense_q, dense_k, *lengths, scores, dropout_seed, dropout_p, multiple)


def padded_rows(x: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Packed rows as `[B, longest, ...]`; what lies past a sequence's end may be anything finite or not."""
    if not x.shape[0]:
        return x.new_zeros(cu_seqlens.shape[0] - 1, longest, *x.shape[1:])
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=x.device)
    return x[rows.clamp(max=x.shape[0] - 1)]


@torch.no_grad()
def _weights(
    q: Tensor,
    k: Tensor,
    lengths_q: Tensor,
    lengths_k: Tensor,
    call: Scores,
    dropout_seed: Tensor | None,
    dropout_p: float,
    multiple: tuple[int, int],
) -> Tensor:
    batch, seq_q, heads, head_dim = q.shape
    seq_k, heads_kv = k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(head_dim) if call.scale is None else call.scale
    # [B, G, H / G, Sq, D] · [B, G, 1, D, Sk]
    queries = q.to(wide).transpose(1, 2).unflatten(1, (heads_kv, heads // heads_kv))
    scores = queries @ k.to(wide).permute(0, 2, 3, 1)[:, :, None] * scale
    scores = scores.flatten(1, 2)  # [B, H, Sq, Sk]
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    row, column = torch.arange(seq_q, device=q.device)[:, None], torch.arange(seq_k, device=q.device)
    to_last = (
        row + (lengths_k - lengths_q)[:, None, None, None]
    )  # [B, 1, Sq, 1], where the last query is at the last key
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(wide)[..., None, None]
        scores = scores - slopes * (to_last - column).abs()
    visible = (row < lengths_q[:, None, None, None]) & (column < lengths_k[:, None, None, None])
    visible = visible & _band(row if call.top_left else to_last, column, call.window)
    scores = scores.masked_fill(~visible, -math.inf)
    if seq_k:
        highest = scores.amax(-1, keepdim=True)
        scores = scores - highest.masked_fill(highest.isneginf(), 0)
    weights = scores.exp()
    if dropout_seed is not None:
        kept = flashtile.dropout_mask(dropout_seed, dropout_p, batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k)
        weights = torch.where(kept, weights, -weights)
    rows, columns = (-(-size // of) * of for size, of in zip((seq_q, seq_k), multiple))
    return torch.nn.functional.pad(weights.to(q.dtype), (0, columns - seq_k, 0, rows - seq_q))


def _band(diagonal: Tensor, column: Tensor, window: Window) -> Tensor:
    left, right = window
    visible = torch.ones_like(diagonal - column, dtype=torch.bool)
    if left is not None:
        visible = visible & (column >= diagonal - left)
    if right is not None:
        visible = visible & (column <= diagonal + right)
    return visible
