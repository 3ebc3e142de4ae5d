"""Compares what each launch of some calls gives NVIDIA's driver with what Triton's own launcher object gives it.

    PYTHONPATH=src:tests python -m stand_in_driver FOLDER

In the driver's place stands `cuda.c`, which is built in FOLDER. So this runs without a GPU, with any Triton, and in a
process of its own. Prints the names of the kernels, a line for each launch; fails where the bytes differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

#: Sizes of PTX types, in bytes.
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


def _build(folder: Path) -> Path:
    built = folder / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source = Path(__file__).with_name("cuda.c")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{include}", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def _parameter_sizes(ptx: str) -> list[int]:
    """Of a kernel, in bytes."""
    _, _, entry = ptx.partition(".entry")
    declared = re.findall(r"\.param (?:\.align \d+ \.b8 \w+\[(\d+)\]|\.[bfsu](\d+) )", entry[: entry.index("\n)")])
    assert declared
    return [int(length) if length else _SIZES[bits] for length, bits in declared]


class _Both(NamedTuple):
    """A descriptor, encoded, and as Triton's launcher object takes it; sizes and strides follow the first only."""

    encoded: Any
    described: Any
    followed_by: int


class _Comparison:
    """Stands for `launch.make_launch` with launches of both kinds."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        from flashtile._backends import launch

        self.driver, self.make = driver, launch.make_launch
        self.loaded: list[Any] = []

    def make_launch(
        self, source: Any, programs: int, scalars: tuple[Any, ...], device: torch.device
    ) -> Callable[..., None]:
        from flashtile._backends import launch, launcher

        sizes = _parameter_sizes(launch.compile_kernel(source, launch.device_facts(device)).asm["ptx"])
        direct = self.make(source, programs, scalars, device)
        self.loaded.append(launch._LOADED)
        known, launch.launcher, launch._LOADED = launch.launcher, lambda: launcher.Launcher.OBJECT, {}
        of_object = self.make(source, programs, scalars, device)
        self.loaded.append(launch._LOADED)
        launch.launcher, launch._LOADED = known, {}

        def compare(*given: Any) -> None:
            ours = self.read(sizes, direct, [each.encoded if isinstance(each, _Both) else each for each in given])
            tritons = self.read(sizes, of_object, list(_described(given)))
            assert ours == tritons, f"{source.function.__name__}: {ours} instead of {tritons}"
            expected = [programs, 1, 1]
            assert ours[0][:3] == expected, f"{source.function.__name__}: {ours[0][:3]} instead of {expected}"
            print(f"{source.function.__name__}: {len(sizes)} parameters", flush=True)

        return compare

    def read(self, sizes: list[int], launch: Callable[..., None], given: list[Any]) -> tuple[list[int], list[str]]:
        """Grid, shared memory, stream and attributes, and the parameters of a launch, as the driver reads them."""
        self.driver.stand_in_expect((ctypes.c_int * len(sizes))(*sizes), len(sizes))
        launch(*given)
        words = iter(ctypes.string_at(self.driver.stand_in_bytes_read(), sum(sizes)))
        parameters = [bytes(next(words) for _ in range(size)).hex() for size in sizes]
        return self.driver.stand_in_grid()[:9], parameters


def _described(given: tuple[Any, ...]) -> Iterator[Any]:
    rest = iter(given)
    for each in rest:
        if isinstance(each, _Both):
            for _ in range(each.followed_by):
                next(rest)
            each = each.described
        yield each


def _pretend_gpu(library: Path) -> ctypes.CDLL:
    """Makes an H200 of this machine, as far as launches go. Triton links what it builds to `library`."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.stand_in_bytes_read.restype = ctypes.c_void_p
    driver.stand_in_grid.restype = ctypes.POINTER(ctypes.c_ulonglong)
    cuda: Any = torch._C
    cuda._cuda_getDevice = lambda: None  # the index of a CPU
    cuda._cuda_getCurrentRawStream = lambda index: 99
    cuda._cuda_isCurrentStreamCapturing = lambda: False
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda: driver.cuCtxSetCurrent(1)  # type: ignore[assignment]
    driver.cuCtxSetCurrent(1)  # of this thread
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[misc,assignment]
    from triton.backends.nvidia.driver import CudaDriver

    triton.runtime.driver.set_active(CudaDriver())
    from flashtile._backends import devices

    devices.device_facts = lambda device: devices.KNOWN_DEVICES["sm_90"]  # type: ignore[assignment]
    devices.multiprocessors = lambda device: 132  # type: ignore[assignment]
    return driver


def _attend(
    backend: Any, head_dim: int, dtype: torch.dtype = torch.bfloat16, packed: bool = False, **more: Any
) -> None:
    """Forward and backward of a causal call."""
    from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs, Wanted

    outer = (256,) if packed else (2, 128)
    q, dout = (torch.zeros(*outer, 4, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.zeros(*outer, 2, head_dim, dtype=dtype) for _ in range(2))
    offsets = torch.tensor([0, 100, 256]) if packed else None
    spec = AttentionSpec(-0.125, None, 0, dropout_p=0.25 if "dropout_seed" in more else 0.0)
    side = SideInputs(offsets, offsets, 156, 156) if packed else SideInputs(None, None, 128, 128)
    side = side._replace(**more)
    out, lse = backend.forward(q, k, v, side, spec)
    backend.backward(BackwardInputs(dout, None, q, k, v, out, lse), side, spec, Wanted(sinks="sinks" in more))


def _compare(driver: ctypes.CDLL) -> None:
    """Calls whose launches pass descriptors, NamedTuples, and parameters of every type."""
    from flashtile._backends import launch, tma
    from flashtile.ops.attention.hopper import launch as hopper
    from flashtile.ops.attention.triton import launch as portable

    hopper.tile_counter = lambda device: torch.zeros(2, dtype=torch.int32)  # type: ignore[assignment]
    launch.make_launch = _Comparison(driver).make_launch
    encoded, described = tma._encoded, tma._described

    def both(*of: Any) -> tuple[Any, ...]:
        first, *sizes = encoded(*of)
        return _Both(first, described(*of)[0], len(sizes)), *sizes

    tma._encoded = both
    table, sinks = torch.zeros(1, 4, 128, 128, dtype=torch.bfloat16), torch.tensor([0.5, 1.0, 2.0, 4.0])
    with ThreadPoolExecutor(1) as thread:  # its first use of the GPU is a descriptor
        thread.submit(_attend, hopper, 64, bias=table).result()
    _attend(hopper, 128, packed=True, sinks=sinks)
    _attend(hopper, 96, torch.float32)
    slopes, seed = torch.full((4,), 0.5), torch.tensor([-1, 2**62])
    _attend(portable, 64, packed=True, alibi_slopes=slopes, sinks=sinks, dropout_seed=seed)
    _attend_to_latent_pages()


def _attend_to_latent_pages() -> None:
    from flashtile.ops.kv_cache.spec import CacheCall, CacheSpec
    from flashtile.ops.kv_cache.triton import launch

    pages, q = torch.zeros(9, 16, 1, 576, dtype=torch.float16), torch.zeros(7, 16, 576, dtype=torch.float16)
    table, starts = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0, 3, 7])
    call = CacheCall(q, pages, pages[..., :512], block_table=table, cu_seqlens_q=starts)
    launch.forward(call, CacheSpec(50, 0.1, None, 0))


if __name__ == "__main__":
    _compare(_pretend_gpu(_build(Path(sys.argv[1]))))
