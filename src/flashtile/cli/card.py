"""`flashtile bench card`: one record of a GPU, checked and measured, to hand in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from flashtile.bench import card, commands
from flashtile.bench.base import AnyCase, is_ours
from flashtile.bench.record import Recorder, Row, grouped, require_writable, write_record
from flashtile.bench.report import reasons, verdict, verdict_table
from flashtile.cli import doctor
from flashtile.cli.bench import progress
from flashtile.cli.console import make_console, print_table, print_text
from flashtile.tuning import rows_in_use

#: Processes that compile at once: each has a context of its own in the GPU's memory.
_COMPILERS = 4
_NO_COMMIT = (
    "The record will not say which commit it measures, because flashtile is not imported from a checkout. "
    'Install it with pip install -e ".[cli]" in the checkout for a record to hand in.'
)


def make_card(console: Console, output: Path | None, jobs: int | None) -> bool:
    """Checks the kernels, measures the cases of `bench/card.py`, writes the record (`output`: None for one in this
    folder that is named after the GPU), and shows the verdict. Returns whether every result of ours was right. `jobs`:
    processes that compile before a part is measured; None for what suits the machine."""
    device = commands.default_device()
    recorder = Recorder(device, card.COMMAND, None)
    output = output or Path(card.file_name(recorder.record))
    require_writable(output)
    if recorder.record["commit"] is None:
        print_text(console, _NO_COMMIT, "yellow")
    checks = _summary(doctor.run_checks(console, show=True))
    tuned = [row._asdict() for row in rows_in_use(device)]
    if jobs is None:
        jobs = min(_COMPILERS, os.cpu_count() or 1) if device.type == "cuda" else 0

    parts = card.card_cases(device)
    total, done = sum(map(len, parts.values())), 0
    with progress(make_console(stderr=True)) as (on_case, announce):
        for command, cases in parts.items():

            def on_overall_case(index: int, _: int, case: AnyCase, rows: list[Row] | None, before: int = done) -> None:
                write_record(card.public(recorder.record, checks, tuned), output)
                on_case(before + index, total, case, rows)

            chosen = commands.choose_implementations(command, [], device)
            commands.measure_cases(
                command, cases, chosen, recorder, jobs=jobs, on_case=on_overall_case, announce=announce
            )
            done += len(cases)

    ours = [row for row in recorder.rows if is_ours(row["impl"])]
    table = verdict_table(recorder.rows)
    print_table(console, table, emphasise=1)
    for line in reasons(ours):
        print_text(console, f"no speed: {line}", "yellow")
    print_text(console, verdict(table))
    print_text(console, f"record: {output}\n{card.HAND_IN}")
    wrong = any(str(row.get("why")).startswith("wrong result") for row in ours)
    return not wrong and not any(check["wrong"] for check in checks)


def _summary(results: list[doctor.KernelResult]) -> list[dict[str, Any]]:
    """The checks of each backend and operation, as the record has them."""
    by_operation = grouped(results, lambda result: (result.backend, result.check.operation))
    return [
        {
            "backend": backend,
            "operation": operation,
            "calls": len(found),
            "wrong": [f"{result.check.name}: {result.problem}" for result in found if result.problem],
        }
        for (backend, operation), found in sorted(by_operation.items())
    ]
