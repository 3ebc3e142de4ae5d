"""Tables of a record, as plain data, which `flashtile bench` draws and the page shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashtile.bench.base import is_ours
from flashtile.bench.breakdown import BREAKDOWN, FUSED
from flashtile.bench.cases import Case
from flashtile.bench.record import (
    SPEEDS,
    Ratio,
    Record,
    Row,
    case_key,
    geometric_mean,
    peers,
    ratios_to_best,
    ratios_to_peer,
    row_key,
)  # fmt: skip
from flashtile.bench.registry import case_name, find_benchmark, find_case
from flashtile.bench.tables import find_table

_PHASES = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class Table:
    """A title, headings, and cells.

    Attributes:
        words: all columns are text; else those after the first `keys` are figures.
        keys: how many columns at the beginning name a line.
    """

    title: str
    headings: list[str]
    lines: list[list[str]]
    words: bool = False
    keys: int = 1


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Speeds of every implementation, and ours as a multiple of the best peer, a table for each phase.

    Attention in TFLOP/s. Companion operations in TFLOP/s where they are products, in GB/s where memory bounds them,
    then with the share of a copy's speed that ours reaches; so is serving, by the bytes of its cache. Training in
    tokens each second. If rows have them, there are also tables of the memory that they take, and of the
    share of the GPU's peak.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((find_benchmark(row["op"]).title, row["phase"], _unit(row)), []).append(row)
    copies = [row for row in rows if row["op"] == "copy" and row["ms"] is not None]
    found = [
        _speed_table(f"{kind} {phase}", unit, of_group, copies) for (kind, phase, unit), of_group in groups.items()
    ]
    memory = [row for row in rows if "peak_mib" in row]
    if memory:
        found.append(_figures("Memory beside what stays (MiB)", memory, lambda row: f"{row['peak_mib']:.0f}"))
    shares = [row for row in rows if row.get("mfu") is not None]
    if shares:
        found.append(
            _figures("The model's FLOPs as a share of the GPU's peak", shares, lambda row: f"{row['mfu']:.1%}")
        )
    return found


def host_table(rows: Sequence[Row]) -> Table:
    """Host time of calls: a line for each case, where there are several, and implementation, a column for each phase,
    in microseconds."""
    phases, names = _phases(rows), dict.fromkeys(case_name(row) for row in rows)
    times = {(case_name(row), row["impl"], row["phase"]): row["ms"] for row in rows}
    lines = []
    for case, impl in dict.fromkeys((case_name(row), row["impl"]) for row in rows):
        cells = ("–" if (ms := times[case, impl, phase]) is None else f"{ms * 1e3:.1f}" for phase in phases)
        lines.append([*([case] * (len(names) > 1)), impl, *cells])
    keys = [*(["case"] * (len(names) > 1)), "implementation"]
    return Table("Host time per call (µs)", [*keys, *phases], lines, keys=len(keys))


def mean_tables(rows: Sequence[Row]) -> list[Table]:
    """Geometric means of our speed over the best peer's and over each peer's: for each table of attention cases, each
    companion operation, kind of serving, and training.

    None without a peer.
    """
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        case = find_case(row)
        name = f"{find_table(case)} table" if isinstance(case, Case) else case.kind
        by_table.setdefault(name, []).append(row)
    found = [_mean_table(name, of_table) for name, of_table in by_table.items()]
    return [table for table in found if table.lines]


def _mean_table(name: str, rows: Sequence[Row]) -> Table:
    lines = []
    for against in ("best peer", *peers(rows)):
        found = ratios_to_best(rows) if against == "best peer" else ratios_to_peer(rows, against)
        for ours in dict.fromkeys(ratio.ours for ratio in found):
            for phase in _phases(rows):
                chosen = [ratio for ratio in found if ratio.ours == ours and ratio.phase == phase]
                if chosen:
                    lines.append([f"{ours} / {against}", phase, *_mean_cells(chosen)])
    headings = ["speed ratio", "phase", "geometric mean", "lowest", "highest", "cases", "lowest against", "lowest at"]
    return Table(f"Our speed over the peers': {name}", headings, lines, keys=2)


def _mean_cells(ratios: Sequence[Ratio]) -> list[str]:
    values = [ratio.value for ratio in ratios]
    lowest = min(ratios, key=lambda ratio: ratio.value)
    figures = (geometric_mean(values), min(values), max(values))
    return [*(f"{f:.2f}" for f in figures), str(len(values)), lowest.peer, case_name(vars(lowest))]


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each implementation and reason for which it has no speed."""
    cases: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        if row["ms"] is None:
            cases.setdefault((row["impl"], row["why"]), set()).add(f"{case_name(row)} {row['phase']}")
    return [
        f"{impl}: {why} ({next(iter(where)) if len(where) == 1 else f'{len(where)} measurements'})"
        for (impl, why), where in cases.items()
    ]


def _speed_table(title: str, unit: str, rows: list[Row], copies: list[Row]) -> Table:
    impls = list(dict.fromkeys(row["impl"] for row in rows if row["ms"] is not None or is_ours(row["impl"])))
    ours = [impl for impl in impls if is_ours(impl)]
    beside_copy = ours if unit == "GB/s" and copies else []
    ratios = {(case_key(vars(ratio)), ratio.ours): ratio for ratio in ratios_to_best(rows)}
    lines = []
    for key in dict.fromkeys(map(case_key, rows)):
        of_case = {row["impl"]: row for row in rows if case_key(row) == key}
        speeds = [_speed(of_case.get(impl), unit) for impl in impls]
        shares = [_copy_share(of_case.get(impl), copies) for impl in beside_copy]
        compared = [f"{ratios[key, impl].value:.2f}" if (key, impl) in ratios else "–" for impl in ours]
        lines.append([case_name(next(iter(of_case.values()))), *speeds, *shares, *compared])
    of_copy = (f"{impl} / copy" for impl in beside_copy)
    return Table(f"{title}: {unit}", ["case", *impls, *of_copy, *(f"{impl} / best" for impl in ours)], lines)


def _unit(row: Row) -> str:
    """The unit of a speed."""
    return find_benchmark(row["op"]).unit or find_case(row).unit(row["phase"])


def _speed(row: Row | None, unit: str) -> str:
    if row is None or row["ms"] is None:
        return "–"
    speed = row[SPEEDS[unit]]
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


#: Copies that move up to so many times as many bytes, or as few, are like one another.
_ALIKE = 3.0


def _copy_share(row: Row | None, copies: list[Row]) -> str:
    """The share of the fastest copy that moves about as many bytes; smaller copies stay in the caches, in part.

    The fastest, not the nearest: a single copy can be slow by an accident of its own, such as the copy engine that a
    graph gives a size to.
    """
    if row is None or row["ms"] is None:
        return "–"
    apart = [abs(math.log(_moved(copy) / _moved(row))) for copy in copies]
    limit = max(math.log(_ALIKE), min(apart))
    fastest = max(copy["gbps"] for copy, distance in zip(copies, apart, strict=True) if distance <= limit)
    return f"{row['gbps'] / fastest:.0%}"


def _moved(row: Row) -> float:
    """Bytes, of a row with a speed."""
    return row["gbps"] * row["ms"] * 1e6


def _figures(title: str, rows: list[Row], figure: Callable[[Row], str]) -> Table:
    """One figure of each implementation in each case."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = []
    for key in dict.fromkeys(map(case_key, rows)):
        of_case = {row["impl"]: row for row in rows if case_key(row) == key}
        cells = [figure(of_case[impl]) if impl in of_case else "–" for impl in impls]
        lines.append([case_name(next(iter(of_case.values()))), *cells])
    return Table(title, ["case", *impls], lines)


def _phases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["phase"] for row in rows))


def comparison_tables(rows: Sequence[Row], earlier: Sequence[Row], title: str) -> list[Table]:
    """Times there and here, and how many times as fast here is, for what both measured; then geometric means.

    Args:
        rows: of this run.
        earlier: of the other.
        title: of the first table.
    """
    before = {row_key(row): row for row in earlier if row.get("ms") is not None}
    common = [(before[row_key(row)], row) for row in rows if row.get("ms") is not None and row_key(row) in before]
    lines = [
        [
            case_name(row),
            row["impl"],
            _step(row),
            f"{old['ms']:.4g}",
            f"{row['ms']:.4g}",
            f"{old['ms'] / row['ms']:.3f}",
        ]
        for old, row in common
    ]
    return [
        Table(title, ["case", "implementation", "phase", "ms there", "ms here", "speed here / there"], lines, keys=3),
        _means(common),
    ]


def differences(record: Record, earlier: Record) -> list[str]:
    """A line for each fact of machine and versions in which two records differ, and for which times may differ."""
    found = []
    for part in ("machine", "versions"):
        here, there = record.get(part) or {}, earlier.get(part) or {}
        for name in dict.fromkeys((*there, *here)):
            if here.get(name) != there.get(name):
                found.append(f"{name}: {there.get(name)} there, {here.get(name)} here")
    return found


def _means(common: Sequence[tuple[Row, Row]]) -> Table:
    ratios: dict[tuple[str, str], list[float]] = {}
    for old, row in common:
        ratios.setdefault((row["impl"], _step(row)), []).append(old["ms"] / row["ms"])
    lines = [
        [impl, phase, f"{geometric_mean(of):.3f}", f"{min(of):.3f}", f"{max(of):.3f}", str(len(of))]
        for (impl, phase), of in ratios.items()
    ]
    headings = ["implementation", "phase", "geometric mean", "lowest", "highest", "cases"]
    return Table("Speed here over there", headings, lines, keys=2)


def _step(row: Row) -> str:
    return f"{row['phase']}, {row['step']}" if "step" in row else row["phase"]


def breakdown_tables(rows: Sequence[Row]) -> list[Table]:
    """For each phase: the time of each step, its share, and the sum beside one call."""
    tables = []
    for phase, words in _PHASES.items():
        of_phase = [row for row in rows if row["phase"] == phase and row["ms"] is not None]
        steps = [row for row in of_phase if row["step"] != FUSED]
        total = sum(row["ms"] for row in steps)
        lines = [[row["step"], f"{row['ms']:.4g}", f"{row['ms'] / total:.0%}"] for row in steps]
        if steps:
            lines.append(["standard, all steps", f"{total:.4g}", "100%"])
        for row in of_phase:
            if row["step"] == FUSED:
                share = f"{row['ms'] / total:.0%}" if steps else "–"
                lines.append([f"{row['impl']}, one call", f"{row['ms']:.4g}", share])
        if lines:
            tables.append(Table(f"Where the {words} spends its time", ["step", "ms", "share of standard"], lines))
    return tables


@dataclass(frozen=True)
class Report:
    """Tables, and lines that follow them."""

    tables: list[Table]
    notes: list[str]


def make_report(record: Record, earlier: Record | None = None) -> Report:
    """A record's speeds, means and what could not run; with `earlier` also how these speeds differ from that one's."""
    rows = record["rows"]
    if rows and rows[0]["op"].endswith("-host"):
        tables = [host_table(rows)]
    elif rows and rows[0]["op"] == BREAKDOWN:
        tables = breakdown_tables(rows)
    else:
        tables = [*speed_tables(rows), *mean_tables(rows)]
    notes = [f"no speed: {line}" for line in reasons(rows)]
    if earlier is not None:
        compared = comparison_tables(rows, earlier["rows"], "Beside the earlier record")
        tables += [table for table in compared if table.lines]
        notes += [f"not alike: {line}" for line in differences(record, earlier)]
        if not compared[0].lines:
            notes.append("the earlier record has a time for none of these cases and implementations")
    return Report(tables, notes)
