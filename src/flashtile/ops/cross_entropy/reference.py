"""The eager reference: the definition of the semantics, written to be read, not to be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.cross_entropy.losses import gradient, losses, statistics
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics, compute_dtype


def forward(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Results:
    """The losses of logits `[rows, columns]`; differentiable. `weights`: class weights and their sum."""
    return losses(read(logits, labels, spec, weights), labels, spec, weights)


def read(logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None) -> Statistics:
    """The statistics of the columns that are here."""
    logits = _counted(logits, labels, spec)
    return statistics(logits.to(compute_dtype(logits.dtype)), labels, spec, weights)


def backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    inplace: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits from that of the loss, in their dtype; in their memory where asked for."""
    wide = logits.to(compute_dtype(logits.dtype))
    dlogits = gradient(dloss, scale, wide, labels, normaliser, spec, weights).to(logits.dtype)
    return logits.copy_(dlogits) if inplace else dlogits


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a gradient by a scalar, in place."""
    gradient.copy_(gradient.to(compute_dtype(gradient.dtype)) * factor)


def differentiable_backward(
    dloss: Tensor, logits: Tensor, labels: Tensor, spec: CrossEntropySpec, weights: Tensor | None = None
) -> Tensor:
    """The gradient of the logits as a function of `dloss` and of the logits alone, for the second derivative."""
    logits = _counted(logits, labels, spec)
    found = forward(logits, labels, spec, weights)
    return backward(dloss, found.scale, logits, labels, found.normaliser, spec, weights=weights)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weights: Tensor | None,
    spec: CrossEntropySpec,
) -> Results:
    """The losses of the logits `x · weightᵀ + bias`, which are held as a whole; differentiable."""
    return forward(torch.nn.functional.linear(_counted(x, labels, spec), weight, bias), labels, spec, class_weights)


def _counted(rows: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Tensor:
    """Rows with 0 for those that are ignored: what these hold, be it NaN, reaches no derivative."""
    return rows.masked_fill((labels == spec.ignore_index)[:, None], 0)
