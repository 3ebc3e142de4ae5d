"""scaled_upper_triang_masked_softmax_cuda: `flashtile.scaled_causal_softmax`, and its gradient from the result."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared.version1 import softmax_backward as backward

__all__ = ["backward", "forward"]


@torch.no_grad()
def forward(inputs: Tensor, scale_factor: float) -> Tensor:
    """Softmax of `scale · inputs` `[batch · heads, seq, seq]` over the keys up to each query's own."""
    return flashtile.scaled_causal_softmax(inputs, scale_factor)
