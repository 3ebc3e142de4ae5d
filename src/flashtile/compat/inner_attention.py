"""Attention of packed qkv, or of q and packed kv, without projections, as modules: those with padding masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flashtile
from flashtile import modules


class FlashSelfAttention(modules.FlashSelfAttention):
    """`flashtile.modules.FlashSelfAttention`: dense or packed qkv; dropout in training only."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)


class FlashCrossAttention(modules.FlashCrossAttention):
    """`flashtile.modules.FlashCrossAttention`: q and kv, dense or packed; dropout in training only."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)


class _MaskedAttention(nn.Module):
    """Attention of dense inputs with a padding mask.

    Args:
        causal: no key right of the diagonal is visible, which ends at the last key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
    """

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
        dropout_p = self.drop.p if self.training else 0.0
        return flashtile.attention(q, k, v, causal=causal, scale=self.softmax_scale, mask=mask, dropout_p=dropout_p)

    def _causal(self, causal: bool | None) -> bool:
        return self.causal if causal is None else bool(causal)


class SelfAttention(_MaskedAttention):
    """Attention of packed qkv with a padding mask."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention of qkv `[batch, seq, 3, heads, head_dim]` to itself.

        `key_padding_mask` is bool `[batch, seq]`, True = keep. A query that sees no key gives 0.
        """
        q, k, v = qkv.unbind(2)
        mask = None if key_padding_mask is None else _visible(key_padding_mask, q.shape[1], False)
        return self._attend(q, k, v, self._causal(causal), mask)


class CrossAttention(_MaskedAttention):
    """Attention of q to packed kv with a padding mask.

    Attributes:
        diagonal_ends_at_kept: with a padding mask, a causal diagonal ends at the last of as many keys as are kept, as
            if these came first; else at the last key.
    """

    diagonal_ends_at_kept = True

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attention of q `[batch, seq_q, heads, head_dim]` to kv `[batch, seq_k, 2, heads_kv, head_dim]`.

        `key_padding_mask` is bool `[batch, seq_k]`, True = keep. A query that sees no key gives 0.
        """
        k, v = kv.unbind(2)
        causal = self._causal(causal)
        if key_padding_mask is None:
            return self._attend(q, k, v, causal, None)
        if not self.diagonal_ends_at_kept:
            return self._attend(q, k, v, causal, _visible(key_padding_mask, q.shape[1], False))
        return self._attend(q, k, v, False, _visible(key_padding_mask, q.shape[1], causal))


def _visible(key_padding_mask: Tensor, seq_q: int, causal: bool) -> Tensor:
    """bool `[batch, 1, 1 | seq_q, seq_k]`."""
    kept = key_padding_mask.bool()[:, None, None, :]
    if not causal:
        return kept
    row = torch.arange(seq_q, device=kept.device)[:, None]
    column = torch.arange(kept.shape[-1], device=kept.device)
    return kept & (column <= row + kept.sum(-1, keepdim=True) - seq_q)
