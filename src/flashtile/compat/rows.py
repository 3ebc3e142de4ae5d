"""Rows of packed sequences, B of them, that lie otherwise: keys in pages or in parts, and rows that count."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def locate_rows(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `total` packed rows: its sequence, its number there, and whether it belongs to one."""
    batch = cu_seqlens.shape[0] - 1
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.to(row.dtype), row, right=True) - 1
    inside = sequence.clamp(max=max(batch - 1, 0))
    return inside, row - cu_seqlens[inside], sequence < batch


def gathered_keys(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int | None, *, block_table: Tensor | None = None,
    lengths: Tensor | None = None, left_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Keys and values packed as `flashtile.attention_varlen` wants them, and their cu_seqlens; differentiable in k and
    v. Nothing waits for the GPU: there are as many rows as there could be keys, the last ones copies that nothing
    attends to.

    Args:
        k, v: `[total_k, heads_kv, head_dim]`; with block_table `[pages, page_size, heads_kv, head_dim]`.
        cu_seqlens_k: `[B + 1]`, where the sequences lie, in pages how long they are.
        max_seqlen_k: of the longest, if the host knows it.
        block_table: integers `[B, pages of a sequence]`.
        lengths: `[B]`, how many rows of each are there; default all.
        left_padding: `[B]`, how many of those at the beginning do not count.
    """
    batch = cu_seqlens_k.shape[0] - 1
    first = cu_seqlens_k[:-1].long() if block_table is None else torch.zeros_like(cu_seqlens_k[:-1], dtype=torch.int64)
    lengths = cu_seqlens_k.diff().long() if lengths is None else lengths.long()
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
        if block_table.numel():  # entries past a sequence's length may be anything: they are clamped
            number = position.div(k.shape[1], rounding_mode="floor").clamp(min=0, max=block_table.shape[1] - 1)
            position = block_table[sequence, number].long() * k.shape[1] + position % k.shape[1]
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
    """Checks the pages of sequences that end at `ends`, `[B]`, on a CPU; a GPU would be waited for."""
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


def only_used_rows(
    x: Tensor, cu_seqlens: Tensor, used: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The first `used[b]` rows of each packed sequence `b` of x `[total, heads, head_dim]`, one behind another (and
    copies behind them), their cu_seqlens, and what puts out and lse `[heads, total]` in the places of before, elsewhere
    0 and -inf. Waits for nothing."""
    batch, total = cu_seqlens.shape[0] - 1, x.shape[0]
    rows, _, ends = gathered_keys(x, x, cu_seqlens, None, lengths=used)
    sequence, within, inside = locate_rows(cu_seqlens, total)
    counts = inside & (within < used[sequence]) if batch else inside
    row = (ends[sequence] + within).clamp(min=0, max=max(total - 1, 0))

    def back(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out = out.index_select(0, row).masked_fill(~counts[:, None, None], 0)
        return out, lse.index_select(1, row).masked_fill(~counts, -math.inf)

    return rows, ends.to(cu_seqlens.dtype), back
