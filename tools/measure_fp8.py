"""Speed and error of the Hopper forward with 8-bit inputs, beside bfloat16: for the rows of its table.

    python tools/measure_fp8.py speed       # TFLOP/s of several cuts, of our bfloat16 and of cuDNN's; the transposition
    python tools/measure_fp8.py error       # against float64: 8-bit, eager bfloat16, eager with 8-bit weights
    python tools/measure_fp8.py error --scale-log2 0    # weights rounded as they are, not times 2⁸

All in one process, medians of calls between CUDA events, in turns, for `--seconds` in all: the longer, the more the
clock is what a load sustains. Kernels compile first, in processes side by side. Needs an sm_90 GPU;
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
from flashtile._backends.gluon import gl
from flashtile.bench.timing import EventTimer
from flashtile.ops.attention.hopper import configs, forward_walk, launch
from flashtile.ops.attention.hopper.configs import HopperConfig

TOKENS, COLUMNS, TURNS = 16384, 2048, 4
CUTS = {
    128: {
        "half ahead": HopperConfig(2, 128, 4, 240, 168, False, 64),
        "a quarter ahead": HopperConfig(2, 128, 4, 240, 168, False, 32),
        "none ahead": HopperConfig(2, 128, 4, 240, 168, False, 0),
        "queries in registers": HopperConfig(2, 128, 4, 240, 168, True, 64),
        "64 keys": HopperConfig(2, 64, 8, 240, 168, False, 32),
    },
    64: {
        "3 consumers in turn": HopperConfig(3, 128, 6, 160, 128, False, 0, in_turn=True),
        "2 consumers": HopperConfig(2, 128, 6, 240, 168, False, 64),
        "2, queries in registers": HopperConfig(2, 128, 6, 240, 168, True, 64),
    },
}


def cut(config: HopperConfig | None) -> None:
    """Every later call is cut so; None: as the table says."""
    launch.choose_config = configs.choose_config if config is None else lambda *_: config
    launch._plan.cache_clear()


def rounded(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    pairs = [flashtile.quantize_fp8(x) for x in (q, k, v)]
    return [x for x, _ in pairs], {f"descale_{of}": descale for of, (_, descale) in zip("qkv", pairs)}


def random_qkv(batch: int, rows: int, keys: int, heads: int, head_dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, length, heads, head_dim) for length in (rows, keys, keys)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def compile_cut(head_dim: int, name: str, causal: bool) -> None:
    cut(CUTS[head_dim][name])
    qkv, factors = rounded(*random_qkv(1, 128, 128, 1, head_dim))
    flashtile.attention(*qkv, **factors, causal=causal, backend="hopper")


def milliseconds(functions: dict[str, tuple[HopperConfig | None, Callable[[], object]]], seconds: float) -> list[float]:
    """Of calls of each function, cut as it says: medians of so many seconds, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, (config, function) in functions.items():
            cut(config)
            samples[name] += EventTimer(function).sample(seconds / TURNS)
    cut(None)
    return [statistics.median(of) for of in samples.values()]


def speed(seconds: float) -> None:
    jobs = [(head_dim, name, causal) for head_dim in CUTS for name in CUTS[head_dim] for causal in (False, True)]
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(compile_cut, *job) for job in jobs]:
            job.result()
    for head_dim, rows in ((128, 8192), (128, 2048), (128, 16384), (64, 8192)):
        for causal in (False, True):
            print(speed_of(head_dim, rows, causal, seconds), flush=True)


def speed_of(head_dim: int, rows: int, causal: bool, seconds: float) -> str:
    """One line: TFLOP/s of each."""
    batch, heads = TOKENS // rows, COLUMNS // head_dim
    qkv = random_qkv(batch, rows, rows, heads, head_dim)
    eight, factors = rounded(*qkv)

    def run(*tensors: Tensor, **factors: Tensor) -> Tensor:
        return flashtile.attention(*tensors, **factors, causal=causal, backend="hopper")

    spec = flashtile.ops.attention.spec.AttentionSpec(head_dim**-0.5, None, 0 if causal else None)
    shapes, strides = zip(*((x.shape, x.stride()) for x in eight))
    plan = launch._plan(eight[0].dtype, eight[0].device, shapes, strides, None, None, rows, spec)
    transposed = [x.transpose(1, 2) for x in qkv]

    def run_cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=causal)

    functions = {
        "bfloat16": (None, lambda: run(*qkv)),
        "8-bit as shipped": (None, lambda: run(*eight, **factors)),
        "cuDNN bfloat16": (None, run_cudnn),
        **{name: (config, lambda: run(*eight, **factors)) for name, config in CUTS[head_dim].items()},
        "transposition": (None, lambda: launch._transposed(eight[2], None, plan.transposition)),
    }
    *times, transposition = milliseconds(functions, seconds)
    work = 4 * batch * heads * rows**2 * head_dim / (2 if causal else 1) / 1e9
    speeds = ", ".join(f"{name} {work / ms:.0f}" for name, ms in zip(functions, times))
    return (
        f"D {head_dim}, {rows}, {'causal' if causal else 'full'}: {speeds}; transposition {1e3 * transposition:.0f} µs"
    )


def error(scale_log2: float) -> None:
    """Root mean square of the error by that of out, of 256 queries."""
    forward_walk.WEIGHT_SCALE_LOG2 = gl.constexpr(scale_log2)
    for kind, shift, sharpness in (("normal", 0, 1), ("values around 1", 1, 1), ("peaked", 0, 5)):
        for keys in (2048, 8192, 65536):
            q, k, v = random_qkv(1, 256, keys, 2, 128)
            eight, factors = rounded(q * sharpness, k, v + shift)
            exact = [x.double() * factor[:, None, :, None] for x, factor in zip(eight, factors.values())]
            oracle = flashtile.attention(*exact, backend="reference")
            results = {
                "hopper": flashtile.attention(*eight, **factors, backend="hopper"),
                "triton": flashtile.attention(*eight, **factors, backend="triton"),
                "eager bfloat16": flashtile.attention(*(x.bfloat16() for x in exact), backend="reference"),
                "eager with 8-bit weights": with_rounded_weights(*(x.float() for x in exact), 2.0**scale_log2),
            }
            errors = ", ".join(f"{name} {relative(out, oracle):.1e}" for name, out in results.items())
            print(f"{kind}, {keys} keys: {errors}", flush=True)


def with_rounded_weights(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = flashtile.attention_probs(q, k)
    unit = weights.amax(-1, keepdim=True) / scale
    return ((weights / unit).to(torch.float8_e4m3fn).float() @ v.transpose(1, 2) * unit).transpose(1, 2)


def relative(out: Tensor, oracle: Tensor) -> float:
    return math.sqrt(((out.double() - oracle).square().mean() / oracle.square().mean()).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "error"))
    parser.add_argument("--seconds", type=float, default=0.1, help="of calls one after another, for each median")
    parser.add_argument("--scale-log2", type=float, default=8.0, help="weights are rounded times 2 to this")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.seconds)
    else:
        error(arguments.scale_log2)


if __name__ == "__main__":
    main()
