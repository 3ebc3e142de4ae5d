"""The operations beside attention: sizes, tensors, formula, and how each implementation is called; and their cases on
each device. A copy is the yardstick of those that memory bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.base import Inputs, Tensors, Way
from flashtile.bench.companions import Build, Companion, Random, call

_EPSILON = 1e-5
_DROPOUT_SEED = (1234567, 89)
_SCALE, _MASKED = 0.125, 0.25
_LIGER = "liger_kernel.transformers.functional.liger_"
#: Arithmetic in float32 throughout, as everyone else's; not over the upstream gradient, which the timer reuses.
_LIGER_RMS: dict[str, Any] = {"casting_mode": "gemma", "in_place": False}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _quack_layer_norm(others: dict[str, Tensor]) -> Way:
    """Its weight and bias are float32; forward and backward are apart, so that autograd is put over them here."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNormOf(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            out, rstd, mean = layernorm_fwd(x, weight, bias, _EPSILON, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return out

        @staticmethod
        def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, douts[0], rstd, mean, has_bias=True)

    return Way(LayerNormOf.apply, own_leaves=lambda leaves: [leaves[0], *(t.float() for t in leaves[1:])])


def _liger_rotary(others: dict[str, Tensor]) -> Way:
    """It rotates queries and keys together, in place, as `[B, H, S, D]` views: half of the heads are the keys."""
    from liger_kernel.transformers.functional import liger_rope

    cos, sin = (torch.cat([others[name]] * 2, dim=-1)[None] for name in ("cos", "sin"))  # [1, S, D]

    def turned(tensors: Sequence[Tensor]) -> Tensors:
        return [t.transpose(1, 2) for t in tensors]

    def halves(tensors: Tensors) -> Tensors:
        return list(tensors[0].chunk(2, dim=2))

    return Way(
        lambda q, k: liger_rope(*turned((q, k)), cos, sin),
        own_leaves=halves,
        own_upstream=lambda tensors: turned(halves(tensors)),
        outputs=lambda tensors: [torch.cat(turned(tensors), dim=2)],
        gradients=lambda tensors: [torch.cat(tensors, dim=2)],
    )


@dataclass(frozen=True)
class Copy(Companion):
    """A copy of a vector into new memory: by the CUDA runtime, which chooses how, and by a kernel of torch.compile."""

    kib: int

    op = "copy"
    phases = ("fwd",)
    leaves: ClassVar = {"x": "elements"}
    outputs: ClassVar = {"out": "elements"}

    @property
    def size(self) -> str:
        return f"{self.kib // 1024}mib" if self.kib % 1024 == 0 else f"{self.kib}kib"

    @property
    def elements(self) -> int:
        return self.kib * 1024 // self.torch_dtype.itemsize

    def formula(self, x: Tensor) -> Tensor:
        return x.clone()


@dataclass(frozen=True)
class RMSNorm(Companion):
    """`flashtile.rms_norm` with weight."""

    rows: int
    columns: int

    op = "rms_norm"
    leaves: ClassVar = {"x": "rows columns", "weight": "columns"}
    outputs: ClassVar = {"out": "rows columns"}
    saved = ("x", "weight")
    packages: ClassVar = {
        "flashtile": call("flashtile.rms_norm", eps=_EPSILON),
        "liger": call(f"{_LIGER}rms_norm", _EPSILON, **_LIGER_RMS),
        "quack": call("quack.rmsnorm.rmsnorm", eps=_EPSILON),
    }

    def formula(self, *leaves: Any, **others: Any) -> Any:
        return self.normalise(*leaves)

    def normalise(self, x: Tensor, *parameters: Tensor) -> Tensor:
        norm: Callable[..., Tensor] = F.layer_norm if "bias" in self.leaves else F.rms_norm
        return norm(x, (self.columns,), *parameters, eps=_EPSILON)


@dataclass(frozen=True)
class LayerNorm(RMSNorm):
    """`flashtile.layer_norm` with weight and bias."""

    op = "layer_norm"
    leaves: ClassVar = {**RMSNorm.leaves, "bias": "columns"}
    packages: ClassVar = {
        "flashtile": call("flashtile.layer_norm", eps=_EPSILON),
        "liger": call(f"{_LIGER}layer_norm", _EPSILON),
        "quack": _quack_layer_norm,
    }


@dataclass(frozen=True)
class DropoutAddRMSNorm(RMSNorm):
    """`flashtile.dropout_add_rms_norm`: dropout of x, addition to the residual, and the norm with weight. The sum is an
    output too, the next residual. Without dropout both terms have the same gradient, which is written once."""

    dropout_p: float = 0.0

    op = "dropout_add_rms_norm"
    leaves: ClassVar = {"x": "rows columns", "residual": "rows columns", "weight": "columns"}
    outputs: ClassVar = {"out": "rows columns", "sum": "rows columns"}
    rowwise = frozenset(("x", "residual", "keep", "out", "sum"))
    saved = ("sum", "weight")

    @property
    def size(self) -> str:
        return f"p{self.dropout_p}-{self.rows}x{self.columns}"

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.dropout_p:
            return {}
        seed = torch.tensor(_DROPOUT_SEED, device=random.device)
        arguments: dict[str, Any] = {"dropout_p": self.dropout_p, "dropout_seed": seed, "backend": "reference"}
        masked = flashtile.dropout_add_rms_norm(leaves["x"], None, None, return_dropout_mask=True, **arguments)
        return {"keep": masked[1], "seed": seed}

    def formula(self, x: Tensor, residual: Tensor, *parameters: Tensor, keep: Any = None, seed: Any = None) -> Any:
        total = residual + (x * keep / (1 - self.dropout_p) if self.dropout_p else x)
        return self.normalise(total, *parameters), total

    def eager(self, others: dict[str, Tensor]) -> Way:
        if not self.dropout_p:
            return super().eager(others)

        def function(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            total = F.dropout(x, self.dropout_p) + residual
            return self.normalise(total, *parameters), total

        return Way(function, own_bits=True)

    @property
    def packages(self) -> dict[str, Build]:  # type: ignore[override]
        def ours(others: dict[str, Tensor], **more: Any) -> Way:
            more |= {"dropout_seed": others.get("seed"), "dropout_p": self.dropout_p}
            return call(f"flashtile.{self.op}", epsilon=_EPSILON, prenorm=True)(others, **more)

        if self.dropout_p or "bias" in self.leaves:
            return {"flashtile": ours}
        liger = call(f"{_LIGER}fused_add_rms_norm", _EPSILON, **_LIGER_RMS)
        quack = call("quack.rmsnorm.rmsnorm", names=("residual", "weight"), eps=_EPSILON, prenorm=True)
        return {"flashtile": ours, "liger": liger, "quack": quack}

    def bytes(self, phase: str) -> int:
        same = phase == "bwd" and not self.dropout_p
        return super().bytes(phase) - self.rows * self.columns * self.torch_dtype.itemsize * same

    def with_bits(self, results: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Kept is what moved the sum by more than half of what it contributes, or what has a gradient.

        Neither is enough alone: an element that is small beside its residual does not move the sum, and a gradient of
        16 bits, itself a sum of two, is exactly 0 now and then. A dropped element shows neither.
        """
        moved = (results["sum"].float() - inputs.leaves["residual"]).abs()
        keep = moved > inputs.leaves["x"].float().abs() / (1 - self.dropout_p) / 2
        if "dx" in results:
            keep |= results["dx"] != 0
        share = keep.float().mean().item()
        # Some kept elements are too small beside their residual to be seen, in the sum as in its error.
        assert abs(share - (1 - self.dropout_p)) < 0.1 * self.dropout_p + 3 / keep.numel() ** 0.5, (
            f"kept {share:.3f} of the elements, expected {1 - self.dropout_p}"
        )
        return {**inputs.others, "keep": keep}


@dataclass(frozen=True)
class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """`flashtile.dropout_add_layer_norm`, with weight and bias."""

    op = "dropout_add_layer_norm"
    leaves: ClassVar = {**DropoutAddRMSNorm.leaves, "bias": "columns"}


@dataclass(frozen=True)
class Rotary(Companion):
    """`flashtile.apply_rotary` of `[B, S, H, D]`, whole heads, pairs of elements D / 2 apart; tables in x's dtype."""

    B: int
    S: int
    H: int
    D: int

    op = "rotary"
    leaves: ClassVar = {"x": "B S H D"}
    outputs: ClassVar = {"out": "B S H D"}
    tables = ("S D",)
    packages: ClassVar = {
        "flashtile": call("flashtile.apply_rotary", read=("cos", "sin")),
        "liger": _liger_rotary,
        "quack": call("quack.rotary.apply_rotary_emb", read=("cos", "sin")),
    }

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        cos, sin = flashtile.rotary_tables(self.S, self.D, device=random.device)
        return {"cos": cos.to(random.dtype), "sin": sin.to(random.dtype)}

    def formula(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]  # [S, 1, D / 2]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@dataclass(frozen=True)
class CausalSoftmax(Companion):
    """`flashtile.scaled_causal_softmax` of scores `[B, H, S, S]`. Masked scores need not be read."""

    B: int
    H: int
    S: int

    op = "causal_softmax"
    leaves: ClassVar = {"x": "B H S S"}
    outputs: ClassVar = {"out": "B H S S"}
    saved = ("out",)
    packages: ClassVar = {"flashtile": call("flashtile.scaled_causal_softmax", _SCALE)}

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mask": torch.ones(self.S, self.S, dtype=torch.bool, device=random.device).triu(1)}

    def formula(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * _SCALE).masked_fill(mask, float("-inf")).softmax(dim=-1)

    def bytes(self, phase: str) -> int:
        visible, whole = self.S * (self.S + 1) // 2, self.S**2
        return self.B * self.H * ((1 if phase == "fwd" else 2) * visible + whole) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class MaskedSoftmax(CausalSoftmax):
    """`flashtile.scaled_masked_softmax`, mask `[B, 1, S, S]` of a quarter of the keys; no mask in the backward."""

    op = "masked_softmax"
    rowwise = frozenset(("x", "mask", "out"))
    packages: ClassVar = {"flashtile": call("flashtile.scaled_masked_softmax", _SCALE, read=("mask",))}

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = random.booleans(self.B, 1, self.S, self.S, probability=_MASKED)
        mask[..., 0] = False  # the formula has no answer for a row with nothing left
        return {"mask": mask}

    def bytes(self, phase: str) -> int:
        return Companion.bytes(self, phase) + self.B * self.S**2 * (phase == "fwd")


@dataclass(frozen=True)
class CrossEntropy(Companion):
    """`flashtile.cross_entropy` of `[rows, vocabulary]`, the mean over rows."""

    rows: int
    vocabulary: int

    op = "cross_entropy"
    phases = ("fwd", "bwd", "fwd+bwd")
    leaves: ClassVar = {"logits": "rows vocabulary"}
    outputs: ClassVar = {"loss": ""}
    rowwise = frozenset(("logits", "labels"))
    saved = ("logits",)
    packages: ClassVar = {
        "flashtile": call("flashtile.cross_entropy", read=["labels"]),
        "liger": call(f"{_LIGER}cross_entropy", read=["labels"]),
        "quack": call("quack.cross_entropy.cross_entropy", read=["labels"], reduction="mean"),
    }

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"labels": random.labels(len(next(iter(leaves.values()))), self.vocabulary)}

    def formula(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def lacks(self, implementation: str, phase: str) -> str | None:
        return "computes its gradient in the forward" if (implementation, phase) == ("liger", "bwd") else None


@dataclass(frozen=True)
class LinearCrossEntropy(Companion):
    """`flashtile.linear_cross_entropy` of `[tokens, hidden]` and an output layer `[vocabulary, hidden]`.

    Liger's sums of gradients are in float32, as the others': in bfloat16, its default, they lose much over the chunks.
    QuACK's does not search for tiles, which takes minutes, here and below.
    """

    tokens: int
    hidden: int
    vocabulary: int

    op = "linear_cross_entropy"
    phases = ("fwd+bwd",)
    leaves: ClassVar = {"x": "tokens hidden", "weight": "vocabulary hidden"}
    outputs: ClassVar = {"loss": ""}
    rowwise = frozenset(("x", "labels"))
    products = ("tokens hidden vocabulary",)
    packages: ClassVar = {
        "flashtile": call("flashtile.linear_cross_entropy", read=["labels"]),
        "liger": call(f"{_LIGER}fused_linear_cross_entropy", read=["labels"], accum_dtype=torch.float32),
        "quack": call("quack.linear_cross_entropy.chunked_linear_cross_entropy", read=["labels"], tuned=False),
    }
    others = CrossEntropy.others

    def formula(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), labels)


@dataclass(frozen=True)
class FusedDense(Companion):
    """`flashtile.fused_dense` of `[tokens, columns]` to `[tokens, features]`, with a bias."""

    tokens: int
    columns: int
    features: int

    op = "fused_dense"
    phases = ("fwd", "fwd+bwd")
    leaves: ClassVar = {"x": "tokens columns", "weight": "features columns", "bias": "features"}
    outputs: ClassVar = {"out": "tokens features"}
    products = ("tokens columns features",)
    packages: ClassVar = {
        "flashtile": call("flashtile.fused_dense"), "quack": call("quack.linear.linear_func", tuned=False),
    }  # fmt: skip

    def formula(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)


@dataclass(frozen=True)
class FusedMLP(Companion):
    """`flashtile.fused_mlp` of `[tokens, hidden]` with `inner` hidden units: with biases, or gated and without."""

    tokens: int
    hidden: int
    inner: int
    activation: str
    gated: bool = False

    op = "fused_mlp"
    phases = ("fwd", "fwd+bwd")
    outputs: ClassVar = {"out": "tokens hidden"}
    products = ("tokens hidden first", "tokens inner hidden")

    @property
    def leaves(self) -> Mapping[str, str]:  # type: ignore[override]
        weights = {"x": "tokens hidden", "weight1": "first hidden", "weight2": "hidden inner"}
        return weights if self.gated else {**weights, "bias1": "first", "bias2": "hidden"}

    @property
    def first(self) -> int:
        """Rows of weight1."""
        return 2 * self.inner if self.gated else self.inner

    @property
    def size(self) -> str:
        kind = f"{self.activation}{'_gated' if self.gated else ''}"
        return f"{kind}-{self.tokens}x{self.hidden}x{self.inner}"

    def formula(self, x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Any = None, bias2: Any = None) -> Tensor:
        activate, values = _ACTIVATIONS[self.activation], F.linear(x, weight1, bias1)
        if not self.gated:
            return F.linear(activate(values), weight2, bias2)
        values, gates = values.chunk(2, dim=-1)
        return F.linear(values * activate(gates), weight2, bias2)

    @property
    def packages(self) -> dict[str, Build]:  # type: ignore[override]
        options: dict[str, Any] = {"bias1": None, "bias2": None, "activation": self.activation, "gated": self.gated}
        found = {"flashtile": call("flashtile.fused_mlp", names=[*self.leaves][1:], **options)}
        if self.gated and self.activation == "silu":
            found |= {"liger": _liger_swiglu, "quack": _quack_swiglu}
        elif self.activation == "gelu_tanh":
            names = ("bias1", "bias2")
            found["quack"] = call("quack.mlp.mlp_func", "gelu_tanh_approx", names=names, tuned=False)
        return found


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

    way = call("quack.mlp.mlp_func", "swiglu", tuned=False)(others)
    return replace(way, own_leaves=in_turn, gradients=apart)


_Sizes = list[tuple[Any, ...]]
_NORMS: tuple[_Sizes, _Sizes] = [(16384, width) for width in (1024, 4096, 8192)], [(512, 512)]
#: Each operation with its cases on a GPU, sizes of large language models in bf16, and on a CPU, small ones in fp32.
#: Copies are from the size of the smallest case to that of the largest.
_TABLE: dict[type[Companion], tuple[_Sizes, _Sizes]] = {
    Copy: ([(1024 * mib,) for mib in (32, 128, 256, 1024, 2048)], [(1024,)]),
    LayerNorm: _NORMS,
    RMSNorm: _NORMS,
    DropoutAddLayerNorm: ([(*size, p) for p in (0.1, 0.0) for size in _NORMS[0]], [(512, 512, p) for p in (0.1, 0.0)]),
    DropoutAddRMSNorm: _NORMS,
    Rotary: ([(4, 4096, 32, 128)], [(2, 256, 8, 64)]),
    CausalSoftmax: ([(8, 16, 2048)], [(1, 4, 256)]),
    MaskedSoftmax: ([(8, 16, 2048)], [(1, 4, 256)]),
    CrossEntropy: ([(8192, vocabulary) for vocabulary in (50257, 50304, 128256)], [(256, 1000)]),
    LinearCrossEntropy: ([(16384, 4096, 128256)], [(256, 64, 1000)]),
    FusedDense: ([(16384, 4096, 4096)], [(256, 128, 512)]),
    FusedMLP: (
        [(16384, 4096, 16384, "gelu_tanh"), (16384, 4096, 16384, "silu", True)],
        [(256, 128, 512, "gelu_tanh"), (256, 128, 512, "silu", True)],
    ),
}
OPERATIONS = {kind.op: kind for kind in _TABLE}


def tables(device: torch.device) -> dict[str, list[Companion]]:
    """The cases of each operation, copies first."""
    dtype, place = ("bf16", 0) if device.type == "cuda" else ("fp32", 1)
    return {kind.op: [kind(dtype, *sizes) for sizes in of_kind[place]] for kind, of_kind in _TABLE.items()}
