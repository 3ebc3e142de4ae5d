"""Data sheets of devices, as the model needs them, each with its source.

Rates are peaks. Nothing reaches them, so that what follows from them is the least time, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

#: 16-bit floating point, whose products all devices here multiply at one rate.
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    Attributes:
        name: name of the device, also for `find_device`.
        arch: architecture as in `flashtile.explain`; "cpu" for a processor.
        bandwidth: bytes per second of device memory.
        cache: bytes of the last cache before device memory.
        cache_bandwidth: bytes per second from that cache; None if it is not published.
        flops: dtype -> floating-point operations per second of dense matrix products.
        exponentials: exponentials per second.
        integers: 32-bit integer operations per second, for the random numbers of dropout.
        multiprocessors: number of multiprocessors (AMD: compute units; a processor: threads).
        shared_memory: bytes of on-chip memory of a multiprocessor; 0 for a processor.
        split_cache: each half of the cache holds its own copy of what is read, so that half of the cache counts.
    """

    name: str
    arch: str
    bandwidth: float
    cache: int
    cache_bandwidth: float | None
    flops: dict[torch.dtype, float] = field(hash=False)
    exponentials: float
    integers: float
    multiprocessors: int
    shared_memory: int
    split_cache: bool = False

    @property
    def held(self) -> int:
        """Bytes that the cache can hold for all multiprocessors."""
        return self.cache // 2 if self.split_cache else self.cache


_KIB, _MIB = 2**10, 2**20
_GIGA, _TERA = 1e9, 1e12


class _Gpu(NamedTuple):
    """The data sheet of an NVIDIA GPU: GB/s, MiB of cache, TFLOP/s of 16-bit and of float32 products,
    multiprocessors, GHz, KiB of shared memory, and bytes of the cache's two halves per clock."""

    arch: str
    bandwidth: float
    cache: int
    tensor: float
    single: float
    multiprocessors: int
    clock: float
    shared: int
    cache_rate: int | None = None

    def device(self, name: str) -> Device:
        """The other rates are per multiprocessor and clock, from table "Throughput of Native Arithmetic Instructions"
        of the CUDA programming guide: 16 exponentials (special functions) and 64 integer operations on all of these."""
        clocks = self.multiprocessors * self.clock * _GIGA
        return Device(
            name, self.arch, self.bandwidth * _GIGA, self.cache * _MIB,
            cache_bandwidth=None if self.cache_rate is None else self.cache_rate * self.clock * _GIGA,
            flops={**dict.fromkeys(HALF, self.tensor * _TERA), torch.float32: self.single * _TERA},
            exponentials=16 * clocks, integers=64 * clocks, multiprocessors=self.multiprocessors,
            shared_memory=self.shared * _KIB, split_cache=self.cache_rate is not None,
        )  # fmt: skip


#: Sources: NVIDIA A100 data sheet and whitepaper (312 TFLOP/s bfloat16, 19.5 float32, 40 MB of L2 in two partitions
#: that deliver 5,120 bytes per clock); H100 data sheet, SXM (989 and 67 TFLOP/s, 3.35 TB/s, 132 multiprocessors, 50 MB
#: of L2 in two partitions); H200 data sheet (4.8 TB/s, else as H100); HGX B200 data sheet, an eighth of its eight GPUs
#: (2,250 dense and 75 TFLOP/s, 8 TB/s), L2 of 126 MB and 148 multiprocessors as its driver reports them; Ada
#: whitepaper for the RTX 4090 (165.2 TFLOP/s with float32 sums, 82.6 float32, 1,008 GB/s, 72 MB of L2, 128
#: multiprocessors at 2.52 GHz); AMD Instinct MI300X data sheet (1,307 and 163.4 TFLOP/s, 5.3 TB/s, 304 compute units
#: at 2.1 GHz, 256 MB of Infinity Cache that delivers 17.2 TB/s). Clocks are those at which the products were stated.
#: The L2's bytes per clock are published for the A100 alone, and assumed for H100, H200 and B200.
_NVIDIA = {
    "A100": _Gpu("sm_80", 2039, 40, 312, 19.5, 108, 1.41, shared=164, cache_rate=5120),
    "A100-40GB": _Gpu("sm_80", 1555, 40, 312, 19.5, 108, 1.41, shared=164, cache_rate=5120),
    "H100": _Gpu("sm_90", 3350, 50, 989.4, 66.9, 132, 1.83, shared=228, cache_rate=5120),
    "H200": _Gpu("sm_90", 4800, 50, 989.4, 66.9, 132, 1.83, shared=228, cache_rate=5120),
    "B200": _Gpu("sm_100", 8000, 126, 2250, 75, 148, 1.85, shared=228, cache_rate=5120),
    "RTX 4090": _Gpu("sm_89", 1008, 72, 165.2, 82.6, 128, 2.52, shared=100),
}
_MI300X = Device(
    "MI300X", "gfx942", 5300 * _GIGA, 256 * _MIB, cache_bandwidth=17.2 * _TERA,
    flops={**dict.fromkeys(HALF, 1307.4 * _TERA), torch.float32: 163.4 * _TERA},
    # Four SIMD units of 16 lanes; a transcendental instruction takes four times as long as an ordinary one (CDNA3
    # instruction set guide).
    exponentials=16 * 304 * 2.1e9, integers=64 * 304 * 2.1e9, multiprocessors=304, shared_memory=64 * _KIB,
)  # fmt: skip

#: Name -> device. "cpu" is not among them: `measure_cpu` measures the one at hand.
DEVICES = {**{name: gpu.device(name) for name, gpu in _NVIDIA.items()}, _MI300X.name: _MI300X}

#: Architecture -> the device that it stands for.
_OF_ARCH = {device.arch: device.name for device in reversed(DEVICES.values()) if device.name != "A100-40GB"}

#: Words in a driver's name for a GPU that say it is another than that of the table.
_VARIANTS = {"pcie", "nvl", "laptop", "d", "super"}


def find_device(name: str) -> Device | None:
    """The device of a driver's name ("NVIDIA H100 80GB HBM3"), or the first device of an architecture ("sm_90").

    None if the table has no such device, for example the H100 of a PCIe card.
    """
    if name in _OF_ARCH:
        return DEVICES[_OF_ARCH[name]]
    words = set(name.lower().replace("-", " ").split())
    if words & _VARIANTS:
        return None
    for known in sorted(DEVICES, key=len, reverse=True):
        if set(known.lower().replace("-", " ").split()) <= words:
            return DEVICES[known]
    return None
