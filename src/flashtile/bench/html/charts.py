"""Which charts records give: each kind of measurement, those of GPUs first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashtile import io_model
from flashtile.bench.base import is_ours
from flashtile.bench.cases import Case
from flashtile.bench.companion_products import OPERATIONS
from flashtile.bench.html import words
from flashtile.bench.html.drawing import Chart, DotChart, LineChart, Series
from flashtile.bench.html.words import Facets
from flashtile.bench.record import Record, Row, case_key, ratios_to_best
from flashtile.bench.report import BREAKDOWN

_LENGTH = "sequence length (tokens)"
#: The fewest lengths that are drawn as a line, and points of a curve of losses.
_LEAST_LENGTHS, _POINTS = 3, 60
#: The most cases in one chart of dots, and the fewest in one whose cases have more in common than those of the others.
_MOST_CASES, _LEAST_CASES = 14, 4


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
        """What was measured."""
        if self.facts.get("gpu"):
            count = max((row["case"].get("gpus", 1) for row in self.rows), default=1)
            return str(self.facts["gpu"]) if count == 1 else f"{count} × {self.facts['gpu']}"
        cores = self.facts.get("cpu_cores")
        return f"{self.facts.get('cpu', 'an unknown machine')}{f' ({cores} cores)' if cores else ''}"


@dataclass(frozen=True)
class Group:
    """Charts of one record, and what all of their cases have in common."""

    named: Named
    common: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Section:
    """A heading, what it is about in a word, a sentence or two on how to read it, and charts."""

    title: str
    topic: str
    words: str
    groups: tuple[Group, ...]


def in_order(records: Sequence[Named]) -> list[Named]:
    """Those of GPUs first, and of these the ones with the most comparisons of plain attention."""

    def comparisons(named: Named) -> int:
        absent = ("window", "lengths", "mask", "softcap", "bias", "function", "dropout_p", "Sk")
        rows = [row for row in named.rows if row["op"] == "attention" and not any(map(row["case"].get, absent))]
        return len(ratios_to_best(row for row in rows if row["case"].get("values", "normal") == "normal"))

    return sorted(records, key=lambda named: (not named.facts.get("gpu"), -comparisons(named)))


def styles(records: Sequence[Named]) -> dict[str, int]:
    """Colour and mark of each machine, and of each implementation: the same all over the page, no two in one record
    alike, ours first."""
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


def sections(records: Sequence[Named]) -> list[Section]:
    """The sections that have charts."""
    found = []
    for title, topic, reading, select, make in _SECTIONS:
        groups = []
        for named in records:
            decodes = any(row["op"] == "decode" for row in named.rows)
            kept = [{**row, "machine": named.machine} for row in named.rows if select(row, decodes)]
            if kept and (charts := make(kept)):
                groups.append(Group(named, ", ".join(_said(kept).values()), tuple(charts)))
        if groups:
            found.append(Section(title, topic, reading, tuple(groups)))
    return found


def attention_rows(named: Named) -> list[Row]:
    """Rows of `flashtile bench attention` with a speed."""
    return [row for row in named.rows if _is_attention(row)]


def _is_attention(row: Row, decodes: bool = False) -> bool:
    return row["op"] == "attention" and row.get("tflops") is not None


def _with_memory(row: Row, decodes: bool) -> bool:
    return row["op"] == "attention" and (row.get("peak_mib") or row.get("memory_mib")) is not None


def _is_other(row: Row, decodes: bool) -> bool:
    """Operations that have no section of their own."""
    drawn = ("attention", "attention-io", "context-parallel", BREAKDOWN, "decode", *OPERATIONS)
    of_training = any(row.get(key) for key in ("tokens_per_s", "curve", "accuracy"))
    return row["op"] not in drawn and not row["op"].endswith("-host") and not of_training


@dataclass(frozen=True)
class Family:
    """Rows of one phase whose cases differ in the length alone, and in the batch that goes with it."""

    op: str
    phase: str
    case: dict[str, Any]
    rows: tuple[Row, ...]


def families_of(rows: Rows) -> tuple[list[Family], list[Row]]:
    """Families with enough lengths for lines, and the rows of no such family."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        long = isinstance(row["case"].get("S"), int) and not row["case"].get("lengths")
        kind = [row["op"], row["phase"], _without_length(row["case"])] if long else None
        found.setdefault(json.dumps(kind, sort_keys=True), []).append(row)
    families, rest = [], found.pop("null", [])
    for members in found.values():
        if len({row["case"]["S"] for row in members}) < _LEAST_LENGTHS:
            rest += members
        else:
            first = members[0]
            families.append(Family(first["op"], first["phase"], _without_length(first["case"]), tuple(members)))
    return families, rest


def _without_length(case: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in ("S", "B")}


def titles_of(families: Sequence[Family], said: Facets) -> list[str]:
    """A title for each family: operation where there are several, phase, and what is not said already of its cases."""
    labels = words.labels_of([family.case for family in families], said) if families else []
    several = len({family.op for family in families}) > 1
    return [
        _title(words.operation_of(family.op) if several else None, family.phase, [label] if label else [])
        for family, label in zip(families, labels, strict=True)
    ]


def _title(first: str | None, phase: str, facets: Sequence[str]) -> str:
    title = ", ".join([*([] if first is None else [first]), words.phase_of(phase), *facets])
    return title[0].upper() + title[1:]


def _said(rows: Rows) -> Facets:
    """What stands above the charts of some rows."""
    return words.common_facets([row["case"] for row in rows])


def lines_and_dots(rows: Rows, key: str, unit: str) -> list[Chart]:
    """Lines for what there is at several lengths, dots for the rest."""
    said = _said(rows)
    families, rest = families_of([row for row in rows if row.get(key) is not None])
    charts: list[Chart] = [
        LineChart(title, _series(family.rows, key), _LENGTH, unit)
        for family, title in zip(families, titles_of(families, said), strict=True)
    ]
    return [*charts, *dots(rest, key, unit, said=said, beside="Other cases" if charts else None)]


def _series(rows: Rows, key: str) -> tuple[Series, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["impl"], []).append((row["case"]["S"], row[key]))
    return tuple(Series(impl, tuple(sorted(found))) for impl, found in points.items())


def ratios(rows: Rows) -> list[Chart]:
    """A chart for each phase and implementation of ours, with a line for each family."""
    families, _ = families_of(rows)
    labels = words.labels_of([family.case for family in families], _said(rows)) if families else []
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for family, label in zip(families, labels, strict=True):
        for ratio in ratios_to_best(family.rows):
            of_family = lines.setdefault((ratio.phase, ratio.ours), {}).setdefault(label, [])
            of_family.append((ratio.case["S"], ratio.value))
    several = len({ours for _, ours in lines}) > 1
    return [
        LineChart(
            words.phase_of(phase).capitalize() + (f", {words.full_name(ours)}" if several else ""),
            tuple(Series(name, tuple(sorted(points))) for name, points in found.items()),
            _LENGTH,
            "× the best peer",
            level=1.0,
        )
        for (phase, ours), found in lines.items()
    ]


def lengths(rows: Rows) -> list[Chart]:
    """Memory of each family; memory and time of rows that have nothing else."""
    charts: list[Chart] = []
    for key in ("peak_mib", "memory_mib"):
        families, _ = families_of([row for row in rows if row.get(key)])
        for family, title in zip(families, titles_of(families, _said(rows)), strict=True):
            units = {key: "MiB, without inputs and gradients"}
            units |= {"ms": "ms"} if family.rows[0].get("tflops") is None else {}
            for name, unit in units.items():
                what, series = "time" if name == "ms" else "memory", _series(family.rows, name)
                charts.append(LineChart(f"{title}: {what}", series, _LENGTH, unit, logarithmic=True))
    return charts


def losses(rows: Rows) -> list[Chart]:
    """Losses of rows that have a `curve`, each point the mean of some steps."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(case_key(row), []).append(row)
    labels = words.labels_of([of_case[0]["case"] for of_case in curves.values()], _said(rows))
    charts: list[Chart] = []
    for label, of_case in zip(labels, curves.values(), strict=True):
        series = [Series(one["impl"], points) for one in of_case if (points := smooth(one))]
        if series:
            title = ", ".join(filter(None, (words.operation_of(of_case[0]["op"]), label)))
            charts.append(LineChart(title, tuple(series), "step", "loss", steps=True))
    return charts


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


def breakdowns(rows: Rows) -> list[Chart]:
    """Rows of `flashtile bench breakdown`: the time of each step, and of one call."""
    by_phase: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], {}).setdefault(row["step"], {})[row["impl"]] = row["ms"]
    return [DotChart(words.phase_of(phase).capitalize(), found, "ms") for phase, found in by_phase.items()]


def traffic(rows: Rows) -> list[Chart]:
    """Rows of `benchmarks/io_counters.py`."""
    found = {
        words.full_name(row["impl"]): {
            name: (row[name]["bytes_read"] + row[name]["bytes_written"]) / 1e9
            for name in ("predicted", "counted")
            if row[name] is not None
        }
        for row in rows
    }
    return [DotChart("Forward and backward", found, "GB", logarithmic=True)]


def rooflines(rows: Rows) -> list[Chart]:
    """A chart for each phase and dtype, of our rows that the IO model describes; none where it does not know the
    machine. Work is that of the benchmark, visible pairs; bytes are what the kernels move, by the model."""
    device = io_model.find_device(rows[0]["machine"])
    if device is None:
        return []
    known = [(row, found) for row in rows if is_ours(row["impl"]) and (found := _intensity(row, device)) is not None]
    points: dict[tuple[str, Any], dict[str, list[tuple[float, float, str]]]] = {}
    for (row, intensity), label in zip(known, words.labels_of([row["case"] for row, _ in known])):
        name = f"{words.full_name(row['impl'])}, head_dim {row['case']['D']}"
        of_chart = points.setdefault((row["phase"], Case.from_record(row["case"]).torch_dtype), {})
        of_chart.setdefault(name, []).append((intensity, row["tflops"], label))
    charts: list[Chart] = []
    for (phase, dtype), by_name in points.items():
        series = [
            Series(name, tuple((x, y) for x, y, _ in of_name), tuple(label for *_, label in of_name))
            for name, of_name in by_name.items()
        ]
        xs, peak = [x for one in series for x, _ in one.points], device.flops[dtype]
        ridge = peak / device.bandwidth
        low, high = min(ridge / 10, *(x / 1.3 for x in xs)), max(ridge * 4, *(x * 1.3 for x in xs))
        roof = ((low, device.bandwidth * low / 1e12), (ridge, peak / 1e12), (high, peak / 1e12))
        of_dtype = f", {str(dtype).removeprefix('torch.')}" if len({dtype for _, dtype in points}) > 1 else ""
        title, x_label = f"{words.phase_of(phase).capitalize()}{of_dtype}", "FLOP for each byte of device memory"
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


def dots(
    rows: Rows, key: str, unit: str, *, log: bool = False, said: Facets | None = None, beside: str | None = None
) -> list[Chart]:
    """Charts of dots for each phase, with few enough cases that each stays readable.

    Args:
        rows: of one record.
        key: of their values.
        unit: of these.
        log: the axis is logarithmic.
        said: what stands above the charts; None for what the rows have in common.
        beside: what their titles begin with where other charts stand beside them.
    """
    said = _said(rows) if said is None else said
    rows = [row for row in rows if row.get(key) is not None]
    several = len({row["op"] for row in rows}) > 1
    charts: list[DotChart] = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        for part in parts_of([row for row in rows if row["phase"] == phase]):
            ops = {row["op"] for row in part}
            more = [text for facet, text in _said(part).items() if said.get(facet) != text]
            title = _title(
                beside or (words.operation_of(ops.pop()) if several and len(ops) == 1 else None), phase, more
            )
            charts.append(DotChart(title, _by_label(part, key, said), unit, logarithmic=log))
    titles = [chart.title for chart in charts]
    return [
        chart if titles.count(title) == 1 else replace(chart, title=f"{title} ({titles[: place + 1].count(title)})")
        for place, (chart, title) in enumerate(zip(charts, titles))
    ]


def _by_label(rows: Rows, key: str, said: Facets) -> dict[str, dict[str, float]]:
    """Name of a case -> implementation -> value."""
    cases = {case_key(row): row for row in reversed(rows)}
    cases = {case: cases[case] for case in map(case_key, rows)}
    ops = list(dict.fromkeys(row["op"] for row in rows))
    found: dict[str, str] = {}
    for op in ops:
        of_op = {of_case: row["case"] for of_case, row in cases.items() if row["op"] == op}
        labels = words.labels_of(list(of_op.values()), said if len(of_op) == 1 else None)
        for of_case, label in zip(of_op, labels, strict=True):
            found[of_case] = ", ".join(
                filter(None, (words.operation_of(op) if len(ops) > 1 or not label else "", label))
            )
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(found[case_key(row)], {})[row["impl"]] = row[key]
    return values


def parts_of(rows: Rows) -> list[list[Row]]:
    """Rows in parts with few cases each, by the first facets that divide them, else in their order. Parts of very few
    cases are joined, in the place of the first of these."""
    rows = list(rows)
    if _count_cases(rows) <= _MOST_CASES:
        return [rows]
    facets = [{"": words.operation_of(row["op"]), **words.facets_of(row["case"])} for row in rows]
    for key in dict.fromkeys(key for of_row in facets for key in of_row):
        values = dict.fromkeys(of_row.get(key) for of_row in facets)
        if 1 < len(values) <= _MOST_CASES:
            members = ([row for row, of_row in zip(rows, facets) if of_row.get(key) == value] for value in values)
            return _joined([part for of_value in members for part in parts_of(of_value)])
    keys = list(dict.fromkeys(map(case_key, rows)))
    starts = range(0, len(keys), _MOST_CASES)
    return [[row for row in rows if case_key(row) in keys[start : start + _MOST_CASES]] for start in starts]


def _joined(parts: Iterable[list[Row]]) -> list[list[Row]]:
    joined: list[list[Row]] = []
    others: list[Row] | None = None
    for part in parts:
        if _count_cases(part) >= _LEAST_CASES:
            joined.append(part)
        elif others is not None and _count_cases(others) + _count_cases(part) <= _MOST_CASES:
            others += part
        else:
            others = list(part)
            joined.append(others)
    return joined


def _count_cases(rows: Rows) -> int:
    return len(set(map(case_key, rows)))


Select = Callable[[Row, bool], bool]
#: Title, topic, how to read it, which rows (the flag: of a record of decoding), and their charts.
_SECTIONS: list[tuple[str, str, str, Select, Callable[[Rows], list[Chart]]]] = [
    (
        "Attention: speed", "attention",
        "TFLOP/s, higher is better. Only visible pairs of query and key count as work.",
        _is_attention, lambda rows: lines_and_dots(rows, "tflops", "TFLOP/s"),
    ),
    (
        "Attention: speed over the best peer", "attention",
        "Above 1 flashtile is faster. The best peer is the fastest other implementation of each case.",
        _is_attention, ratios,
    ),
    ("Attention: memory and time", "attention", "Lower is better.", _with_memory, lengths),
    (
        "Attention over several GPUs", "attention over several GPUs",
        "TFLOP/s of all GPUs together, higher is better.",
        lambda row, _: row["op"] == "context-parallel", lambda rows: lines_and_dots(rows, "tflops", "TFLOP/s"),
    ),
    (
        "Decoding", "decoding",
        "GB/s of the key/value cache, higher is better. A copy of as much memory is shown for comparison.",
        lambda row, decodes: decodes and row["op"] in ("decode", "copy"), lambda rows: dots(rows, "gbps", "GB/s"),
    ),
    (
        "Norms, losses and others: bandwidth", "norms, rotary embedding, softmax and losses",
        "GB/s of what must be read and written at least, higher is better. The copy shows what the memory allows.",
        lambda row, decodes: row["op"] in OPERATIONS and row.get("tflops") is None and not decodes,
        lambda rows: dots(rows, "gbps", "GB/s"),
    ),
    (
        "Linear layers: speed", "linear layers", "TFLOP/s, higher is better.",
        lambda row, decodes: row["op"] in OPERATIONS and row.get("tflops") is not None and not decodes,
        lambda rows: dots(rows, "tflops", "TFLOP/s"),
    ),
    (
        "Training: speed", "training", "Tokens per second, higher is better.",
        lambda row, _: row.get("tokens_per_s") is not None,
        lambda rows: lines_and_dots(rows, "tokens_per_s", "tokens/s"),
    ),
    (
        "Training: losses", "training",
        "Each point is the mean of some steps. Curves that lie on each other come from equal arithmetic.",
        lambda row, _: bool(row.get("curve")), losses,
    ),
    (
        "Training: accuracy", "training", "Share of held-out examples that are right, higher is better.",
        lambda row, _: row.get("accuracy") is not None,
        lambda rows: dots([{**row, "percent": 100 * row["accuracy"]} for row in rows], "percent", "% right"),
    ),
    (
        "Where the time goes", "standard attention step by step",
        "Standard attention step by step, and one fused call. Lower is better.",
        lambda row, _: row["op"] == BREAKDOWN, breakdowns,
    ),
    (
        "Roofline", "attention",
        "The roof is what the GPU's data sheet allows at an intensity. Bytes are those of flashtile's IO model.",
        _is_attention, rooflines,
    ),
    (
        "Predicted and counted traffic", "memory traffic",
        "Bytes through device memory, by the IO model and by the GPU's counters.",
        lambda row, _: row["op"] == "attention-io", traffic,
    ),
    (
        "Host time", "host time", "Microseconds of the processor for one small call, lower is better.",
        lambda row, _: row["op"].endswith("-host"),
        lambda rows: dots([{**row, "us": row["ms"] * 1e3} for row in rows], "us", "µs"),
    ),
    (
        "Other measurements", "other operations", "Milliseconds, lower is better.", _is_other,
        lambda rows: dots(rows, "ms", "ms", log=True),
    ),
]  # fmt: skip
