"""`python -m flashtile.bench`: the benchmarks with the standard library alone, for bare GPU machines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flashtile.bench.errors import ChoiceError
from flashtile.bench.numpy_warning import silence_numpy_warning

if TYPE_CHECKING:
    from flashtile.bench.problem import AnyCase
    from flashtile.bench.runner import Row

#: Name of a command -> its options, as its function in `commands` calls them.
_OPTIONS = {
    "attention": ("table", "cases", "impl", "quick", "seconds"),
    "companions": ("op", "cases", "impl", "quick", "seconds", "jobs"),
    "decode": ("cases", "impl", "quick", "seconds"),
    "train": ("model", "impl", "quick", "batch", "context", "after", "seconds"),
    "host-time": ("impl",),
    "breakdown": (*("impl", "batch", "seq", "heads", "head_dim", "dropout_p", "full", "dtype", "seconds", "plot"),),
}


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)  # what follows imports torch, which help does not need
    try:
        if options.command == "report":
            from flashtile.bench.html.report import write_report

            written = write_report(options.records, options.output)
            for note in written.notes:
                print(note)
            print(f"{written.charts} charts: {options.output}")
        else:
            _run(options)
    except ChoiceError as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashtile.bench", description="Benchmarks of flashtile.")
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="forward and backward, ours beside the peers")
    attention.add_argument("--table", nargs="+", default=[], help="tables of cases, or 'all'; --list names them")
    companions = commands.add_parser("companions", help="norms, rotary embedding, softmax and others, likewise")
    companions.add_argument("--op", nargs="+", default=[], help="operations; all by default, --list names them")
    companions.add_argument("--jobs", type=_positive, help="processes that compile before anything is measured")
    decode = commands.add_parser("decode", help="steps of decoding over a cache, ours beside the peers")
    train = commands.add_parser("train", help="training steps of GPT-2, ours beside transformers")
    train.add_argument("--model", nargs="+", default=[], help="models; all by default, --list names them")
    train.add_argument("--batch", type=_positive, help="sequences in a step")
    train.add_argument("--context", type=_positive, nargs="+", default=[], help="tokens of a sequence")
    train.add_argument("--after", type=_positive, default=0, help="steps of training before what is measured")
    for command in (attention, companions, decode):
        command.add_argument("--cases", nargs="+", default=[], help="patterns of case names, such as '*8192*'")
    for command in (attention, companions, decode, train):
        command.add_argument("--quick", action="store_true", help="a few cases instead of all")
        command.add_argument("--seconds", type=float, help="time for each phase of each implementation in each case")
        command.add_argument("--list", action="store_true", help="print the cases and implementations, and stop")
    host_time = commands.add_parser("host-time", help="the host's time for one small call")
    report = commands.add_parser("report", help="records as one page of HTML")
    report.add_argument("records", nargs="+", type=Path, help="JSON files")
    report.add_argument("--output", "-o", type=Path, default=Path("report.html"), help="the page")
    breakdown = commands.add_parser("breakdown", help="the steps of standard attention, beside one call of ours")
    for name in ("batch", "seq", "heads", "head-dim"):
        breakdown.add_argument(f"--{name}", type=_positive)
    breakdown.add_argument("--dropout-p", type=float, help="probability of dropping a weight")
    breakdown.add_argument("--full", action="store_true", help="without the causal mask")
    breakdown.add_argument("--dtype", help="fp16, bf16, fp32 or fp64")
    breakdown.add_argument("--seconds", type=float, help="time for each step")
    breakdown.add_argument("--plot", type=Path, help="file for a picture; needs matplotlib")
    for command in (attention, companions, decode, train, host_time, breakdown):
        command.add_argument("--impl", nargs="+", default=[], help="implementations, such as flashtile-triton fa4")
        command.add_argument("--output", type=Path, help="JSON file for the record")
        beside = command.add_mutually_exclusive_group()
        beside.add_argument("--compare", type=Path, metavar="RECORD", help="an earlier record: speeds beside its own")
        beside.add_argument(
            "--against", metavar="REF", help="a commit: the same cases there and here in turns, ours alone by default"
        )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _run(options: argparse.Namespace) -> None:
    from flashtile.bench.commands import DESCRIPTIONS, default_device, measure
    from flashtile.bench.compare import read_record
    from flashtile.bench.outcome import compare_with_commit, report_of
    from flashtile.bench.report import plain_text

    command, device = options.command, default_device()
    choice = {name: getattr(options, name) for name in _OPTIONS[command]}
    if getattr(options, "list", False):
        print(DESCRIPTIONS[command](device))
        return
    if options.against is not None:
        report = compare_with_commit(command, choice, options.against, options.output, _announce)
    else:
        earlier = None if options.compare is None else read_record(options.compare)
        record = measure(command, choice, options.output, _progress())
        report = report_of(record, earlier)
    for table in report.tables:
        print(plain_text(table), end="\n\n")
    for line in report.notes:
        print(line)
    if options.output is not None:
        print("record:", options.output)


def _announce(tree: str, runs: int, total: int) -> None:
    print(f"[{runs + 1}/{total}] {tree}", file=sys.stderr, flush=True)


def _progress() -> Callable[[int, int, AnyCase, list[Row]], None]:
    from flashtile.bench.commands import describe_progress

    begin = time.perf_counter()

    def on_case(index: int, total: int, case: AnyCase, rows: list[Row]) -> None:
        line = describe_progress(index, total, case, rows, time.perf_counter() - begin)
        print(line, file=sys.stderr, flush=True)

    return on_case


if __name__ == "__main__":
    silence_numpy_warning()
    sys.exit(main())
