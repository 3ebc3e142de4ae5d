"""Rotation in the memory of a leaf, and by its definition in PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Rotates a tensor by the angles, or with True as second argument back; with True as third argument in place.
Rotate = Callable[[Tensor, bool, bool], Tensor]


def rotated_in_place(x: Tensor, rotate: Rotate) -> Tensor:
    """x rotated in its own memory.

    PyTorch does not allow that for a leaf that wants a gradient. flash_attn does it, and so does this: the result is
    then another tensor with the memory of x, and the gradient of x is that of what x held before. Under torch.compile
    the result and x are equal and have memory of their own.
    """
    base = x if x._base is None else x._base
    if not (base.is_leaf and x.requires_grad and torch.is_grad_enabled()):
        return rotate(x, False, True)
    if not torch.compiler.is_compiling():
        return _OverLeaf.apply(x, rotate)
    # An autograd.Function over a function that computes with sizes ends in an AssertionError of PyTorch before 2.13,
    # once a size is dynamic.
    rotated = rotate(x, False, False)
    with torch.no_grad():
        x.copy_(rotated)
    return rotated


class _OverLeaf(torch.autograd.Function):
    """A rotation that overwrites its input, which autograd does not get to know."""

    @staticmethod
    def forward(ctx, x: Tensor, rotate: Rotate) -> Tensor:
        ctx.rotate = rotate
        return rotate(x.detach(), False, True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.rotate(grad, True, False), None


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
