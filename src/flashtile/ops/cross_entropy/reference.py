"""The eager reference: the definition of the semantics, written to be read, not to be fast."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.cross_entropy.losses import gradient, losses, statistics
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics, compute_dtype


def forward(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """The losses of logits `[rows, columns]`; differentiable."""
    return losses(read(logits, labels, spec), labels, spec)


def read(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Statistics:
    """The statistics of the columns that are here."""
    logits = _counted(logits, labels, spec)
    return statistics(logits.to(compute_dtype(logits.dtype)), labels, spec)


def backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits from that of the loss, in their dtype; in their memory where asked for."""
    dlogits = gradient(dloss, scale, logits.to(compute_dtype(logits.dtype)), labels, normaliser, spec).to(logits.dtype)
    return logits.copy_(dlogits) if inplace else dlogits


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a gradient by a scalar, in place."""
    gradient.copy_(gradient.to(compute_dtype(gradient.dtype)) * factor)


def differentiable_backward(dloss: Tensor, logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Tensor:
    """The gradient of the logits as a function of `dloss` and of the logits alone, for the second derivative."""
    logits = _counted(logits, labels, spec)
    found = forward(logits, labels, spec)
    return backward(dloss, found.scale, logits, labels, found.normaliser, spec)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """The losses of the logits `x · weightᵀ + bias`, which are held as a whole; differentiable."""
    return forward(torch.nn.functional.linear(_counted(x, labels, spec), weight, bias), labels, spec)


def _counted(rows: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Tensor:
    """Rows with 0 for those that are ignored: what these hold, be it NaN, reaches no derivative."""
    return rows.masked_fill((labels == spec.ignore_index)[:, None], 0)
