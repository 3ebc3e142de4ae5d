"""Several documents in one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.block_mask_arguments import stored_tile
from flashtile.ops.attention.patterns.pieces import TILE, Device, extremes, integers, made
from flashtile.ops.attention.tile_lists import Bounds, Grid, Tiles
from flashtile.ops.common.checks import check_tensors, raise_not_bool


def documents(
    *,
    lengths: Sequence[int] | Tensor | None = None,
    ids: Tensor | None = None,
    causal: bool = False,
    tile: tuple[int, int] = TILE,
    device: Device = None,
    max_partial_tiles: int | None = None,
) -> BlockMask:
    """Tokens see the tokens of their own document.

    ::

        lengths=[2, 3, 1]     x x . . . .      causal     x . . . . .
                              x x . . . .                 x x . . . .
                              . . x x x .                 . . x . . .
                              . . x x x .                 . . x x . .
                              . . x x x .                 . . x x x .
                              . . . . . x                 . . . . . x

    Args:
        lengths: lengths of documents that follow one another, `[documents]`; their sum is the number of tokens.
        ids: the document of each token, int32 or int64 `[seq]`, or `[batch, seq]`; in any order. A token with a
            negative id belongs to no document: it sees nothing and is not seen. Pass either lengths or ids.
        causal: tokens see no later tokens.
        tile: tile of the lists, multiples of 16.
        device: device of the result; None = that of lengths or ids if they are tensors.
        max_partial_tiles: as for `BlockMask.from_predicate`; then ids are not read on the host. Lengths in a tensor
            are.

    Raises:
        TypeError, ValueError: both or none of lengths and ids, or a dtype, a shape, a length or the tile is wrong.

    Reference:
        Krell, Kosec, Perez, Fitzgibbon, "Efficient Sequence Packing without Cross-contamination" (2021).
    """
    raise_not_bool(causal=causal)
    ids = _document_ids(lengths, ids, device)
    batch, seq = ids.shape
    shape = (batch, 1, seq, seq)
    grid = Grid(shape, stored_tile(tile))
    least_q, most_q = extremes(ids, grid.tile[0])
    least_k, most_k = extremes(ids, grid.tile[1])

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        document = ids[batch, q]
        seen = (document == ids[batch, k]) & (document >= 0)
        return seen & (k <= q) if causal else seen

    def bounds(tiles: Tiles) -> Bounds:
        at_q, at_k = (tiles.batch, tiles.q_tile), (tiles.batch, tiles.k_tile)
        # Tiles share no document if their ids do not overlap; and only one if all are equal.
        possible = (least_q[at_q] <= most_k[at_k]) & (least_k[at_k] <= most_q[at_q]) & (most_k[at_k] >= 0)
        certain = (least_q[at_q] == most_k[at_k]) & (least_k[at_k] == most_q[at_q]) & (least_k[at_k] >= 0)
        if causal:
            possible = possible & (tiles.first_k <= tiles.last_q)
            certain = certain & (tiles.last_k <= tiles.first_q)
        return Bounds(possible, certain)

    return made(shape, tile, ids.device, bounds, visible, max_partial_tiles)


def _document_ids(lengths: Sequence[int] | Tensor | None, ids: Tensor | None, device: Device) -> Tensor:
    """The document of each token, `[batch, seq]`."""
    if (lengths is None) == (ids is None):
        raise ValueError(
            f"lengths, ids: expected one of them, got {'neither' if ids is None else 'both'}; lengths are of documents "
            "one behind the other, ids tell the document of each token"
        )
    if lengths is not None:
        lengths = integers("lengths", lengths, (1,), "[documents]", device)
        if bool((lengths < 0).any()):
            raise ValueError(
                f"lengths: expected at least 0, got {int(lengths.min())}; use ids for tokens of no document"
            )
        return torch.repeat_interleave(lengths.long())[None]
    assert ids is not None
    check_tensors(ids=ids)
    ids = integers("ids", ids, (1, 2), "[seq] or [batch, seq]", device)
    return ids if ids.dim() == 2 else ids[None]
