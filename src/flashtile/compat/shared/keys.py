"""Keys and values that are not packed one sequence after another: in pages, or parts of longer sequences."""

from __future__ import annotations

import torch
from torch import Tensor


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
    row = torch.arange(rows, device=k.device)
    sequence = (torch.searchsorted(cu_seqlens, row, right=True) - 1).clamp(max=max(batch - 1, 0))
    position = row - cu_seqlens[sequence] + first[sequence] if batch else row
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
