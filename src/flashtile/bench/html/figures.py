"""Which charts a record gives: what can be drawn against a length, what stands alone, what memory bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashtile.bench.cases import Case
from flashtile.bench.companions.tables import OPERATIONS, case_of
from flashtile.bench.html.charts import Chart, Series, dot_chart, line_chart, stacked_chart
from flashtile.bench.html.page import Figure, Section
from flashtile.bench.html.roofline import rooflines
from flashtile.bench.record import Record
from flashtile.bench.report import case_name
from flashtile.bench.summary import is_ours, ratios_to_best
from flashtile.bench.training import cases as training

Row = dict[str, Any]

PHASES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward", "fwd+bwd+step": "training step"}
_MEMORY = "MiB beside inputs and gradients"
#: Of a curve of losses.
_POINTS = 60
#: So many lengths make a line.
_LEAST_LENGTHS = 3


@dataclass(frozen=True)
class Named:
    """A record, its file's name, and the colour and mark of each implementation on the page."""

    record: Record
    name: str
    index: dict[str, int]

    @property
    def rows(self) -> list[Row]:
        """Rows with a time."""
        return [row for row in self.record["rows"] if row.get("ms") is not None]

    @property
    def machine(self) -> str:
        facts = self.record.get("machine") or {}
        return facts.get("gpu") or facts.get("cpu") or "machine unknown"

    def figure(self, chart: Chart) -> Figure:
        number, dirty, _ = str(self.record.get("commit") or "unknown").partition("-dirty")
        commit = number[:12] + dirty
        source = f"{self.name}, {self.machine}, commit {commit}"
        return Figure(chart, source, str(self.record.get("command", "")))

    def series(self, impl: str, points: Sequence[tuple[float, float]]) -> Series:
        return Series(impl, self.index[impl], tuple(sorted(points)))


def implementations(records: Sequence[Record]) -> dict[str, int]:
    """Colour and mark of each implementation: the same all over the page, no two in one record alike, ours first."""
    together: dict[str, set[str]] = {}
    for record in records:
        names = {row["impl"] for row in record["rows"]}
        for row in record["rows"]:
            together.setdefault(row["impl"], set()).update(names)
    index: dict[str, int] = {}
    for name in sorted(together, key=lambda name: not is_ours(name)):
        taken = {index.get(other) for other in together[name]}
        index[name] = next(i for i in range(len(together)) if i not in taken)
    return index


def sections(records: Sequence[Named]) -> list[Section]:
    """All of them, for all records; one of which there are no rows has no figures."""
    made: list[tuple[str, str, Callable[[Named], list[Chart]]]] = [
        ("Attention: speed against length", "TFLOP/s, higher is better. Peers ran in the same process.", speeds),
        (
            "Attention: speed over the best peer",
            "Above 1 flashtile is the faster one. The best peer is chosen anew for each case.",
            ratios,
        ),
        ("Attention: memory and time against length", "Lower is better.", lengths),
        ("Attention: masks and other kinds", "TFLOP/s of visible pairs, higher is better.", kinds),
        (
            "Roofline",
            "The roof is what the GPU's data sheet allows at an intensity: bytes are those of the IO model.",
            rooflines_of,
        ),
        ("Where the time goes", "Standard attention step by step, beside one fused call; lower is better.", breakdowns),
        ("Predicted and counted traffic", "Bytes through device memory, by the IO model and by counters.", traffic),
        ("Decoding", "Queries against a key/value cache.", decoding),
        ("Beside attention: bandwidth", "GB/s of what must be read and written; a copy is beside it.", bandwidths),
        ("Beside attention: products", "TFLOP/s, higher is better.", products),
        ("Training: speed", "Tokens in a second, higher is better.", tokens),
        ("Training: losses", "Each point is the mean of some steps.", losses),
        ("Training: accuracy", "Of what was held out, higher is better.", accuracies),
        ("Host time", "Microseconds of the host for one small call, lower is better.", host),
        ("Other rows", "Milliseconds, lower is better.", others),
    ]
    return [
        Section(title, words, tuple(named.figure(chart) for named in records for chart in make(named)))
        for title, words, make in made
    ]


def _attention(named: Named) -> list[tuple[Case, Row]]:
    """Rows of `flashtile bench attention`."""
    rows = (row for row in named.rows if row["op"] == "attention" and row.get("tflops") is not None)
    return [(Case.from_record(row["case"]), row) for row in rows]


#: A family of cases that differ in length alone, and in the batch that goes with it; and a phase.
_Family = tuple[Case, str]


def _families(named: Named) -> dict[_Family, list[tuple[Case, Row]]]:
    found: dict[_Family, list[tuple[Case, Row]]] = {}
    for case, row in _attention(named):
        if case.lengths is None and case.mask is None:
            found.setdefault((replace(case, B=1, S=0), row["phase"]), []).append((case, row))
    return {key: members for key, members in found.items() if len({case.S for case, _ in members}) >= _LEAST_LENGTHS}


def speeds(named: Named) -> list[Chart]:
    """A chart for each head size, mask and phase."""
    charts = []
    for (family, phase), members in _families(named).items():
        points: dict[str, list[tuple[float, float]]] = {}
        for case, row in members:
            points.setdefault(row["impl"], []).append((case.S, row["tflops"]))
        series = [named.series(impl, found) for impl, found in points.items()]
        charts.append(line_chart(f"{_family_name(family)}, {_phase(phase)}", series, "sequence length", "TFLOP/s"))
    return charts


def ratios(named: Named) -> list[Chart]:
    """A chart for each phase and implementation of ours, with a line for each family."""
    lines: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for (family, phase), members in _families(named).items():
        for ratio in ratios_to_best([row for _, row in members]):
            of_family = lines.setdefault((ratio.ours, phase), {}).setdefault(_family_name(family), [])
            of_family.append((ratio.case["S"], ratio.value))
    charts = []
    for (ours, phase), found in lines.items():
        series = [Series(name, i, tuple(sorted(points))) for i, (name, points) in enumerate(found.items())]
        title = f"{ours} over the best peer, {_phase(phase)}"
        charts.append(line_chart(title, series, "sequence length", "times as fast", level=1.0))
    return charts


def lengths(named: Named) -> list[Chart]:
    """Memory of each head size and mask; memory and time of rows that have nothing else."""
    charts = []
    for (family, phase), members in _families(named).items():
        with_memory = [(case.S, row) for case, row in members if row.get("peak_mib")]
        if len({seq for seq, _ in with_memory}) >= _LEAST_LENGTHS:
            title = f"{_family_name(family)}, memory with the {_phase(phase)}"
            charts.append(_against_length(named, title, with_memory, "peak_mib", _MEMORY))
    rows = [row for row in named.rows if row["op"] == "attention" and row.get("memory_mib") is not None]
    if rows:
        phase, by_length = _phase(rows[0]["phase"]), [(row["case"]["S"], row) for row in rows]
        charts.append(_against_length(named, f"Memory, {phase}", by_length, "memory_mib", _MEMORY))
        charts.append(_against_length(named, f"Time, {phase}", by_length, "ms", "ms"))
    return charts


def _against_length(named: Named, title: str, rows: Sequence[tuple[int, Row]], key: str, label: str) -> Chart:
    points: dict[str, list[tuple[float, float]]] = {}
    for seq, row in rows:
        points.setdefault(row["impl"], []).append((seq, row[key]))
    series = [named.series(impl, found) for impl, found in points.items()]
    return line_chart(title, series, "sequence length", label, logarithmic=True)


def kinds(named: Named) -> list[Chart]:
    """What stands at one length or two, or has a mask, or is packed."""
    drawn = {id(row) for members in _families(named).values() for _, row in members}
    rest = [row for _, row in _attention(named) if id(row) not in drawn]
    return _dots(named, rest, "tflops", "TFLOP/s", "{phase}")


def rooflines_of(named: Named) -> list[Chart]:
    return rooflines(named.machine, _attention(named), PHASES)


def bandwidths(named: Named) -> list[Chart]:
    rows = [row for row in named.rows if row["op"] in OPERATIONS and not _is_product(row)]
    return _dots(named, rows, "gbps", "GB/s", "{phase}")


def products(named: Named) -> list[Chart]:
    rows = [row for row in named.rows if row["op"] in OPERATIONS and _is_product(row)]
    return _dots(named, rows, "tflops", "TFLOP/s", "{phase}")


def tokens(named: Named) -> list[Chart]:
    """Against the length of the context where there are enough, else by case."""
    families: dict[str, list[Row]] = {}
    for row in named.rows:
        if row.get("tokens_per_s") is not None:
            of_family = {key: value for key, value in row["case"].items() if key not in ("B", "S")}
            families.setdefault(plain_case({"case": {"": row["op"], **of_family}}), []).append(row)
    charts, single = [], []
    for name, rows in families.items():
        by_length = [(row["case"]["S"], row) for row in rows if row["case"].get("S")]
        if len({seq for seq, _ in by_length}) < _LEAST_LENGTHS:
            single += rows
            continue
        title = name.lstrip("=")
        charts.append(_against_length(named, f"{title}, speed", by_length, "tokens_per_s", "tokens/s"))
        if with_memory := [(seq, row) for seq, row in by_length if row.get("peak_mib")]:
            charts.append(_against_length(named, f"{title}, memory", with_memory, "peak_mib", _MEMORY))
    return [*charts, *_dots(named, single, "tokens_per_s", "tokens/s", "{op}, {phase}")]


def losses(named: Named) -> list[Chart]:
    """Losses of rows that have a `curve`, each point the mean of some steps."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in named.rows:
        if row.get("curve"):
            name = f"{row['op']}: {plain_case(row)}"
            curves.setdefault(name, {})[row["impl"]] = _smooth(row["curve"])
    return [
        line_chart(
            name,
            [named.series(impl, points) for impl, points in found.items() if points],
            "step",
            "loss",
            steps=True,
        )
        for name, found in curves.items()
        if any(found.values())
    ]


def _smooth(curve: Sequence[float | None]) -> list[tuple[float, float]]:
    """At most `_POINTS` points (last step, mean); a part with a loss that was not finite is left out."""
    part = max(1, len(curve) // _POINTS)
    found = []
    for begin in range(0, len(curve), part):
        values = curve[begin : begin + part]
        finite = [value for value in values if value is not None]
        if len(finite) == len(values):
            found.append((float(begin + len(values)), sum(finite) / len(finite)))
    return found


def accuracies(named: Named) -> list[Chart]:
    rows = [{**row, "percent": 100 * row["accuracy"]} for row in named.rows if row.get("accuracy") is not None]
    return _dots(named, rows, "percent", "% right", "{op}")


def host(named: Named) -> list[Chart]:
    rows = [{**row, "us": row["ms"] * 1e3} for row in named.rows if row["op"].endswith("-host")]
    return _dots(named, rows, "us", "µs", "Host time, {phase}")


def _is_decoding(row: Row) -> bool:
    return any(word in row["op"] for word in ("decode", "cache"))


def decoding(named: Named) -> list[Chart]:
    """Where rows have a bandwidth, that; else the time."""
    rows = [row for row in named.rows if _is_decoding(row)]
    with_speed = [row for row in rows if row.get("gbps") is not None]
    without = [row for row in rows if row.get("gbps") is None]
    return [
        *_dots(named, with_speed, "gbps", "GB/s", "{op}, {phase}"),
        *_dots(named, without, "ms", "ms", "{op}, {phase}", log=True),
    ]


_DRAWN_ELSEWHERE = ("attention", "attention-io", "attention-breakdown", training.OP, *OPERATIONS)


def others(named: Named) -> list[Chart]:
    """Operations that have no chart of their own."""
    rows = [
        row
        for row in named.rows
        if row["op"] not in _DRAWN_ELSEWHERE
        and not row["op"].endswith("-host")
        and not _is_decoding(row)
        and not any(row.get(key) for key in ("tokens_per_s", "curve", "accuracy"))
    ]
    return _dots(named, rows, "ms", "ms", "{op}, {phase}", log=True)


def breakdowns(named: Named) -> list[Chart]:
    """Rows of `flashtile bench breakdown`: a stack of steps for each implementation."""
    by_case: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in named.rows:
        if row["op"] == "attention-breakdown":
            title = f"{_phase(row['phase'])}, {plain_case(row)}"
            bars = by_case.setdefault(title[0].upper() + title[1:], {})
            bars.setdefault(row["impl"], []).append((row["step"], row["ms"]))
    return [stacked_chart(name, bars, "ms") for name, bars in by_case.items()]


def traffic(named: Named) -> list[Chart]:
    """Rows of `benchmarks/io_counters.py`."""
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    for row in named.rows:
        if row["op"] == "attention-io":
            found = {"predicted": _moved(row["predicted"])}
            if row["counted"] is not None:
                found["counted"] = _moved(row["counted"])
            by_case.setdefault(plain_case(row), {})[row["impl"]] = found
    index = {"predicted": 0, "counted": 1}
    return [dot_chart(f"Traffic, {name}", found, index, "GB", log=True) for name, found in by_case.items()]


def _moved(part: dict[str, float]) -> float:
    return (part["bytes_read"] + part["bytes_written"]) / 1e9


def _dots(named: Named, rows: Sequence[Row], key: str, label: str, title: str, *, log: bool = False) -> list[Chart]:
    """A chart for each title, which may name phase and operation."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.get(key) is not None:
            heading = title.format(phase=_phase(row["phase"]), op=row["op"])
            found.setdefault(heading[0].upper() + heading[1:], {}).setdefault(_name(row), {})[row["impl"]] = row[key]
    return [dot_chart(heading, cases, named.index, label, log=log) for heading, cases in found.items()]


def _name(row: Row) -> str:
    """The name of a row's case; the keys and values of one that this version does not know."""
    try:
        return case_name(row)
    except (TypeError, KeyError):
        return plain_case(row)


def plain_case(row: Row) -> str:
    """Keys and values of a case, without those that say nothing."""
    return " ".join(f"{key}={value}" for key, value in row["case"].items() if value not in (None, False, 0, 0.0))


def _is_product(row: Row) -> bool:
    return case_of(row["op"], row["case"]).flops(row["phase"]) is not None


def _phase(phase: str) -> str:
    return PHASES.get(phase, phase)


def _family_name(family: Case) -> str:
    head_dim = f"{family.D}" if family.D == family.Dv else f"{family.D}/{family.Dv}"
    parts = [f"head_dim {head_dim}", "causal" if family.causal else "full"]
    if family.H != family.Hkv:
        parts.append(f"{family.H} query heads, {family.Hkv} key/value heads")
    if family.window is not None:
        parts.append(f"window {family.window}")
    if family.dropout_p:
        parts.append(f"dropout {family.dropout_p}")
    if family.softcap is not None:
        parts.append(f"soft cap {family.softcap:g}")
    if family.bias is not None:
        parts.append(f"bias {family.bias}")
    return ", ".join([*parts, family.dtype])
