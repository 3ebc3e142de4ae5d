"""Records as one page of HTML that needs nothing beside itself: `flashtile report`.

A verdict comes first: where flashtile is faster than the fastest other implementation and where it is not, on each
machine, for a user's own record as for those of the project. All else is folded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.bench.base import is_ours
from flashtile.bench.companion_cases import OPERATIONS as COMPANIONS
from flashtile.bench.html import words
from flashtile.bench.html.charts import Named, Part, by_length, in_order, record_part, styles
from flashtile.bench.html.drawing import DARK, LIGHT, Chart, DotChart, draw, shared_styles
from flashtile.bench.record import (
    FACTS,
    Row,
    geometric_mean,
    grouped,
    ratios_to_best,
    read_record,
    require_writable,
    write_whole,
)
from flashtile.bench.registry import find_benchmark
from flashtile.bench.report import BREAKDOWN, Table, summary
from flashtile.bench.start import how_to_install, installed

_NO_PICTURES = f"The page has tables only. Pictures need matplotlib: {how_to_install('plots')}."
_TITLE, _NAMES = "flashtile: measured", "Names of implementations"
#: Operations whose rows do not compare calls, and implementations that are no answer to a peer, or ours as a part.
_NO_COMPARISON = (
    BREAKDOWN, "attention-io", "attention-tiles",
    "flashtile-one-gpu", "flashtile-builtin", "flashtile-unshared", "block-sparse", "transformers-flashtile",
    "flashtile-deterministic", "flashtile-invariant",
)  # fmt: skip
#: Charts beside the verdict.
_CHARTS = 4
#: The most columns of a table: a narrow screen shows each cell with its heading.
_COLUMNS = 24


class Written(NamedTuple):
    """The number of charts on a page that are pictures, that of tables, and notes for its reader."""

    pictures: int
    tables: int
    notes: tuple[str, ...]


class Verdict(NamedTuple):
    """Who is faster where, on which machine."""

    sentences: tuple[str, ...]  # the result in words, one for each machine
    table: Table  # means, for each machine, kind of call and phase
    charts: tuple[Chart, ...]  # the same as pictures, and speeds by length where there is room


def make_verdict(records: Sequence[Named]) -> Verdict | None:
    """The verdict: our fastest against the fastest other of each case; None where nothing was compared."""
    found = [one for named in records for one in _compared(named)]
    if not found:
        return None
    sentences = tuple(_sentence(*each) for each in grouped(found, lambda row: row["machine"]).items())
    groups = grouped(found, lambda row: (row["kind"], row["phase"], row["machine"]))
    lines = []
    for (kind, phase, machine), group in sorted(groups.items(), key=lambda each: each[0][0]):
        figures, lowest = summary([row["ratio"] for row in group]), min(group, key=lambda row: row["ratio"])
        lines.append([kind, words.phase_name(phase), machine, *figures, words.full_name(lowest["peer"])])
    headings = ["kind of call", "phase", "machine", "mean", "lowest", "highest", "cases", "lowest against"]
    charts = [*_overview(found), *by_length(records)][:_CHARTS]
    return Verdict(sentences, Table("", headings, lines), tuple(charts))


def _compared(named: Named) -> list[Row]:
    """The best ratio of each case and phase of a record, with the `machine` and the `kind` of call."""
    compared = (row for row in named.rows if not {row["op"], row["impl"]} & set(_NO_COMPARISON))
    by_case = grouped(ratios_to_best(compared), lambda row: (str(row["case"]), row["op"] + row["phase"]))
    portable = {row["impl"] for row in named.rows if is_ours(row["impl"])} == {"flashtile-triton"}
    found = []
    for of_case in by_case.values():
        best = max(of_case, key=lambda row: row["ratio"])
        kind = words.describe_kind(best["op"], best["case"], bool(named.facts.get("gpu")))
        kind += ", portable kernels" if portable and best["op"] == "attention" else ""
        found.append({**best, "machine": named.machine, "kind": kind})
    return found


def _sentence(machine: str, found: Sequence[Row]) -> str:
    values = [row["ratio"] for row in found]
    faster = sum(value > 1 for value in values)
    cases = f"{faster:,} of {len(values):,} comparisons" if faster < len(values) else f"all {faster:,} comparisons"
    kinds = grouped(found, lambda row: row["kind"])
    means = sorted((geometric_mean(row["ratio"] for row in of_kind), kind) for kind, of_kind in kinds.items())
    slower = [f"{kind} ({mean:.2f})" for mean, kind in means if mean < 0.995]
    return (
        f"On {machine} flashtile is faster than the fastest other implementation in {cases}, "
        f"{geometric_mean(values):.2f} times as fast in the geometric mean ({min(values):.2f} to {max(values):.2f})."
        + (f" In the mean it is slower in: {words.listed(slower)}." if slower else "")
    )


def _overview(found: Sequence[Row]) -> list[Chart]:
    """Mean ratios with a dot for each machine: attention forward and backward, the companions, and all else."""

    def place(row: Row) -> tuple[str, str]:
        if row["op"] == "attention" and row["phase"] in ("fwd", "bwd"):
            return f"Attention, {words.phase_name(row['phase'])}", row["kind"].removeprefix("Attention: ")
        if row["op"] in COMPANIONS:
            return "Norms, rotary embedding, softmax, losses and layers", row["kind"]
        return "Decoding, training and others", row["kind"]

    charts: dict[str, dict[str, dict[str, float]]] = {}
    for (title, case, machine), group in grouped(found, lambda row: (*place(row), row["machine"])).items():
        mean = geometric_mean(row["ratio"] for row in group)
        charts.setdefault(title, {}).setdefault(case, {})[machine] = mean
    unit = "times the speed of the fastest other"
    return [DotChart(title, cases, unit, logarithmic=True, level=1.0) for title, cases in charts.items()]


def write_report(paths: Sequence[Path], output: Path) -> Written:
    """Writes the page of some records. Raises UserError if a file is no record, or the page cannot be written."""
    records = in_order([Named(read_record(path), path) for path in paths])
    verdict, parts = make_verdict(records), [record_part(named) for named in records]
    notes = [note for named in records for note in _unknown(named)]
    require_writable(output)
    pictures: dict[int, str] = {}
    first = () if verdict is None else verdict.charts
    charts = [*first, *(chart for part in parts for chart in part.charts)]
    if not installed("matplotlib"):
        notes.append(_NO_PICTURES)
    else:
        colours = styles(records)
        pictures = {id(chart): draw(chart, colours, number) for number, chart in enumerate(charts)}
    shown, classes = shared_styles(pictures)
    write_whole(output, _page(parts, verdict, charts, shown, classes, notes))
    tables = len(charts) - len(pictures) + sum(len(part.tables) for part in parts)
    return Written(len(pictures), tables, tuple(notes))


def _page(
    parts: Sequence[Part],
    verdict: Verdict | None,
    charts: Sequence[Chart],
    pictures: dict[int, str],
    classes: str,
    notes: Sequence[str],
) -> str:
    """The whole page, valid as HTML and well-formed as XML. A chart without a picture is shown as its table."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashtile.bench", "html"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["anchor"] = lambda title: re.sub(r"[\W_]", "-", title.lower())
    tables = [*(chart.table() for chart in charts), *(table for part in parts for table in part.tables)]
    tables += [] if verdict is None else [verdict.table]
    headings = dict.fromkeys(tuple(table.headings) for table in tables)
    columns = {of_table: f"t{number}" for number, of_table in enumerate(headings)}
    light, dark = (" ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours)) for colours in (LIGHT, DARK))
    names = dict.fromkeys(row["impl"] for part in parts for row in part.named.rows)
    return environment.get_template("report.html.jinja").render(
        title=_TITLE, names=_NAMES, light=light, dark=dark, columns=range(1, _COLUMNS + 1), notes=notes,
        verdict=verdict, parts=parts, facts_of=_facts, introduction=_introduction([part.named for part in parts]),
        classes=Markup("\n".join([classes, *(_column_names(*column) for column in columns.items())])),
        class_of=lambda table: columns[tuple(table.headings)],
        glossary=sorted((words.implementation_name(name), name) for name in names if words.implementation_name(name)),
        picture_of=lambda chart: Markup(pictures.get(id(chart), "")),
        machines=list(dict.fromkeys(part.named.machine for part in parts)),
    )  # fmt: skip


def _introduction(records: Sequence[Named]) -> str:
    """Says what was measured, and on what."""
    titles = list(dict.fromkeys(find_benchmark(row["op"]).title.lower() for named in records for row in named.rows))
    machines = list(dict.fromkeys(named.machine for named in records))
    versions = sorted({str((named.record.get("versions") or {}).get("torch")) for named in records} - {"None"})
    torch = f" with PyTorch {words.listed(versions)}" if versions else ""
    return (
        f"Benchmarks of flashtile and of other implementations: {words.listed(titles) or 'nothing'}, measured on "
        f"{words.listed(machines)}{torch}."
    )


def _facts(named: Named) -> list[tuple[str, str]]:
    number, dirty, _ = str(named.record.get("commit") or "unknown").partition("-dirty")
    facts: dict[str, Any] = {"commit": number[:12] + dirty}
    facts |= {label: named.facts.get(name) for name, label in FACTS.items()}
    facts |= named.record.get("versions") or {}
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _column_names(headings: Sequence[str], name: str) -> str:
    """A rule with the headings of a table, which a narrow screen shows beside each cell."""
    texts = (re.sub(r'[\\"\n;<&]', lambda found: f"\\{ord(found[0]):x} ", heading) for heading in headings)
    rules = " ".join(f'--h{place}:"{text}";' for place, text in enumerate(texts, 1))
    return f".{name} {{ {rules} }}"


def _unknown(named: Named) -> list[str]:
    """A line for each kind of thing in a record that this version does not know, and shows as it stands."""
    rows = named.record["rows"]
    found = [(f"unknown operation {row['op']!r} in", "") for row in rows if row["op"] not in words.OPERATIONS]
    found += [
        (f"unknown key {key!r} in the case of", f" of {row['op']!r}")
        for row in rows
        for key in words.unknown_keys(row["case"])
    ]
    return [
        f"{named.path.name}: {what} {'1 row' if count == 1 else f'{count} rows'}{of}; it is shown unchanged. Another "
        "version of flashtile may have written it"
        for (what, of), count in Counter(found).items()
    ]
