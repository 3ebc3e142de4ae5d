"""flash_attn.ops.triton.linear over `flashtile.fused_dense`: a linear layer with its activation, and their gradient.

Autograd records neither: they are halves for a backward of one's own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile

from ..activations import gelu_bwd, gelu_fwd, sqrelu_bwd, sqrelu_fwd

#: Each activation, and the gradient of its argument from (gradient of the result, argument).
_ACTIVATIONS = {
    "id": (lambda x: x, lambda g, x: g),
    "gelu": (F.gelu, lambda g, x: torch.ops.aten.gelu_backward(g, x)),
    "gelu_approx": (gelu_fwd, gelu_bwd),
    "squared_relu": (sqrelu_fwd, sqrelu_bwd),
}


@torch.no_grad()
def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "id", save_act_input: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`act(x weightᵀ + bias)`; with save_act_input also the argument of the activation.

    Args:
        x: `[..., in]`.
        weight: `[out, in]` in x's dtype.
        bias: `[out]`, or None for 0.
        activation: "id", "gelu", "gelu_approx" (the tanh approximation) or "squared_relu".
        save_act_input: see above.
    """
    function, _ = _chosen(activation)
    before = flashtile.fused_dense(x, weight, bias)
    assert isinstance(before, Tensor)
    out = function(before)
    return (out, before) if save_act_input else out


@torch.no_grad()
def triton_dgrad_act(
    grad_output: Tensor, weight: Tensor, activation: str = "id", act_input: Tensor | None = None
) -> Tensor:
    """`(grad_output weight) · act'(act_input)`: the gradient of what the activation before a linear layer was taken of.

    Args:
        grad_output: `[..., out]`.
        weight: `[out, in]`.
        activation: as `triton_linear_act`.
        act_input: `[..., in]`; not needed with "id".
    """
    _, gradient = _chosen(activation)
    if act_input is None and activation != "id":
        raise ValueError(
            f"act_input: expected a tensor beside activation {activation!r}, got None; it is what triton_linear_act "
            "returns with save_act_input=True"
        )
    return gradient(grad_output @ weight, act_input)


def _chosen(activation: str):
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(map(repr, _ACTIVATIONS))}, got {activation!r}")
    return _ACTIVATIONS[activation]
