"""Runs benchmark commands with a progress bar, and draws their records in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashtile.bench import commands
from flashtile.bench.base import AnyCase
from flashtile.bench.commands import OnCase, compare_with_commit, describe_progress
from flashtile.bench.record import Row, read_record
from flashtile.bench.report import Report, make_report
from flashtile.cli.console import make_console, print_table, print_text
from flashtile.cli.errors import UserError

#: Endings of the headings whose columns stand out.
_RESULTS = ("/ best", "here / there")


def describe(command: str) -> str:
    """The cases and implementations of a command."""
    return commands.describe(command, commands.default_device())


def measure(
    console: Console,
    command: str,
    options: Mapping[str, Any],
    output: Path | None,
    compare: Path | None,
    against: str | None,
) -> None:
    """Measures and shows: alone, beside an earlier record, or beside another commit. Progress goes to stderr.

    Raises:
        UserError: both are asked for.
    """
    if compare is not None and against is not None:
        raise UserError("--compare and --against: expected one of them, got both; run the command once for each")
    if against is not None:
        with _bar(make_console(stderr=True)) as advance:
            report = compare_with_commit(command, options, against, output, advance)
    else:
        earlier = None if compare is None else read_record(compare)
        stderr = make_console(stderr=True)
        with progress(stderr) as on_case:
            record = commands.measure(command, options, output, on_case)
        report = make_report(record, earlier)
    show_report(console, report, output)


@contextmanager
def progress(console: Console) -> Iterator[OnCase]:
    """A bar that names the case being measured, and a line about each that was; where nobody looks on, lines alone."""
    begin = time.perf_counter()
    with _bar(console) as advance:

        def on_case(index: int, total: int, case: AnyCase, rows: list[Row] | None) -> None:
            if rows is None:
                advance(f"measuring {case.name}", index, total)
                if index == 0 and not console.is_terminal:
                    _print_line(console, f"measuring {total} {'case' if total == 1 else 'cases'}; a line follows each")
                return
            _print_line(console, describe_progress(index, total, case, rows, time.perf_counter() - begin))
            advance(case.name, index + 1, total)

        yield on_case


def _print_line(console: Console, line: str) -> None:
    console.print(line, style="dim", markup=False, soft_wrap=True)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total, refresh=True)


def show_report(console: Console, report: Report, output: Path | None) -> None:
    """Tables with our ratios in bold, and what could not run."""
    for table in report.tables:
        print_table(console, table, emphasise=sum(heading.endswith(_RESULTS) for heading in table.headings))
    for line in report.notes:
        print_text(console, line, "yellow")
    if output is not None:
        print_text(console, f"record: {output}")
