"""What the model needs to know of a device: data sheets, each with its source.

Rates are peaks. Nothing reaches them, so that what follows from them is the least time, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


def _nvidia(
    name: str,
    arch: str,
    *,
    bandwidth: float,
    cache_mib: int,
    tensor: float,
    single: float,
    multiprocessors: int,
    clock: float,
    shared_kib: int,
    cache_bytes_per_clock: int | None = None,
    integers_per_clock: int = 64,
) -> Device:
    """A GPU of which the data sheet gives bandwidth, products, multiprocessors and clock.

    The other rates are per multiprocessor and clock, from table "Throughput of Native Arithmetic Instructions" of the
    CUDA programming guide: 16 exponentials (special functions) on all of these, and 64 or 128 integer operations.
    """
    return Device(
        name,
        arch,
        bandwidth,
        cache_mib * _MIB,
        None if cache_bytes_per_clock is None else cache_bytes_per_clock * clock,
        {**dict.fromkeys(HALF, tensor), torch.float32: single},
        16 * multiprocessors * clock,
        integers_per_clock * multiprocessors * clock,
        multiprocessors,
        shared_kib * _KIB,
        split_cache=cache_bytes_per_clock is not None,
    )


#: Sources: NVIDIA A100 data sheet and whitepaper (312 TFLOP/s bfloat16, 19.5 float32, 40 MB of L2 in two partitions
#: that deliver 5,120 bytes per clock); H100 data sheet, SXM (989 and 67 TFLOP/s, 3.35 TB/s, 132 multiprocessors, 50 MB
#: of L2 in two partitions); H200 data sheet (4.8 TB/s, else as H100); HGX B200 data sheet, an eighth of its eight GPUs
#: (2,250 dense and 75 TFLOP/s, 8 TB/s), L2 of 126 MB and 148 multiprocessors as its driver reports them; Ada
#: whitepaper for the RTX 4090 (165.2 TFLOP/s with float32 sums, 82.6 float32, 1,008 GB/s, 72 MB of L2, 128
#: multiprocessors at 2.52 GHz); AMD Instinct MI300X data sheet (1,307 and 163.4 TFLOP/s, 5.3 TB/s, 304 compute units
#: at 2.1 GHz, 256 MB of Infinity Cache that delivers 17.2 TB/s). Clocks are those at which the products were stated.
#: The L2's bytes per clock are published for the A100 alone, and assumed for H100, H200 and B200.
_TABLE = (
    _nvidia(
        "A100",
        "sm_80",
        bandwidth=2039 * _GIGA,
        cache_mib=40,
        tensor=312 * _TERA,
        single=19.5 * _TERA,
        multiprocessors=108,
        clock=1.41e9,
        shared_kib=164,
        cache_bytes_per_clock=5120,
    ),
    _nvidia(
        "A100-40GB",
        "sm_80",
        bandwidth=1555 * _GIGA,
        cache_mib=40,
        tensor=312 * _TERA,
        single=19.5 * _TERA,
        multiprocessors=108,
        clock=1.41e9,
        shared_kib=164,
        cache_bytes_per_clock=5120,
    ),
    _nvidia(
        "H100",
        "sm_90",
        bandwidth=3350 * _GIGA,
        cache_mib=50,
        tensor=989.4 * _TERA,
        single=66.9 * _TERA,
        multiprocessors=132,
        clock=1.83e9,
        shared_kib=228,
        cache_bytes_per_clock=5120,
    ),
    _nvidia(
        "H200",
        "sm_90",
        bandwidth=4800 * _GIGA,
        cache_mib=50,
        tensor=989.4 * _TERA,
        single=66.9 * _TERA,
        multiprocessors=132,
        clock=1.83e9,
        shared_kib=228,
        cache_bytes_per_clock=5120,
    ),
    _nvidia(
        "B200",
        "sm_100",
        bandwidth=8000 * _GIGA,
        cache_mib=126,
        tensor=2250 * _TERA,
        single=75 * _TERA,
        multiprocessors=148,
        clock=1.85e9,
        shared_kib=228,
        cache_bytes_per_clock=5120,
    ),
    _nvidia(
        "RTX 4090",
        "sm_89",
        bandwidth=1008 * _GIGA,
        cache_mib=72,
        tensor=165.2 * _TERA,
        single=82.6 * _TERA,
        multiprocessors=128,
        clock=2.52e9,
        shared_kib=100,
    ),
    Device(
        "MI300X",
        "gfx942",
        5300 * _GIGA,
        256 * _MIB,
        17.2 * _TERA,
        {**dict.fromkeys(HALF, 1307.4 * _TERA), torch.float32: 163.4 * _TERA},
        # Four SIMD units of 16 lanes; a transcendental instruction takes four times as long as an ordinary one
        # (CDNA3 instruction set guide).
        16 * 304 * 2.1e9,
        64 * 304 * 2.1e9,
        304,
        64 * _KIB,
    ),
)

#: Name -> device. "cpu" is not among them: `measure_cpu` measures the one at hand.
DEVICES = {device.name: device for device in _TABLE}

#: What an architecture stands for where no device is named.
_OF_ARCH = {device.arch: device.name for device in reversed(_TABLE) if device.name != "A100-40GB"}


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
