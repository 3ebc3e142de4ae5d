"""The eager reference: the definition of the semantics, written to be read, not to be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.softmax.spec import SoftmaxSpec, compute_dtype


def forward(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec) -> Tensor:
    """The softmax of x `[..., seq_q, seq_k]`, in its dtype; mask of its shape, True = masked out."""
    seq_q, seq_k = x.shape[-2:]
    scores = x.to(compute_dtype(x.dtype)) * spec.scale
    if not seq_k:
        return scores.to(x.dtype)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if spec.causal:
        row, column = torch.arange(seq_q, device=x.device)[:, None], torch.arange(seq_k, device=x.device)
        scores = scores.masked_fill(column > row + seq_k - seq_q, float("-inf"))
    blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), dim=-1).masked_fill(blind, 0).to(x.dtype)


def backward(dout: Tensor, out: Tensor, spec: SoftmaxSpec) -> Tensor:
    """The gradient of x from that of the softmax and the softmax itself."""
    p, dp = (t.to(compute_dtype(out.dtype)) for t in (out, dout))
    # Where p is 0, no gradient passes, whatever comes from above.
    product = torch.where(p == 0, 0, p * dp)
    return ((product - p * product.sum(dim=-1, keepdim=True)) * spec.scale).to(out.dtype)


def merge_part(acc: Tensor, row_max: Tensor, row_sum: Tensor, out: Tensor, lse: Tensor, first: bool) -> None:
    """Joins a part to a running merge, in place: see `flashtile.merge_attention_`."""
    if first:
        for tensor, value in ((acc, 0.0), (row_max, float("-inf")), (row_sum, 0.0)):
            tensor.fill_(value)
    largest = torch.maximum(row_max, lse)
    # While a row has seen nothing, the difference is taken against 0: -inf - -inf would be NaN.
    against = torch.where(largest == float("-inf"), 0.0, largest)
    decay, weight = torch.exp(row_max - against), torch.exp(lse - against)
    row_sum.copy_(decay * row_sum + weight)
    row_max.copy_(largest)
    of_rows = [factor.transpose(-1, -2).unsqueeze(-1) for factor in (decay, weight)]  # [batch, rows, heads, 1]
    acc.copy_(of_rows[0] * acc + of_rows[1] * out.to(acc.dtype))


def merge_finish(acc: Tensor, row_max: Tensor, row_sum: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The result of a running merge: see `flashtile.finish_attention`."""
    blind = row_sum == 0
    total = torch.where(blind, 1.0, row_sum)
    # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
    lse = torch.where(blind | (row_max == float("inf")), row_max, row_max + total.log())
    return (acc / total.transpose(-1, -2).unsqueeze(-1)).to(dtype), lse
