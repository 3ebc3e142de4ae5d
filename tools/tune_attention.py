"""Offline tuner of the portable attention kernels: times tile configurations on the GPU of this machine.

    python tools/tune_attention.py --output tiles.json [--kernels forward dq dkdv] [--head-dims 64 128 256]

Prints, for each kernel, head size and mask, the configurations from fast to slow. A person copies the winner, with
its reason, into `flashtile/ops/attention/gpu/tile_tables.py`; nothing is tuned on a user's machine. Every
configuration must give the gradients and outputs of the tables' own before its time counts. Kernels of the backward are
timed in the whole of it, where all other kernels are as the tables have them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch
from tuning import choosing, time_right

from flashtile._backends.devices import device_facts
from flashtile._backends.launch import KernelSource, compile_kernel
from flashtile.ops.attention.call import Call, describe_backward, describe_call
from flashtile.ops.attention.gpu import plan, tile_configs
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs, Wanted
from flashtile.ops.attention.triton import launch
from flashtile.ops.common.tiles import tile_width

TOKENS, HIDDEN = 16384, 2048
KEPT = 5
SECONDS = 0.02


def candidates(kernel: str, head_dim: int, dtype: torch.dtype) -> list[TileConfig]:
    """Configurations worth timing: those whose tiles and accumulators can fit registers and shared memory."""
    width, size = tile_width(head_dim), dtype.itemsize
    found = []
    for rows, columns, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8, 16), (1, 2, 3)):
        # dkdv owns key tiles and walks over query tiles; the others the other way round.
        owned = 2 * width if kernel == "dkdv" else width
        registers = rows * (owned + columns * (1 if kernel == "forward" else 2)) / (warps * 32)
        shared = size * width * ((1 if kernel == "forward" else 2) * rows + 2 * columns * stages)
        if not 64 <= registers <= 210 or shared > 227 * 1024 or (stages == 1 and head_dim < 256):
            continue
        found.append(TileConfig(*((columns, rows) if kernel == "dkdv" else (rows, columns)), warps, stages))
    return found


def make_case(head_dim: int, seq: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shape = (TOKENS // seq, seq, HIDDEN // head_dim, head_dim)
    return {name: torch.randn(shape, device="cuda", dtype=dtype) for name in ("q", "k", "v", "dout")}


def describe(kernel: str, q: torch.Tensor, causal: bool) -> Call:
    """The call that a kernel is launched for, by a tensor like q."""
    spec, side = (
        AttentionSpec(q.shape[-1] ** -0.5, None, 0 if causal else None),
        SideInputs(None, None, *[q.shape[1]] * 2),
    )
    if kernel == "forward":
        return describe_call("forward", (q, q, q), side, spec)
    return describe_backward(BackwardInputs(q, None, q, q, q, q, q), side, spec, Wanted())


def source_of(kernel: str, call: Call, tiles: TileConfig) -> KernelSource:
    """The launch with these tiles. It says nothing of lengths that they divide."""
    return plan.plan_kernel(launch.KERNELS[kernel], kernel, tiles, call).kernel.source


def compile_one(task) -> tuple[int, int] | None:
    """Fills Triton's disk cache, in a process of its own. Returns shared memory, or None if it does not fit."""
    kernel, head_dim, causal, dtype, tiles, facts = task
    q = torch.empty(1, 4096, HIDDEN // head_dim, head_dim, dtype=dtype, device="cuda")
    try:
        compiled = compile_kernel(source_of(kernel, describe(kernel, q, causal), tiles), facts)
        return compiled.metadata.shared if compiled.metadata.shared <= facts.shared_memory else None
    except Exception as error:  # a configuration that the compiler rejects is not a candidate
        print("rejected", kernel, head_dim, tiles, type(error).__name__)
        return None


def kernel_call(kernel: str, tensors: dict, causal: bool):
    """A function that runs the kernel, those of a backward with the others, and returns its results."""
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    spec = AttentionSpec(q.shape[-1] ** -0.5, None, 0 if causal else None)
    side = SideInputs(None, None, q.shape[1], k.shape[1])
    if kernel == "forward":
        return lambda: launch.forward(q, k, v, side, spec)
    if ("saved", causal) not in tensors:
        tensors["saved", causal] = launch.forward(q, k, v, side, spec)
    inputs = BackwardInputs(dout, None, q, k, v, *tensors["saved", causal])
    return lambda: launch.backward(inputs, side, spec, Wanted())[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--kernels", nargs="+", default=["forward", "dq", "dkdv"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seq", type=int, default=4096)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; torch.cuda.is_available() is False")
    dtype = getattr(torch, arguments.dtype)
    facts = device_facts(torch.device("cuda", 0))
    chosen = {
        (kernel, head_dim): candidates(kernel, head_dim, dtype)
        for kernel in arguments.kernels
        for head_dim in arguments.head_dims
    }
    cases = {head_dim: make_case(head_dim, arguments.seq, dtype) for head_dim in arguments.head_dims}
    rows = []
    # All configurations without a mask; then the fastest of them with the causal one.
    for causal in (False, True):
        tasks = [(*key, causal, dtype, tiles, facts) for key, many in chosen.items() for tiles in many]
        print(len(tasks), "variants, causal" if causal else "variants", flush=True)
        with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
            fits = list(pool.map(compile_one, tasks))
        for (kernel, head_dim, *_, tiles, _), fit in zip(tasks, fits, strict=True):
            if fit is not None:
                rows.append(measure(kernel, head_dim, causal, tiles, cases[head_dim]))
        for key in chosen:
            timed = [row for row in rows if (row["kernel"], row["head_dim"]) == key and row["ms"]]
            chosen[key] = [TileConfig(*row["tiles"]) for row in sorted(timed, key=lambda row: row["ms"])[:KEPT]]
    with open(arguments.output, "w") as file:
        json.dump(rows, file)
    report(rows)


def measure(kernel: str, head_dim: int, causal: bool, tiles: TileConfig, tensors: dict) -> dict:
    """Times one configuration; `error` is its distance from the results of the tables' own."""
    row = {"kernel": kernel, "head_dim": head_dim, "causal": causal, "tiles": list(tiles)}
    call, own = kernel_call(kernel, tensors, causal), tile_configs.choose_tiles
    if (kernel, causal) not in tensors:
        tensors[kernel, causal] = call()
    with choosing(tile_configs, "choose_tiles", lambda name, *given: tiles if name == kernel else own(name, *given)):
        return row | time_right(call, tensors[kernel, causal], SECONDS, 0.01)


def report(rows: list[dict]) -> None:
    for key in sorted({(row["kernel"], row["head_dim"], row["causal"]) for row in rows}):
        group = [row for row in rows if (row["kernel"], row["head_dim"], row["causal"]) == key and row["ms"]]
        group.sort(key=lambda row: row["ms"])
        best = "  ".join(f"{tuple(row['tiles'])} {row['ms']:.3f} e{row['error']:.0e}" for row in group[:6])
        print(*key, "|", best)
    for row in rows:
        if row["ms"] is None:
            print("failed", row["kernel"], row["head_dim"], row["tiles"], row["why"])


if __name__ == "__main__":
    main()
