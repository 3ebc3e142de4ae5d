"""The page around the charts: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from flashtile.bench.html.charts import Chart
from flashtile.bench.html.drawing import DARK, LIGHT
from flashtile.bench.html.figures import Named, Section
from flashtile.bench.html.headline import Headline
from flashtile.bench.html.words import implementation_of, listed
from flashtile.bench.record import FACTS

_TITLE = "flashtile: measured"
_MAIN = "Main result"
_NAMES = "Names of implementations"
_RECORDS = "Records"
#: The most columns of a table: a narrow screen shows each cell with its heading.
_COLUMNS = 24


def page(
    records: Sequence[Named],
    headline: Headline | None,
    sections: Sequence[Section],
    pictures: Mapping[int, str],
    classes: str,
    notes: Sequence[str],
) -> str:
    """The whole page, valid as HTML and well-formed as XML.

    Args:
        records: in order.
        headline: the main result, which comes first; None where no record has one.
        sections: in order.
        pictures: `id` of a chart -> its `svg` element; a chart without one is shown as its table.
        classes: the style sheet of the pictures.
        notes: what the reader must know, said before anything else.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashtile.bench", "html"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"anchor": _anchor, "css": _css}
    main = [] if headline is None else [f"{_MAIN}: attention on {headline.named.machine}"]
    return environment.get_template("report.html.jinja").render(
        title=_TITLE,
        style=Markup(f"{_style()}\n{classes}"),
        introduction=_introduction(records, sections),
        notes=notes,
        contents=[*main, *(section.title for section in sections), _NAMES, _RECORDS],
        headline=headline,
        names=_NAMES,
        glossary=_glossary(records),
        sections=sections,
        picture_of=lambda chart: Markup(pictures.get(id(chart), "")),
        records=[(named, _facts(named)) for named in records],
    )


def charts_of(headline: Headline | None, sections: Sequence[Section]) -> list[Chart]:
    """All charts of a page, in order."""
    first = [] if headline is None else list(headline.charts)
    return [*first, *(chart for section in sections for group in section.groups for chart in group.charts)]


def _introduction(records: Sequence[Named], sections: Sequence[Section]) -> str:
    """What was measured, and on what."""
    topics = list(dict.fromkeys(section.topic for section in sections))
    machines = list(dict.fromkeys(named.machine for named in records))
    versions = sorted({str((named.record.get("versions") or {}).get("torch")) for named in records} - {"None"})
    torch = f" with PyTorch {listed(versions)}" if versions else ""
    return (
        f"Benchmarks of flashtile and of other implementations: {listed(topics) or 'nothing'}, measured on "
        f"{listed(machines)}{torch}."
    )


def _glossary(records: Sequence[Named]) -> list[tuple[str, str]]:
    """The implementations on the page, with what they are."""
    names = dict.fromkeys(row["impl"] for named in records for row in named.rows)
    return sorted((name, words) for name in names if (words := implementation_of(name)))


def _facts(named: Named) -> list[tuple[str, str]]:
    number, dirty, _ = str(named.record.get("commit") or "unknown").partition("-dirty")
    facts: dict[str, Any] = {"commit": number[:12] + dirty}
    facts |= {label: named.facts.get(name) for name, label in FACTS.items()}
    facts |= named.record.get("versions") or {}
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _css(text: str) -> str:
    """A text as a string of a style sheet."""
    return '"' + re.sub(r'[\\"\n;]', lambda found: f"\\{ord(found[0]):x} ", text) + '"'


def _style() -> str:
    light, dark = (" ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours)) for colours in (LIGHT, DARK))
    environment = jinja2.Environment(loader=jinja2.PackageLoader("flashtile.bench", "html"))
    return environment.get_template("report.css").render(light=light, dark=dark, columns=range(1, _COLUMNS + 1))
