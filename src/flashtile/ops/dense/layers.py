"""Linear layer and perceptron as autograd records them, the operators between their matrix products, and the products.

The products are PyTorch's own on every device (cuBLAS on an NVIDIA GPU), each in one place, and stay visible to what
reads a graph or counts FLOPs. A bias joins its product in cuBLAS's epilogue, and so does what is added to an input's
gradient; both cost no pass over memory and are rounded once.
"""

from __future__ import annotations

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
    elif dispatch.recorded((x, weight, bias)):
        if torch.compiler.is_compiling():
            x, weight, bias, main_grad = dispatch.distinct((x, weight, bias, main_grad))  # type: ignore[assignment]
        results = _apply_dense(x, weight, bias, main_grad, return_residual, backend)
        return results if return_residual else (results, x)
    return F.linear(x, weight, bias), x


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
    if dispatch.recorded(operands):
        tensors: Any = (*operands, *main_grads)
        if torch.compiler.is_compiling():
            tensors = dispatch.distinct(tensors)
        results = _apply_mlp(*tensors, *spec, checkpoint_level, return_residual, backend)
        return results if return_residual else (results, x)
    hidden = _activate(F.linear(x, weight1, bias1), spec, backend)
    return F.linear(hidden, weight2, bias2), x


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
        out = F.linear(x, weight, bias)
        return (out, x) if return_residual else out

    @staticmethod
    def backward(ctx, *upstream):
        dout, dresidual = upstream if len(upstream) == 2 else (upstream[0], None)
        if dout is None:
            return dresidual, None, None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, backend = ctx.scalars
        with dispatch.without_autocast(dout):
            dout, backend = dout.contiguous(), _backward_backend(backend, dout, ctx.main_grad)
            dx = _input_gradient(dout, weight, dresidual) if wants_x else None
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
        pre = F.linear(x, weight1, bias1)
        hidden = _activate(pre, spec, backend)
        wanted = MlpOperands(*ctx.needs_input_grad[:5])
        keeps_pre, keeps_hidden = checkpoint_level < 2, checkpoint_level < 1 and wanted.weight2
        kept = (pre if keeps_pre else None, hidden if keeps_hidden else None)
        ctx.save_for_backward(x, weight1, bias1, weight2, *kept)
        ctx.main_grads = tuple(main_grads)
        ctx.scalars = wanted, spec, backend
        ctx.set_materialize_grads(False)
        out = F.linear(hidden, weight2, bias2)
        return (out, x) if return_residual else out

    @staticmethod
    def backward(ctx, *upstream):
        dout, dresidual = upstream if len(upstream) == 2 else (upstream[0], None)
        if dout is None:
            return dresidual, *(None,) * 11
        wanted, spec, backend = ctx.scalars
        backend = _backward_backend(backend, dout, *ctx.main_grads)
        with dispatch.without_autocast(dout):
            grads = _mlp_backward(
                dout.contiguous(), dresidual, ctx.saved_tensors, ctx.main_grads, spec, wanted, backend
            )
        return *grads, *(None,) * 7


_apply_dense, _apply_mlp = map(dispatch.direct_apply, (_Dense, _Mlp))


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
        pre = F.linear(x, weight1, bias1)
    dpre: Any = None
    dbias1 = None
    if wants_pre:
        dhidden = _input_gradient(dout, weight2)
        dpre, dbias1, made = _activate_backward(dhidden, pre, spec, wanted.bias1, wants_hidden, backend)
        del dhidden
        hidden = made if wants_hidden else hidden
    elif wants_hidden:
        hidden = _activate(pre, spec, backend)
    return (
        _input_gradient(dpre, weight1, dresidual) if wanted.x else None,
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
