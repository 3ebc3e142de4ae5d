"""Cases of the linear layer and of the two-layer perceptron, plain and gated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.companions.case import Build, Case, Inputs, Random, Tensors, Way

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class FusedDense(Case):
    """`flashtile.fused_dense` of `[tokens, columns]` to `[tokens, features]`, with a bias."""

    tokens: int
    columns: int
    features: int

    op: ClassVar[str] = "fused_dense"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "fwd+bwd")

    def sizes(self) -> Sequence[str]:
        return (f"{self.tokens}x{self.columns}x{self.features}",)

    def width(self) -> int:
        return max(self.columns, self.features)

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {
            "x": random.normal(self.tokens, self.columns),
            "weight": random.normal(self.features, self.columns, scale=self.columns**-0.5),
            "bias": random.normal(self.features),
        }
        return Inputs(leaves, {}, [random.normal(self.tokens, self.features)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (F.linear(*leaves),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x, weight, bias: flashtile.fused_dense(x, weight, bias, backend=backend))

    def peers(self) -> dict[str, Build]:
        return {"quack": _quack_linear}

    def bytes(self, phase: str) -> int:
        rows, parameters = self.tokens * (self.columns + self.features), (self.columns + 1) * self.features
        # Forward and backward: each of these and its gradient.
        return (1 if phase == "fwd" else 2) * (rows + parameters) * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """A backward has two products."""
        return (1 if phase == "fwd" else 3) * 2 * self.tokens * self.columns * self.features


@dataclass(frozen=True)
class FusedMLP(Case):
    """`flashtile.fused_mlp` of `[tokens, hidden]` with `inner` hidden units: with biases, or gated and without."""

    tokens: int
    hidden: int
    inner: int
    activation: str
    gated: bool = False

    op: ClassVar[str] = "fused_mlp"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "fwd+bwd")

    def sizes(self) -> Sequence[str]:
        kind = f"{self.activation}{'_gated' if self.gated else ''}"
        return (kind, f"{self.tokens}x{self.hidden}x{self.inner}")

    def width(self) -> int:
        return self._first_layer()

    def make_inputs(self, random: Random) -> Inputs:
        first, second = self._first_layer(), self.hidden
        leaves = {
            "x": random.normal(self.tokens, self.hidden),
            "weight1": random.normal(first, self.hidden, scale=self.hidden**-0.5),
            "weight2": random.normal(second, self.inner, scale=self.inner**-0.5),
        }
        if not self.gated:
            leaves |= {"bias1": random.normal(first), "bias2": random.normal(second)}
        return Inputs(leaves, {}, [random.normal(self.tokens, self.hidden)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, weight1, weight2, *biases = leaves
        bias1, bias2 = biases or (None, None)
        inner = F.linear(x, weight1, bias1)
        act = _ACTIVATIONS[self.activation]
        if self.gated:
            values, gates = inner.chunk(2, dim=-1)
            return (F.linear(values * act(gates), weight2, bias2),)
        return (F.linear(act(inner), weight2, bias2),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        options: dict[str, Any] = {"activation": self.activation, "gated": self.gated, "backend": backend}

        def function(
            x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None = None, bias2: Tensor | None = None
        ) -> Any:
            return flashtile.fused_mlp(x, weight1, bias1, weight2, bias2, **options)

        return Way(function)

    def peers(self) -> dict[str, Build]:
        if self.gated:
            return {"liger": _liger_swiglu, "quack": _quack_swiglu} if self.activation == "silu" else {}
        return {"quack": _quack_gelu} if self.activation == "gelu_tanh" else {}

    def bytes(self, phase: str) -> int:
        matrix, parameters = self.tokens * self.hidden, (self._first_layer() + self.inner) * self.hidden
        if not self.gated:
            parameters += self._first_layer() + self.hidden
        # Forward and backward: x, its gradient, the result and its gradient; parameters and their gradients.
        elements = 2 * matrix + parameters if phase == "fwd" else 4 * matrix + 2 * parameters
        return elements * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """A backward has two products for each of the forward's."""
        forward = 2 * self.tokens * self.hidden * (self._first_layer() + self.inner)
        return forward if phase == "fwd" else 3 * forward

    def _first_layer(self) -> int:
        """Rows of weight1."""
        return 2 * self.inner if self.gated else self.inner


def _quack_linear(others: dict[str, Tensor]) -> Way:
    """Without its search for tiles, which takes minutes."""
    from quack.linear import linear_func

    return Way(lambda x, weight, bias: linear_func(x, weight, bias, tuned=False))


def _liger_swiglu(others: dict[str, Tensor]) -> Way:
    """Gates and values come from layers of their own."""
    from liger_kernel.transformers.functional import liger_swiglu

    def function(x: Tensor, values: Tensor, gates: Tensor, weight2: Tensor) -> Tensor:
        return F.linear(liger_swiglu(F.linear(x, gates), F.linear(x, values)), weight2)

    def apart(leaves: Tensors) -> Tensors:
        x, weight1, weight2 = leaves
        return [x, *weight1.chunk(2), weight2]

    def together(gradients: Tensors) -> Tensors:
        x, values, gates, weight2 = gradients
        return [x, torch.cat([values, gates]), weight2]

    return Way(function, own_leaves=apart, gradients=together)


def _quack_swiglu(others: dict[str, Tensor]) -> Way:
    """Its first layer has gates and values in turn. Without its search for tiles, which takes minutes."""
    from quack.mlp import mlp_func

    def in_turn(leaves: Tensors) -> Tensors:
        x, weight1, weight2 = leaves
        values, gates = weight1.chunk(2)
        return [x, torch.stack([gates, values], dim=1).flatten(0, 1), weight2]

    def apart(gradients: Tensors) -> Tensors:
        x, weight1, weight2 = gradients
        gates, values = weight1.unflatten(0, (-1, 2)).unbind(1)
        return [x, torch.cat([values, gates]), weight2]

    return Way(
        lambda x, weight1, weight2: mlp_func(x, weight1, weight2, "swiglu", tuned=False),
        own_leaves=in_turn,
        gradients=apart,
    )


def _quack_gelu(others: dict[str, Tensor]) -> Way:
    from quack.mlp import mlp_func

    def function(x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor, bias2: Tensor) -> Tensor:
        return mlp_func(x, weight1, weight2, "gelu_tanh_approx", bias1=bias1, bias2=bias2, tuned=False)

    return Way(function)
