"""`flashtile report`: records in, a page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashtile.bench.compare import read_record
from flashtile.bench.html.figures import Named, implementations, sections
from flashtile.bench.html.page import page
from flashtile.bench.record import Record, require_writable

_TITLE = "flashtile: measured"


def write_report(paths: Sequence[Path], output: Path) -> int:
    """Writes the page of some records.

    Args:
        paths: JSON files, as benchmark commands write them.
        output: HTML file; its folder is made where there is none.

    Returns:
        The number of figures.

    Raises:
        ChoiceError: a file is no record, or the page cannot be written.
    """
    records = [read_record(path) for path in paths]
    index = implementations(records)
    named = [Named(record, path.name, index) for record, path in zip(records, paths, strict=True)]
    found = sections(named)
    facts = [(one.name, _facts(one.record)) for one in named]
    require_writable(output)
    output.write_text(page(_TITLE, found, facts), encoding="utf-8")
    return sum(len(section.figures) for section in found)


def _facts(record: Record) -> dict[str, str]:
    known = {**(record.get("machine") or {}), **(record.get("versions") or {})}
    facts = {name: str(value) for name, value in known.items() if value is not None}
    return {"command": str(record.get("command", "")), "commit": str(record.get("commit")), **facts}
