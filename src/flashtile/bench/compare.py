"""Speeds of one record beside those of another: what changed between two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashtile.bench.errors import ChoiceError
from flashtile.bench.record import Record, Row
from flashtile.bench.report import Table, case_name
from flashtile.bench.summary import case_key, geometric_mean

#: Case, implementation, phase, and the step of a breakdown.
Key = tuple[str, str, str, str]

#: What every row has, with the type of its value.
_OF_EVERY_ROW: dict[str, type | tuple[type, ...]] = {
    "op": str, "phase": str, "impl": str, "case": dict, "ms": (int, float, type(None)),
}  # fmt: skip


def read_record(path: Path) -> Record:
    """A record from its file.

    Raises:
        ChoiceError: there is no such file, or it is no record.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ChoiceError(f"record: {path} cannot be read: {why}") from None
    except json.JSONDecodeError as error:
        raise ChoiceError(f"record: {path} is no JSON file: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
        raise ChoiceError(f"record: expected an object with a list of rows in {path}; `flashtile bench -o` writes one")
    for number, row in enumerate(record["rows"], 1):
        if not _is_row(row):
            raise ChoiceError(
                f"record: expected rows with {', '.join(_OF_EVERY_ROW)} in {path}, got row {number}: {str(row)[:80]}; "
                "`flashtile bench -o` writes such"
            )
        if wrong := _wrong_measure(row):
            raise ChoiceError(
                f"record: expected times above 0 and finite speeds and sizes in {path}, got {wrong} in row {number}; "
                "take the row out, or write null for what was not measured"
            )
    return record


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name, ...), of) for name, of in _OF_EVERY_ROW.items())


#: What rows measure: speeds divide by it, and pictures take its logarithm.
_MEASURED = ("ms", "tflops", "gbps", "tokens_per_s", "peak_mib", "memory_mib")


def _wrong_measure(row: Row) -> str | None:
    """The first of a row's measured values that is none, as text."""
    for name in _MEASURED:
        value = row.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name == "ms"):
            return f"{name} {value!r}"
    return None


def comparison_tables(rows: Sequence[Row], earlier: Sequence[Row], title: str) -> list[Table]:
    """Times there and here, and how many times as fast here is, for what both measured; then geometric means.

    Args:
        rows: of this run.
        earlier: of the other.
        title: of the first table.
    """
    before = {key_of(row): row for row in earlier if row.get("ms") is not None}
    common = [(before[key_of(row)], row) for row in rows if row.get("ms") is not None and key_of(row) in before]
    lines = [
        [case_name(row), row["impl"], _phase(row), _ms(old), _ms(row), f"{old['ms'] / row['ms']:.3f}"]
        for old, row in common
    ]
    return [
        Table(title, ["case", "implementation", "phase", "ms there", "ms here", "speed here / there"], lines, keys=3),
        _means(common),
    ]


def differences(record: Record, earlier: Record) -> list[str]:
    """A line for each fact of machine and versions in which two records differ, and for which times may differ."""
    found = []
    for part in ("machine", "versions"):
        here, there = record.get(part) or {}, earlier.get(part) or {}
        for name in dict.fromkeys((*there, *here)):
            if here.get(name) != there.get(name):
                found.append(f"{name}: {there.get(name)} there, {here.get(name)} here")
    return found


def _means(common: Sequence[tuple[Row, Row]]) -> Table:
    ratios: dict[tuple[str, str], list[float]] = {}
    for old, row in common:
        ratios.setdefault((row["impl"], _phase(row)), []).append(old["ms"] / row["ms"])
    lines = [
        [impl, phase, f"{geometric_mean(of):.3f}", f"{min(of):.3f}", f"{max(of):.3f}", str(len(of))]
        for (impl, phase), of in ratios.items()
    ]
    headings = ["implementation", "phase", "geometric mean", "lowest", "highest", "cases"]
    return Table("Speed here over there", headings, lines, keys=2)


def key_of(row: Row) -> Key:
    """What a row measured: the same in two records."""
    return case_key(row), row["impl"], row["phase"], row.get("step", "")


def _phase(row: Row) -> str:
    return f"{row['phase']}, {row['step']}" if "step" in row else row["phase"]


def _ms(row: Row) -> str:
    return f"{row['ms']:.4g}"
