"""What a case of a companion operation is: sizes, tensors, the plain formula, its work, and ways to compute it.

The formula, in ordinary PyTorch functions, serves three times: as the implementations `eager` and `compile`, in
float64 as the oracle, and in the dtype of the inputs as what the tolerance policy compares with.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashtile.bench.cases import DTYPES

Tensors = list[Tensor]
#: Leaves in the order of `Inputs.leaves` -> the output, or outputs.
Function = Callable[..., Any]


@dataclass
class Inputs:
    """Tensors of a case.

    Attributes:
        leaves: what takes a gradient, by name.
        others: what takes none: labels, masks, tables.
        upstream: gradients of the outputs, in their order.
    """

    leaves: dict[str, Tensor]
    others: dict[str, Tensor]
    upstream: Tensors


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Way:
    """How an implementation computes a case, in the layout it calls its own.

    Attributes:
        function: own leaves -> its outputs.
        own_leaves: from the case's leaves.
        own_upstream: from the gradients of the case's outputs.
        outputs: from its outputs to the case's.
        gradients: from the gradients of its leaves to those of the case's.
        own_bits: drops elements by random bits of its own, which must be read off its results.
    """

    function: Function
    own_leaves: Callable[[Tensors], Tensors] = _same
    own_upstream: Callable[[Tensors], Tensors] = _same
    outputs: Callable[[Tensors], Tensors] = _same
    gradients: Callable[[Tensors], Tensors] = _same
    own_bits: bool = False


#: Makes a way from `Inputs.others`.
Build = Callable[[dict[str, Tensor]], Way]

_BACKENDS = {"flashtile-triton": "triton", "flashtile-cpu": "cpu"}


class Random:
    """Random tensors of a case, drawn on the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        # In the dtype itself: the largest inputs would take twice their memory in float32.
        drawn = torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)
        return drawn if scale == 1.0 else drawn.mul_(scale)

    def labels(self, rows: int, classes: int) -> Tensor:
        return torch.randint(classes, (rows,), generator=self._generator, device=self.device)

    def booleans(self, *shape: int, probability: float) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device) < probability


@dataclass(frozen=True)
class Case(ABC):
    """One call of a companion operation. Field names are the keys of `case` in a record.

    Attributes of the class:
        op: name of the operation in records and options.
        phases: what is measured.
        outputs: names of what the formula returns.
        rowwise: names of leaves, others and outputs that have a row (first dimension) for each row of the problem. The
            other leaves belong to all rows, and the other outputs are means over them.
    """

    dtype: str

    op: ClassVar[str]
    phases: ClassVar[tuple[str, ...]] = ("fwd", "bwd")
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "out"))

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Case:
        """The case of a record's row."""
        return cls(**record)

    def record(self) -> dict[str, Any]:
        """The `case` object of a record: the same for every implementation."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def name(self) -> str:
        """A readable identifier, such as `layer_norm-16384x4096-bf16`, that `--cases` patterns match."""
        return "-".join([self.op, *self.sizes(), self.dtype])

    @abstractmethod
    def sizes(self) -> Sequence[str]:
        """The parts of the name between operation and dtype."""

    @abstractmethod
    def width(self) -> int:
        """Elements of the widest matrix of the formula, for each row of the problem."""

    @abstractmethod
    def make_inputs(self, random: Random) -> Inputs:
        """Its tensors."""

    @abstractmethod
    def formula(self, leaves: Sequence[Tensor], others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs in plain PyTorch, in the dtype of the leaves, for any number of rows."""

    @abstractmethod
    def bytes(self, phase: str) -> int:
        """Bytes that must move at least: every input read once, every output written once."""

    def flops(self, phase: str) -> float | None:
        """Floating-point operations of the products; None where bytes are what counts."""
        return None

    def ways(self) -> dict[str, Build]:
        """Name of an implementation that has the operation -> how it computes it; peers are imported there."""
        ours = {name: functools.partial(self.flashtile, backend) for name, backend in _BACKENDS.items()}
        return {**ours, "eager": self.eager, "compile": self._compiled, **self.peers()}

    def flashtile(self, backend: str, others: dict[str, Tensor]) -> Way:
        """Ours; every operation that names us among its `ways` has it."""
        raise AssertionError(f"{self.op} is no operation of flashtile")

    def eager(self, others: dict[str, Tensor]) -> Way:
        """The formula as PyTorch runs it."""
        return Way(lambda *leaves: self.formula(leaves, others))

    def peers(self) -> dict[str, Build]:
        """The packages that have the operation."""
        return {}

    def lacks(self, implementation: str, phase: str) -> str | None:
        """Why an implementation that has the operation cannot run one of its phases, or None."""
        return None

    def _compiled(self, others: dict[str, Tensor]) -> Way:
        """The same formula through `torch.compile`, for these sizes alone."""
        torch.compiler.reset()  # the limit on recompilations counts those of all cases together
        way = self.eager(others)
        return replace(way, function=torch.compile(way.function, dynamic=False, fullgraph=True))

    def with_bits_of(self, results: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`others` with the random bits of an implementation that draws its own, read off its results.

        Raises:
            AssertionError: they cannot be such bits.
        """
        raise AssertionError(f"{self.op} draws no random bits")
