"""Draws benchmark records in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flashtile.bench.report import Row, host_table, mean_tables, reasons, speed_tables
from flashtile.bench.summary import is_ours
from flashtile.cli.console import print_table


def show_attention_record(console: Console, rows: Sequence[Row], output: Path | None) -> None:
    """Speeds of each phase with our ratio to the best peer in bold, geometric means, and what could not run."""
    ours = len({row["impl"] for row in rows if is_ours(row["impl"])})
    for table in speed_tables(rows):
        print_table(console, table, emphasise=ours)
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
