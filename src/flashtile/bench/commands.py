"""The benchmark commands without their rendering, which both command lines share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashtile.bench.cases import Case, default_cases, select_cases
from flashtile.bench.host_time import run_host_time
from flashtile.bench.implementations import select_implementations
from flashtile.bench.record import Record, make_record, write_record
from flashtile.bench.runner import Row, run_cases

_HOST_TIME_DEFAULT = {
    "cuda": ["flashtile-triton", "sdpa-flash", "sdpa-cudnn", "fa4"],
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
) -> Record:
    """Measures attention on this machine's device.

    Args:
        cases: patterns of case names; all cases of the device when empty.
        impl: names of implementations; the device's defaults when empty.
        quick: a few cases instead of the table.
        output: file for the record, rewritten after every case, so that a run that is cut short leaves its rows.
        on_case: called with index, number of cases, case and its rows after each case.

    Raises:
        ValueError: a pattern or a name matches nothing.
    """
    device = default_device()
    chosen_cases = select_cases(default_cases(device, quick), list(cases))
    chosen_implementations = select_implementations(list(impl), device)
    record = make_record(device, command_line(), [])

    def after_case(index: int, case: Case, rows: list[Row]) -> None:
        record["rows"] += rows
        if output is not None:
            write_record(record, output)
        on_case(index, len(chosen_cases), case, rows)

    run_cases(chosen_cases, chosen_implementations, device, after_case)
    return record


def bench_host_time(impl: Sequence[str] = (), output: Path | None = None) -> Record:
    """Measures the host time of one small call; arguments as `bench_attention`."""
    device = default_device()
    chosen = select_implementations(list(impl) or _HOST_TIME_DEFAULT[device.type], device)
    record = make_record(device, command_line(), run_host_time(chosen, device))
    if output is not None:
        write_record(record, output)
    return record


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
