"""Speed and error of the Hopper forward with 8-bit inputs, beside bfloat16: for the rows of its table.

    python tools/measure_fp8.py speed       # TFLOP/s of several cuts, of our bfloat16 and of cuDNN's; the widening
    python tools/measure_fp8.py error       # against float64: 8-bit on either backend, eager bfloat16

All in one process, in turns; calls wait behind a kernel that sleeps until the host has put them all in line, so its
time does not count. Kernels compile first, in processes side by side. Needs an sm_90 GPU;
`pytest -m hopper tests/ops/attention/test_fp8.py` says first whether results are right.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile
from flashtile._backends.launch import clear_plans
from flashtile.ops.attention.hopper import configs, launch
from flashtile.ops.attention.hopper.configs import HopperConfig
from flashtile.ops.attention.hopper.convert import widen_kernel

TOKENS, COLUMNS, TURNS, SECONDS_OF_A_TURN = 16384, 2048, 6, 0.015
CUTS = {
    (64, 64): {
        "in no order": HopperConfig(3, 128, 5, 160, 128, False, 0),
        "2 consumers": HopperConfig(2, 128, 5, 240, 168, False, 64),
    },
    (128, 128): {
        "2 consumers": HopperConfig(2, 128, 2, 240, 168, False, 32),
        "2, three stages": HopperConfig(2, 128, 3, 240, 168, False, 32),
        "3 consumers": HopperConfig(3, 64, 6, 160, 128, False, 0),
        "3, a quarter ahead": HopperConfig(3, 64, 6, 160, 128, False, 16),
        "3, in turn": HopperConfig(3, 64, 6, 160, 128, False, 16, in_turn=True),
    },
    (192, 128): {"3 consumers": HopperConfig(3, 64, 4, 160, 128, False, 16)},
    (256, 256): {"three stages": HopperConfig(2, 64, 3, 240, 168, False, 8)},
}


def cut(config: HopperConfig | None) -> None:
    """Every later call is cut so; None: as the table says."""
    launch.forward_config = configs.forward_config if config is None else lambda *_: config
    clear_plans()


def rounded(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    pairs = [flashtile.quantize_fp8(x) for x in (q, k, v)]
    return [x for x, _ in pairs], {f"descale_{of}": descale for of, (_, descale) in zip("qkv", pairs)}


def random_qkv(batch: int, rows: int, keys: int, heads: int, head_dim: int, head_dim_v: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, rows, heads, head_dim), (batch, keys, heads, head_dim), (batch, keys, heads, head_dim_v)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def compile_cut(columns: tuple[int, int], name: str, causal: bool) -> None:
    cut(CUTS[columns][name])
    qkv, factors = rounded(*random_qkv(1, 2048, 2048, 1, *columns))
    flashtile.attention(*qkv, **factors, causal=causal, backend="hopper")


def milliseconds(functions: dict[str, tuple[HopperConfig | None, Callable[[], object]]], calls: int) -> list[float]:
    """Time of a call of each function, cut as it says: medians of `calls` calls in line, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(TURNS):
        for name in list(functions)[:: 1 if turn % 2 else -1]:
            config, function = functions[name]
            cut(config)
            function()
            samples[name].append(_in_line(function, calls))
    cut(None)
    return [statistics.median(of) for of in samples.values()]


def _in_line(function: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(300_000 * calls + 1_000_000)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def speed() -> None:
    jobs = [(columns, name, causal) for columns in CUTS for name in CUTS[columns] for causal in (False, True)]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_cut, *job) for job in jobs]:
            job.result()
    for columns in CUTS:
        for rows in (1024, 2048, 4096, 8192, 16384) if columns == (128, 128) else (2048, 8192):
            for causal in (False, True):
                print(speed_of(columns, rows, causal), flush=True)


def speed_of(columns: tuple[int, int], rows: int, causal: bool) -> str:
    """One line: TFLOP/s of each."""
    batch, heads = TOKENS // rows, COLUMNS // columns[0]
    qkv = random_qkv(batch, rows, rows, heads, *columns)
    eight, factors = rounded(*qkv)

    def run(*tensors: Tensor, **factors: Tensor) -> Tensor:
        return flashtile.attention(*tensors, **factors, causal=causal, backend="hopper")

    values, wide = eight[2], torch.empty_like(eight[2], dtype=torch.bfloat16)
    widening = widen_kernel(tuple(values.shape), values.stride()).plan(values.device)
    transposed = [x.transpose(1, 2) for x in qkv]

    def run_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)

    functions = {
        "bfloat16": (None, lambda: run(*qkv)),
        "8-bit as shipped": (None, lambda: run(*eight, **factors)),
        "cuDNN bfloat16": (None, run_cudnn),
        **{name: (config, lambda: run(*eight, **factors)) for name, config in CUTS[columns].items()},
        "widening": (None, lambda: widening.launch(values.data_ptr(), wide.data_ptr())),
        "PyTorch's": (None, lambda: eight[2].to(torch.bfloat16)),
    }
    work = 2 * batch * heads * rows**2 * sum(columns) / (2 if causal else 1) / 1e9
    calls = max(2, min(60, int(SECONDS_OF_A_TURN * 600e3 / work)))
    *times, ours, theirs = milliseconds(functions, calls)
    speeds = ", ".join(f"{name} {work / ms:.0f}" for name, ms in zip(functions, times))
    case = f"D {columns}, {rows}, {'causal' if causal else 'full'}"
    return f"{case}: {speeds}; widening {1e3 * ours:.0f} µs, PyTorch's {1e3 * theirs:.0f}"


def error() -> None:
    """Root mean square of the error by that of out, of 256 queries."""
    for kind, shift, sharpness in (("normal", 0, 1), ("values around 1", 1, 1), ("peaked", 0, 5)):
        for keys in (2048, 8192, 65536):
            q, k, v = random_qkv(1, 256, keys, 2, 128, 128)
            eight, factors = rounded(q * sharpness, k, v + shift)
            exact = [x.double() * factor[:, None, :, None] for x, factor in zip(eight, factors.values())]
            oracle = flashtile.attention(*exact, backend="reference")
            results = {
                "hopper": flashtile.attention(*eight, **factors, backend="hopper"),
                "triton": flashtile.attention(*eight, **factors, backend="triton"),
                "eager bfloat16": flashtile.attention(*(x.bfloat16() for x in exact), backend="reference"),
            }
            errors = ", ".join(f"{name} {relative(out, oracle):.1e}" for name, out in results.items())
            print(f"{kind}, {keys} keys: {errors}", flush=True)


def relative(out: Tensor, oracle: Tensor) -> float:
    return math.sqrt(((out.double() - oracle).square().mean() / oracle.square().mean()).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "error"))
    {"speed": speed, "error": error}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
