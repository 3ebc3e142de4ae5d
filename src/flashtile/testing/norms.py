"""Cases of the norms: what a call is, random inputs for it, and its check against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.testing.tolerance import Size, assert_close


@dataclass(frozen=True)
class NormCase:
    """One call of `flashtile.dropout_add_layer_norm` or `dropout_add_rms_norm`, with prenorm.

    Attributes:
        shape: shape of x0, without the normalised dimension.
        hidden: size of the normalised dimension.
        rms: RMS norm, else layer norm.
        dtype: dtype of x0 and x1.
        residual_dtype: dtype of the residual; None = no residual.
        weight_dtype: dtype of weights, biases and layerscale; None = no weight.
        tensors: names of further tensor arguments: "bias", "x1", "weight1", "bias1", "rowscale", "layerscale",
            "x0_subset", "out_subset".
        arguments: further keyword arguments of the call.
    """

    shape: tuple[int, ...] = (3, 7)
    hidden: int = 100
    rms: bool = False
    dtype: torch.dtype = torch.float32
    residual_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = torch.float32
    tensors: tuple[str, ...] = ("bias",)
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dtypes = (self.dtype, self.residual_dtype, self.weight_dtype)
        names = ",".join("none" if dtype is None else str(dtype)[6:] for dtype in dtypes)
        flags = "".join(f"-{key}{value}" for key, value in self.arguments.items())
        return (
            f"{'rms' if self.rms else 'layer'}-{list(self.shape)}x{self.hidden}-{names}-{'+'.join(self.tensors)}{flags}"
        )


@dataclass
class NormInputs:
    """Tensors of one case: those with a gradient, the others, and the upstream gradients of the outputs."""

    differentiable: dict[str, Tensor]
    others: dict[str, Any]
    upstream: list[Tensor]


def make_norm_inputs(case: NormCase, device: torch.device | str = "cpu", seed: int = 0) -> NormInputs:
    """Random inputs, the same for a case and seed on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)

    source, shape, others = case.shape, case.shape, dict(case.arguments)
    if "x0_subset" in case.tensors:
        # Every other row of x, out of x0 in another order.
        shape = (2 * case.shape[0], *case.shape[1:])
        others["x0_subset"] = _row_numbers(shape, torch.Size(case.shape).numel(), generator).to(device)
    outputs = shape
    if "out_subset" in case.tensors:
        outputs = (torch.Size(shape).numel() // 2 + 1,)
        others["out_subset"] = _row_numbers(shape, outputs[0] - 1, generator).to(device)
        others["out_numrows"] = outputs[0]
    if "rowscale" in case.tensors:
        others["rowscale"] = normal(*source, dtype=case.dtype)
    if case.arguments.get("dropout_p"):
        others["dropout_seed"] = torch.tensor([1234567 + seed, 89], device=device)

    differentiable = {"x0": normal(*source, case.hidden, dtype=case.dtype)}
    if case.residual_dtype is not None:
        differentiable["residual"] = normal(*shape, case.hidden, dtype=case.residual_dtype)
    if "x1" in case.tensors:
        differentiable["x1"] = normal(*shape, case.hidden, dtype=case.dtype)
    if case.weight_dtype is not None:
        differentiable["weight"] = normal(case.hidden, dtype=case.weight_dtype)
    for name in ("bias", "weight1", "bias1", "layerscale"):
        if name in case.tensors:
            differentiable[name] = normal(case.hidden, dtype=case.weight_dtype or case.dtype)
    sum_dtype = case.residual_dtype or (torch.float32 if case.arguments.get("residual_in_fp32") else case.dtype)
    upstream = [normal(*outputs, case.hidden, dtype=case.dtype) for _ in range(1 + ("weight1" in case.tensors))]
    return NormInputs(differentiable, others, [*upstream, normal(*shape, case.hidden, dtype=sum_dtype)])


def run_norm(case: NormCase, inputs: NormInputs, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Runs forward and backward of a case. Returns z, (z1,) x and the gradients; `dtype` casts all inputs first."""
    given = {
        name: (t if dtype is None else t.to(dtype)).detach().requires_grad_()
        for name, t in inputs.differentiable.items()
    }
    others = {
        name: t.to(dtype) if dtype is not None and isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in inputs.others.items()
    }
    arguments: dict[str, Any] = {"residual": None, "weight": None, "bias": None, **given, **others}
    function: Callable[..., Any] = flashtile.dropout_add_rms_norm if case.rms else flashtile.dropout_add_layer_norm
    outputs = function(**arguments, prenorm=True, backend=backend)
    upstream = [d.to(out.dtype) for d, out in zip(inputs.upstream, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(given.values()), upstream, allow_unused=True)
    names = ["z", "z1", "x"] if len(outputs) == 3 else ["z", "x"]
    results = {name: out.detach() for name, out in zip(names, outputs)}
    return results | {f"d{name}": grad for name, grad in zip(given, grads) if grad is not None}


def check_norm(
    case: NormCase, backend: str, device: torch.device | str = "cpu", seed: int = 0, inputs: NormInputs | None = None
) -> dict[str, Tensor]:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle. Returns its results."""
    inputs = inputs or make_norm_inputs(case, device, seed)
    actual = run_norm(case, inputs, backend)
    oracle = run_norm(case, inputs, "reference", torch.float64)
    eager = run_norm(case, inputs, "reference")
    assert actual.keys() == oracle.keys()
    cancelled = _cancelled(case, inputs, oracle["x"])
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], cancelled.get(name, Size()))
    return actual


def _cancelled(case: NormCase, inputs: NormInputs, x: Tensor) -> dict[str, Size]:
    """Sizes of the numbers that cancel: a norm's gradient is without what lies along xhat (and 1), so nothing is left
    of a row of two elements; xhat is a difference, so nothing is left of a row of one."""
    if not x.numel():
        return {}
    variance = x.square().mean(dim=-1) if case.rms else x.var(dim=-1, correction=0)
    factor = 1 / (1 - case.arguments.get("dropout_p", 0.0)) * abs(case.arguments.get("rowscale_const", 1.0))
    factors = [inputs.differentiable.get("layerscale"), inputs.others.get("rowscale")]
    for tensor in (*factors, *(inputs.differentiable.get(name) for name in ("weight", "weight1"))):
        if tensor is not None and tensor.numel():
            factor *= max(1.0, tensor.abs().max().item())
    rstd = torch.rsqrt(variance + case.arguments.get("epsilon", 1e-5))
    gradient = Size(factor * rstd.max().item(), factor * rstd.square().mean().sqrt().item())
    if case.rms:
        return dict.fromkeys(("dx0", "dx1", "dresidual"), gradient)
    mean = x.mean(dim=-1).abs() * rstd * factor
    upstream = max(d.abs().max().item() if d.numel() else 0.0 for d in inputs.upstream[:-1])
    sums = mean.sum().item() * upstream
    return {
        **dict.fromkeys(("dx0", "dx1", "dresidual"), gradient),
        **dict.fromkeys(("z", "z1"), Size(mean.max().item(), mean.square().mean().sqrt().item())),
        **dict.fromkeys(("dweight", "dweight1"), Size(sums, sums)),
    }


def _row_numbers(shape: tuple[int, ...], rows: int, generator: torch.Generator) -> Tensor:
    """For each of as many rows, 0 or one of the numbers from 1 to `rows`, each at most once."""
    total = torch.Size(shape).numel()
    numbers = torch.zeros(total, dtype=torch.int32, device="cpu")
    places = torch.randperm(total, generator=generator, device="cpu")[: min(rows, total)]
    numbers[places] = (torch.randperm(rows, generator=generator, device="cpu")[: len(places)] + 1).int()
    return numbers.view(shape)
