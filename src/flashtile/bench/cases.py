"""Cases of the attention benchmark: shapes, their work in FLOPs and bytes, and the tables that are measured.

Shape letters: B batch, S sequence, H query heads, Hkv key/value heads, D head_dim of q and k, Dv head_dim of v.
"""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

#: The backward recomputes the scores and makes four more products of the size of the forward's two.
_BACKWARD_FLOPS = 2.5


class ChoiceError(ValueError):
    """A case or an implementation was asked for that is not there."""


@dataclass(frozen=True)
class Case:
    """One attention call with as many queries as keys. Field names are the keys of `case` in a record."""

    B: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        """A readable identifier, such as `d64-causal-s2048-bf16`, that `--cases` patterns match."""
        head_dim = f"d{self.D}" if self.D == self.Dv else f"d{self.D}:{self.Dv}"
        window = "" if self.window is None else "-w" + ":".join("inf" if n is None else str(n) for n in self.window)
        dropout = f"-p{self.dropout_p}" if self.dropout_p else ""
        return f"{head_dim}-{'causal' if self.causal else 'full'}{window}{dropout}-s{self.S}-{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def record(self) -> dict[str, Any]:
        """The `case` object of a record: the same for every implementation."""
        return {**asdict(self), "window": None if self.window is None else list(self.window)}

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flashtile.attention`, without the dropout seed."""
        return {"causal": self.causal, "window": self.window, "dropout_p": self.dropout_p}

    def visible_pairs(self) -> float:
        """(query, key) pairs that count as work: S², half of it for causal by convention, exact for a window."""
        if self.window is None:
            return self.S**2 / (2 if self.causal else 1)
        left, right = self.window
        left = self.S if left is None else left
        right = 0 if self.causal else self.S if right is None else right
        return sum(min(self.S - 1, row + right) - max(0, row - left) + 1 for row in range(self.S))

    def flops(self, phase: str) -> float:
        """Floating-point operations of phase "fwd" or "bwd"."""
        forward = 2 * self.B * self.H * self.visible_pairs() * (self.D + self.Dv)
        return forward if phase == "fwd" else _BACKWARD_FLOPS * forward

    def bytes(self, phase: str) -> int:
        """Bytes that must move at least: every input read once, every output written once."""
        q, out = self.H * self.D, self.H * self.Dv
        key_value = self.Hkv * (self.D + self.Dv)
        elements = q + key_value + out if phase == "fwd" else 2 * (q + key_value + out)
        return self.B * self.S * elements * self.torch_dtype.itemsize


@dataclass
class Inputs:
    """Tensors of a case in flashtile's layout, `[B, S, H, D]`; `dropout_seed` is None without dropout."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dropout_seed: Tensor | None


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Random normal inputs, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, head_dim: int) -> Tensor:
        shape = (case.B, case.S, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    dropout_seed = torch.tensor([1234567 + seed, 89], device=device) if case.dropout_p else None
    return Inputs(
        q=normal(case.H, case.D),
        k=normal(case.Hkv, case.D),
        v=normal(case.Hkv, case.Dv),
        dout=normal(case.H, case.Dv),
        dropout_seed=dropout_seed,
    )


def cuda_cases() -> list[Case]:
    """16,384 tokens and a model width of 2048 in every case, bf16, as published attention benchmarks use."""
    lengths = {64: (512, 1024, 2048, 4096, 8192, 16384), 128: (512, 1024, 2048, 4096, 8192, 16384), 256: (2048, 8192)}
    return [
        Case(16384 // seq, seq, 2048 // head_dim, 2048 // head_dim, head_dim, head_dim, causal=causal)
        for head_dim, seqs in lengths.items()
        for causal in (False, True)
        for seq in seqs
    ]


def cpu_cases() -> list[Case]:
    """Four heads of 64, 1k to 8k tokens, both dtypes, and one case each for a window and for dropout."""
    plain = [
        Case(1, seq, 4, 4, 64, 64, causal=causal, dtype=dtype)
        for dtype in ("fp32", "bf16")
        for causal in (False, True)
        for seq in (1024, 2048, 4096, 8192)
    ]
    window = Case(1, 4096, 4, 4, 64, 64, causal=True, window=(256, 0), dtype="fp32")
    dropout = Case(1, 2048, 4, 4, 64, 64, causal=True, dropout_p=0.1, dtype="fp32")
    return [*plain, window, dropout]


def default_cases(device: torch.device, quick: bool = False) -> list[Case]:
    """The table for a device; `quick` keeps a few cases that show every kind."""
    if device.type == "cuda":
        cases = cuda_cases()
        return [case for case in cases if case.D == 128 and case.S in (2048, 8192)] if quick else cases
    cases = cpu_cases()
    return [case for case in cases if case.S == 1024] if quick else cases


def select_cases(cases: list[Case], patterns: list[str]) -> list[Case]:
    """The cases whose name matches one of the shell patterns (`d64-causal-*`); a bare word matches anywhere.

    Raises:
        ChoiceError: a pattern matches no case.
    """
    if not patterns:
        return cases
    chosen: list[Case] = []
    for pattern in patterns:
        glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = [case for case in cases if fnmatch.fnmatch(case.name, glob)]
        if not found:
            names = ", ".join(case.name for case in cases)
            raise ChoiceError(f"--cases: {pattern!r} matches no case; there are: {names}")
        chosen += [case for case in found if case not in chosen]
    return chosen
