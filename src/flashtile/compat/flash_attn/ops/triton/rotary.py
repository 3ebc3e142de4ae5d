"""flash_attn.ops.triton.rotary over `flashtile.apply_rotary`."""

from __future__ import annotations

from torch import Tensor

import flashtile


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates x `[batch, seq, heads, head_dim]`, packed `[total, heads, head_dim]`; see `flashtile.apply_rotary`."""
    return flashtile.apply_rotary(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen, conjugate)
