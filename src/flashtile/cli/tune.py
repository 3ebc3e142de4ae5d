"""`flashtile tune`: what is asked for, a progress bar, and the table in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashtile.bench.report import Table
from flashtile.bench.start import UserError
from flashtile.cli.call import OPERATIONS, Calls
from flashtile.cli.console import print_table, print_text
from flashtile.cli.explain import parse_dtype
from flashtile.tuning import unavailable_reason

if TYPE_CHECKING:
    from rich.console import Console

    from flashtile.tuning.command import Lookup, TunedRow, TunedTable


def open_table() -> TunedTable:
    """The table of the GPU that is here."""
    device = _gpu()
    from flashtile.tuning.command import TunedTable

    return TunedTable(device)


def _gpu() -> torch.device:
    if (reason := unavailable_reason()) is not None:
        raise UserError(reason)
    return torch.device("cuda", torch.cuda.current_device())


def manage(table: TunedTable, export: Path | None, reset: bool, console: Console) -> bool:
    """Shows, copies or removes the table. False where there is none."""
    if not table.rows and not reset:
        print_text(console, f"there is no table for {table.gpu}; flashtile tune makes one")
        return False
    if export:
        table.export(export)
        print_text(console, f"{len(table.rows)} rows: {export}; FLASHTILE_TUNED={export} makes a process use it")
    elif reset:
        table.reset()
        print_text(console, f"{table.gpu}: kernels are cut by the shipped tables")
    else:
        print_table(console, _in_words(table.rows, f"{table.gpu}: {table.path}"))
    return True


def run(calls: Calls, table: TunedTable, seconds: float, jobs: int | None, again: bool, console: Console) -> bool:
    """Tunes, and prints what was found. False where time was over before all was tuned."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flashtile.tuning import command

    lookups = _lookups(calls, _gpu())
    new = [lookup for lookup in lookups if again or not table.has(lookup)]
    if len(new) < len(lookups):
        print_text(console, f"{len(lookups) - len(new)} are in the table; --again measures them again")
    outcomes = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(new))

        def say(done: int, what: str) -> None:
            progress.update(bar, completed=done, description=what)

        for outcome in command.tune_all(new, table, _gpu(), seconds, say, jobs):
            outcomes.append(outcome)
    found = [outcome.row for outcome in outcomes if outcome.row is not None]
    if found:
        print_table(console, _in_words(found, f"{table.gpu}: {table.path}"))
    for outcome in outcomes:
        if outcome.row is None:
            print_text(console, f"{_name(outcome.lookup)}: {outcome.why}", "yellow")
    return not any(outcome.unfinished for outcome in outcomes)


def _lookups(calls: Calls, device: torch.device) -> list[Lookup]:
    """The questions that kernels of the calls ask, each once."""
    from flashtile.tuning import command

    operations = calls.operations or OPERATIONS
    unknown = [operation for operation in operations if operation not in OPERATIONS]
    if unknown:
        raise UserError(f"expected some of {', '.join(OPERATIONS)}, got {', '.join(unknown)}")
    if calls.heads % calls.heads_kv:
        raise UserError(f"--heads-kv: expected a divisor of --heads {calls.heads}, got {calls.heads_kv}")
    dtypes = [parse_dtype(name) for name in calls.dtype]
    with command.watching() as found:
        if calls.program is not None:
            command.run_program(calls.program)
            return found
        try:
            command.ask(calls, operations, dtypes, device)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from None
    return found


def _in_words(rows: list[TunedRow], title: str) -> Table:
    from flashtile.tuning import command

    lines = []
    for row in rows:
        cut = "as shipped" if row.ms == row.shipped_ms else command.in_words(row.cut)
        times = (f"{ms * 1e3:,.0f} µs" for ms in (row.ms, row.shipped_ms))
        lines.append([f"{row.choice}: {command.in_words(row.key)}", cut, *times, f"{row.shipped_ms / row.ms:.2f} ×"])
    return Table(title, ["for", "cut", "time", "shipped", "faster"], lines, keys=2)


def _name(lookup: Lookup) -> str:
    from flashtile.tuning import command

    return f"{lookup.choice}: {command.in_words(command.as_data(lookup.key))}"
