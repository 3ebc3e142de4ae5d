"""The operators: torch.library schemas, fakes and implementations, and the only autograd code of linear layers.

Operators are what lies between the matrix products. The products themselves are PyTorch's, and stay visible to what
reads a graph or counts FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.flops import product_flops, register_flops
from flashtile.ops.dense import products, reference
from flashtile.ops.dense.spec import ActivationGradients, ActivationSpec

_BACKENDS = standard_backends("dense")

_library = torch.library.Library("flashtile", "FRAGMENT")
_library.define("dense_activate(Tensor pre, str activation, bool gated, str backend) -> Tensor")
_library.define(
    "dense_activate_backward(Tensor dhidden, Tensor pre, str activation, bool gated, bool wants_bias, "
    "bool wants_hidden, str backend) -> Tensor[]"
)
_library.define("dense_column_sum(Tensor x, str backend) -> Tensor")
_library.define("dense_accumulate(Tensor(a!) main_grad, Tensor dout, Tensor x) -> ()")
_activate_op = torch.ops.flashtile.dense_activate.default
_activate_backward_op = torch.ops.flashtile.dense_activate_backward.default
_column_sum_op = torch.ops.flashtile.dense_column_sum.default
_accumulate_op = torch.ops.flashtile.dense_accumulate.default

#: In the place of a backend: PyTorch's operations, which autograd records, for derivatives of the backward.
_RECORDED = "recorded"


class MlpOperands(NamedTuple):
    """The tensors of a perceptron call: x `[R, K]`, weight1 `[F, K]` (gated `[2F, K]`), weight2 `[N, F]`, biases."""

    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None


def run_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, return_residual: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, x), recorded by autograd where a gradient is wanted; x `[R, K]` takes its gradient in the backward."""
    if dispatch.transformed():
        _refuse_under_transforms(backend, main_grad)
    elif torch.is_grad_enabled() and _wants_gradient((x, weight, bias)):
        if torch.compiler.is_compiling():
            x, weight, bias, main_grad = dispatch.distinct((x, weight, bias, main_grad))  # type: ignore[assignment]
        results = _Dense.apply(x, weight, bias, main_grad, return_residual, backend)
        return results if return_residual else (results, x)
    return products.linear(x, weight, bias), x


def run_mlp(
    operands: MlpOperands,
    main_grads: tuple[Tensor | None, Tensor | None],
    spec: ActivationSpec,
    checkpoint_level: int,
    return_residual: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, x), as `run_dense`."""
    x, weight1, bias1, weight2, bias2 = operands
    if dispatch.transformed():
        _refuse_under_transforms(backend, *main_grads)
        return reference.mlp(x, weight1, bias1, weight2, bias2, spec), x
    if torch.is_grad_enabled() and _wants_gradient(operands):
        tensors: Any = (*operands, *main_grads)
        if torch.compiler.is_compiling():
            tensors = dispatch.distinct(tensors)
        results = _Mlp.apply(*tensors, *spec, checkpoint_level, return_residual, backend)
        return results if return_residual else (results, x)
    hidden = _activate(products.linear(x, weight1, bias1), spec, backend)
    return products.linear(hidden, weight2, bias2), x


def _wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    for tensor in tensors:  # noqa: SIM110 - a generator takes twice the time
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _refuse_under_transforms(backend: str, *main_grads: Tensor | None) -> None:
    dispatch.refuse_named_backend(backend)
    if any(main_grad is not None for main_grad in main_grads):
        raise ValueError(
            "main_grad: expected None under torch.func transforms, got a tensor; they take no side effects"
        )


def run_weight_gradient(
    x: Tensor, dout: Tensor, main_grad: Tensor | None, bias: bool, backend: str
) -> tuple[Tensor, Tensor | None]:
    """(dweight, dbias); dweight is main_grad where there is one."""
    dweight = _weight_gradient(dout, x, main_grad)
    if dweight is None:
        assert main_grad is not None
        dweight = main_grad
    return dweight, _column_sum(dout, backend) if bias else None


class _Dense(torch.autograd.Function):
    """The linear layer recorded for a backward. Returns out, and x where a gradient comes back through it."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, return_residual, backend):
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        # Others write to it between forward and backward, which autograd takes for a mistake in what it saves.
        ctx.main_grad = main_grad
        ctx.scalars = wants_x, wants_weight, wants_bias, backend
        ctx.set_materialize_grads(False)
        out = products.linear(x, weight, bias)
        return (out, x) if return_residual else out

    @staticmethod
    def backward(ctx, *upstream):
        dout, dresidual = upstream if len(upstream) == 2 else (upstream[0], None)
        if dout is None:
            return dresidual, None, None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, backend = ctx.scalars
        with _without_autocast(dout):
            dout, backend = dout.contiguous(), _backward_backend(backend, dout, ctx.main_grad)
            dx = products.input_gradient(dout, weight, dresidual) if wants_x else None
            dweight = _weight_gradient(dout, x, ctx.main_grad) if wants_weight else None
            dbias = _column_sum(dout, backend) if wants_bias else None
        return dx, dweight, dbias, None, None, None


class _Mlp(torch.autograd.Function):
    """The perceptron recorded for a backward. Returns as `_Dense`."""

    @staticmethod
    def forward(ctx, *arguments):
        x, weight1, bias1, weight2, bias2, *main_grads = arguments[:7]
        activation, gated, checkpoint_level, return_residual, backend = arguments[7:]
        spec = ActivationSpec(activation, gated)
        pre = products.linear(x, weight1, bias1)
        hidden = _activate(pre, spec, backend)
        wanted = MlpOperands(*ctx.needs_input_grad[:5])
        keeps_pre, keeps_hidden = checkpoint_level < 2, checkpoint_level < 1 and wanted.weight2
        kept = (pre if keeps_pre else None, hidden if keeps_hidden else None)
        ctx.save_for_backward(x, weight1, bias1, weight2, *kept)
        ctx.main_grads = tuple(main_grads)
        ctx.scalars = wanted, spec, backend
        ctx.set_materialize_grads(False)
        out = products.linear(hidden, weight2, bias2)
        return (out, x) if return_residual else out

    @staticmethod
    def backward(ctx, *upstream):
        dout, dresidual = upstream if len(upstream) == 2 else (upstream[0], None)
        if dout is None:
            return dresidual, *(None,) * 11
        wanted, spec, backend = ctx.scalars
        backend = _backward_backend(backend, dout, *ctx.main_grads)
        with _without_autocast(dout):
            grads = _mlp_backward(
                dout.contiguous(),
                dresidual,
                ctx.saved_tensors,
                ctx.main_grads,
                spec,
                wanted,
                backend,
            )
        return *grads, *(None,) * 7


def _mlp_backward(
    dout: Tensor,
    dresidual: Tensor | None,
    saved: tuple[Any, ...],
    main_grads: tuple[Tensor | None, Tensor | None],
    spec: ActivationSpec,
    wanted: Any,
    backend: str,
) -> tuple[Tensor | None, ...]:
    """The gradients in the order of `MlpOperands`, of those that are wanted."""
    x, weight1, bias1, weight2, pre, hidden = saved
    if backend == _RECORDED:
        pre = hidden = None  # what was saved of them does not lead back to the operands
    wants_pre, wants_hidden = wanted.x or wanted.weight1 or wanted.bias1, wanted.weight2 and hidden is None
    if pre is None and (wants_pre or wants_hidden):
        pre = products.linear(x, weight1, bias1)
    dpre: Any = None
    dbias1 = None
    if wants_pre:
        dhidden = products.input_gradient(dout, weight2)
        dpre, dbias1, made = _activate_backward(dhidden, pre, spec, wanted.bias1, wants_hidden, backend)
        del dhidden
        hidden = made if wants_hidden else hidden
    elif wants_hidden:
        hidden = _activate(pre, spec, backend)
    return (
        products.input_gradient(dpre, weight1, dresidual) if wanted.x else None,
        _weight_gradient(dpre, x, main_grads[0]) if wanted.weight1 else None,
        dbias1,
        _weight_gradient(dout, hidden, main_grads[1]) if wanted.weight2 else None,
        _column_sum(dout, backend) if wanted.bias2 else None,
    )


def _backward_backend(backend: str, dout: Tensor, *main_grads: Tensor | None) -> str:
    """The backend of a backward: PyTorch's operations under `create_graph=True`, because autograd can record them, and
    for gradients that come several at a time."""
    several = dispatch.batched(dout)
    if not several and (not torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return backend
    if any(main_grad is not None for main_grad in main_grads):
        asked, why = ("is_grads_batched", "takes one gradient") if several else ("create_graph", "has no derivative")
        raise ValueError(f"main_grad: expected None under {asked}=True, got a tensor; an addition to it {why}")
    return _RECORDED


def _without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Gradients keep the dtypes of the forward, wherever the backward is called."""
    if (tensor.is_cuda or tensor.is_cpu) and torch.is_autocast_enabled(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return nullcontext()


# --- the steps between the products ---------------------------------------------------------------------------------


def _activate(pre: Tensor, spec: ActivationSpec, backend: str) -> Tensor:
    if backend == _RECORDED:
        return reference.activate(pre, spec)
    if dispatch.unobserved(pre):
        return _module(pre, backend).activate(pre, spec)
    return _activate_op(pre, *spec, backend)


def _activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool, backend: str
) -> ActivationGradients:
    if backend == _RECORDED:
        return reference.activate_backward(dhidden, pre, spec, wants_bias, wants_hidden)
    if dispatch.unobserved(dhidden, pre):
        return _module(pre, backend).activate_backward(dhidden, pre, spec, wants_bias, wants_hidden)
    results = _activate_backward_op(dhidden, pre, *spec, wants_bias, wants_hidden, backend)
    return ActivationGradients(results[0], results[1] if wants_bias else None, results[-1] if wants_hidden else None)


def _column_sum(x: Tensor, backend: str) -> Tensor:
    if backend == _RECORDED:
        return reference.column_sum(x)
    if dispatch.unobserved(x):
        return _module(x, backend).column_sum(x)
    return _column_sum_op(x, backend)


def _weight_gradient(dout: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The weight's gradient, or None after it was added to main_grad."""
    if main_grad is None:
        return products.weight_gradient(dout, x)
    if dispatch.unobserved(dout, x, main_grad):
        products.accumulate_weight_gradient(main_grad, dout, x)
    else:
        _accumulate_op(main_grad, dout, x)
    return None


def _module(x: Tensor, backend: str) -> Any:
    return _BACKENDS.implementation(backend, x.device, x.dtype)


def _activate_implementation(pre, activation, gated, backend):
    with torch.no_grad():
        return _module(pre, backend).activate(pre.contiguous(), ActivationSpec(activation, gated))


def _activate_backward_implementation(dhidden, pre, activation, gated, wants_bias, wants_hidden, backend):
    spec = ActivationSpec(activation, gated)
    with torch.no_grad():
        results = _module(pre, backend).activate_backward(
            dhidden.contiguous(), pre.contiguous(), spec, wants_bias, wants_hidden
        )
    return [tensor for tensor in results if tensor is not None]


def _column_sum_implementation(x, backend):
    with torch.no_grad():
        return _module(x, backend).column_sum(x.contiguous())


def _accumulate_implementation(main_grad, dout, x):
    with torch.no_grad():
        products.accumulate_weight_gradient(main_grad, dout, x)


def _activate_fake(pre, activation, gated, backend):
    return pre.new_empty(pre.shape[0], ActivationSpec(activation, gated).width(pre.shape[1]))


def _activate_backward_fake(dhidden, pre, activation, gated, wants_bias, wants_hidden, backend):
    results = [pre.new_empty(pre.shape)]
    if wants_bias:
        results.append(pre.new_empty(pre.shape[1]))
    if wants_hidden:
        results.append(pre.new_empty(dhidden.shape))
    return results


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "dense_activate": (_activate_implementation, _activate_fake),
    "dense_activate_backward": (_activate_backward_implementation, _activate_backward_fake),
    "dense_column_sum": (_column_sum_implementation, lambda x, backend: x.new_empty(x.shape[1])),
    "dense_accumulate": (_accumulate_implementation, lambda main_grad, dout, x: None),
}
for _name, (_implementation, _fake) in _IMPLEMENTATIONS.items():
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _device)
    # Autograd is recorded above the operators, by the functions here, and never inside (see the implementations).
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    dispatch.register_fake(f"flashtile::{_name}", _fake, _library)
# The other products are PyTorch's own operators.
register_flops("dense_accumulate", lambda main_grad, dout, x, **_: product_flops(dout.shape[1], *x.shape))
