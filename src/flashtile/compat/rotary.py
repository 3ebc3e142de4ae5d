"""flash_attn.layers.rotary and ops.triton.rotary over `flashtile.apply_rotary`, `apply_rotary_qkv`, `apply_rotary_kv`.

The functions that rotate in place also write to a leaf that wants a gradient, which PyTorch does not allow. The result
is then another tensor, and the gradient is that of what the leaf held before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.compat.signatures import VERSION_2


def apply_rotary_emb(x: Tensor, inplace: bool, **given: Any) -> Tensor:
    """Rotates x `[batch, seq, heads, head_dim]`, packed `[total, heads, head_dim]`; see `flashtile.apply_rotary`."""
    return _in_place(flashtile.apply_rotary, x, **given) if inplace else flashtile.apply_rotary(x, **given)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(qkv: Tensor, **given: Any) -> Tensor:
    """Rotates queries and keys of qkv in place.

    qkv is `[batch, seq, 3, heads, head_dim]`, or with num_heads_q `[batch, seq, heads_q + 2 heads_kv, head_dim]`.
    """
    return _in_place(flashtile.apply_rotary_qkv, qkv, **given)


def apply_rotary_emb_kv_(kv: Tensor, **given: Any) -> Tensor:
    """Rotates the keys of kv `[batch, seq, 2, heads, head_dim]` in place."""
    return _in_place(flashtile.apply_rotary_kv, kv, **given)


def _in_place(rotate: Callable[..., Tensor], x: Tensor, **given: Any) -> Tensor:
    """x rotated in its own memory, also where x is a leaf."""
    base = x if x._base is None else x._base
    if not (base.is_leaf and x.requires_grad and torch.is_grad_enabled()):
        return rotate(x, inplace=True, **given)
    rotated = rotate(x, inplace=False, **given)
    with torch.no_grad():
        x.copy_(rotated)
    return rotated


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """The other element of each pair, `(a, b) -> (-b, a)`; pairs are neighbours, or the two halves."""
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates x `[batch, seq, heads, head_dim]` by tables `[seq, rotary_dim / 2]` or `[batch, seq, rotary_dim / 2]`."""
    rotated = 2 * cos.shape[-1]
    if rotated > x.shape[-1]:
        raise ValueError(
            f"cos: expected at most {x.shape[-1] // 2} columns, half of head_dim, got {cos.shape[-1]}; cut the table"
        )
    both = [
        (table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)).unsqueeze(-2)
        for table in (cos, sin)
    ]
    turned, rest = x[..., :rotated], x[..., rotated:]
    return torch.cat((turned * both[0] + rotate_half(turned, interleaved) * both[1], rest), dim=-1)


VERSION_2.serve(globals())
