"""Cases of the context-parallel benchmark, and their inputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

OP = "context-parallel"
PHASES = ("fwd", "fwd+bwd")
#: Multiples of what any layout cuts, small enough for a float64 oracle.
_CHECKED = 512


@dataclass(frozen=True)
class ParallelCase:
    """Attention over S tokens on `gpus` GPUs. Field names are the keys of `case` in a record."""

    B: int
    S: int
    H: int
    Hkv: int
    D: int
    causal: bool
    dtype: str
    gpus: int

    @property
    def name(self) -> str:
        return f"s{self.S}-{'causal' if self.causal else 'full'}-h{self.H}:{self.Hkv}-d{self.D}-{self.gpus}gpus"

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def flops(self, phase: str) -> float:
        """The operations of all GPUs together."""
        forward = 4.0 * self.B * self.H * self.S**2 * self.D / (2 if self.causal else 1)
        return forward * (1 if phase == "fwd" else 3.5)

    @property
    def checked(self) -> ParallelCase:
        """The same over few tokens, whose results are judged before a speed counts."""
        return replace(self, S=min(self.S, _CHECKED * self.gpus))

    def tensors(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and dout of the whole sequence, the same on every rank."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

        def normal(heads: int) -> Tensor:
            return torch.randn(self.B, self.S, heads, self.D, generator=generator, device=device, dtype=dtype)

        return normal(self.H), normal(self.Hkv), normal(self.Hkv), normal(self.H)


def cases_of(device: str, gpus: int, quick: bool = False) -> list[ParallelCase]:
    """32 query and 8 key/value heads of 128 columns, causal and full, 32k to 512k tokens in all."""
    if device == "cpu":
        return [ParallelCase(1, 64 * gpus, 4, 2, 16, True, "fp32", gpus)]
    lengths = (2**15, 2**17) if quick else (2**15, 2**17, 2**18, 2**19)
    # The longest without a mask would take most of the time that the others take together.
    chosen = [(length, causal) for length in lengths for causal in (True, False) if causal or length < 2**19]
    return [ParallelCase(1, length, 32, 8, 128, causal, "bf16", gpus) for length, causal in chosen]
