"""The processor at hand as a `Device`: its rates are measured, in about a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flashtile.io_model.devices import Device

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
