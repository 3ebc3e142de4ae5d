"""Attention by tiles in PyTorch: online softmax forward, recomputing backward, memory linear in the sequence length.

One thread of Python walks over the tiles in a fixed order, so the results are deterministic; PyTorch's own threads
work inside the tiles. Shapes are named in `tiles`. Reference: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.cpu.tiles import LN2, LOG2E, Block
from flashtile.ops.attention.spec import AttentionSpec, SideInputs


def forward(q: Tensor, k: Tensor, v: Tensor, side: SideInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call; shapes as in `flashtile.attention` and `attention_varlen`."""
    if side.packed:
        q, k, v = q[None], k[None], v[None]
    # Rows that no segment owns, or whose segment has no key, keep these values.
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=tiles.compute_dtype(q.dtype))
    for block in tiles.blocks(q, k, side, spec):
        _forward_block(block, q, k, v, out, lse, side, spec)
    return (out[0], lse[0]) if side.packed else (out, lse)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    side: SideInputs,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a call from its outputs and their gradients."""
    if side.packed:
        dout, q, k, v, out, lse = (t[None] for t in (dout, q, k, v, out, lse))
        dlse = None if dlse is None else dlse[None]
    grads = tuple(t.new_zeros(t.shape) for t in (q, k, v))
    for block in tiles.blocks(q, k, side, spec):
        _backward_block(block, dout, dlse, q, k, v, out, lse, grads, side, spec)
    return tuple(grad[0] for grad in grads) if side.packed else grads


def _forward_block(
    block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, side: SideInputs, spec: AttentionSpec
) -> None:
    k_matrices, v_matrices = (tiles.load_keys(tiles.key_view(block, t)) for t in (k, v))
    q_view, out_view = tiles.row_view(block, q), tiles.row_view(block, out)
    lse_view = tiles.statistics_view(block, lse)
    scratch = tiles.scratch_tile(block, k_matrices)
    for rows in tiles.query_tiles(block):
        q_tile = tiles.load_rows(q_view, rows).mul_(spec.scale * LOG2E)
        softmax = _OnlineSoftmax(q_tile, v.shape[-1])
        for keys in tiles.visible_key_tiles(rows, block.visible, block.tile_keys):
            scores = tiles.score_tile(block, rows, keys, q_tile, k_matrices, scratch)
            kept = tiles.keep_weights(block, rows, keys, side, spec) if spec.dropout_p else None
            softmax.add(scores, v_matrices[:, keys.start : keys.stop], kept)
        out_tile, lse_tile = softmax.finish(spec.dropout_p)
        tiles.store_rows(out_view, rows, out_tile)
        tiles.store_rows(lse_view, rows, lse_tile)


class _OnlineSoftmax:
    """`softmax(scores) v` of some rows, a tile of keys at a time, and its log-sum-exp.

    Attributes:
        row_max: `[N, G·R, 1]`, largest score (times log₂e) so far.
        row_sum: `[N, G·R, 1]`, sum of `exp2(score - row_max)`.
        weighted: `[N, G·R, Dv]`, the same sum with each term times its value.
    """

    def __init__(self, q_tile: Tensor, head_dim_v: int):
        matrices, rows, _ = q_tile.shape
        # The least finite number rather than -inf: a row that has seen nothing yet must not compute -inf - -inf.
        self.row_max = q_tile.new_full((matrices, rows, 1), torch.finfo(q_tile.dtype).min)
        self.row_sum = q_tile.new_zeros(matrices, rows, 1)
        self.weighted = q_tile.new_zeros(matrices, rows, head_dim_v)

    def add(self, scores: Tensor, v_tile: Tensor, kept: Tensor | None) -> None:
        """Takes in a tile of scores `[N, G·R, C]`, which it overwrites, and its values `[N, C, Dv]`."""
        row_max = torch.maximum(self.row_max, scores.amax(dim=-1, keepdim=True))
        decay = self.row_max.sub_(row_max).exp2_()
        weights = scores.sub_(row_max).exp2_()
        self.row_max = row_max
        self.row_sum.mul_(decay).add_(weights.sum(dim=-1, keepdim=True))
        if kept is not None:
            weights.mul_(kept)
        self.weighted.mul_(decay).baddbmm_(weights, v_tile)

    def finish(self, dropout_p: float) -> tuple[Tensor, Tensor]:
        """(out `[N, G·R, Dv]`, lse `[N, G·R, 1]`); 0 and -inf where no key was visible."""
        lse = self.row_sum.log2().add_(self.row_max).mul_(LN2)
        # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
        lse = torch.where(self.row_max == float("inf"), self.row_max, lse)
        blind = self.row_sum == 0
        out = self.weighted.div_(self.row_sum.mul_(1 - dropout_p)).masked_fill_(blind, 0)
        return out, lse


class _BackwardRows(NamedTuple):
    """What the backward needs of a tile of rows.

    Attributes:
        q: `[N, G·R, D]`, times scale · log₂e.
        dout: `[N, G·R, Dv]`, divided by the probability that dropout keeps a weight.
        lse: `[N, G·R, 1]`, times log₂e; +inf, which makes all weights 0, where no key is visible.
        delta: `[N, G·R, 1]`, `rowsum(dout · out) - dlse`.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


def _load_backward_rows(
    block: Block,
    rows: range,
    q: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    spec: AttentionSpec,
) -> _BackwardRows:
    q, dout, out = (tiles.load_rows(tiles.row_view(block, t), rows) for t in (q, dout, out))
    lse = tiles.load_rows(tiles.statistics_view(block, lse), rows)
    delta = out.mul_(dout).sum(dim=-1, keepdim=True)
    if dlse is not None:
        delta.sub_(tiles.load_rows(tiles.statistics_view(block, dlse), rows))
    blind = lse.isneginf()
    if blind.any():
        # Whatever comes from above, and even if it is NaN, nothing may pass through such a row.
        lse = lse.masked_fill_(blind, float("inf"))
        q, dout, delta = (t.masked_fill_(blind, 0) for t in (q, dout, delta))
    return _BackwardRows(q.mul_(spec.scale * LOG2E), dout.div_(1 - spec.dropout_p), lse.mul_(LOG2E), delta)


def _weights_and_dscores(
    row: _BackwardRows, scores: Tensor, dweights: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turns scores into weights after dropout, and gradients of weights into those of scores, both in place."""
    weights = scores.sub_(row.lse).exp2_()
    if kept is not None:
        dweights.mul_(kept)
    dscores = dweights.sub_(row.delta).mul_(weights)
    return weights if kept is None else weights.mul_(kept), dscores


def _backward_block(
    block: Block,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, ...],
    side: SideInputs,
    spec: AttentionSpec,
) -> None:
    k_matrices, v_matrices = (tiles.load_keys(tiles.key_view(block, t)) for t in (k, v))
    dk_matrices, dv_matrices = torch.zeros_like(k_matrices), torch.zeros_like(v_matrices)
    dq_view = tiles.row_view(block, grads[0])
    scratch = [tiles.scratch_tile(block, k_matrices) for _ in range(2)]
    dkv_scratch = k_matrices.new_empty(k_matrices.shape[0] * block.tile_keys * max(q.shape[-1], v.shape[-1]))
    for rows in tiles.query_tiles(block):
        row = _load_backward_rows(block, rows, q, dout, out, lse, dlse, spec)
        dq_tile = torch.zeros_like(row.q)
        for keys in tiles.visible_key_tiles(rows, block.visible, block.tile_keys):
            columns = slice(keys.start, keys.stop)
            scores = tiles.score_tile(block, rows, keys, row.q, k_matrices, scratch[0])
            dweights = tiles.product(row.dout, v_matrices[:, columns].transpose(1, 2), scratch[1])
            kept = tiles.keep_weights(block, rows, keys, side, spec) if spec.dropout_p else None
            weights, dscores = _weights_and_dscores(row, scores, dweights, kept)
            # Not baddbmm_: into a slice it would multiply one matrix after another.
            dv_matrices[:, columns].add_(tiles.product(weights.transpose(1, 2), row.dout, dkv_scratch))
            dk_matrices[:, columns].add_(tiles.product(dscores.transpose(1, 2), row.q, dkv_scratch))
            dq_tile.baddbmm_(dscores, k_matrices[:, columns])
        tiles.store_rows(dq_view, rows, dq_tile.mul_(spec.scale))
    # row.q carries scale · log₂e; the scale belongs to dk, the log₂e does not.
    for grad, matrices in ((grads[1], dk_matrices.mul_(LN2)), (grads[2], dv_matrices)):
        target = tiles.key_view(block, grad)
        target.copy_(matrices.view(target.shape))
