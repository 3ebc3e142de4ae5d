"""What a softmax call means, apart from the numbers in its tensors.

Over the last dimension of x `[batch, heads, seq_q, seq_k]`, in float32 (float64 for float64)::

    s = scale · x, and -inf where the element is masked out
    p = exp(s - max(s)) / Σ exp(s - max(s))

Masked out is what the mask says, and with `causal` what lies right of the diagonal `j = i + seq_k - seq_q`. A row with
nothing left, or with nothing but -inf, is 0, and so is its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Longest row that any backend takes.
MAX_COLUMNS = 2**30


class SoftmaxSpec(NamedTuple):
    """The meaning of a call: scalars only, hashable.

    Attributes:
        scale: factor on x.
        causal: only keys up to the diagonal, which ends at the last key.
    """

    scale: float
    causal: bool


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
