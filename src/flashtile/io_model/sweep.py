"""Traffic and time of the forward against the size of its tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashtile.io_model.devices import Device
from flashtile.io_model.kernels import Cut
from flashtile.io_model.shape import Shape
from flashtile.io_model.tiled import tiled

_STAGES = 2


@dataclass(frozen=True)
class SweepPoint:
    """The forward with one tile size.

    Attributes:
        block_q: queries of a tile.
        block_k: keys of a tile.
        bytes: bytes through device memory.
        requested: bytes between cache and multiprocessors, which would cross device memory if there were no cache.
        shared_memory: bytes of a thread block: the tile of queries, and two tiles each of keys and values.
        fits: whether a multiprocessor has this much.
        seconds: least time.
        bound: the part that takes this time.
    """

    block_q: int
    block_k: int
    bytes: float
    requested: float
    shared_memory: int
    fits: bool
    seconds: float
    bound: str


def sweep(
    shape: Shape,
    device: Device,
    block_q: Iterable[int] = (16, 32, 64, 128, 256),
    block_k: Iterable[int] = (64,),
) -> list[SweepPoint]:
    """A point for each pair of sizes, for the portable forward kernel.

    Raises:
        ValueError: a size below 1.
    """
    keys = list(block_k)
    return [_point(shape, device, rows, columns) for rows in block_q for columns in keys]


def _point(shape: Shape, device: Device, block_q: int, block_k: int) -> SweepPoint:
    columns = block_q * shape.head_dim + _STAGES * block_k * (shape.head_dim + shape.dim_v)
    shared = shape.dtype.itemsize * columns
    cut = Cut("forward", "triton", block_q, block_k, 4 if block_q <= 64 else 8, shared)
    (work,) = tiled(shape, device, [cut]).kernels
    fits = shared <= device.shared_memory
    return SweepPoint(
        block_q, block_k, work.bytes, work.requested, shared_memory=shared, fits=fits,
        seconds=work.seconds(device), bound=work.bound(device),
    )  # fmt: skip
