"""The CPU backend: PyTorch's softmax over blocks of rows that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.ops.common.rows import compute_dtype, row_blocks
from flashtile.ops.softmax.spec import (
    Merge,
    Merged,
    OutputType,
    SoftmaxGradient,
    SoftmaxInputs,
    SoftmaxSpec,
    merge_part,
    merged_statistics,
)

__all__ = ["backward", "forward", "merge_finish", "merge_part"]


def forward(inputs: SoftmaxInputs, spec: SoftmaxSpec) -> Tensor:
    """The softmax, in the dtype of x."""
    x, mask = inputs
    out, dtype = torch.empty_like(x, memory_format=torch.contiguous_format), compute_dtype(x.dtype)
    for batch, head, rows in _blocks(x):
        scores = x[batch, head, rows] * spec.scale if x.dtype is dtype else x[batch, head, rows].to(dtype) * spec.scale
        if mask is not None:
            scores.masked_fill_(mask[batch, head, rows], float("-inf"))
        visible = _visible(x, rows) if spec.causal else x.shape[3]
        if spec.causal:
            scores = scores[:, :visible]
            diagonal = rows.start + x.shape[3] - x.shape[2]
            scores.masked_fill_(_above_diagonal(diagonal, scores), float("-inf"))
            out[batch, head, rows, visible:] = 0
        if visible:
            block = torch.softmax(scores, dim=-1)
            # Only a row without anything is NaN where all its scores are -inf.
            blind = scores.amax(dim=-1, keepdim=True) == float("-inf")
            out[batch, head, rows, :visible] = block.masked_fill_(blind, 0)
    return out


def backward(given: SoftmaxGradient, spec: SoftmaxSpec) -> Tensor:
    """The gradient of x."""
    dout, out = given
    dx, dtype = torch.empty_like(out), compute_dtype(out.dtype)
    for batch, head, rows in _blocks(out):
        visible = _visible(out, rows) if spec.causal else out.shape[3]
        p, dp = (t[batch, head, rows, :visible].to(dtype) for t in (out, dout))
        # No gradient passes where p is 0, whatever comes from above.
        product = torch.where(p == 0, 0, p * dp)
        gradient = product.addcmul_(p, product.sum(dim=-1, keepdim=True), value=-1)
        dx[batch, head, rows, :visible] = gradient.mul_(spec.scale)
        dx[batch, head, rows, visible:] = 0
    return dx


def _visible(x: Tensor, rows: slice) -> int:
    """How many keys the last of some rows sees under a causal mask."""
    return min(max(rows.stop + x.shape[3] - x.shape[2], 0), x.shape[3])


def _above_diagonal(diagonal: int, scores: Tensor) -> Tensor:
    """bool `[rows, columns]`: what lies right of the diagonal that passes column `diagonal` in the first row."""
    return torch.ones_like(scores, dtype=torch.bool).triu_(diagonal + 1)


def _blocks(x: Tensor) -> Iterator[tuple[int, int, slice]]:
    batch, heads, seq_q, seq_k = x.shape
    blocks = list(row_blocks(seq_q, seq_k))
    for entry in range(batch):
        for head in range(heads):
            for rows in blocks:
                yield entry, head, rows


def merge_finish(merge: Merge, spec: OutputType) -> Merged:
    """The result of a running merge, divided and rounded in one pass."""
    total, lse = merged_statistics(merge)
    out = torch.empty(merge.acc.shape, dtype=spec.dtype, device="cpu")
    return Merged(torch.div(merge.acc, total, out=out), lse)
