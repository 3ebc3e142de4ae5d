"""The benchmark commands without their rendering."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flashtile.bench import breakdown
from flashtile.bench.ahead import compile_ahead
from flashtile.bench.cases import DTYPES, select_named
from flashtile.bench.companions import implementations as companion_implementations
from flashtile.bench.companions import tables as companion_tables
from flashtile.bench.companions.ahead import compile_ahead as compile_companions_ahead
from flashtile.bench.companions.problem import CompanionProblem
from flashtile.bench.decode import cases as decode_cases
from flashtile.bench.decode import implementations as decode_implementations
from flashtile.bench.decode.problem import problem_of as decode_problem
from flashtile.bench.errors import ChoiceError
from flashtile.bench.first_call import first_calls
from flashtile.bench.host_time import run_host_time
from flashtile.bench.implementations import IMPLEMENTATIONS, select_implementations
from flashtile.bench.problem import AnyCase, AnyImplementation, Problem
from flashtile.bench.record import Record, Row, make_record, require_writable, write_record
from flashtile.bench.runner import run_cases
from flashtile.bench.summary import is_ours
from flashtile.bench.tables import cases_of, select_cases, tables
from flashtile.bench.training import cases as training_cases
from flashtile.bench.training import implementations as training_implementations
from flashtile.bench.training.problem import TrainProblem

_HOST_TIME_DEFAULT = {
    "cuda": ["flashtile-hopper", "flashtile-triton", "sdpa-flash", "sdpa-cudnn", "fa4"],
    "cpu": ["flashtile-cpu", "sdpa-flash"],
}

#: Called with index, number of cases and case: before a case is measured with None, and afterwards with its rows.
OnCase = Callable[[int, int, Any, list[Row] | None], None]


def _nothing(index: int, total: int, case: AnyCase, rows: list[Row] | None) -> None:
    pass


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bench_attention(
    cases: Sequence[str] = (),
    impl: Sequence[str] = (),
    quick: bool = False,
    output: Path | None = None,
    on_case: OnCase = _nothing,
    *,
    table: Sequence[str] = (),
    seconds: float | None = None,
    jobs: int = 0,
) -> Record:
    """Measures attention on this machine's device.

    Args:
        cases: patterns of case names, each perhaps several with commas; all cases of the tables when empty.
        impl: names of implementations, likewise; the device's defaults when empty.
        quick: a few cases instead of the tables.
        output: file for the record, rewritten after every case, so that a run that is cut short leaves its rows.
        on_case: called before and after each case, see `OnCase`.
        table: names of tables, likewise, or "all"; the device's default table when empty.
        seconds: time for the samples of one phase of one implementation; None for the device's default.
        jobs: processes that compile before anything is measured, and that measure first calls of cases with a function;
            0 = each case compiles when its turn comes.

    Raises:
        ChoiceError: a pattern or a name matches nothing.
    """
    device = default_device()
    if jobs is None:
        jobs = (os.cpu_count() or 2) // 2 if device.type == "cuda" else 0
    chosen_cases = select_cases(cases_of(device, _split(table), quick), _split(cases))
    chosen_implementations = select_implementations(_split(impl), device)
    without = [case for case in chosen_cases if case.function is None]
    if jobs and without:
        compile_ahead(without, chosen_implementations, device, jobs)
    with first_calls(chosen_cases, chosen_implementations, device, jobs) as problem:
        return _run(chosen_cases, chosen_implementations, device, output, on_case, seconds, problem)


def bench_companions(
    op: Sequence[str] = (),
    cases: Sequence[str] = (),
    impl: Sequence[str] = (),
    output: Path | None = None,
    on_case: OnCase = _nothing,
    *,
    quick: bool = False,
    seconds: float | None = None,
    jobs: int = 0,
) -> Record:
    """Measures the operations beside attention on this machine's device.

    Args:
        op: names of operations, each perhaps several with commas; all when empty.
        cases, impl, output, on_case, seconds, jobs: as `bench_attention`.
        quick: the first case of each operation alone, and on a CPU without the peer that torch.compile makes, because
            compiling takes most of the time.

    Raises:
        ChoiceError: a pattern or a name matches nothing.
    """
    device = default_device()
    chosen_cases = select_cases(companion_tables.cases_of(device, _split(op), quick), _split(cases))
    chosen = companion_implementations.select_implementations(_split(impl), device, quick)
    if impl:
        _require_packages(chosen)
    if jobs:
        compile_companions_ahead(chosen_cases, chosen, device, jobs)
    return _run(chosen_cases, chosen, device, output, on_case, seconds, CompanionProblem)


def bench_decode(
    cases: Sequence[str] = (),
    impl: Sequence[str] = (),
    quick: bool = False,
    output: Path | None = None,
    on_case: OnCase = _nothing,
    *,
    seconds: float | None = None,
) -> Record:
    """Measures steps of decoding over a cache, and copies, on this machine's device.

    Args:
        quick: a few cases instead of all.
        cases, impl, output, on_case, seconds: as `bench_attention`.

    Raises:
        ChoiceError: a pattern or a name matches nothing.
    """
    device = default_device()
    known = decode_cases.decode_cases(device)
    chosen_cases = select_cases(decode_cases.quick_cases(known) if quick else known, _split(cases))
    chosen: list[AnyImplementation] = [*decode_implementations.select_implementations(_split(impl), device)]
    chosen.append(decode_implementations.COPY)
    return _run(chosen_cases, chosen, device, output, on_case, seconds, decode_problem)


def bench_train(
    model: Sequence[str] = (),
    impl: Sequence[str] = (),
    output: Path | None = None,
    on_case: OnCase = _nothing,
    *,
    quick: bool = False,
    batch: int | None = None,
    context: Sequence[int] = (),
    after: int = 0,
    dropout: float = 0.0,
    seconds: float | None = None,
) -> Record:
    """Measures training steps on this machine's device.

    Args:
        model: names of models, each perhaps several with commas; those of the device when empty.
        quick: the first of these models alone.
        batch: sequences in a step; None for the case's own number, or as many as have its tokens.
        context: lengths of the sequences; the case's own when empty.
        after: steps of training on text before what is measured, so that scores are those of a trained model.
        dropout: probability of dropping an element of embeddings, attention weights and residual branches.
        impl, output, on_case, seconds: as `bench_attention`.

    Raises:
        ChoiceError: a name matches nothing, a package is not installed, or `dropout` is no probability below 1.
    """
    device = default_device()
    chosen = training_implementations.select_implementations(_split(impl), device)
    _require_packages(chosen)
    cases = training_cases.cases_of(device, _split(model), batch, context, after, dropout)[: 1 if quick else None]
    return _run(cases, chosen, device, output, on_case, seconds, TrainProblem)


def _require_packages(
    chosen: Sequence[companion_implementations.Implementation | training_implementations.Implementation],
) -> None:
    """Says what is missing before anything is measured.

    Raises:
        ChoiceError: an implementation needs a package that is not installed.
    """
    missing = {each.name: why for each in chosen if (why := each.missing())}
    if missing:
        there = [each.name for each in chosen if each.name not in missing]
        raise ChoiceError(
            f"--impl: expected implementations that can run here, got {', '.join(missing)}: "
            f"{', '.join(dict.fromkeys(missing.values()))}; install it"
            + (f", or measure the others: --impl {' '.join(there)}" if there else "")
        )


def _run(
    cases: Sequence[Any],
    implementations: Sequence[AnyImplementation],
    device: torch.device,
    output: Path | None,
    on_case: OnCase,
    seconds: float | None,
    problem: Callable[[Any, torch.device], Problem],
) -> Record:
    """Runs cases into a record."""
    record = make_record(device, command_line(), [])

    def keep_rows(index: int, case: Any, rows: list[Row] | None) -> None:
        if rows is not None:
            record["rows"] += rows
            if output is not None:
                write_record(record, output)
        on_case(index, len(cases), case, rows)

    run_cases(cases, implementations, device, keep_rows, seconds, problem)
    return record


def bench_host_time(impl: Sequence[str] = (), output: Path | None = None) -> Record:
    """Measures the host time of one small call; arguments as `bench_attention`."""
    device = default_device()
    chosen = select_implementations(_split(impl) or _HOST_TIME_DEFAULT[device.type], device)
    record = make_record(device, command_line(), run_host_time(chosen, device))
    if output is not None:
        write_record(record, output)
    return record


def bench_breakdown(
    impl: Sequence[str] = (),
    output: Path | None = None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    dropout_p: float | None = None,
    full: bool = False,
    dtype: str | None = None,
    seconds: float | None = None,
    plot: Path | None = None,
) -> Record:
    """Measures the steps of standard attention beside one call.

    Args:
        impl, output, seconds: as `bench_attention`; ours when `impl` is empty.
        batch, seq, heads, head_dim, dropout_p, dtype: of the case; None for those of the device's own case.
        full: without the causal mask.
        plot: file for a picture; its ending says the format.

    Raises:
        ChoiceError: a name or a value does not fit, matplotlib is missing, the picture cannot be drawn there, or the
            matrices are too large.
    """
    if plot is not None:
        breakdown.check_picture(plot)
    device = default_device()
    case = breakdown.default_case(device)
    if dtype is not None:
        (dtype,) = select_named("--dtype", [dtype], {name: name for name in DTYPES}, device.type)
    wanted: dict[str, Any] = {"B": batch, "S": seq, "H": heads, "Hkv": heads, "D": head_dim, "Dv": head_dim}
    wanted |= {"dropout_p": dropout_p, "dtype": dtype, "causal": False if full else None}
    case = replace(case, **{name: value for name, value in wanted.items() if value is not None})
    rows = breakdown.run_breakdown(case, device, _split(impl), seconds)
    record = make_record(device, command_line(), rows)
    if output is not None:
        write_record(record, output)
    if plot is not None:
        breakdown.draw_breakdown(rows, plot)
    return record


def _split(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in value.split(",") if part]


def describe_choices(device: torch.device) -> str:
    """Names of the cases of each table and of the implementations of a device, for reading."""
    lists = {f"cases of table {name}": [case.name for case in cases] for name, cases in tables(device).items()}
    lists["implementations"] = [i.name for i in IMPLEMENTATIONS if device.type in i.devices]
    return _listed(lists)


def describe_companions(device: torch.device) -> str:
    """The same of the companion operations."""
    cases = companion_tables.companion_cases(device)
    lists = {f"cases of {op}": [case.name for case in cases if case.op == op] for op in companion_tables.OPERATIONS}
    here = [i.name for i in companion_implementations.IMPLEMENTATIONS if device.type in i.devices]
    return _listed({**lists, "implementations": here})


def describe_training(device: torch.device) -> str:
    """The same of training."""
    names = [case.name for case in training_cases.training_cases(device)]
    return _listed({"cases": names, "implementations": [i.name for i in training_implementations.IMPLEMENTATIONS]})


def describe_decoding(device: torch.device) -> str:
    """The same of decoding."""
    names = [case.name for case in decode_cases.decode_cases(device)]
    here = [i.name for i in decode_implementations.IMPLEMENTATIONS if device.type in i.devices]
    return _listed({"cases": names, "implementations": here})


def _listed(lists: dict[str, list[str]]) -> str:
    return "\n".join("\n  ".join([f"{heading}:", *names]) for heading, names in lists.items())


#: Name of a command -> what lists its choices.
DESCRIPTIONS: dict[str, Callable[[torch.device], str]] = {
    "attention": describe_choices,
    "companions": describe_companions,
    "decode": describe_decoding,
    "train": describe_training,
}
#: Name of a command -> what measures. All take `impl` and `output`; those with cases also `on_case`.
_MEASURES: dict[str, Callable[..., Record]] = {
    "attention": bench_attention,
    "companions": bench_companions,
    "decode": bench_decode,
    "train": bench_train,
    "host-time": bench_host_time,
    "breakdown": bench_breakdown,
}
#: Those without cases that follow one another.
WITHOUT_CASES = ("host-time", "breakdown")


def measure(command: str, options: Mapping[str, Any], output: Path | None, on_case: OnCase) -> Record:
    """Runs a command with its options, which have the names of its function's arguments; None = not given.

    Raises:
        ChoiceError: `output` cannot be written, `seconds` are no time, or as the command's function.
    """
    require_writable(output)
    check_seconds(options.get("seconds"))
    given = {name: value for name, value in options.items() if value is not None}
    if command not in WITHOUT_CASES:
        given["on_case"] = on_case
    return _MEASURES[command](output=output, **given)


def check_seconds(seconds: float | None) -> None:
    """Refuses what is no time for samples: below zero, without an end, or NaN. Zero is for one sample."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ChoiceError(f"--seconds: expected a time of at least 0, got {seconds}; 0.1 is a tenth of a second")


def as_arguments(command: str, options: Mapping[str, Any], device: torch.device) -> list[str]:
    """The same as arguments of `flashtile bench`; without `impl`, ours alone."""
    arguments = [command]
    for name, value in {**options, "impl": options.get("impl") or ours(command, device)}.items():
        if value is True:
            arguments.append(f"--{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        elif isinstance(value, str):
            arguments += [f"--{name}", value]
        elif value:
            arguments += [f"--{name}", *_split(list(map(str, value)))]
    return arguments


def ours(command: str, device: torch.device) -> list[str]:
    """Names of our implementations that a command measures on a device when none is named."""
    if command == "companions":
        chosen: Sequence[AnyImplementation] = companion_implementations.select_implementations([], device)
    elif command == "decode":
        chosen = decode_implementations.select_implementations([], device)
    elif command == "train":
        chosen = training_implementations.select_implementations([], device)
    else:
        chosen = select_implementations([], device)
    return [implementation.name for implementation in chosen if is_ours(implementation.name)]


def describe_progress(index: int, total: int, case: AnyCase, rows: list[Row], seconds: float) -> str:
    """A line about a case that was measured."""
    speeds = ", ".join(f"{row['impl']} {row['phase']} {_speed(row):.4g}" for row in rows if row["ms"] is not None)
    return f"[{index + 1}/{total}, {seconds:.0f} s] {case.name}: {speeds or 'no speed'}"


def _speed(row: Row) -> float:
    keys = ("tokens_per_s", "tflops", "gbps")
    return next(row[key] for key in keys if row.get(key) is not None)


def command_line() -> str:
    """How this run was started: the arguments as given, without the place of the program or of its output."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument.startswith(("--output=", "--plot=")):
            skip = False
        elif argument in ("--output", "-o", "--plot"):
            skip = True
        else:
            kept.append(argument)
    return shlex.join(["flashtile", *kept])
