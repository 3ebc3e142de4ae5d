"""Standard attention, step by step: the computation that `flashtile.io_model.standard` models.

Shapes: N matrices (batch × heads), S sequence, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def standard_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """`dropout(softmax(q kᵀ / sqrt(D) + mask)) v`, in the dtype of the inputs, every step a kernel of its own.

    Args:
        q, k, v: `[N, S, D]`.
        mask: `[S, S]`, 0 where visible and -inf where not; None where all is visible.
        dropout_p: probability that a weight is dropped.

    Returns:
        out `[N, S, D]`.
    """
    weights = scores(q, k, mask).softmax(dim=-1)
    if dropout_p:
        # What `torch.nn.functional.dropout` runs on a GPU; on a CPU that would be several steps.
        weights, _ = torch.native_dropout(weights, dropout_p, True)
    return torch.bmm(weights, v)


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """`[N, S, S]`: the scale is part of the product, the mask is added in place."""
    empty = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    found = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    return found if mask is None else found.add_(mask)


def causal_mask(seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[S, S]`: -inf right of the diagonal, 0 elsewhere."""
    return torch.full((seq, seq), float("-inf"), dtype=dtype, device=device).triu(1)
