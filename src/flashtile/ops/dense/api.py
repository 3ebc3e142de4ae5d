"""The public linear layers: what a user calls. They check, flatten to rows, and hand on to `layers`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks, dispatch, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.repeated import call_table, expander
from flashtile.ops.common.rows import as_rows
from flashtile.ops.dense.layers import Layers, run_layers, run_weight_gradient
from flashtile.ops.dense.spec import ACTIVATIONS, NO_ACTIVATION, ActivationSpec

_BACKENDS = standard_backends("dense")
_CALLS = call_table()
#: The shape of an input, and what to do if it has no dimension.
_FEATURES = "(..., features)", "give it a last dimension"
_CAST = "cast one of them, or use torch.autocast"


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
    tensors = Layers(x, weight, bias, main_grad1=main_grad)
    scalars = (return_residual, backend, torch.is_grad_enabled())
    found = _run_repeated(tensors, scalars)
    if found is not None:
        return found
    _BACKENDS.check(backend)
    checks.raise_not_bool(return_residual=return_residual)
    checks.check_input("x", x, *_FEATURES)
    given = x
    x, weight, bias = dispatch.autocast((x, weight, bias))
    _check_weight("weight", weight, x, x.shape[-1])
    _check_bias("bias", bias, x, weight)
    _check_main_grad("main_grad", main_grad, weight.shape, x)
    _check_accumulates("main_grad", main_grad, weight)
    if dtensor.present(x, weight, bias, main_grad):
        _check_no_main_grad(main_grad=main_grad)
        out = dtensor.call(
            lambda division, x, weight, bias: fused_dense(x, weight, division.once("i", bias), backend=backend),
            {"x": (x, "*i"), "weight": (weight, "oi"), "bias": (bias, "o")}, "*o", ("weight", "bias"),
        )  # fmt: skip
        return (out, given) if return_residual else out
    _check_backend(x, backend)
    return _run(Layers(x, weight, bias, main_grad1=main_grad), (tensors, scalars), NO_ACTIVATION, 0)


def fused_mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, *,
    activation: str = "gelu_tanh", gated: bool = False, checkpoint_level: int = 0, return_residual: bool = False,
    main_grad1: Tensor | None = None, main_grad2: Tensor | None = None, backend: str = "auto", **other_names: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
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
    tensors = Layers(x, weight1, bias1, weight2, bias2, main_grad1, main_grad2)
    scalars = (return_residual, backend, torch.is_grad_enabled(), activation, gated, checkpoint_level)
    found = _run_repeated(tensors, scalars)
    if found is not None:
        return found
    _BACKENDS.check(backend)
    checks.raise_not_bool(return_residual=return_residual)
    checks.check_choice("activation", activation, tuple(ACTIVATIONS))
    checks.raise_not_bool(gated=gated)
    spec = ActivationSpec(activation, gated)
    if not isinstance(checkpoint_level, int) or isinstance(checkpoint_level, bool) or checkpoint_level not in (0, 1, 2):
        raise ValueError(
            "checkpoint_level: expected 0 (keep all), 1 (make the activation again) or 2 (the first product too), got "
            f"{checkpoint_level!r}"
        )
    checks.check_input("x", x, *_FEATURES)
    given = x
    x, weight1, bias1, weight2, bias2 = dispatch.autocast((x, weight1, bias1, weight2, bias2))
    _check_weight("weight1", weight1, x, x.shape[-1])
    _check_bias("bias1", bias1, x, weight1)
    _check_weight("weight2", weight2, x)
    _check_mlp_shapes(weight1, weight2, spec)
    _check_bias("bias2", bias2, x, weight2)
    for name, main_grad, weight in (("main_grad1", main_grad1, weight1), ("main_grad2", main_grad2, weight2)):
        _check_main_grad(name, main_grad, weight.shape, x)
        _check_accumulates(name, main_grad, weight)
    if dtensor.present(x, weight1, bias1, weight2, bias2, main_grad1, main_grad2):
        _check_no_main_grad(main_grad1=main_grad1, main_grad2=main_grad2)
        hidden = "." if gated else "h"  # a shard of weight1 has the values of some features and the gates of others
        out = dtensor.call(
            lambda division, x, weight1, bias1, weight2, bias2: fused_mlp(
                x, weight1, bias1, weight2, division.once("h", bias2), activation=activation, gated=gated,
                checkpoint_level=checkpoint_level, backend=backend,
            ),
            {
                "x": (x, "*."), "weight1": (weight1, hidden + "."), "bias1": (bias1, hidden),
                "weight2": (weight2, "." + hidden), "bias2": (bias2, "."),
            },
            "*.", ("weight1", "bias1", "weight2", "bias2"),
        )  # fmt: skip
        return (out, given) if return_residual else out
    _check_backend(x, backend)
    layers = Layers(x, weight1, bias1, weight2, bias2, main_grad1, main_grad2)
    return _run(layers, (tensors, scalars), spec, checkpoint_level)


def _run_repeated(tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> Any:
    """The results of a call like an earlier one; None for others, and for all whose operands may be cast."""
    return None if torch._C._is_any_autocast_enabled() else _CALLS.run(tensors, scalars)


def _run(layers: Layers, call: tuple[Layers, Any], spec: ActivationSpec, checkpoint_level: int) -> Any:
    """Runs a call that was checked. `layers`: its tensors as `torch.autocast` gives them; `call`: its tensors and its
    scalars, the first of which are return_residual and backend."""
    (given, *_), (return_residual, backend, *_) = call
    if all(one is other for one, other in zip(layers, call[0])):
        expand = expander([tensor is not None for tensor in layers])
        more = spec, checkpoint_level, return_residual, backend
        _CALLS.keep_call(*call, lambda present: _shaped(Layers(*expand((None, *present))), *more))
        return _shaped(layers, *more)
    # A residual of another dtype than the products' keeps its own, and its gradient is added outside of them.
    within = return_residual and layers.x is given
    found = _shaped(layers, spec, checkpoint_level, within, backend)
    return (found, given) if return_residual and not within else found


def _shaped(
    layers: Layers, spec: ActivationSpec, checkpoint_level: int, return_residual: bool, backend: str
) -> Tensor | tuple[Tensor, Tensor]:
    """out, or out and x, with rows in the shape of those of x."""
    x = layers.x
    if x.dim() == 2:
        found = run_layers(layers, spec, checkpoint_level, return_residual, backend)
        return found if return_residual else found[0]
    flat = layers._replace(x=as_rows(x))
    out, rows = run_layers(flat, spec, checkpoint_level, return_residual, backend)
    out = out.view(*x.shape[:-1], out.shape[1])
    return (out, rows.view(x.shape)) if return_residual else out


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
    checks.check_input("x", x, *_FEATURES)
    checks.check_input("dout", dout, *_FEATURES)
    checks.check_like("dout", dout, x, "x")
    checks.check_shape("dout", dout, (*x.shape[:-1], dout.shape[-1]), "with the rows of x")
    if torch.is_grad_enabled():
        for name, tensor in (("x", x), ("dout", dout)):
            checks.check_wants_no_gradient(name, tensor, remedy="detach it, or call under torch.no_grad()")
    _check_main_grad("main_grad", main_grad, (dout.shape[-1], x.shape[-1]), x)
    if dtensor.present(x, dout, main_grad):
        _check_no_main_grad(main_grad=main_grad)
        return dtensor.call(
            lambda _, x, dout: linear_bias_wgrad(x, dout, bias=bias, backend=backend),
            {"x": (x, "*i"), "dout": (dout, "*o")}, ("oi", "o"), complete="io",
        )  # fmt: skip
    _check_backend(x, backend)
    return run_weight_gradient(as_rows(x), as_rows(dout).contiguous(), main_grad, bias, backend)


def _check_backend(x: Tensor, backend: str) -> None:
    """Raises where a backend cannot serve the call, also where the call has nothing for it to do.

    A graph that is being traced meets the same choice in its operators.
    """
    if (x.is_cuda or x.is_cpu) and not torch.compiler.is_compiling():
        _BACKENDS.implementation(backend, x.device, x.dtype)


def _check_weight(name: str, weight: Tensor, x: Tensor, columns: int | None = None) -> None:
    """Checks a matrix; `columns` is the last dimension of x where it multiplies x."""
    checks.check_tensors(**{name: weight})
    if weight.dim() != 2 or columns not in (None, weight.shape[1]):
        wanted = "(rows, columns)" if columns is None else f"(rows, {columns}), the last dimension of x its second"
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(weight.shape)}; transpose or reshape it")
    checks.check_like(name, weight, x, "x", _CAST)


def _check_bias(name: str, bias: Tensor | None, x: Tensor, weight: Tensor) -> None:
    """Checks a vector over the rows of a weight."""
    if bias is None:
        return
    checks.check_shape(name, bias, weight.shape[:1], "one for each row of its weight")
    checks.check_like(name, bias, x, "x", _CAST)


def _check_mlp_shapes(weight1: Tensor, weight2: Tensor, spec: ActivationSpec) -> None:
    """Checks that the layers fit together; both weights are matrices."""
    rows = weight1.shape[0]
    if spec.gated and rows % 2:
        raise ValueError(f"weight1: expected an even number of rows with gated=True, values and then gates, got {rows}")
    if weight2.shape[1] != spec.width(rows):
        raise ValueError(
            f"weight2: expected {spec.width(rows)} columns, the hidden features of weight1 "
            f"{tuple(weight1.shape)} with gated={spec.gated}, got shape {tuple(weight2.shape)}"
        )


def _check_main_grad(name: str, main_grad: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Checks a buffer that takes the gradient of a weight of `shape`, in products of x's dtype."""
    if main_grad is None:
        return
    checks.check_shape(name, main_grad, shape, "that of its weight", "make the buffer of that shape")
    checks.check_device(name, main_grad, x.device, "x")
    if main_grad.dtype is not x.dtype and (main_grad.dtype is not torch.float32 or x.dtype is torch.float64):
        raise TypeError(
            f"{name}: expected the dtype of the products, {x.dtype}, or float32 for narrower ones, got "
            f"{main_grad.dtype}; make the buffer in one of these"
        )
    checks.check_wants_no_gradient(name, main_grad, "buffer")


def _check_accumulates(name: str, main_grad: Tensor | None, weight: Tensor) -> None:
    """Checks that a backward would add to a buffer."""
    if main_grad is not None and torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(
            f"{name}: expected None for a weight that wants no gradient, got a tensor; leave it out, or set "
            "requires_grad on the weight"
        )


def _check_no_main_grad(**buffers: Tensor | None) -> None:
    """Checks that there is no buffer for gradients beside DTensors, whose shards of a batch would have to be summed."""
    checks.refuse("with DTensors", "take the gradient from weight.grad", **buffers)
