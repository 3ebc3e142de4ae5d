"""Points under a GPU's roof: measured speeds at the intensities of the IO model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashtile import io_model
from flashtile.bench.cases import Case
from flashtile.bench.html.charts import Chart, RooflineChart, Series
from flashtile.bench.html.words import labels_of, phase_of
from flashtile.bench.record import Row
from flashtile.bench.summary import is_ours

_BACKENDS = ("hopper", "triton")


def rooflines(rows: Sequence[Row]) -> list[Chart]:
    """A chart for each phase and dtype, of our rows that the model describes; none where it does not know the machine.

    Work is that of the benchmark, visible pairs; bytes are what the kernels move, by the model. Rows have a `machine`.
    """
    points: dict[tuple[str, str, Any], list[tuple[Row, float]]] = {}
    for row in rows:
        device, case = io_model.find_device(row["machine"]), _case_of(row)
        backend = row["impl"].removeprefix("flashtile-")
        if device is None or case is None or not is_ours(row["impl"]) or backend not in _BACKENDS:
            continue
        moved = _bytes(case, device, backend, row["phase"])
        if moved is not None:
            points.setdefault((row["machine"], row["phase"], case.torch_dtype), []).append(
                (row, case.flops(row["phase"]) / moved)
            )
    charts: list[Chart] = []
    dtypes = {dtype for _, _, dtype in points}
    for (machine, phase, dtype), found in points.items():
        device = io_model.find_device(machine)
        assert device is not None
        of_dtype = f", {str(dtype).removeprefix('torch.')}" if len(dtypes) > 1 else ""
        title = f"{phase_of(phase).capitalize()}{of_dtype}"
        charts.append(RooflineChart(title, _series(found), device.bandwidth, device.flops[dtype]))
    return charts


def _series(found: Sequence[tuple[Row, float]]) -> tuple[Series, ...]:
    """Points of each implementation and head size."""
    labels = labels_of([row["case"] for row, _ in found])
    by_name: dict[str, list[tuple[float, float, str]]] = {}
    for (row, intensity), label in zip(found, labels, strict=True):
        name = f"{row['impl']}, head_dim {row['case']['D']}"
        by_name.setdefault(name, []).append((intensity, row["tflops"] * 1e12, label))
    return tuple(
        Series(name, tuple((x, y) for x, y, _ in points), tuple(label for *_, label in points))
        for name, points in by_name.items()
    )


def _case_of(row: Row) -> Case | None:
    """The case of a row that the model describes; None of one with more to it, or with keys that are not known."""
    try:
        case = Case.from_record(row["case"])
    except TypeError:
        return None
    return case if case.lengths is None and case.Sk is None and not case.changes_scores else None


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
