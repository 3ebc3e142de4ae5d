"""The CPU backend: few passes over memory, in blocks of rows that stay in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.rotary.spec import RotarySpec, Rotation, positions


def forward(rotation: Rotation, spec: RotarySpec, inplace: bool = False) -> Tensor:
    """The rotated x: a new tensor, or x itself."""
    x, cos, sin, cos_k, sin_k, *_ = rotation
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if not inplace and spec.heads_rotated < x.shape[-2]:
        out[..., spec.heads_rotated :, :] = x[..., spec.heads_rotated :, :]
    heads = [(slice(spec.heads_q), cos, sin)]
    if cos_k is not None and sin_k is not None:
        heads.append((slice(spec.heads_q, spec.heads_rotated), cos_k, sin_k))
    where = _where(rotation, spec)
    for span, cos_of, sin_of in heads:
        source, target = x[..., span, :], out[..., span, :]
        if not source.numel():
            continue
        turning = 2 * cos.shape[1]
        if not inplace and turning < x.shape[-1]:
            target[..., turning:] = source[..., turning:]
        if turning:
            _rotate(source[..., :turning], target[..., :turning], cos_of, sin_of, where, spec, inplace)
    return out


def _where(rotation: Rotation, spec: RotarySpec) -> slice | Tensor:
    """The position of each row: consecutive rows of the tables, the same for all sequences, or numbers."""
    first, rows = spec.offset, rotation.x.shape[-3]
    alike = rotation.offsets is None and rotation.cu_seqlens is None and rotation.position_ids is None
    if alike and first >= 0 and first + rows <= rotation.cos.shape[0]:
        return slice(first, first + rows)
    return positions(rotation, spec)


def _rotate(
    source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, where: slice | Tensor, spec: RotarySpec, inplace: bool
) -> None:
    """Writes rotated heads `[..., rows, heads, rotary_dim]`; in place, source and target are the same memory."""
    dtype, half = compute_dtype(source.dtype), cos.shape[1]
    sign = -1 if spec.conjugate else 1
    a, b = (_pairs(source, half, spec.interleaved, part) for part in range(2))
    out_a, out_b = (_pairs(target, half, spec.interleaved, part) for part in range(2))
    rows = source.shape[-3]
    for some in row_blocks(rows, source.numel() // rows):
        block = (..., some, slice(None), slice(None))
        cos_block, sin_block = _angles(cos, sin, _some(where, some), dtype)
        if source.dtype is dtype and not inplace:
            torch.mul(a[block], cos_block, out=out_a[block]).addcmul_(b[block], sin_block, value=-sign)
            torch.mul(b[block], cos_block, out=out_b[block]).addcmul_(a[block], sin_block, value=sign)
            continue
        a_block, b_block = a[block].to(dtype), b[block].to(dtype)
        turned = torch.mul(b_block, cos_block).addcmul_(a_block, sin_block, value=sign)
        out_a[block] = torch.mul(a_block, cos_block).addcmul_(b_block, sin_block, value=-sign)
        out_b[block] = turned


def _some(where: slice | Tensor, rows: slice) -> slice | Tensor:
    """The positions of some rows."""
    if isinstance(where, slice):
        return slice(where.start + rows.start, where.start + rows.stop)
    return where[..., rows]


def _pairs(x: Tensor, half: int, interleaved: bool, part: int) -> Tensor:
    """First or second elements of the pairs, `[..., rows, heads, half]`, as a view."""
    return x[..., part::2] if interleaved else x[..., part * half : (part + 1) * half]


def _angles(cos: Tensor, sin: Tensor, where: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin at positions `[..., rows]`, as `[..., rows, 1, half]`; outside the table 1 and 0."""
    if isinstance(where, slice):
        return cos[where].to(dtype)[:, None], sin[where].to(dtype)[:, None]
    inside = (where >= 0) & (where < cos.shape[0])
    if bool(inside.all()):
        cos, sin = cos[where].to(dtype), sin[where].to(dtype)
    elif cos.shape[0]:
        place = where.clamp(0, cos.shape[0] - 1)
        cos = torch.where(inside[..., None], cos[place].to(dtype), 1)
        sin = torch.where(inside[..., None], sin[place].to(dtype), 0)
    else:
        cos = torch.ones(*where.shape, cos.shape[1], dtype=dtype, device="cpu")
        sin = torch.zeros_like(cos)
    return cos[..., None, :], sin[..., None, :]
