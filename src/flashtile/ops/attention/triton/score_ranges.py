"""Between which numbers the integers of a score program lie, so that reads which stay within their tensors need no
checks. No Triton here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flashtile.ops.attention.score_program import CAST, CONSTANT, INPUTS, ScoreProgram, Step, is_value

#: From, to: both are possible.
Range = tuple[int, int]

_INTEGERS = ("int32", "int64")
_LARGEST = 2**31 - 1


class ScoreBounds(NamedTuple):
    """How many batch entries, heads, queries and keys there are, and the shapes of the captured tensors. Where a plan
    has them, no tile ends past the queries and keys."""

    batch: int
    heads: int
    rows_q: int
    rows_k: int
    shapes: tuple[tuple[int, ...], ...]


def ranges(program: ScoreProgram, bounds: ScoreBounds) -> dict[str, Range]:
    """Those that are known, by the names of the values."""
    known = {name: (0, count - 1) for name, count in zip(INPUTS[1:], bounds[:4])}
    for number, step in enumerate(program.steps):
        found = _range_of(step, known) if step.dtype in _INTEGERS else None
        if found is not None and -_LARGEST <= found[0] and found[1] <= _LARGEST:
            known[f"%{number}"] = found
    return known


def _range_of(step: Step, known: Mapping[str, Range]) -> Range | None:
    given = [_range(argument, known) for argument in step.arguments]
    if step.operation in (CONSTANT, CAST):
        return given[0]
    name = step.name
    if name == "where":
        given = given[1:]
    if step.keywords or None in given:
        return None
    if name in ("add", "sub", "rsub") and len(given) != 2:
        return None
    return _computed(name, [each for each in given if each is not None])


def _computed(name: str, given: list[Range]) -> Range | None:
    """The range of the result of an operation on integers of these ranges."""
    low, high = given[0]
    if len(given) == 1:
        largest = max(abs(low), abs(high))
        smallest = 0 if low <= 0 <= high else min(abs(low), abs(high))
        return {"neg": (-high, -low), "abs": (smallest, largest), "square": (smallest**2, largest**2)}.get(name)
    if name == "clamp" and len(given) == 3:
        return min(max(low, given[1][0]), given[2][0]), min(max(high, given[1][1]), given[2][1])
    if len(given) != 2:
        return None
    first, last = given[1]
    products = [a * b for a in (low, high) for b in (first, last)]
    found = {
        "add": (low + first, high + last),
        "sub": (low - last, high - first),
        "rsub": (first - high, last - low),
        "mul": (min(products), max(products)),
        "maximum": (max(low, first), max(high, last)),
        "minimum": (min(low, first), min(high, last)),
        "where": (min(low, first), max(high, last)),
        "clamp_min": (max(low, first), max(high, last)),
        "clamp_max": (min(low, first), min(high, last)),
    }.get(name)
    if found is None and first == last > 0:  # one positive divisor
        found = {"floor_divide": (low // first, high // first), "remainder": (0, first - 1)}.get(name)
    return found


def _range(argument: Any, known: Mapping[str, Range]) -> Range | None:
    if is_value(argument):
        return known.get(argument)
    return (argument, argument) if type(argument) is int else None
