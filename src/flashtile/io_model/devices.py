"""Data sheets of devices, as the model needs them, each with its source; and the processor at hand, by measuring it.

Rates are peaks. Nothing reaches them, so that what follows from them is the least time, not a forecast.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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
#: (2,250 dense and 75 TFLOP/s, 8 TB/s), L2 of 126 MB and 148 multiprocessors as its driver reports them; Ada whitepaper
#: for the RTX 4090 (165.2 TFLOP/s with float32 sums, 82.6 float32, 1,008 GB/s, 72 MB of L2, 128 multiprocessors at 2.52
#: GHz); GA102 whitepaper for the RTX 3090 (71 and 35.6 TFLOP/s, 936 GB/s, 6 MB, 82 at 1.695 GHz); RTX Blackwell
#: whitepaper for the RTX 5090 (209.5 and 104.8 TFLOP/s, 1,792 GB/s, 96 MB, 170 at 2.407 GHz); AMD Instinct MI300X data
#: sheet (1,307 and 163.4 TFLOP/s, 5.3 TB/s, 304 compute units at 2.1 GHz, 256 MB of Infinity Cache that delivers 17.2
#: TB/s). Clocks are those at which the products were stated. The L2's bytes per clock are published for the A100 alone,
#: and assumed for H100, H200 and B200.
_NVIDIA = {
    "A100": _Gpu("sm_80", 2039, 40, 312, 19.5, 108, 1.41, shared=164, cache_rate=5120),
    "A100-40GB": _Gpu("sm_80", 1555, 40, 312, 19.5, 108, 1.41, shared=164, cache_rate=5120),
    "H100": _Gpu("sm_90", 3350, 50, 989.4, 66.9, 132, 1.83, shared=228, cache_rate=5120),
    "H200": _Gpu("sm_90", 4800, 50, 989.4, 66.9, 132, 1.83, shared=228, cache_rate=5120),
    "B200": _Gpu("sm_100", 8000, 126, 2250, 75, 148, 1.85, shared=228, cache_rate=5120),
    "RTX 3090": _Gpu("sm_86", 936, 6, 71, 35.6, 82, 1.695, shared=100),
    "RTX 4090": _Gpu("sm_89", 1008, 72, 165.2, 82.6, 128, 2.52, shared=100),
    "RTX 5090": _Gpu("sm_120", 1792, 96, 209.5, 104.8, 170, 2.407, shared=100),
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
_VARIANTS = {"pcie", "nvl", "laptop", "d", "super", "ti"}


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


#: Seconds of the calls that measure a rate of the processor at hand.
_SECONDS = 0.15
#: Bytes of a copy that no cache holds, and the sizes of a product and of a vector.
_COPY, _VECTOR = 2**28, 2**16
#: Rows and columns of a product: of 16-bit numbers fewer, because some processors multiply them very slowly.
_PRODUCTS = {torch.float32: 512, torch.float64: 512, torch.bfloat16: 256, torch.float16: 256}
#: If the system does not tell: the least that a processor of the last decade has.
_CACHE = 8 * 2**20


@functools.cache
def measure_cpu() -> Device:
    """Copies, multiplies and exponentiates with PyTorch's threads, and takes the fastest of many calls each.

    The integer rate, for the random numbers of dropout, is that of PyTorch's elementwise products, with which the CPU
    backend draws them. The result is kept for the process; `measure_cpu.cache_clear()` measures anew.
    """
    source = torch.empty(_COPY // 4, device="cpu").fill_(1.0)
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source))
    vector = torch.linspace(-8, 0, _VECTOR, device="cpu")
    exponential = _fastest(lambda: torch.exp2(vector, out=torch.empty_like(vector)))
    integers = torch.arange(_VECTOR, dtype=torch.int64, device="cpu")
    multiply = _fastest(lambda: integers * 3)
    flops = {dtype: 2 * size**3 / _fastest(_product(dtype, size)) for dtype, size in _PRODUCTS.items()}
    return Device(
        "this CPU", "cpu", 2 * _COPY / copy, _last_cache(), cache_bandwidth=None, flops=flops,
        exponentials=_VECTOR / exponential, integers=_VECTOR / multiply,
        multiprocessors=torch.get_num_threads(), shared_memory=0,
    )  # fmt: skip


def _product(dtype: torch.dtype, size: int) -> Callable[[], object]:
    matrix = torch.ones(size, size, dtype=dtype, device="cpu")
    return lambda: matrix @ matrix


def _fastest(function: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    function()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - begin)
        if now >= end:
            return best


def _last_cache() -> int:
    """Bytes of the largest cache that the system tells of (Linux)."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 2**10)
    return max(sizes, default=_CACHE)
