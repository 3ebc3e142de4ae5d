"""Rotation by its definition in PyTorch operations: what `apply_rotary_emb_torch` is."""

from __future__ import annotations

import torch
from torch import Tensor


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
