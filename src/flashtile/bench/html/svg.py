"""Axes, ticks and marks: what the charts are drawn from. Colours are classes, which the page's style sheet gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Kinds of marks, so that series differ without colour.
MARKS = 6


@dataclass(frozen=True)
class Axis:
    """A scale from values to places.

    Attributes:
        low: value at `start`.
        high: value at `end`.
        start: place in the drawing.
        end: likewise.
        logarithmic: equal factors are equal distances.
        ticks: values that are written beside it.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high = (math.log(v) if self.logarithmic else v for v in (self.low, self.high))
        share = ((math.log(value) if self.logarithmic else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)


def linear_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """From 0 to a round number at or past the largest value."""
    largest = max(values, default=1.0) or 1.0
    step = _round_up(largest / 5)
    count = math.ceil(largest / step - 1e-9)
    return Axis(0.0, count * step, start, end, False, tuple(step * i for i in range(count + 1)))


def log_axis(values: Sequence[float], start: float, end: float, base: int = 10) -> Axis:
    """Between powers of the base around the values, all positive."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 8))
    ticks = tuple(float(base) ** power for power in range(low, high + 1, every))
    return Axis(float(base) ** low, float(base) ** high, start, end, True, ticks)


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))


def number(value: float) -> str:
    """Short: 512, 2k, 16k, 1M, 0.5."""
    if value >= 2**20 and value % 2**20 == 0:
        return f"{value / 2**20:.0f}M"
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle", turn: bool = False) -> str:
    """Words at a place, perhaps turned to run upwards."""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{turned}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through places."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def mark(x: float, y: float, series: int, title: str, size: float = 4.0) -> str:
    """A point of a series, with what it says when it is pointed at."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"',
        f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:.1f}" height="{2 * size:.1f}"',
        _polygon(x, y, [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)], size),
        _polygon(x, y, [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)], size),
        _polygon(x, y, [(0, 1.2), (1.1, -0.9), (-1.1, -0.9)], size),
        _polygon(x, y, [(-1.2, -0.5), (1.2, -0.5), (1.2, 0.5), (-1.2, 0.5)], size),
    )
    assert len(shapes) == MARKS
    shape = shapes[series % MARKS]
    name = shape[1:].partition(" ")[0]
    return f'{shape} class="m s{series}"><title>{escape(title)}</title></{name}>'


def _polygon(x: float, y: float, corners: Sequence[tuple[float, float]], size: float) -> str:
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}"'


def drawing(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The whole, as wide as its place on the page."""
    opening = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}"'
    return f'{opening} xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
