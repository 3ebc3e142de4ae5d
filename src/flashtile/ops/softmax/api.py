"""The public softmax functions, which check a call, and its operators."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.operators import differentiable, operator
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.sizes import broadcasts
from flashtile.ops.softmax import spec as reference
from flashtile.ops.softmax.spec import MAX_COLUMNS, SoftmaxGradient, SoftmaxInputs, SoftmaxSpec

_BACKENDS = standard_backends("softmax")


def _run_forward(inputs: SoftmaxInputs, spec: SoftmaxSpec, backend: str) -> Tensor:
    x, mask = inputs
    module = _BACKENDS.implementation(backend, x.device, x.dtype)
    return module.forward(inputs if x.is_contiguous() else SoftmaxInputs(x.contiguous(), mask), spec)


def _run_backward(given: SoftmaxGradient, spec: SoftmaxSpec, backend: str) -> Tensor:
    dout, out = given
    if not dout.is_contiguous() or not out.is_contiguous():
        given = SoftmaxGradient(dout.contiguous(), out.contiguous())
    return _BACKENDS.implementation(backend, out.device, out.dtype).backward(given, spec)


_softmax = differentiable(
    operator(
        "softmax_forward",
        SoftmaxInputs,
        (SoftmaxSpec,),
        Tensor,
        run=_run_forward,
        fake=lambda inputs, spec: inputs.x.new_empty(inputs.x.shape),
        decomposition=reference.forward,
    ),
    operator(
        "softmax_backward",
        SoftmaxGradient,
        (SoftmaxSpec,),
        Tensor,
        run=_run_backward,
        fake=lambda given, spec: given.out.new_empty(given.out.shape),
    ),
    reference,
    save=lambda inputs, out, spec, ctx: ((out,), ()),
)


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None, scale: float = 1.0, *, backend: str = "auto", **other_names: NoReturn
) -> Tensor:
    """Softmax of `scale · x` over the last dimension, without the masked elements, in one pass over memory.

    Differentiable in x; the backward needs only the result. The arithmetic is float32 (float64 for float64).

    Args:
        x: `[batch, heads, seq_q, seq_k]`; float16, bfloat16, float32, or float64 (CPU and reference only).
        mask: bool (or uint8), True = masked out; `[batch, 1, seq_q, seq_k]`, or any shape that broadcasts to x. It is
            not expanded in memory. None = nothing is masked.
        scale: factor on x.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        `[batch, heads, seq_q, seq_k]` in x's dtype. A row whose elements are all masked or -inf is 0, and so is its
        gradient.

    Raises:
        TypeError: a dtype or an argument's type is wrong.
        ValueError: a shape, a device or a value is wrong, or the named backend cannot serve the call.
    """
    if other_names:
        refuse_other_names(scaled_masked_softmax, other_names)
    _check(x, backend)
    if x.dim() != 4:
        raise ValueError(
            f"x: expected shape (batch, heads, seq_q, seq_k), got {tuple(x.shape)}; reshape it, or unsqueeze it"
        )
    if mask is not None:
        mask = _expanded(mask, x)
    if dtensor.present(x, mask):
        return dtensor.call(
            lambda _, x, mask: scaled_masked_softmax(x, mask, scale, backend=backend),
            {"x": (x, "*."), "mask": (mask, "*.")}, "*.",
        )  # fmt: skip
    return _softmax(SoftmaxInputs(x, mask), SoftmaxSpec(_scale(scale, x.dtype), False), backend)


def scaled_causal_softmax(x: Tensor, scale: float = 1.0, *, backend: str = "auto", **other_names: NoReturn) -> Tensor:
    """Softmax of `scale · x` over the keys that a causal mask shows, in one pass over the visible elements.

    The visible keys for two queries and four keys, and for four queries and two keys (`x` = visible)::

        x x x .        . .
        x x x x        . .
                       x .
                       x x

    Args:
        x: `[..., seq_q, seq_k]`; dtypes as for `scaled_masked_softmax`.
        scale: factor on x.
        backend: as for `scaled_masked_softmax`.

    Returns:
        `[..., seq_q, seq_k]` in x's dtype; 0 if a key is not visible.

    Raises:
        TypeError, ValueError: as `scaled_masked_softmax`.
    """
    if other_names:
        refuse_other_names(scaled_causal_softmax, other_names)
    _check(x, backend)
    if dtensor.present(x):
        return dtensor.call(lambda _, x: scaled_causal_softmax(x, scale, backend=backend), {"x": (x, "*..")}, "*..")
    seq_q, seq_k = x.shape[-2:]
    matrices = x if x.dim() == 4 else x.reshape(1, math.prod(x.shape[:-2]), seq_q, seq_k)
    spec = SoftmaxSpec(_scale(scale, x.dtype), True)
    return _softmax(SoftmaxInputs(matrices, None), spec, backend).view(x.shape)


def _check(x: Tensor, backend: str) -> None:
    _BACKENDS.check(backend)
    checks.check_tensors(x=x)
    checks.check_float_dtype("x", x.dtype)
    if x.dim() < 2:
        raise ValueError(f"x: expected shape (..., seq_q, seq_k), got {tuple(x.shape)}; unsqueeze it")
    if x.shape[-1] > MAX_COLUMNS:
        raise ValueError(f"x: expected a last dimension of at most {MAX_COLUMNS}, got {x.shape[-1]}")


def _expanded(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as a view of x's shape."""
    checks.check_tensors(mask=mask)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"mask: expected dtype bool or uint8, got {mask.dtype}; True is masked out")
    checks.check_device("mask", mask, x.device, "x")
    padded = (1,) * (x.dim() - mask.dim()) + tuple(mask.shape)
    if mask.dim() > x.dim() or not broadcasts(padded, x.shape):
        raise ValueError(
            f"mask: expected a shape that broadcasts to that of x, {tuple(x.shape)}, such as "
            f"{(x.shape[0], 1, *x.shape[2:])}, got {tuple(mask.shape)}"
        )
    return mask.bool().expand(x.shape)


def _scale(scale: float, dtype: torch.dtype) -> float:
    why_not_tensor = "reading it would synchronise, multiply x by it instead"
    return checks.finite_float("scale", scale, "1.0 changes nothing", why_not_tensor, dtype)
