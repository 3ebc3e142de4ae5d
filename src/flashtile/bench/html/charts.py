"""The part of a record on the page: lines over lengths and steps as charts, and all else as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashtile import io_model
from flashtile.bench.base import is_ours
from flashtile.bench.cases import Case
from flashtile.bench.html import words
from flashtile.bench.html.drawing import Chart, DotChart, LineChart, Series, figure
from flashtile.bench.html.words import Facets
from flashtile.bench.record import SPEEDS, Record, Row, case_key, grouped, mode_ratios, ratios_to_best
from flashtile.bench.report import Table, pivot
from flashtile.bench.serving_cases import BALANCE

_LENGTH = "sequence length (tokens)"
#: The fewest lengths that are drawn as a line, and points of a curve of losses.
_LEAST_LENGTHS, _POINTS = 3, 60


@dataclass(frozen=True)
class Named:
    """A record and its file's name."""

    record: Record
    path: Path

    @property
    def rows(self) -> list[Row]:
        """Rows with a time."""
        return [row for row in self.record["rows"] if row.get("ms") is not None]

    @property
    def facts(self) -> dict[str, Any]:
        return self.record.get("machine") or {}

    @property
    def machine(self) -> str:
        """The GPUs or the processor that was measured."""
        if self.facts.get("gpu"):
            count = max((row["case"].get("gpus", 1) for row in self.rows), default=1)
            return str(self.facts["gpu"]) if count == 1 else f"{count} × {self.facts['gpu']}"
        cores = self.facts.get("cpu_cores")
        return f"{self.facts.get('cpu', 'an unknown machine')}{f' ({cores} cores)' if cores else ''}"


@dataclass(frozen=True)
class Part:
    """A record on the page, with its charts and tables."""

    named: Named
    title: str  # what it is about
    common: str  # what all of its cases have
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]


def in_order(records: Sequence[Named]) -> list[Named]:
    """Records of GPUs first, and among these the ones with the most comparisons of plain attention."""

    def comparisons(named: Named) -> int:
        absent = ("window", "lengths", "mask", "softcap", "bias", "function", "dropout_p", "Sk")
        rows = [row for row in named.rows if row["op"] == "attention" and not any(map(row["case"].get, absent))]
        return len(ratios_to_best(row for row in rows if row["case"].get("values", "normal") == "normal"))

    return sorted(records, key=lambda named: (not named.facts.get("gpu"), -comparisons(named)))


def styles(records: Sequence[Named]) -> dict[str, int]:
    """Colour and mark of each machine and implementation, the same all over the page, ours first."""
    together: dict[str, set[str]] = {}
    for named in records:
        names = {row["impl"] for row in named.record["rows"]}
        for row in named.record["rows"]:
            together.setdefault(row["impl"], set()).update(names)
    index: dict[str, int] = {}
    for name in sorted(together, key=lambda name: not is_ours(name)):
        taken = {index.get(other) for other in together[name]}
        index[name] = next(i for i in range(len(together)) if i not in taken)
    machines = list(dict.fromkeys(named.machine for named in records))
    return {**{machine: machines.index(machine) for machine in machines}, **index}


Rows = Sequence[Row]


def record_part(named: Named) -> Part:
    """All that a record holds."""
    rows, said = named.rows, _said(named.rows)
    attention = attention_rows(named)
    charts: list[Chart] = [*losses([row for row in rows if row.get("curve")]), *ratios(attention), *memory(rows)]
    charts += [*breakdowns(rows), *invariance(rows)]
    tables, in_grids = grids(rows)
    figures = ((unit, found) for row in rows if "step" not in row for unit, found in _figures(row))
    by_kind = grouped(figures, lambda each: (each[1]["op"], each[1]["phase"], each[0]))
    for (op, phase, unit), found in by_kind.items():
        of_kind = [row for _, row in found]
        others = [row for row in of_kind if case_key(row) not in in_grids]
        rest = [*(row for row in of_kind if case_key(row) in in_grids), *group_families(others)[1]]
        charts += speeds(others, unit, unit, said)
        if rest:
            tables.append(_table(f"{_title(op, phase)}: {unit}", rest, unit, said))
    charts += rooflines(attention, named.machine)
    on_gpu = bool(named.facts.get("gpu"))
    kinds = list(dict.fromkeys(words.describe_kind(row["op"], row["case"], on_gpu) for row in rows))
    title = words.listed(kinds if len(kinds) <= 4 else [*kinds[:3], f"{len(kinds) - 3} more"])
    return Part(named, title, ", ".join(said.values()), tuple(charts), tuple(tables))


def _lines(points: Iterable[tuple[str, str, float, float]], x_label: str, unit: str, **options: Any) -> list[LineChart]:
    """Charts of points, each with the title of its chart, the name of its line, x and y."""
    charts = []
    for title, of_title in grouped(points, lambda point: point[0]).items():
        lines = grouped(of_title, lambda point: point[1])
        series = (Series(name, tuple(sorted((x, y) for *_, x, y in of_line))) for name, of_line in lines.items())
        charts.append(LineChart(title, tuple(series), x_label, unit, **options))
    return charts


def speeds(rows: Rows, key: str, unit: str, said: Facets | None = None) -> list[LineChart]:
    """A chart of each family of some rows, with a line for each implementation."""
    several, points = len({row["op"] for row in rows}) > 1, []
    for label, row in _labelled(rows, said):
        title = f"{_title(row['op'] if several else None, row['phase'], label)}: {unit}"
        points.append((title, row["impl"], row["case"]["S"], row[key]))
    return _lines(points, _LENGTH, unit, logarithmic=unit == "ms")


def breakdowns(rows: Rows) -> list[DotChart]:
    """The steps of standard attention beside one call, forward and backward."""
    charts = []
    steps = grouped((row for row in rows if "step" in row), lambda row: (case_key(row), row["phase"]))
    for (_, phase), found in steps.items():
        by_step = grouped(found, lambda row: row["step"])
        cases = {step: {row["impl"]: row["ms"] for row in of_step} for step, of_step in by_step.items()}
        charts.append(DotChart(f"{_title(None, phase)}, step by step", cases, "ms"))
    return charts


def invariance(rows: Rows) -> list[DotChart]:
    """The speed of the batch-invariant mode over that of others, for each operation and phase."""
    charts = []
    for (op, phase), found in grouped(mode_ratios(rows), lambda each: (each[0]["op"], each[0]["phase"])).items():
        labels = words.case_labels([row["case"] for row, _ in found])
        cases = {
            label: {name if is_ours(name) else "the fastest peer": value for name, value in ratios.items()}
            for label, (_, ratios) in zip(labels, found)
        }
        title = f"{_title(op, phase)}: speed in the batch-invariant mode"
        charts.append(DotChart(title, cases, "times the speed of each", level=1.0))
    return charts


def grids(rows: Rows) -> tuple[list[Table], set[str]]:
    """Chunks of queries over rows in use, ours beside the same work without a cache, and the keys of their cases."""
    sizes = ("Sq", "S")
    dense = {case_key(row): row["ms"] for row in rows if row["op"] == "serving" and row["impl"] == "dense"}
    ours = (row for row in rows if is_ours(row["impl"]) and case_key(row) in dense)
    chunks = [row for row in ours if row["case"]["Sq"] > 1 and "queries" not in row["case"]]
    full = []
    for of_kind in grouped(chunks, lambda row: json.dumps([row["impl"], _without(row["case"], *sizes)])).values():
        counts = [len({row["case"][size] for row in of_kind}) for size in sizes]
        if min(counts) > 1 and counts[0] * counts[1] == len(of_kind):  # several of both sizes, and all pairs of them
            full.append(sorted(of_kind, key=lambda row: [row["case"][size] for size in sizes]))
    tables = []
    for label, of_kind in zip(words.case_labels([_without(one[0]["case"], *sizes) for one in full]), full):
        where = "in one piece" if label == words.NOTHING else label
        title = f"Chunks of prompts, {where}: TFLOP/s (share of the same without a cache)"
        shares = [f"{figure(row['tflops'])} ({dense[case_key(row)] / row['ms']:.2f})" for row in of_kind]
        places = [([f"{row['case']['Sq']:,}"], f"{row['case']['S']:,}") for row in of_kind]
        cells = ((*place, share) for place, share in zip(places, shares))
        tables.append(pivot(title, ["queries over rows in use"], cells))
    return tables, {case_key(row) for of_kind in full for row in of_kind}


def attention_rows(named: Named) -> list[Row]:
    """Rows of `flashtile bench attention` with a speed."""
    return [row for row in named.rows if row["op"] == "attention" and row.get("tflops") is not None]


def _figures(row: Row) -> Iterator[tuple[str, Row]]:
    """Units of a row's figures, each with the row that has the figure under the unit."""
    if row.get("accuracy") is not None:
        yield "% right", {**row, "% right": 100 * row["accuracy"]}
    if row["op"] == "attention-io":
        for name in ("predicted", "counted"):
            if moved := row[name]:
                impl = f"{words.full_name(row['impl'])}, {name}"
                yield "GB", {**row, "impl": impl, "GB": (moved["bytes_read"] + moved["bytes_written"]) / 1e9}
    elif row["op"].endswith("-host"):
        yield "µs", {**row, "µs": row["ms"] * 1e3}
    else:
        unit = next((unit for unit, key in SPEEDS.items() if row.get(key) is not None), "ms")
        if row["op"] == "serving" and row["tflops"] * 1e3 < BALANCE * row["gbps"]:
            unit = "GB/s"
        yield unit, {**row, unit: row[SPEEDS.get(unit, "ms")]}


def _table(title: str, rows: Rows, unit: str, said: Facets) -> Table:
    """A line for each case, a column for each implementation."""
    labels = words.case_labels([row["case"] for row in rows], said)
    cells = (([label or "all"], words.full_name(row["impl"]), figure(row[unit])) for label, row in zip(labels, rows))
    return pivot(title, ["case"], cells)


def group_families(rows: Rows) -> tuple[list[list[Row]], list[Row]]:
    """Families, rows of one phase whose cases differ in the length alone and in the batch that goes with it, with
    enough lengths for lines; and the rows of no such family."""

    def kind(row: Row) -> str:
        long = isinstance(row["case"].get("S"), int) and not row["case"].get("lengths")
        return json.dumps(long and [row["op"], row["phase"], _without(row["case"], "S", "B")], sort_keys=True)

    found = grouped(rows, kind)
    families: list[list[Row]] = []
    rest = found.pop("false", [])
    for members in found.values():
        if len({row["case"]["S"] for row in members}) < _LEAST_LENGTHS:
            rest += members
        else:
            families.append(members)
    return families, rest


def _labelled(rows: Rows, said: Facets | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of families, each with the name of its family, without what is `said`: by default what all have."""
    families, _ = group_families(rows)
    cases = [_without(family[0]["case"], "S", "B") for family in families]
    for label, family in zip(words.case_labels(cases, _said(rows) if said is None else said), families):
        yield from ((label, row) for row in family)


def _without(case: Mapping[str, Any], *sizes: str) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in sizes}


def _title(op: str | None, phase: str, label: str = "") -> str:
    title = ", ".join(filter(None, (op and words.operation_name(op), words.phase_name(phase), label)))
    return title[0].upper() + title[1:]


def _said(rows: Rows) -> Facets:
    """The facets that are said above the charts of some rows."""
    return words.common_facets([row["case"] for row in rows])


def ratios(rows: Rows) -> list[LineChart]:
    """A chart for each phase and implementation of ours, with a line for each family."""
    found = [
        (label, row)
        for label, of_label in grouped(_labelled(rows), lambda each: each[0]).items()
        for row in ratios_to_best(row for _, row in of_label)
    ]
    several = len({row["impl"] for _, row in found}) > 1
    points = (
        (_title(None, row["phase"], words.full_name(row["impl"]) if several else "") + ": speed over the best peer",
         label, row["case"]["S"], row["ratio"])
        for label, row in found
    )  # fmt: skip
    return _lines(points, _LENGTH, "× the best peer", level=1.0)


def memory(rows: Rows) -> list[LineChart]:
    """Memory of each family."""
    points = (
        (_title(None, row["phase"], label) + ": memory", row["impl"], row["case"]["S"], row[key])
        for key in ("peak_mib", "memory_mib")
        for label, row in _labelled([row for row in rows if row.get(key)])
    )
    return _lines(points, _LENGTH, "MiB, without inputs and gradients", logarithmic=True)


def losses(rows: Rows) -> list[LineChart]:
    """Losses of rows that have a `curve`, each point the mean of some steps."""
    labels = words.case_labels([row["case"] for row in rows], _said(rows))
    points = (
        (", ".join(filter(None, (words.operation_name(row["op"]), label))), row["impl"], *point)
        for label, row in zip(labels, rows)
        for point in smooth(row)
    )
    return _lines(points, "step", "loss", steps=True)


def smooth(row: Row) -> tuple[tuple[float, float], ...]:
    """At most `_POINTS` points (last step, mean) of a row; a part with a loss that was not finite is left out."""
    curve: Sequence[float | None] = row["curve"]
    part, steps = max(1, len(curve) // _POINTS), row.get("curve_every") or 1
    found = []
    for begin in range(0, len(curve), part):
        values = curve[begin : begin + part]
        finite = [value for value in values if value is not None]
        if len(finite) == len(values):
            found.append((float(steps * (begin + len(values))), sum(finite) / len(finite)))
    return tuple(found)


def rooflines(rows: Rows, machine: str) -> list[LineChart]:
    """A chart for each phase and dtype, of our rows that the IO model describes; none where it does not know the
    machine. Work is that of the benchmark, visible pairs; bytes are what the kernels move, by the model."""
    device = io_model.find_device(machine)
    if device is None:
        return []
    known = [(row, found) for row in rows if is_ours(row["impl"]) and (found := _intensity(row, device)) is not None]
    points = [
        ((row["phase"], Case.from_record(row["case"]).torch_dtype),
         f"{words.full_name(row['impl'])}, head_dim {row['case']['D']}", (intensity, row["tflops"]), label)
        for (row, intensity), label in zip(known, words.case_labels([row["case"] for row, _ in known]))
    ]  # fmt: skip
    by_chart = grouped(points, lambda point: point[0])
    charts = []
    for (phase, dtype), of_chart in by_chart.items():
        series = [
            Series(name, tuple(place for *_, place, _ in of_name), tuple(label for *_, label in of_name))
            for name, of_name in grouped(of_chart, lambda point: point[1]).items()
        ]
        xs, peak = [x for one in series for x, _ in one.points], device.flops[dtype]
        ridge = peak / device.bandwidth
        low, high = min(ridge / 10, *(x / 1.3 for x in xs)), max(ridge * 4, *(x * 1.3 for x in xs))
        roof = ((low, device.bandwidth * low / 1e12), (ridge, peak / 1e12), (high, peak / 1e12))
        of_dtype = f", {str(dtype).removeprefix('torch.')}" if len({dtype for _, dtype in by_chart}) > 1 else ""
        title, x_label = f"{_title(None, phase)}{of_dtype}: under the roof", "FLOP for each byte of device memory"
        charts.append(LineChart(title, tuple(series), x_label, "TFLOP/s", roof=roof))
    return charts


def _intensity(row: Row, device: io_model.Device) -> float | None:
    """FLOP per byte of a row; None where the model has no kernels for the case, or does not know it."""
    backend = row["impl"].removeprefix("flashtile-")
    try:
        case = Case.from_record(row["case"])
    except TypeError:
        return None  # keys that are not known
    if backend not in ("hopper", "triton") or case.lengths is not None or case.Sk is not None or case.changes_scores:
        return None
    shape = io_model.Shape(
        case.B, case.H, case.S, case.D, heads_kv=case.Hkv, head_dim_v=case.Dv, dtype=case.torch_dtype,
        causal=case.causal, window=case.window, dropout_p=case.dropout_p,
    )  # fmt: skip
    try:
        return case.flops(row["phase"]) / io_model.tiled(shape, device, backend=backend).phase(row["phase"]).bytes
    except ValueError:
        return None


def by_length(records: Sequence[Named]) -> list[LineChart]:
    """Speed, then ratio to the best peer, by length, of the kind of call that most programs make: causal, heads of 128;
    else one with many lengths. The first record that has such counts."""
    for named in records:
        families = [one for one in group_families(attention_rows(named))[0] if ratios_to_best(one)]
        if families:
            common = max(families, key=lambda rows: (_likeness(rows[0]["case"]), len(rows)))
            best = _without(common[0]["case"], "S", "B")
            rows = [row for one in families if _without(one[0]["case"], "S", "B") == best for row in one]
            said = f" ({', '.join((named.machine, *words.common_facets([best]).values()))})"
            charts = [*speeds(rows, "tflops", "TFLOP/s"), *ratios(rows)]
            return [replace(chart, title=chart.title + said) for chart in charts]
    return []


def _likeness(case: dict[str, Any]) -> tuple[bool, ...]:
    shared = case.get("Hkv", case.get("H")) != case.get("H")
    return not case.get("window"), bool(case.get("causal")), case.get("D") == 128 and not shared
