"""Runs benchmark commands with a progress bar, and draws their records in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress as bars
from rich.console import Console

from flashtile.bench import commands
from flashtile.bench.base import AnyCase
from flashtile.bench.commands import OnCase, compare_with_commit, describe_progress
from flashtile.bench.record import Row, read_record
from flashtile.bench.report import Report, make_report
from flashtile.bench.runner import Announce
from flashtile.bench.start import UserError
from flashtile.cli.console import make_console, print_table, print_text

#: Endings of the headings whose columns stand out.
_RESULTS = ("/ best", "here / there")


def measure(
    console: Console,
    command: str,
    options: Mapping[str, Any],
    output: Path | None,
    compare: Path | None,
    against: str | None,
) -> None:
    """Measures and shows: alone, beside an earlier record, or another commit (UserError: both)."""
    if compare is not None and against is not None:
        raise UserError("--compare and --against: expected one of them, got both; run the command once for each")
    if against is not None:
        with _bar(make_console(stderr=True)) as advance:
            report = compare_with_commit(command, options, against, output, advance)
    else:
        earlier = None if compare is None else read_record(compare)
        stderr = make_console(stderr=True)
        with progress(stderr) as (on_case, announce):
            record = commands.measure(command, options, output, on_case, announce)
        report = make_report(record, earlier)
    show_report(console, report, output)


@contextmanager
def progress(console: Console) -> Iterator[tuple[OnCase, Announce]]:
    """A bar that names what is measured now, and a line about each case that was; without a terminal also a line for
    each case before it is measured, to which its steps are added as they begin."""
    begin = time.perf_counter()
    with _bar(console) as advance:
        now: tuple[str, int, int] = "", 0, 0  # what the bar shows: a case, how many are done, and of how many

        def on_case(index: int, total: int, case: AnyCase, rows: list[Row] | None) -> None:
            nonlocal now
            if rows is None:
                now = f"measuring {case.name}", index, total
                _print(console, f"[{index + 1}/{total}] {case.name}", end="")
            else:
                _print(console, "")
                console.print(describe_progress(index, total, case, rows, time.perf_counter() - begin), **_LINE)
                now = case.name, index + 1, total
            advance(*now)

        def announce(step: str) -> None:
            _print(console, f"; {step}" if now[0] else step, end="" if now[0] else "\n")
            advance(f"{now[0]}: {step}", *now[1:])

        yield on_case, announce


#: Seconds over which a bar averages the speed from which it tells the time that is left.
_WHOLE_RUN = 86_400
_LINE: Any = {"style": "dim", "markup": False, "highlight": False, "soft_wrap": True}


def _print(console: Console, text: str, end: str = "\n") -> None:
    """Prints where there is no bar."""
    if not console.is_terminal:
        console.print(text, end=end, **_LINE)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    times = bars.TimeElapsedColumn(), bars.TextColumn("left:"), bars.TimeRemainingColumn()
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), *times, bars.TextColumn("{task.description}", markup=False))
    bar = bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=_WHOLE_RUN
    )
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
