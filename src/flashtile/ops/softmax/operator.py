"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.softmax import reference
from flashtile.ops.softmax.spec import SoftmaxSpec

_BACKENDS = standard_backends("softmax")

_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define("softmax_forward(Tensor x, Tensor? mask, float scale, bool causal, str backend) -> Tensor")
_library.define("softmax_backward(Tensor dout, Tensor out, float scale, bool causal, str backend) -> Tensor")
_forward_op = torch.ops.flashtile.softmax_forward.default
_backward_op = torch.ops.flashtile.softmax_backward.default


def run_softmax(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec, backend: str) -> Tensor:
    """Runs the operator, recorded by autograd where a gradient is wanted."""
    if dispatch.transformed():
        # Under torch.func transforms and forward-mode differentiation, PyTorch's own operations compute the call.
        dispatch.refuse_named_backend(backend)
        return reference.forward(x, mask, spec)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Softmax.apply(x, mask, *spec, backend)
    return _run_forward(x, mask, spec, backend)


def _run_forward(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec, backend: str) -> Tensor:
    if dispatch.unobserved(x, mask):
        return _forward(x, mask, spec, backend)
    return _forward_op(x, mask, *spec, backend)


class _Softmax(torch.autograd.Function):
    """The softmax recorded for a backward, which needs nothing but the result."""

    @staticmethod
    def forward(ctx, x, mask, scale, causal, backend):
        spec = SoftmaxSpec(scale, causal)
        out = _run_forward(x, mask, spec, backend)
        ctx.save_for_backward(out)
        ctx.scalars = spec, backend
        return out

    @staticmethod
    def backward(ctx, dout):
        (out,) = ctx.saved_tensors
        spec, backend = ctx.scalars
        if dispatch.batched(dout) or (torch.is_grad_enabled() and not torch.compiler.is_compiling()):
            dx = reference.backward(dout, out, spec)  # differentiable, in dout and through out in x
        elif dispatch.unobserved(dout, out):
            dx = _backward(dout, out, spec, backend)
        else:
            dx = _backward_op(dout, out, *spec, backend)
        return dx, None, None, None, None


def _forward(x: Tensor, mask: Tensor | None, spec: SoftmaxSpec, backend: str) -> Tensor:
    module = _BACKENDS.implementation(backend, x.device.type, x.dtype)
    return module.forward(x.contiguous(), mask, spec)


def _backward(dout: Tensor, out: Tensor, spec: SoftmaxSpec, backend: str) -> Tensor:
    module = _BACKENDS.implementation(backend, out.device.type, out.dtype)
    return module.backward(dout.contiguous(), out, spec)


def _forward_implementation(x, mask, scale, causal, backend):
    with torch.no_grad():
        return _forward(x, mask, SoftmaxSpec(scale, causal), backend)


def _backward_implementation(dout, out, scale, causal, backend):
    with torch.no_grad():
        return _backward(dout, out.contiguous(), SoftmaxSpec(scale, causal), backend)


for _device in ("CPU", "CUDA"):
    _library.impl("softmax_forward", _forward_implementation, _device)
    _library.impl("softmax_backward", _backward_implementation, _device)
for _name in ("softmax_forward", "softmax_backward"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::softmax_forward", lambda x, *rest: x.new_empty(x.shape), _library)
dispatch.register_fake("flashtile::softmax_backward", lambda dout, out, *rest: out.new_empty(out.shape), _library)
