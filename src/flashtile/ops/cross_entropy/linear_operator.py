"""The operator of the last linear layer with its cross-entropy: schemas, fakes, implementations and autograd code.

A reduced loss has a scalar gradient, so the forward pass makes the gradients already, for a gradient of 1, and the
backward multiplies. Losses of each token have one each: the backward makes their logits again. So does a second
backward through the same graph, as the first has given its memory away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.flops import product_flops, register_flops
from flashtile.ops.cross_entropy import linear, reference
from flashtile.ops.cross_entropy.linear import LinearGradients, LinearOperands, LinearResults, Wanted
from flashtile.ops.cross_entropy.operator import SPEC_SCHEMA, refuse_second_order, refuse_transformed
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, compute_dtype

_BACKENDS = standard_backends("cross_entropy")

_OPERAND_SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weights"
_WANTED_SCHEMA = "bool dx, bool dweight, bool dbias"
_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    f"linear_cross_entropy_forward({_OPERAND_SCHEMA}, {SPEC_SCHEMA}, {_WANTED_SCHEMA}, str backend) -> Tensor[]"
)
_library.define(
    f"linear_cross_entropy_backward(Tensor dloss, Tensor? scale, {_OPERAND_SCHEMA}, Tensor normaliser, {SPEC_SCHEMA}, "
    f"{_WANTED_SCHEMA}, str backend) -> Tensor[]"
)
_forward_op = torch.ops.flashtile.linear_cross_entropy_forward.default
_backward_op = torch.ops.flashtile.linear_cross_entropy_backward.default

_SPEC = len(CrossEntropySpec._fields)


def run_linear_cross_entropy(
    operands: LinearOperands, spec: CrossEntropySpec, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns loss and z_loss."""
    transformed = dispatch.transformed()
    if transformed:
        dispatch.refuse_named_backend(backend)
        refuse_transformed(spec, False)
    if transformed or (backend == "reference" and not spec.group):
        # PyTorch's own operations compute the call, and differentiate it.
        results = reference.linear(*operands, spec)
        z_loss = None if results.z_loss is None else results.z_loss.detach()
        return results.loss, z_loss
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        loss, *z_losses = _LinearCrossEntropy.apply(*operands, *spec, backend)
        return loss, z_losses[0] if z_losses else None
    found = _run_forward(operands, spec, Wanted(False, False, False), backend)
    return found.loss, found.z_loss


def _run_forward(operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted, backend: str) -> LinearResults:
    if dispatch.unobserved(*operands):
        return _forward(operands, spec, wanted, backend)
    return _results(_forward_op(*operands, *spec, *wanted, backend), spec, wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward pass recorded for a backward. Returns the loss, and z_loss where it is asked for."""

    @staticmethod
    def forward(ctx, x, weight, bias, labels, class_weights, *arguments):
        operands = LinearOperands(x, weight, bias, labels, class_weights)
        spec, backend = CrossEntropySpec(*arguments[:_SPEC]), arguments[-1]
        needs = ctx.needs_input_grad
        wanted = Wanted(needs[0], needs[1], needs[2])
        now = Wanted(False, False, False) if spec.reduction == "none" else wanted
        results = _run_forward(operands, spec, now, backend)
        # A compiled graph saves the gradients; else they are kept where the backward can give them away.
        compiling = torch.compiler.is_compiling()
        ctx.save_for_backward(*operands, results.normaliser, results.scale, *(results.gradients if compiling else ()))
        ctx.gradients = None if compiling or spec.reduction == "none" else results.gradients
        ctx.scalars = spec, wanted, backend
        if results.z_loss is None:
            return (results.loss,)
        ctx.mark_non_differentiable(results.z_loss)
        return results.loss, results.z_loss

    @staticmethod
    def backward(ctx, dloss, *rest):
        spec, wanted, backend = ctx.scalars
        saved = ctx.saved_tensors
        operands, normaliser, scale = LinearOperands(*saved[:5]), saved[5], saved[6]
        compiling = torch.compiler.is_compiling()
        if dispatch.batched(dloss):
            if spec.group:
                raise RuntimeError(
                    "process_group: expected a backward of one gradient, got several (is_grads_batched=True); ask for "
                    "one after another"
                )
            with torch.enable_grad():
                found = _differentiable_backward(dloss, operands, spec, wanted)
        elif torch.is_grad_enabled() and not compiling:
            refuse_second_order(spec, False)
            found = _differentiable_backward(dloss, operands, spec, wanted)
        elif spec.reduction == "none" or (ctx.gradients is None and not compiling):
            found = _run_backward(dloss, scale, operands, normaliser, spec, wanted, backend)
        else:
            factor = dloss
            if scale is not None and operands.x.dtype is torch.float16:
                factor = dloss * scale.nan_to_num(posinf=0.0)  # where no row counts, all gradients are 0
            found = LinearGradients(*saved[7:]) if compiling else ctx.gradients
            ctx.gradients = None
            found = _multiplied(found, factor, operands, backend)
        return *found, None, None, *(None,) * (_SPEC + 1)


def _differentiable_backward(
    dloss: Tensor, operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted
) -> LinearGradients:
    """The gradients as functions of all that they depend on, through the reference, which holds all logits."""
    # Operands are viewed: if one was made from another (x from a weight that is the embedding too), the gradient of the
    # latter would have that of the former in it, which autograd adds as well.
    x, weight, bias, labels, class_weights = operands
    bias = None if bias is None else bias.view_as(bias)
    operands = LinearOperands(x.view_as(x), weight.view_as(weight), bias, labels, class_weights)
    loss = reference.linear(*operands, spec).loss
    inputs = [t for t, there in zip(operands, wanted) if there and t is not None]
    grads = iter(torch.autograd.grad(loss, inputs, dloss, create_graph=True))
    return LinearGradients(*(next(grads) if there else None for there in wanted))


def _run_backward(
    dloss: Tensor,
    scale: Tensor | None,
    operands: LinearOperands,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    wanted: Wanted,
    backend: str,
) -> LinearGradients:
    if dispatch.unobserved(dloss, *operands):
        return _backward(dloss, scale, operands, normaliser, spec, wanted, backend)
    flat = iter(_backward_op(dloss, scale, *operands, normaliser, *spec, *wanted, backend))
    return LinearGradients(*(next(flat) if there else None for there in wanted))


def _multiplied(found: LinearGradients, factor: Tensor, operands: LinearOperands, backend: str) -> LinearGradients:
    """The gradients that the forward made, multiplied by that from above: in place where nothing looks on."""
    dtype = compute_dtype(operands.x.dtype)
    if not dispatch.unobserved(factor, *(t for t in found if t is not None)):
        return linear.finish(LinearGradients(*(None if t is None else t.to(dtype) * factor for t in found)), operands)
    module = _BACKENDS.implementation(backend, operands.x.device, operands.x.dtype)
    for gradient in found:
        if gradient is not None:
            module.multiply(gradient, factor)
    return linear.finish(found, operands)


def _forward(operands: LinearOperands, spec: CrossEntropySpec, wanted: Wanted, backend: str) -> LinearResults:
    module = _BACKENDS.implementation(backend, operands.x.device, operands.x.dtype)
    with _plain(operands.x):
        return linear.forward(module, _contiguous(operands), spec, wanted)


def _backward(
    dloss: Tensor,
    scale: Tensor | None,
    operands: LinearOperands,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    wanted: Wanted,
    backend: str,
) -> LinearGradients:
    module = _BACKENDS.implementation(backend, operands.x.device, operands.x.dtype)
    with _plain(operands.x):
        found = linear.backward(module, dloss, scale, _contiguous(operands), normaliser, spec, wanted)
    return linear.finish(found, operands)


def _contiguous(operands: LinearOperands) -> LinearOperands:
    """Kernels read labels as a vector without gaps; products take x and weight as they are."""
    return operands._replace(labels=operands.labels.contiguous())


@contextmanager
def _plain(x: Tensor) -> Iterator[None]:
    """Records nothing and casts nothing: under autocast, the operands are cast before."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        yield


def _forward_implementation(x, weight, bias, labels, class_weights, *arguments):
    spec, wanted = CrossEntropySpec(*arguments[:_SPEC]), Wanted(*arguments[_SPEC:-1])
    results = _forward(LinearOperands(x, weight, bias, labels, class_weights), spec, wanted, arguments[-1])
    return [t for t in (*results[:4], *results.gradients) if t is not None]


def _backward_implementation(dloss, scale, x, weight, bias, labels, class_weights, normaliser, *arguments):
    spec, wanted = CrossEntropySpec(*arguments[:_SPEC]), Wanted(*arguments[_SPEC:-1])
    operands = LinearOperands(x, weight, bias, labels, class_weights)
    found = _backward(dloss, scale, operands, normaliser, spec, wanted, arguments[-1])
    return [t for t in found if t is not None]


def _forward_fake(x, weight, bias, labels, class_weights, *arguments):
    spec, wanted = CrossEntropySpec(*arguments[:_SPEC]), Wanted(*arguments[_SPEC:-1])
    dtype, rows = compute_dtype(x.dtype), x.shape[0]
    shapes = [(rows,) if spec.reduction == "none" else ()] * (2 if spec.z_loss else 1)
    shapes += [(rows, 2), ()] if spec.reduction == "mean" else [(rows, 2)]
    dtypes = (x.dtype, linear.weight_sum_dtype(x.dtype), dtype)
    gradients = [t.new_empty(t.shape, dtype=d) for t, d, there in zip((x, weight, bias), dtypes, wanted) if there]
    return [x.new_empty(shape, dtype=dtype) for shape in shapes] + gradients


def _backward_fake(dloss, scale, x, weight, bias, labels, class_weights, normaliser, *arguments):
    wanted = Wanted(*arguments[_SPEC:-1])
    return [t.new_empty(t.shape) for t, there in zip((x, weight, bias), wanted) if there]


def _results(flat: Sequence[Tensor], spec: CrossEntropySpec, wanted: Wanted) -> LinearResults:
    """The flat results of the operator, each in its place."""
    rest = iter(flat)
    loss = next(rest)
    z_loss = next(rest) if spec.z_loss else None
    normaliser = next(rest)
    scale = next(rest) if spec.reduction == "mean" else None
    gradients = LinearGradients(*(next(rest) if there else None for there in wanted))
    return LinearResults(loss, z_loss, normaliser, scale, gradients)


def _forward_flops(x, weight, *rest, **_):
    """The logits, and the gradients of x and weight that are made beside them."""
    wants_x, wants_weight, _, _ = rest[-len(Wanted._fields) - 1 :]
    return (1 + wants_x + wants_weight) * product_flops(*x.shape, weight.shape[0])


def _backward_flops(dloss, scale, *arguments, **_):
    return _forward_flops(*arguments)


for _device in ("CPU", "CUDA"):
    _library.impl("linear_cross_entropy_forward", _forward_implementation, _device)
    _library.impl("linear_cross_entropy_backward", _backward_implementation, _device)
for _name in ("linear_cross_entropy_forward", "linear_cross_entropy_backward"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::linear_cross_entropy_forward", _forward_fake, _library)
dispatch.register_fake("flashtile::linear_cross_entropy_backward", _backward_fake, _library)
register_flops("linear_cross_entropy_forward", _forward_flops)
register_flops("linear_cross_entropy_backward", _backward_flops)
