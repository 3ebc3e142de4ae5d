"""Offline tuner of the portable attention kernels: times tile configurations on the GPU of this machine.

    python tools/tune_attention.py --output tiles.json [--kernels forward dq dkdv] [--head-dims 64 128 256]

Prints, for each kernel, head size and mask, the configurations from fast to slow. A person copies the winner, with
its reason, into `flashtile/ops/attention/triton/configs.py`; nothing is tuned on a user's machine. Every
configuration must give the gradients and outputs of the first one before its time counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from flashtile._backends.devices import device_facts
from flashtile._backends.launch import KernelSource, clear_plans, compile_kernel, pointer, pointers
from flashtile.ops.attention.call import describe_backward, describe_call
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs, Wanted
from flashtile.ops.attention.triton import launch, plan
from flashtile.ops.attention.triton.tile_tables import TileConfig
from flashtile.ops.common.tiles import tile_width

TOKENS, HIDDEN = 16384, 2048
KEPT = 5


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


def source_of(kernel: str, head_dim: int, causal: bool, dtype: torch.dtype, tiles: TileConfig) -> KernelSource:
    """The launch of `kernel_call` with these tiles. It says nothing of lengths that they divide."""
    shape = (1, 4096, HIDDEN // head_dim, head_dim)
    spec = AttentionSpec(head_dim**-0.5, None, 0 if causal else None)
    from_tables, plan.choose_tiles = plan.choose_tiles, lambda *_: tiles
    try:
        q = torch.empty(shape, dtype=dtype, device="cuda")
        side = SideInputs(None, None, shape[1], shape[1])
        if kernel == "forward":
            call = describe_call("forward", (q, q, q), side, spec)
        else:
            call = describe_backward(BackwardInputs(q, None, q, q, q, q, q), side, spec, Wanted())
        made = plan._kernel.__wrapped__(kernel, call)
    finally:
        plan.choose_tiles = from_tables
    return made.kernel.source


def compile_one(task) -> tuple[int, int] | None:
    """Fills Triton's disk cache, in a process of its own. Returns shared memory, or None if it does not fit."""
    kernel, head_dim, causal, dtype, tiles, facts = task
    source = source_of(kernel, head_dim, causal, dtype, tiles)
    try:
        compiled = compile_kernel(source, facts)
        return compiled.metadata.shared if compiled.metadata.shared <= facts.shared_memory else None
    except Exception as error:  # a configuration that the compiler rejects is not a candidate
        print("rejected", kernel, head_dim, tiles, type(error).__name__)
        return None


def time_call(call, repeats: int = 7) -> float:
    """Median milliseconds of a call, by events."""
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def kernel_call(kernel: str, tensors: dict, causal: bool):
    """A function that runs just this kernel and returns its results."""
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    spec = AttentionSpec(q.shape[-1] ** -0.5, None, 0 if causal else None)
    side = SideInputs(None, None, q.shape[1], k.shape[1])
    if kernel == "forward":
        return lambda: launch.forward(q, k, v, side, spec)
    if ("saved", causal) not in tensors:
        out, lse = launch.forward(q, k, v, side, spec)
        tensors["saved", causal] = BackwardInputs(dout, None, q, k, v, out, lse)
    inputs = tensors["saved", causal]
    call = describe_backward(inputs, side, spec, Wanted())
    given = pointers(q, k, v, inputs.out, dout, inputs.lse, None)
    # Planned when it runs, with the tiles of that time.
    if kernel == "dq":
        return lambda: launch.plan_alone("dq", call).run(*given)[:1]
    _, statistics, *_ = launch.plan_alone("dq", call).run(*given)
    return lambda: launch.plan_alone("dkdv", call).run(*given, pointer(statistics))[:2]


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
    """Times one configuration; `error` is its distance from the first one's results."""
    row = {"kernel": kernel, "head_dim": head_dim, "causal": causal, "tiles": list(tiles), "ms": None}
    call = kernel_call(kernel, tensors, causal)
    from_tables, plan.choose_tiles = plan.choose_tiles, lambda *_: tiles
    clear_plans()
    try:
        results = call()
        first = tensors.setdefault((kernel, causal), results)
        row["error"] = max(
            ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(results, first, strict=True)
        )
        if row["error"] < 0.01:
            row["ms"] = time_call(call)
        else:
            row["why"] = f"differs from the first configuration by {row['error']:.1e}"
    except Exception as error:  # reported in the table: a configuration may not launch
        row["why"] = repr(error)[:200]
    finally:
        plan.choose_tiles = from_tables
        clear_plans()
    return row


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
