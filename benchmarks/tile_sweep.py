"""Time and traffic of the portable forward against the size of its tiles, beside what the IO model predicts.

    python benchmarks/tile_sweep.py --output benchmarks/results/h200-tiles.json

Needs an NVIDIA GPU; and `ncu` as `io_counters.py` does, or `--no-counters`. Beside what crosses device memory it counts
`lts__t_bytes.sum`, what passes the L2 cache, where small tiles ask again and again for the same keys.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from io_counters import DEVICE_MEMORY, child_of, profile, run_program, shape_parser

from flashtile import io_model
from flashtile._backends import clear_plans
from flashtile.bench.record import Row, make_row
from flashtile.bench.report import Table
from flashtile.bench.timing import EventTimer
from flashtile.ops.attention.gpu import tile_configs
from flashtile.ops.attention.gpu.tile_tables import TileConfig
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.triton import launch

_BLOCKS = (16, 32, 64, 128)
_BLOCK_K, _STAGES, _SECONDS = 64, 2, 0.5
_METRICS = {**DEVICE_MEMORY, "cache_bytes": "lts__t_bytes.sum"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = shape_parser(__doc__, batch=4, seq=8192)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    shape = io_model.Shape(options.batch, options.heads, options.seq, options.head_dim, causal=options.causal)
    return run_program(
        "tile_sweep",
        options,
        lambda: make_call(make_inputs(shape), options.child, options.causal),
        lambda device, ncu: measure(shape, device, ncu, options),
        table,
    )


def make_inputs(shape: io_model.Shape, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v, the same in every call."""
    torch.manual_seed(0)
    size = (shape.batch, shape.seq_q, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, dtype=shape.dtype, device=device) for _ in range(3))
    return q, k, v


def make_call(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], block_q: int, causal: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The forward of the portable kernels with the tiles of the model's sweep."""
    q, k, v = inputs
    tiles = TileConfig(block_q, _BLOCK_K, 4 if block_q <= 64 else 8, _STAGES)
    seq, head_dim = q.shape[1], q.shape[-1]
    spec = AttentionSpec(head_dim**-0.5, None, 0 if causal else None)
    side = SideInputs(None, None, seq, seq)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return launch.forward(q, k, v, side, spec)

    from_tables, tile_configs.choose_tiles = tile_configs.choose_tiles, lambda *_: tiles
    clear_plans()
    try:
        call()  # the plan, which is remembered from now on
    finally:
        tile_configs.choose_tiles = from_tables
    return call


def measure(shape: io_model.Shape, device: io_model.Device, ncu: str | None, options: argparse.Namespace) -> list[Row]:
    """A row for each size of tiles. Without `ncu` there is nothing counted in them."""
    rows, inputs, first = [], make_inputs(shape), None
    for point in io_model.sweep(shape, device, _BLOCKS, (_BLOCK_K,)):
        call = make_call(inputs, point.block_q, shape.causal)
        out = call()[0]
        first = out if first is None else first
        error = (out.float() - first.float()).abs().max().item()
        ms = statistics.median(EventTimer(call).sample(_SECONDS))
        kernels = None
        if ncu is not None:
            kernels = profile(ncu, f"tiles of {point.block_q}", child_of(__file__, point.block_q, options), _METRICS)
        rows.append(row(shape, point, ms, error, kernels))
        clear_plans()
    return rows


def row(
    shape: io_model.Shape, point: io_model.SweepPoint, ms: float, error: float, kernels: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """A row: predicted and, with `kernels`, counted. `error` is the distance from the first tiles' output."""
    counted = None
    if kernels is not None:
        counted = {key: sum(kernel[key] for kernel in kernels) for key in _METRICS}
    case = {"B": shape.batch, "S": shape.seq_q, "H": shape.heads, "D": shape.head_dim, "causal": shape.causal}
    predicted = {"bytes": point.bytes, "cache_bytes": point.requested, "least_ms": point.seconds * 1e3}
    return make_row(
        "attention-tiles", "fwd", "flashtile-triton",
        {**case, "block_q": point.block_q, "block_k": point.block_k, "dtype": "bfloat16"},
        ms=ms, timer=EventTimer.kind, error=error, predicted={**predicted, "bound": point.bound}, counted=counted,
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    """Time and traffic, predicted and counted."""
    headings, lines = ["tile", "ms", "least ms", "GB", "GB counted", "GB in the cache", "counted"], []
    for found in rows:
        case, predicted, counted = found["case"], found["predicted"], found["counted"]
        actual = None if counted is None else counted["bytes_read"] + counted["bytes_written"]
        tile, times = f"{case['block_q']} × {case['block_k']}", (f"{found['ms']:.3f}", f"{predicted['least_ms']:.3f}")
        moved = f"{predicted['bytes'] / 1e9:.3f}", "–" if actual is None else f"{actual / 1e9:.3f}"
        asked = "–" if counted is None else f"{counted['cache_bytes'] / 1e9:.2f}"
        lines.append([tile, *times, *moved, f"{predicted['cache_bytes'] / 1e9:.2f}", asked])
    return Table("", headings, lines)


if __name__ == "__main__":
    sys.exit(main())
