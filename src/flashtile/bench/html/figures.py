"""Which charts records give: first the main result, then each kind of measurement, those of GPUs first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashtile.bench.breakdown import OP as BREAKDOWN
from flashtile.bench.companions.tables import OPERATIONS
from flashtile.bench.decode.cases import OP as DECODE
from flashtile.bench.html.charts import Chart, DotChart, LineChart, Series, StackedChart
from flashtile.bench.html.parts import case_key, parts_of
from flashtile.bench.html.roofline import rooflines
from flashtile.bench.html.words import Facets, common_facets, labels_of, operation_of, phase_of
from flashtile.bench.record import Record, Row
from flashtile.bench.summary import is_ours, ratios_to_best

_LENGTH = "sequence length (tokens)"
_MEMORY = "MiB, without inputs and gradients"
#: The fewest lengths that are drawn as a line.
_LEAST_LENGTHS = 3
#: Points of a curve of losses.
_POINTS = 60


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
        return len(ratios_to_best(row for row in attention_rows(named) if _is_plain(row)))

    return sorted(records, key=lambda named: (not named.facts.get("gpu"), -comparisons(named)))


def styles(records: Sequence[Named]) -> dict[str, int]:
    """Colour and mark of each implementation: the same all over the page, no two in one record alike, ours first."""
    together: dict[str, set[str]] = {}
    for named in records:
        names = {row["impl"] for row in named.record["rows"]}
        for row in named.record["rows"]:
            together.setdefault(row["impl"], set()).update(names)
    index: dict[str, int] = {}
    for name in sorted(together, key=lambda name: not is_ours(name)):
        taken = {index.get(other) for other in together[name]}
        index[name] = next(i for i in range(len(together)) if i not in taken)
    return index


def sections(records: Sequence[Named]) -> list[Section]:
    """The sections that have charts."""
    made: list[tuple[str, str, str, Callable[[Named], list[Row]], Callable[[Sequence[Row]], list[Chart]]]] = [
        (
            "Attention: speed",
            "attention",
            "TFLOP/s, higher is better. Only visible pairs of query and key count as work.",
            attention_rows,
            lambda rows: lines_and_dots(rows, "tflops", "TFLOP/s"),
        ),
        (
            "Attention: speed over the best peer",
            "attention",
            "Above 1 flashtile is faster. The best peer is the fastest other implementation of each case.",
            attention_rows,
            ratios,
        ),
        ("Attention: memory and time", "attention", "Lower is better.", _with_memory, lengths),
        (
            "Attention over several GPUs",
            "attention over several GPUs",
            "TFLOP/s of all GPUs together, higher is better.",
            lambda named: _of(named, "context-parallel"),
            lambda rows: lines_and_dots(rows, "tflops", "TFLOP/s"),
        ),
        (
            "Decoding",
            "decoding",
            "GB/s of the key/value cache, higher is better. A copy of as much memory is shown for comparison.",
            _decoding,
            lambda rows: dots(rows, "gbps", "GB/s"),
        ),
        (
            "Norms, losses and others: bandwidth",
            "norms, rotary embedding, softmax and losses",
            "GB/s of what must be read and written at least, higher is better. The copy shows what the memory allows.",
            lambda named: [row for row in _companions(named) if row.get("tflops") is None],
            lambda rows: dots(rows, "gbps", "GB/s"),
        ),
        (
            "Linear layers: speed",
            "linear layers",
            "TFLOP/s, higher is better.",
            lambda named: [row for row in _companions(named) if row.get("tflops") is not None],
            lambda rows: dots(rows, "tflops", "TFLOP/s"),
        ),
        (
            "Training: speed",
            "training",
            "Tokens per second, higher is better.",
            lambda named: [row for row in named.rows if row.get("tokens_per_s") is not None],
            lambda rows: lines_and_dots(rows, "tokens_per_s", "tokens/s"),
        ),
        (
            "Training: losses",
            "training",
            "Each point is the mean of some steps. Curves that lie on each other come from equal arithmetic.",
            lambda named: [row for row in named.rows if row.get("curve")],
            losses,
        ),
        (
            "Training: accuracy",
            "training",
            "Share of held-out examples that are right, higher is better.",
            lambda named: [row for row in named.rows if row.get("accuracy") is not None],
            lambda rows: dots([{**row, "percent": 100 * row["accuracy"]} for row in rows], "percent", "% right"),
        ),
        (
            "Where the time goes",
            "standard attention step by step",
            "Standard attention step by step, and one fused call. Lower is better.",
            lambda named: _of(named, BREAKDOWN),
            breakdowns,
        ),
        (
            "Roofline",
            "attention",
            "The roof is what the GPU's data sheet allows at an intensity. Bytes are those of flashtile's IO model.",
            attention_rows,
            rooflines,
        ),
        (
            "Predicted and counted traffic",
            "memory traffic",
            "Bytes through device memory, by the IO model and by the GPU's counters.",
            lambda named: _of(named, "attention-io"),
            traffic,
        ),
        (
            "Host time",
            "host time",
            "Microseconds of the processor for one small call, lower is better.",
            lambda named: [row for row in named.rows if row["op"].endswith("-host")],
            lambda rows: dots([{**row, "us": row["ms"] * 1e3} for row in rows], "us", "µs"),
        ),
        (
            "Other measurements",
            "other operations",
            "Milliseconds, lower is better.",
            _others,
            lambda rows: dots(rows, "ms", "ms", log=True),
        ),
    ]
    found = []
    for title, topic, words, select, make in made:
        groups = [
            Group(named, ", ".join(common_facets([row["case"] for row in rows]).values()), tuple(charts))
            for named in records
            if (rows := [{**row, "machine": named.machine} for row in select(named)]) and (charts := make(rows))
        ]
        found.append(Section(title, topic, words, tuple(groups)))
    return [section for section in found if section.groups]


def _of(named: Named, op: str) -> list[Row]:
    return [row for row in named.rows if row["op"] == op]


def attention_rows(named: Named) -> list[Row]:
    """Rows of `flashtile bench attention`."""
    return [row for row in _of(named, "attention") if row.get("tflops") is not None]


def _with_memory(named: Named) -> list[Row]:
    return [row for row in _of(named, "attention") if (row.get("peak_mib") or row.get("memory_mib")) is not None]


def _companions(named: Named) -> list[Row]:
    """Rows of `flashtile bench companions`."""
    return [] if _of(named, DECODE) else [row for row in named.rows if row["op"] in OPERATIONS]


def _decoding(named: Named) -> list[Row]:
    """Rows of `flashtile bench decode`, its copies among them."""
    return [row for row in named.rows if row["op"] in (DECODE, "copy")] if _of(named, DECODE) else []


_DRAWN_ELSEWHERE = ("attention", "attention-io", "context-parallel", BREAKDOWN, DECODE, *OPERATIONS)


def _others(named: Named) -> list[Row]:
    """Operations that have no section of their own."""
    return [
        row
        for row in named.rows
        if row["op"] not in _DRAWN_ELSEWHERE
        and not row["op"].endswith("-host")
        and not any(row.get(key) for key in ("tokens_per_s", "curve", "accuracy"))
    ]


def _is_plain(row: Row) -> bool:
    """Whether a row of attention has no mask but the causal one."""
    absent = ("window", "lengths", "mask", "softcap", "bias", "function", "dropout_p", "Sk")
    return not any(row["case"].get(key) for key in absent) and row["case"].get("values", "normal") == "normal"


@dataclass(frozen=True)
class Family:
    """Rows of one phase whose cases differ in the length alone, and in the batch that goes with it."""

    op: str
    phase: str
    case: dict[str, Any]
    rows: tuple[Row, ...]


def families_of(rows: Sequence[Row]) -> tuple[list[Family], list[Row]]:
    """Families with enough lengths for lines, and the rows of no such family."""
    found: dict[str, list[Row]] = {}
    rest = []
    for row in rows:
        case = row["case"]
        if isinstance(case.get("S"), int) and not case.get("lengths"):
            without = {key: value for key, value in case.items() if key not in ("S", "B")}
            found.setdefault(json.dumps([row["op"], row["phase"], without], sort_keys=True), []).append(row)
        else:
            rest.append(row)
    families = []
    for members in found.values():
        if len({row["case"]["S"] for row in members}) < _LEAST_LENGTHS:
            rest += members
            continue
        first = members[0]
        case = {key: value for key, value in first["case"].items() if key not in ("S", "B")}
        families.append(Family(first["op"], first["phase"], case, tuple(members)))
    return families, rest


def titles_of(families: Sequence[Family], said: Facets) -> list[str]:
    """A title for each family: operation where there are several, phase, and what is not said already of its cases."""
    labels = labels_of([family.case for family in families], said) if families else []
    several = len({family.op for family in families}) > 1
    return [
        _title(operation_of(family.op) if several else None, family.phase, [label] if label else [])
        for family, label in zip(families, labels, strict=True)
    ]


def _title(first: str | None, phase: str, facets: Sequence[str]) -> str:
    words = [*([] if first is None else [first]), phase_of(phase), *facets]
    return ", ".join([words[0][0].upper() + words[0][1:], *words[1:]])


def _said(rows: Sequence[Row]) -> Facets:
    """What stands above the charts of some rows."""
    return common_facets([row["case"] for row in rows])


def lines_and_dots(rows: Sequence[Row], key: str, unit: str) -> list[Chart]:
    """Lines for what there is at several lengths, dots for the rest."""
    said = _said(rows)
    rows = [row for row in rows if row.get(key) is not None]
    families, rest = families_of(rows)
    charts: list[Chart] = [
        LineChart(title, _series(family.rows, key), _LENGTH, unit)
        for family, title in zip(families, titles_of(families, said), strict=True)
    ]
    return [*charts, *dots(rest, key, unit, said=said, beside="Other cases" if charts else None)]


def _series(rows: Sequence[Row], key: str) -> tuple[Series, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["impl"], []).append((row["case"]["S"], row[key]))
    return tuple(Series(impl, tuple(sorted(found))) for impl, found in points.items())


def ratios(rows: Sequence[Row]) -> list[Chart]:
    """A chart for each phase and implementation of ours, with a line for each family."""
    families, _ = families_of(rows)
    labels = labels_of([family.case for family in families], _said(rows)) if families else []
    names = dict(zip(map(id, families), labels))
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for family in families:
        for ratio in ratios_to_best(family.rows):
            of_family = lines.setdefault((ratio.phase, ratio.ours), {}).setdefault(names[id(family)], [])
            of_family.append((ratio.case["S"], ratio.value))
    several = len({ours for _, ours in lines}) > 1
    return [
        LineChart(
            phase_of(phase).capitalize() + (f", {ours}" if several else ""),
            tuple(Series(name, tuple(sorted(points))) for name, points in found.items()),
            _LENGTH,
            "× the best peer",
            level=1.0,
        )
        for (phase, ours), found in lines.items()
    ]


def lengths(rows: Sequence[Row]) -> list[Chart]:
    """Memory of each family; memory and time of rows that have nothing else."""
    charts: list[Chart] = []
    for key, what in (("peak_mib", "memory"), ("memory_mib", "memory")):
        families, _ = families_of([row for row in rows if row.get(key)])
        for family, title in zip(families, titles_of(families, _said(rows)), strict=True):
            charts.append(LineChart(f"{title}: {what}", _series(family.rows, key), _LENGTH, _MEMORY, logarithmic=True))
            if family.rows[0].get("tflops") is None:
                series = _series(family.rows, "ms")
                charts.append(LineChart(f"{title}: time", series, _LENGTH, "ms", logarithmic=True))
    return charts


def losses(rows: Sequence[Row]) -> list[Chart]:
    """Losses of rows that have a `curve`, each point the mean of some steps."""
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(json.dumps([row["op"], row["case"]], sort_keys=True), []).append(row)
    first = [of_case[0] for of_case in curves.values()]
    labels = labels_of([row["case"] for row in first], _said(rows))
    charts: list[Chart] = []
    for row, label, of_case in zip(first, labels, curves.values(), strict=True):
        series = [Series(one["impl"], points) for one in of_case if (points := smooth(one))]
        if series:
            title = ", ".join(filter(None, (operation_of(row["op"]), label)))
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


def breakdowns(rows: Sequence[Row]) -> list[Chart]:
    """Rows of `flashtile bench breakdown`: a stack of steps for each implementation."""
    bars: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in rows:
        bars.setdefault(row["phase"], {}).setdefault(row["impl"], []).append((row["step"], row["ms"]))
    return [StackedChart(phase_of(phase).capitalize(), found, "ms") for phase, found in bars.items()]


def traffic(rows: Sequence[Row]) -> list[Chart]:
    """Rows of `benchmarks/io_counters.py`."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found[row["impl"]] = {"predicted": _moved(row["predicted"])}
        if row["counted"] is not None:
            found[row["impl"]]["counted"] = _moved(row["counted"])
    return [DotChart("Forward and backward", found, "GB", logarithmic=True)]


def _moved(part: dict[str, float]) -> float:
    return (part["bytes_read"] + part["bytes_written"]) / 1e9


def dots(
    rows: Sequence[Row],
    key: str,
    unit: str,
    *,
    log: bool = False,
    said: Facets | None = None,
    beside: str | None = None,
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
    by_phase: dict[str, list[Row]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    charts: list[DotChart] = []
    for phase, of_phase in by_phase.items():
        for part in parts_of(of_phase):
            ops = {row["op"] for row in part}
            more = [words for facet, words in _said(part).items() if said.get(facet) != words]
            title = _title(beside or (operation_of(ops.pop()) if several and len(ops) == 1 else None), phase, more)
            charts.append(DotChart(title, _by_label(part, key, said), unit, logarithmic=log))
    return _numbered(charts)


def _numbered(charts: Sequence[DotChart]) -> list[Chart]:
    """The charts, those with equal titles numbered."""
    titles = [chart.title for chart in charts]
    seen: dict[str, int] = {}
    numbered: list[Chart] = []
    for chart in charts:
        number = seen[chart.title] = seen.get(chart.title, 0) + 1
        title = chart.title if titles.count(chart.title) == 1 else f"{chart.title} ({number})"
        numbered.append(replace(chart, title=title))
    return numbered


def _by_label(rows: Sequence[Row], key: str, said: Facets) -> dict[str, dict[str, float]]:
    """Name of a case -> implementation -> value."""
    cases: dict[str, Row] = {}
    for row in rows:
        cases.setdefault(case_key(row), row)
    several = len({row["op"] for row in rows}) > 1
    found: dict[str, str] = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = {of_case: row["case"] for of_case, row in cases.items() if row["op"] == op}
        labels = labels_of(list(of_op.values()), said if len(of_op) == 1 else None)
        for of_case, label in zip(of_op, labels, strict=True):
            words = [operation_of(op)] if several or not label else []
            found[of_case] = ", ".join([*words, *([label] if label else [])])
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        values.setdefault(found[case_key(row)], {})[row["impl"]] = row[key]
    return values
