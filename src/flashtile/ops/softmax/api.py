"""The public softmax functions, which check a call, and its operators."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from flashtile.ops.common import checks, dtensor
from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.operators import Differentiable, OnBackend, operator
from flashtile.ops.common.other_names import refuse_other_names
from flashtile.ops.common.repeated import call_table
from flashtile.ops.common.sizes import broadcasts
from flashtile.ops.softmax import spec as reference
from flashtile.ops.softmax.spec import MAX_COLUMNS, SoftmaxGradient, SoftmaxInputs, SoftmaxSpec

_BACKENDS = standard_backends("softmax")
_CALLS = call_table()


def _contiguous_scores(inputs: SoftmaxInputs) -> SoftmaxInputs:
    """A mask has any strides."""
    x, mask = inputs
    return inputs if x.is_contiguous() else SoftmaxInputs(x.contiguous(), mask)


_softmax = Differentiable(
    operator(
        "softmax_forward",
        SoftmaxInputs,
        (SoftmaxSpec,),
        Tensor,
        run=OnBackend(_BACKENDS, "forward", arrange=_contiguous_scores),
        fake=lambda inputs, spec: inputs.x.new_empty(inputs.x.shape),
        decomposition=reference.forward,
    ),
    operator(
        "softmax_backward",
        SoftmaxGradient,
        (SoftmaxSpec,),
        Tensor,
        run=OnBackend(_BACKENDS, "backward"),
        fake=lambda given, spec: given.out.new_empty(given.out.shape),
    ),
    reference,
    save=lambda inputs, out, spec, ctx: ((out,), (spec,)),
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
    given, scalars = SoftmaxInputs(x, mask), (False, scale, backend)
    found = _CALLS.run(given, scalars)
    if found is not None:
        return found
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
    return _run(given, SoftmaxInputs(x, mask), SoftmaxSpec(_scale(scale, x.dtype), False), scalars)


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
    given, scalars = SoftmaxInputs(x, None), (True, scale, backend)
    found = _CALLS.run(given, scalars)
    if found is not None:
        return found
    _check(x, backend)
    if dtensor.present(x):
        return dtensor.call(lambda _, x: scaled_causal_softmax(x, scale, backend=backend), {"x": (x, "*..")}, "*..")
    seq_q, seq_k = x.shape[-2:]
    matrices = x if x.dim() == 4 else x.reshape(1, math.prod(x.shape[:-2]), seq_q, seq_k)
    return _run(given, SoftmaxInputs(matrices, None), SoftmaxSpec(_scale(scale, x.dtype), True), scalars).view(x.shape)


def _run(given: SoftmaxInputs, inputs: SoftmaxInputs, spec: SoftmaxSpec, scalars: tuple[bool, float, str]) -> Tensor:
    """Runs a checked call. `given`: its tensors, of which the operator takes views; `scalars`: the others."""
    repeated = _softmax.repeat(given, inputs, spec, scalars[-1])
    if repeated is not None and (kept := _CALLS.keep_call(given, scalars, repeated)):
        return repeated(kept)
    return _softmax(inputs, spec, scalars[-1])


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
