"""Cases of the norms, alone and after dropout and addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.bench.companions.case import Build, Case, Inputs, Random, Tensors, Way

_EPSILON = 1e-5
_DROPOUT_SEED = (1234567, 89)


@dataclass(frozen=True)
class _Norm(Case):
    """A norm of `[rows, columns]` with weight, and with bias where it is a layer norm."""

    rows: int
    columns: int

    rms: ClassVar[bool]

    def sizes(self) -> Sequence[str]:
        return (f"{self.rows}x{self.columns}",)

    def width(self) -> int:
        return self.columns

    def make_inputs(self, random: Random) -> Inputs:
        leaves = {"x": random.normal(self.rows, self.columns), **self._parameters(random)}
        return Inputs(leaves, {}, [random.normal(self.rows, self.columns)])

    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, *parameters = leaves
        return (self._normalise(x, *parameters),)

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        function: Callable[..., Tensor] = flashtile.rms_norm if self.rms else flashtile.layer_norm
        return Way(lambda *leaves: function(*leaves, eps=_EPSILON, backend=backend))

    def bytes(self, phase: str) -> int:
        parameters = self.columns * (1 if self.rms else 2)
        matrix = self.rows * self.columns
        # Backward: x, the upstream gradient and the weight are read; dx and the parameters' gradients written.
        elements = 2 * matrix + parameters if phase == "fwd" else 3 * matrix + self.columns + parameters
        return elements * self.torch_dtype.itemsize

    def _parameters(self, random: Random) -> dict[str, Tensor]:
        names = ("weight",) if self.rms else ("weight", "bias")
        return {name: random.normal(self.columns) for name in names}

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
        return {"liger": _liger_layer_norm, "quack": _quack_layer_norm}


@dataclass(frozen=True)
class RMSNorm(_Norm):
    """`flashtile.rms_norm` with weight."""

    op: ClassVar[str] = "rms_norm"
    rms: ClassVar[bool] = True

    def peers(self) -> dict[str, Build]:
        return {"liger": _liger_rms_norm, "quack": _quack_rms_norm}


@dataclass(frozen=True)
class _DropoutAddNorm(_Norm):
    """Dropout of x, addition to the residual, and the norm; the sum is an output too, the next residual."""

    dropout_p: float = 0.0

    outputs: ClassVar[tuple[str, ...]] = ("out", "sum")
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "residual", "keep", "out", "sum"))

    def sizes(self) -> Sequence[str]:
        return (f"p{self.dropout_p}", *super().sizes())

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

        def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return function(x, residual, weight, bias, **options)

        return Way(call)

    def bytes(self, phase: str) -> int:
        parameters = self.columns * (1 if self.rms else 2)
        matrix = self.rows * self.columns
        if phase == "fwd":
            return (4 * matrix + parameters) * self.torch_dtype.itemsize
        # Without dropout x and residual have the same gradient, which is written once.
        matrices = 5 if self.dropout_p else 4
        return (matrices * matrix + self.columns + parameters) * self.torch_dtype.itemsize

    def with_bits_of(self, results: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
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
        return {"liger": _liger_add_rms_norm, "quack": _quack_add_rms_norm}


def _liger_layer_norm(others: dict[str, Tensor]) -> Way:
    from liger_kernel.transformers.functional import liger_layer_norm

    return Way(lambda x, weight, bias: liger_layer_norm(x, weight, bias, _EPSILON))


#: Arithmetic in float32 throughout, as everyone else's; not over the upstream gradient, which the timer reuses.
_LIGER_RMS: dict[str, Any] = {"casting_mode": "gemma", "in_place": False}


def _liger_rms_norm(others: dict[str, Tensor]) -> Way:
    from liger_kernel.transformers.functional import liger_rms_norm

    return Way(lambda x, weight: liger_rms_norm(x, weight, _EPSILON, **_LIGER_RMS))


def _liger_add_rms_norm(others: dict[str, Tensor]) -> Way:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return Way(lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, _EPSILON, **_LIGER_RMS))


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

    def widen(leaves: Tensors) -> Tensors:
        return [leaves[0], *(t.float() for t in leaves[1:])]

    return Way(LayerNormOf.apply, own_leaves=widen)


def _quack_rms_norm(others: dict[str, Tensor]) -> Way:
    from quack.rmsnorm import rmsnorm

    return Way(lambda x, weight: rmsnorm(x, weight, eps=_EPSILON))


def _quack_add_rms_norm(others: dict[str, Tensor]) -> Way:
    from quack.rmsnorm import rmsnorm

    return Way(lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=_EPSILON, prenorm=True))
