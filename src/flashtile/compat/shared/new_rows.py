"""New rows of a cache: their rotation, and where they go.

B sequences   N new rows of all of them
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile


def rotated(
    x: Tensor, cu_seqlens: Tensor, positions: Tensor, one_by_one: bool, tables: tuple[Tensor, Tensor, bool]
) -> Tensor:
    """Packed rows `[N, heads, head_dim]`, rotated by positions that begin at `positions[b]`, `[B]`.

    Args:
        one_by_one: rows of a sequence have one position after another, else all the first.
        tables: cos, sin, and whether pairs are neighbours.
    """
    cos, sin, interleaved = tables
    wide = x
    if x.dtype is torch.float8_e4m3fn:  # tables are in the dtype that the rows had before they were rounded
        wide, cos, sin = x.float(), cos.float(), sin.float()
    if one_by_one:
        turned = flashtile.apply_rotary(wide, cos, sin, interleaved, seqlen_offsets=positions, cu_seqlens=cu_seqlens)
    else:
        sequence, _, _ = rows_of(cu_seqlens, x.shape[0])
        offsets = positions[sequence] if positions.shape[0] else positions.new_zeros(x.shape[0])
        turned = flashtile.apply_rotary(wide[:, None], cos, sin, interleaved, seqlen_offsets=offsets)[:, 0]
    if x.dtype is torch.float8_e4m3fn:
        limit = torch.finfo(x.dtype).max
        turned = turned.clamp(-limit, limit)  # what lies past it would be NaN
    return turned.to(x.dtype)


def rows_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `total` packed rows: its sequence, its number there, and whether it belongs to one."""
    batch = cu_seqlens.shape[0] - 1
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.to(row.dtype), row, right=True) - 1
    inside = sequence.clamp(max=max(batch - 1, 0))
    return inside, row - cu_seqlens[inside], sequence < batch


def append(
    caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], table: Tensor, cu_seqlens: Tensor, before: Tensor
) -> None:
    """Writes packed new rows to pages, behind the `before[b]` rows of each sequence, `[B]`.

    Rows of no sequence, and rows past the last page of one, are not written.
    """
    total, page_size = new[0].shape[0], caches[0].shape[1]
    if not total or not table.numel():
        return
    sequence, within, there = rows_of(cu_seqlens, total)
    position = before[sequence] + within
    there = there & (position < table.shape[1] * page_size)
    page = table[sequence, (position // page_size).clamp(max=table.shape[1] - 1)].long()
    # The others write once more what one of these writes; where there is none of these, what is in the cache.
    source = torch.where(there, torch.arange(total, device=page.device), there.int().argmax())
    page, row, any_there = page[source], (position % page_size)[source], there.any()
    page = page.clamp(min=0, max=caches[0].shape[0] - 1)
    for cache, rows in zip(caches, new):
        cache, rows = _as_bytes(cache), _as_bytes(rows)
        cache[page, row] = torch.where(any_there, rows[source], cache[page, row])


def _as_bytes(x: Tensor) -> Tensor:
    """A view of 8-bit floats as integers, which PyTorch can index on any device."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
