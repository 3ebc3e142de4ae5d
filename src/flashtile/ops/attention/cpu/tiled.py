"""Attention by tiles in PyTorch: online softmax forward, recomputing backward, memory linear in the sequence length.

One Python thread walks over the tiles in a fixed order, so results are deterministic. Shapes are named in `tiles`.
Reference: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.cpu.scores import (
    Derivatives,
    Modifiers,
    SideGradients,
    TileMask,
    block_modifiers,
    call_tile_mask,
    is_scattered,
    modify,
    raised_rows,
    row_logits,
    split_heads,
    wholly_hidden,
)
from flashtile.ops.attention.cpu.tiles import LN2, LOG2E, Block, KeyTile, Scratch
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, Gradients, SideInputs, Wanted


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(out, lse), or (out, lse, max_scores), of a call; shapes as in `flashtile.attention` and `attention_varlen`."""
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    # Rows that no segment owns, or whose segment has no key, keep these values.
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    rows = q.shape[0], q.shape[2], q.shape[1]
    statistics = [
        q.new_full(rows, float("-inf"), dtype=tiles.compute_dtype(q.dtype)) for _ in range(1 + spec.returns_max_scores)
    ]
    tile_mask = call_tile_mask(side, spec)
    for block in tiles.blocks(q, k, side, spec, is_scattered(tile_mask)):
        _forward_block(_block_scores(block, q, k, v, side, spec, tile_mask), q, v, out, statistics, side, spec)
    return tuple(t[0] if side.packed else t for t in (out, *statistics))


def backward(given: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Gradients:
    """The gradients of a call from its outputs and their gradients."""
    if side.packed:
        given = given.as_batch()
    _, _, q, k, v, *_ = given
    grads = [t.new_zeros(t.shape) for t in (q, k, v)]
    of_side, tile_mask = SideGradients(side, wanted, tiles.compute_dtype(q.dtype)), call_tile_mask(side, spec)
    for block in tiles.blocks(q, k, side, spec, is_scattered(tile_mask)):
        _backward_block(_block_scores(block, q, k, v, side, spec, tile_mask), given, grads, of_side, side, spec)
    dq, dk, dv = (grad[0] if side.packed else grad for grad in grads)
    return Gradients(dq, dk, dv, *of_side.finish(side))


def column_sums(q: Tensor, k: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """The sum over queries of each key's weights, `[batch, heads_q, seq_k]`, packed `[heads_q, total_k]`."""
    if side.packed:
        q, k, lse = q[None], k[None], lse[None]
    sums = lse.new_zeros(q.shape[0], q.shape[2], k.shape[1])
    tile_mask = call_tile_mask(side, spec)
    for block in tiles.blocks(q, k, side, spec, is_scattered(tile_mask)):
        _sum_block(_block_scores(block, q, k, k, side, spec, tile_mask), q, lse, sums, spec)
    return sums[0] if side.packed else sums


class _BlockScores(NamedTuple):
    """The parts of the scores of a block. `k`: `[N, S, D]`, in the compute dtype."""

    block: Block
    modifiers: Modifiers | None
    k: Tensor
    scratch: Scratch

    def tiles(self, rows: range, q_tile: Tensor) -> Iterator[tuple[KeyTile, Tensor, Derivatives | None]]:
        """The key tiles that some rows see, each with its scores `[N, G·R, C]`, times log₂e, -inf where they are
        hidden, and their derivatives. The scores of each tile lie where those of the one before lay. `q_tile`: times
        scale · log₂e."""
        block, modifiers, k, scratch = self
        for keys in tiles.visible_key_tiles(rows, block.visible, block.tile_keys, block.whole):
            if wholly_hidden(modifiers, rows, keys):
                continue
            scores = tiles.score_tile(keys, q_tile, k, scratch.scores)
            changes = None if modifiers is None else modify(scores, block, rows, keys, modifiers)
            tiles.mask_band(scores, block, rows, keys)
            yield keys, scores, changes


def _block_scores(
    block: Block, q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec, tile_mask: TileMask | None
) -> _BlockScores:
    modifiers = block_modifiers(block, side, spec, tile_mask)
    k_matrices = tiles.load_keys(block, k, tiles.compute_dtype(k.dtype))
    return _BlockScores(block, modifiers, k_matrices, tiles.make_scratch(block, q, v))


def _forward_block(
    made: _BlockScores, q: Tensor, v: Tensor, out: Tensor, statistics: list[Tensor], side: SideInputs,
    spec: AttentionSpec,
) -> None:  # fmt: skip
    """Writes a block's part of out and of `statistics`: lse, and the largest scores if they are asked for."""
    block, scratch = made.block, made.scratch
    v_matrices = tiles.load_keys(block, v, tiles.product_dtype(v.dtype))
    q_view, out_view = tiles.row_view(block, q), tiles.row_view(block, out)
    views = [tiles.statistics_view(block, statistic) for statistic in statistics]
    logits = row_logits(block, side)
    for rows in tiles.query_tiles(block):
        q_tile = tiles.load_rows(q_view, rows, made.k.dtype).mul_(spec.scale * LOG2E)
        raised = raised_rows(block, rows, made.modifiers)
        softmax = _OnlineSoftmax(q_tile, v.shape[-1], logits, raised, spec.returns_max_scores)
        for keys, scores, _ in made.tiles(rows, q_tile):
            kept = tiles.keep_weights(block, rows, keys, spec, scratch)
            softmax.add(scores, v_matrices[:, keys.start : keys.stop], kept, scratch)
        out_tile, *statistics_tiles = softmax.finish(spec.dropout_p)
        tiles.store_rows(out_view, rows, out_tile)
        for view, tile in zip(views, statistics_tiles):
            tiles.store_rows(view, rows, tile if raised is None else tile.sub_(raised))


class _OnlineSoftmax:
    """`softmax(scores) v` of some rows, a tile of keys at a time, and its log-sum-exp.

    Attributes:
        row_max: `[N, G·R, 1]`, largest score (times log₂e) so far, or the sink.
        score_max: the same without the sink, -inf at first; None if it is not asked for.
        row_sum: `[N, G·R, 1]`, sum of `exp2(score - row_max)`.
        weighted: `[N, G·R, Dv]`, the same sum with each term times its value.
    """

    def __init__(
        self, q_tile: Tensor, head_dim_v: int, logits: Tensor | None, raised: Tensor | None, keeps_score_max: bool
    ):
        """`logits`: `row_logits`. `raised`: `raised_rows`."""
        matrices, rows, _ = q_tile.shape
        # The least finite number rather than -inf: a row that has seen nothing yet must not compute -inf - -inf.
        least = torch.finfo(q_tile.dtype).min
        if logits is None:
            self.row_max = q_tile.new_full((matrices, rows, 1), least)
            self.row_sum = q_tile.new_zeros(matrices, rows, 1)
        else:
            self.row_max = logits.clamp(min=least).repeat(1, 1, rows // logits.shape[1], 1).view(-1, rows, 1)
            self.row_sum = (self.row_max > least).to(q_tile.dtype)
            if raised is not None:
                self.row_max = self.row_max.add(raised, alpha=LOG2E)
        self.weighted = q_tile.new_zeros(matrices, rows, head_dim_v)
        self.score_max = q_tile.new_full((matrices, rows, 1), float("-inf")) if keeps_score_max else None

    def add(self, scores: Tensor, v_tile: Tensor, kept: Tensor | None, scratch: Scratch) -> None:
        """Takes in a tile of scores `[N, G·R, C]`, which it overwrites, and its values `[N, C, Dv]`."""
        tile_max = scores.amax(dim=-1, keepdim=True)
        row_max = torch.maximum(self.row_max, tile_max)
        if self.score_max is not None:
            self.score_max = torch.maximum(self.score_max, tile_max)
        decay = self.row_max.sub_(row_max).exp2_()
        weights = scores.sub_(row_max).exp2_()
        self.row_max = row_max
        self.row_sum.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
        if kept is not None:
            weights.mul_(kept)
        weights = tiles.converted(weights, scratch.converted)
        tiles.add_product(self.weighted.mul_(decay), weights, v_tile, scratch.products)

    def finish(self, dropout_p: float) -> tuple[Tensor, ...]:
        """out `[N, G·R, Dv]`, lse `[N, G·R, 1]`, perhaps the largest scores; without visible keys 0, -inf, -inf."""
        lse = self.row_sum.log2().add_(self.row_max).mul_(LN2)
        # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
        lse = torch.where(self.row_max == float("inf"), self.row_max, lse)
        blind = self.row_sum == 0
        out = self.weighted.div_(self.row_sum.mul_(1 - dropout_p)).masked_fill_(blind, 0)
        return (out, lse) if self.score_max is None else (out, lse, self.score_max * LN2)


class _BackwardRows(NamedTuple):
    """Inputs of the backward for a tile of rows.

    Attributes:
        q_scaled: `[N, G·R, D]`, times scale · log₂e, for the scores.
        dout: `[N, G·R, Dv]`, for the gradients of the weights.
        q_product, dout_product: q and dout in the product dtype, for the gradients of keys and values.
        lse: `[N, G·R, 1]`, of scores as `modify` makes them, times log₂e; +inf, which makes all weights 0, where no key
            is visible.
        delta: `[N, G·R, 1]`, `(rowsum(dout · out) - dlse)` times the probability that dropout keeps a weight.
    """

    q_scaled: Tensor
    dout: Tensor
    q_product: Tensor
    dout_product: Tensor
    lse: Tensor
    delta: Tensor


def _load_backward_rows(
    block: Block, rows: range, given: BackwardInputs, raised: Tensor | None, spec: AttentionSpec
) -> _BackwardRows:
    dtype = given.q.dtype
    computed, multiplied = tiles.compute_dtype(dtype), tiles.product_dtype(dtype)
    q, dout, out = (tiles.load_rows(tiles.row_view(block, t), rows, computed) for t in (given.q, given.dout, given.out))
    lse = tiles.load_rows(tiles.statistics_view(block, given.lse), rows, computed, outside=float("-inf"))
    if raised is not None:
        lse.add_(raised)
    delta = out.mul_(dout).sum(dim=-1, keepdim=True)
    if given.dlse is not None:
        delta.sub_(tiles.load_rows(tiles.statistics_view(block, given.dlse), rows, computed))
    blind = lse.isneginf()
    if blind.any():
        # Whatever comes from above, and even if it is NaN, nothing may pass through such a row.
        lse = lse.masked_fill_(blind, float("inf"))
        q, dout, delta = (t.masked_fill_(blind, 0) for t in (q, dout, delta))
    return _BackwardRows(
        q_scaled=q * (spec.scale * LOG2E),
        dout=dout,
        q_product=q.to(multiplied),
        dout_product=dout.to(multiplied),
        lse=lse.mul_(LOG2E),
        delta=delta.mul_(1 - spec.dropout_p),
    )


def _backward_block(
    made: _BlockScores, given: BackwardInputs, grads: list[Tensor], of_side: SideGradients, side: SideInputs,
    spec: AttentionSpec,
) -> None:  # fmt: skip
    """Writes the gradients of a block into `grads`, (dq, dk, dv), and adds its part to those of the side inputs."""
    block, modifiers, k, scratch = made
    v = tiles.load_keys(block, given.v, k.dtype)
    k_product = k.to(tiles.product_dtype(given.k.dtype))
    # The sums of the gradients of keys and values, without the factors that come at the end.
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dq_view, keep_probability, logits = tiles.row_view(block, grads[0]), 1 - spec.dropout_p, row_logits(block, side)
    for rows in tiles.query_tiles(block):
        raised = raised_rows(block, rows, modifiers)
        row = _load_backward_rows(block, rows, given, raised, spec)
        dq_tile = torch.zeros_like(row.q_scaled)
        if logits is not None:
            row = _add_logits(
                made, rows, row, logits, raised, given.dlse, of_side=of_side, keep_probability=keep_probability
            )
        for keys, scores, changes in made.tiles(rows, row.q_scaled):
            kept = tiles.keep_weights(block, rows, keys, spec, scratch)
            at = slice(keys.start, keys.stop)
            # The weights, in place of the scores, and the gradients of the scores.
            weights = scores.sub_(row.lse).exp2_()
            dscores = tiles.product(row.dout, v[:, at].transpose(1, 2), scratch.dweights)
            if kept is not None:
                dscores.mul_(kept)
            dscores.sub_(row.delta).mul_(weights)
            of_side.add_scores(dscores, block, rows, range(keys.start, keys.stop), 1 / keep_probability)
            if modifiers is not None and changes is not None:
                of_side.change_back(dscores, weights, block, rows, modifiers, changes, 1 / keep_probability)
            if kept is not None:
                weights.mul_(kept)
            weights = tiles.converted(weights, scratch.converted)
            tiles.add_product(dv[:, at], weights.transpose(1, 2), row.dout_product, scratch.products)
            dscores = tiles.converted(dscores, scratch.converted)
            tiles.add_product(dk[:, at], dscores.transpose(1, 2), row.q_product, scratch.products)
            tiles.add_product(dq_tile, dscores, k_product[:, at], scratch.products)
        tiles.store_rows(dq_view, rows, dq_tile.mul_(spec.scale / keep_probability))
    tiles.store_keys(block, grads[1], dk.mul_(spec.scale / keep_probability))
    tiles.store_keys(block, grads[2], dv.div_(keep_probability))


def _add_logits(
    made: _BlockScores, rows: range, row: _BackwardRows, logits: Tensor, raised: Tensor | None, dlse: Tensor | None,
    of_side: SideGradients, keep_probability: float,
) -> _BackwardRows:  # fmt: skip
    """Takes in the gradients of the logits of some rows. Returns the rows; those that see their sink alone have out =
    0, so NaN from above, or infinity, shows in their delta, and nothing of them reaches queries and keys."""
    block, by_head = made.block, row.lse.unflatten(1, (made.block.group, -1))
    of_rows = logits if raised is None else logits + raised.view_as(by_head) * LOG2E
    weights = (of_rows - by_head).exp2_().view_as(row.lse)
    delta = row.delta
    if not delta.isfinite().all():
        blind = torch.ones_like(row.lse, dtype=torch.bool)  # rows that see no key; their scores are made once more
        for _, scores, _ in made.tiles(rows, row.q_scaled):
            blind &= (scores == float("-inf")).all(dim=-1, keepdim=True)
        # 0 in rows without a sink, too
        of_blind = torch.zeros_like(delta)
        if dlse is not None:
            of_blind = tiles.load_rows(tiles.statistics_view(block, dlse), rows, delta.dtype).neg_()
            of_blind.masked_fill_(row.lse == float("inf"), 0).mul_(keep_probability)
        delta = torch.where(blind, of_blind, delta)
        row = _BackwardRows(*(t.masked_fill(blind, float("inf") if t is row.lse else 0) for t in row))
    of_side.add_rows(weights, delta, block, rows, 1 / keep_probability)
    return row


def _sum_block(made: _BlockScores, q: Tensor, lse: Tensor, sums: Tensor, spec: AttentionSpec) -> None:
    block = made.block
    q_view, lse_view = tiles.row_view(block, q), tiles.statistics_view(block, lse)
    target = sums[block.batches, block.heads, block.keys].unflatten(1, (-1, block.group))  # [b, h, G, S]
    for rows in tiles.query_tiles(block):
        q_tile = tiles.load_rows(q_view, rows, made.k.dtype).mul_(spec.scale * LOG2E)
        row_lse = tiles.load_rows(lse_view, rows, made.k.dtype)
        if (raised := raised_rows(block, rows, made.modifiers)) is not None:
            row_lse.add_(raised)
        row_lse = torch.where(row_lse.isneginf(), float("inf"), row_lse).mul_(LOG2E)
        for keys, scores, _ in made.tiles(rows, q_tile):
            weights = split_heads(scores.sub_(row_lse).exp2_(), block, rows)
            target[..., keys.start : keys.stop].add_(weights.sum(dim=-2))


#: How many scores take as long as what a sequence of another length costs the host.
_SCORES_OF_A_SEQUENCE = 2**16

#: How many scores of a key take as long as reading it.
_SCORES_OF_READING = 32


#: Largest hidden number that is multiplied by a weight of 0. Its products with queries and gradients are finite.
_LARGEST_HIDDEN = 2.0**16


def lengths_as_mask(q: Tensor, k: Tensor, v: Tensor, side: SideInputs) -> tuple[Tensor, Tensor, SideInputs]:
    """k, v and side inputs of a call `[B, S, H, D]` with a mask in place of its key lengths; as given if that does not
    pay. Hidden keys and values that could overflow, or are NaN, become 0 in copies, so the same path computes them."""
    lengths = side.key_lengths
    if lengths is None or side.packed or (side.mask is not None and side.mask.shape[2] > 1):
        return k, v, side
    others = int((lengths[1:] != lengths[:-1]).sum())
    hidden = int((k.shape[1] - lengths.clamp(max=k.shape[1])).sum())
    cost = hidden * q.shape[2] * (q.shape[1] + _SCORES_OF_READING)
    if not others or cost > others * _SCORES_OF_A_SEQUENCE:
        return k, v, side
    shown = torch.arange(k.shape[1], device="cpu") < lengths[:, None]
    k, v = _without_large(k, ~shown), _without_large(v, ~shown)
    mask = shown[:, None, None]
    return k, v, side._replace(key_lengths=None, mask=mask if side.mask is None else side.mask & mask)


def _without_large(tensor: Tensor, hidden: Tensor) -> Tensor:
    """Keys or values `[B, S, H, D]`; a copy with zeros in hidden rows `[B, S]` if one of their numbers is large."""
    rows = tensor[hidden]
    if not rows.numel() or rows.abs().amax() <= _LARGEST_HIDDEN:
        return tensor
    return tensor.masked_fill(hidden[:, :, None, None], 0)
