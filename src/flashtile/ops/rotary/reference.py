"""The eager reference: the definition of the semantics, written to be read, not to be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.rotary.spec import RotarySpec, Rotation, compute_dtype, positions


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool) -> Tensor:
    """The rotated x: a new tensor, or x itself."""
    rotated = rotate(rotation, spec)
    return rotation.x.copy_(rotated) if inplace else rotated


def rotate(rotation: Rotation, spec: RotarySpec) -> Tensor:
    """A new tensor; differentiable by PyTorch's autograd."""
    x, cos, sin, cos_k, sin_k, *_ = rotation
    position = positions(rotation, spec)
    pieces = [_rotate_heads(x[..., : spec.heads_q, :], cos, sin, position, spec)]
    if cos_k is not None and sin_k is not None:
        pieces.append(_rotate_heads(x[..., spec.heads_q : spec.heads_rotated, :], cos_k, sin_k, position, spec))
    return torch.cat((*pieces, x[..., spec.heads_rotated :, :]), dim=-2)


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, spec: RotarySpec) -> Tensor:
    """All heads of x `[..., rows, heads, head_dim]`."""
    dtype, half = compute_dtype(x.dtype), cos.shape[1]
    inside = ((position >= 0) & (position < cos.shape[0]))[..., None]
    place = torch.where(inside[..., 0], position, 0)
    if cos.shape[0]:
        # [..., rows, 1, half]
        cos = torch.where(inside, cos[place].to(dtype), 1.0)[..., None, :]
        sin = torch.where(inside, sin[place].to(dtype), 0.0)[..., None, :]
    else:
        cos, sin = x.new_ones(half, dtype=dtype), x.new_zeros(half, dtype=dtype)
    if spec.conjugate:
        sin = -sin
    turning, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    pair = -1 if spec.interleaved else -2  # the dimension that tells the elements of a pair apart
    a, b = turning.unflatten(-1, (half, 2) if spec.interleaved else (2, half)).unbind(pair)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=pair).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
