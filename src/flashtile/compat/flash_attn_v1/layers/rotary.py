"""flash_attn.layers.rotary of version 1 over `flashtile.apply_rotary` and `apply_rotary_qkv`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import modules
from flashtile.compat.arguments import refuse
from flashtile.compat.flash_attn.layers import rotary
from flashtile.compat.rotary import apply_rotary_emb_torch, rotate_half

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb_func",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary_emb_func(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False
) -> Tensor:
    """Rotates x `[batch, seq, heads, head_dim]` by tables `[seq, rotary_dim / 2]`."""
    return rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotates queries and keys of qkv `[batch, seq, 3, heads, head_dim]` in place."""
    return rotary.apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, interleaved)


class RotaryEmbedding(modules.RotaryEmbedding):
    """`flashtile.modules.RotaryEmbedding` of packed qkv.

    Args:
        dim, base, interleaved, scale_base, device: as there.
        pos_idx_in_fp32: must be True: positions are float32 whatever the dtype of the module is.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not pos_idx_in_fp32:
            refuse("pos_idx_in_fp32", "True", pos_idx_in_fp32, "positions are always exact")
        super().__init__(dim, base, interleaved, scale_base, device)
        self.pos_idx_in_fp32 = pos_idx_in_fp32

    def forward(self, qkv: Tensor, seqlen_offset: int = 0) -> Tensor:  # type: ignore[override]
        """Rotates qkv `[batch, seq, 3, heads, head_dim]` in place, from position seqlen_offset on."""
        rotated = super().forward(qkv, seqlen_offset=seqlen_offset)
        assert isinstance(rotated, Tensor)
        return rotated
