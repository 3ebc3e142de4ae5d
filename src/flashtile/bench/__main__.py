"""`python -m flashtile.bench`: the benchmarks with the standard library alone, for bare GPU machines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashtile.bench.cases import ChoiceError
from flashtile.bench.commands import (
    bench_attention,
    bench_companions,
    bench_host_time,
    bench_train,
    default_device,
    describe_choices,
    describe_companions,
    describe_progress,
    describe_training,
)
from flashtile.bench.problem import AnyCase
from flashtile.bench.record import Record
from flashtile.bench.report import host_table, mean_tables, plain_text, reasons, speed_tables
from flashtile.bench.runner import Row


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except ChoiceError as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashtile.bench", description="Benchmarks of flashtile.")
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="forward and backward, ours beside the peers")
    attention.add_argument("--table", nargs="+", default=[], help="tables of cases, or 'all'; --list names them")
    attention.add_argument("--quick", action="store_true", help="a few cases instead of the tables")
    companions = commands.add_parser("companions", help="norms, rotary embedding, softmax and others, likewise")
    companions.add_argument("--op", nargs="+", default=[], help="operations; all by default, --list names them")
    companions.add_argument(
        "--jobs", type=_positive, default=0, help="processes that compile before anything is measured"
    )
    train = commands.add_parser("train", help="training steps of GPT-2, ours beside transformers")
    train.add_argument("--model", nargs="+", default=[], help="models; all by default, --list names them")
    train.add_argument("--batch", type=_positive, help="sequences in a step")
    for command in (attention, companions):
        command.add_argument("--cases", nargs="+", default=[], help="patterns of case names, such as '*8192*'")
    for command in (attention, companions, train):
        command.add_argument("--seconds", type=float, help="time for each phase of each implementation in each case")
        command.add_argument("--list", action="store_true", help="print the cases and implementations, and stop")
    host_time = commands.add_parser("host-time", help="the host's time for one small call")
    for command in (attention, companions, train, host_time):
        command.add_argument("--impl", nargs="+", default=[], help="implementations, such as flashtile-triton fa4")
        command.add_argument("--output", type=Path, help="JSON file for the record")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _run(options: argparse.Namespace) -> None:
    if options.command != "host-time" and options.list:
        print(_DESCRIPTIONS[options.command](default_device()))
        return
    record = _RUNS[options.command](options)
    rows = record["rows"]
    tables = [host_table(rows)] if options.command == "host-time" else [*speed_tables(rows), *mean_tables(rows)]
    for table in tables:
        print(plain_text(table), end="\n\n")
    for line in reasons(rows):
        print("no speed:", line)
    if options.output is not None:
        print("record:", options.output)


def _run_attention(options: argparse.Namespace) -> Record:
    choice = {"table": options.table, "seconds": options.seconds}
    return bench_attention(options.cases, options.impl, options.quick, options.output, _progress(), **choice)


def _run_companions(options: argparse.Namespace) -> Record:
    chosen = (options.op, options.cases, options.impl)
    choice = {"seconds": options.seconds, "jobs": options.jobs}
    return bench_companions(*chosen, options.output, _progress(), **choice)


def _run_train(options: argparse.Namespace) -> Record:
    choice = {"batch": options.batch, "seconds": options.seconds}
    return bench_train(options.model, options.impl, options.output, _progress(), **choice)


def _run_host_time(options: argparse.Namespace) -> Record:
    return bench_host_time(options.impl, options.output)


_RUNS = {
    "attention": _run_attention,
    "companions": _run_companions,
    "train": _run_train,
    "host-time": _run_host_time,
}
_DESCRIPTIONS = {"attention": describe_choices, "companions": describe_companions, "train": describe_training}


def _progress() -> Callable[[int, int, AnyCase, list[Row]], None]:
    begin = time.perf_counter()

    def on_case(index: int, total: int, case: AnyCase, rows: list[Row]) -> None:
        line = describe_progress(index, total, case, rows, time.perf_counter() - begin)
        print(line, file=sys.stderr, flush=True)

    return on_case


if __name__ == "__main__":
    sys.exit(main())
