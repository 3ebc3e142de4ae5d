"""From what was read of rows to their losses, in PyTorch operations: for backends that have no kernel of their own, and
where the columns of a row are spread over processes."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics


def statistics(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Statistics:
    """Statistics of rows of logits `[rows, columns]`, in the dtype that computes; differentiable."""
    scores = logits * spec.logit_scale
    largest = scores.detach().amax(dim=1)
    largest = largest.masked_fill(largest == float("-inf"), 0)
    lse = (scores - largest[:, None]).exp().sum(dim=1).log() + largest
    column = labels.to(torch.int64) - spec.first
    here = (column >= 0) & (column < logits.shape[1])
    target = scores.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    total = scores.sum(dim=1) if spec.label_smoothing else torch.zeros_like(lse)
    counts = labels != spec.ignore_index
    return Statistics(lse.where(counts, 0), target.where(counts, 0), total.where(counts, 0))


def merge(parts: Tensor) -> Statistics:
    """Puts together the statistics `[parts, 3, rows]` of disjoint columns."""
    each, targets, totals = parts.unbind(1)
    largest = each.amax(dim=0)
    largest = largest.masked_fill(largest == float("-inf"), 0)
    lse = (each - largest).exp().sum(dim=0).log() + largest
    return Statistics(lse, targets.sum(dim=0), totals.sum(dim=0))


def losses(found: Statistics, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """The losses of rows, reduced as the spec says."""
    counts = labels != spec.ignore_index
    z_loss = spec.lse_square_scale * found.lse * found.lse  # in this order: a square may be infinite, and 0 · inf NaN
    loss = found.lse - (1 - spec.label_smoothing) * found.target + z_loss
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing / spec.vocabulary * found.total
    sound = _sound(labels, spec, loss.dtype)
    loss, z_loss = ((t * sound).where(counts, 0) for t in (loss, z_loss))
    scale = None
    if spec.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if spec.reduction == "mean":
        scale = mean_scale(labels, spec, loss.dtype)
        loss, z_loss = loss * scale, z_loss * scale
    return Results(loss, z_loss if spec.z_loss else None, found.lse, scale)


def _sound(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """A factor `[rows]`: NaN where the label is outside of the vocabulary and counts, else 1."""
    outside = ((labels < 0) | (labels >= spec.vocabulary)) & (labels != spec.ignore_index)
    return torch.ones_like(labels, dtype=dtype).masked_fill(outside, float("nan"))


def mean_scale(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """1 / the number of rows that count, a scalar on the device."""
    return (labels != spec.ignore_index).sum().to(dtype).reciprocal()


def gradient(
    dloss: Tensor, scale: Tensor | None, logits: Tensor, labels: Tensor, lse: Tensor, spec: CrossEntropySpec
) -> Tensor:
    """The gradient of rows of logits `[rows, columns]`, in the dtype that computes; differentiable.

    Args:
        dloss: gradient of the loss, a scalar or `[rows]`.
        scale: a factor on it, a scalar or None.
        logits: in the dtype that computes.
        labels: `[rows]`.
        lse: `[rows]`, over all columns.
        spec: of the call.
    """
    g = (dloss if scale is None else dloss * scale).expand_as(lse)
    counts = (labels != spec.ignore_index)[:, None]
    g = (g * spec.logit_scale * _sound(labels, spec, lse.dtype))[:, None]
    p = (logits * spec.logit_scale - lse[:, None]).exp()
    wanted = p * (1 + 2 * spec.lse_square_scale * lse)[:, None] - spec.label_smoothing / spec.vocabulary
    is_label = torch.arange(spec.first, spec.first + logits.shape[1], device=logits.device) == labels[:, None]
    return (g * (wanted - (1 - spec.label_smoothing) * is_label.to(p.dtype))).where(counts, 0)
