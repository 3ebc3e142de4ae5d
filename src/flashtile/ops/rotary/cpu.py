"""The CPU backend: few passes over memory, in blocks of rows that stay in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.rotary.spec import RotarySpec, Rotation, compute_dtype, positions

#: Elements of a block of rows: its temporaries together fit the second-level cache of a core.
_BLOCK = 1 << 17


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool) -> Tensor:
    """The rotated x: a new tensor, or x itself."""
    x, cos, sin, cos_k, sin_k, _, _ = rotation
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if not inplace:
        out[..., spec.heads_rotated :, :] = x[..., spec.heads_rotated :, :]
    heads = [(slice(spec.heads_q), cos, sin)]
    if cos_k is not None and sin_k is not None:
        heads.append((slice(spec.heads_q, spec.heads_rotated), cos_k, sin_k))
    where = positions(rotation, spec)
    for span, cos_of, sin_of in heads:
        source, target = x[..., span, :], out[..., span, :]
        if not source.numel():
            continue
        turning = 2 * cos.shape[1]
        if not inplace:
            target[..., turning:] = source[..., turning:]
        if turning:
            _rotate(source[..., :turning], target[..., :turning], cos_of, sin_of, where, spec)
    return out


def _rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, where: Tensor, spec: RotarySpec) -> None:
    """Writes rotated heads `[..., rows, heads, rotary_dim]`; source and target may be the same memory."""
    dtype, half = compute_dtype(source.dtype), cos.shape[1]
    a, b = (_pairs(source, half, spec.interleaved, part) for part in range(2))
    out_a, out_b = (_pairs(target, half, spec.interleaved, part) for part in range(2))
    rows_at = source.dim() - 3
    rows = source.shape[rows_at]
    step = max(1, _BLOCK * rows // source.numel())
    for first in range(0, rows, step):
        block = (..., slice(first, first + step), slice(None), slice(None))
        cos_block, sin_block = _angles(cos, sin, where[..., first : first + step], dtype, spec.conjugate)
        a_block, b_block = a[block].to(dtype), b[block].to(dtype)
        turned = torch.mul(a_block, sin_block).addcmul_(b_block, cos_block)
        out_a[block] = torch.mul(a_block, cos_block).addcmul_(b_block, sin_block, value=-1)
        out_b[block] = turned


def _pairs(x: Tensor, half: int, interleaved: bool, part: int) -> Tensor:
    """First or second elements of the pairs, `[..., rows, heads, half]`, as a view."""
    return x[..., part::2] if interleaved else x[..., part * half : (part + 1) * half]


def _angles(cos: Tensor, sin: Tensor, where: Tensor, dtype: torch.dtype, conjugate: bool) -> tuple[Tensor, Tensor]:
    """cos and sin at positions `[..., rows]`, as `[..., rows, 1, half]`; outside the table 1 and 0."""
    inside = (where >= 0) & (where < cos.shape[0])
    if bool(inside.all()):
        cos, sin = cos[where].to(dtype), sin[where].to(dtype)
    elif cos.shape[0]:
        place = where.clamp(0, cos.shape[0] - 1)
        cos = torch.where(inside[..., None], cos[place].to(dtype), 1)
        sin = torch.where(inside[..., None], sin[place].to(dtype), 0)
    else:
        cos = torch.ones(*where.shape, cos.shape[1], dtype=dtype)
        sin = torch.zeros_like(cos)
    return cos[..., None, :], (-sin if conjugate else sin)[..., None, :]
