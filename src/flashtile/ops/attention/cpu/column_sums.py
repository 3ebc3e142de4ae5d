"""How much attention each key receives, by tiles in PyTorch. Shapes are named in `tiles`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.cpu.scores import (
    TileMask,
    is_scattered,
    modifiers_of,
    modify,
    raised_rows,
    split_heads,
    tile_mask_of,
    wholly_hidden,
)
from flashtile.ops.attention.cpu.tiles import LOG2E, Block
from flashtile.ops.attention.spec import AttentionSpec, SideInputs


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """The sum over queries of the weights of each key, `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`, in the
    dtype of lse."""
    if side.packed:
        q, k, lse = q[None], k[None], lse[None]
    sums = lse.new_zeros(q.shape[0], q.shape[2], k.shape[1])
    tile_mask = tile_mask_of(side, spec)
    for block in tiles.blocks(q, k, side, spec, is_scattered(tile_mask)):
        _add_block(block, q, k, lse, sums, side, spec, tile_mask)
    return sums[0] if side.packed else sums


def _add_block(
    block: Block,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    sums: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
    tile_mask: TileMask | None,
) -> None:
    computed = tiles.compute_dtype(q.dtype)
    k_matrices = tiles.load_keys(tiles.key_view(block, k), computed)
    q_view, lse_view = tiles.row_view(block, q), tiles.statistics_view(block, lse)
    target = sums[block.batches, block.heads, block.keys].unflatten(1, (-1, block.group))  # [b, h, G, S]
    scratch = tiles.scratch_of(block, q, k).scores
    modifiers = modifiers_of(block, side, spec, tile_mask)
    for rows in tiles.query_tiles(block):
        q_tile = tiles.load_rows(q_view, rows, computed).mul_(spec.scale * LOG2E)
        row_lse = tiles.load_rows(lse_view, rows, computed)
        if (raised := raised_rows(block, rows, modifiers)) is not None:
            row_lse.add_(raised)
        row_lse = torch.where(row_lse.isneginf(), float("inf"), row_lse).mul_(LOG2E)
        for keys in tiles.visible_key_tiles(rows, block.visible, block.tile_keys):
            if wholly_hidden(modifiers, rows, keys):
                continue
            scores = tiles.score_tile(keys, q_tile, k_matrices, scratch)
            if modifiers is not None:
                modify(scores, block, rows, keys, modifiers)
            tiles.mask_band(scores, block, rows, keys)
            weights = split_heads(scores.sub_(row_lse).exp2_(), block, rows)
            target[..., keys.start : keys.stop].add_(weights.sum(dim=-2))
