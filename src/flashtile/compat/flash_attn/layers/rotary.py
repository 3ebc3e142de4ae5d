"""flash_attn.layers.rotary over `flashtile.apply_rotary`, `apply_rotary_qkv` and `apply_rotary_kv`."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile import modules
from flashtile.compat.rotary import apply_rotary_emb_torch, rotate_half, rotated_in_place

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates x `[batch, seq, heads, head_dim]`, packed `[total, heads, head_dim]`; see `flashtile.apply_rotary`."""

    def rotate(x: Tensor, back: bool, inplace: bool) -> Tensor:
        return flashtile.apply_rotary(
            x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen, conjugate=back
        )

    return rotated_in_place(x, rotate) if inplace else rotate(x, False, False)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates queries and keys of qkv in place.

    qkv is `[batch, seq, 3, heads, head_dim]`, or with num_heads_q `[batch, seq, heads_q + 2 heads_kv, head_dim]`.
    """

    def rotate(x: Tensor, back: bool, inplace: bool) -> Tensor:
        tables = (cos, -sin, cos_k, None if sin_k is None else -sin_k) if back else (cos, sin, cos_k, sin_k)
        return flashtile.apply_rotary_qkv(
            x, *tables, interleaved, inplace, seqlen_offsets=seqlen_offsets, num_heads_q=num_heads_q
        )

    return rotated_in_place(qkv, rotate)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates the keys of kv `[batch, seq, 2, heads, head_dim]` in place."""

    def rotate(x: Tensor, back: bool, inplace: bool) -> Tensor:
        return flashtile.apply_rotary_kv(x, cos, -sin if back else sin, interleaved, inplace, seqlen_offsets)

    return rotated_in_place(kv, rotate)


class RotaryEmbedding(modules.RotaryEmbedding):
    """`flashtile.modules.RotaryEmbedding`; arguments and `forward` are the same, in flash_attn's order."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(dim, base, interleaved, scale_base, device)
