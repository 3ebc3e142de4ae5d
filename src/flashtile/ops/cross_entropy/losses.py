"""From what was read of rows to their losses, in PyTorch operations: for backends that have no kernel of their own, and
where the columns of a row are spread over processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics


def statistics(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Statistics:
    """Statistics of rows of logits `[rows, columns]`, in the dtype that computes; differentiable."""
    pivot, zero = pivot_of(logits.detach(), spec, 1)
    differences = logits - zero[:, None]
    exp_sum = (differences * spec.logit_scale).exp().sum(dim=1)
    column = labels.to(torch.int64) - spec.first
    here = (column >= 0) & (column < logits.shape[1])
    target = logits.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    total = differences.sum(dim=1) if spec.label_smoothing else torch.zeros_like(target)
    counts = labels != spec.ignore_index
    normaliser = torch.stack((pivot.where(counts, 0), exp_sum.where(counts, 1)), 1)
    return Statistics(normaliser, target.where(counts, 0), total.where(counts, 0))


def pivot_of(logits: Tensor, spec: CrossEntropySpec, dim: int) -> tuple[Tensor, Tensor]:
    """The logits of the largest scores, and from which number differences are taken: the same, but 0 where all scores
    are -inf."""
    pivot, lowest = (logits.amax(dim), -math.inf) if spec.logit_scale >= 0 else (logits.amin(dim), math.inf)
    return pivot, pivot.masked_fill(pivot == lowest, 0)


def merge(parts: Statistics, spec: CrossEntropySpec) -> Statistics:
    """Puts together the statistics of disjoint columns, equally many in each part: `[parts, ...]` in each field."""
    pivots, exp_sums = parts.normaliser.unbind(-1)
    pivot, zero = pivot_of(pivots, spec, 0)
    differences = pivots - zero
    exp_sum = (exp_sums * (differences * spec.logit_scale).exp()).sum(dim=0)
    columns = spec.vocabulary // len(pivots)
    total = (parts.total + columns * differences).sum(dim=0)
    return Statistics(torch.stack((pivot, exp_sum), 1), parts.target.sum(dim=0), total)


def losses(found: Statistics, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """The losses of rows, reduced as the spec says."""
    counts = labels != spec.ignore_index
    pivot, exp_sum = found.normaliser.unbind(1)
    log_sum = exp_sum.log()
    lse = pivot * spec.logit_scale + log_sum
    z_loss = spec.lse_square_scale * lse * lse  # in this order: a square may be infinite, and 0 · inf NaN
    loss = log_sum - (1 - spec.label_smoothing) * spec.logit_scale * (found.target - pivot) + z_loss
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing * spec.logit_scale / spec.vocabulary * found.total
    sound = _sound(labels, spec, loss.dtype)
    loss, z_loss = ((t * sound).where(counts, 0) for t in (loss, z_loss))
    scale = None
    if spec.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if spec.reduction == "mean":
        scale = mean_scale(labels, spec, loss.dtype)
        loss, z_loss = loss * scale, z_loss * scale
    return Results(loss, z_loss if spec.z_loss else None, found.normaliser, scale)


def _sound(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """A factor `[rows]`: NaN where the label is outside of the vocabulary and counts, else 1."""
    outside = ((labels < 0) | (labels >= spec.vocabulary)) & (labels != spec.ignore_index)
    return torch.ones_like(labels, dtype=dtype).masked_fill(outside, float("nan"))


def mean_scale(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """1 / the number of rows that count, a scalar on the device."""
    return (labels != spec.ignore_index).sum().to(dtype).reciprocal()


def factors(dloss: Tensor, scale: Tensor | None, labels: Tensor, normaliser: Tensor, spec: CrossEntropySpec) -> Tensor:
    """A factor of the gradient of each row, `[rows]`; arguments as of `gradient`."""
    g = (dloss if scale is None else dloss * scale).expand_as(labels)
    return g * spec.logit_scale * _sound(labels, spec, normaliser.dtype)


def factors_of_exponentials(normaliser: Tensor, spec: CrossEntropySpec) -> Tensor:
    """A factor that the gradient has on the exponentials of each row's differences, `[rows]`."""
    pivot, exp_sum = normaliser.unbind(1)
    lse = pivot * spec.logit_scale + exp_sum.log()
    return (1 + 2 * spec.lse_square_scale * lse) / exp_sum


def gradient(
    dloss: Tensor, scale: Tensor | None, logits: Tensor, labels: Tensor, normaliser: Tensor, spec: CrossEntropySpec
) -> Tensor:
    """The gradient of rows of logits `[rows, columns]`, in the dtype that computes; differentiable.

    Args:
        dloss: gradient of the loss, a scalar or `[rows]`.
        scale: a factor on it, a scalar or None.
        logits: in the dtype that computes.
        labels: `[rows]`.
        normaliser: `[rows, 2]`, over all columns.
        spec: of the call.
    """
    counts = (labels != spec.ignore_index)[:, None]
    g = factors(dloss, scale, labels, normaliser, spec)[:, None]
    exponentials = ((logits - normaliser[:, :1]) * spec.logit_scale).exp()
    wanted = exponentials * factors_of_exponentials(normaliser, spec)[:, None] - spec.label_smoothing / spec.vocabulary
    is_label = torch.arange(spec.first, spec.first + logits.shape[1], device=logits.device) == labels[:, None]
    return (g * (wanted - (1 - spec.label_smoothing) * is_label.to(wanted.dtype))).where(counts, 0)
