"""Rich's side of the command line: consoles, tables drawn from plain data, and how a command ends."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from flashtile.bench.cases import ChoiceError
from flashtile.bench.report import Table
from flashtile.cli.errors import CommandError


def make_console() -> Console:
    return Console(highlight=False)


def run_command(work: Callable[[], bool]) -> None:
    """Runs a command's work and ends the program: 0 for True, 1 for False, 2 with a message for what went wrong."""
    try:
        succeeded = work()
    except (CommandError, ChoiceError) as error:
        Console(stderr=True, highlight=False).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from None
    if not succeeded:
        raise typer.Exit(1)


def print_table(console: Console, table: Table, emphasise: int = 0) -> None:
    """Draws a table; the last `emphasise` columns in bold. Where it is too wide, cells fold: nothing is cut off."""
    rich_table = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="dim")
    for index, heading in enumerate(table.headings):
        strong = index >= len(table.headings) - emphasise
        justify: JustifyMethod = "left" if table.words or not index else "right"
        rich_table.add_column(heading, justify=justify, style="bold" if strong else None, overflow="fold")
    for line in table.lines:
        rich_table.add_row(*map(Text, line))  # not markup: messages have [batch, seq] in them
    console.print(rich_table)
    console.print()
