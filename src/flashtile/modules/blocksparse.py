"""Block-sparse attention under the names of the first FlashAttention: a function on packed qkv, and two modules.

Reference:
    Dao et al., "FlashAttention" (2022), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import flashtile
from flashtile import BlockMask
from flashtile.modules.attention import unpacked

#: Queries and keys of a tile of the original layouts.
TILE = (16, 256)

#: Makes the mask of a sequence length: a function, or an object with the original's `make_layout`.
Pattern = Callable[[int], BlockMask]


def flash_blocksparse_attn_func(
    qkv: Tensor, cu_seqlens: Tensor, blockmask: Tensor | BlockMask, dropout_p: float, max_s: int,
    softmax_scale: float | None = None, causal: bool = False, return_attn_probs: bool = False,
    convert_mask: bool = True,
) -> Tensor:  # fmt: skip
    """Block-sparse attention of packed sequences, each to itself.

    The call does not wait for the GPU if `blockmask` is a `BlockMask`. It converts a layout on every call, which waits.

    Args:
        qkv: `[total, 3, heads, head_dim]`; head_dim up to 512.
        cu_seqlens: `[batch + 1]` int32 or int64, where sequences begin and end.
        blockmask: `[ceil(max_s / 16), ceil(max_s / 256)]`, not 0 if a tile is visible; or a `BlockMask` for `max_s`
            queries and keys. A layout is the same for all sequences and heads; a `BlockMask` may differ between them.
        dropout_p: probability that an attention weight is dropped.
        max_s: length of the longest sequence.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        causal: tokens see no later tokens.
        return_attn_probs: must be False, because the weights are never in memory.
        convert_mask: must be True, because there is only one form of mask.

    Returns:
        `[total, heads, head_dim]`.

    Raises:
        TypeError, ValueError: as `flashtile.attention_varlen`, and if an argument is not what it must be.
    """
    if return_attn_probs:
        raise ValueError(
            "return_attn_probs: expected False, got True; attention weights are never in memory as a whole"
        )
    if not convert_mask:
        raise ValueError("convert_mask: expected True, got False; give the layout itself, or a flashtile.BlockMask")
    q, k, v = unpacked("qkv", qkv, 3, varlen=True)
    mask = blockmask if isinstance(blockmask, BlockMask) else BlockMask.from_layout(blockmask, TILE, max_s, max_s)
    return flashtile.attention_varlen(
        q, k, v, cu_seqlens, max_seqlen_q=max_s, max_seqlen_k=max_s, causal=causal, scale=softmax_scale,
        dropout_p=dropout_p, block_mask=mask,
    )  # fmt: skip


class FlashBlocksparseAttention(nn.Module):
    """Block-sparse self-attention without projections. It builds the mask of each length once and keeps it.

    Args:
        sparsity_config: a function from a sequence length to a `BlockMask`, such as `flashtile.patterns.butterfly`; or
            an object whose `make_layout(length)` returns a layout of tiles of 16 × 256.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.
    """

    def __init__(
        self, sparsity_config: Pattern | Any, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not (callable(sparsity_config) or hasattr(sparsity_config, "make_layout")):
            raise TypeError(
                "sparsity_config: expected a function from a length to a BlockMask, or an object with make_layout, got "
                f"{type(sparsity_config).__name__}; use a function of flashtile.patterns"
            )
        self.sparsity_config = sparsity_config
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self._masks: dict[tuple[int, torch.device], BlockMask] = {}

    def mask(self, length: int, device: torch.device) -> BlockMask:
        """The mask of a sequence length. Building it the first time may wait for the device."""
        key = length, device
        if key not in self._masks:
            # Kept for later calls, which may record a gradient: no inference tensors then.
            with torch.inference_mode(False):
                self._masks[key] = self._made(length).to(device)
        return self._masks[key]

    def _made(self, length: int) -> BlockMask:
        if not hasattr(self.sparsity_config, "make_layout"):
            return self.sparsity_config(length)
        layout = torch.as_tensor(self.sparsity_config.make_layout(length), device="cpu")
        return BlockMask.from_layout(layout, TILE, length, length)

    def forward(
        self, qkv: Tensor, key_padding_mask: Tensor | None = None, causal: bool = False,
        cu_seqlens: Tensor | None = None, max_s: int | None = None, need_weights: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of qkv to itself.

        Args:
            qkv: `[batch, seq, 3, heads, head_dim]`, or with cu_seqlens `[total, 3, heads, head_dim]`.
            key_padding_mask: bool `[batch, seq]`, True = keep; the output of the other rows is 0. Not with cu_seqlens.
            causal: tokens see no later tokens.
            cu_seqlens: `[batch + 1]`, where packed sequences begin and end.
            max_s: length of the longest packed sequence.
            need_weights: must be False.

        Returns:
            The output, in the shape of q, and None instead of weights.
        """
        if need_weights:
            raise ValueError("need_weights: expected False, got True; attention weights are never in memory as a whole")
        dropout_p = self.attention_dropout if self.training else 0.0
        if cu_seqlens is not None:
            if key_padding_mask is not None or max_s is None:
                raise ValueError(
                    "cu_seqlens: expected max_s beside it and no key_padding_mask; packed sequences have no padding"
                )
            mask = self.mask(max_s, qkv.device)
            out = flash_blocksparse_attn_func(qkv, cu_seqlens, mask, dropout_p, max_s, self.softmax_scale, causal)
            return out, None
        q, k, v = qkv.unbind(2)
        options: dict[str, Any] = {"causal": causal, "scale": self.softmax_scale, "dropout_p": dropout_p}
        if key_padding_mask is not None:
            options["mask"] = key_padding_mask[:, None, None, :]
        out = flashtile.attention(q, k, v, block_mask=self.mask(qkv.shape[1], qkv.device), **options)
        if key_padding_mask is not None:
            out = out * key_padding_mask[:, :, None, None]
        return out, None


class FlashBlocksparseMHA(nn.Module):
    """Multi-head self-attention with projections around `FlashBlocksparseAttention`.

    Args:
        embed_dim: width of inputs and outputs, a multiple of num_heads.
        num_heads: number of heads.
        sparsity_config: as for `FlashBlocksparseAttention`.
        bias: both projections have a bias.
        batch_first: must be True.
        attention_dropout: probability that an attention weight is dropped, in training.
        causal: tokens see no later tokens.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, sparsity_config: Pattern | Any, bias: bool = True,
        batch_first: bool = True, attention_dropout: float = 0.0, causal: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not batch_first:
            raise ValueError("batch_first: expected True, got False; transpose the input to [batch, seq, embed_dim]")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads, {num_heads}, got {embed_dim}")
        self.num_heads = num_heads
        self.causal = causal
        self.Wqkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.inner_attn = FlashBlocksparseAttention(sparsity_config, attention_dropout=attention_dropout)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """Attention of x `[batch, seq, embed_dim]` to itself; arguments and result as `FlashBlocksparseAttention`."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        out, _ = self.inner_attn(qkv, key_padding_mask=key_padding_mask, causal=self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(2)), None
