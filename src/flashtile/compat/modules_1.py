"""The modules of flash_attn 1, where they are not those of version 2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile import modules
from flashtile.compat import block, mha, rotary
from flashtile.compat.calls import refuse, refuse_given
from flashtile.compat.flash_attn_1 import unpad_input
from flashtile.compat.signatures import VERSION_1

_BLOCKSPARSE, _MHA = VERSION_1.modules["flash_blocksparse_attention"], VERSION_1.modules["modules.mha"]
_ROTARY, _LOSSES = VERSION_1.modules["layers.rotary"], VERSION_1.modules["losses.cross_entropy"]


class FlashAttention(modules.FlashSelfAttention):
    """Attention of packed queries, keys and values: `flashtile.modules.FlashSelfAttention` with padding masks."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0) -> None:
        super().__init__(softmax_scale=softmax_scale, attention_dropout=attention_dropout)

    @VERSION_1.modules["flash_attention"].takes
    def forward(
        self, qkv: Tensor, key_padding_mask: Tensor | None, causal: bool, cu_seqlens: Tensor | None, max_s: int | None,
        need_weights: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of qkv to itself, and None in the place of weights, so that need_weights must be False.

        qkv is `[batch, seq, 3, heads, head_dim]`, or with cu_seqlens `[batch + 1]` and max_s, the longest sequence,
        `[total, 3, heads, head_dim]`. key_padding_mask is bool `[batch, seq]`, True = keep; other rows give 0.
        """
        if need_weights:
            refuse("need_weights", "False", True, "attention weights are never in memory as a whole")
        if cu_seqlens is not None and (key_padding_mask is not None or max_s is None):
            raise ValueError(
                "cu_seqlens: expected max_s beside it and no key_padding_mask; packed sequences have no padding"
            )
        if key_padding_mask is None:
            return super().forward(qkv, causal, cu_seqlens, max_s if cu_seqlens is not None else None), None
        rows, indices, ends, longest = unpad_input(qkv, key_padding_mask)
        out = super().forward(rows, causal, ends, longest)
        return modules.pad_input(out, indices, qkv.shape[0], qkv.shape[1]), None


class FlashBlocksparseAttention(modules.FlashBlocksparseAttention):
    """`flashtile.modules.FlashBlocksparseAttention`, where `softmax_temp` is `softmax_scale`, for sequences of at most
    max_seq_length. There are no parameters; the mask goes where qkv is, whatever `device` and `dtype` are."""

    @_BLOCKSPARSE.takes
    def __init__(self, sparsity_config: Any, softmax_temp: float | None, max_seq_length: int, **given: Any) -> None:
        super().__init__(sparsity_config, softmax_temp, given["attention_dropout"])
        self.max_seq_length = max_seq_length

    @_BLOCKSPARSE.takes
    def forward(self, qkv: Tensor, attn_mask: Tensor | None, key_padding_mask: Any, **given: Any) -> Any:
        """As there. attn_mask must be None; a key_padding_mask may be an object with a `bool_matrix`; convert_mask says
        in which form the mask is kept, and changes nothing here."""
        refuse_given("what is visible is said by sparsity_config, and padding by key_padding_mask", attn_mask=attn_mask)
        del given["convert_mask"]
        longest = given["max_s"] if given["cu_seqlens"] is not None else qkv.shape[1]
        if longest is not None and longest > self.max_seq_length:
            refuse("max_seq_length", f"at least {longest}, the sequence of the call", self.max_seq_length, "raise it")
        return super().forward(qkv, getattr(key_padding_mask, "bool_matrix", key_padding_mask), **given)


class FlashBlocksparseMHA(modules.FlashBlocksparseMHA):
    """`flashtile.modules.FlashBlocksparseMHA` around `FlashBlocksparseAttention`; arguments as there."""

    @_BLOCKSPARSE.takes
    def __init__(self, sparsity_config: Any, max_seq_length: int, **given: Any) -> None:
        super().__init__(sparsity_config=sparsity_config, **given)
        self.embed_dim = given["embed_dim"]
        self.inner_attn = FlashBlocksparseAttention(
            sparsity_config, attention_dropout=given["attention_dropout"], max_seq_length=max_seq_length
        )

    @_BLOCKSPARSE.takes
    def forward(self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Any, need_weights: bool, **same: Any):
        """Attention of x `[batch, seq, embed_dim]` to itself.

        `x_ignored_` and `x_ignored_1_` stand where other modules have keys and values: they must be x, or None.
        """
        for name, given in same.items():
            if given is not None and given is not x:
                refuse(name, "x or None", given, "this is self-attention")
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        out, _ = self.inner_attn(qkv, attn_mask, key_padding_mask, self.causal, need_weights=need_weights)
        return self.out_proj(out.flatten(2)), None


class _TopLeft:
    """The diagonal of attention begins at the first key."""

    def __init__(self, triton: bool, **given: Any) -> None:
        super().__init__(**given)
        self.triton = triton

    def options(self, q: Tensor, causal: bool | None = None) -> dict[str, Any]:
        return super().options(q, causal) | {"align": "top_left"}  # type: ignore[misc]


class FlashSelfAttention(_TopLeft, modules.FlashSelfAttention):
    """`flashtile.modules.FlashSelfAttention`; the diagonal begins at the first key. `triton` chose another kernel."""

    __init__ = _MHA.made("FlashSelfAttention", _TopLeft.__init__, None)


class FlashCrossAttention(_TopLeft, modules.FlashCrossAttention):
    """`flashtile.modules.FlashCrossAttention`; the diagonal begins at the first key. `triton` chose another kernel."""

    __init__ = _MHA.made("FlashCrossAttention", _TopLeft.__init__, None)


class MHA(mha.MHA):
    """Multi-head self-attention or cross-attention; arguments as those of version 2 that have the same name.

    The causal diagonal of cross-attention with use_flash_attn begins at the first key.
    """

    @_MHA.takes
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.use_flash_attn:
            options = self.causal, given["softmax_scale"], given["dropout"]
            self.inner_attn, self.inner_cross_attn = FlashSelfAttention(*options), FlashCrossAttention(*options)

    @_MHA.takes
    def allocate_inference_cache(self, fused_ft_kernel: bool, **given: Any) -> Tensor:
        """An empty cache: `[batch_size, max_seqlen, 2, heads, head_dim]`, for either value of fused_ft_kernel."""
        return super().allocate_inference_cache(**given)


class Block(block.Block):
    """`Block` of version 2; the default mixer is the `MHA` of version 1."""

    mha = MHA


class ParallelBlock(block.ParallelBlock):
    """`ParallelBlock` of version 2; the default mixer is the `MHA` of version 1."""

    mha = MHA


class GatedMlp(modules.GatedMlp):
    """`flashtile.modules.GatedMlp`, whose hidden features are a multiple of 256."""

    @VERSION_1.modules["modules.mlp"].takes
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)


apply_rotary_emb_func = _ROTARY.made(
    "apply_rotary_emb_func",
    rotary.apply_rotary_emb,
    "Rotates x `[batch, seq, heads, head_dim]` by tables `[seq, rotary_dim / 2]`.",
)
apply_rotary_emb_qkv_ = _ROTARY.made(
    "apply_rotary_emb_qkv_",
    rotary.apply_rotary_emb_qkv_,
    "Rotates queries and keys of qkv `[batch, seq, 3, heads, head_dim]` in place.",
)


class RotaryEmbedding(modules.RotaryEmbedding):
    """`flashtile.modules.RotaryEmbedding` of packed qkv; `pos_idx_in_fp32` must be True: positions are exact."""

    @_ROTARY.takes
    def __init__(self, pos_idx_in_fp32: bool, **given: Any) -> None:
        if not pos_idx_in_fp32:
            refuse("pos_idx_in_fp32", "True", pos_idx_in_fp32, "positions are always exact")
        super().__init__(**given)
        self.pos_idx_in_fp32 = pos_idx_in_fp32

    def forward(self, qkv: Tensor, seqlen_offset: int = 0) -> Tensor:  # type: ignore[override]
        """Rotates qkv `[batch, seq, 3, heads, head_dim]` in place, from position seqlen_offset on."""
        rotated = super().forward(qkv, seqlen_offset=seqlen_offset)
        assert isinstance(rotated, Tensor)
        return rotated


class CrossEntropyLoss(modules.CrossEntropyLoss):
    """`flashtile.modules.CrossEntropyLoss` with the arguments of flash_attn 1; reduction is "mean" or "none"."""

    @_LOSSES.takes
    def __init__(self, reduction: str, **given: Any) -> None:
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction: expected 'mean' or 'none', got {reduction!r}; sum the losses of 'none'")
        super().__init__(reduction=reduction, **given)


CrossEntropyLossApex = CrossEntropyLoss
