"""The operations beside attention that are products of matrices, and the cases of all operations on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.companion_cases import (
    LIGER,
    CausalSoftmax,
    Copy,
    CrossEntropy,
    DropoutAddLayerNorm,
    DropoutAddRMSNorm,
    LayerNorm,
    MaskedSoftmax,
    RMSNorm,
    Rotary,
    one,
    peer,
)  # fmt: skip
from flashtile.bench.companions import Build, Companion, Inputs, Random, Tensors, Way

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class LinearCrossEntropy(Companion):
    """`flashtile.linear_cross_entropy` of `[tokens, hidden]` and an output layer `[vocabulary, hidden]`."""

    tokens: int
    hidden: int
    vocabulary: int

    op: ClassVar[str] = "linear_cross_entropy"
    label: ClassVar[str] = "{tokens}x{hidden}x{vocabulary}"
    widest: ClassVar[str] = "vocabulary"
    phases: ClassVar[tuple[str, ...]] = ("fwd+bwd",)
    outputs: ClassVar[tuple[str, ...]] = ("loss",)
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "labels"))

    def make_inputs(self, random: Random) -> Inputs:
        weight = random.normal(self.vocabulary, self.hidden, scale=self.hidden**-0.5)
        leaves = {"x": random.normal(self.tokens, self.hidden), "weight": weight}
        return Inputs(leaves, {"labels": random.labels(self.tokens, self.vocabulary)}, [one(random)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, weight = leaves
        return (F.cross_entropy(F.linear(x, weight), others["labels"]),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x, weight: flashtile.linear_cross_entropy(x, weight, others["labels"], backend=backend))

    def peers(self) -> dict[str, Build]:
        """Liger's sums of gradients in float32, as the others': in bfloat16, its default, they lose much over the
        chunks. QuACK's without its search for tiles, which takes minutes, here and below."""
        return {
            "liger": peer(f"{LIGER}fused_linear_cross_entropy", read=["labels"], accum_dtype=torch.float32),
            "quack": peer("quack.linear_cross_entropy.chunked_linear_cross_entropy", read=["labels"], tuned=False),
        }

    def bytes(self, phase: str) -> int:
        """x and weight, and their gradients."""
        return 2 * (self.tokens + self.vocabulary) * self.hidden * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """One product forward, two backward."""
        return 3 * 2 * self.tokens * self.hidden * self.vocabulary


@dataclass(frozen=True)
class FusedDense(Companion):
    """`flashtile.fused_dense` of `[tokens, columns]` to `[tokens, features]`, with a bias."""

    tokens: int
    columns: int
    features: int

    op: ClassVar[str] = "fused_dense"
    label: ClassVar[str] = "{tokens}x{columns}x{features}"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "fwd+bwd")

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
        return {"quack": peer("quack.linear.linear_func", tuned=False)}

    def bytes(self, phase: str) -> int:
        rows, parameters = self.tokens * (self.columns + self.features), (self.columns + 1) * self.features
        # Forward and backward: each of these and its gradient.
        return (1 if phase == "fwd" else 2) * (rows + parameters) * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """A backward has two products."""
        return (1 if phase == "fwd" else 3) * 2 * self.tokens * self.columns * self.features


@dataclass(frozen=True)
class FusedMLP(Companion):
    """`flashtile.fused_mlp` of `[tokens, hidden]` with `inner` hidden units: with biases, or gated and without."""

    tokens: int
    hidden: int
    inner: int
    activation: str
    gated: bool = False

    op: ClassVar[str] = "fused_mlp"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "fwd+bwd")

    @property
    def size(self) -> str:
        kind = f"{self.activation}{'_gated' if self.gated else ''}"
        return f"{kind}-{self.tokens}x{self.hidden}x{self.inner}"

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
        if not self.gated:
            return (F.linear(act(inner), weight2, bias2),)
        values, gates = inner.chunk(2, dim=-1)
        return (F.linear(values * act(gates), weight2, bias2),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        options: dict[str, Any] = {"activation": self.activation, "gated": self.gated, "backend": backend}
        mlp: Callable[..., Any] = flashtile.fused_mlp
        return Way(lambda x, first, second, bias1=None, bias2=None: mlp(x, first, bias1, second, bias2, **options))

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


def _liger_swiglu(others: dict[str, Tensor]) -> Way:
    """Gates and values come from layers of their own."""
    from liger_kernel.transformers.functional import liger_swiglu

    def function(x: Tensor, values: Tensor, gates: Tensor, weight2: Tensor) -> Tensor:
        return F.linear(liger_swiglu(F.linear(x, gates), F.linear(x, values)), weight2)

    return Way(
        function,
        own_leaves=lambda leaves: [leaves[0], *leaves[1].chunk(2), leaves[2]],
        gradients=lambda gradients: [gradients[0], torch.cat(gradients[1:3]), gradients[3]],
    )


def _quack_swiglu(others: dict[str, Tensor]) -> Way:
    """Its first layer has gates and values in turn."""

    def in_turn(leaves: Tensors) -> Tensors:
        x, weight1, weight2 = leaves
        values, gates = weight1.chunk(2)
        return [x, torch.stack([gates, values], dim=1).flatten(0, 1), weight2]

    def apart(gradients: Tensors) -> Tensors:
        x, weight1, weight2 = gradients
        gates, values = weight1.unflatten(0, (-1, 2)).unbind(1)
        return [x, torch.cat([values, gates]), weight2]

    way = peer("quack.mlp.mlp_func", "swiglu", tuned=False)(others)
    return replace(way, own_leaves=in_turn, gradients=apart)


def _quack_gelu(others: dict[str, Tensor]) -> Way:
    from quack.mlp import mlp_func

    def function(x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor, bias2: Tensor) -> Tensor:
        return mlp_func(x, weight1, weight2, "gelu_tanh_approx", bias1=bias1, bias2=bias2, tuned=False)

    return Way(function)


_KINDS: tuple[type[Companion], ...] = (
    Copy, LayerNorm, RMSNorm, DropoutAddLayerNorm, DropoutAddRMSNorm, Rotary, CausalSoftmax, MaskedSoftmax,
    CrossEntropy, LinearCrossEntropy, FusedDense, FusedMLP,
)  # fmt: skip
OPERATIONS = {kind.op: kind for kind in _KINDS}


def _cuda_cases() -> list[Companion]:
    """Copies from the size of the smallest case to that of the largest, and sizes of large language models, in bf16."""
    widths = (1024, 4096, 8192)
    return [
        *(Copy("bf16", 1024 * mib) for mib in (32, 128, 256, 1024, 2048)),
        *(LayerNorm("bf16", 16384, width) for width in widths),
        *(RMSNorm("bf16", 16384, width) for width in widths),
        *(DropoutAddLayerNorm("bf16", 16384, width, p) for p in (0.1, 0.0) for width in widths),
        *(DropoutAddRMSNorm("bf16", 16384, width) for width in widths),
        Rotary("bf16", 4, 4096, 32, 128),
        CausalSoftmax("bf16", 8, 16, 2048),
        MaskedSoftmax("bf16", 8, 16, 2048),
        *(CrossEntropy("bf16", 8192, vocabulary) for vocabulary in (50257, 50304, 128256)),
        LinearCrossEntropy("bf16", 16384, 4096, 128256),
        FusedDense("bf16", 16384, 4096, 4096),
        FusedMLP("bf16", 16384, 4096, 16384, "gelu_tanh"),
        FusedMLP("bf16", 16384, 4096, 16384, "silu", gated=True),
    ]


def _cpu_cases() -> list[Companion]:
    """A small case of each operation, in fp32."""
    return [
        Copy("fp32", 1024),
        LayerNorm("fp32", 512, 512),
        RMSNorm("fp32", 512, 512),
        *(DropoutAddLayerNorm("fp32", 512, 512, p) for p in (0.1, 0.0)),
        DropoutAddRMSNorm("fp32", 512, 512),
        Rotary("fp32", 2, 256, 8, 64),
        CausalSoftmax("fp32", 1, 4, 256),
        MaskedSoftmax("fp32", 1, 4, 256),
        CrossEntropy("fp32", 256, 1000),
        LinearCrossEntropy("fp32", 256, 64, 1000),
        FusedDense("fp32", 256, 128, 512),
        FusedMLP("fp32", 256, 128, 512, "gelu_tanh"),
        FusedMLP("fp32", 256, 128, 512, "silu", gated=True),
    ]


def tables(device: torch.device) -> dict[str, list[Companion]]:
    """The cases of each operation, copies first."""
    cases = _cuda_cases() if device.type == "cuda" else _cpu_cases()
    return {op: [case for case in cases if case.op == op] for op in OPERATIONS}
