"""From what was read of rows to their losses, in PyTorch operations: for backends that have no kernel of their own, and
where the columns of a row are spread over processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics


def capped(logits: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The scores under a soft cap; without one, the logits as they are."""
    return spec.softcap * (logits * (spec.logit_scale / spec.softcap)).tanh() if spec.softcap else logits


def cap_slope(scores: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The derivative of the soft cap, by the scores under it."""
    return 1 - (scores / spec.softcap).square()


def weights_here(weights: Tensor, columns: int, spec: CrossEntropySpec) -> Tensor:
    """The class weights of the columns that are here."""
    return weights[spec.first : spec.first + columns]


def weights_of_labels(labels: Tensor, weights: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The class weight of each label, `[rows]`; 0 where it does not count, or is outside of the vocabulary."""
    there = (labels >= 0) & (labels < spec.vocabulary) & (labels != spec.ignore_index)
    return weights[labels.where(there, 0).long()].where(there, 0)


def shares(labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec) -> tuple[Any, Any]:
    """The factors that the loss of a row has on the score of its label, and on lse."""
    if weights is None:
        return 1 - spec.label_smoothing, 1.0
    of_label = (1 - spec.label_smoothing) * weights_of_labels(labels, weights, spec)
    return of_label, of_label + spec.label_smoothing / spec.vocabulary * weights[-1]


def statistics(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """Statistics of rows of logits `[rows, columns]`, in the dtype that computes; differentiable.

    `weights`, here and below: `[vocabulary + 1]`, the class weights and their sum; None for none.
    """
    logits = capped(logits, spec)
    pivot, zero = pivot_of(logits.detach(), spec, 1)
    differences = logits - zero[:, None]
    exp_sum = (differences * spec.factor).exp().sum(dim=1)
    column = labels.to(torch.int64) - spec.first
    here = (column >= 0) & (column < logits.shape[1])
    target = logits.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0)
    total = torch.zeros_like(target)
    if spec.label_smoothing:
        weighted = differences if weights is None else differences * weights_here(weights, logits.shape[1], spec)
        total = weighted.sum(dim=1)
    counts = labels != spec.ignore_index
    normaliser = torch.stack((pivot.where(counts, 0), exp_sum.where(counts, 1)), 1)
    return Statistics(normaliser, target.where(counts, 0), total.where(counts, 0))


def pivot_of(logits: Tensor, spec: CrossEntropySpec, dim: int) -> tuple[Tensor, Tensor]:
    """The logits of the largest scores, and from which number differences are taken: the same, but 0 where all scores
    are -inf."""
    pivot, lowest = (logits.amax(dim), -math.inf) if spec.factor >= 0 else (logits.amin(dim), math.inf)
    return pivot, pivot.masked_fill(pivot == lowest, 0)


def merge(parts: Statistics, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """Puts together the statistics of disjoint columns, equally many in each part: `[parts, ...]` in each field."""
    pivots, exp_sums = parts.normaliser.unbind(-1)
    pivot, zero = pivot_of(pivots, spec, 0)
    differences = pivots - zero
    exp_sum = (exp_sums * (differences * spec.factor).exp()).sum(dim=0)
    columns: Any = spec.vocabulary // len(pivots)
    if weights is not None:
        columns = weights[:-1].view(len(pivots), columns).sum(dim=1, keepdim=True)
    total = (parts.total + columns * differences).sum(dim=0)
    return Statistics(torch.stack((pivot, exp_sum), 1), parts.target.sum(dim=0), total)


def losses(found: Statistics, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Results:
    """The losses of rows, reduced as the spec says."""
    counts = labels != spec.ignore_index
    pivot, exp_sum = found.normaliser.unbind(1)
    log_sum = exp_sum.log()
    lse = pivot * spec.factor + log_sum
    of_label, of_lse = shares(labels, weights, spec)
    z_loss = spec.lse_square_scale * lse * lse  # in this order: a square may be infinite, and 0 · inf NaN
    loss = of_lse * log_sum - of_label * spec.factor * (found.target - pivot) + z_loss
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing * spec.factor / spec.vocabulary * found.total
    sound = _sound(labels, spec, loss.dtype)
    loss, z_loss = ((t * sound).where(counts, 0) for t in (loss, z_loss))
    scale = None
    if spec.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if spec.reduction == "mean":
        scale = mean_scale(labels, spec, loss.dtype, weights)
        loss, z_loss = loss * scale, z_loss * scale
    return Results(loss, z_loss if spec.z_loss else None, found.normaliser, scale)


def _sound(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype) -> Tensor:
    """A factor `[rows]`: NaN where the label is outside of the vocabulary and counts, else 1."""
    outside = ((labels < 0) | (labels >= spec.vocabulary)) & (labels != spec.ignore_index)
    return torch.ones_like(labels, dtype=dtype).masked_fill(outside, float("nan"))


def mean_scale(labels: Tensor, spec: CrossEntropySpec, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """1 / `weight_sum`."""
    return weight_sum(labels, weights, spec).to(dtype).reciprocal()


def weight_sum(labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec) -> Tensor:
    """The number of rows that count, or the sum of their class weights, a scalar on the device."""
    counts = labels != spec.ignore_index if weights is None else weights_of_labels(labels, weights, spec)
    return counts.sum()


def factors(dloss: Tensor, scale: Tensor | None, labels: Tensor, normaliser: Tensor, spec: CrossEntropySpec) -> Tensor:
    """A factor of the gradient of each row, `[rows]`; arguments as of `gradient`."""
    g = (dloss if scale is None else dloss * scale).expand_as(labels)
    return g * spec.logit_scale * _sound(labels, spec, normaliser.dtype)


def factors_of_exponentials(
    normaliser: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None
) -> Tensor:
    """A factor that the gradient has on the exponentials of each row's differences, `[rows]`."""
    pivot, exp_sum = normaliser.unbind(1)
    lse = pivot * spec.factor + exp_sum.log()
    _, of_lse = shares(labels, weights, spec)
    return (of_lse + 2 * spec.lse_square_scale * lse) / exp_sum


def gradient(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    weights: Tensor | None = None,
) -> Tensor:
    """The gradient of rows of logits `[rows, columns]`, in the dtype that computes; differentiable.

    Args:
        dloss: gradient of the loss, a scalar or `[rows]`.
        scale: a factor on it, a scalar or None.
        logits: in the dtype that computes.
        labels: `[rows]`.
        normaliser: `[rows, 2]`, over all columns.
        spec: of the call.
        weights: class weights and their sum.
    """
    counts = (labels != spec.ignore_index)[:, None]
    g = factors(dloss, scale, labels, normaliser, spec)[:, None]
    scores, columns = capped(logits, spec), logits.shape[1]
    exponentials = ((scores - normaliser[:, :1]) * spec.factor).exp()
    of_all = spec.label_smoothing / spec.vocabulary * (1 if weights is None else weights_here(weights, columns, spec))
    wanted = exponentials * factors_of_exponentials(normaliser, labels, spec, weights)[:, None] - of_all
    is_label = torch.arange(spec.first, spec.first + columns, device=logits.device) == labels[:, None]
    of_label, _ = shares(labels, weights, spec)
    wanted = wanted - (of_label if weights is None else of_label[:, None]) * is_label.to(wanted.dtype)
    wanted = wanted * cap_slope(scores, spec) if spec.softcap else wanted
    return (g * wanted).where(counts, 0)
