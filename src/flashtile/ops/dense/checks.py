"""Checks of user input at the public edge: each error names argument, expectation, what came and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.ops.common.checks import (
    check_choice,
    check_device,
    check_float_dtype,
    check_tensors,
    raise_not_bool,
)
from flashtile.ops.common.sizes import differ
from flashtile.ops.dense.spec import ACTIVATIONS, ActivationSpec

__all__ = [
    "check_accumulates",
    "check_bias",
    "check_choice",
    "check_dout",
    "check_input",
    "check_main_grad",
    "check_mlp_shapes",
    "check_no_gradient",
    "check_no_main_grad",
    "check_weight",
    "raise_not_bool",
    "resolve_activation",
    "resolve_checkpoint_level",
]

_CHECKPOINT_LEVELS = (0, 1, 2)


def check_input(name: str, x: Tensor) -> None:
    check_tensors(**{name: x})
    check_float_dtype(name, x.dtype)
    if x.dim() < 1:
        raise ValueError(f"{name}: expected shape (..., features), got {tuple(x.shape)}; give it a last dimension")


def check_weight(name: str, weight: Tensor, x: Tensor, columns: int | None = None) -> None:
    """Checks a matrix; `columns` is the last dimension of x where it multiplies x."""
    check_tensors(**{name: weight})
    if weight.dim() != 2 or columns not in (None, weight.shape[1]):
        wanted = "(rows, columns)" if columns is None else f"(rows, {columns}), the last dimension of x its second"
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(weight.shape)}; transpose or reshape it")
    _check_like(name, weight, x)


def check_bias(name: str, bias: Tensor | None, x: Tensor, weight: Tensor) -> None:
    """Checks a vector over the rows of a weight."""
    if bias is None:
        return
    check_tensors(**{name: bias})
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        raise ValueError(
            f"{name}: expected shape ({weight.shape[0]},), one for each row of its weight, got {tuple(bias.shape)}"
        )
    _check_like(name, bias, x)


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        check_device(name, tensor, x.device, "x")
    if tensor.dtype is not x.dtype:
        raise TypeError(
            f"{name}: expected the dtype of x, {x.dtype}, got {tensor.dtype}; cast one of them, or use torch.autocast"
        )


def check_mlp_shapes(weight1: Tensor, weight2: Tensor, spec: ActivationSpec) -> None:
    """Checks that the layers fit together; both weights are matrices."""
    rows = weight1.shape[0]
    if spec.gated and rows % 2:
        raise ValueError(f"weight1: expected an even number of rows with gated=True, values and then gates, got {rows}")
    if weight2.shape[1] != spec.width(rows):
        raise ValueError(
            f"weight2: expected {spec.width(rows)} columns, the hidden features of weight1 "
            f"{tuple(weight1.shape)} with gated={spec.gated}, got shape {tuple(weight2.shape)}"
        )


def check_main_grad(name: str, main_grad: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    """Checks a buffer that takes the gradient of a weight of `shape`, in products of x's dtype."""
    if main_grad is None:
        return
    check_tensors(**{name: main_grad})
    check_device(name, main_grad, x.device, "x")
    if main_grad.shape != shape:
        raise ValueError(f"{name}: expected the shape of its weight, {tuple(shape)}, got {tuple(main_grad.shape)}")
    if main_grad.dtype is not x.dtype and (main_grad.dtype is not torch.float32 or x.dtype is torch.float64):
        raise TypeError(
            f"{name}: expected the dtype of the products, {x.dtype}, or float32 for narrower ones, got "
            f"{main_grad.dtype}; make the buffer in one of these"
        )
    if main_grad.requires_grad:
        raise ValueError(
            f"{name}: expected a buffer that wants no gradient, got one with requires_grad=True; detach it"
        )


def check_dout(dout: Tensor, x: Tensor) -> None:
    check_input("dout", dout)
    check_device("dout", dout, x.device, "x")
    if differ(dout.shape[:-1], x.shape[:-1]):
        raise ValueError(f"dout: expected the rows of x, shape {(*x.shape[:-1], 'features')}, got {tuple(dout.shape)}")
    if dout.dtype is not x.dtype:
        raise TypeError(f"dout: expected the dtype of x, {x.dtype}, got {dout.dtype}; cast one of them")


def check_accumulates(name: str, main_grad: Tensor | None, weight: Tensor) -> None:
    """Checks that a backward would add to a buffer."""
    if main_grad is not None and torch.is_grad_enabled() and not weight.requires_grad:
        raise ValueError(
            f"{name}: expected None for a weight that wants no gradient, got a tensor; leave it out, or set "
            "requires_grad on the weight"
        )


def check_no_main_grad(**buffers: Tensor | None) -> None:
    """Checks that there is no buffer for gradients beside DTensors, whose shards of a batch would have to be summed."""
    for name, buffer in buffers.items():
        if buffer is not None:
            raise ValueError(f"{name}: expected None with DTensors, got a tensor; take the gradient from weight.grad")


def check_no_gradient(**tensors: Tensor) -> None:
    """Checks that nothing asks for a derivative of what has none."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that wants no gradient, got one with requires_grad=True; detach it, or "
                "call under torch.no_grad()"
            )


def resolve_activation(activation: str, gated: bool) -> ActivationSpec:
    check_choice("activation", activation, tuple(ACTIVATIONS))
    raise_not_bool(gated=gated)
    return ActivationSpec(activation, gated)


def resolve_checkpoint_level(level: int) -> int:
    if not isinstance(level, int) or isinstance(level, bool) or level not in _CHECKPOINT_LEVELS:
        raise ValueError(
            f"checkpoint_level: expected 0 (keep all), 1 (make the activation again) or 2 (the first product too), "
            f"got {level!r}"
        )
    return level
