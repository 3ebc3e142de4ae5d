"""Charts as plain data, each also as a table of its figures; `drawing` makes the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Headings = Sequence[str]
Lines = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Series:
    """A named list of points (x, y); `names` says what each point is, where its place does not."""

    name: str
    points: tuple[tuple[float, float], ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineChart:
    """Lines over lengths, on a logarithmic axis with base 2, or over steps.

    Attributes:
        title: what it shows.
        series: the lines.
        x_label, y_label: of the axes.
        logarithmic: the axis of values is.
        level: a horizontal line to compare with.
        steps: lines over steps, on a linear axis; too many for marks, and the table has the last alone.
    """

    title: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    logarithmic: bool = False
    level: float | None = None
    steps: bool = False

    @property
    def unit(self) -> str:
        return self.y_label

    def table(self) -> tuple[Headings, Lines]:
        places = sorted({x for one in self.series for x, _ in one.points})
        by_name = {one.name: dict(one.points) for one in self.series}
        lines = [
            (f"{x:,.0f}", *(figure(by_name[one.name].get(x)) for one in self.series))
            for x in (places[-1:] if self.steps else places)
        ]
        return (self.x_label, *(one.name for one in self.series)), lines


@dataclass(frozen=True)
class DotChart:
    """For each case a line with a dot for each implementation.

    Attributes:
        title: what it shows.
        cases: name of a case -> implementation -> value.
        label: of the axis of values.
        logarithmic: that axis is.
    """

    title: str
    cases: Mapping[str, Mapping[str, float]]
    label: str
    logarithmic: bool = False

    @property
    def unit(self) -> str:
        return self.label

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for of_case in self.cases.values() for name in of_case))

    def table(self) -> tuple[Headings, Lines]:
        names = self.names()
        lines = [(case, *(figure(found.get(name)) for name in names)) for case, found in self.cases.items()]
        return ("case", *names), lines


@dataclass(frozen=True)
class StackedChart:
    """Bars of parts one after another: name of a bar -> its parts, each a name and a length."""

    title: str
    bars: Mapping[str, Sequence[tuple[str, float]]]
    label: str

    @property
    def unit(self) -> str:
        return self.label

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for parts in self.bars.values() for name, _ in parts))

    def table(self) -> tuple[Headings, Lines]:
        lines = [(bar, name, figure(length)) for bar, parts in self.bars.items() for name, length in parts]
        return ("", "part", self.label), lines


@dataclass(frozen=True)
class RooflineChart:
    """Speed against intensity under a roof.

    Attributes:
        title: what it shows.
        series: points of (FLOP per byte, FLOP/s), with their names.
        bandwidth: bytes per second, the slope of the roof.
        peak: FLOP/s, its level.
    """

    title: str
    series: tuple[Series, ...]
    bandwidth: float
    peak: float

    @property
    def unit(self) -> str:
        return "TFLOP/s"

    def table(self) -> tuple[Headings, Lines]:
        lines = [
            (f"{one.name}: {name}", figure(x), figure(y / 1e12), f"{y / min(self.peak, self.bandwidth * x):.0%}")
            for one in self.series
            for (x, y), name in zip(one.points, one.names, strict=True)
        ]
        return ("kernel and case", "FLOP/byte", "TFLOP/s", "of the roof"), lines


Chart = LineChart | DotChart | StackedChart | RooflineChart


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
