"""The main result of a page: plain attention against the fastest peer, on the first machine that was measured so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashtile.bench.html.charts import LineChart
from flashtile.bench.html.figures import Family, Named, attention_rows, families_of, lines_and_dots
from flashtile.bench.html.words import facets_of, listed, phase_of
from flashtile.bench.record import Row
from flashtile.bench.summary import Ratio, geometric_mean, peers, ratios_to_best, ratios_to_peer


@dataclass(frozen=True)
class Headline:
    """What comes first.

    Attributes:
        named: the record.
        sentences: the result in words.
        headings, lines: the means against each peer.
        charts: forward and backward of one family of cases.
        family: what its cases are.
        cases: which cases the sentences are about.
    """

    named: Named
    sentences: tuple[str, ...]
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    charts: tuple[LineChart, ...]
    family: str
    cases: str


def headline_of(records: Sequence[Named]) -> Headline | None:
    """The main result of the first record that compares attention with peers at several lengths."""
    for named in records:
        families, _ = families_of(attention_rows(named))
        families = [family for family in families if ratios_to_best(family.rows)]
        if families:
            return _headline(named, families)
    return None


def _headline(named: Named, families: Sequence[Family]) -> Headline:
    rows = [row for family in families for row in family.rows]
    best = ratios_to_best(rows)
    ours = max(dict.fromkeys(ratio.ours for ratio in best), key=lambda name: sum(r.ours == name for r in best))
    phases = dict.fromkeys(ratio.phase for ratio in best)
    sentences, lines = [], []
    for phase in phases:
        found = [ratio for ratio in best if (ratio.ours, ratio.phase) == (ours, phase)]
        sentences.append(_sentence(ours, phase, found))
    for peer in peers(rows):
        for phase in phases:
            found = [r for r in ratios_to_peer(rows, peer) if (r.ours, r.phase) == (ours, phase)]
            if found:
                values = [ratio.value for ratio in found]
                figures = (geometric_mean(values), min(values), max(values))
                lines.append((peer, phase_of(phase), *(f"{value:.2f}" for value in figures), str(len(found))))
    headings = ("peer", "phase", "mean", "lowest", "highest", "cases")
    family = _typical(families)
    charts = [
        chart
        for one in families
        if one.case == family.case
        for chart in lines_and_dots(one.rows, "tflops", "TFLOP/s")
        if isinstance(chart, LineChart)
    ]
    return Headline(
        named, tuple(sentences), headings, tuple(lines), tuple(charts), ", ".join(facets_of(family.case).values()),
        _cases(rows),
    )  # fmt: skip


def _cases(rows: Sequence[Row]) -> str:
    """The range of the cases of some rows, in words."""
    cases = [row["case"] for row in rows]
    lengths = [case["S"] for case in cases]
    parts = [
        f"heads of {listed([str(size) for size in sorted({case['D'] for case in cases})])}",
        listed(sorted({"causal" if case["causal"] else "full" for case in cases}, reverse=True)),
        f"{min(lengths):,} to {max(lengths):,} tokens",
    ]
    if any(case["H"] != case["Hkv"] for case in cases):
        parts.insert(2, "some with fewer key/value heads than query heads")
    return f"These are all cases that were measured at several lengths: {', '.join(parts)}."


def _sentence(ours: str, phase: str, ratios: Sequence[Ratio]) -> str:
    values = [ratio.value for ratio in ratios]
    faster = sum(value > 1 for value in values)
    cases = f"{faster} of {len(values)} cases" if faster < len(values) else f"all {len(values)} cases"
    return (
        f"{phase_of(phase).capitalize()}: {ours} is {geometric_mean(values):.2f} times as fast as the fastest peer of "
        f"each case (geometric mean; {min(values):.2f} to {max(values):.2f}), and faster in {cases}."
    )


def _typical(families: Sequence[Family]) -> Family:
    """The family that most programs are like: causal, heads of 128; else one with many lengths."""

    def likeness(family: Family) -> tuple[bool, bool, bool, int]:
        case = family.case
        shared = case.get("Hkv", case.get("H")) != case.get("H")
        return not case.get("window"), bool(case.get("causal")), case.get("D") == 128 and not shared, len(family.rows)

    return max(families, key=likeness)
