"""flash_attn.modules.mha of version 1: attention modules whose diagonal begins at the first key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashtile.compat import mha
from flashtile.compat.flash_attn_1 import flash_attn_unpadded_kvpacked_func, flash_attn_unpadded_qkvpacked_func
from flashtile.compat.inner_attention import CrossAttention, SelfAttention

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention"]


class _FlashAttention(nn.Module):
    """Attention of packed inputs, dense or of several lengths.

    Args:
        causal: no key right of the diagonal is visible, which begins at the first key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
        triton: chose another kernel; there is one.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        triton: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.dropout_p = attention_dropout
        self.triton = triton

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.dropout_p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
        }


class FlashSelfAttention(_FlashAttention):
    """Attention of packed qkv to itself; arguments as told there."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """qkv `[batch, seq, 3, heads, head_dim]`; with cu_seqlens `[total, 3, heads, head_dim]` and max_seqlen."""
        rows, lengths, longest = _rows(qkv, cu_seqlens, max_seqlen)
        out = flash_attn_unpadded_qkvpacked_func(rows, lengths, longest, **self._options(causal))
        assert isinstance(out, Tensor)
        return out if cu_seqlens is not None else out.unflatten(0, qkv.shape[:2])


class FlashCrossAttention(_FlashAttention):
    """Attention of q to packed kv; arguments as told there."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """q `[batch, seq_q, heads, head_dim]` to kv `[batch, seq_k, 2, heads, head_dim]`; with cu_seqlens and
        cu_seqlens_k `[total, ...]` of both, and the longest of each."""
        rows_q, lengths_q, longest_q = _rows(q, cu_seqlens, max_seqlen)
        rows_k, lengths_k, longest_k = _rows(kv, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, max_seqlen_k)
        out = flash_attn_unpadded_kvpacked_func(
            rows_q, rows_k, lengths_q, lengths_k, longest_q, longest_k, **self._options(causal)
        )
        assert isinstance(out, Tensor)
        return out if cu_seqlens is not None else out.unflatten(0, q.shape[:2])


def _rows(x: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int]:
    """Packed rows, where sequences begin, and the longest; of a dense batch all have one length."""
    if cu_seqlens is not None:
        if longest is None:
            raise ValueError("max_seqlen: expected an int beside cu_seqlens, got None; it is the longest sequence")
        return x, cu_seqlens, longest
    batch, seq = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seq, seq


class MHA(mha.MHA):
    """Multi-head self-attention or cross-attention; arguments as those of the later version that have the same name.

    The causal diagonal of cross-attention with use_flash_attn begins at the first key.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, None, cross_attn, qkv_proj_bias, out_proj_bias, dropout, softmax_scale, causal,
            layer_idx, dwconv, rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved, False,
            (-1, -1), fused_bias_fc, use_flash_attn, return_residual, checkpointing, device, dtype,
        )  # fmt: skip
        if use_flash_attn:
            self.inner_attn = FlashSelfAttention(causal, softmax_scale, dropout)
            self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, fused_ft_kernel: bool = True
    ) -> Tensor:
        """An empty cache: `[batch_size, max_seqlen, 2, heads, head_dim]`, for either value of fused_ft_kernel."""
        return super().allocate_inference_cache(batch_size, max_seqlen, dtype)
