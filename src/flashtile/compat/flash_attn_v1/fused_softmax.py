"""flash_attn.fused_softmax over `flashtile.scaled_causal_softmax` and `scaled_masked_softmax`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import flashtile
from flashtile.compat.shared.arguments import refuse_given


def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Any, scale: float) -> Tensor:
    """Softmax of `scale · inputs` `[batch, heads, seq, seq]` over the keys up to each query's own."""
    refuse_given("the causal mask is the only one; scaled_masked_softmax takes others", mask=_)
    return flashtile.scaled_causal_softmax(inputs, scale)


def scaled_masked_softmax(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of `scale · inputs` `[batch, heads, seq_q, seq_k]` without what mask, True = out, takes away."""
    return flashtile.scaled_masked_softmax(inputs, mask, scale)
