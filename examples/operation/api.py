"""The public gate, which checks a call, and its operators."""

from __future__ import annotations

from torch import Tensor

from flashtile.ops.common.backends import standard_backends
from flashtile.ops.common.checks import check_device, check_float_dtype, check_tensors, finite_float
from flashtile.ops.common.operators import Differentiable, OnBackend, operator
from flashtile.ops.gate import spec as reference
from flashtile.ops.gate.spec import GateGradients, GateInputs, GateSpec, GateUpstream

_BACKENDS = standard_backends("gate")

_gate = Differentiable(
    operator(
        "gate_forward",
        GateInputs,
        (GateSpec,),
        Tensor,
        run=OnBackend(_BACKENDS, "forward"),
        fake=lambda inputs, spec: inputs.x.new_empty(inputs.x.shape),
        decomposition=reference.forward,
    ),
    operator(
        "gate_backward",
        GateUpstream,
        (GateSpec,),
        GateGradients,
        run=OnBackend(_BACKENDS, "backward"),
        fake=lambda given, spec: [given.x.new_empty(given.x.shape) for _ in ("dx", "dy")],
    ),
    reference,
    save=lambda inputs, out, spec, ctx: (inputs, (spec,)),
    gradients=lambda found, spec: found,
)


def tanh_gate(x: Tensor, y: Tensor, scale: float = 1.0, *, backend: str = "auto") -> Tensor:
    """`tanh(scale · x) · y`, in float32 (float64 for float64), rounded once. Differentiable in x and y.

    Args:
        x: float16, bfloat16, float32, or float64 (CPU and reference only).
        y: the same shape and dtype.
        scale: factor on x.
        backend: "auto" chooses by device; "triton", "cpu" or "reference" run that backend or raise.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError, ValueError: an argument is wrong, or the named backend cannot serve the call.
    """
    _BACKENDS.check(backend)
    check_tensors(x=x, y=y)
    check_float_dtype("x", x.dtype)
    check_device("y", y, x.device, "x")
    if y.dtype is not x.dtype or y.shape != x.shape:
        raise ValueError(f"y: expected {x.dtype} {tuple(x.shape)} as x, got {y.dtype} {tuple(y.shape)}; cast or expand")
    spec = GateSpec(finite_float("scale", scale, "1.0 changes nothing", dtype=x.dtype))
    return _gate(GateInputs(x, y), spec, backend)
