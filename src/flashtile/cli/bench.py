"""Draws benchmark records in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flashtile.bench.commands import OnCase, describe_progress
from flashtile.bench.problem import AnyCase
from flashtile.bench.report import Row, host_table, mean_tables, reasons, speed_tables
from flashtile.cli.console import print_table


def progress_printer(console: Console) -> OnCase:
    """Prints a line about each case that was measured."""
    begin = time.perf_counter()

    def on_case(index: int, total: int, case: AnyCase, rows: list[Row]) -> None:
        line = describe_progress(index, total, case, rows, time.perf_counter() - begin)
        console.print(line, style="dim", markup=False, soft_wrap=True)

    return on_case


def show_speed_record(console: Console, rows: Sequence[Row], output: Path | None) -> None:
    """Speeds of each phase with our ratio to the best peer in bold, geometric means, and what could not run."""
    for table in speed_tables(rows):
        print_table(console, table, emphasise=sum(heading.endswith("/ best") for heading in table.headings))
    for table in mean_tables(rows):
        print_table(console, table)
    _show_rest(console, rows, output)


def show_host_record(console: Console, rows: Sequence[Row], output: Path | None) -> None:
    print_table(console, host_table(rows))
    _show_rest(console, rows, output)


def _show_rest(console: Console, rows: Sequence[Row], output: Path | None) -> None:
    for line in reasons(rows):
        console.print(f"no speed: {line}", style="yellow", markup=False)
    if output is not None:
        console.print(f"record: {output}", markup=False)
