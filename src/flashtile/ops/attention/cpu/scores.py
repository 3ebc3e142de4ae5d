"""What changes the scores of a tile on the CPU (soft cap, bias, ALiBi, masks), and the gradients that come back.

Letters as in `tiles`. A block sees its part of each side input as a view `[b, h, G, Sq, Sk]`, each size its own or 1;
scores carry a factor log₂e.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.block_mask import BlockMask
from flashtile.ops.attention.cpu.tiles import LOG2E, Block, KeyTile
from flashtile.ops.attention.spec import AttentionSpec, SideInputs, Wanted


class Modifiers(NamedTuple):
    """What changes the scores of a block; None for what the call does not have.

    Attributes:
        softcap: bound of the scores, times log₂e; 0 = none.
        bias: view of the bias.
        slopes: of ALiBi, `[b | 1, h, G, 1, 1]`.
        mask: view of the mask.
        tiles: of the block mask, see `TileMask`.
    """

    softcap: float
    bias: Tensor | None
    slopes: Tensor | None
    mask: Tensor | None
    tiles: TileMask | None


class TileMask(NamedTuple):
    """A block mask by tiles: `kinds` `[b | 1, h | 1, G | 1, tiles_q, tiles_k]`, numbers of `patterns` `[P, tq, tk]`."""

    kinds: Tensor
    patterns: Tensor


def modifiers_of(block: Block, side: SideInputs, spec: AttentionSpec, tile_mask: TileMask | None) -> Modifiers | None:
    """What changes the scores of a block, or None where nothing does. `tile_mask`: that of the call."""
    changes = side.bias, side.alibi_slopes, side.mask, side.block_lists
    if not spec.softcap and all(change is None for change in changes):
        return None
    slopes = side.alibi_slopes
    if slopes is not None:
        slopes = _slopes_view(block, slopes)
    return Modifiers(
        spec.softcap * LOG2E,
        None if side.bias is None else scores_view(block, side.bias),
        slopes,
        None if side.mask is None else scores_view(block, side.mask),
        None if tile_mask is None else tile_mask._replace(kinds=_kinds_view(block, tile_mask.kinds)),
    )


def scores_view(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of what broadcasts to the scores: `[B | 1, H | 1, ...]` to `[b | 1, h | 1, G | 1, ...]`."""
    if tensor.shape[0] > 1:
        tensor = tensor[block.batches]
    if tensor.shape[1] == 1:
        return tensor.unsqueeze(2)
    return tensor[:, block.heads].unflatten(1, (-1, block.group))


def _slopes_view(block: Block, slopes: Tensor) -> Tensor:
    """`[H]` or `[sequences, H]` to `[b | 1, h, G, 1, 1]`."""
    if slopes.dim() == 2:
        slopes = slopes[_sequences(block)]
    else:
        slopes = slopes[None]
    return slopes[:, block.heads].unflatten(1, (-1, block.group))[..., None, None]


def _kinds_view(block: Block, kinds: Tensor) -> Tensor:
    """`[sequences | 1, H | 1, tiles_q, tiles_k]` to `[b | 1, h | 1, G | 1, tiles_q, tiles_k]`."""
    if kinds.shape[0] > 1:
        kinds = kinds[_sequences(block)]
    return kinds.unsqueeze(2) if kinds.shape[1] == 1 else kinds[:, block.heads].unflatten(1, (-1, block.group))


def _sequences(block: Block) -> slice:
    """The batch entries of a block, or its packed sequence, among those of the call."""
    return slice(block.sequence, block.sequence + block.batches.stop - block.batches.start)


def part(view: Tensor, rows: range, keys: range | KeyTile) -> Tensor:
    """Rows and keys of a view `[..., Sq | 1, Sk | 1]`."""
    if view.shape[-2] > 1:
        view = view[..., rows.start : rows.stop, :]
    if view.shape[-1] > 1:
        view = view[..., keys.start : keys.stop]
    return view


def modify(scores: Tensor, block: Block, rows: range, keys: KeyTile, modifiers: Modifiers) -> Tensor | None:
    """Changes a tile of scores `[N, G·R, C]` in place. Returns the derivative of the soft cap there, None without."""
    slope = None
    if modifiers.softcap:
        tanh = scores.div_(modifiers.softcap).tanh_()
        slope = 1 - tanh * tanh
        scores.mul_(modifiers.softcap)
    by_head = split_heads(scores, block, rows)
    if modifiers.bias is not None:
        by_head.add_(part(modifiers.bias, rows, keys).to(scores.dtype), alpha=LOG2E)
    if modifiers.slopes is not None:
        by_head.addcmul_(modifiers.slopes, distance(block, rows, keys, scores.dtype), value=-LOG2E)
    if modifiers.mask is not None:
        by_head.masked_fill_(~part(modifiers.mask, rows, keys), float("-inf"))
    if modifiers.tiles is not None:
        by_head.masked_fill_(~_visible(modifiers.tiles, rows, keys), float("-inf"))
    return slope


def split_heads(tile: Tensor, block: Block, rows: range) -> Tensor:
    """A view of a tile `[N, G·R, C]`: `[b, h, G, R, C]`."""
    heads = block.heads_kv.stop - block.heads_kv.start
    return tile.view(-1, heads, block.group, len(rows), tile.shape[-1])


def distance(block: Block, rows: range, keys: range | KeyTile, dtype: torch.dtype) -> Tensor:
    """`|i + seq_k - seq_q - j|`, `[R, C]`."""
    row = torch.arange(rows.start, rows.stop, dtype=dtype) + block.diagonal
    return (row[:, None] - torch.arange(keys.start, keys.stop, dtype=dtype)).abs_()


def tile_mask_of(side: SideInputs, spec: AttentionSpec) -> TileMask | None:
    """The block mask of a call; its kinds are `[batch | 1, heads | 1, tiles_q, tiles_k]`, of which blocks take views.

    The table and the patterns are made here, so once for each call and not for each block.
    """
    if side.block_lists is None or side.block_patterns is None or spec.block_shape is None:
        return None
    batch, heads, *tile = spec.block_shape
    shape = batch, heads, side.max_seqlen_q, side.max_seqlen_k
    mask = BlockMask(shape, (tile[0], tile[1]), side.block_lists, side.block_patterns)
    table = mask.kind_table().view(batch, heads, mask.grid.tiles_q, mask.grid.tiles_k)
    return TileMask(table, mask.masks_with_ends().bool())


def wholly_hidden(modifiers: Modifiers | None, rows: range, keys: KeyTile) -> bool:
    """Whether the block mask shows nothing of a tile, so that it need not be computed."""
    if modifiers is None or modifiers.tiles is None:
        return False
    nothing = len(modifiers.tiles.patterns) - 2
    return bool((_kinds_of(modifiers.tiles, rows, keys) == nothing).all())


def _kinds_of(tiles: TileMask, rows: range, keys: KeyTile) -> Tensor:
    """Kinds of the stored tiles that a tile lies in."""
    _, tile_q, tile_k = tiles.patterns.shape
    last_q, last_k = (rows.stop - 1) // tile_q, (keys.stop - 1) // tile_k
    return tiles.kinds[..., rows.start // tile_q : last_q + 1, keys.start // tile_k : last_k + 1]


def _visible(tiles: TileMask, rows: range, keys: KeyTile) -> Tensor:
    """What a block mask shows of a tile: `[b | 1, h | 1, G | 1, R, C]`."""
    _, tile_q, tile_k = tiles.patterns.shape
    kinds = _kinds_of(tiles, rows, keys)
    whole = tiles.patterns[kinds].transpose(-3, -2).flatten(-2).flatten(-3, -2)
    top, left = rows.start % tile_q, keys.start % tile_k
    return whole[..., top : top + len(rows), left : left + keys.stop - keys.start]


class SideGradients:
    """The gradients of side inputs, summed over the tiles of all blocks.

    Attributes:
        bias, alibi_slopes, sinks: in the compute dtype and the shape of the input; None for what is not wanted.
    """

    def __init__(self, side: SideInputs, wanted: Wanted, dtype: torch.dtype) -> None:
        self.bias, self.alibi_slopes, self.sinks = (
            torch.zeros(tensor.shape, dtype=dtype) if wants and tensor is not None else None
            for wants, tensor in zip(wanted, (side.bias, side.alibi_slopes, side.sinks))
        )

    def add_scores(self, dscores: Tensor, block: Block, rows: range, keys: range, factor: float) -> None:
        """Takes in the gradient of a tile of scores (in front of the soft cap's), `factor` times `[N, G·R, C]`."""
        if self.bias is None and self.alibi_slopes is None:
            return
        by_head = split_heads(dscores, block, rows)
        if self.bias is not None:
            target = part(scores_view(block, self.bias), rows, keys)
            target.add_(by_head.sum_to_size(target.shape), alpha=factor)
        if self.alibi_slopes is not None:
            target = _slopes_view(block, self.alibi_slopes)
            along = (by_head * distance(block, rows, keys, dscores.dtype)).sum_to_size(target.shape)
            target.sub_(along, alpha=factor)

    def add_rows(self, sink_weights: Tensor, delta: Tensor, block: Block, rows: range, factor: float) -> None:
        """Takes in some rows: what their sinks weigh, and `factor` times delta, `[N, G·R, 1]` each."""
        if self.sinks is not None:
            target = self.sinks[block.heads].view(1, -1, block.group, 1, 1)
            target.sub_(split_heads(sink_weights * delta, block, rows).sum_to_size(target.shape), alpha=factor)

    def finish(self, side: SideInputs) -> tuple[Tensor | None, ...]:
        """In the dtype of the inputs, in the order of `Wanted`."""
        totals = (self.bias, side.bias), (self.alibi_slopes, side.alibi_slopes), (self.sinks, side.sinks)
        return tuple(None if total is None or of is None else total.to(of.dtype) for total, of in totals)
