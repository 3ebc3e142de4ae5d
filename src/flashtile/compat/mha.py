"""flash_attn.modules.mha: attention modules with and without projections, computed by flashtile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile import modules
from flashtile.compat.adapter import refuse
from flashtile.compat.signatures import VERSION_2


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of ALiBi, one a head: `flashtile.modules.alibi_slopes` as a list."""
    return modules.alibi_slopes(nheads, "cpu").tolist()


class _MaskedAttention(nn.Module):
    """Attention of dense inputs with a padding mask.

    Args:
        causal: no key right of the diagonal is visible, which ends at the last key.
        softmax_scale: factor on the scores; default `1/sqrt(head_dim)`.
        attention_dropout: probability that an attention weight is dropped, in training.

    Attributes:
        diagonal_ends_at_kept: with a padding mask, a causal diagonal ends at the last of as many keys as are kept, as
            if these came first; else at the last key.
    """

    diagonal_ends_at_kept = False

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool | None, padding: Tensor | None) -> Tensor:
        causal = self.causal if causal is None else bool(causal)
        mask = None if padding is None else padding.bool()[:, None, None, :]
        if mask is not None and causal and self.diagonal_ends_at_kept:
            row = torch.arange(q.shape[1], device=q.device)[:, None] + mask.sum(-1, keepdim=True) - q.shape[1]
            mask, causal = mask & (torch.arange(k.shape[1], device=q.device) <= row), False
        dropout_p = self.drop.p if self.training else 0.0
        return flashtile.attention(q, k, v, causal=causal, scale=self.softmax_scale, mask=mask, dropout_p=dropout_p)


class SelfAttention(_MaskedAttention):
    """Attention of packed qkv with a padding mask."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention of qkv `[batch, seq, 3, heads, head_dim]` to itself.

        `key_padding_mask` is bool `[batch, seq]`, True = keep. A query that sees no key gives 0.
        """
        q, k, v = qkv.unbind(2)
        return self._attend(q, k, v, causal, key_padding_mask)


class CrossAttention(_MaskedAttention):
    """Attention of q to packed kv with a padding mask."""

    diagonal_ends_at_kept = True

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attention of q `[batch, seq_q, heads, head_dim]` to kv `[batch, seq_k, 2, heads_kv, head_dim]`.

        `key_padding_mask` is bool `[batch, seq_k]`, True = keep. A query that sees no key gives 0.
        """
        k, v = kv.unbind(2)
        return self._attend(q, k, v, causal, key_padding_mask)


class MHA(modules.MHA):
    """`flashtile.modules.MHA` with what else flash_attn's has; arguments that are not listed here are those there.

    State-dict keys are those there, and with dwconv `dwconv_qkv` (with cross_attn or fewer heads of keys `dwconv_q` and
    `dwconv_kv`).

    Args:
        layer_idx: under which number an inference cache is kept.
        dwconv: a depthwise convolution of three tokens, none of them later, behind the input projections.
        use_alibi, window_size: need use_flash_attn.
        fused_bias_fc: the projections are `flashtile.modules.FusedDense`.
        use_flash_attn: packed inputs, and no padding masks; without it padding masks, and no packed inputs. Both are
            computed by flashtile.
        checkpointing: attention is computed again in the backward.
    """

    def __init__(
        self, dwconv: bool, fused_bias_fc: bool, use_flash_attn: bool, checkpointing: bool, dropout: float, **given: Any
    ) -> None:
        super().__init__(**given)
        window_size = given["window_size"]
        if self.use_alibi and not use_flash_attn:
            refuse("use_alibi", "False without use_flash_attn", True, "pass use_flash_attn=True")
        if self.windowed and not use_flash_attn:
            refuse("window_size", "(-1, -1) without use_flash_attn", window_size, "pass use_flash_attn=True")
        place = {"device": given["device"], "dtype": given["dtype"]}
        self.dwconv, self.use_flash_attn, self.checkpointing = dwconv, use_flash_attn, checkpointing
        self.rotary_emb_dim, self.window_size = given["rotary_emb_dim"], window_size
        self._packs = not self.cross_attn and self.num_heads_kv == self.num_heads
        layers = {name: layer for name, layer in self.named_children() if type(layer) is nn.Linear}
        for name, layer in layers.items() if fused_bias_fc else ():
            fused = modules.FusedDense(layer.in_features, layer.out_features, layer.bias is not None, **place)
            setattr(self, name, fused)
        if dwconv:
            width_kv = 2 * self.num_heads_kv * self.head_dim
            widths = {"q": self.embed_dim, "kv": width_kv}
            for name, width in ({"qkv": self.embed_dim + width_kv} if self._packs else widths).items():
                conv = nn.Conv1d(width, width, kernel_size=3, padding=2, groups=width, **place)
                setattr(self, f"dwconv_{name}", conv)
        self.inner_step: Any = self.inner_attn
        options = self.causal, given["softmax_scale"], dropout
        self.inner_cross_attn: nn.Module
        if use_flash_attn:
            more = {"window_size": window_size, "alibi_slopes": self.inner_step._alibi_slopes}
            self.inner_attn = modules.FlashSelfAttention(*options, **more)
            self.inner_cross_attn = modules.FlashCrossAttention(*options, **more)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(*options), CrossAttention(*options)
            self.inner_cross_attn.diagonal_ends_at_kept = self.cross_attn

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An empty cache: `[batch_size, max_seqlen, 2, heads_kv, head_dim]`."""
        weight, shape = self.out_proj.weight, (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def forward(  # type: ignore[override]
        self, x: Tensor, x_kv: Tensor | None, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None,
        max_seqlen: int | None, mixer_subset: Any, inference_params: Any, **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Attention of x to itself, or with cross_attn to x_kv; shapes and results as `flashtile.modules.MHA.forward`.

        Args:
            x_kv: with cross_attn; default x.
            key_padding_mask: bool `[batch, seq_k]`, True = keep; without use_flash_attn. All rows of x have a result.
            cu_seqlens: with max_seqlen and use_flash_attn, without rotary embedding and dwconv.
            mixer_subset: an index of tokens whose queries are wanted, with cross_attn.
            inference_params: an object with `key_value_memory_dict`, `max_batch_size`, `max_seqlen`, `seqlen_offset`,
                `batch_size_offset` and `lengths_per_sample`: x follows the tokens in the cache.
            kwargs: further arguments of the attention module: causal, and of packed keys cu_seqlens_k, max_seqlen_k.
        """
        self._check_given(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}
        inner, inputs = self.inner_attn if self._packs else self.inner_cross_attn, self._inputs(x, x_kv, mixer_subset)
        if inference_params is not None and inference_params.seqlen_offset > 0:
            context = self._step(*self._q_kv(inputs), inference_params)
        else:
            if self.rotary_emb is not None:  # in place: nothing else reads what the projection wrote
                turned = self.rotary_emb(*inputs)
                inputs = turned if isinstance(turned, tuple) else (turned,)
            if inference_params is not None:
                _, kv = self._q_kv(inputs)
                self._cache(inference_params, kv)[:, : kv.shape[1]] = kv.detach()
            again = self.checkpointing and self.training and torch.is_grad_enabled()
            context = checkpoint(inner, *inputs, use_reentrant=False, **kwargs) if again else inner(*inputs, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _inputs(self, x: Tensor, x_kv: Tensor | None, subset: Any) -> tuple[Tensor, ...]:
        """qkv `[..., 3, heads, head_dim]`; with cross_attn or fewer heads of keys q `[..., heads, head_dim]` and kv
        `[..., 2, heads_kv, head_dim]`."""
        if self.cross_attn:
            q = self.Wq(x if subset is None else x[:, subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self.Wqkv(x)
            if self._packs:
                qkv = _convolved(self.dwconv_qkv, qkv) if self.dwconv else qkv
                return (qkv.unflatten(-1, (3, self.num_heads, -1)),)
            q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        return q.unflatten(-1, (self.num_heads, self.head_dim)), kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))

    def _q_kv(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The same of inputs of either attention module."""
        return (inputs[0], inputs[1]) if len(inputs) == 2 else (inputs[0][..., 0, :, :], inputs[0][..., 1:, :, :])

    def _step(self, q: Tensor, kv: Tensor, params: Any) -> Tensor:
        """Appends to the cache, and attends to it."""
        cache, lengths = self._cache(params, kv), params.seqlen_offset
        turns: dict[str, Any] = {}
        if params.lengths_per_sample is not None:
            start = params.batch_size_offset
            lengths = params.lengths_per_sample[start : start + q.shape[0]]
        if self.rotary_emb is not None:
            if self.rotary_emb.scale_base is not None:
                refuse("rotary_emb_scale_base", "None with inference_params", "a number", "xPos has no cache")
            cos, sin, _, _ = self.rotary_emb.tables(max(cache.shape[1], params.max_seqlen), q.device)
            turns = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.rotary_emb.interleaved}
        new = {"k": kv[..., 0, :, :], "v": kv[..., 1, :, :]}
        return self.inner_step.decode(q, cache[:, :, 0], cache[:, :, 1], lengths, **new, **turns)

    def _cache(self, params: Any, kv: Tensor) -> Tensor:
        """The part of the cache that belongs to these sequences, made on the first call, in the dtype of what it is to
        hold (under autocast not that of the weights)."""
        if self.layer_idx is None:
            refuse("layer_idx", "an int with inference_params", None, "the cache is kept under it")
        caches, start = params.key_value_memory_dict, params.batch_size_offset
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(params.max_batch_size, params.max_seqlen, kv.dtype)
        return caches[self.layer_idx][start : start + kv.shape[0]]

    def _check_given(
        self, x_kv: Any, key_padding_mask: Any, cu_seqlens: Any, max_seqlen: Any, subset: Any, params: Any
    ) -> None:
        """Checks which arguments go together."""
        if not self.cross_attn and (x_kv is not None or subset is not None):
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
        if params is not None and (key_padding_mask is not None or cu_seqlens is not None or self.dwconv):
            refuse("inference_params", "None with a mask, cu_seqlens or dwconv", "one", "a cache holds dense sequences")


def _convolved(conv: Any, x: Tensor) -> Tensor:
    """A convolution over tokens `[batch, seq, width]`: each sees itself and the two before it."""
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2).contiguous()


VERSION_2.serve(globals())
