"""The gradient of a scaled softmax from its result."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """`scale · y · (dy - Σ dy y)` along the last dimension; what is masked has y = 0, and so a gradient of 0."""
    wide = torch.promote_types(softmax_results.dtype, torch.float32)
    dy, y = output_grads.to(wide), softmax_results.to(wide)
    return (scale_factor * y * (dy - (dy * y).sum(-1, keepdim=True))).to(softmax_results.dtype)
