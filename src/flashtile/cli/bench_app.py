"""The commands of `flashtile bench`: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from flashtile.bench.start import wait_without_spinning
from flashtile.cli.console import make_console, run_command

bench = typer.Typer(
    help="Measure speed beside other implementations on this machine. Several names are separated by spaces or commas.",
    no_args_is_help=True,
)


class _Command(TyperCommand):
    """A command without positional arguments, whose lists are words: `--impl a b` is `--impl a --impl b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the context is click's or typer's copy of it
        lists = {name for each in self.params if isinstance(each, TyperOption) and each.multiple for name in each.opts}
        option, words = "", 0  # the last option, and how many words have followed it
        written: list[str] = []
        for argument in args:
            if argument.startswith("-"):
                option, words = argument, 0
            else:
                words += 1
                if words > 1 and option in lists:
                    written.append(option)
            written.append(argument)
        return super().parse_args(ctx, written)


_Impl = Annotated[
    list[str] | None, typer.Option("--impl", metavar="NAMES", help="Implementations, such as flashtile-triton fa4.")
]
_Cases = Annotated[
    list[str] | None, typer.Option(metavar="PATTERNS", help="Patterns of case names, such as '*-causal-*'.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="A few cases instead of all: about a minute on two CPU cores.")]
_Seconds = Annotated[float | None, typer.Option(help="Time for each phase of each implementation in each case.")]
_Jobs = Annotated[int | None, typer.Option(min=1, help="Processes that compile before anything is measured.")]
_Show = Annotated[bool, typer.Option("--list", help="Print the cases and implementations, and stop.")]
_Record = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the record.")]
_Compare = Annotated[
    Path | None, typer.Option(metavar="RECORD", help="An earlier record: print speeds beside its own.")
]
_Against = Annotated[
    str | None,
    typer.Option(metavar="REF", help="A commit: the same cases there and here in turns; ours alone by default."),
]


@bench.command("attention", cls=_Command)
def bench_attention(
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Tables of cases, or 'all'; --list names them.")
    ] = None,
    cases: _Cases = None,
    impl: _Impl = None,
    quick: _Quick = False,
    seconds: _Seconds = None,
    jobs: _Jobs = None,
    output: _Record = None,
    compare: _Compare = None,
    against: _Against = None,
    show: _Show = False,
) -> None:
    """Forward and backward of attention, ours beside the peers; wrong results get no speed."""
    choice = {"table": table, "cases": cases, "impl": impl, "quick": quick, "seconds": seconds, "jobs": jobs}
    _measure("attention", choice, output, compare, against, show)


@bench.command("companions", cls=_Command)
def bench_companions(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Operations; --list names them. Default: all.")
    ] = None,
    cases: _Cases = None,
    impl: _Impl = None,
    quick: _Quick = False,
    seconds: _Seconds = None,
    jobs: _Jobs = None,
    output: _Record = None,
    compare: _Compare = None,
    against: _Against = None,
    show: _Show = False,
) -> None:
    """Forward and backward of the operations beside attention, ours beside the peers; wrong results get no speed."""
    choice = {"op": op, "cases": cases, "impl": impl, "quick": quick, "seconds": seconds, "jobs": jobs}
    _measure("companions", choice, output, compare, against, show)


@bench.command("serving", cls=_Command)
def bench_serving(
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Tables of cases; --list names them. Default: all.")
    ] = None,
    cases: _Cases = None,
    impl: _Impl = None,
    quick: _Quick = False,
    seconds: _Seconds = None,
    jobs: _Jobs = None,
    output: _Record = None,
    compare: _Compare = None,
    against: _Against = None,
    show: _Show = False,
) -> None:
    """Tokens, chunks and mixed batches over key/value caches, ours beside the peers; wrong results get no speed."""
    choice = {"table": table, "cases": cases, "impl": impl, "quick": quick, "seconds": seconds, "jobs": jobs}
    _measure("serving", choice, output, compare, against, show)


@bench.command("train", cls=_Command)
def bench_train(
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Models; --list names them. Default: all.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="NUMBERS", help="Tokens of a sequence; each number is measured."),
    ] = None,
    after: Annotated[int, typer.Option(min=0, help="Steps of training before what is measured.")] = 0,
    dropout: Annotated[float, typer.Option(min=0, help="Probability of each of GPT-2's dropouts.")] = 0.0,
    impl: _Impl = None,
    quick: _Quick = False,
    seconds: _Seconds = None,
    output: _Record = None,
    compare: _Compare = None,
    against: _Against = None,
    show: _Show = False,
) -> None:
    """Training steps of GPT-2 from the same weights, ours beside transformers; wrong losses get no speed."""
    choice = {
        "model": model,
        "impl": impl,
        "quick": quick,
        "batch": batch,
        "context": context,
        "after": after,
        "dropout": dropout,
        "seconds": seconds,
    }
    _measure("train", choice, output, compare, against, show)


@bench.command("host-time", cls=_Command)
def bench_host_time(
    impl: _Impl = None, output: _Record = None, compare: _Compare = None, against: _Against = None
) -> None:
    """The host's own time for one small call, forward and backward."""
    _measure("host-time", {"impl": impl}, output, compare, against)


@bench.command("breakdown", cls=_Command)
def bench_breakdown(
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Size of a head.")] = None,
    dropout_p: Annotated[float | None, typer.Option(min=0, help="Probability of dropping a weight.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Without the causal mask.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16, fp32 or fp64.")] = None,
    impl: _Impl = None,
    seconds: _Seconds = None,
    output: _Record = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture; needs matplotlib.")] = None,
    compare: _Compare = None,
    against: _Against = None,
) -> None:
    """Where standard attention spends its time: each of its steps, beside one call of ours."""
    sizes = {"batch": batch, "seq": seq, "heads": heads, "head_dim": head_dim, "dropout_p": dropout_p}
    choice = {**sizes, "full": full, "dtype": dtype, "impl": impl, "seconds": seconds, "plot": plot}
    _measure("breakdown", choice, output, compare, against)


@bench.command("distributed", cls=_Command)
def bench_distributed(
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file for the record.")],
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Processes, one for each GPU. Default: all GPUs; two on a CPU.")
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, metavar="NUMBERS", help="Some of the table's lengths, such as 131072.")
    ] = None,
    mask: Annotated[str, typer.Option(help="both, causal or full: the cases with this mask.")] = "both",
    impl: _Impl = None,
    quick: Annotated[bool, typer.Option("--quick", help="On GPUs only the cases with 32k and 128k tokens.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for the samples of each phase.")] = 0.25,
    profile: Annotated[
        bool, typer.Option("--profile", help="Where each one's time goes, and how much of it is hidden.")
    ] = False,
    limit: Annotated[float, typer.Option(min=0, help="Seconds after which nothing new is started.")] = 240.0,
) -> None:
    """Context parallelism over the GPUs of this machine, ours beside PyTorch's own; wrong results get no speed.

    A machine without a GPU has one case, of 64 tokens a process, which tries the code and tells no speeds of GPUs.
    """

    def work() -> bool:
        from flashtile.bench import distributed

        names = [part for name in impl or () for part in name.split(",") if part]
        distributed.bench_distributed(
            output,
            gpus=gpus,
            quick=quick,
            lengths=lengths or (),
            mask=mask,
            impl=names,
            seconds=seconds,
            profile=profile,
            limit=limit,
        )
        return True

    run_command(work)


def _measure(
    command: str,
    choice: dict[str, Any],
    output: Path | None,
    compare: Path | None,
    against: str | None,
    show: bool = False,
) -> None:
    """Measures, or with `show` lists what there is to measure."""

    def work() -> bool:
        if choice.get("quick"):
            wait_without_spinning()
        from flashtile.cli import bench as module

        console = make_console()
        if show:
            console.print(module.describe(command), markup=False)
            return True
        module.measure(console, command, choice, output, compare, against)
        return True

    run_command(work)
