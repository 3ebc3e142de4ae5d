"""Points under a GPU's roof: measured speeds at the intensities of the IO model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashtile import io_model
from flashtile.bench.cases import Case
from flashtile.bench.html.charts import Chart, Series, roofline_chart
from flashtile.bench.summary import is_ours

_BACKENDS = ("hopper", "triton")


def rooflines(machine: str, rows: Sequence[tuple[Case, dict[str, Any]]], phases: Mapping[str, str]) -> list[Chart]:
    """A chart for each phase and dtype, of our rows that the model describes; none where it does not know the machine.

    Work is that of the benchmark, visible pairs; bytes are what the kernels move, by the model.
    """
    device = io_model.find_device(machine)
    if device is None:
        return []
    points: dict[tuple[str, Any], dict[str, list[tuple[float, float, str]]]] = {}
    for case, row in rows:
        backend = row["impl"].removeprefix("flashtile-")
        if not is_ours(row["impl"]) or backend not in _BACKENDS or not _modelled(case):
            continue
        work = _bytes(case, device, backend, row["phase"])
        if work is not None:
            heads = f"{case.D}" if case.D == case.Dv else f"{case.D}/{case.Dv}"
            name = f"{row['impl']}, head_dim {heads}"
            of_dtype = points.setdefault((row["phase"], case.torch_dtype), {})
            speed = row["tflops"] * 1e12
            of_dtype.setdefault(name, []).append((case.flops(row["phase"]) / work, speed, f"{name}, {case.name}"))
    charts = []
    for (phase, dtype), of_dtype in points.items():
        series = [
            Series(name, i, tuple((x, y) for x, y, _ in found), tuple(title for *_, title in found))
            for i, (name, found) in enumerate(of_dtype.items())
        ]
        title = f"{device.name}, {str(dtype).removeprefix('torch.')}, {phases.get(phase, phase)}"
        charts.append(roofline_chart(title, series, device.bandwidth, device.flops[dtype]))
    return charts


def _modelled(case: Case) -> bool:
    return case.lengths is None and not case.changes_scores


def _bytes(case: Case, device: io_model.Device, backend: str, phase: str) -> float | None:
    """Bytes through device memory; None where the model has no kernels for the case."""
    shape = io_model.Shape(
        case.B,
        case.H,
        case.S,
        case.D,
        heads_kv=case.Hkv,
        head_dim_v=case.Dv,
        dtype=case.torch_dtype,
        causal=case.causal,
        window=case.window,
        dropout_p=case.dropout_p,
    )
    try:
        return io_model.tiled(shape, device, backend=backend).phase(phase).bytes
    except ValueError:
        return None
