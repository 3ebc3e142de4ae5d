"""The pairs that functions and bands show, and what must hold of any `BlockMask`, tile by tile from the dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import BlockMask
from flashtile.ops.attention import reference
from flashtile.ops.attention.spec import AttentionSpec, SideInputs


def dense_of(predicate, batch: int, heads: int, seq_q: int, seq_k: int) -> Tensor:
    """bool `[batch, heads, seq_q, seq_k]` of a function of batch, head, q, k as Python numbers."""
    values = [
        [[[bool(predicate(b, h, q, k)) for k in range(seq_k)] for q in range(seq_q)] for h in range(heads)]
        for b in range(batch)
    ]
    return torch.tensor(values, dtype=torch.bool).view(batch, heads, seq_q, seq_k)


def shown_by_band(seq_q: int, seq_k: int, spec: AttentionSpec) -> Tensor:
    """bool `[seq_q, seq_k]` of a spec's band."""
    part = reference.whole_part(torch.zeros(1, seq_q, 1, 1), torch.zeros(1, seq_k, 1, 1))
    return reference.shown_by_position(part, SideInputs(), spec)[0, 0]


def check_mask(mask: BlockMask, dense: Tensor) -> None:
    """Holds a mask to a bool `[batch, heads, seq_q, seq_k]`: its pairs, and each entry of both lists."""
    assert mask.shape == tuple(dense.shape)
    assert torch.equal(mask.to_dense(), dense)
    (tile_q, tile_k), (batch, heads, seq_q, seq_k) = mask.tile, mask.shape
    assert tile_q % 64 == 0 and tile_k % 64 == 0
    starts_q, starts_k = range(0, seq_q, tile_q), range(0, seq_k, tile_k)
    rows, columns = [], [[] for _ in range(batch * heads * len(starts_k))]
    for sequence, matrix in enumerate(dense.flatten(0, 1)):
        for i, start_q in enumerate(starts_q):
            rows.append([])
            for j, start_k in enumerate(starts_k):
                kind = _kind_of(matrix[start_q : start_q + tile_q, start_k : start_k + tile_k], mask)
                if kind is not None:
                    rows[-1].append((j, kind))
                    columns[sequence * len(starts_k) + j].append((i, kind))
    assert _listed(mask.row_offsets, mask.columns, mask.kinds) == rows
    assert _listed(mask.column_offsets, mask.rows, mask.row_kinds) == columns
    ranks = [{tile: rank for rank, (tile, _) in enumerate(entries)} for entries in rows]
    assert mask.row_ranks.tolist() == [
        ranks[column // len(starts_k) * len(starts_q) + row][column % len(starts_k)]
        for column, entries in enumerate(columns)
        for row, _ in entries
    ]
    in_order = (mask.row_offsets, mask.column_offsets, mask.columns, mask.kinds, mask.rows, mask.row_kinds)
    in_order += (mask.row_ranks, mask.row_order)
    bits = mask.row_bits.flatten(), mask.column_bits.flatten()
    padding = torch.zeros(-sum(part.shape[0] for part in in_order) % 4, dtype=torch.int32)
    assert torch.equal(torch.cat((*in_order, padding, *bits)), mask.lists) and mask.entries == mask.columns.shape[0]
    assert mask.row_order.tolist() == [
        line
        for first in range(0, len(rows), len(starts_q) or 1)
        for line in sorted(range(len(starts_q)), key=lambda line: len(rows[first + line]))
    ]
    assert torch.equal(_unpacked(mask.row_bits), mask.tile_masks)
    assert torch.equal(_unpacked(mask.column_bits), mask.tile_masks.transpose(1, 2))
    assert mask.tile_masks.dtype is torch.uint8 and mask.tile_masks.shape[1:] == mask.tile
    used = set(mask.kinds[mask.kinds >= 0].tolist())
    assert used == set(range(mask.tile_masks.shape[0])), "each pattern is some tile's"
    assert len(mask.tile_masks.flatten(1).unique(dim=0)) == len(used), "no two are equal"


def _unpacked(bits: Tensor) -> Tensor:
    """Words of 32 bits as a byte for each bit, the lowest first."""
    return (bits[..., None] >> torch.arange(32) & 1).flatten(-2).to(torch.uint8)


def _kind_of(tile: Tensor, mask: BlockMask) -> int | None:
    """What a tile, cut at the ends, must have for its kind; None where it is empty."""
    if not tile.any():
        return None
    if tile.all():
        return -1
    whole = torch.zeros(mask.tile, dtype=torch.uint8)
    whole[: tile.shape[0], : tile.shape[1]] = tile
    (kind,) = (mask.tile_masks == whole).all(dim=(1, 2)).nonzero()[:, 0].tolist()
    return kind


def _listed(offsets: Tensor, tiles: Tensor, kinds: Tensor) -> list[list[tuple[int, int]]]:
    assert offsets.dtype is tiles.dtype is kinds.dtype is torch.int32
    assert offsets[0] == 0 and offsets[-1] == tiles.shape[0] == kinds.shape[0]
    entries = list(zip(tiles.tolist(), kinds.tolist()))
    return [entries[start:end] for start, end in zip(offsets.tolist(), offsets[1:].tolist())]
