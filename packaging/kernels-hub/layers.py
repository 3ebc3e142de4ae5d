"""Layers that the kernels package puts in the place of others: forwards alone, which read the other layer's tensors."""

from __future__ import annotations

from torch import Tensor, nn

import flashtile


class RMSNorm(nn.Module):
    """In the place of transformers' RMS norms: `weight` `[hidden]` and `variance_epsilon`."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]`, in its dtype."""
        return flashtile.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class LayerNorm(nn.Module):
    """In the place of `torch.nn.LayerNorm` over the last dimension: `weight` and `bias` `[hidden]`, and `eps`."""

    can_torch_compile = True
    weight: Tensor
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """`[..., hidden]`, in its dtype."""
        return flashtile.layer_norm(input, self.weight, self.bias, eps=self.eps)
