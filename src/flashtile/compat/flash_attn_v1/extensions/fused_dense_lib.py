"""fused_dense_lib: halves of linear layers and perceptrons, none of them recorded by autograd.

input `[rows, in]`, weight `[out, in]`, bias `[out]`, all of one dtype. `heuristic` chose among matrix products of one
library; they are PyTorch's, and no result depends on it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile.compat.shared.arguments import refuse


@torch.no_grad()
def linear_bias_forward(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`input weightᵀ + bias`."""
    out = flashtile.fused_dense(input, weight, bias)
    assert isinstance(out, Tensor)
    return out


@torch.no_grad()
def linear_bias_wgrad(input: Tensor, d_output: Tensor, has_d_bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias, the latter None without has_d_bias."""
    return flashtile.linear_bias_wgrad(input, d_output, bias=has_d_bias)


@torch.no_grad()
def linear_bias_backward(input: Tensor, weight: Tensor, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of input, weight and bias."""
    return d_output @ weight, *linear_bias_wgrad(input, d_output)


@torch.no_grad()
def linear_bias_residual_backward(
    input: Tensor, weight: Tensor, d_output: Tensor, d_input: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `linear_bias_backward`; the gradient of input is added to d_input, in place."""
    return d_input.addmm_(d_output, weight), *linear_bias_wgrad(input, d_output)


@torch.no_grad()
def linear_gelu_forward(
    input: Tensor, weight: Tensor, bias: Tensor, save_gelu_in: bool, heuristic: int
) -> list[Tensor]:
    """`gelu(input weightᵀ + bias)` by the tanh formula, and with save_gelu_in what it was taken of."""
    before = linear_bias_forward(input, weight, bias)
    out = F.gelu(before, approximate="tanh")
    return [out, before] if save_gelu_in else [out]


@torch.no_grad()
def linear_gelu_linear_backward(
    input: Tensor,
    gelu_in: Tensor,
    output1: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    d_output2: Tensor,
    heuristic: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight1, bias1, weight2 and bias2 of a perceptron."""
    before, of_second = _of_activation(gelu_in, output1, weight2, d_output2)
    return (*linear_bias_backward(input, weight1, before), *of_second)


@torch.no_grad()
def linear_residual_gelu_linear_backward(
    input: Tensor,
    gelu_in: Tensor,
    output1: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    d_output2: Tensor,
    d_input: Tensor,
    heuristic: int,
) -> tuple[Tensor | None, ...]:
    """As `linear_gelu_linear_backward`; the gradient of input is added to d_input, in place."""
    before, of_second = _of_activation(gelu_in, output1, weight2, d_output2)
    return (*linear_bias_residual_backward(input, weight1, before, d_input), *of_second)


@torch.no_grad()
def linear_act_forward(
    input: Tensor, weight: Tensor, bias: Tensor, is_gelu: bool, save_pre_act: bool, heuristic: int
) -> list[Tensor]:
    """As `linear_gelu_forward`; without is_gelu ReLU, of which nothing can be saved here (it was a mask of bits)."""
    if is_gelu:
        return linear_gelu_forward(input, weight, bias, save_pre_act, heuristic)
    if save_pre_act:
        refuse("save_pre_act", "False with ReLU", True, "use flashtile.fused_mlp with activation='relu'")
    return [linear_bias_forward(input, weight, bias).relu_()]


@torch.no_grad()
def bias_act_linear_dgrad_bgrad(
    weight: Tensor, d_output: Tensor, pre_act: Tensor, is_gelu: bool, heuristic: int
) -> tuple[Tensor, Tensor]:
    """The gradients of what the activation was taken of, and of the bias before it."""
    if not is_gelu:
        refuse("is_gelu", "True", False, "use flashtile.fused_mlp with activation='relu'")
    before = torch.ops.aten.gelu_backward(d_output @ weight, pre_act, approximate="tanh")
    return before, before.sum(0, dtype=torch.promote_types(before.dtype, torch.float32)).to(before.dtype)


def _of_activation(
    gelu_in: Tensor, output1: Tensor, weight2: Tensor, d_output2: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The gradient of what GELU was taken of, and those of the second layer."""
    before = torch.ops.aten.gelu_backward(d_output2 @ weight2, gelu_in, approximate="tanh")
    return before, linear_bias_wgrad(output1, d_output2)
