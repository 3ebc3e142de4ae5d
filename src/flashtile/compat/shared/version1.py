"""What flash_attn 1 has of its own: packed calls with a top-left diagonal, padded lse, weights, softmax gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared.arguments import longest
from flashtile.compat.shared.probs import Scores, packed_attention_probs

#: Rows of lse and of the weights are padded to a multiple of the first, keys to one of the second.
PROBS_MULTIPLE = (16, 64)


class Call(NamedTuple):
    """The arguments of one call beside its tensors.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: `[batch + 1]`.
        max_seqlen_q, max_seqlen_k: of the longest sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    deterministic: bool = False


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: Call, return_probs: bool, seed: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Attention of packed `[total, heads, head_dim]`; the diagonal begins at the first key.

    Returns:
        out; with return_probs out, lse `[batch, heads, max_seqlen_q']` and the weights `[batch, heads, max_seqlen_q',
        max_seqlen_k']` in their own layout (`in_fragments`).
    """
    call = call._replace(max_seqlen_q=longest(call.max_seqlen_q), max_seqlen_k=longest(call.max_seqlen_k))
    if seed is None and call.dropout_p:
        seed = flashtile.draw_dropout_seed(q.device)
    out, lse = flashtile.attention_varlen(
        q, k, v, *call[:2], max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k, causal=bool(call.causal),
        align="top_left", scale=call.softmax_scale, dropout_p=call.dropout_p, dropout_seed=seed,
        deterministic=bool(call.deterministic), return_lse=True,
    )  # fmt: skip
    if not return_probs:
        return out
    if call.max_seqlen_q is None or call.max_seqlen_k is None:
        raise TypeError(
            "max_seqlen: expected ints with return_attn_probs, got a tensor on a GPU; reading it would synchronise"
        )
    return out, padded_lse(lse, call.cu_seqlens_q, call.max_seqlen_q), probs(q, k, call, seed)


def probs(q: Tensor, k: Tensor, call: Call, seed: Tensor | None) -> Tensor:
    """The weights of a call, in their own layout."""
    scores = Scores(call.softmax_scale, (None, 0 if call.causal else None), top_left=True)
    return in_fragments(packed_attention_probs(q, k, *call[:4], scores, seed, call.dropout_p, PROBS_MULTIPLE))


def padded_lse(lse: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """`[heads, total]` as `[batch, heads, max_seqlen rounded up to 16]`, -inf past the end of a sequence."""
    rows = -(-max_seqlen // PROBS_MULTIPLE[0]) * PROBS_MULTIPLE[0]
    within = torch.arange(rows, device=lse.device)
    if not lse.shape[1]:
        return lse.new_full((cu_seqlens.shape[0] - 1, lse.shape[0], rows), -math.inf)
    row = (cu_seqlens[:-1, None] + within).clamp(max=lse.shape[1] - 1)
    past = within >= cu_seqlens.diff()[:, None]
    return lse[:, row].transpose(0, 1).masked_fill(past[:, None], -math.inf)


def packed_lse(lse: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """What `padded_lse` undoes: `[heads, total]`, -inf for rows that belong to no sequence."""
    row = torch.arange(total, device=lse.device)
    sequence = torch.searchsorted(cu_seqlens, row.to(cu_seqlens.dtype), right=True) - 1
    last = cu_seqlens.shape[0] - 2
    past = sequence > last
    sequence = sequence.clamp(min=0, max=max(last, 0))
    within = (row - cu_seqlens[sequence]).clamp(max=lse.shape[2] - 1)
    return lse[sequence, :, within].transpose(0, 1).masked_fill(past, -math.inf).contiguous()


def in_fragments(weights: Tensor) -> Tensor:
    """The elements of `[B, H, R, C]` in the order in which threads of a tensor core hold them.

    With rows `(steps 2 8)` and columns `(blocks 4 2 4 2)`, the order in memory becomes
    `(steps, blocks, 4, 8, 4, 2, 2, 2)`: what the converters of flash_attn 1 undo.
    """
    batch, heads, rows, columns = weights.shape
    split = weights.view(batch, heads, rows // 16, 2, 8, columns // 64, 4, 2, 4, 2)
    return split.permute(0, 1, 2, 5, 6, 4, 8, 3, 7, 9).reshape(weights.shape)


def shifted(x: Tensor, start: Tensor) -> Tensor:
    """The rows of x from `start` on, a number on the device, then copies of the last: `[rows, ...]`. Differentiable."""
    return _Shift.apply(x, start)


class _Shift(torch.autograd.Function):
    """Row i takes row `i + start`; the gradient goes back without a sum."""

    @staticmethod
    def forward(ctx, x, start):
        ctx.save_for_backward(start)
        return _taken(x, start)

    @staticmethod
    def backward(ctx, grad):
        (start,) = ctx.saved_tensors
        row = torch.arange(grad.shape[0], device=grad.device) - start
        outside = ((row < 0) | (row >= grad.shape[0])).view(-1, *(1,) * (grad.dim() - 1))
        return _taken(grad, -start).masked_fill(outside, 0), None


def _taken(x: Tensor, start: Tensor) -> Tensor:
    row = torch.arange(x.shape[0], device=x.device) + start
    return x.index_select(0, row.clamp(min=0, max=max(x.shape[0] - 1, 0)))


@torch.no_grad()
def softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Gradient of a scaled softmax from its result y: `scale · y · (dy - Σ dy y)` along the last dimension.

    Masked elements have y = 0, so their gradient is 0.
    """
    wide = torch.promote_types(softmax_results.dtype, torch.float32)
    dy, y = output_grads.to(wide), softmax_results.to(wide)
    return (scale_factor * y * (dy - (dy * y).sum(-1, keepdim=True))).to(softmax_results.dtype)
