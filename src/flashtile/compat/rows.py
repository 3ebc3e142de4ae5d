"""Rows of packed sequences that lie otherwise: keys in pages or in parts, rows that count, new rows of a cache.

B sequences   N new rows of all of them
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import flashtile


def gathered_keys(
    k: Tensor,
    v: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int | None,
    *,
    block_table: Tensor | None = None,
    lengths: Tensor | None = None,
    left_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values packed as `flashtile.attention_varlen` wants them.

    Nothing waits for the GPU: the result has as many rows as there could be keys, and those past the last sequence are
    copies of others that nothing attends to. Differentiable in k and v.

    Args:
        k: `[total_k, heads_kv, head_dim]`; with block_table `[pages, page_size, heads_kv, head_dim]`.
        v: likewise.
        cu_seqlens_k: `[batch + 1]`, where the sequences lie, in pages how long they are.
        max_seqlen_k: of the longest, if the host knows it.
        block_table: integers `[batch, pages of a sequence]`.
        lengths: `[batch]`, how many rows of each are there; default all.
        left_padding: `[batch]`, how many of those at the beginning do not count.

    Returns:
        k, v and their cu_seqlens.
    """
    batch = cu_seqlens_k.shape[0] - 1
    first = cu_seqlens_k[:-1].long()
    lengths = cu_seqlens_k.diff().long() if lengths is None else lengths.long()
    if block_table is not None:
        first = torch.zeros_like(first)
    if left_padding is not None:
        first, lengths = first + left_padding, (lengths - left_padding).clamp(min=0)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if block_table is not None and k.device.type == "cpu" and not torch.compiler.is_compiling():
        check_page_numbers(k.shape[0], k.shape[1], block_table, first + lengths)
    stored = k.shape[0] if block_table is None else min(block_table.numel(), k.shape[0] * batch) * k.shape[1]
    rows = stored if max_seqlen_k is None else min(batch * max_seqlen_k, stored)
    sequence, position, _ = locate_rows(cu_seqlens, rows)
    if batch:
        position = position + first[sequence]
    if block_table is not None:
        position = _in_pages(position, sequence, block_table, k.shape[1])
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    position = position.clamp(min=0, max=max(k.shape[0] - 1, 0))
    return _taken(k, position), _taken(v, position), cu_seqlens.int()


def _taken(x: Tensor, row: Tensor) -> Tensor:
    """Rows of x; those of 8-bit floats as integers, because PyTorch does not index them on all devices."""
    if x.dtype is torch.float8_e4m3fn:
        return x.view(torch.uint8).index_select(0, row).view(x.dtype)
    return x.index_select(0, row)


def check_pages(k: Tensor, v: Tensor, cu_seqlens_k: Tensor, block_table: Tensor) -> None:
    """Shapes of paged keys and values."""
    if k.dim() != 4 or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"k, v: expected shape [pages, page_size, heads_kv, head_dim] beside block_table, got {list(k.shape)} and "
            f"{list(v.shape)}; without pages leave block_table out"
        )
    batch = cu_seqlens_k.shape[0] - 1
    if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"block_table: expected int32 [batch, pages of a sequence], with the batch of cu_seqlens_k, {batch}, got "
            f"{block_table.dtype} {list(block_table.shape)}"
        )
    if block_table.device != k.device:
        raise ValueError(f"block_table: expected the device of k, {k.device}, got {block_table.device}; move it")


def check_page_numbers(
    pages: int, page_size: int, block_table: Tensor, ends: Tensor, name: str = "block_table"
) -> None:
    """Checks the pages of sequences that end at `ends`, `[batch]`, on a CPU; a GPU would be waited for."""
    used = -(-ends // page_size)
    if used.numel() and int(used.max()) > block_table.shape[1]:
        raise ValueError(
            f"{name}: expected pages for the {int(ends.max())} keys of the longest sequence, "
            f"{int(used.max())} columns, got {block_table.shape[1]}; add columns"
        )
    needed = torch.arange(block_table.shape[1], device=ends.device) < used[:, None]
    wrong = needed & ((block_table < 0) | (block_table >= pages))
    if wrong.any():
        sequence, number = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expected numbers from 0 to {pages - 1}, the pages of k, got "
            f"{int(block_table[sequence, number])} as page {number} of sequence {sequence}"
        )


def _in_pages(position: Tensor, sequence: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Rows among those of all pages. Entries past a sequence's length may be anything: they are clamped."""
    if not block_table.numel():
        return position
    number = position.div(page_size, rounding_mode="floor").clamp(min=0, max=block_table.shape[1] - 1)
    return block_table[sequence, number].long() * page_size + position % page_size


class UsedRows(NamedTuple):
    """The rows that count, one sequence after another.

    Attributes:
        x: `[total, ...]`, as many rows as before; those past the last sequence are copies.
        cu_seqlens: `[batch + 1]` of the rows that count.
        row: for each row before, which it is now.
        counts: bool `[total]`, which rows before count.
    """

    x: Tensor
    cu_seqlens: Tensor
    row: Tensor
    counts: Tensor

    def back(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the rows, `[total, ...]` and `[heads, total]`, in the place of these; elsewhere 0 and -inf."""
        out = out.index_select(0, self.row).masked_fill(~self.counts[:, None, None], 0)
        return out, lse.index_select(1, self.row).masked_fill(~self.counts, -math.inf)


def only_used_rows(x: Tensor, cu_seqlens: Tensor, used: Tensor) -> UsedRows:
    """Takes the first `used[b]` rows of each packed sequence `b` of x `[total, heads, head_dim]`. Waits for nothing."""
    batch, total = cu_seqlens.shape[0] - 1, x.shape[0]
    rows, _, packed = gathered_keys(x, x, cu_seqlens, None, lengths=used)
    sequence, within, inside = locate_rows(cu_seqlens, total)
    counts = inside & (within < used[sequence]) if batch else inside
    row = (packed[sequence] + within).clamp(min=0, max=max(total - 1, 0))
    return UsedRows(rows, packed.to(cu_seqlens.dtype), row, counts)


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
        sequence, _, _ = locate_rows(cu_seqlens, x.shape[0])
        offsets = positions[sequence] if positions.shape[0] else positions.new_zeros(x.shape[0])
        turned = flashtile.apply_rotary(wide[:, None], cos, sin, interleaved, seqlen_offsets=offsets)[:, 0]
    if x.dtype is torch.float8_e4m3fn:
        limit = torch.finfo(x.dtype).max
        turned = turned.clamp(-limit, limit)  # what lies past it would be NaN
    return turned.to(x.dtype)


def locate_rows(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
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
    sequence, within, there = locate_rows(cu_seqlens, total)
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
