"""The log-sum-exp in differentiable operations of PyTorch that trace with sizes that depend on data."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.sizes import known


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """`ln Σ exp(x)` over a dimension, which is kept. PyTorch's own asks whether x is empty while it is traced."""
    if not known(x.shape[dim] > 0):  # nothing has no largest
        x = torch.cat((x, torch.full_like(x.sum(dim, keepdim=True), float("-inf"))), dim)
    largest = x.detach().amax(dim, keepdim=True)
    against = largest.masked_fill(largest.isinf(), 0)  # inf - inf would be NaN
    return (x - against).exp().sum(dim, keepdim=True).log() + against
