"""What a benchmark command tells in the end, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtile.bench import against, commands
from flashtile.bench.breakdown import OP, breakdown_tables
from flashtile.bench.compare import comparison_tables, differences
from flashtile.bench.errors import ChoiceError
from flashtile.bench.record import Record, require_writable, write_record
from flashtile.bench.report import Table, host_table, mean_tables, reasons, speed_tables


@dataclass(frozen=True)
class Report:
    """Tables, and lines that follow them."""

    tables: list[Table]
    notes: list[str]


def report_of(record: Record, earlier: Record | None = None) -> Report:
    """A record's speeds, means and what could not run; with `earlier` also how these speeds differ from that one's."""
    rows = record["rows"]
    if rows and rows[0]["op"].endswith("-host"):
        tables = [host_table(rows)]
    elif rows and rows[0]["op"] == OP:
        tables = breakdown_tables(rows)
    else:
        tables = [*speed_tables(rows), *mean_tables(rows)]
    notes = [f"no speed: {line}" for line in reasons(rows)]
    if earlier is not None:
        compared = comparison_tables(rows, earlier["rows"], "Beside the earlier record")
        tables += [table for table in compared if table.lines]
        notes += [f"not alike: {line}" for line in differences(record, earlier)]
        if not compared[0].lines:
            notes.append("the earlier record has a time for none of these cases and implementations")
    return Report(tables, notes)


def compare_with_commit(
    command: str,
    options: Mapping[str, Any],
    ref: str,
    output: Path | None,
    on_run: Callable[[str, int, int], None],
) -> Report:
    """Runs a command in this tree and in that of a commit, in turns.

    Args:
        command: as in `commands.measure`.
        options: likewise.
        ref: the commit.
        output: file for a record of both; the names of the commit's implementations end in `@` and its number.
        on_run: called with the tree, the number of runs before, and that of all.

    Raises:
        ChoiceError: `output` cannot be written, or as `against.measure_against`.
    """
    if options.get("plot") is not None:
        raise ChoiceError("--plot and --against: expected one of them, got both; plot this tree in a run of its own")
    require_writable(output)
    arguments = commands.as_arguments(command, options, commands.default_device())
    total = 2 * against.ROUNDS
    here, there = against.measure_against(ref, arguments, lambda tree, runs: on_run(tree, runs, total))
    if output is not None:
        write_record(against.join(here, there), output)
    tables = comparison_tables(here["rows"], there["rows"], f"This tree beside {ref} ({there['commit']})")
    notes = [f"no speed: {line}" for line in reasons(here["rows"])]
    notes += [f"no speed in {ref}: {line}" for line in reasons(there["rows"])]
    return Report([*tables, against.spread_table(here, there)], notes)
