"""The CPU backend: blocks of rows that stay in cache, so that no copy of the logits in float32 is ever whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.ops.cross_entropy import losses
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, Statistics, compute_dtype, gradient_strides

#: Elements of a block of rows: its temporaries together fit the second-level cache of a core.
_BLOCK = 1 << 17


def forward(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Results:
    """The losses of logits `[rows, columns]`."""
    return losses.losses(read(logits, labels, spec), labels, spec)


def read(logits: Tensor, labels: Tensor, spec: CrossEntropySpec) -> Statistics:
    """The statistics of the columns that are here."""
    dtype, count = compute_dtype(logits.dtype), logits.shape[0]
    found = Statistics(*(torch.empty(shape, dtype=dtype) for shape in ((count, 2), (count,), (count,))))
    for rows in _blocks(logits):
        for part, values in zip(found, losses.statistics(logits[rows].to(dtype), labels[rows], spec)):
            part[rows] = values
    return found


def backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits from that of the loss; in their memory where asked for."""
    dtype = compute_dtype(logits.dtype)
    dlogits = logits
    if not inplace:
        dlogits = torch.empty_strided(logits.shape, gradient_strides(logits), dtype=logits.dtype)
    dloss = dloss.expand_as(labels)
    for rows in _blocks(logits):
        block = logits[rows].to(dtype)
        dlogits[rows] = losses.gradient(dloss[rows], scale, block, labels[rows], normaliser[rows], spec)
    return dlogits


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient by a scalar, in place, in float32 whatever its dtype."""
    flat, dtype = gradient.view(-1), compute_dtype(gradient.dtype)
    for first in range(0, flat.numel(), _BLOCK):
        block = flat[first : first + _BLOCK]
        block.copy_(block.to(dtype) * factor)


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, columns = logits.shape
    step = max(1, _BLOCK // columns)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
