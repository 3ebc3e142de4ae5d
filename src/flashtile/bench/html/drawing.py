"""Charts as plain data, each also as a table, and their pictures: matplotlib's SVG in the page's colours and text."""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtile.bench.base import is_ours
from flashtile.bench.html.words import full_name
from flashtile.bench.report import Table, pivot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

#: Light and dark: told apart by colour-blind readers (the first by Okabe and Ito), with the marks also without colour.
LIGHT = ["#0072b2", "#d55e00", "#007d5c", "#a2457f", "#8a6d00", "#5e35b1", "#c62828", "#00838f", "#6d4c41", "#555555"]
DARK = ["#56b4e9", "#ff9a4d", "#3ddbad", "#f29ccb", "#f0d43a", "#b39ddb", "#ff8a80", "#4dd0e1", "#d7b49e", "#bdbdbd"]
_MARKS = ("o", "s", "^", "D", "v", "P")
#: Colours that matplotlib writes -> those of the page's style sheet, which knows light and dark.
_INK, _SOFT, _RULE, _BOX = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {_INK: "var(--ink)", _SOFT: "var(--soft)", _RULE: "var(--rule)", _BOX: "var(--box)"}
_VARIABLES |= {colour: f"var(--c{i})" for i, colour in enumerate(LIGHT)}

#: In inches. Letters of 9.5 points stay readable where a phone shows this in 330 pixels.
_WIDTH, _HEIGHT = 4.2, 2.7
#: Height of a line of the legend.
_LEGEND = 0.17
#: Height of a line of a case's name, and of the dots below it.
_NAME, _DOTS = 0.17, 0.3
#: Letters of a line of a case's name.
_LETTERS = 46
#: Around a mark, so that those in the same place are told apart.
_EDGE = {"markeredgecolor": _BOX, "markeredgewidth": 0.7}
_SETTINGS = Path(__file__).with_name("page.mplstyle")
Styles = Mapping[str, int]
#: Numbers beside an axis of ratios: of a wide range, and of a narrow one.
_FAR, _NEAR = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50), (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2)


@dataclass(frozen=True)
class Series:
    """A named list of points (x, y); `names` says what each point is, where its place does not."""

    name: str
    points: tuple[tuple[float, float], ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineChart:
    """Lines over lengths, on a logarithmic axis with base 2, or over steps; points under a roof."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    unit: str
    logarithmic: bool = False  # the axis of values
    level: float | None = None  # of a horizontal line to compare with
    steps: bool = False  # on a linear axis, too many for marks; the table has the last alone
    #: Points of a line over single points, which are not joined; both axes are logarithmic.
    roof: tuple[tuple[float, float], ...] = ()

    def table(self) -> Table:
        points = [(one, *point) for one in self.series for point in one.points]
        if self.roof:
            (low, at_low), (_, peak) = self.roof[0], self.roof[-1]
            names = [name for one in self.series for name in one.names]
            lines = [
                [f"{one.name}: {name}", figure(x), figure(y), f"{y / min(peak, at_low / low * x):.0%}"]
                for (one, x, y), name in zip(points, names, strict=True)
            ]
            return Table(self.title, ["kernel and case", "FLOP/byte", self.unit, "of the roof"], lines)
        last = max(x for _, x, _ in points)
        shown = sorted((point for point in points if point[1] == last or not self.steps), key=lambda point: point[1])
        cells = (([f"{x:,.0f}"], full_name(one.name), figure(y)) for one, x, y in shown)
        return pivot(self.title, [self.x_label], cells)


@dataclass(frozen=True)
class DotChart:
    """For each case a line with a dot for each implementation."""

    title: str
    cases: Mapping[str, Mapping[str, float]]  # name of a case -> implementation -> value
    unit: str
    logarithmic: bool = False
    level: float | None = None

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for of_case in self.cases.values() for name in of_case))

    def table(self) -> Table:
        cells = (
            ([case], full_name(name), figure(value))
            for case, of_case in self.cases.items()
            for name, value in of_case.items()
        )
        return pivot(self.title, ["case"], cells)


Chart = LineChart | DotChart


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(chart: Chart, styles: Styles, number: int) -> str:
    """A chart as an `svg` element. `styles`: name of an implementation -> its colour and mark. `number`: of the
    picture, by which its identifiers differ from those of others."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=_SETTINGS):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        draw_chart: Any = _draw_dots if isinstance(chart, DotChart) else _draw_lines
        _draw_legend(figure, axes, draw_chart(figure, axes, chart, styles))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _embedded(file.getvalue(), chart.title, number)


def save_picture(charts: Sequence[LineChart], title: str, path: Path) -> None:
    """Saves charts side by side as a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.edgecolor": "#bbbbbb", "grid.color": "#dddddd"}, _SETTINGS):
        figure = Figure(figsize=(1.3 * _WIDTH * len(charts), 1.6 * _HEIGHT), dpi=160, layout="constrained")
        figure.suptitle(title)
        for axes, chart in zip(figure.subplots(1, len(charts)), charts):
            _draw_lines(figure, axes, chart, {})
            axes.set_title(chart.title)
            if len(chart.series) > 1:
                axes.legend()
        figure.savefig(path)


def _draw_legend(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Draws the names above the chart. A name with an underscore in front gets a space before it, because matplotlib
    leaves it out of a legend otherwise. Its own names begin with "_child"."""
    for artist in (*axes.lines, *axes.containers):
        label = str(artist.get_label())
        if label.startswith("_") and not label.startswith(("_child", "_nolegend_")):
            artist.set_label(f" {label}")
    columns = 1 if max(map(len, names)) > 24 else 2 if max(map(len, names)) > 12 else 3
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND * rows)
    figure.legend(loc="outside upper left", ncols=columns, handletextpad=0.5, columnspacing=1.2, borderaxespad=0)


def _style(name: str, styles: Styles, others: list[str]) -> dict[str, Any]:
    """Colour and mark of a name, by its place among `others` where it has no style; ours lie above the rest."""
    index = styles[name] if name in styles else others.index(name)
    above = 4 if is_ours(name) else 3
    return {"color": LIGHT[index % len(LIGHT)], "marker": _MARKS[index % len(_MARKS)], "zorder": above}


def _draw_lines(figure: Figure, axes: Axes, chart: LineChart, styles: Styles) -> list[str]:
    marks: dict[str, Any] = {"marker": "None"} if chart.steps else {"markersize": 6, **_EDGE}
    joined = {"linestyle": "None"} if chart.roof else {"linewidth": 1.6, "clip_on": False}
    others = list(dict.fromkeys(one.name for one in chart.series if one.name not in styles))
    for one in chart.series:
        style = _style(one.name, styles, others)
        axes.plot(*zip(*one.points), label=full_name(one.name), **{**style, **marks, **joined})
    points = [point for one in chart.series for point in (*one.points, *chart.roof)]
    if chart.level is not None:
        axes.axhline(chart.level, color=_SOFT, linestyle="--", linewidth=1.2)
    if chart.roof:
        axes.plot(*zip(*chart.roof), color=_INK, linewidth=1.6)
        axes.set_xscale("log")
        _write_numbers(axes.xaxis, [x for x, _ in points])
    elif not chart.steps:
        lengths = sorted({x for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, list(map(_length, lengths)))
    if chart.logarithmic or chart.roof:
        axes.set_yscale("log")
        _write_numbers(axes.yaxis, [y for _, y in points])
    else:
        _write_numbers(axes.yaxis)
        if not chart.steps:
            axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.unit)
    axes.grid(True)
    return [full_name(one.name) for one in chart.series]


def _write_numbers(axis: Axis, values: Sequence[float] = ()) -> None:
    """A few numbers beside a linear axis; with values a logarithmic one: powers of ten, others in a short range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    between = (1.0,) if values and max(values) > 200 * min(values) else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=between) if values else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))


def _draw_dots(figure: Figure, axes: Axes, chart: DotChart, styles: Styles) -> list[str]:
    y, places = 0.0, []
    for name in chart.cases:
        lines = textwrap.wrap(name, _LETTERS)
        y += _NAME * len(lines)
        axes.text(0, y, "\n".join(lines), transform=axes.get_yaxis_transform(), verticalalignment="bottom", size=9)
        y += _DOTS / 2
        axes.axhline(y, color=_RULE, linewidth=0.7, zorder=0)
        places.append(y)
        y += _DOTS / 2
    others = [name for name in chart.names() if name not in styles]
    for name in chart.names():
        points = [(values[name], place) for values, place in zip(chart.cases.values(), places) if name in values]
        options = {"linestyle": "None", "clip_on": False, "markersize": 7, **_EDGE}
        axes.plot(*zip(*points), label=full_name(name), **options, **_style(name, styles, others))
    found = [value for values in chart.cases.values() for value in values.values()]
    if chart.logarithmic:
        axes.set_xscale("log")
    if chart.level is not None:
        axes.axvline(chart.level, color=_SOFT, linestyle="--", linewidth=1.2)
        low, high = min(chart.level, *found) / 1.1, max(chart.level, *found) * 1.1
        marks = [mark for mark in (_FAR if high > 3 * low else _NEAR) if low <= mark <= high]
        axes.set_xlim(low, high)
        axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    else:
        axes.set_xlim(left=0)
        _write_numbers(axes.xaxis)
    axes.minorticks_off()
    axes.set_ylim(y, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(chart.unit)
    axes.grid(True, axis="x")
    figure.set_figheight(y + 0.6)
    return list(map(full_name, chart.names()))


def _length(value: float) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:.0f}"


#: Invisible parts: clip paths that hold all that is drawn, names of fonts, rotations by nothing.
_UNSEEN = re.compile(
    r'<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>|<!--.*?-->| clip-path="[^"]*"'
    r'|<path d="[^"]*" style="fill: none"/>|font-family: [^;"]*(?:; )?|; stroke-linecap: square'
    r'| transform="rotate\(-0 [^"]*"| (?:width|height)="[\d.]+pt"| version="[\d.]+"| xmlns:xlink="[^"]*"',
    re.DOTALL,
)


def _embedded(svg: str, title: str, number: int) -> str:
    """Turns a file of matplotlib into an element of a page: with identifiers of its own, in the page's colours and
    width, and without what nobody sees, which is most of it."""
    text = re.sub(r">\s+<", "><", _UNSEEN.sub("", svg[svg.index("<svg") :]).replace("xlink:href", "href"))
    wanted = {name: f"f{number}-{place}" for place, name in enumerate(dict.fromkeys(re.findall(r"#([\w-]+)", text)))}
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{wanted[found[1]]}"' if found[1] in wanted else "", text)
    text = re.sub(r'(href="#|url\(#)([\w-]+)', lambda found: found[1] + wanted[found[2]], text)
    # In tags alone: what stands between them is read.
    text = re.sub(r"\d+\.\d{2,}(?=[^<>]*>)", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), text)
    text = re.sub(r'\s*([MLCQz])\s*(?=[-\d"])(?=[^<>]*/>)', r"\1", text)
    text = re.sub(r"<defs/>|<defs></defs>", "", _without_groups(text))
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def _without_groups(text: str) -> str:
    """Without the groups that say nothing of what they hold."""
    told: list[bool] = []

    def tag(found: re.Match[str]) -> str:
        if found[0].startswith("<g"):
            told.append(found[0] != "<g>")
            return found[0] if told[-1] else ""
        return found[0] if told.pop() else ""

    return re.sub(r"<g(?: [^>]*)?(?<!/)>|</g>", tag, text.replace("<g/>", ""))


def shared_styles(pictures: Mapping[int, str]) -> tuple[dict[int, str], str]:
    """Pictures whose styles are classes, because a few styles stand in thousands of places, and the classes."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return f'class="{names.setdefault(found[1], f"s{len(names)}")}"'

    shown = {key: re.sub(r'style="([^"]*)"', named, text) for key, text in pictures.items()}
    return shown, "\n".join(f".{name} {{ {style} }}" for style, name in names.items())
