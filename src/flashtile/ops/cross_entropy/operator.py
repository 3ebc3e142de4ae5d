"""The operator: torch.library schemas, fakes and implementations, and the autograd code of the cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.cross_entropy import parallel, reference
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, Results, compute_dtype, gradient_strides

_BACKENDS = standard_backends("cross_entropy")

SPEC_SCHEMA = (
    "float label_smoothing, float logit_scale, float lse_square_scale, int ignore_index, str reduction, bool z_loss, "
    "SymInt first, SymInt vocabulary, str group, float softcap"
)
_GRADIENT_SCHEMA = f"Tensor labels, Tensor? class_weights, Tensor normaliser, {SPEC_SCHEMA}, str backend"
_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define(
    f"cross_entropy_forward(Tensor logits, Tensor labels, Tensor? class_weights, {SPEC_SCHEMA}, str backend)"
    " -> Tensor[]"
)
_library.define(
    f"cross_entropy_backward(Tensor dloss, Tensor? scale, Tensor logits, {_GRADIENT_SCHEMA}) -> Tensor",
)
_library.define(
    f"cross_entropy_backward_(Tensor dloss, Tensor? scale, Tensor(a!) logits, {_GRADIENT_SCHEMA}) -> ()",
)
_forward_op = torch.ops.flashtile.cross_entropy_forward.default
_backward_op = torch.ops.flashtile.cross_entropy_backward.default
_inplace_backward_op = torch.ops.flashtile.cross_entropy_backward_.default

_SPEC = len(CrossEntropySpec._fields)


def run_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec, inplace: bool, backend: str
) -> tuple[Tensor, Tensor | None]:
    """Runs the operator, recorded by autograd where a gradient is wanted. Returns loss and z_loss. `weights`: class
    weights and their sum, `[vocabulary + 1]`."""
    if dispatch.transformed():
        # Under torch.func transforms and forward-mode differentiation, PyTorch's own operations compute the call.
        dispatch.refuse_named_backend(backend)
        refuse_transformed(spec, inplace)
        results = reference.forward(logits, labels, spec, weights)
    elif torch.is_grad_enabled() and logits.requires_grad:
        loss, *z_loss = _CrossEntropy.apply(logits, labels, weights, *spec, inplace, backend)
        return loss, z_loss[0] if z_loss else None
    else:
        results = _run_forward(logits, labels, weights, spec, backend)
    return results.loss, results.z_loss


def refuse_transformed(spec: CrossEntropySpec, inplace: bool) -> None:
    if spec.group:
        raise ValueError("process_group: expected None under torch.func transforms, which know no communication")
    if inplace:
        raise ValueError("inplace_backward: expected False under torch.func transforms, which may use the logits again")


def _run_forward(
    logits: Tensor, labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec, backend: str
) -> Results:
    if dispatch.unobserved(logits, labels, weights):
        return _forward(logits, labels, weights, spec, backend)
    return _results(_forward_op(logits, labels, weights, *spec, backend), spec)


class _CrossEntropy(torch.autograd.Function):
    """The forward pass recorded for a backward. Returns the loss, and z_loss where it is asked for."""

    @staticmethod
    def forward(ctx, logits, labels, weights, *arguments):
        spec, inplace, backend = CrossEntropySpec(*arguments[:_SPEC]), arguments[-2], arguments[-1]
        results = _run_forward(logits, labels, weights, spec, backend)
        ctx.save_for_backward(logits, labels, weights, results.normaliser, results.scale)
        ctx.scalars = spec, inplace, backend
        ctx.spent = False
        if results.z_loss is None:
            return (results.loss,)
        ctx.mark_non_differentiable(results.z_loss)
        return results.loss, results.z_loss

    @staticmethod
    def backward(ctx, dloss, *rest):
        spec, inplace, backend = ctx.scalars
        compiling = torch.compiler.is_compiling()
        if inplace and ctx.spent:
            raise RuntimeError(
                "inplace_backward: expected one backward, got a second one: the first has written over the logits; "
                "use inplace_backward=False"
            )
        logits, labels, weights, normaliser, scale = ctx.saved_tensors
        if dispatch.batched(dloss):
            dlogits = reference.backward(dloss, scale, logits, labels, normaliser, spec, weights=weights)
        elif torch.is_grad_enabled() and not compiling:
            refuse_second_order(spec, inplace)
            dlogits = reference.differentiable_backward(dloss, logits, labels, spec, weights)
        elif not inplace:
            dlogits = _run_backward(dloss, scale, logits, labels, weights, normaliser, spec, backend)
        else:
            ctx.spent = not compiling
            dlogits = _run_inplace_backward(dloss, scale, logits.detach(), labels, weights, normaliser, spec, backend)
        return dlogits, None, None, *(None,) * (_SPEC + 2)


def refuse_second_order(spec: CrossEntropySpec, inplace: bool) -> None:
    if inplace:
        raise RuntimeError(
            "inplace_backward: expected a backward without create_graph, which needs the logits again; "
            "use inplace_backward=False"
        )
    if spec.group:
        raise RuntimeError(
            "process_group: expected a backward without create_graph; second derivatives need the whole vocabulary"
        )


def _run_backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    backend: str,
) -> Tensor:
    if dispatch.unobserved(dloss, logits, labels, weights):
        return _backward(dloss, scale, logits, labels, weights, normaliser, spec, backend, False)
    return _backward_op(dloss, scale, logits, labels, weights, normaliser, *spec, backend)


def _run_inplace_backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    backend: str,
) -> Tensor:
    if dispatch.unobserved(dloss, logits, labels, weights):
        _backward(dloss, scale, logits, labels, weights, normaliser, spec, backend, True)
        # Whoever saved the logits too, and reads them after this, hears of it from autograd.
        torch.autograd.graph.increment_version(logits)
    else:
        _inplace_backward_op(dloss, scale, logits, labels, weights, normaliser, *spec, backend)
    return logits


def _forward(logits: Tensor, labels: Tensor, weights: Tensor | None, spec: CrossEntropySpec, backend: str) -> Results:
    module = _BACKENDS.implementation(backend, logits.device, logits.dtype)
    return parallel.forward(module, logits, labels.contiguous(), spec, weights)


def _backward(
    dloss: Tensor,
    scale: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    normaliser: Tensor,
    spec: CrossEntropySpec,
    backend: str,
    inplace: bool,
) -> Tensor:
    module = _BACKENDS.implementation(backend, logits.device, logits.dtype)
    return module.backward(dloss, scale, logits, labels.contiguous(), normaliser, spec, inplace, weights)


def _forward_implementation(logits, labels, weights, *arguments):
    with torch.no_grad():
        results = _forward(logits, labels, weights, CrossEntropySpec(*arguments[:_SPEC]), arguments[-1])
    return [t for t in results if t is not None]


def _backward_implementation(dloss, scale, logits, labels, weights, normaliser, *arguments):
    with torch.no_grad():
        spec = CrossEntropySpec(*arguments[:_SPEC])
        dlogits = _backward(dloss, scale, logits, labels, weights, normaliser, spec, arguments[-1], False)
        strides = gradient_strides(logits)
        if dlogits.stride() == strides:
            return dlogits
        return logits.new_empty_strided(logits.shape, strides).copy_(dlogits)


def _inplace_backward_implementation(dloss, scale, logits, labels, weights, normaliser, *arguments):
    with torch.no_grad():
        spec = CrossEntropySpec(*arguments[:_SPEC])
        _backward(dloss, scale, logits, labels, weights, normaliser, spec, arguments[-1], True)


def _forward_fake(logits, labels, weights, *arguments):
    spec = CrossEntropySpec(*arguments[:_SPEC])
    rows = logits.shape[0]
    shapes = [(rows,) if spec.reduction == "none" else ()] * (2 if spec.z_loss else 1)
    shapes += [(rows, 2), ()] if spec.reduction == "mean" else [(rows, 2)]
    return [logits.new_empty(shape, dtype=compute_dtype(logits.dtype)) for shape in shapes]


def _backward_fake(dloss, scale, logits, *rest):
    return logits.new_empty_strided(logits.shape, gradient_strides(logits))


def _results(flat: Sequence[Tensor], spec: CrossEntropySpec) -> Results:
    """The flat results of the operator, each in its place."""
    z_loss = flat[1] if spec.z_loss else None
    normaliser = flat[2] if spec.z_loss else flat[1]
    return Results(flat[0], z_loss, normaliser, flat[-1] if spec.reduction == "mean" else None)


for _device in ("CPU", "CUDA"):
    _library.impl("cross_entropy_forward", _forward_implementation, _device)
    _library.impl("cross_entropy_backward", _backward_implementation, _device)
    _library.impl("cross_entropy_backward_", _inplace_backward_implementation, _device)
for _name in ("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_backward_"):
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
dispatch.register_fake("flashtile::cross_entropy_forward", _forward_fake, _library)
dispatch.register_fake("flashtile::cross_entropy_backward", _backward_fake, _library)
dispatch.register_fake("flashtile::cross_entropy_backward_", lambda *arguments: None, _library)
