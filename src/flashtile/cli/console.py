"""Rich's side of the command line: consoles, tables drawn from plain data, and how a command ends."""

from __future__ import annotations

import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Container, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from flashtile.bench.start import UserError

if TYPE_CHECKING:
    from flashtile.bench.report import Table

_Command = TypeVar("_Command", bound=Callable[..., Any])
#: The space between a number and a unit.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|[A-Za-zµ]{1,3}|bytes|steps)\b)")


def make_console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False)


def ends(work: Callable[..., bool]) -> Callable[..., None]:
    """A command that ends the program: with 0 for True, 1 for False, 2 and a message for what went wrong."""

    @functools.wraps(work)
    def command(*given: Any, **options: Any) -> None:
        try:
            succeeded = work(*given, **options)
        except UserError as error:
            make_console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
            raise typer.Exit(2) from None
        if not succeeded:
            raise typer.Exit(1)

    return command


def takes(kind: type) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Makes a command of a function whose first argument is a dataclass: its fields become options."""

    def changed(function: Callable[..., bool]) -> Callable[..., bool]:
        def command(**given: Any) -> bool:
            names = {field.name for field in fields(kind)}
            made = kind(**{name: given.pop(name) for name in list(given) if name in names})
            return function(made, **given)

        defaults = {field.name: field.default_factory() for field in fields(kind) if callable(field.default_factory)}
        of_kind = [
            parameter.replace(default=defaults.get(name, parameter.default))
            for name, parameter in inspect.signature(kind, eval_str=True).parameters.items()
        ]
        parameters = [*of_kind, *[*inspect.signature(function, eval_str=True).parameters.values()][1:]]
        return with_signature(command, function, parameters)

    return changed


def with_signature(command: _Command, like: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> _Command:
    """A function with the name and the help of another, and with these parameters, from which typer makes options."""
    command.__name__, command.__doc__ = like.__name__, like.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def print_text(console: Console, text: str, style: str | None = None) -> None:
    """Prints lines, in a terminal wrapped at its width: between words, and never between a number and its unit."""
    if console.is_terminal:
        text = "\n".join(_wrapped(line, console.width) for line in text.splitlines())
    console.print(text, style=style, markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints data for programs: one JSON object, and nothing else."""
    print(json.dumps(data, indent=2, allow_nan=False, default=str))


def _wrapped(line: str, width: int) -> str:
    """A line in several; all but the first are indented more than it is."""
    indent = line[: len(line) - len(line.lstrip())]
    held = _UNIT.sub("\xa0", line.strip())
    wrapped = textwrap.fill(
        held, width, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return wrapped.replace("\xa0", " ")


def print_table(console: Console, table: Table, emphasise: int = 0) -> None:
    """Draws a table; the last `emphasise` columns in bold.

    A table that is wider than the console is drawn in parts, each with the columns that name its lines, so that cells
    are wrapped between words only. Words of a single column that is too wide are folded; nothing is cut off.
    """
    keys, rest = list(range(table.keys)), list(range(table.keys, len(table.headings)))
    strong = set(rest[len(rest) - emphasise :])
    console.print(table.title, style="bold", markup=False)
    while rest:
        count = len(rest)
        while count > 1 and _widths(table, keys + rest[:count], console.width) is None:
            count -= 1
        columns = keys + rest[:count]
        console.print(_drawn(table, columns, _widths(table, columns, console.width), strong))
        console.print()
        rest = rest[count:]


#: Between two columns.
_GAP = 2


def _widths(table: Table, columns: Sequence[int], available: int) -> list[int] | None:
    """The width of each column: what its cells ask for if there is room, else less; None if words would break."""
    cells = [[table.headings[column], *(line[column] for line in table.lines)] for column in columns]
    most = [max(map(cell_len, column)) for column in cells]
    widths = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    spare = available - sum(widths) - _GAP * (len(columns) - 1)
    if spare < 0:
        return None
    while spare and widths != most:
        narrowest = max(range(len(columns)), key=lambda i: most[i] - widths[i])
        widths[narrowest] += 1
        spare -= 1
    return widths


def _drawn(table: Table, columns: Sequence[int], widths: list[int] | None, strong: Container[int]) -> RichTable:
    drawn = RichTable(header_style="dim", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for place, column in enumerate(columns):
        justify: JustifyMethod = "left" if table.words or column < table.keys else "right"
        style, width = ("bold" if column in strong else None), (None if widths is None else widths[place])
        drawn.add_column(table.headings[column], justify=justify, style=style, width=width, overflow="fold")
    for line in table.lines:
        drawn.add_row(*(Text(line[column]) for column in columns))  # not markup: messages have [batch, seq] in them
    return drawn
