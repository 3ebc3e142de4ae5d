"""scaled_masked_softmax_cuda: `flashtile.scaled_masked_softmax`, and its gradient from the result."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.compat.shared.version1 import softmax_backward as backward

__all__ = ["backward", "forward", "get_batch_per_block"]


@torch.no_grad()
def forward(inputs: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Softmax of `scale · inputs` `[batch, heads, seq_q, seq_k]` without what mask, True = out, takes away."""
    return flashtile.scaled_masked_softmax(inputs, mask, scale_factor)


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Rows that must go together: 1, because numbers of rows that no power of two divides are served as well."""
    return 1
