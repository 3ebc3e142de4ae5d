"""How flashtile would cut a call into tiles, as `flashtile.explain` tells it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flashtile
from flashtile.io_model.devices import Device
from flashtile.io_model.shape import Shape

#: Rows and keys of a tile of the CPU backend.
_CPU_BLOCK = 256
#: Warps of a multiprocessor whose threads have the 128 registers that kernels of matrix products take at least.
_WARPS = 16


@dataclass(frozen=True)
class Cut:
    """A kernel and its tiles.

    Attributes:
        name: "forward", "dq", "dkdv", or "backward" if one kernel computes all gradients.
        backend: backend of the kernel: "split", "triton", "hopper" or "cpu".
        block_q: queries of a tile; for "split" times the query heads that share a key/value head.
        block_k: keys of a tile.
        warps: warps of a thread block; None if a thread block has a multiprocessor for itself.
        shared_memory: bytes of shared memory of a thread block.
        statistics: bytes of lse and delta for each query between the kernels of a backward.

    Raises:
        ValueError: an unknown name or backend, or a tile without rows.
    """

    name: str
    backend: str
    block_q: int
    block_k: int
    warps: int | None = None
    shared_memory: int = 0
    statistics: int = 8

    def __post_init__(self) -> None:
        both = "forward", "backward"
        known = {"split": ("forward",), "triton": ("forward", "dq", "dkdv"), "hopper": both, "cpu": both}
        if self.name not in known.get(self.backend, ()):
            raise ValueError(f"cut: expected one of {known} as backend and name, got {self.backend!r}, {self.name!r}")
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"cut: expected tiles of at least 1 × 1, got {self.block_q} × {self.block_k}")

    def at_once(self, device: Device) -> int:
        """Number of thread blocks that a device runs at the same time."""
        if self.backend == "cpu":
            return 1  # one Python thread walks over the tiles
        if self.warps is None:
            return device.multiprocessors
        fitting = [_WARPS // self.warps]
        if self.shared_memory:
            fitting.append(device.shared_memory // self.shared_memory)
        return device.multiprocessors * max(1, min(fitting))


def kernels_of(shape: Shape, arch: str, backend: str = "auto") -> tuple[Cut, ...]:
    """The kernels of a call, forward and backward, with the tiles that flashtile chooses.

    Args:
        shape: the call.
        arch: an architecture of `flashtile.explain`, or "cpu".
        backend: as in `flashtile.attention`; the reference has no tiles.

    Raises:
        ValueError: no backend with tiles serves the call there.
    """

    def meta(heads: int, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(shape.batch, rows, heads, columns, dtype=shape.dtype, device="meta")

    q = meta(shape.heads, shape.seq_q, shape.head_dim)
    k, v = (meta(shape.kv_heads, shape.keys, columns) for columns in (shape.head_dim, shape.dim_v))
    options = {"causal": shape.causal, "align": shape.align, "window": shape.window, "dropout_p": shape.dropout_p}
    answer = flashtile.explain(q, k, v, **options, backend=backend, device=arch)  # type: ignore[arg-type]
    if answer.backend is None:
        raise ValueError(f"shape: no kernels for it on {arch}: {answer.reason}")
    if answer.backend == "reference":
        raise ValueError("backend: expected one with tiles, got 'reference'; `standard` models that computation")
    if answer.backend == "cpu":
        return tuple(Cut(name, "cpu", _CPU_BLOCK, _CPU_BLOCK) for name in ("forward", "backward"))
    found = []
    for kernel in answer.kernels:
        assert kernel.tiles is not None
        warps = getattr(kernel.tiles, "num_warps", None)
        group = shape.heads // shape.kv_heads if kernel.backend == "split" else 1
        block_q = max(1, kernel.tiles.block_m // group)
        statistics = getattr(kernel.tiles, "statistics_bytes", Cut.statistics)
        found.append(
            Cut(kernel.name, kernel.backend, block_q, kernel.tiles.block_n, warps, kernel.shared_memory, statistics)
        )
    return tuple(found)
