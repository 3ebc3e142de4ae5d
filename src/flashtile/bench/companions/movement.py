"""The yardstick of everything that is bound by memory: a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flashtile.bench.companions.case import Build, Case, Inputs, Random


@dataclass(frozen=True)
class Copy(Case):
    """A copy of a vector into new memory."""

    kib: int

    op: ClassVar[str] = "copy"
    phases: ClassVar[tuple[str, ...]] = ("fwd",)

    def sizes(self) -> Sequence[str]:
        return (f"{self.kib // 1024}mib" if self.kib % 1024 == 0 else f"{self.kib}kib",)

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
