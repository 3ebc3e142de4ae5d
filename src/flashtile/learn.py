"""FlashAttention from scratch in plain PyTorch: the algorithm that flashtile's kernels run, written to be read.

Shapes: q `[..., Sq, D]`, k `[..., Sk, D]`, v `[..., Sk, Dv]`; leading dimensions are batch and heads. A tile has at
most T rows, and no tensor has Sq x Sk elements. `docs/how_it_works.md` explains it.

Reference: Dao et al., "FlashAttention" (2022), algorithms 1 and 4; Dao, "FlashAttention-2" (2023), section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["attention"]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, tile: int = 32) -> tuple[Tensor, Tensor]:
    """`softmax(q kᵀ / sqrt(D)) v`, differentiable. Returns out `[..., Sq, Dv]` and lse `[..., Sq]`, the log-sum-exp of
    each row of scores. With `causal` the last query sees all keys, the one before it all but the last, and so on.

    Raises:
        ValueError: shapes do not fit, or `tile` is less than 1.
    """
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1] or tile < 1:
        got = f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and tile={tile}"
        raise ValueError(f"expected q [..., Sq, D], k [..., Sk, D], v [..., Sk, Dv] and tile >= 1, {got}")
    return _Attention.apply(q, k, v, causal, tile)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int) -> tuple[Tensor, Tensor]:
        out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
        for rows in _tiles(q, tile):  # each is independent of the others: a GPU takes all at the same time
            row_max = lse[..., rows]  # [T], the largest score so far
            row_sum, acc = torch.zeros_like(row_max), out[..., rows, :]  # [T], [T, Dv]: sums of exp(s - row_max)
            for cols in _tiles(k, tile):
                s = _scores(q, k, rows, cols, causal)  # [T, T]
                new_max = torch.maximum(row_max, s.amax(-1))
                shift = new_max.masked_fill(new_max == -math.inf, 0)  # of a row that has seen no key yet
                p = torch.exp(s - shift[..., None])
                alpha = torch.exp(row_max - shift)  # puts what was summed so far under the new maximum
                row_sum = row_sum * alpha + p.sum(-1)
                acc = acc * alpha[..., None] + p @ v[..., cols, :]
                row_max = new_max
            out[..., rows, :] = acc / row_sum.masked_fill(row_sum == 0, 1)[..., None]
            lse[..., rows] = row_max + torch.log(row_sum)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.tile = causal, tile
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor, dlse: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        delta = (dout * out).sum(-1) - dlse  # [Sq], what all gradients of a row of scores share
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys: p = exp(-inf) = 0
        for cols in _tiles(k, ctx.tile):  # each owns its rows of dk and dv
            for rows in _tiles(q, ctx.tile):
                p = torch.exp(_scores(q, k, rows, cols, ctx.causal) - lse[..., rows, None])  # computed again
                dv[..., cols, :] += p.mT @ dout[..., rows, :]
                dp = dout[..., rows, :] @ v[..., cols, :].mT
                ds = p * (dp - delta[..., rows, None]) / math.sqrt(q.shape[-1])
                dk[..., cols, :] += ds.mT @ q[..., rows, :]
                dq[..., rows, :] += ds @ k[..., cols, :]
        return dq, dk, dv, None, None


def _tiles(x: Tensor, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, x.shape[-2])) for start in range(0, x.shape[-2], tile)]


def _scores(q: Tensor, k: Tensor, rows: slice, cols: slice, causal: bool) -> Tensor:
    s = q[..., rows, :] @ k[..., cols, :].mT / math.sqrt(q.shape[-1])
    diagonal = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + k.shape[-2] - q.shape[-2]
    hidden = torch.arange(cols.start, cols.stop, device=q.device) > diagonal
    return s.masked_fill(hidden, -math.inf) if causal else s
