"""`flashtile report`: records in, a page out."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashtile.bench.compare import read_record
from flashtile.bench.errors import how_to_install
from flashtile.bench.html.drawing import draw, shared_styles
from flashtile.bench.html.figures import Named, in_order, sections, styles
from flashtile.bench.html.headline import headline_of
from flashtile.bench.html.page import charts_of, page
from flashtile.bench.html.words import OPERATIONS, unknown_keys
from flashtile.bench.record import require_writable, write_whole

_NO_PICTURES = f"The page has tables only. Pictures need matplotlib: {how_to_install('plots')}."


@dataclass(frozen=True)
class Written:
    """The number of charts on a page, how many of them are pictures rather than tables, and notes for its reader."""

    charts: int
    pictures: int
    notes: tuple[str, ...]


def write_report(paths: Sequence[Path], output: Path) -> Written:
    """Writes the page of some records.

    Args:
        paths: JSON files, as benchmark commands write them.
        output: HTML file; its folder is made where there is none.

    Raises:
        ChoiceError: a file is no record, or the page cannot be written.
    """
    records = in_order([Named(read_record(path), path) for path in paths])
    headline, found = headline_of(records), sections(records)
    notes = [note for named in records for note in _unknown(named)]
    require_writable(output)
    pictures: dict[int, str] = {}
    charts = charts_of(headline, found)
    if importlib.util.find_spec("matplotlib") is None:
        notes.append(_NO_PICTURES)
    else:
        colours = styles(records)
        pictures = {id(chart): draw(chart, colours, number) for number, chart in enumerate(charts)}
    shown, classes = shared_styles(pictures)
    write_whole(output, page(records, headline, found, shown, classes, notes))
    return Written(len(charts), len(pictures), tuple(notes))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _unknown(named: Named) -> list[str]:
    """A line for each kind of thing in a record that this version does not know, and shows as it stands."""
    operations: dict[str, int] = {}
    keys: dict[tuple[str, str], int] = {}
    for row in named.record["rows"]:
        if row["op"] not in OPERATIONS:
            operations[row["op"]] = operations.get(row["op"], 0) + 1
        for key in unknown_keys(row["case"]):
            keys[row["op"], key] = keys.get((row["op"], key), 0) + 1
    shown = "; it is shown unchanged. Another version of flashtile may have written it"
    return [
        *(f"{named.path.name}: unknown operation {op!r} in {_rows(count)}{shown}" for op, count in operations.items()),
        *(f"{named.path.name}: unknown key {key!r} in the case of {_rows(count)} of {op!r}{shown}"
          for (op, key), count in keys.items()),
    ]  # fmt: skip
