"""What a kernel does: arithmetic, and what it moves; and how long that takes at least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from flashtile.io_model.devices import Device

#: Integer operations of a call of Philox, which draws four words: ten rounds of two 64-bit products (two operations
#: each), two triple exclusive-ors and two additions to the key.
PHILOX_INTEGERS = 80


@dataclass(frozen=True)
class Transfer:
    """A tensor that a kernel reads or writes.

    Attributes:
        tensor: its name.
        size: bytes of it, each counted once.
        passes: how often these cross device memory.
        requests: how often they go between the cache and the programs.
        writes: into the tensor.
    """

    tensor: str
    size: int
    passes: float = 1.0
    requests: float = 1.0
    writes: bool = False

    @property
    def bytes(self) -> float:
        """Bytes through device memory."""
        return self.size * self.passes

    @property
    def requested(self) -> float:
        """Bytes between the cache and the multiprocessors."""
        return self.size * self.requests


@dataclass(frozen=True)
class Work:
    """A kernel.

    Attributes:
        name: what it computes.
        phase: "fwd" or "bwd".
        dtype: of its products.
        transfers: what it reads and writes.
        flops: floating-point operations of its matrix products, what it computes of hidden pairs included.
        exponentials: of scores.
        words: 32-bit random words for dropout.
    """

    name: str
    phase: str
    dtype: torch.dtype
    transfers: tuple[Transfer, ...]
    flops: float = 0.0
    exponentials: float = 0.0
    words: float = 0.0

    @property
    def bytes_read(self) -> float:
        return sum(transfer.bytes for transfer in self.transfers if not transfer.writes)

    @property
    def bytes_written(self) -> float:
        return sum(transfer.bytes for transfer in self.transfers if transfer.writes)

    @property
    def bytes(self) -> float:
        """Through device memory."""
        return self.bytes_read + self.bytes_written

    @property
    def requested(self) -> float:
        """Bytes between the cache and the multiprocessors: those through device memory if there were no cache."""
        return sum(transfer.requested for transfer in self.transfers)

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte of device memory."""
        return self.flops / self.bytes if self.bytes else 0.0

    def times(self, device: Device) -> dict[str, float]:
        """Seconds that each part takes at the device's peak: "memory", "cache", "tensor cores" (float32 and float64:
        "arithmetic"), "exponentials" and "random numbers".

        Raises:
            ValueError: the device has no rate for products of this dtype.
        """
        if self.flops and self.dtype not in device.flops:
            raise ValueError(
                f"dtype: {device.name} has no rate for products of {self.dtype}; there are "
                f"{', '.join(map(str, device.flops))}"
            )
        products = "tensor cores" if self.dtype.itemsize == 2 and device.arch != "cpu" else "arithmetic"
        return {
            "memory": self.bytes / device.bandwidth,
            "cache": self.requested / device.cache_bandwidth if device.cache_bandwidth else 0.0,
            products: self.flops / device.flops[self.dtype] if self.flops else 0.0,
            "exponentials": self.exponentials / device.exponentials,
            "random numbers": self.words / 4 * PHILOX_INTEGERS / device.integers,
        }

    def seconds(self, device: Device) -> float:
        """The least time: that of the longest part, as if all parts ran beside each other at their peaks."""
        return max(self.times(device).values())

    def bound(self, device: Device) -> str:
        """The part that takes longest."""
        return longest(self.times(device))


def longest(times: Mapping[str, float]) -> str:
    return max(times, key=lambda part: times[part])


@dataclass(frozen=True)
class Computation:
    """Kernels one after another.

    Attributes:
        name: of the computation, for reading.
        kernels: in the order in which they run.
    """

    name: str
    kernels: tuple[Work, ...]

    def phase(self, phase: str) -> Computation:
        """Its kernels of phase "fwd" or "bwd" alone."""
        return Computation(f"{self.name} {phase}", tuple(work for work in self.kernels if work.phase == phase))

    @property
    def flops(self) -> float:
        return sum(work.flops for work in self.kernels)

    @property
    def exponentials(self) -> float:
        return sum(work.exponentials for work in self.kernels)

    @property
    def bytes_read(self) -> float:
        return sum(work.bytes_read for work in self.kernels)

    @property
    def bytes_written(self) -> float:
        return sum(work.bytes_written for work in self.kernels)

    @property
    def bytes(self) -> float:
        """Through device memory."""
        return self.bytes_read + self.bytes_written

    @property
    def requested(self) -> float:
        """Bytes between the cache and the multiprocessors."""
        return sum(work.requested for work in self.kernels)

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte of device memory."""
        return self.flops / self.bytes if self.bytes else 0.0

    def times(self, device: Device) -> dict[str, float]:
        """Seconds of each part at the device's peak, summed over the kernels."""
        return _sum(work.times(device) for work in self.kernels)

    def seconds(self, device: Device) -> float:
        """The least time: the sum of that of the kernels."""
        return sum(work.seconds(device) for work in self.kernels)

    def bound(self, device: Device) -> str:
        """The bound of the kernels that take most of the time together."""
        return longest(_sum({work.bound(device): work.seconds(device)} for work in self.kernels))


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
