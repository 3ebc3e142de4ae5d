"""The page around the charts: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from flashtile.bench.html.charts import Chart
from flashtile.bench.html.svg import mark

#: Light and dark: told apart by colour-blind readers (Okabe and Ito), with the marks also without colour.
_LIGHT = (
    *("#0072b2", "#d55e00", "#007d5c", "#a2457f", "#8a6d00"),
    *("#5e35b1", "#c62828", "#00838f", "#6d4c41", "#555555"),
)
_DARK = (
    *("#56b4e9", "#ff9a4d", "#3ddbad", "#f29ccb", "#f0d43a"),
    *("#b39ddb", "#ff8a80", "#4dd0e1", "#d7b49e", "#bdbdbd"),
)

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4; --box: #f6f8fa;
%(light)s }
@media (prefers-color-scheme: dark) { :root { --page: #0f1419; --ink: #e6edf3; --soft: #9aa7b4; --rule: #30363d;
--box: #161b22; %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 1rem; background: var(--page); color: var(--ink);
font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 0; }
a { color: inherit; } p { max-width: 46rem; } .soft, figcaption { color: var(--soft); font-size: .85rem; }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%%, 25rem), 1fr)); }
figure { margin: 0; padding: .8rem; border: 1px solid var(--rule); border-radius: 8px; background: var(--box);
min-width: 0; }
figcaption, .facts { overflow-wrap: anywhere; } svg { display: block; width: 100%%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .3rem 0; padding: 0; list-style: none;
font-size: .85rem; }
.legend svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; font-size: .85rem; color: var(--soft); }
text { fill: var(--ink); font: 13px system-ui, sans-serif; } .tick { fill: var(--soft); font-size: 12px; }
.label { fill: var(--soft); } .case { font-size: 12px; } line.grid { stroke: var(--rule); stroke-width: 1; }
.level { stroke: var(--soft); stroke-dasharray: 5 4; stroke-width: 1.5; } .l { fill: none; stroke-width: 2; }
.roof { fill: none; stroke: var(--ink); stroke-width: 2; } .m { stroke: var(--box); stroke-width: 1; }
%(series)s
"""


@dataclass(frozen=True)
class Figure:
    """A chart with where its figures come from: `source` names the record and its machine, `command` made it."""

    chart: Chart
    source: str
    command: str


@dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and figures."""

    title: str
    words: str
    figures: tuple[Figure, ...]


def page(title: str, sections: Sequence[Section], facts: Sequence[tuple[str, dict[str, str]]]) -> str:
    """The whole page, valid as HTML and well-formed as XML.

    Args:
        title: its heading.
        sections: in order; those without figures are left out.
        facts: for each record its name, and what is known of the machine.
    """
    shown = [section for section in sections if section.figures]
    links = "".join(f'<li><a href="#{_anchor(s.title)}">{escape(s.title)}</a></li>' for s in shown)
    body = "".join(map(_section, shown))
    records = "".join(_facts(name, of_record) for name, of_record in facts)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><nav><ul>{links}<li><a href="#records">Records</a></li></ul></nav></header>'
        f'<main>{body}<section id="records"><h2>Records</h2>{records}</section></main></body></html>\n'
    )


def _section(section: Section) -> str:
    figures = "".join(map(_figure, section.figures))
    words = f"<p>{escape(section.words)}</p>" if section.words else ""
    anchor = _anchor(section.title)
    return f'<section id="{anchor}"><h2>{escape(section.title)}</h2>{words}<div class="grid">{figures}</div></section>'


def _figure(figure: Figure) -> str:
    chart = figure.chart
    legend = "".join(f"<li>{_key(index)}{escape(name)}</li>" for name, index in chart.legend)
    caption = f"{escape(figure.source)}<br/><code>{escape(figure.command)}</code>"
    return (
        f'<figure><h3>{escape(chart.title)}</h3><ul class="legend">{legend}</ul>{chart.svg}'
        f"<details><summary>Figures</summary>{_table(chart)}</details><figcaption>{caption}</figcaption></figure>"
    )


def _key(index: int) -> str:
    return f'<svg viewBox="0 0 14 14" aria-hidden="true">{mark(7, 7, index, "", 5.0)}</svg>'


def _table(chart: Chart) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in chart.headings)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in chart.lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _facts(name: str, facts: dict[str, str]) -> str:
    known = "; ".join(f"{escape(key)}: <code>{escape(value)}</code>" for key, value in facts.items())
    return f'<p class="facts"><strong>{escape(name)}</strong><br/><span class="soft">{known}</span></p>'


def _anchor(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _style() -> str:
    light, dark = (" ".join(f"--c{i}: {c};" for i, c in enumerate(colours)) for colours in (_LIGHT, _DARK))
    count = 2 * len(_LIGHT)
    series = "\n".join(
        f".m.s{i}, .b.s{i} {{ fill: var(--c{i % len(_LIGHT)}); }} .l.s{i} {{ stroke: var(--c{i % len(_LIGHT)}); }}"
        for i in range(count)
    )
    return _STYLE % {"light": light, "dark": dark, "series": series}
