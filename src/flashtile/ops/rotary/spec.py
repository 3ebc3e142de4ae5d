"""What a rotary call means, apart from the numbers in its tensors.

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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


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
