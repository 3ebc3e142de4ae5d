"""The meaning of a softmax call: its scalars and tensors, and the eager reference, written to be read and not to be
fast.

Over the last dimension of x `[batch, heads, seq_q, seq_k]`, in float32 (float64 for float64)::

    s = scale · x, and -inf where the element is masked out
    p = exp(s - max(s)) / Σ exp(s - max(s))

Masked out is what the mask says, and with `causal` what lies right of the diagonal `j = i + seq_k - seq_q`. A row with
nothing left, or with nothing but -inf, is 0, and so is its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype

#: Longest row that any backend takes.
MAX_COLUMNS = 2**30


class SoftmaxSpec(NamedTuple):
    """The meaning of a call: scalars only, hashable. `scale`: factor on x. `causal`: only keys up to the diagonal,
    which ends at the last key."""

    scale: float
    causal: bool


class SoftmaxInputs(NamedTuple):
    """The tensors of a call: x `[batch, heads, seq_q, seq_k]`, and a bool mask of its shape, True = masked out."""

    x: Tensor
    mask: Tensor | None


class SoftmaxGradient(NamedTuple):
    """The tensors of a backward: the gradient of the softmax, and the softmax."""

    dout: Tensor
    out: Tensor


class Merge(NamedTuple):
    """A running merge: see `flashtile.merge_attention_`."""

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor


class MergedPart(NamedTuple):
    """A running merge, and the part that joins it."""

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor
    out: Tensor
    lse: Tensor


class Merged(NamedTuple):
    """The result of a merge."""

    out: Tensor
    lse: Tensor


class IsFirst(NamedTuple):
    """Whether the part is the first."""

    first: bool


class OutputType(NamedTuple):
    """The dtype of a result."""

    dtype: torch.dtype


def forward(inputs: SoftmaxInputs, spec: SoftmaxSpec) -> Tensor:
    """The softmax, in the dtype of x."""
    x, mask = inputs
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


def backward(given: SoftmaxGradient, spec: SoftmaxSpec) -> Tensor:
    """The gradient of x."""
    dout, out = given
    p, dp = (t.to(compute_dtype(out.dtype)) for t in (out, dout))
    # No gradient passes where p is 0, whatever comes from above.
    product = torch.where(p == 0, 0, p * dp)
    return ((product - p * product.sum(dim=-1, keepdim=True)) * spec.scale).to(out.dtype)


def merge_part(part: MergedPart, spec: IsFirst) -> None:
    """Joins a part to a running merge, in place: see `flashtile.merge_attention_`."""
    acc, row_max, row_sum, out, lse = part
    if spec.first:
        acc.copy_(out)
        row_max.copy_(lse)
        row_sum.copy_(lse != float("-inf"))
        return
    largest = torch.maximum(row_max, lse)
    # While a row has seen nothing, the difference is taken against 0: -inf - -inf would be NaN.
    against = largest.masked_fill(largest == float("-inf"), 0)
    decay, weight = (row_max - against).exp_(), (lse - against).exp_()
    row_sum.mul_(decay).add_(weight)
    row_max.copy_(largest)
    acc.mul_(_by_row(decay)).addcmul_(out.to(acc.dtype), _by_row(weight))


def merge_finish(merge: Merge, spec: OutputType) -> Merged:
    """The result of a running merge: see `flashtile.finish_attention`."""
    total, lse = merged_statistics(merge)
    return Merged((merge.acc / total).to(spec.dtype).contiguous(), lse)


def merged_statistics(merge: Merge) -> tuple[Tensor, Tensor]:
    """What acc is divided by, `[batch, rows, heads, 1]`, and lse, contiguous."""
    _, row_max, row_sum = merge
    blind = row_sum == 0
    total = row_sum.masked_fill(blind, 1)
    # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
    lse = torch.where(blind | (row_max == float("inf")), row_max, row_max + total.log())
    return _by_row(total), lse.contiguous()


def _by_row(statistics: Tensor) -> Tensor:
    """`[batch, heads, rows]` as a factor of `[batch, rows, heads, head_dim]`."""
    return statistics.transpose(-1, -2).unsqueeze(-1)
