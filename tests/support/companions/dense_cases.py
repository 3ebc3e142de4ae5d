"""The cases that every backend of the linear layers must get right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_close


@dataclass(frozen=True)
class MlpCase:
    """One call of `flashtile.fused_mlp`, with its residual.

    Attributes:
        shape: of x, without its last dimension.
        sizes: of x's last dimension, hidden and out.
        biases: of the first and of the second layer.
        frozen: names of operands that want no gradient.
    """

    shape: tuple[int, ...] = (3, 7)
    sizes: tuple[int, int, int] = (20, 37, 11)
    dtype: torch.dtype = torch.float32
    activation: str = "gelu_tanh"
    gated: bool = False
    level: int = 0
    biases: tuple[bool, bool] = (True, True)
    frozen: tuple[str, ...] = ()


def make_operands(case: MlpCase, device: str = "cpu") -> tuple[dict[str, Tensor | None], list[Tensor]]:
    """The operands by name, and the gradients of out and of the residual."""
    generator = torch.Generator().manual_seed(0)
    features, hidden, out = case.sizes
    rows = 2 * hidden if case.gated else hidden

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(case.dtype).to(device)

    operands: dict[str, Tensor | None] = {
        "x": normal(*case.shape, features),
        "weight1": normal(rows, features, scale=max(features, 1) ** -0.5),
        "bias1": normal(rows) if case.biases[0] else None,
        "weight2": normal(out, hidden, scale=max(hidden, 1) ** -0.5),
        "bias2": normal(out) if case.biases[1] else None,
    }
    return operands, [normal(*case.shape, out), normal(*case.shape, features)]


def run_mlp(case: MlpCase, backend: str, dtype: torch.dtype | None, device: str) -> dict[str, Tensor]:
    """Runs forward and backward of a case. Returns out and the gradients; `dtype` casts all inputs first."""
    made, upstream = make_operands(case, device)
    operands = {
        name: None if t is None else t.to(dtype or t.dtype).requires_grad_(name not in case.frozen)
        for name, t in made.items()
    }
    out, residual = flashtile.fused_mlp(
        **operands, activation=case.activation, gated=case.gated, checkpoint_level=case.level, return_residual=True,
        backend=backend,
    )  # fmt: skip
    wanted = {name: t for name, t in operands.items() if t is not None and t.requires_grad}
    upstream = [d.to(out.dtype) for d in upstream]
    grads = torch.autograd.grad((out, residual), list(wanted.values()), upstream)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(wanted, grads)}}


def check(case: MlpCase, backend: str, device: str = "cpu") -> dict[str, Tensor]:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle. Returns its results."""
    actual = run_mlp(case, backend, None, device)
    oracle = run_mlp(case, "reference", torch.float64, device)
    eager = run_mlp(case, "reference", None, device)
    assert actual.keys() == oracle.keys()
    for name, value in actual.items():
        assert_close(f"{case}: {name}", value, oracle[name], eager[name])
    return actual


_FP16, _BF16 = torch.float16, torch.bfloat16
_BASE = MlpCase()
_ACTIVATIONS = ("gelu_tanh", "gelu", "relu", "squared_relu", "silu")
CASES = {
    **{name: replace(_BASE, activation=name) for name in _ACTIVATIONS},
    **{f"gated_{name}": replace(_BASE, activation=name, gated=True, level=1) for name in _ACTIVATIONS},
    "level_1": replace(_BASE, level=1),
    "level_2": replace(_BASE, level=2, activation="silu"),
    "gated_level_2": replace(_BASE, level=2, activation="silu", gated=True),
    "no_biases": replace(_BASE, biases=(False, False), level=1),
    "bias1_only": replace(_BASE, biases=(True, False), gated=True),
    "frozen_input": replace(_BASE, frozen=("x",)),
    "frozen_first": replace(_BASE, frozen=("x", "weight1", "bias1"), level=1),
    "frozen_second": replace(_BASE, frozen=("weight2", "bias2"), level=1),
    "only_bias2": replace(_BASE, frozen=("x", "weight1", "bias1", "weight2")),
    "fp16": replace(_BASE, dtype=_FP16),
    "fp16_gated_level_2": replace(_BASE, dtype=_FP16, gated=True, level=2, activation="gelu"),
    "many_rows": replace(_BASE, shape=(700,), sizes=(8, 20, 8)),
    "many_columns": replace(_BASE, shape=(5,), sizes=(8, 600, 300), gated=True),
    "vector": replace(_BASE, shape=()),
    "no_rows": replace(_BASE, shape=(2, 0)),
    "no_features": replace(_BASE, sizes=(0, 5, 3)),
    "no_hidden": replace(_BASE, sizes=(4, 0, 3), gated=True, level=1),
    "no_out": replace(_BASE, sizes=(4, 5, 0)),
}
#: A dtype that Triton's interpreter multiplies wrongly. These kernels multiply no matrices, so they may run there.
NARROW_CASES = {
    "bf16": replace(_BASE, dtype=_BF16),
    "bf16_gated_level_1": replace(_BASE, dtype=_BF16, gated=True, level=1, activation="silu"),
    "bf16_level_2": replace(_BASE, dtype=_BF16, level=2, activation="squared_relu", shape=(300,)),
}


def parameters(cases: dict[str, Any] | None = None) -> list:
    return [pytest.param(case, id=name) for name, case in (cases or CASES | NARROW_CASES).items()]
