"""Linear layer and perceptron as autograd records them, the operators between their matrix products, and the products.

The products are PyTorch's own on every device (cuBLAS on an NVIDIA GPU), each in one place, and stay visible to what
reads a graph or counts FLOPs. A bias joins its product in cuBLAS's epilogue, and so does what is added to an input's
gradient; both cost no pass over memory and are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.ops.common import dispatch
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.flops import product_flops
from flashtile.ops.common.operators import OnBackend, operator
from flashtile.ops.common.rows import compute_dtype
from flashtile.ops.dense import spec as reference
from flashtile.ops.dense.spec import Activated, ActivationGradients, ActivationSpec, ActivationUpstream, Summed, Wanted

_BACKENDS = standard_backends("dense")

#: In the place of a backend: PyTorch's operations, which autograd records, for derivatives of the backward.
_RECORDED = "recorded"


class Layers(NamedTuple):
    """The tensors of a perceptron call: x `[R, K]`, weight1 `[F, K]` (gated `[2F, K]`), weight2 `[N, F]`, biases, and
    what the weights' gradients are added to. A linear layer is the first of both alone."""

    x: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor | None = None
    bias2: Tensor | None = None
    main_grad1: Tensor | None = None
    main_grad2: Tensor | None = None


def run_layers(
    layers: Layers, spec: ActivationSpec, checkpoint_level: int, return_residual: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, x), recorded by autograd where a gradient is wanted; x takes its gradient in the backward."""
    x, weight1, bias1, weight2, bias2, *_ = layers
    if dispatch.transformed():
        _refuse_under_transforms(backend, *layers[5:])
        backend = _RECORDED
    elif dispatch.recorded(layers[:5]):
        tensors = dispatch.distinct(layers) if torch.compiler.is_compiling() else layers
        results = _apply(*tensors, *spec, checkpoint_level, return_residual, backend)
        return results if return_residual else (results, x)
    out = F.linear(x, weight1, bias1)
    return out if weight2 is None else F.linear(_activate(out, spec, backend), weight2, bias2), x


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


class _Layers(torch.autograd.Function):
    """The layers recorded for a backward. Returns out, and x where a gradient comes back through it."""

    @staticmethod
    def forward(ctx, *arguments):
        layers, (activation, gated, checkpoint_level, return_residual, backend) = Layers(*arguments[:7]), arguments[7:]
        x, weight1, bias1, weight2, bias2, *main_grads = layers
        spec, wanted = ActivationSpec(activation, gated), Layers(*ctx.needs_input_grad[:7])
        out = F.linear(x, weight1, bias1)
        if weight2 is None:
            saved = x if wanted.weight1 else None, weight1 if wanted.x else None, None, None, None, None
        else:
            pre, hidden = out, _activate(out, spec, backend)
            keeps_hidden = checkpoint_level < 1 and wanted.weight2
            kept = pre if checkpoint_level < 2 else None, hidden if keeps_hidden else None
            saved = x, weight1, bias1, weight2, *kept
            out = F.linear(hidden, weight2, bias2)
        ctx.save_for_backward(*saved)
        # Others write to these between forward and backward, which autograd takes for a mistake in what it saves.
        ctx.main_grads = main_grads
        ctx.scalars = wanted, spec, backend
        ctx.set_materialize_grads(False)
        return (out, x) if return_residual else out

    @staticmethod
    def backward(ctx, *upstream):
        dout, dresidual = upstream if len(upstream) == 2 else (upstream[0], None)
        if dout is None:
            return dresidual, *(None,) * 11
        (wanted, spec, backend), saved, main_grads = ctx.scalars, ctx.saved_tensors, ctx.main_grads
        x, weight1, _, weight2, *_ = saved
        with dispatch.without_autocast(dout):
            backend = _backward_backend(backend, dout, *main_grads)
            dpre = dout = dout.contiguous()
            of_second = ()
            if weight2 is None:
                dbias1 = _column_sum(dout, backend) if wanted.bias1 else None
            else:
                dpre, dbias1, *of_second = _second_layer(dout, saved, main_grads[1], spec, wanted, backend)
            dx = _input_gradient(dpre, weight1, dresidual) if wanted.x else None
            dweight1 = _weight_gradient(dpre, x, main_grads[0]) if wanted.weight1 else None
        return dx, dweight1, dbias1, *of_second, *(None,) * (9 - len(of_second))


_apply = dispatch.direct_apply(_Layers)


def _second_layer(
    dout: Tensor, saved: Sequence[Any], main_grad: Tensor | None, spec: ActivationSpec, wanted: Any, backend: str
) -> tuple[Tensor | None, ...]:
    """The gradients of pre, bias1, weight2 and bias2, of those that are wanted."""
    x, weight1, bias1, weight2, pre, hidden = saved
    if backend == _RECORDED:
        pre = hidden = None  # what was saved of them does not lead back to the operands
    wants_pre, wants_hidden = wanted.x or wanted.weight1 or wanted.bias1, wanted.weight2 and hidden is None
    if pre is None and (wants_pre or wants_hidden):
        pre = F.linear(x, weight1, bias1)
    dpre = dbias1 = None
    if wants_pre:
        dhidden = _input_gradient(dout, weight2)
        dpre, dbias1, made = _activate_backward(dhidden, pre, spec, wanted.bias1, wants_hidden, backend)
        hidden = made if wants_hidden else hidden
    elif wants_hidden:
        hidden = _activate(pre, spec, backend)
    return (
        dpre,
        dbias1,
        _weight_gradient(dout, hidden, main_grad) if wanted.weight2 else None,
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


# --- the steps between the products, and the products -----------------------------------------------------------------


def _activate(pre: Tensor, spec: ActivationSpec, backend: str) -> Tensor:
    given = Activated(pre)
    return reference.activate(given, spec) if backend == _RECORDED else _activate_operator(given, spec, backend)


def _activate_backward(
    dhidden: Tensor, pre: Tensor, spec: ActivationSpec, wants_bias: bool, wants_hidden: bool, backend: str
) -> ActivationGradients:
    given, wanted = ActivationUpstream(dhidden, pre), Wanted(wants_bias, wants_hidden)
    if backend == _RECORDED:
        return reference.activate_backward(given, spec, wanted)
    return _activate_backward_operator(given, spec, wanted, backend)


def _column_sum(x: Tensor, backend: str) -> Tensor:
    given = Summed(x)
    return reference.column_sum(given) if backend == _RECORDED else _column_sum_operator(given, backend)


def _weight_gradient(dout: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """`doutᵀ x`: `[R, N]`, `[R, K]` -> `[N, K]`, or None after it was added to main_grad."""
    if main_grad is None:
        return torch.mm(dout.t(), x)
    _accumulate_operator(_Accumulated(main_grad, dout, x), "auto")
    return None


def _input_gradient(dout: Tensor, weight: Tensor, summand: Tensor | None = None) -> Tensor:
    """`dout weight + summand`: `[R, N]`, `[N, K]`, `[R, K]` -> `[R, K]`."""
    return torch.mm(dout, weight) if summand is None else torch.addmm(summand, dout, weight)


class _Accumulated(NamedTuple):
    main_grad: Tensor
    dout: Tensor
    x: Tensor


def _accumulate(given: _Accumulated, backend: str) -> None:
    """`main_grad += doutᵀ x`, added up in main_grad's dtype: that of x, or float32. The same on all backends."""
    main_grad, dout, x = given
    if main_grad.dtype is x.dtype:
        main_grad.addmm_(dout.t(), x)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, dout.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # PyTorch has no product of narrow matrices with a wide result on a CPU.
        dtype = compute_dtype(x.dtype)
        main_grad.addmm_(dout.t().to(dtype), x.to(dtype))


_activate_operator = operator(
    "dense_activate",
    Activated,
    (ActivationSpec,),
    Tensor,
    run=OnBackend(_BACKENDS, "activate"),
    fake=lambda given, spec: given.pre.new_empty(given.pre.shape[0], spec.width(given.pre.shape[1])),
    decomposition=reference.activate,
).call
_activate_backward_operator = operator(
    "dense_activate_backward",
    ActivationUpstream,
    (ActivationSpec, Wanted),
    ActivationGradients,
    run=OnBackend(_BACKENDS, "activate_backward"),
    fake=lambda given, spec, wanted: [
        given.pre.new_empty(shape) for shape in (given.pre.shape, given.pre.shape[1:], given.dhidden.shape)
    ],
    present=lambda given, spec, wanted: (True, *wanted),
).call
_column_sum_operator = operator(
    "dense_column_sum",
    Summed,
    (),
    Tensor,
    run=OnBackend(_BACKENDS, "column_sum"),
    fake=lambda given: given.x.new_empty(given.x.shape[1]),
    decomposition=reference.column_sum,
).call
# The other products are PyTorch's own operators.
_accumulate_operator = operator(
    "dense_accumulate",
    _Accumulated,
    (),
    None,
    run=_accumulate,
    writes="main_grad",
    flops=lambda given: product_flops(given.dout.shape[1], *given.x.shape),
).call
