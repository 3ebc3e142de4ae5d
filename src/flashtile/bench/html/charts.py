"""Three kinds of charts as SVG: lines against a length, dots of named cases, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from flashtile.bench.html.svg import Axis, drawing, line, linear_axis, log_axis, mark, number, path, text

#: Small enough that letters stay readable where a phone is 360 pixels wide.
_WIDTH, _HEIGHT = 420.0, 290.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 12.0, 42.0
#: Of dots: the height of a case, and the place for its name above its line.
_CASE = 34.0
#: Of a name in a drawing.
_LETTERS = 54


@dataclass(frozen=True)
class Series:
    """A named list of points (x, y); `index` chooses colour and mark, the same for a name all over a page."""

    name: str
    index: int
    points: tuple[tuple[float, float], ...]
    titles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A drawing and its legend.

    Attributes:
        title: what it shows.
        svg: the drawing.
        legend: name and index of each series.
        headings: of the table of its figures.
        lines: that table.
    """

    title: str
    svg: str
    legend: tuple[tuple[str, int], ...]
    headings: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = field(default=())


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    logarithmic: bool = False,
    level: float | None = None,
    steps: bool = False,
) -> Chart:
    """Lines over lengths, whose axis is logarithmic.

    Args:
        logarithmic: the other axis is, too.
        level: a horizontal line to compare with.
        steps: lines over steps instead, whose axis is linear; too many for marks and a table.
    """
    lengths = [x for one in series for x, _ in one.points]
    values = [y for one in series for _, y in one.points] + ([] if level is None else [level])
    if steps:
        across = linear_axis(lengths, _LEFT, _WIDTH - _RIGHT)
    else:
        across = log_axis(lengths, _LEFT, _WIDTH - _RIGHT, base=2)
    make = log_axis if logarithmic else linear_axis
    up = make(values, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up, x_label, y_label)]
    if level is not None:
        parts.append(line(_LEFT, up(level), _WIDTH - _RIGHT, up(level), "level"))
    for one in series:
        places = [(across(x), up(y)) for x, y in one.points]
        parts.append(path(places, f"l s{one.index}"))
        shown = [] if steps else list(zip(places, one.points, strict=True))
        parts += [
            mark(*place, one.index, f"{one.name}, {number(x)}: {_figure(y)} {y_label}") for place, (x, y) in shown
        ]
    by_name = {one.name: dict(one.points) for one in series}
    lines = [
        (number(x), *(_figure(by_name[one.name][x]) if x in by_name[one.name] else "–" for one in series))
        for x in sorted({max(lengths)} if steps else set(lengths))
    ]
    headings = (x_label, *(one.name for one in series))
    return Chart(title, drawing(_WIDTH, _HEIGHT, title, parts), _legend(series), headings, tuple(lines))


def dot_chart(
    title: str, cases: Mapping[str, Mapping[str, float]], index: Mapping[str, int], label: str, *, log: bool = False
) -> Chart:
    """For each case a line with a dot for each implementation.

    Args:
        cases: name of a case -> implementation -> value.
        index: implementation -> colour and mark.
        log: the axis is logarithmic.
    """
    values = [value for of_case in cases.values() for value in of_case.values()]
    height = _TOP + _CASE * len(cases) + _BOTTOM
    across = (log_axis if log else linear_axis)(values, 16.0, _WIDTH - 2 * _RIGHT)
    bottom = height - _BOTTOM
    parts = [line(across(tick), _TOP, across(tick), bottom, "grid") for tick in across.ticks]
    parts += [text(across(tick), bottom + 16, number(tick), "tick") for tick in across.ticks]
    parts.append(text((across.start + across.end) / 2, height - 6, label, "label"))
    for row, (name, of_case) in enumerate(cases.items()):
        y = _TOP + _CASE * row + 24
        parts += [
            text(across.start, y - 9, _short(name), "case", "start"),
            line(across.start, y, across.end, y, "grid"),
        ]
        # Ours last, on top of what lies in the same place.
        for impl, value in sorted(of_case.items(), key=lambda item: -index[item[0]]):
            parts.append(mark(across(value), y, index[impl], f"{name}, {impl}: {_figure(value)} {label}", 5.0))
    names = list(dict.fromkeys(impl for of_case in cases.values() for impl in of_case))
    lines = [(name, *(_figure(of[impl]) if impl in of else "–" for impl in names)) for name, of in cases.items()]
    legend = tuple((impl, index[impl]) for impl in names)
    return Chart(title, drawing(_WIDTH, height, title, parts), legend, ("case", *names), tuple(lines))


def roofline_chart(title: str, series: Sequence[Series], bandwidth: float, peak: float) -> Chart:
    """Speed against intensity under a roof.

    Args:
        series: points of (FLOP per byte, FLOP/s), each with its title.
        bandwidth: bytes per second, the slope of the roof.
        peak: FLOP/s, its level.
    """
    ridge = peak / bandwidth
    across = log_axis([x for one in series for x, _ in one.points] + [ridge / 10, ridge * 4], _LEFT, _WIDTH - _RIGHT)
    speeds = [y / 1e12 for one in series for _, y in one.points]
    up = log_axis([*speeds, peak / 1e12, bandwidth * across.low / 1e12], _HEIGHT - _BOTTOM, _TOP)
    roof = [(across.low, bandwidth * across.low), (ridge, peak), (across.high, peak)]
    parts = _grid(across, up, "FLOP for each byte of device memory", "TFLOP/s")
    parts.append(path([(across(x), up(y / 1e12)) for x, y in roof], "roof"))
    lines = []
    for one in series:
        for (x, y), name in zip(one.points, one.titles, strict=True):
            share = y / min(peak, bandwidth * x)
            parts.append(mark(across(x), up(y / 1e12), one.index, f"{name}: {_figure(y / 1e12)} TFLOP/s, {share:.0%}"))
            lines.append((name, _figure(x), _figure(y / 1e12), f"{share:.0%}"))
    headings = ("kernel", "FLOP/byte", "TFLOP/s", "of the roof")
    return Chart(title, drawing(_WIDTH, _HEIGHT, title, parts), _legend(series), headings, tuple(lines))


def stacked_chart(title: str, bars: Mapping[str, Sequence[tuple[str, float]]], label: str) -> Chart:
    """Bars of parts one after another.

    Args:
        bars: name of a bar -> its parts, each a name and a length.
    """
    names = list(dict.fromkeys(name for parts in bars.values() for name, _ in parts))
    index = {name: i for i, name in enumerate(names)}
    height = _TOP + (_CASE + 14) * len(bars) + _BOTTOM
    across = linear_axis([sum(length for _, length in parts) for parts in bars.values()], 16.0, _WIDTH - 2 * _RIGHT)
    bottom = height - _BOTTOM
    drawn = [line(across(tick), _TOP, across(tick), bottom, "grid") for tick in across.ticks]
    drawn += [text(across(tick), bottom + 16, number(tick), "tick") for tick in across.ticks]
    drawn.append(text((across.start + across.end) / 2, height - 6, label, "label"))
    for row, (bar, parts) in enumerate(bars.items()):
        y, begin = _TOP + (_CASE + 14) * row + 20, 0.0
        drawn.append(text(across.start, y - 6, bar, "case", "start"))
        for name, length in parts:
            left, right = across(begin), across(begin + length)
            shape = f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 0.0):.1f}" height="20"'
            drawn.append(f'{shape} class="b s{index[name]}"><title>{_part(bar, name, length, label)}</title></rect>')
            begin += length
    lines = [(bar, name, _figure(length)) for bar, parts in bars.items() for name, length in parts]
    return Chart(title, drawing(_WIDTH, height, title, drawn), tuple(index.items()), ("", "part", label), tuple(lines))


def _short(name: str) -> str:
    """As much of a name as a drawing is wide; the table has all of it."""
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"


def _part(bar: str, name: str, length: float, label: str) -> str:
    return escape(f"{bar}, {name}: {_figure(length)} {label}")


def _grid(across: Axis, up: Axis, x_label: str, y_label: str) -> list[str]:
    bottom, top = up.start, up.end
    parts = [line(across.start, up(tick), across.end, up(tick), "grid") for tick in up.ticks]
    parts += [text(across.start - 6, up(tick) + 4, number(tick), "tick", "end") for tick in up.ticks]
    parts += [line(across(tick), bottom, across(tick), top, "grid") for tick in across.ticks]
    parts += [text(across(tick), bottom + 16, number(tick), "tick") for tick in across.ticks]
    parts.append(text((across.start + across.end) / 2, bottom + 35, x_label, "label"))
    return [*parts, text(14, (bottom + top) / 2, y_label, "label", turn=True)]


def _legend(series: Sequence[Series]) -> tuple[tuple[str, int], ...]:
    return tuple((one.name, one.index) for one in series)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
