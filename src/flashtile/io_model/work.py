"""The work of a kernel: arithmetic and transfers, and the least time that they take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from flashtile.io_model.devices import Device

#: Integer operations of a call of Philox, which draws the bits of four weights: seven rounds of a 64-bit product (two
#: operations), a triple exclusive-or and an addition to the key.
PHILOX_INTEGERS = 28


@dataclass(frozen=True)
class Transfer:
    """A tensor that a kernel reads or writes.

    Attributes:
        tensor: its name.
        size: its bytes, each counted once.
        passes: how often these bytes cross device memory.
        requests: how often they move between the cache and the thread blocks.
        writes: the kernel writes the tensor.
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


class _Moves:
    """What follows from the transfers and the products of a kernel, or of several."""

    transfers: tuple[Transfer, ...]
    flops: float

    @property
    def bytes_read(self) -> float:
        return sum(transfer.bytes for transfer in self.transfers if not transfer.writes)

    @property
    def bytes_written(self) -> float:
        return sum(transfer.bytes for transfer in self.transfers if transfer.writes)

    @property
    def bytes(self) -> float:
        """Bytes through device memory."""
        return self.bytes_read + self.bytes_written

    @property
    def requested(self) -> float:
        """Bytes between the cache and the multiprocessors: the bytes through device memory if there were no cache."""
        return sum(transfer.requested for transfer in self.transfers)

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte of device memory."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Work(_Moves):
    """A kernel.

    Attributes:
        name: what it computes.
        phase: "fwd" or "bwd".
        dtype: dtype of its matrix products.
        transfers: the tensors that it reads and writes.
        flops: floating-point operations of its matrix products, including those for hidden pairs.
        exponentials: number of exponentials.
        words: 32-bit random words for dropout.
    """

    name: str
    phase: str
    dtype: torch.dtype
    transfers: tuple[Transfer, ...]
    flops: float = 0.0
    exponentials: float = 0.0
    words: float = 0.0

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
        """The least time: that of the longest part, if all parts ran at the same time and at their peaks."""
        return max(self.times(device).values())

    def bound(self, device: Device) -> str:
        """The part that takes longest."""
        return longest(self.times(device))


def longest(times: Mapping[str, float]) -> str:
    return max(times, key=lambda part: times[part])


@dataclass(frozen=True)
class Computation(_Moves):
    """Kernels that run one after another.

    Attributes:
        name: name of the computation.
        kernels: in the order in which they run.
    """

    name: str
    kernels: tuple[Work, ...]

    def phase(self, phase: str) -> Computation:
        """Only the kernels of phase "fwd" or "bwd"."""
        return Computation(f"{self.name} {phase}", tuple(work for work in self.kernels if work.phase == phase))

    @property
    def transfers(self) -> tuple[Transfer, ...]:  # type: ignore[override]
        return tuple(transfer for work in self.kernels for transfer in work.transfers)

    @property
    def flops(self) -> float:  # type: ignore[override]
        return sum(work.flops for work in self.kernels)

    @property
    def exponentials(self) -> float:
        return sum(work.exponentials for work in self.kernels)

    def times(self, device: Device) -> dict[str, float]:
        """Seconds of each part at the device's peak, summed over the kernels."""
        return _sum(work.times(device) for work in self.kernels)

    def seconds(self, device: Device) -> float:
        """The least time: the sum over the kernels."""
        return sum(work.seconds(device) for work in self.kernels)

    def bound(self, device: Device) -> str:
        """The bound of those kernels that together take most of the time."""
        return longest(_sum({work.bound(device): work.seconds(device)} for work in self.kernels))


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
