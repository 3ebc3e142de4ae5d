"""flash_attn.flash_blocksparse_attention over `flashtile.modules.FlashBlocksparseAttention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashtile import modules
from flashtile.compat.shared.arguments import refuse, refuse_given

_NO_MASK = "what is visible is said by sparsity_config, and padding by key_padding_mask"


class FlashBlocksparseAttention(nn.Module):
    """Block-sparse self-attention without projections.

    Args:
        sparsity_config: an object whose `make_layout(length)` gives a layout of tiles of 16 × 256, or a function from a
            length to a `flashtile.BlockMask`.
        softmax_temp: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
        max_seq_length: the longest sequence.
        device, dtype: there are no parameters; the mask goes where qkv is.
    """

    def __init__(
        self,
        sparsity_config: Any,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.0,
        max_seq_length: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_config(sparsity_config)
        self.softmax_temp = softmax_temp
        self.dropout_p = attention_dropout
        self.max_seq_length = max_seq_length
        self.attention = modules.FlashBlocksparseAttention(sparsity_config, softmax_temp, attention_dropout)

    def forward(
        self,
        qkv: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Any = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
        convert_mask: bool = True,
    ) -> tuple[Tensor, None]:
        """Attention of qkv `[batch, seq, 3, heads, head_dim]`, or with cu_seqlens `[total, 3, heads, head_dim]`.

        Args:
            attn_mask: must be None.
            key_padding_mask: bool `[batch, seq]`, True = keep, or an object with such a `bool_matrix`.
            causal: no token sees later ones.
            cu_seqlens, max_s: of packed sequences.
            need_weights: must be False.
            convert_mask: says in which form the mask is kept, and changes nothing here.

        Returns:
            The output, of the shape of q, and None in the place of weights.
        """
        refuse_given(_NO_MASK, attn_mask=attn_mask)
        longest = max_s if cu_seqlens is not None else qkv.shape[1]
        if longest is not None and longest > self.max_seq_length:
            refuse("max_seq_length", f"at least {longest}, the sequence of the call", self.max_seq_length, "raise it")
        mask = getattr(key_padding_mask, "bool_matrix", key_padding_mask)
        return self.attention(qkv, mask, bool(causal), cu_seqlens, max_s, need_weights)


class FlashBlocksparseMHA(nn.Module):
    """Multi-head self-attention with projections around `FlashBlocksparseAttention`; arguments as there."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        sparsity_config: Any,
        bias: bool = True,
        batch_first: bool = True,
        attention_dropout: float = 0.0,
        causal: bool = False,
        max_seq_length: int = 2048,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if kwargs:
            raise TypeError(f"{next(iter(kwargs))}: expected no argument of this name; it is not known")
        if not batch_first:
            refuse("batch_first", "True", False, "transpose the input to [batch, seq, embed_dim]")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads, {num_heads}, got {embed_dim}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.causal = causal
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.inner_attn = FlashBlocksparseAttention(
            sparsity_config, attention_dropout=attention_dropout, max_seq_length=max_seq_length
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(
        self,
        x: Tensor,
        x_ignored_: Any,
        x_ignored_1_: Any,
        attn_mask: Tensor | None = None,
        key_padding_mask: Any = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """Attention of x `[batch, seq, embed_dim]` to itself.

        `x_ignored_` and `x_ignored_1_` stand where other modules have keys and values: they must be x, or None.
        """
        for name, given in (("x_ignored_", x_ignored_), ("x_ignored_1_", x_ignored_1_)):
            if given is not None and given is not x:
                refuse(name, "x or None", given, "this is self-attention")
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        out, _ = self.inner_attn(qkv, attn_mask, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(2)), None


def _check_config(sparsity_config: Any) -> None:
    if not (callable(sparsity_config) or hasattr(sparsity_config, "make_layout")):
        raise TypeError(
            f"sparsity_config: expected an object with make_layout(length), or a function, got "
            f"{type(sparsity_config).__name__}; instantiate a configuration first"
        )
