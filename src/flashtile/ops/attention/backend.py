"""Descriptions of the kernels that a backend of attention would run for a call.

The package of each backend has a `backend.py` with `unsupported_reason` and `describe`, which need no Triton; `BACKEND`
puts them together with the name and with the module of `forward` and `backward`. `select` has the list of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelChoice:
    """A kernel that a call runs.

    Attributes:
        name: "forward", "dq", "dkdv", "short_backward" where one kernel computes all gradients, or "dbias" for the
            gradient of a bias; on Hopper "forward" or "backward", "dv", "dk" and "dq" where each is a kernel, and
            before them "widen" for 8-bit values and "parts" for float32; on the CPU a description of what computes the
            call.
        tiles: block sizes, warps and stages; None if the kernel has no tiles of flashtile's.
        shared_memory: estimate of the shared memory of one thread block in bytes; 0 if it uses none.
        backend: the backend of the kernel. Forward and backward may have different ones.
        parts: into how many parts the keys of a sequence are split.
        summary: the tiles in words.
    """

    name: str
    tiles: Any = None
    shared_memory: int = 0
    backend: str = ""
    parts: int = 1
    summary: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.backend}): {self.summary}" if self.summary else self.name


def summarise(
    block: tuple[int, int], warps: str, stages: int, shared_memory: int, rows: str = "queries", more: str = ""
) -> str:
    """Tiles in words, for `KernelChoice.summary`. `block`: rows and keys of a tile; `more`: what else there is."""
    return (
        f"{block[0]} {rows} × {block[1]} keys, {warps}, {stages} stages, about {shared_memory // 1024} KiB of shared "
        f"memory{more}"
    )
