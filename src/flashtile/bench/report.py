"""Tables of a record, as plain data, which `flashtile bench` draws and the page shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashtile.bench.base import is_ours
from flashtile.bench.breakdown import BREAKDOWN, FUSED
from flashtile.bench.cases import Case
from flashtile.bench.record import (
    DEFAULT,
    DETERMINISTIC,
    SPEEDS,
    YARDSTICKS,
    Record,
    Row,
    case_key,
    geometric_mean,
    grouped,
    mode_ratios,
    peers,
    ratios_to_best,
    ratios_to_peer,
    row_key,
)  # fmt: skip
from flashtile.bench.registry import case_name, find_benchmark, find_case
from flashtile.bench.tables import find_table


@dataclass(frozen=True)
class Table:
    """A title, headings, and cells. `words`: all columns are text; else those after the first `keys` are figures.
    `keys`: how many columns at the beginning name a line."""

    title: str
    headings: list[str]
    lines: list[list[str]]
    words: bool = False
    keys: int = 1

    def markdown(self) -> str:
        """The cells, without the title."""
        rule = [":--" if self.words or place < self.keys else "--:" for place in range(len(self.headings))]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.headings, rule, *self.lines))


def pivot(title: str, keys: Sequence[str], cells: Iterable[tuple[Sequence[str], str, str]]) -> Table:
    """A table of cells, each with the key of its line and the heading of its column, in the order in which they come.
    `keys`: headings of the parts of a key. A dash stands where there is no cell."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for key, column, cell in cells:
        found.setdefault(tuple(key), {})[column] = cell
        columns.setdefault(column)
    lines = [[*key, *(of_line.get(column, "–") for column in columns)] for key, of_line in found.items()]
    return Table(title, [*keys, *columns], lines, keys=len(keys))


def summary(values: Sequence[float], digits: int = 2) -> list[str]:
    """Cells of some ratios: the geometric mean, the lowest, the highest, and how many there are."""
    figures = geometric_mean(values), min(values), max(values)
    return [*(f"{figure:.{digits}f}" for figure in figures), str(len(values))]


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """Speeds of every implementation, and ours as a multiple of the best peer, a table for each phase: TFLOP/s of
    attention and products, GB/s where memory bounds (with the share of a copy's speed), tokens/s of training. If rows
    have them, also memory, and the share of the GPU's peak."""

    def row_kind(row: Row) -> tuple[str, str, str]:
        benchmark = find_benchmark(row["op"])
        return benchmark.title, row["phase"], benchmark.unit or find_case(row).unit(row["phase"])

    groups = grouped(rows, row_kind)
    copies = [row for row in rows if row["op"] == "copy" and row["ms"] is not None]
    found = [_speed_table(f"{kind} {phase}", unit, of_kind, copies) for (kind, phase, unit), of_kind in groups.items()]
    return found + [
        pivot(title, ["case"], (([case_name(row)], row["impl"], format(row[key], form)) for row in those))
        for title, key, form in (
            ("Memory beside what stays (MiB)", "peak_mib", ".0f"),
            ("The model's FLOPs as a share of the GPU's peak", "mfu", ".1%"),
        )
        if (those := [row for row in rows if row.get(key) is not None])
    ]


def host_table(rows: Sequence[Row]) -> Table:
    """Host time in microseconds: a line for each case and implementation, a column for each phase."""
    keys = ["case", "implementation"] if len({case_name(row) for row in rows}) > 1 else ["implementation"]
    times = (("–" if row["ms"] is None else f"{row['ms'] * 1e3:.1f}") for row in rows)
    cells = (([case_name(row), row["impl"]][-len(keys) :], row["phase"], time) for row, time in zip(rows, times))
    return pivot("Host time per call (µs)", keys, cells)


def mean_tables(rows: Sequence[Row]) -> list[Table]:
    """Geometric means of our speed over the best peer's and over each peer's, by kind of case. None without a peer."""

    def table_name(row: Row) -> str:
        case = find_case(row)
        return f"{find_table(case)} table" if isinstance(case, Case) else case.kind

    found = [_mean_table(name, of_table) for name, of_table in grouped(rows, table_name).items()]
    return [table for table in found if table.lines]


def _mean_table(name: str, rows: Sequence[Row]) -> Table:
    lines, phases = [], list(dict.fromkeys(row["phase"] for row in rows))
    for against in ("best peer", *peers(rows)):
        found = ratios_to_best(rows) if against == "best peer" else ratios_to_peer(rows, against)
        for ours, of_ours in grouped(found, lambda row: row["impl"]).items():
            by_phase = grouped(of_ours, lambda row: row["phase"])
            for phase in sorted(by_phase, key=phases.index):
                lowest = min(by_phase[phase], key=lambda row: row["ratio"])
                figures = summary([row["ratio"] for row in by_phase[phase]])
                lines.append([f"{ours} / {against}", phase, *figures, lowest["peer"], case_name(lowest)])
    headings = ["speed ratio", "phase", "geometric mean", "lowest", "highest", "cases", "lowest against", "lowest at"]
    return Table(f"Our speed over the peers': {name}", headings, lines, keys=2)


def verdict_table(rows: Sequence[Row]) -> Table:
    """For each case and phase our fastest implementation beside the fastest peer."""
    lines = []
    for (name, phase), found in grouped(rows, lambda row: (case_name(row), row["phase"])).items():
        timed = [row for row in found if row["ms"] is not None and row["impl"] not in YARDSTICKS]
        ours, best = (
            min((row for row in timed if is_ours(row["impl"]) is own), key=lambda row: row["ms"], default=None)
            for own in (True, False)
        )
        ratio = f"{best['ms'] / ours['ms']:.2f}" if ours and best else "–"
        if any(is_ours(row["impl"]) for row in found):
            times = ("–" if row is None else f"{row['ms']:.4g}" for row in (ours, best))
            lines.append([name, phase, *times, "–" if best is None else best["impl"], ratio])
    headings = ["case", "phase", "our ms", "best ms", "of", "ours / best"]
    return Table("Our speed over the fastest peer's", headings, lines, keys=2)


def verdict(table: Table) -> str:
    """A verdict table in a sentence."""
    ratios = [float(line[-1]) for line in table.lines if line[-1] != "–"]
    if not ratios:
        return "No call has both a speed of ours and one of a peer."
    mean, lowest, highest, count = summary(ratios)
    faster = sum(ratio > 1 for ratio in ratios)
    return (
        f"flashtile is faster than the fastest peer in {faster} of {count} measurements, {mean} times as fast on "
        f"average (geometric mean), from {lowest} to {highest}."
    )


def mode_tables(rows: Sequence[Row]) -> list[Table]:
    """The speed of the batch-invariant mode over the default's, over that of deterministic=True, and over the fastest
    peer's. None without a row in the mode."""
    lines = []
    for row, ratios in mode_ratios(rows):
        peer = next((name for name in ratios if not is_ours(name)), "–")
        default, deterministic, best = (
            f"{ratios[name]:.2f}" if name in ratios else "–" for name in (DEFAULT, DETERMINISTIC, peer)
        )
        lines.append([case_name(row), row["phase"], default, deterministic, peer, best])
    headings = ["case", "phase", "mode / default", "mode / deterministic", "fastest peer", "mode / best"]
    return [Table("Speed in the batch-invariant mode", headings, lines, keys=2)] if lines else []


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each implementation and reason for which it has no speed."""
    lines, missing = [], (row for row in rows if row["ms"] is None)
    for (impl, why), found in grouped(missing, lambda row: (row["impl"], row["why"])).items():
        where = {f"{case_name(row)} {row['phase']}" for row in found}
        lines.append(f"{impl}: {why} ({where.pop() if len(where) == 1 else f'{len(where)} measurements'})")
    return lines


def _speed_table(title: str, unit: str, rows: list[Row], copies: list[Row]) -> Table:
    shown = {row["impl"] for row in rows if row["ms"] is not None or is_ours(row["impl"])}
    rows = [row for row in rows if row["impl"] in shown]
    ours = [row for row in rows if is_ours(row["impl"])]
    ratios = {(case_key(row), row["impl"]): f"{row['ratio']:.2f}" for row in ratios_to_best(rows)}
    cells = [([case_name(row)], row["impl"], _speed(row, unit)) for row in rows]
    if unit == "GB/s" and copies:
        cells += [([case_name(row)], f"{row['impl']} / copy", _copy_share(row, copies)) for row in ours]
    cells += [
        ([case_name(row)], f"{row['impl']} / best", ratios.get((case_key(row), row["impl"]), "–")) for row in ours
    ]
    return pivot(f"{title}: {unit}", ["case"], cells)


def _speed(row: Row, unit: str) -> str:
    if row["ms"] is None:
        return "–"
    speed = row[SPEEDS[unit]]
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


#: Copies that move up to so many times as many bytes, or as few, are like one another.
_ALIKE = 3.0


def _copy_share(row: Row, copies: list[Row]) -> str:
    """The share of the fastest copy that moves about as many bytes; smaller copies stay in the caches, in part. The
    fastest, not the nearest: a single copy can be slow by accident."""
    if row["ms"] is None:
        return "–"
    apart = [abs(math.log(_moved(copy) / _moved(row))) for copy in copies]
    limit = max(math.log(_ALIKE), min(apart))
    fastest = max(copy["gbps"] for copy, distance in zip(copies, apart, strict=True) if distance <= limit)
    return f"{row['gbps'] / fastest:.0%}"


def _moved(row: Row) -> float:
    """Bytes, of a row with a speed."""
    return row["gbps"] * row["ms"] * 1e6


def comparison_tables(rows: Sequence[Row], earlier: Sequence[Row], title: str) -> list[Table]:
    """Times there (`earlier`) and here, how many times as fast here is, and geometric means."""
    before = {row_key(row): row["ms"] for row in earlier if row.get("ms") is not None}
    both = [row for row in rows if row.get("ms") is not None and row_key(row) in before]
    common = [(row, (row["impl"], _step(row)), before[row_key(row)], row["ms"]) for row in both]
    lines = [
        [case_name(row), *names, f"{there:.4g}", f"{here:.4g}", f"{there / here:.3f}"]
        for row, names, there, here in common
    ]
    headings = ["case", "implementation", "phase", "ms there", "ms here", "speed here / there"]
    means = [
        [*names, *summary([there / here for *_, there, here in found], 3)]
        for names, found in grouped(common, lambda each: each[1]).items()
    ]
    of_means = ["implementation", "phase", "geometric mean", "lowest", "highest", "cases"]
    return [Table(title, headings, lines, keys=3), Table("Speed here over there", of_means, means, keys=2)]


def differences(record: Record, earlier: Record) -> list[str]:
    """A line for each fact of machine and versions in which two records differ, and for which times may differ."""
    found = []
    for part in ("machine", "versions"):
        here, there = record.get(part) or {}, earlier.get(part) or {}
        for name in dict.fromkeys((*there, *here)):
            if here.get(name) != there.get(name):
                found.append(f"{name}: {there.get(name)} there, {here.get(name)} here")
    return found


def _step(row: Row) -> str:
    return f"{row['phase']}, {row['step']}" if "step" in row else row["phase"]


def breakdown_tables(rows: Sequence[Row]) -> list[Table]:
    """For each phase: the time of each step, its share, and the sum beside one call."""
    tables = []
    for phase, words in (("fwd", "forward"), ("bwd", "backward")):
        of_phase = [row for row in rows if row["phase"] == phase and row["ms"] is not None]
        times = {row["step"]: row["ms"] for row in of_phase if row["step"] != FUSED}
        total = sum(times.values())
        if times:
            times["standard, all steps"] = total
        times |= {f"{row['impl']}, one call": row["ms"] for row in of_phase if row["step"] == FUSED}
        lines = [[name, f"{ms:.4g}", f"{ms / total:.0%}" if total else "–"] for name, ms in times.items()]
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
        tables = [*speed_tables(rows), *mean_tables(rows), *mode_tables(rows)]
    notes = [f"no speed: {line}" for line in reasons(rows)]
    if earlier is not None:
        compared = comparison_tables(rows, earlier["rows"], "Beside the earlier record")
        tables += [table for table in compared if table.lines]
        notes += [f"not alike: {line}" for line in differences(record, earlier)]
        if not compared[0].lines:
            notes.append("the earlier record has a time for none of these cases and implementations")
    return Report(tables, notes)
