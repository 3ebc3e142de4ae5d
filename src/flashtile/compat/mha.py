"""Multi-head attention as flash_attn's modules have it: projections, convolution, rotary embedding, KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import modules
from flashtile.compat.arguments import refuse, window
from flashtile.compat.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
)


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of ALiBi, one a head: `flashtile.modules.alibi_slopes` as a list."""
    return modules.alibi_slopes(nheads, "cpu").tolist()


class MHA(nn.Module):
    """Multi-head self-attention or cross-attention.

    State-dict keys are `Wqkv` (with cross_attn `Wq` and `Wkv`), `out_proj`, and with dwconv `dwconv_qkv` (with
    cross_attn or fewer heads of keys `dwconv_q` and `dwconv_kv`).

    Args:
        embed_dim: of inputs and outputs, a multiple of num_heads.
        num_heads: of the queries.
        num_heads_kv: of keys and values, a divisor of num_heads; default num_heads.
        cross_attn: keys and values come from a second input.
        qkv_proj_bias, out_proj_bias: the projections have biases.
        dropout: probability that an attention weight is dropped, in training.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        causal: no key right of the diagonal is visible.
        layer_idx: under which number an inference cache is kept.
        dwconv: a depthwise convolution of three tokens, none of them later, behind the input projections.
        rotary_emb_dim: elements of a head that are rotated; 0 = no rotary embedding.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: of the rotary embedding.
        use_alibi: scores have the biases of ALiBi; needs use_flash_attn.
        window_size: (left, right) number of keys visible on each side, -1 = unlimited; needs use_flash_attn.
        fused_bias_fc: the projections are `flashtile.modules.FusedDense`.
        use_flash_attn: packed inputs, and no padding masks; without it padding masks, and no packed inputs. Both are
            computed by flashtile.
        return_residual: also return the input.
        checkpointing: attention is computed again in the backward.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
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
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a multiple of num_heads, {num_heads}, got {embed_dim}")
        if num_heads_kv < 1 or num_heads % num_heads_kv:
            raise ValueError(f"num_heads_kv: expected a divisor of num_heads, {num_heads}, got {num_heads_kv}")
        self._check_options(cross_attn, rotary_emb_dim, use_alibi, window_size, use_flash_attn)
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.dwconv, self.use_flash_attn = dwconv, use_flash_attn
        self.rotary_emb_dim, self.window_size = rotary_emb_dim, window_size
        self.return_residual, self.checkpointing = return_residual, checkpointing
        self._packs = not cross_attn and num_heads_kv == num_heads
        self._make_layers(qkv_proj_bias, out_proj_bias, fused_bias_fc, device, dtype)
        if rotary_emb_dim:
            self.rotary_emb = modules.RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        slopes = modules.alibi_slopes(num_heads, "cpu") if use_alibi else None
        self.inner_attn: nn.Module
        self.inner_cross_attn: nn.Module
        if use_flash_attn:
            self.inner_attn = FlashSelfAttention(causal, softmax_scale, dropout, window_size, slopes)
            self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout, slopes, window_size)
        else:
            self.inner_attn = SelfAttention(causal, softmax_scale, dropout)
            self.inner_cross_attn = CrossAttention(causal, softmax_scale, dropout)
            self.inner_cross_attn.diagonal_ends_at_kept = cross_attn
        self._slopes, self._scale = slopes, softmax_scale

    @staticmethod
    def _check_options(
        cross_attn: bool, rotary_emb_dim: int, use_alibi: bool, window_size: tuple[int, int], use_flash_attn: bool
    ) -> None:
        if use_alibi and not use_flash_attn:
            refuse("use_alibi", "False without use_flash_attn", True, "pass use_flash_attn=True")
        if window(window_size) != (None, None) and not use_flash_attn:
            refuse("window_size", "(-1, -1) without use_flash_attn", window_size, "pass use_flash_attn=True")
        if cross_attn and rotary_emb_dim:
            refuse("rotary_emb_dim", "0 with cross_attn", rotary_emb_dim, "two sequences have no common positions")

    def _make_layers(
        self,
        qkv_proj_bias: bool,
        out_proj_bias: bool,
        fused: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        linear = modules.FusedDense if fused else nn.Linear
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        width_kv = 2 * self.num_heads_kv * self.head_dim
        if self.cross_attn:
            self.Wq = linear(self.embed_dim, self.embed_dim, qkv_proj_bias, **place)
            self.Wkv = linear(self.embed_dim, width_kv, qkv_proj_bias, **place)
        else:
            self.Wqkv = linear(self.embed_dim, self.embed_dim + width_kv, qkv_proj_bias, **place)
        if self.dwconv:
            widths = {"qkv": self.embed_dim + width_kv} if self._packs else {"q": self.embed_dim, "kv": width_kv}
            for name, width in widths.items():
                conv = nn.Conv1d(width, width, kernel_size=3, padding=2, groups=width, **place)
                setattr(self, f"dwconv_{name}", conv)
        self.out_proj = linear(self.embed_dim, self.embed_dim, out_proj_bias, **place)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty cache: `[batch_size, max_seqlen, 2, heads_kv, head_dim]`."""
        weight = self.out_proj.weight
        return torch.empty(
            batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim, dtype=dtype or weight.dtype,
            device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of x to itself, or with cross_attn to x_kv.

        Args:
            x: `[batch, seq, embed_dim]`; with cu_seqlens `[total, embed_dim]`.
            x_kv: `[batch, seq_k, embed_dim]`, with cross_attn; default x.
            key_padding_mask: bool `[batch, seq_k]`, True = keep; without use_flash_attn.
            cu_seqlens: `[batch + 1]`, with max_seqlen; with use_flash_attn, without rotary embedding and dwconv.
            mixer_subset: an index of tokens whose queries are wanted, with cross_attn.
            inference_params: an object with `key_value_memory_dict`, `max_batch_size`, `max_seqlen`, `seqlen_offset`,
                `batch_size_offset` and `lengths_per_sample`: x follows the tokens in the cache.
            kwargs: further arguments of the attention module: causal, and of packed keys cu_seqlens_k, max_seqlen_k.

        Returns:
            Of the shape of x; with return_residual the pair of it and x.
        """
        self._check_inputs(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}
        if self._packs:
            context = self._packed_context(
                self._qkv(x).unflatten(-1, (3, self.num_heads, -1)), inference_params, kwargs
            )
        else:
            q, kv = self._apart(x, x_kv, mixer_subset)
            context = self._context(q, kv, inference_params, kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _packed_context(self, qkv: Tensor, params: Any, kwargs: dict[str, Any]) -> Tensor:
        """Attention of qkv `[..., 3, heads, head_dim]` to itself, or to a cache that it is appended to."""
        if params is not None and params.seqlen_offset > 0:
            return self._decode(qkv[..., 0, :, :], qkv[..., 1:, :, :], params)
        if self.rotary_emb_dim:
            qkv = self.rotary_emb(qkv)  # in place: nothing else reads what the projection wrote
        if params is not None:
            _fill(self, qkv[..., 1:, :, :], params)
        return self._inner(self.inner_attn, qkv, kwargs=kwargs)

    def _context(self, q: Tensor, kv: Tensor, params: Any, kwargs: dict[str, Any]) -> Tensor:
        """The same of q `[..., heads, head_dim]` to kv `[..., 2, heads_kv, head_dim]`."""
        if params is not None and params.seqlen_offset > 0:
            return self._decode(q, kv, params)
        if self.rotary_emb_dim:
            q, kv = self.rotary_emb(q, kv)
        if params is not None:
            _fill(self, kv, params)
        return self._inner(self.inner_cross_attn, q, kv, kwargs=kwargs)

    def _inner(self, attention: nn.Module, *inputs: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(attention, *inputs, use_reentrant=False, **kwargs)
        return attention(*inputs, **kwargs)

    def _qkv(self, x: Tensor) -> Tensor:
        qkv = self.Wqkv(x)
        return _convolved(self.dwconv_qkv, qkv) if self.dwconv and self._packs else qkv

    def _apart(self, x: Tensor, x_kv: Tensor | None, subset: Any) -> tuple[Tensor, Tensor]:
        """q `[..., heads, head_dim]` and kv `[..., 2, heads_kv, head_dim]`."""
        if self.cross_attn:
            q = self.Wq(x if subset is None else x[:, subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self._qkv(x)
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        return q.unflatten(-1, (self.num_heads, self.head_dim)), kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _decode(self, q: Tensor, kv: Tensor, params: Any) -> Tensor:
        """Appends to the cache, and attends to it."""
        cache = _cache_of(self, params, kv)
        lengths = params.seqlen_offset
        if params.lengths_per_sample is not None:
            start = params.batch_size_offset
            lengths = params.lengths_per_sample[start : start + q.shape[0]]
        cos = sin = None
        interleaved = False
        if self.rotary_emb_dim:
            interleaved = self.rotary_emb.interleaved
            if self.rotary_emb.scale_base is not None:
                refuse("rotary_emb_scale_base", "None with inference_params", "a number", "xPos has no cache")
            cos, sin, _, _ = self.rotary_emb.tables(max(cache.shape[1], params.max_seqlen), q.device)
        slopes = None
        if self._slopes is not None:
            slopes = self._slopes.to(q.device, torch.promote_types(q.dtype, torch.float32))
        return flashtile.attention_with_kv_cache(
            q, cache[:, :, 0], cache[:, :, 1], kv[..., 0, :, :], kv[..., 1, :, :], cache_lengths=lengths,
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
            scale=self._scale, causal=self.causal, window=window(self.window_size), alibi_slopes=slopes,
        )  # fmt: skip

    def _check_inputs(
        self,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        mixer_subset: Any,
        inference_params: Any,
    ) -> None:
        """Which arguments go together."""
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            refuse("x_kv, mixer_subset", "None without cross_attn", "one", "self-attention reads x alone")
        if cu_seqlens is not None:
            if not self.use_flash_attn or self.rotary_emb_dim or self.dwconv or key_padding_mask is not None:
                refuse(
                    "cu_seqlens", "None without use_flash_attn, and with rotary_emb_dim, dwconv or key_padding_mask",
                    cu_seqlens, "flashtile.modules.MHA takes packed inputs with rotary embedding",
                )  # fmt: skip
            if max_seqlen is None:
                refuse("max_seqlen", "an int beside cu_seqlens", None, "it is the longest sequence")
        if key_padding_mask is not None and self.use_flash_attn:
            refuse("key_padding_mask", "None with use_flash_attn", key_padding_mask, "pack the input by unpad_input")
        if inference_params is not None and (key_padding_mask is not None or cu_seqlens is not None or self.dwconv):
            refuse("inference_params", "None with a mask, cu_seqlens or dwconv", "one", "a cache holds dense sequences")


def _convolved(conv: Any, x: Tensor) -> Tensor:
    """A convolution over tokens `[batch, seq, width]`: each sees itself and the two before it."""
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2).contiguous()


def _cache_of(module: MHA, params: Any, kv: Tensor) -> Tensor:
    """The part of the cache that belongs to these sequences, made on the first call, in the dtype of what it is to hold
    (under autocast not that of the weights)."""
    if module.layer_idx is None:
        refuse("layer_idx", "an int with inference_params", None, "the cache is kept under it")
    caches = params.key_value_memory_dict
    if module.layer_idx not in caches:
        caches[module.layer_idx] = module.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
    start = params.batch_size_offset
    return caches[module.layer_idx][start : start + kv.shape[0]]


def _fill(module: MHA, kv: Tensor, params: Any) -> None:
    """Writes the keys and values of a first call to the cache."""
    _cache_of(module, params, kv)[:, : kv.shape[1]] = kv.detach()
