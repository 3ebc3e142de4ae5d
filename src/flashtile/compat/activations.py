"""flash_attn.ops.activations: activations with their gradients as functions, by PyTorch operations, in the dtype of
their first argument. GELU is its tanh approximation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.compat.signatures import VERSION_2


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
    return (F.silu(wide(x)) * wide(y)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and y from that of `swiglu_fwd`."""
    x_wide, dout = wide(x), wide(g)
    gate = x_wide.sigmoid()
    dx = dout * wide(y) * gate * (1 + x_wide * (1 - gate))
    return dx.to(x.dtype), (dout * x_wide * gate).to(y.dtype)


def wide(x: Tensor) -> Tensor:
    """x in float32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _recorded(name: str, function: Callable[..., Tensor], gradient: Callable[..., Any]) -> Any:
    """An autograd class of a function that keeps its arguments; `gradient` takes that of the result before them."""

    def forward(ctx: Any, **given: Tensor) -> Tensor:
        ctx.save_for_backward(*given.values())
        return function(*given.values())

    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return gradient(grad_output, *ctx.saved_tensors)

    forward.__doc__ = function.__doc__
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), {"__doc__": function.__doc__, "__module__": __name__, **methods})


GeLUFunction = _recorded("GeLUFunction", bias_gelu, bias_gelu_back)
FastGeLUFunction = _recorded("FastGeLUFunction", gelu_fwd, gelu_bwd)
SwiGLUFunction = _recorded("SwiGLUFunction", swiglu_fwd, lambda g, x, y: swiglu_bwd(x, y, g))
bias_gelu_impl, fast_gelu_impl, swiglu = GeLUFunction.apply, FastGeLUFunction.apply, SwiGLUFunction.apply

VERSION_2.serve(globals())
