"""The meaning of a rotary call: its scalars and tensors, and the eager reference, written to be read and not to be
fast.

Element pairs of a head turn by an angle that grows with the position of its row. For pair `i` of `rotary_dim / 2`::

    (a, b)  ->  (a · cos[p, i] - b · sin[p, i],  a · sin[p, i] + b · cos[p, i])

where a pair is `(x[i], x[i + rotary_dim / 2])`, or `(x[2i], x[2i + 1])` when interleaved, and `p` is the position of
the row in its sequence plus an offset, or what `position_ids` says. Elements past `rotary_dim`, heads past
`heads_rotated`, rows that belong to no sequence, and rows at positions outside the table stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype


class RotarySpec(NamedTuple):
    """The meaning of a call: scalars only, hashable.

    Attributes:
        interleaved: which elements are a pair.
        conjugate: turn the other way (the inverse, and the gradient).
        heads_q: heads before this one read cos and sin, those from it on cos_k and sin_k.
        heads_rotated: heads from this one on stay as they are.
        offset: position of the first row of every sequence.
    """

    interleaved: bool
    conjugate: bool
    heads_q: int
    heads_rotated: int
    offset: int


class Rotation(NamedTuple):
    """The tensors of a call.

    Attributes:
        x: `[batch, seq, heads, head_dim]`, or `[total, heads, head_dim]` with cu_seqlens.
        cos, sin: `[table, rotary_dim / 2]`.
        cos_k, sin_k: the same for heads from `heads_q` on; None where these read cos and sin too.
        offsets: `[batch]` integers, a position of the first row for each sequence, added to the offset.
        cu_seqlens: `[batch + 1]` integers: sequence b owns rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`.
        position_ids: `[batch or 1, seq]` or `[total]` integers, the position of each row; then there are neither
            offsets nor cu_seqlens, and the offset is 0.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    cos_k: Tensor | None = None
    sin_k: Tensor | None = None
    offsets: Tensor | None = None
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None


def positions(rotation: Rotation, spec: RotarySpec) -> Tensor:
    """The position of each row: int64 `[batch or 1, seq]`, or `[total]` packed, where -1 marks rows of no sequence."""
    x, offsets, cu_seqlens = rotation.x, rotation.offsets, rotation.cu_seqlens
    if rotation.position_ids is not None:
        return rotation.position_ids.long()
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)[None, :] + spec.offset
        return rows if offsets is None else rows + offsets[:, None]
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row.to(cu_seqlens.dtype), right=True)
    batch = cu_seqlens.shape[0] - 1
    if not batch:
        return torch.full_like(row, -1)
    owner = sequence.clamp(max=batch - 1)
    position = row - cu_seqlens[owner] + spec.offset
    if offsets is not None:
        position = position + offsets[owner]
    return torch.where(sequence < batch, position.long(), -1)


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool = False) -> Tensor:
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
