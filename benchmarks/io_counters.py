"""Counts what attention moves through a GPU's memory, standard and in tiles, beside what the IO model predicts.

    python benchmarks/io_counters.py --output benchmarks/results/h200-io.json

Needs an NVIDIA GPU and Nsight Compute's command line, `ncu`, with access to the GPU's counters. Each computation runs
in a process of its own: called twice to warm up, then once between `cudaProfilerStart` and `cudaProfilerStop`, where
`ncu` counts `dram__bytes_read.sum` and `dram__bytes_write.sum` of each kernel, without touching clocks or caches. Times
are taken without `ncu`, between CUDA events. The default case is that of the first FlashAttention's table: GPT-2, batch
64, 16 heads of 64, 1,024 tokens, dropout, forward and backward.
"""

from __future__ import annotations

import argparse
import csv
import glob
import io
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flashtile
from flashtile import io_model
from flashtile.bench.base import DTYPES
from flashtile.bench.breakdown import causal_mask, standard_attention
from flashtile.bench.record import Row, command_line, make_record, make_row, write_record
from flashtile.bench.report import Table
from flashtile.bench.timing import EventTimer

#: Key in a record -> metric.
DEVICE_MEMORY = {"bytes_read": "dram__bytes_read.sum", "bytes_written": "dram__bytes_write.sum"}
_WARM_UP_CALLS = 2
_SECONDS = 1.0
#: CUDA's installers put it here when it is not on the path.
_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class CountersError(Exception):
    """Counters cannot be read; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    shape = _shape(options)
    return run_program(
        "io_counters",
        options,
        lambda: make_call(options.child, shape),
        lambda device, ncu: measure(shape, device, ncu, options),
        table,
    )


def run_program(
    program: str,
    options: argparse.Namespace,
    child: Callable[[], Callable[[], Any]],
    measure: Callable[[io_model.Device, str | None], list[Row]],
    table: Callable[[list[Row]], Table],
) -> int:
    """A program that counts: in a child process one call, which `child` makes; else it measures (a device, `ncu` or
    None -> rows), prints a table of the rows, and writes its record. Returns the exit status."""
    if not torch.cuda.is_available():
        print(f"{program}: needs a GPU; torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    if options.child:
        run_once(child())
        return 0
    device = io_model.find_device(torch.cuda.get_device_name())
    if device is None:
        known = ", ".join(io_model.DEVICES)
        print(f"{program}: no data sheet of {torch.cuda.get_device_name()}; there are {known}", file=sys.stderr)
        return 2
    try:
        rows = measure(device, None if options.no_counters else find_ncu())
    except CountersError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(table(rows).markdown())
    if options.output is not None:
        command = command_line(f"python benchmarks/{program}.py")
        write_record(make_record(torch.device("cuda"), command, rows), options.output)
        print("record:", options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = shape_parser(__doc__, batch=64, seq=1024)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    parser.add_argument("--child", choices=("standard", "flashtile"), help=argparse.SUPPRESS)
    return parser


def shape_parser(description: str | None, batch: int, seq: int) -> argparse.ArgumentParser:
    """Options of a program that counts, with its usual batch and length."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("batch", batch), ("heads", 16), ("seq", seq), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--no-counters", action="store_true", help="times and predictions alone, without ncu")
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    return parser


def child_of(script: str, child: Any, options: argparse.Namespace, more: Sequence[str] = ()) -> list[str]:
    """The arguments of a child process: the program, what it computes, and the sizes."""
    arguments = [str(Path(script).resolve()), "--child", str(child)]
    for option in ("batch", "heads", "seq", "head_dim", *more):
        arguments += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    return [*arguments, *["--causal"] * options.causal]


def _shape(options: argparse.Namespace) -> io_model.Shape:
    sizes = options.batch, options.heads, options.seq, options.head_dim
    return io_model.Shape(*sizes, dtype=DTYPES[options.dtype], causal=options.causal, dropout_p=options.dropout)


def make_call(name: str, shape: io_model.Shape, device: str = "cuda") -> Callable[[], Any]:
    """Forward and backward of "standard" or "flashtile" on random inputs."""
    rows = (shape.batch, shape.seq_q, shape.heads, shape.head_dim)
    if name == "standard":
        rows = (shape.batch * shape.heads, shape.seq_q, shape.head_dim)
    q, k, v, dout = (torch.randn(rows, dtype=shape.dtype, device=device, requires_grad=i < 3) for i in range(4))
    mask = causal_mask(shape.seq_q, shape.dtype, q.device) if shape.causal else None

    def call() -> tuple[torch.Tensor, ...]:
        if name == "standard":
            out = standard_attention(q, k, v, mask, shape.dropout_p)
        else:
            out = flashtile.attention(q, k, v, causal=shape.causal, dropout_p=shape.dropout_p)
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


def run_once(call: Callable[[], Any]) -> None:
    """The child's part: one call that the counters see."""
    for _ in range(_WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    runtime.cudaProfilerStop()


def measure(shape: io_model.Shape, device: io_model.Device, ncu: str | None, options: argparse.Namespace) -> list[Row]:
    """A row for each computation. Without `ncu` there is nothing counted in them."""
    rows, child = [], partial(child_of, __file__, options=options, more=("dropout", "dtype"))
    models = {"standard": io_model.standard(shape), "flashtile": io_model.tiled(shape, device)}
    for name, model in models.items():
        torch.cuda.empty_cache()
        call = make_call(name, shape)
        call()
        ms = statistics.median(EventTimer(call).sample(_SECONDS))
        del call
        torch.cuda.empty_cache()
        kernels = None if ncu is None else profile(ncu, name, child(name))
        rows.append(row(name, shape, model, device, ms, kernels))
    return rows


def row(
    name: str, shape: io_model.Shape, model: io_model.Computation, device: io_model.Device, ms: float,
    kernels: list[dict[str, Any]] | None,
) -> Row:  # fmt: skip
    """A row: predicted and, with `kernels`, counted."""
    counted = None
    if kernels is not None:
        read, written = (sum(kernel[key] for kernel in kernels) for key in ("bytes_read", "bytes_written"))
        counted = {"bytes_read": read, "bytes_written": written, "kernels": kernels}
    case = {
        **{"B": shape.batch, "S": shape.seq_q, "H": shape.heads, "D": shape.head_dim},
        **{"causal": shape.causal, "dropout_p": shape.dropout_p, "dtype": str(shape.dtype).removeprefix("torch.")},
    }
    predicted = {
        "flops": model.flops, "bytes_read": model.bytes_read, "bytes_written": model.bytes_written,
        "least_ms": model.seconds(device) * 1e3, "bound": model.bound(device),
        "kernels": [
            {"name": w.name, "bytes_read": w.bytes_read, "bytes_written": w.bytes_written} for w in model.kernels
        ],
    }  # fmt: skip
    found = {"ms": ms, "timer": EventTimer.kind, "device": device.name, "predicted": predicted, "counted": counted}
    why = {} if counted else {"why": "run with --no-counters"}
    return make_row("attention-io", "fwd+bwd", name, case, **found, **why)


def find_ncu() -> str:
    """The path of `ncu`. Raises CountersError if there is none."""
    installed = [place for pattern in _PLACES for place in sorted(glob.glob(pattern), reverse=True)]
    for place in (os.environ.get("NCU"), shutil.which("ncu"), *installed):
        if place and Path(place).exists():
            return place
    raise CountersError(
        "ncu (Nsight Compute) is neither on the path nor in its usual places; name it in the environment variable NCU, "
        "or pass --no-counters for times and predictions alone"
    )


def profile(
    ncu: str, name: str, child: Sequence[str], metrics: Mapping[str, str] = DEVICE_MEMORY
) -> list[dict[str, Any]]:
    """The counts of `ncu` for each kernel of a Python program. Raises CountersError if ncu failed, or counted nothing.

    Args:
        ncu: its path.
        name: of the computation, for errors.
        child: the program and its arguments, which say themselves when counting begins and ends.
        metrics: key in the result -> metric, in bytes.
    """
    settings = ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"]
    output = ["--metrics", ",".join(metrics.values()), "--csv", "--page", "raw", "--print-units", "base"]
    done = subprocess.run([ncu, *settings, *output, sys.executable, *child], capture_output=True, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise CountersError(
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        ending = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise CountersError(f"ncu ended with {done.returncode} for {name}:\n{ending}")
    kernels = parse(done.stdout, metrics)
    if not kernels:
        raise CountersError(f"ncu counted no kernel of {name}:\n{done.stdout[-800:]}")
    return kernels


def parse(text: str, metrics: Mapping[str, str] = DEVICE_MEMORY) -> list[dict[str, Any]]:
    """Kernels, in the order in which they ran, from the raw page of `ncu --csv`: a line of headings, one of units, one
    for each kernel, among lines that are no CSV. Raises CountersError if a column or a figure is missing, or the units
    are not bytes."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    units, *rows = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    for column in ("Kernel Name", *metrics.values()):
        if column not in units:
            raise CountersError(f"ncu printed no column {column!r}; there are {', '.join(units)}")
    for column in metrics.values():
        if units[column] != "byte":
            raise CountersError(f"{column}: expected bytes, ncu printed {units[column]!r}")
    return [{"name": row["Kernel Name"], **{key: _bytes(row, of) for key, of in metrics.items()}} for row in rows]


def _bytes(row: Mapping[str, str], column: str) -> int:
    try:
        return int(float(row[column].replace(",", "")))
    except ValueError:
        raise CountersError(f"ncu counted nothing for {row['Kernel Name']}: {row[column]!r}") from None


def table(rows: list[Row]) -> Table:
    """FLOPs, bytes and time: standard against flashtile."""
    headings, lines = ["", "GFLOP", "GB predicted", "GB counted", "counted / predicted", "ms", "least ms"], []
    for found in rows:
        predicted, counted = found["predicted"], found["counted"]
        expected = predicted["bytes_read"] + predicted["bytes_written"]
        actual = counted and counted["bytes_read"] + counted["bytes_written"]
        moved = (f"{actual / 1e9:.2f}", f"{actual / expected:.3f}") if actual else ("–", "–")
        times = f"{found['ms']:.3f}", f"{predicted['least_ms']:.3f}"
        lines.append([found["impl"], f"{predicted['flops'] / 1e9:.1f}", f"{expected / 1e9:.2f}", *moved, *times])
    return Table("", headings, lines)


if __name__ == "__main__":
    sys.exit(main())
