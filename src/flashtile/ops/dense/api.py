"""The public linear layers: what a user calls. They check, flatten to rows, and hand on to the operators."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, overload

import torch
from torch import Tensor

from flashtile.ops.common import dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.dense import checks
from flashtile.ops.dense.operator import MlpOperands, run_dense, run_mlp, run_weight_gradient

_BACKENDS = standard_backends("dense")

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class LayerOptions(TypedDict, total=False):
        """Optional arguments of `fused_dense`, for type checkers: `return_residual` says what a call returns."""

        main_grad: Tensor | None
        backend: str

    class MlpOptions(TypedDict, total=False):
        """Those of `fused_mlp`."""

        activation: str
        gated: bool
        checkpoint_level: int
        main_grad1: Tensor | None
        main_grad2: Tensor | None
        backend: str


@overload
def fused_dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[LayerOptions],
) -> Tensor: ...


@overload
def fused_dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[LayerOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def fused_dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_residual: bool = False,
    **options: Unpack[LayerOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def fused_dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    return_residual: bool = False,
    main_grad: Tensor | None = None,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear layer, `x weightᵀ + bias`, with few passes over memory in its backward.

    The matrix products are PyTorch's. The gradient of the bias takes one pass over the gradient of the result, and is
    summed in float32. Under `torch.autocast` the operands are cast as in `torch.nn.functional.linear`.

    Args:
        x: `[..., in]`; float16, bfloat16, float32, or float64 (CPU and reference only).
        weight: `[out, in]` in x's dtype.
        bias: `[out]` in x's dtype, or None for 0.
        return_residual: also return x. The gradient that comes back through it is added inside the product that
            computes the gradient of x, without a pass of its own.
        main_grad: `[out, in]` in x's dtype, or in float32: the backward adds the weight's gradient to it, and
            `weight.grad` stays as it is.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend for everything except matrix
            products, or raise.

    Returns:
        `[..., out]` in x's dtype; with return_residual `(out, x)`.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, or the named backend cannot serve the call.
    """
    if other_names:
        refuse_other_names(fused_dense, other_names)
    _BACKENDS.check(backend)
    checks.raise_not_bool(return_residual=return_residual)
    checks.check_input("x", x)
    given = x
    x, weight, bias = _cast((x, weight, bias))
    checks.check_weight("weight", weight, x, x.shape[-1])
    checks.check_bias("bias", bias, x, weight)
    checks.check_main_grad("main_grad", main_grad, weight.shape, x)
    checks.check_accumulates("main_grad", main_grad, weight)
    if dtensor.present(x, weight, bias, main_grad):
        checks.check_no_main_grad(main_grad=main_grad)
        out = dtensor.call(
            lambda division, x, weight, bias: fused_dense(x, weight, division.once("i", bias), backend=backend),
            {"x": (x, "*i"), "weight": (weight, "oi"), "bias": (bias, "o")}, "*o", ("weight", "bias"),
        )  # fmt: skip
        return (out, given) if return_residual else out
    _check_backend(x, backend)
    # A residual of another dtype than the products' keeps its own, and its gradient is added outside of them.
    within = return_residual and x is given
    out, residual = run_dense(_rows(x), weight, bias, main_grad, within, backend)
    out = _shaped(out, x)
    if not return_residual:
        return out
    return out, _shaped(residual, x) if within else given


@overload
def fused_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[MlpOptions],
) -> Tensor: ...


@overload
def fused_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    return_residual: Literal[True],
    **options: Unpack[MlpOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def fused_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    return_residual: bool = False,
    **options: Unpack[MlpOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def fused_mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    activation: str = "gelu_tanh",
    gated: bool = False,
    checkpoint_level: int = 0,
    return_residual: bool = False,
    main_grad1: Tensor | None = None,
    main_grad2: Tensor | None = None,
    backend: str = "auto",
    **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear layer, activation, linear layer: `act(x weight1ᵀ + bias1) weight2ᵀ + bias2`.

    The matrix products are PyTorch's. Between them the forward makes one pass over memory, and so does the backward.
    The pass of the backward computes the gradient of the activation, the gradient of bias1 and, if it was not kept, the
    activation itself.

    With `gated=True` the first layer computes values and gates, as in `torch.nn.functional.glu`: its first F rows are
    the values, its last F rows the gates, and `hidden = values · act(gates)`. With "silu" this is SwiGLU, with "gelu"
    or "gelu_tanh" GEGLU, with "relu" ReGLU.

    Args:
        x: `[..., in]`; float16, bfloat16, float32, or float64 (CPU and reference only).
        weight1: `[F, in]`, gated `[2F, in]`, in x's dtype.
        bias1: `[F]`, gated `[2F]`, or None for 0.
        weight2: `[out, F]`.
        bias2: `[out]`, or None for 0.
        activation: "gelu_tanh" (the tanh approximation), "gelu", "relu", "squared_relu" or "silu".
        gated: see above.
        checkpoint_level: what is kept for the backward in addition to the operands: 0 = the results of the first
            product and of the activation, 1 = the result of the first product, 2 = neither, so that the first product
            runs again.
        return_residual: as for `fused_dense`.
        main_grad1: buffer for the gradient of weight1, as `main_grad` of `fused_dense`.
        main_grad2: buffer for the gradient of weight2.
        backend: as for `fused_dense`.

    Returns:
        `[..., out]` in x's dtype; with return_residual `(out, x)`.

    Raises:
        TypeError, ValueError: as `fused_dense`.

    Reference:
        Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    if other_names:
        refuse_other_names(fused_mlp, other_names)
    _BACKENDS.check(backend)
    checks.raise_not_bool(return_residual=return_residual)
    spec = checks.resolve_activation(activation, gated)
    level = checks.resolve_checkpoint_level(checkpoint_level)
    checks.check_input("x", x)
    given = x
    x, weight1, bias1, weight2, bias2 = _cast((x, weight1, bias1, weight2, bias2))
    checks.check_weight("weight1", weight1, x, x.shape[-1])
    checks.check_bias("bias1", bias1, x, weight1)
    checks.check_weight("weight2", weight2, x)
    checks.check_mlp_shapes(weight1, weight2, spec)
    checks.check_bias("bias2", bias2, x, weight2)
    for name, main_grad, weight in (("main_grad1", main_grad1, weight1), ("main_grad2", main_grad2, weight2)):
        checks.check_main_grad(name, main_grad, weight.shape, x)
        checks.check_accumulates(name, main_grad, weight)
    if dtensor.present(x, weight1, bias1, weight2, bias2, main_grad1, main_grad2):
        checks.check_no_main_grad(main_grad1=main_grad1, main_grad2=main_grad2)
        hidden = "." if gated else "h"  # a shard of weight1 has the values of some features and the gates of others
        out = dtensor.call(
            lambda division, x, weight1, bias1, weight2, bias2: fused_mlp(
                x, weight1, bias1, weight2, division.once("h", bias2), activation=activation, gated=gated,
                checkpoint_level=level, backend=backend,
            ),
            {
                "x": (x, "*."), "weight1": (weight1, hidden + "."), "bias1": (bias1, hidden),
                "weight2": (weight2, "." + hidden), "bias2": (bias2, "."),
            },
            "*.", ("weight1", "bias1", "weight2", "bias2"),
        )  # fmt: skip
        return (out, given) if return_residual else out
    _check_backend(x, backend)
    within = return_residual and x is given
    operands = MlpOperands(_rows(x), weight1, bias1, weight2, bias2)
    out, residual = run_mlp(operands, (main_grad1, main_grad2), spec, level, within, backend)
    out = _shaped(out, x)
    if not return_residual:
        return out
    return out, _shaped(residual, x) if within else given


def linear_bias_wgrad(
    x: Tensor, dout: Tensor, *, main_grad: Tensor | None = None, bias: bool = True, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias of a linear layer `x weightᵀ + bias`: `doutᵀ x`, and the sum of dout over rows.

    For a backward of your own. The function has no derivative, and raises if autograd would need one.

    Args:
        x: `[..., in]`, the layer's input; dtypes as for `fused_dense`.
        dout: `[..., out]` in x's dtype, the gradient of the layer's result.
        main_grad: `[out, in]` in x's dtype, or in float32: the weight's gradient is added to it. A float32 buffer
            receives the products of 16-bit operands before they are rounded; on a CPU this copies both operands.
        bias: also compute the gradient of the bias.
        backend: as for `fused_dense`.

    Returns:
        dweight `[out, in]`, which is main_grad itself if given, and dbias `[out]` in x's dtype, or None.

    Raises:
        TypeError, ValueError: as `fused_dense`.
    """
    _BACKENDS.check(backend)
    checks.raise_not_bool(bias=bias)
    checks.check_input("x", x)
    checks.check_dout(dout, x)
    checks.check_no_gradient(x=x, dout=dout)
    checks.check_main_grad("main_grad", main_grad, (dout.shape[-1], x.shape[-1]), x)
    if dtensor.present(x, dout, main_grad):
        checks.check_no_main_grad(main_grad=main_grad)
        return dtensor.call(
            lambda _, x, dout: linear_bias_wgrad(x, dout, bias=bias, backend=backend),
            {"x": (x, "*i"), "dout": (dout, "*o")}, ("oi", "o"), complete="io",
        )  # fmt: skip
    _check_backend(x, backend)
    return run_weight_gradient(_rows(x), _rows(dout).contiguous(), main_grad, bias, backend)


def _rows(x: Tensor) -> Tensor:
    """x as a matrix of its last dimension."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _shaped(out: Tensor, x: Tensor) -> Tensor:
    """Rows in the shape of those of x."""
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[1])


def _cast(operands: Iterable[Tensor | None]) -> list[Any]:
    """The operands as `torch.autocast` wants them, where it is active; it leaves float64 alone."""
    tensors: list[Any] = list(operands)
    x = tensors[0]
    kind = x.device.type
    if not ((x.is_cuda or x.is_cpu) and torch.is_autocast_enabled(kind)):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if _castable(t, x.device) else t for t in tensors]


def _castable(tensor: object, device: torch.device) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.device == device
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


def _check_backend(x: Tensor, backend: str) -> None:
    """Raises where a backend cannot serve the call, also where the call has nothing for it to do.

    A graph that is being traced meets the same choice in its operators.
    """
    if (x.is_cuda or x.is_cpu) and not torch.compiler.is_compiling():
        _BACKENDS.implementation(backend, x.device, x.dtype)
