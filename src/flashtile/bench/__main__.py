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
    default_device,
    describe_choices,
    describe_companions,
    describe_progress,
)
from flashtile.bench.problem import AnyCase
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
    for command in (attention, companions):
        command.add_argument("--cases", nargs="+", default=[], help="patterns of case names, such as '*8192*'")
        command.add_argument("--seconds", type=float, help="time for each phase of each implementation in each case")
        command.add_argument("--list", action="store_true", help="print the cases and implementations, and stop")
    host_time = commands.add_parser("host-time", help="the host's time for one small call")
    for command in (attention, companions, host_time):
        command.add_argument("--impl", nargs="+", default=[], help="implementations, such as flashtile-triton fa4")
        command.add_argument("--output", type=Path, help="JSON file for the record")
    return parser


def _run(options: argparse.Namespace) -> None:
    if options.command == "host-time":
        record = bench_host_time(options.impl, options.output)
        tables = [host_table(record["rows"])]
    elif options.list:
        describe = describe_choices if options.command == "attention" else describe_companions
        print(describe(default_device()))
        return
    elif options.command == "companions":
        chosen = (options.op, options.cases, options.impl, options.output, _progress())
        record = bench_companions(*chosen, seconds=options.seconds)
        tables = [*speed_tables(record["rows"]), *mean_tables(record["rows"])]
    else:
        choice = {"table": options.table, "seconds": options.seconds}
        record = bench_attention(options.cases, options.impl, options.quick, options.output, _progress(), **choice)
        tables = [*speed_tables(record["rows"]), *mean_tables(record["rows"])]
    for table in tables:
        print(plain_text(table), end="\n\n")
    for line in reasons(record["rows"]):
        print("no speed:", line)
    if options.output is not None:
        print("record:", options.output)


def _progress() -> Callable[[int, int, AnyCase, list[Row]], None]:
    begin = time.perf_counter()

    def on_case(index: int, total: int, case: AnyCase, rows: list[Row]) -> None:
        line = describe_progress(index, total, case, rows, time.perf_counter() - begin)
        print(line, file=sys.stderr, flush=True)

    return on_case


if __name__ == "__main__":
    sys.exit(main())
