"""Divides cases among charts of dots. A chart has few enough cases to be read, and enough to say something."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flashtile.bench.html.words import facets_of, operation_of
from flashtile.bench.record import Row

#: The most cases in one chart, and the fewest in one whose cases have more in common than those of the others.
_MOST_CASES, _LEAST_CASES = 14, 4


def case_key(row: Row) -> str:
    """What rows of the same case have in common."""
    return json.dumps([row["op"], row["case"]], sort_keys=True)


def parts_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in parts with few cases each, by the first facets that divide them, else in their order. Parts of very few
    cases are joined."""
    rows = list(rows)
    if _count_cases(rows) <= _MOST_CASES:
        return [rows]
    facets = [{"": operation_of(row["op"]), **facets_of(row["case"])} for row in rows]
    for key in dict.fromkeys(key for of_row in facets for key in of_row):
        values = dict.fromkeys(of_row.get(key) for of_row in facets)
        if 1 < len(values) <= _MOST_CASES:
            members = ([row for row, of_row in zip(rows, facets) if of_row.get(key) == value] for value in values)
            return _joined([part for of_value in members for part in parts_of(of_value)])
    numbers = {key: number for number, key in enumerate(dict.fromkeys(map(case_key, rows)))}
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(numbers[case_key(row)] // _MOST_CASES, []).append(row)
    return list(parts.values())


def _joined(parts: Sequence[list[Row]]) -> list[list[Row]]:
    """The parts, those with fewest cases together in the place of the first of these."""
    joined: list[list[Row]] = []
    others: list[Row] | None = None
    for part in parts:
        if _count_cases(part) >= _LEAST_CASES:
            joined.append(part)
        elif others is not None and _count_cases(others) + _count_cases(part) <= _MOST_CASES:
            others += part
        else:
            others = list(part)
            joined.append(others)
    return joined


def _count_cases(rows: Sequence[Row]) -> int:
    return len({case_key(row) for row in rows})
