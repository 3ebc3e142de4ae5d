"""The benchmark commands without their rendering, which both command lines share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashtile.bench.cases import Case
from flashtile.bench.host_time import run_host_time
from flashtile.bench.implementations import IMPLEMENTATIONS, select_implementations
from flashtile.bench.record import Record, make_record, write_record
from flashtile.bench.runner import Row, run_cases
from flashtile.bench.tables import cases_of, select_cases, tables

_HOST_TIME_DEFAULT = {
    "cuda": ["flashtile-hopper", "flashtile-triton", "sdpa-flash", "sdpa-cudnn", "fa4"],
    "cpu": ["flashtile-cpu", "sdpa-flash"],
}


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bench_attention(
    cases: Sequence[str] = (),
    impl: Sequence[str] = (),
    quick: bool = False,
    output: Path | None = None,
    on_case: Callable[[int, int, Case, list[Row]], None] = lambda index, total, case, rows: None,
    *,
    table: Sequence[str] = (),
    seconds: float | None = None,
) -> Record:
    """Measures attention on this machine's device.

    Args:
        cases: patterns of case names, each perhaps several with commas; all cases of the tables when empty.
        impl: names of implementations, likewise; the device's defaults when empty.
        quick: a few cases instead of the tables.
        output: file for the record, rewritten after every case, so that a run that is cut short leaves its rows.
        on_case: called with index, number of cases, case and its rows after each case.
        table: names of tables, likewise, or "all"; the device's default table when empty.
        seconds: time for the samples of one phase of one implementation; None for the device's default.

    Raises:
        ChoiceError: a pattern or a name matches nothing.
    """
    device = default_device()
    chosen_cases = select_cases(cases_of(device, _split(table), quick), _split(cases))
    chosen_implementations = select_implementations(_split(impl), device)
    record = make_record(device, command_line(), [])

    def after_case(index: int, case: Case, rows: list[Row]) -> None:
        record["rows"] += rows
        if output is not None:
            write_record(record, output)
        on_case(index, len(chosen_cases), case, rows)

    run_cases(chosen_cases, chosen_implementations, device, after_case, seconds)
    return record


def bench_host_time(impl: Sequence[str] = (), output: Path | None = None) -> Record:
    """Measures the host time of one small call; arguments as `bench_attention`."""
    device = default_device()
    chosen = select_implementations(_split(impl) or _HOST_TIME_DEFAULT[device.type], device)
    record = make_record(device, command_line(), run_host_time(chosen, device))
    if output is not None:
        write_record(record, output)
    return record


def _split(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]


def describe_choices(device: torch.device) -> str:
    """Names of the cases of each table and of the implementations of a device, for reading."""
    lists = {f"cases of table {name}": [case.name for case in cases] for name, cases in tables(device).items()}
    lists["implementations"] = [i.name for i in IMPLEMENTATIONS if device.type in i.devices]
    return "\n".join("\n  ".join([f"{heading}:", *names]) for heading, names in lists.items())


def describe_progress(index: int, total: int, case: Case, rows: list[Row], seconds: float) -> str:
    """A line about a case that was measured."""
    speeds = ", ".join(f"{row['impl']} {row['phase']} {row['tflops']:.3g}" for row in rows if row["ms"] is not None)
    return f"[{index + 1}/{total}, {seconds:.0f} s] {case.name}: {speeds or 'no speed'}"


def command_line() -> str:
    """How this run was started: the arguments as given, without the place of the program or of its output."""
    program = "flashtile" if Path(sys.argv[0]).name != "__main__.py" else "python -m flashtile.bench"
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.startswith("--output="):
            skip = False
        elif argument in ("--output", "-o"):
            skip = True
        else:
            kept.append(argument)
    return " ".join([program, *kept])
