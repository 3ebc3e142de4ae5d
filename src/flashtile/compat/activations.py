"""flash_attn.ops.activations: activations with their gradients as functions, by PyTorch operations.

GELU is its tanh approximation everywhere here. Results have the dtype of their first argument.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_fwd(x: Tensor) -> Tensor:
    """`gelu(x)`."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of `gelu(x)`."""
    return torch.ops.aten.gelu_backward(g.to(x.dtype), x, approximate="tanh")


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """`gelu(y + bias)`: y `[..., features]`, bias `[features]`."""
    return gelu_fwd(y + bias.to(y.dtype))


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of y and bias from that of `bias_gelu`."""
    dy = gelu_bwd(g, y + bias.to(y.dtype))
    return dy, dy.sum_to_size(bias.shape).to(bias.dtype)


class GeLUFunction(torch.autograd.Function):
    """`bias_gelu`, which keeps its arguments and not their sum."""

    @staticmethod
    def forward(ctx, input: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, bias)
        return bias_gelu(input, bias)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return bias_gelu_back(grad_output, *ctx.saved_tensors)


bias_gelu_impl = GeLUFunction.apply


class FastGeLUFunction(torch.autograd.Function):
    """`gelu_fwd`, recorded by autograd."""

    @staticmethod
    def forward(ctx, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return gelu_fwd(input)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return gelu_bwd(grad_output, *ctx.saved_tensors)


fast_gelu_impl = FastGeLUFunction.apply


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of `relu(x)`; at 0 it passes."""
    return torch.where(x >= 0, g, 0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """`relu(x)²`."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of `relu(x)²`."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """`silu(x) · y`, rounded once."""
    return (F.silu(_wide(x)) * _wide(y)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and y from that of `swiglu_fwd`."""
    wide, dout = _wide(x), _wide(g)
    gate = wide.sigmoid()
    dx = dout * _wide(y) * gate * (1 + wide * (1 - gate))
    return dx.to(x.dtype), (dout * wide * gate).to(y.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """`swiglu_fwd`, which keeps its arguments and not the gate."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, dout)


swiglu = SwiGLUFunction.apply


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
