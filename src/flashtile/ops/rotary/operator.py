"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of the rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.rotary import checks, reference
from flashtile.ops.rotary.spec import RotarySpec, Rotation

_BACKENDS = standard_backends("rotary")

_ARGUMENTS = (
    "Tensor cos, Tensor sin, Tensor? cos_k, Tensor? sin_k, Tensor? offsets, Tensor? cu_seqlens, "
    "Tensor? position_ids, bool interleaved, bool conjugate, SymInt heads_q, SymInt heads_rotated, SymInt offset, "
    "str backend"
)
_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(f"rotary(Tensor x, {_ARGUMENTS}) -> Tensor")
_library.define(f"rotary_(Tensor(a!) x, {_ARGUMENTS}) -> ()")
_op, _inplace_op = torch.ops.flashtile.rotary.default, torch.ops.flashtile.rotary_.default

_TENSORS = len(Rotation._fields)


def run_rotary(rotation: Rotation, spec: RotarySpec, inplace: bool, backend: str) -> Tensor:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns the rotated x."""
    x = rotation.x
    if dispatch.transformed():
        rotated = _transformed(rotation, spec, backend)
        return x.copy_(rotated) if inplace else rotated
    recorded = torch.is_grad_enabled() and x.requires_grad
    if inplace and (torch.compiler.is_exporting() or (recorded and torch.compiler.is_compiling())):
        # The compiler turns the copy into a write to x, and knows its derivative. What is exported may have to run
        # without flashtile, and only the operator that writes nothing in place is one of PyTorch's others.
        return x.copy_(run_rotary(rotation, spec, False, backend))
    if recorded:
        return _Rotary.apply(*rotation, *spec, inplace, backend)
    return _run(rotation, spec, inplace, backend)


def _transformed(rotation: Rotation, spec: RotarySpec, backend: str) -> Tensor:
    """Under `torch.func` transforms and forward-mode differentiation, PyTorch's own operations rotate."""
    dispatch.refuse_named_backend(backend)
    return reference.rotate(rotation, spec)


def _run(rotation: Rotation, spec: RotarySpec, inplace: bool, backend: str) -> Tensor:
    if dispatch.unobserved(*rotation):
        return _forward(rotation, spec, inplace, backend)
    if inplace:
        _inplace_op(*rotation, *spec, backend)
        return rotation.x
    return _op(*rotation, *spec, backend)


class _Rotary(torch.autograd.Function):
    """The rotation recorded for a backward, which is the rotation the other way, recorded in its turn."""

    @staticmethod
    def forward(ctx, *arguments):
        *flat, inplace, backend = arguments
        rotation, spec = Rotation(*flat[:_TENSORS]), RotarySpec(*flat[_TENSORS:])
        ctx.save_for_backward(*rotation[1:])
        ctx.scalars = spec, backend
        if inplace:
            ctx.mark_dirty(rotation.x)
        return _run(rotation, spec, inplace, backend)

    @staticmethod
    def backward(ctx, dout):
        spec, backend = ctx.scalars
        back = spec._replace(conjugate=not spec.conjugate)
        rotation = Rotation(dout, *ctx.saved_tensors)
        if dispatch.batched(dout):
            dx = _op(*rotation, *back, backend)  # PyTorch calls it for one gradient after another
        else:
            dx = run_rotary(rotation, back, False, backend)
        return dx, *(None,) * (_TENSORS + len(spec) + 1)


def _forward(rotation: Rotation, spec: RotarySpec, inplace: bool, backend: str) -> Tensor:
    checks.check_values(rotation, spec)
    x = rotation.x
    dtype = torch.float64 if torch.float64 in (x.dtype, rotation.cos.dtype) else x.dtype
    module = _BACKENDS.implementation(backend, x.device, dtype)
    rotation = Rotation(*map(_last_contiguous, rotation))
    rotated = module.forward(rotation, spec, inplace)
    if inplace and not x.is_inference():
        # Kernels write past PyTorch's back: an earlier operation that keeps x for its gradient must learn of it.
        torch.autograd.graph.increment_version(x)
    # In-place on a last dimension that is not contiguous: what was rotated is a copy.
    return x.copy_(rotated) if inplace and rotated is not x else rotated


def _last_contiguous(tensor: Any) -> Any:
    """Backends take any strides but the last."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _implementation(*arguments):
    *flat, backend = arguments
    with torch.no_grad():
        return _forward(Rotation(*flat[:_TENSORS]), RotarySpec(*flat[_TENSORS:]), False, backend)


def _inplace_implementation(*arguments):
    *flat, backend = arguments
    with torch.no_grad():
        _forward(Rotation(*flat[:_TENSORS]), RotarySpec(*flat[_TENSORS:]), True, backend)


for _device in ("CPU", "CUDA"):
    _library.impl("rotary", _implementation, _device)
    _library.impl("rotary_", _inplace_implementation, _device)
_library.impl("rotary", torch.library.fallthrough_kernel, "Autograd")
# Autograd is recorded above the operators. What is left below it is that x has changed.
_library.impl("rotary_", torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::rotary", lambda x, *rest: x.new_empty(x.shape), _library)
dispatch.register_fake("flashtile::rotary_", lambda x, *rest: None, _library)
