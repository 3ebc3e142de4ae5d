"""flash_attn.flash_attention: attention of packed qkv as a module, and with projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flashtile
from flashtile import modules
from flashtile.compat.shared.arguments import refuse

from .bert_padding import pad_input, unpad_input
from .flash_attn_interface import flash_attn_unpadded_qkvpacked_func

__all__ = ["FlashAttention", "FlashMHA"]


class FlashAttention(nn.Module):
    """Attention of packed queries, keys and values.

    Args:
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
    """

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout_p = attention_dropout

    def forward(
        self,
        qkv: Tensor,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Attention of qkv to itself.

        Args:
            qkv: `[batch, seq, 3, heads, head_dim]`, or with cu_seqlens `[total, 3, heads, head_dim]`.
            key_padding_mask: bool `[batch, seq]`, True = keep; rows that are not kept give 0.
            causal: no token sees later ones.
            cu_seqlens: `[batch + 1]`, with max_s, the longest sequence.
            need_weights: must be False.

        Returns:
            The output, of the shape of q, and None in the place of weights.
        """
        if need_weights:
            refuse("need_weights", "False", True, "attention weights are never in memory as a whole")
        dropout_p = self.dropout_p if self.training else 0.0
        if cu_seqlens is not None:
            if key_padding_mask is not None or max_s is None:
                raise ValueError(
                    "cu_seqlens: expected max_s beside it and no key_padding_mask; packed sequences have no padding"
                )
            return self._packed(qkv, cu_seqlens, max_s, dropout_p, causal), None
        if key_padding_mask is None:
            q, k, v = qkv.unbind(2)
            out = flashtile.attention(q, k, v, causal=bool(causal), scale=self.softmax_scale, dropout_p=dropout_p)
            return out, None
        rows, indices, cu_seqlens, longest = unpad_input(qkv, key_padding_mask)
        out = self._packed(rows, cu_seqlens, longest, dropout_p, causal)
        return pad_input(out, indices, qkv.shape[0], qkv.shape[1]), None

    def _packed(self, qkv: Tensor, cu_seqlens: Tensor, max_s: int, dropout_p: float, causal: bool) -> Tensor:
        out = flash_attn_unpadded_qkvpacked_func(qkv, cu_seqlens, max_s, dropout_p, self.softmax_scale, causal)
        assert isinstance(out, Tensor)
        return out


class FlashMHA(modules.FlashMHA):
    """`flashtile.modules.FlashMHA`: projections around attention, which return a pair."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, bias, batch_first, attention_dropout, causal, device, dtype)
