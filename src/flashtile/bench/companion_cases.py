"""The operations beside attention that memory bounds: norms, rotary embedding, softmax, cross-entropy, and a copy, the
yardstick of all. Each has sizes, tensors, formula, work, and how each implementation is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.companions import Build, Companion, Inputs, Random, Tensors, Way

_EPSILON = 1e-5
_DROPOUT_SEED = (1234567, 89)
_SCALE = 0.125
_MASKED = 0.25
LIGER = "liger_kernel.transformers.functional.liger_"
#: Arithmetic in float32 throughout, as everyone else's; not over the upstream gradient, which the timer reuses.
_LIGER_RMS: dict[str, Any] = {"casting_mode": "gemma", "in_place": False}


def peer(path: str, *arguments: Any, read: Sequence[str] = (), **options: Any) -> Build:
    """A package's function, imported when it is needed, of the leaves, the others that it reads, and arguments."""

    def build(others: dict[str, Tensor]) -> Way:
        module, _, name = path.rpartition(".")
        function, more = getattr(importlib.import_module(module), name), [others[each] for each in read]
        return Way(lambda *leaves: function(*leaves, *more, *arguments, **options))

    return build


def one(random: Random) -> Tensor:
    """The gradient of a loss."""
    return torch.ones((), dtype=random.dtype, device=random.device)


@dataclass(frozen=True)
class Copy(Companion):
    """A copy of a vector into new memory."""

    kib: int

    op: ClassVar[str] = "copy"
    phases: ClassVar[tuple[str, ...]] = ("fwd",)

    @property
    def size(self) -> str:
        return f"{self.kib // 1024}mib" if self.kib % 1024 == 0 else f"{self.kib}kib"

    def width(self) -> int:
        return 1

    def make_inputs(self, random: Random) -> Inputs:
        return Inputs({"x": random.normal(self.kib * 1024 // self.torch_dtype.itemsize)}, {}, [])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (leaves[0].clone(),)

    def ways(self) -> dict[str, Build]:
        """PyTorch's own are the yardstick: the memory copy of the CUDA runtime, which chooses how, and a kernel."""
        return {"eager": self.eager, "compile": self._compiled}

    def bytes(self, phase: str) -> int:
        """Read, and written."""
        return 2 * self.kib * 1024


@dataclass(frozen=True)
class _Norm(Companion):
    """A norm of `[rows, columns]` with weight, and with bias where it is a layer norm."""

    rows: int
    columns: int

    rms: ClassVar[bool]

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {"x": random.normal(self.rows, self.columns), **self._parameters(random)}
        return Inputs(leaves, {}, [random.normal(self.rows, self.columns)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (self._normalise(*leaves),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        function: Callable[..., Tensor] = flashtile.rms_norm if self.rms else flashtile.layer_norm
        return Way(lambda *leaves: function(*leaves, eps=_EPSILON, backend=backend))

    def bytes(self, phase: str) -> int:
        """A backward reads x, the upstream gradient and the weight, and writes dx and the parameters' gradients."""
        parameters, matrix = self.columns * (1 if self.rms else 2), self.rows * self.columns
        elements = 2 * matrix + parameters if phase == "fwd" else 3 * matrix + self.columns + parameters
        return elements * self.torch_dtype.itemsize

    def _parameters(self, random: Random) -> dict[str, Tensor]:
        return {name: random.normal(self.columns) for name in (("weight",) if self.rms else ("weight", "bias"))}

    def _normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.rms:
            return F.rms_norm(x, (self.columns,), weight, _EPSILON)
        return F.layer_norm(x, (self.columns,), weight, bias, _EPSILON)


@dataclass(frozen=True)
class LayerNorm(_Norm):
    """`flashtile.layer_norm` with weight and bias."""

    op: ClassVar[str] = "layer_norm"
    rms: ClassVar[bool] = False

    def peers(self) -> dict[str, Build]:
        return {"liger": peer(f"{LIGER}layer_norm", _EPSILON), "quack": _quack_layer_norm}


@dataclass(frozen=True)
class RMSNorm(_Norm):
    """`flashtile.rms_norm` with weight."""

    op: ClassVar[str] = "rms_norm"
    rms: ClassVar[bool] = True

    def peers(self) -> dict[str, Build]:
        liger = peer(f"{LIGER}rms_norm", _EPSILON, **_LIGER_RMS)
        return {"liger": liger, "quack": peer("quack.rmsnorm.rmsnorm", eps=_EPSILON)}


@dataclass(frozen=True)
class _DropoutAddNorm(_Norm):
    """Dropout of x, addition to the residual, and the norm; the sum is an output too, the next residual."""

    dropout_p: float = 0.0

    label: ClassVar[str] = "p{dropout_p}-{rows}x{columns}"
    outputs: ClassVar[tuple[str, ...]] = ("out", "sum")
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "residual", "keep", "out", "sum"))

    def make_inputs(self, random: Random) -> Inputs:
        shape = (self.rows, self.columns)
        leaves = {"x": random.normal(*shape), "residual": random.normal(*shape), **self._parameters(random)}
        upstream = [random.normal(*shape), random.normal(*shape)]
        if not self.dropout_p:
            return Inputs(leaves, {}, upstream)
        seed = torch.tensor(_DROPOUT_SEED, device=random.device)
        arguments: dict[str, Any] = {"dropout_p": self.dropout_p, "dropout_seed": seed, "backend": "reference"}
        masked = flashtile.dropout_add_rms_norm(leaves["x"], None, None, return_dropout_mask=True, **arguments)
        return Inputs(leaves, {"keep": masked[1], "seed": seed}, upstream)

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, residual, *parameters = leaves
        if self.dropout_p:
            x = x * others["keep"] / (1 - self.dropout_p)
        total = x + residual
        return self._normalise(total, *parameters), total

    def eager(self, others: dict[str, Tensor]) -> Way:
        if not self.dropout_p:
            return super().eager(others)

        def function(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            total = F.dropout(x, self.dropout_p) + residual
            return self._normalise(total, *parameters), total

        return Way(function, own_bits=True)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        function: Callable[..., Any] = flashtile.dropout_add_rms_norm if self.rms else flashtile.dropout_add_layer_norm
        options = {"dropout_p": self.dropout_p, "epsilon": _EPSILON, "prenorm": True, "backend": backend}
        options["dropout_seed"] = others.get("seed")
        return Way(lambda x, residual, weight, bias=None: function(x, residual, weight, bias, **options))

    def bytes(self, phase: str) -> int:
        """Without dropout x and residual have the same gradient, which is written once."""
        parameters, matrix = self.columns * (1 if self.rms else 2), self.rows * self.columns
        if phase == "fwd":
            return (4 * matrix + parameters) * self.torch_dtype.itemsize
        return ((5 if self.dropout_p else 4) * matrix + self.columns + parameters) * self.torch_dtype.itemsize

    def with_bits(self, results: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Kept is what moved the sum by more than half of what it contributes, or what has a gradient.

        Neither is enough alone: an element that is small beside its residual does not move the sum, and a gradient of
        16 bits, itself a sum of two, is exactly 0 now and then. What was dropped shows neither.
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
class DropoutAddLayerNorm(_DropoutAddNorm):
    """`flashtile.dropout_add_layer_norm` with residual, prenorm, weight and bias."""

    op: ClassVar[str] = "dropout_add_layer_norm"
    rms: ClassVar[bool] = False


@dataclass(frozen=True)
class DropoutAddRMSNorm(_DropoutAddNorm):
    """`flashtile.dropout_add_rms_norm` with residual, prenorm and weight."""

    op: ClassVar[str] = "dropout_add_rms_norm"
    rms: ClassVar[bool] = True

    def peers(self) -> dict[str, Build]:
        if self.dropout_p:
            return {}
        return {
            "liger": peer(f"{LIGER}fused_add_rms_norm", _EPSILON, **_LIGER_RMS),
            "quack": _quack_add_rms_norm,
        }


def _quack_add_rms_norm(others: dict[str, Tensor]) -> Way:
    from quack.rmsnorm import rmsnorm

    return Way(lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=_EPSILON, prenorm=True))


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


@dataclass(frozen=True)
class Rotary(Companion):
    """`flashtile.apply_rotary` of `[B, S, H, D]`, whole heads, pairs of elements D / 2 apart; tables in x's dtype."""

    B: int
    S: int
    H: int
    D: int

    op: ClassVar[str] = "rotary"
    label: ClassVar[str] = "{B}x{S}x{H}x{D}"

    def width(self) -> int:
        return self.S * self.H * self.D

    def make_inputs(self, random: Random) -> Inputs:
        shape = (self.B, self.S, self.H, self.D)
        frequencies = 1e4 ** -(torch.arange(self.D // 2, dtype=torch.float64, device=random.device) * 2 / self.D)
        angles = torch.arange(self.S, dtype=torch.float64, device=random.device)[:, None] * frequencies
        tables = {"cos": angles.cos().to(random.dtype), "sin": angles.sin().to(random.dtype)}
        return Inputs({"x": random.normal(*shape)}, tables, [random.normal(*shape)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, second = leaves[0].chunk(2, dim=-1)
        cos, sin = others["cos"][:, None], others["sin"][:, None]  # [S, 1, D / 2]
        return (torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.apply_rotary(x, others["cos"], others["sin"], backend=backend))

    def peers(self) -> dict[str, Build]:
        return {"liger": _liger_rotary, "quack": peer("quack.rotary.apply_rotary_emb", read=("cos", "sin"))}

    def bytes(self, phase: str) -> int:
        return (2 * self.B * self.width() + self.S * self.D) * self.torch_dtype.itemsize


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
class CausalSoftmax(Companion):
    """`flashtile.scaled_causal_softmax` of scores `[B, H, S, S]`."""

    B: int
    H: int
    S: int

    op: ClassVar[str] = "causal_softmax"
    label: ClassVar[str] = "{B}x{H}x{S}x{S}"

    def width(self) -> int:
        return self.H * self.S**2

    def make_inputs(self, random: Random) -> Inputs:
        shape = (self.B, self.H, self.S, self.S)
        return Inputs({"x": random.normal(*shape)}, {"mask": self._mask(random)}, [random.normal(*shape)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return ((leaves[0] * _SCALE).masked_fill(others["mask"], float("-inf")).softmax(dim=-1),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.scaled_causal_softmax(x, _SCALE, backend=backend))

    def bytes(self, phase: str) -> int:
        """What is masked out need not be read, only written."""
        visible, whole = self.S * (self.S + 1) // 2, self.S**2
        return self.B * self.H * ((1 if phase == "fwd" else 2) * visible + whole) * self.torch_dtype.itemsize

    def _mask(self, random: Random) -> Tensor:
        return torch.ones(self.S, self.S, dtype=torch.bool, device=random.device).triu(1)


@dataclass(frozen=True)
class MaskedSoftmax(CausalSoftmax):
    """`flashtile.scaled_masked_softmax` with a mask `[B, 1, S, S]` that takes out a quarter of the keys."""

    op: ClassVar[str] = "masked_softmax"
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "mask", "out"))

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda x: flashtile.scaled_masked_softmax(x, others["mask"], _SCALE, backend=backend))

    def bytes(self, phase: str) -> int:
        """The backward needs the result alone, and no mask."""
        scores = self.B * self.width() * self.torch_dtype.itemsize
        return 2 * scores + self.B * self.S**2 if phase == "fwd" else 3 * scores

    def _mask(self, random: Random) -> Tensor:
        mask = random.booleans(self.B, 1, self.S, self.S, probability=_MASKED)
        mask[..., 0] = False  # the formula has no answer for a row with nothing left
        return mask


@dataclass(frozen=True)
class CrossEntropy(Companion):
    """`flashtile.cross_entropy` of `[rows, vocabulary]`, the mean over rows."""

    rows: int
    vocabulary: int

    op: ClassVar[str] = "cross_entropy"
    label: ClassVar[str] = "{rows}x{vocabulary}"
    widest: ClassVar[str] = "vocabulary"
    phases: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd+bwd")
    outputs: ClassVar[tuple[str, ...]] = ("loss",)
    rowwise: ClassVar[frozenset[str]] = frozenset(("logits", "labels"))

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {"logits": random.normal(self.rows, self.vocabulary)}
        return Inputs(leaves, {"labels": random.labels(self.rows, self.vocabulary)}, [one(random)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (F.cross_entropy(leaves[0], others["labels"]),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        return Way(lambda logits: flashtile.cross_entropy(logits, others["labels"], backend=backend))

    def peers(self) -> dict[str, Build]:
        quack = peer("quack.cross_entropy.cross_entropy", read=["labels"], reduction="mean")
        return {"liger": peer(f"{LIGER}cross_entropy", read=["labels"]), "quack": quack}

    def lacks(self, implementation: str, phase: str) -> str | None:
        """Liger's backward has nothing left to do."""
        return "computes its gradient in the forward" if (implementation, phase) == ("liger", "bwd") else None

    def bytes(self, phase: str) -> int:
        """Together, forward and backward could read the logits once."""
        return (1 if phase == "fwd" else 2) * self.rows * self.vocabulary * self.torch_dtype.itemsize
