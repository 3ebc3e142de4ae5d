"""Pictures of charts, drawn by matplotlib as SVG that stands in a page: its colours and its text are the page's."""

from __future__ import annotations

import io
import math
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashtile.bench.html.charts import Chart, DotChart, LineChart, RooflineChart, StackedChart
from flashtile.bench.summary import is_ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

#: Light and dark: told apart by colour-blind readers (the first by Okabe and Ito), with the marks also without colour.
LIGHT = (
    *("#0072b2", "#d55e00", "#007d5c", "#a2457f", "#8a6d00"),
    *("#5e35b1", "#c62828", "#00838f", "#6d4c41", "#555555"),
)
DARK = (
    *("#56b4e9", "#ff9a4d", "#3ddbad", "#f29ccb", "#f0d43a"),
    *("#b39ddb", "#ff8a80", "#4dd0e1", "#d7b49e", "#bdbdbd"),
)
_MARKS = ("o", "s", "^", "D", "v", "P")
#: Colours that matplotlib writes -> those of the page's style sheet, which knows light and dark.
_INK, _SOFT, _RULE, _BOX = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _RULE: "var(--rule)",
    _BOX: "var(--box)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(LIGHT)},
}

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
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashtile",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": _INK,
    "text.parse_math": False,  # names are no formulas
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": _SOFT,
    "ytick.labelcolor": _SOFT,
}
Styles = Mapping[str, int]


def draw(chart: Chart, styles: Styles, number: int) -> str:
    """A chart as an `svg` element.

    Args:
        chart: what is drawn.
        styles: name of an implementation -> its colour and mark; a chart of other things counts its own.
        number: of the picture, by which its identifiers differ from those of others on the page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        drawing: Callable[..., Iterable[str]] = _DRAWINGS[type(chart)]
        names = list(drawing(figure, axes, chart, _Style(styles)))
        _legend_all(axes)
        columns = 1 if max(map(len, names)) > 24 else 2 if max(map(len, names)) > 12 else 3
        rows = math.ceil(len(names) / columns)
        figure.set_figheight(figure.get_figheight() + _LEGEND * rows)
        figure.legend(loc="outside upper left", ncols=columns, handletextpad=0.5, columnspacing=1.2, borderaxespad=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _embedded(file.getvalue(), chart.title, number)


def _legend_all(axes: Axes) -> None:
    """Names that begin with an underscore, which matplotlib leaves out of a legend, get a space before it. Its own
    begin with "_child"."""
    for artist in (*axes.lines, *axes.containers):
        label = str(artist.get_label())
        if label.startswith("_") and not label.startswith(("_child", "_nolegend_")):
            artist.set_label(f" {label}")


class _Style:
    """Colour and mark of each name; flashtile's lie above the others."""

    def __init__(self, styles: Styles) -> None:
        self._implementations, self._others = styles, dict[str, int]()

    def of(self, name: str) -> dict[str, Any]:
        index = self._implementations.get(name)
        if index is None:
            index = self._others.setdefault(name, len(self._others))
        above = 4 if is_ours(name) else 3
        return {"color": LIGHT[index % len(LIGHT)], "marker": _MARKS[index % len(_MARKS)], "zorder": above}


def _draw_lines(figure: Figure, axes: Axes, chart: LineChart, style: _Style) -> list[str]:
    for one in chart.series:
        marks = {"marker": "None"} if chart.steps else {"markersize": 6, **_EDGE}
        axes.plot(*zip(*one.points), label=one.name, clip_on=False, linewidth=1.6, **{**style.of(one.name), **marks})
    if chart.level is not None:
        axes.axhline(chart.level, color=_SOFT, linestyle="--", linewidth=1.2)
    if not chart.steps:
        lengths = sorted({x for one in chart.series for x, _ in one.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, list(map(_length, lengths)))
    if chart.logarithmic:
        axes.set_yscale("log")
        _write_decades(axes.yaxis, [y for one in chart.series for _, y in one.points])
    else:
        _write_numbers(axes.yaxis)
        if not chart.steps:
            axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(True)
    return [one.name for one in chart.series]


def _write_numbers(axis: Axis) -> None:
    """A few numbers beside a linear axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))


def _write_decades(axis: Axis, values: Sequence[float]) -> None:
    """Numbers beside a logarithmic axis: at powers of ten, in a short range also between them."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    between = (1.0,) if max(values) > 200 * min(values) else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=between))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))


def _draw_dots(figure: Figure, axes: Axes, chart: DotChart, style: _Style) -> list[str]:
    y, places = 0.0, []
    for name in chart.cases:
        lines = textwrap.wrap(name, _LETTERS)
        y += _NAME * len(lines)
        axes.text(0, y, "\n".join(lines), transform=axes.get_yaxis_transform(), verticalalignment="bottom", size=9)
        y += _DOTS / 2
        axes.axhline(y, color=_RULE, linewidth=0.7, zorder=0)
        places.append(y)
        y += _DOTS / 2
    for name in chart.names():
        found = [(values[name], place) for values, place in zip(chart.cases.values(), places) if name in values]
        options = {"linestyle": "None", "clip_on": False, "markersize": 7, **_EDGE}
        axes.plot(*zip(*found), label=name, **options, **style.of(name))
    if chart.logarithmic:
        axes.set_xscale("log")
        _write_decades(axes.xaxis, [value for values in chart.cases.values() for value in values.values()])
    else:
        axes.set_xlim(left=0)
        _write_numbers(axes.xaxis)
    axes.minorticks_off()
    axes.set_ylim(y, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(chart.label)
    axes.grid(True, axis="x")
    figure.set_figheight(y + 0.6)
    return chart.names()


def _draw_stacks(figure: Figure, axes: Axes, chart: StackedChart, style: _Style) -> list[str]:
    ends = dict.fromkeys(chart.bars, 0.0)
    for name in chart.names():
        lengths = [sum(length for part, length in parts if part == name) for parts in chart.bars.values()]
        colour = style.of(name)["color"]
        axes.barh(
            range(len(ends)), lengths, left=list(ends.values()), height=0.5, color=colour, edgecolor=_BOX, label=name
        )
        ends = {bar: end + length for (bar, end), length in zip(ends.items(), lengths, strict=True)}
    axes.set_yticks(range(len(chart.bars)), [bar.replace("-", "-\n", 1) for bar in chart.bars])
    axes.invert_yaxis()
    axes.set_xlabel(chart.label)
    _write_numbers(axes.xaxis)
    axes.grid(True, axis="x")
    figure.set_figheight(0.8 + 0.5 * len(chart.bars))
    return chart.names()


def _draw_roofline(figure: Figure, axes: Axes, chart: RooflineChart, style: _Style) -> list[str]:
    ridge = chart.peak / chart.bandwidth
    points = [point for one in chart.series for point in one.points]
    low, high = min([ridge / 10, *(x / 1.3 for x, _ in points)]), max([ridge * 4, *(x * 1.3 for x, _ in points)])
    roof = [(low, chart.bandwidth * low), (ridge, chart.peak), (high, chart.peak)]
    axes.plot([x for x, _ in roof], [y / 1e12 for _, y in roof], color=_INK, linewidth=1.6)
    for one in chart.series:
        x, y = zip(*one.points)
        dots = {"linestyle": "None", "markersize": 6, **_EDGE}
        axes.plot(x, [value / 1e12 for value in y], label=one.name, **dots, **style.of(one.name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _write_decades(axes.xaxis, [low, high])
    _write_decades(axes.yaxis, [*(y / 1e12 for _, y in (*points, *roof))])
    axes.minorticks_off()
    axes.set_xlabel("FLOP for each byte of device memory")
    axes.set_ylabel("TFLOP/s")
    axes.grid(True)
    return [one.name for one in chart.series]


_DRAWINGS: dict[type, Callable[..., Iterable[str]]] = {
    LineChart: _draw_lines,
    DotChart: _draw_dots,
    StackedChart: _draw_stacks,
    RooflineChart: _draw_roofline,
}


def _length(value: float) -> str:
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:.0f}"


def _embedded(svg: str, title: str, number: int) -> str:
    """What matplotlib wrote, as an element of a page: with identifiers of its own, in the page's colours and width, and
    without what nobody sees, which is most of it."""
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    _thin_out(root, set(re.findall(r"#([\w-]+)", svg)))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": title}
    text = ElementTree.tostring(root, encoding="unicode")
    text = re.sub(r'(<path d="[^"]*)"( [^<>]*) />(?:<path d="([^"]*)"\2 />)+', _as_one_path, text)
    names: dict[str, str] = {}
    text = (
        re.sub(
            r'\b(id="|href="#|url\(#)([\w-]+)',
            lambda found: f"{found[1]}f{number}-{names.setdefault(found[2], str(len(names)))}",
            text,
        )
        .replace("xlink:href", "href")
        .replace(" />", "/>")
        .replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    )
    # In tags alone: what stands between them is read.
    text = re.sub(r"\d+\.\d{2,}(?=[^<>]*>)", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), text)
    # Matplotlib's circle has eight curves.
    text = re.sub(r'"M0 ([\d.]+)C[^"ML]*z"', r'"M0 \1A\1 \1 0 1 1 0 -\1A\1 \1 0 1 1 0 \1z"', text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text


def _as_one_path(found: re.Match[str]) -> str:
    """Paths that follow one another and differ in their places alone, such as the lines of a grid."""
    places = re.findall(r'<path d="([^"]*)"', found[0])
    return f'<path d="{"".join(places)}"{found[2]} />'


_SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def _thin_out(parent: ElementTree.Element, wanted: set[str]) -> None:
    """Takes out what draws nothing, groups that say nothing, and identifiers that nothing refers to."""
    kept: list[ElementTree.Element] = []
    for child in parent:
        tag, style = child.tag.removeprefix(f"{{{_SVG}}}"), child.get("style", "")
        if tag in ("metadata", "style") or not child.tag.startswith(f"{{{_SVG}}}") or style == "fill: none":
            continue
        if tag == "clipPath":  # all that is drawn lies within the axes
            continue
        child.attrib.pop("clip-path", None)
        _thin_out(child, wanted)
        if child.get("id") not in wanted:
            child.attrib.pop("id", None)
        marks = (
            {mark.get("style", "") for mark in child} if {mark.tag for mark in child} == {f"{{{_SVG}}}use"} else set()
        )
        if len(marks) == 1:  # of one line: the colour once, and the edge is that of their shape
            child.set("style", re.sub(r"; stroke.*", "", marks.pop()))
            for mark in child:
                mark.attrib.pop("style", None)
        if style:
            # The page's own letters, and turns by nothing.
            child.set("style", re.sub(r"font-family: [^;]*(; )?|; stroke-linecap: square", "", style))
        if child.get("transform", "").startswith("rotate(-0 "):
            del child.attrib["transform"]
        if "d" in child.attrib:
            child.set("d", re.sub(r"\s*([MLCQz])\s*", r"\1", child.get("d", "")).strip())
        child.tail = None
        if child.text is not None and not child.text.strip():
            child.text = None
        if tag in ("g", "defs") and not child.attrib:
            if tag == "g":
                kept += child
                continue
            if not len(child):
                continue
        kept.append(child)
    parent[:] = kept
    if parent.text is not None and not parent.text.strip():
        parent.text = None


def shared_styles(pictures: Mapping[int, str]) -> tuple[dict[int, str], str]:
    """Pictures whose styles are classes, because a few styles stand in thousands of places, and the classes."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return f'class="{names.setdefault(found[1], f"s{len(names)}")}"'

    shown = {key: re.sub(r'style="([^"]*)"', named, text) for key, text in pictures.items()}
    return shown, "\n".join(f".{name} {{ {style} }}" for style, name in names.items())
