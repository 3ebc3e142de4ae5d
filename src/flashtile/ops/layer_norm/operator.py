"""The operator: torch.library schemas, fakes and implementations, and the only autograd code of the norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.layer_norm import checks, reference
from flashtile.ops.layer_norm.spec import (
    Gradients,
    Normalised,
    NormSpec,
    Operands,
    Saved,
    Wanted,
    makes_sum,
    present_gradients,
    statistics_dtype,
)

_BACKENDS = standard_backends("layer_norm")

_SPEC_SCHEMA = (
    "bool rms, float epsilon, float dropout_p, float rowscale_const, bool zero_centered, ScalarType sum_dtype, "
    "SymInt out_rows"
)
_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    f"layer_norm_forward(Tensor x0, {', '.join('Tensor? ' + name for name in Operands._fields[1:])}, "
    f"{_SPEC_SCHEMA}, str backend) -> Tensor[]"
)
_library.define(
    "layer_norm_backward(Tensor dz, Tensor? dz1, Tensor? dx, Tensor x, Tensor? x0, Tensor? mean, Tensor rstd, "
    f"{', '.join('Tensor? ' + name for name in Saved._fields[4:])}, {_SPEC_SCHEMA}, "
    "SymInt x0_rows, bool residual, bool x1, bool weights, str backend) -> Tensor[]"
)
_forward_op = torch.ops.flashtile.layer_norm_forward.default
_backward_op = torch.ops.flashtile.layer_norm_backward.default

# Where tensors end and the spec ends in the flat argument lists of the schemas.
_OPERANDS, _SAVED = len(Operands._fields), len(Saved._fields)
_SPEC, _WANTED = len(NormSpec._fields), len(Wanted._fields)


def run_norm(operands: Operands, spec: NormSpec, backend: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns (z, z1, x)."""
    if dispatch.transformed():
        results = _transformed(operands, spec, backend)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        if torch.compiler.is_compiling():
            operands = Operands(*dispatch.distinct(operands))  # type: ignore[arg-type]
        results = iter(_Norm.apply(*operands, *spec, backend))
        z = next(results)
        z1 = None if operands.weight1 is None else next(results)
        return z, z1, next(results) if makes_sum(operands, spec) else operands.x0
    else:
        results = _run_forward(operands, spec, backend)
    return results.z, results.z1, operands.x0 if results.x is None else results.x


def _transformed(operands: Operands, spec: NormSpec, backend: str) -> Normalised:
    """Under `torch.func` transforms and forward-mode differentiation, PyTorch's own operations compute the norm."""
    dispatch.refuse_named_backend(backend)
    return reference.forward(operands, spec)


def _run_forward(operands: Operands, spec: NormSpec, backend: str) -> Normalised:
    if dispatch.unobserved(*operands):
        return _forward(operands, spec, backend)
    return _normalised(_forward_op(*operands, *spec, backend), operands, spec)


class _Norm(torch.autograd.Function):
    """The forward pass recorded for a backward. Returns z, z1 where there is one, and x where it is not x0."""

    @staticmethod
    def forward(ctx, *arguments):
        operands, spec, backend = Operands(*arguments[:_OPERANDS]), NormSpec(*arguments[_OPERANDS:-1]), arguments[-1]
        results = _run_forward(operands, spec, backend)
        x = operands.x0 if results.x is None else results.x
        x0 = None if operands.layerscale is None else operands.x0
        ctx.save_for_backward(x, x0, results.mean, results.rstd, *operands[3:])
        weights = any(ctx.needs_input_grad[3:_OPERANDS])
        wanted = Wanted(operands.x0.shape[0], operands.residual is not None, operands.x1 is not None, weights)
        ctx.scalars = spec, wanted, backend, operands.x0.dtype
        ctx.has_z1 = results.z1 is not None
        ctx.set_materialize_grads(False)
        return tuple(t for t in (results.z, results.z1, results.x) if t is not None)

    @staticmethod
    def backward(ctx, *upstream):
        saved = Saved(*ctx.saved_tensors)
        spec, wanted, backend, dtype = ctx.scalars
        dz = upstream[0]
        dz1 = upstream[1] if ctx.has_z1 else None
        dx = upstream[-1] if len(upstream) > 1 + ctx.has_z1 else None
        if dz is None:
            dz = saved.x.new_zeros(spec.out_rows, saved.x.shape[1], dtype=dtype)
        if ctx.has_z1 and dz1 is None:
            dz1 = torch.zeros_like(dz)
        tensors = (dz, dz1, dx, *saved)
        if dispatch.batched(dz, dz1, dx):
            grads = reference.backward(dz, dz1, dx, saved, spec, wanted)
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            flat = _DifferentiableBackward.apply(*tensors, *spec, *wanted, backend)
            grads = _gradients(flat, dz, saved, spec, wanted)
        elif dispatch.unobserved(*tensors):
            grads = _backward(dz, dz1, dx, saved, spec, wanted, backend)
        else:
            flat = _backward_op(*tensors, *spec, *wanted, backend)
            grads = _gradients(flat, dz, saved, spec, wanted)
        return *_input_gradients(grads, wanted), *(None,) * (_SPEC + 1)


def _input_gradients(grads: Gradients, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients in the order of `Operands`. Summands that nothing changed on the way share that of the sum."""
    dx, dx0, dx1, *of_weights, dlayerscale = grads
    own = dx0 is not None
    dresidual = dx if wanted.residual else None
    dx1 = dx if wanted.x1 and not own else dx1
    return dx0 if own else dx, dresidual, dx1, *of_weights, None, dlayerscale, None, None, None


class _DifferentiableBackward(torch.autograd.Function):
    """The backward pass under `create_graph=True`: the operator, itself differentiable through the eager reference."""

    @staticmethod
    def forward(ctx, *arguments):
        ctx.save_for_backward(*arguments[: _SAVED + 3])
        ctx.scalars = arguments[_SAVED + 3 : -1]
        return tuple(_backward_op(*arguments))

    @staticmethod
    def backward(ctx, *grads):
        tensors = ctx.saved_tensors
        spec, wanted = NormSpec(*ctx.scalars[:_SPEC]), Wanted(*ctx.scalars[_SPEC:])
        places = [place for place in range(len(tensors)) if ctx.needs_input_grad[place]]

        def first_order(*varied: Tensor) -> tuple[Tensor, ...]:
            arguments = list(tensors)
            for place, tensor in zip(places, varied, strict=True):
                arguments[place] = tensor
            dz, dz1, dx, *saved = arguments
            return tuple(t for t in reference.backward(dz, dz1, dx, Saved(*saved), spec, wanted) if t is not None)

        _, pullback = torch.func.vjp(first_order, *(tensors[place] for place in places))
        found = dict(zip(places, pullback(grads)))
        return *(found.get(place) for place in range(len(tensors))), *(None,) * (_SPEC + _WANTED + 1)


def _forward(operands: Operands, spec: NormSpec, backend: str) -> Normalised:
    checks.check_values(operands, spec)
    dtype = spec.sum_dtype
    module = _BACKENDS.implementation(backend, operands.x0.device, dtype)
    return module.forward(Operands(*map(_rows_contiguous, operands)), spec)


def _backward(
    dz: Tensor, dz1: Tensor | None, dx: Tensor | None, saved: Saved, spec: NormSpec, wanted: Wanted, backend: str
) -> Gradients:
    module = _BACKENDS.implementation(backend, dz.device, spec.sum_dtype)
    dz, dz1, dx = map(_rows_contiguous, (dz, dz1, dx))
    return module.backward(dz, dz1, dx, Saved(*map(_rows_contiguous, saved)), spec, wanted)


def _rows_contiguous(tensor: Any) -> Any:
    """Backends take matrices of any row stride, and contiguous vectors."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _forward_implementation(*arguments):
    operands, spec = Operands(*arguments[:_OPERANDS]), NormSpec(*arguments[_OPERANDS:-1])
    with torch.no_grad():
        return [t for t in _forward(operands, spec, arguments[-1]) if t is not None]


def _backward_implementation(dz, dz1, dx, *rest):
    saved, spec, wanted = (
        Saved(*rest[:_SAVED]),
        NormSpec(*rest[_SAVED : _SAVED + _SPEC]),
        Wanted(*rest[_SAVED + _SPEC : -1]),
    )
    with torch.no_grad():
        return [t for t in _backward(dz, dz1, dx, saved, spec, wanted, rest[-1]) if t is not None]


def _forward_fake(*arguments):
    operands, spec = Operands(*arguments[:_OPERANDS]), NormSpec(*arguments[_OPERANDS:-1])
    x0, rows = operands.x0, operands.rows
    columns = x0.shape[1]
    results = [x0.new_empty(spec.out_rows, columns) for weight in (x0, operands.weight1) if weight is not None]
    if makes_sum(operands, spec):
        results.append(x0.new_empty(rows, columns, dtype=spec.sum_dtype))
    return results + [x0.new_empty(rows, dtype=statistics_dtype(spec.sum_dtype)) for _ in range(1 if spec.rms else 2)]


def _backward_fake(dz, dz1, dx, *rest):
    saved, spec, wanted = (
        Saved(*rest[:_SAVED]),
        NormSpec(*rest[_SAVED : _SAVED + _SPEC]),
        Wanted(*rest[_SAVED + _SPEC : -1]),
    )
    rows, columns = saved.x.shape
    parameters = (saved.weight, saved.bias, saved.weight1, saved.bias1, saved.layerscale)
    makers = (
        lambda: dz.new_empty(rows, columns, dtype=spec.sum_dtype),
        lambda: dz.new_empty(wanted.x0_rows, columns),
        lambda: dz.new_empty(rows, columns),
        *(lambda parameter=parameter: parameter.new_empty(columns) for parameter in parameters),
    )
    return [make() for make, there in zip(makers, present_gradients(dz, saved, spec, wanted)) if there]


def _normalised(results: Sequence[Tensor], operands: Operands, spec: NormSpec) -> Normalised:
    """The flat results of the operator, each in its place."""
    rest = list(results)
    z = rest.pop(0)
    z1 = rest.pop(0) if operands.weight1 is not None else None
    x = rest.pop(0) if makes_sum(operands, spec) else None
    mean = None if spec.rms else rest.pop(0)
    return Normalised(z, z1, x, mean, rest.pop(0))


def _gradients(results: Sequence[Tensor], dz: Tensor, saved: Saved, spec: NormSpec, wanted: Wanted) -> Gradients:
    rest = iter(results)
    return Gradients(*(next(rest) if there else None for there in present_gradients(dz, saved, spec, wanted)))


for _device in ("CPU", "CUDA"):
    _library.impl("layer_norm_forward", _forward_implementation, _device)
    _library.impl("layer_norm_backward", _backward_implementation, _device)
for _name in ("layer_norm_forward", "layer_norm_backward"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::layer_norm_forward", _forward_fake, _library)
dispatch.register_fake("flashtile::layer_norm_backward", _backward_fake, _library)
