"""Tables of a record, as plain data and as plain text; `flashtile bench` draws the same data with colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashtile.bench.cases import Case
from flashtile.bench.summary import Ratio, case_key, geometric_mean, is_ours, peers, ratios_to_best, ratios_to_peer
from flashtile.bench.tables import table_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A title, headings, and cells; the first column is text, the others are figures unless `words` is set."""

    title: str
    headings: list[str]
    lines: list[list[str]]
    words: bool = False


def case_name(row: Row) -> str:
    """The name of a row's case, with its batch and heads."""
    case = Case.from_record(row["case"])
    heads = f"h{case.H}" if case.H == case.Hkv else f"h{case.H}:{case.Hkv}"
    return f"b{case.B}-{heads}-{case.name}"


def speed_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each phase: TFLOP/s of every implementation, and ours as a multiple of the best peer."""
    return [_speed_table(phase, [row for row in rows if row["phase"] == phase]) for phase in _phases(rows)]


def host_table(rows: Sequence[Row]) -> Table:
    """Host time of a call: a line for each implementation, a column for each phase, in microseconds."""
    phases = _phases(rows)
    lines = []
    for impl in dict.fromkeys(row["impl"] for row in rows):
        by_phase = {row["phase"]: row for row in rows if row["impl"] == impl}
        lines.append([impl, *(_microseconds(by_phase[phase]) for phase in phases)])
    return Table("Host time per call (µs)", ["implementation", *phases], lines)


def mean_tables(rows: Sequence[Row]) -> list[Table]:
    """Of each table of cases, the geometric means of our speed over the best peer's and over each peer's.

    None without a peer.
    """
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        by_table.setdefault(table_of(Case.from_record(row["case"])), []).append(row)
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
    return Table(f"Our speed over the peers': {name} table", headings, lines)


def _mean_cells(ratios: Sequence[Ratio]) -> list[str]:
    values = [ratio.value for ratio in ratios]
    lowest = min(ratios, key=lambda ratio: ratio.value)
    figures = (geometric_mean(values), min(values), max(values))
    return [*(f"{f:.2f}" for f in figures), str(len(values)), lowest.peer, case_name({"case": lowest.case})]


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


def plain_text(table: Table) -> str:
    """A table in columns aligned by spaces."""
    columns = list(zip(table.headings, *table.lines, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([table.title, line(table.headings), *map(line, table.lines)])


def _speed_table(phase: str, rows: list[Row]) -> Table:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    ours = [impl for impl in impls if is_ours(impl)]
    ratios = {(case_key({"case": ratio.case}), ratio.ours): ratio for ratio in ratios_to_best(rows)}
    lines = []
    for key in dict.fromkeys(map(case_key, rows)):
        of_case = {row["impl"]: row for row in rows if case_key(row) == key}
        speeds = [_teraflops(of_case.get(impl)) for impl in impls]
        compared = [f"{ratios[key, impl].value:.2f}" if (key, impl) in ratios else "–" for impl in ours]
        lines.append([case_name(next(iter(of_case.values()))), *speeds, *compared])
    headings = ["case", *impls, *(f"{impl} / best" for impl in ours)]
    return Table(f"Attention {phase}: TFLOP/s", headings, lines)


def _teraflops(row: Row | None) -> str:
    if row is None or row["ms"] is None:
        return "–"
    return f"{row['tflops']:.0f}" if row["tflops"] >= 100 else f"{row['tflops']:.3g}"


def _microseconds(row: Row) -> str:
    return "–" if row["ms"] is None else f"{row['ms'] * 1e3:.1f}"


def _phases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["phase"] for row in rows))
