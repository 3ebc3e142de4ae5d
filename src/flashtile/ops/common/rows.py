"""Parts that operations on rows have in common: the dtype that computes, blocks of rows for a CPU's caches, strides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile.ops.common.sizes import known

Given = TypeVar("Given", bound=tuple[Any, ...])

#: Elements of a block of rows: its temporaries together fit the second-level cache of a core.
BLOCK = 1 << 17


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums and statistics are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def as_rows(x: Tensor) -> Tensor:
    """`[..., columns]` as a matrix."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Consecutive rows of a matrix, so many elements at a time."""
    step = max(1, elements // max(columns, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def last_contiguous(tensors: Given) -> Given:
    """A NamedTuple of tensors and None, the last dimension of each contiguous: backends take any other strides."""
    for tensor in tensors:
        if tensor is not None and tensor.stride(-1) != 1:
            return type(tensors)(*[t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors])
    return tensors


def as_they_are(tensors: Given) -> Given:
    """Tensors of any strides."""
    return tensors


def contiguous(tensors: Any) -> Any:
    """A NamedTuple of tensors and None, each tensor contiguous."""
    if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return tensors
    return type(tensors)(*[t if t is None else t.contiguous() for t in tensors])


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """`ln Σ exp(x)` over a dimension, which is kept. In differentiable operations that trace with
    sizes that depend on data; PyTorch's own asks whether x is empty while it is traced."""
    if not known(x.shape[dim] > 0):  # nothing has no largest
        x = torch.cat((x, torch.full_like(x.sum(dim, keepdim=True), float("-inf"))), dim)
    largest = x.detach().amax(dim, keepdim=True)
    against = largest.masked_fill(largest.isinf(), 0)  # inf - inf would be NaN
    return (x - against).exp().sum(dim, keepdim=True).log() + against
