"""flash_attn.cute.block_sparsity: the blocks of scores that are computed, as lists."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import flashtile

#: Sizes of a block that are tried where the lists come without: of queries, and of keys.
_BLOCKS_Q, _BLOCK_K = (128, 256), 128


class BlockSparseTensorsTorch(NamedTuple):
    """For each block of queries, which blocks of keys are computed; every tensor is int32.

    Attributes:
        mask_block_cnt: `[batch | 1, heads | 1, blocks_q]`, how many there are, or None for none.
        mask_block_idx: `[batch | 1, heads | 1, blocks_q, blocks_k]`, their numbers; what lies past the count is not
            read. A `mask_mod` would say what is visible in these. Without one all of it is, as in the full ones.
        full_block_cnt: likewise those in which everything is visible, or None for none.
        full_block_idx: their numbers.
        block_size: (queries, keys) of a block; None for (128 or 256, 128), which the shapes tell.
    """

    mask_block_cnt: Tensor | None
    mask_block_idx: Tensor | None
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


def block_mask_of(blocks: BlockSparseTensorsTorch, seq_q: int, seq_k: int) -> flashtile.BlockMask:
    """The same as flashtile takes it. Reads values on the host, so it waits for a GPU."""
    lists = {
        "mask_block": (blocks.mask_block_cnt, blocks.mask_block_idx),
        "full_block": (blocks.full_block_cnt, blocks.full_block_idx),
    }
    layouts = [_listed(name, count, index, seq_k) for name, (count, index) in lists.items() if count is not None]
    layout = layouts[0] if len(layouts) == 1 else layouts[0] | layouts[1]
    size = blocks.block_size
    if size is None:
        found = [rows for rows in _BLOCKS_Q if -(-seq_q // rows) == layout.shape[2]]
        size = (found[0] if found else _BLOCKS_Q[0], _BLOCK_K)
    tiles = -(-seq_q // size[0]), -(-seq_k // size[1])
    if layout.shape[2] != tiles[0] or layout.shape[3] < tiles[1] or layout[..., tiles[1] :].any():
        raise ValueError(
            f"block_size: expected blocks of {size} for {seq_q} queries and {seq_k} keys, {list(tiles)} of them, got "
            f"lists of {list(layout.shape[2:])}; pass the block_size that they were made for"
        )
    return flashtile.BlockMask.from_layout(layout[..., : tiles[1]], size, seq_q, seq_k)


def _listed(name: str, count: Tensor, index: Tensor | None, seq_k: int) -> Tensor:
    """Which blocks are in a list: bool `[batch, heads, blocks_q, blocks_k]`."""
    if index is None or count.dim() != 3 or index.dim() != 4 or index.shape[:3] != count.shape:
        raise ValueError(
            f"{name}_cnt, {name}_idx: expected [batch, heads, blocks_q] and [batch, heads, blocks_q, blocks_k], got "
            f"{list(count.shape)} and {None if index is None else list(index.shape)}"
        )
    columns = max(index.shape[3], -(-seq_k // _BLOCK_K))
    there = torch.arange(index.shape[3], device=index.device) < count[..., None]
    number = torch.where(there, index, columns).long().clamp(max=columns)
    layout = torch.zeros(*index.shape[:3], columns + 1, dtype=torch.bool, device=index.device)
    return layout.scatter(3, number, True)[..., :columns]
