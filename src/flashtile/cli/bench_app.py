"""The commands of `flashtile bench`: options and help texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperOption

from flashtile.bench.start import wait_without_spinning
from flashtile.cli.console import ends, make_console, with_signature

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


_Names = list[str] | None
_Impl = Annotated[_Names, Option("--impl", metavar="NAMES", help="Implementations, such as flashtile-triton fa4.")]
_Jobs = Annotated[int | None, Option(min=1, help="Processes that compile before anything is measured.")]
#: Options of several commands.
_SHARED: dict[str, Any] = {
    "table": Annotated[
        _Names, Option("--table", metavar="NAMES", help="Tables of cases, or 'all'; --list names them.")
    ],
    "cases": Annotated[
        _Names, Option("--cases", metavar="PATTERNS", help="Patterns of case names, such as '*-causal-*'.")
    ],
    "impl": _Impl,
    "quick": Annotated[bool, Option("--quick", help="A few cases instead of all: about a minute on two CPU cores.")],
    "seconds": Annotated[float | None, Option(help="Time for each phase of each implementation in each case.")],
    "jobs": _Jobs,
    "output": Annotated[Path | None, Option("--output", "-o", help="JSON file for the record.")],
    "compare": Annotated[Path | None, Option(metavar="RECORD", help="An earlier record: print speeds beside its own.")],
    "against": Annotated[
        str | None,
        Option(metavar="REF", help="A commit: the same cases there and here in turns; ours alone by default."),
    ],
    "show": Annotated[bool, Option("--list", help="Print the cases and implementations, and stop.")],
}
_LAST = ("output", "compare", "against", "show")


def _benchmark(name: str, *shared: str) -> Callable[[Callable[..., None]], None]:
    """Makes the command of a benchmark, from a function with the options and the help of its own, and the names of
    options that others have too. All have those of `_LAST`."""

    def register(declared: Callable[..., None]) -> None:
        options = list(inspect.signature(declared, eval_str=True).parameters.values())
        for option in (*shared, *_LAST):
            default = False if option in ("quick", "show") else None
            of_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            options.append(inspect.Parameter(option, of_kind, default=default, annotation=_SHARED[option]))

        def command(**choice: Any) -> None:
            last = {option: choice.pop(option) for option in _LAST}
            _measure(name, choice, **last)

        bench.command(name, cls=_Command)(with_signature(command, declared, options))

    return register


@_benchmark("attention", "table", "cases", "impl", "quick", "seconds", "jobs")
def bench_attention() -> None:
    """Forward and backward of attention, ours beside the peers; wrong results get no speed."""


@_benchmark("companions", "cases", "impl", "quick", "seconds", "jobs")
def bench_companions(
    op: Annotated[
        list[str] | None, Option(metavar="NAMES", help="Operations; --list names them. Default: all.")
    ] = None,
) -> None:
    """Forward and backward of the operations beside attention, ours beside the peers; wrong results get no speed."""


@_benchmark("serving", "table", "cases", "impl", "quick", "seconds", "jobs")
def bench_serving() -> None:
    """Tokens, chunks and mixed batches over key/value caches, ours beside the peers; wrong results get no speed."""


@_benchmark("invariance", "table", "cases", "impl", "quick", "seconds", "jobs")
def bench_invariance() -> None:
    """The batch-invariant mode beside the default and the peers: training's calls, decoding, mixed batches."""


@_benchmark("train", "impl", "quick", "seconds")
def bench_train(
    model: Annotated[list[str] | None, Option(metavar="NAMES", help="Models; --list names them. Default: all.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Sequences in a step.")] = None,
    context: Annotated[
        list[int] | None, Option(min=1, metavar="NUMBERS", help="Tokens of a sequence; each number is measured.")
    ] = None,
    after: Annotated[int, Option(min=0, help="Steps of training before what is measured.")] = 0,
    dropout: Annotated[float, Option(min=0, help="Probability of each of GPT-2's dropouts.")] = 0.0,
) -> None:
    """Training steps of GPT-2 from the same weights, ours beside transformers; wrong losses get no speed."""


@_benchmark("host-time", "cases", "impl", "quick")
def bench_host_time() -> None:
    """The host's own time for one small call of each kind, forward and backward."""


@_benchmark("breakdown", "impl", "seconds")
def bench_breakdown(
    batch: Annotated[int | None, Option(min=1, help="Sequences.")] = None,
    seq: Annotated[int | None, Option(min=1, help="Tokens of a sequence.")] = None,
    heads: Annotated[int | None, Option(min=1, help="Heads.")] = None,
    head_dim: Annotated[int | None, Option(min=1, help="Size of a head.")] = None,
    dropout_p: Annotated[float | None, Option(min=0, help="Probability of dropping a weight.")] = None,
    full: Annotated[bool, Option("--full", help="Without the causal mask.")] = False,
    dtype: Annotated[str | None, Option(help="fp16, bf16, fp32 or fp64.")] = None,
) -> None:
    """The time of each step of standard attention, beside one call of ours."""


@bench.command("distributed", cls=_Command)
@ends
def bench_distributed(
    output: Annotated[Path, Option("--output", "-o", help="JSON file for the record.")],
    gpus: Annotated[
        int | None, Option(min=1, help="Processes, one for each GPU. Default: all GPUs; two on a CPU.")
    ] = None,
    lengths: Annotated[
        list[int] | None, Option(min=1, metavar="NUMBERS", help="Some of the table's lengths, such as 131072.")
    ] = None,
    mask: Annotated[str, Option(help="both, causal or full: the cases with this mask.")] = "both",
    impl: _Impl = None,
    quick: Annotated[bool, Option("--quick", help="On GPUs only the cases with 32k and 128k tokens.")] = False,
    seconds: Annotated[float, Option(help="Time for the samples of each phase.")] = 0.25,
    profile: Annotated[
        bool, Option("--profile", help="Where each one's time goes, and how much of it is hidden.")
    ] = False,
    limit: Annotated[float, Option(min=0, help="Seconds after which nothing new is started.")] = 240.0,
) -> bool:
    """Context parallelism over the GPUs of this machine, ours beside PyTorch's own; wrong results get no speed.

    A machine without a GPU has one case, of 64 tokens a process, which tries the code and tells no speeds of GPUs.
    """

    from flashtile.bench import distributed

    names = [part for name in impl or () for part in name.split(",") if part]
    distributed.bench_distributed(
        output, gpus=gpus, quick=quick, lengths=lengths or (), mask=mask, impl=names, seconds=seconds, profile=profile,
        limit=limit,
    )  # fmt: skip
    return True


@bench.command("card")
@ends
def bench_card(
    output: Annotated[
        Path | None, Option("--output", "-o", help="The record. Default: a file here, named after the GPU.")
    ] = None,
    jobs: _Jobs = None,
) -> bool:
    """Check this GPU's kernels, measure some calls of each kind, and write a record to hand in (docs/hardware.md).

    The record names the GPU, the processor and the versions, and neither the user nor the machine. Exits with 1 when a
    result of flashtile is wrong.
    """

    wait_without_spinning()
    from flashtile.cli.card import make_card

    return make_card(make_console(), output, jobs)


@ends
def _measure(
    command: str, choice: dict[str, Any], output: Path | None, compare: Path | None, against: str | None, show: bool
) -> bool:
    """Measures, or with `show` lists what there is to measure."""

    if choice.get("quick"):
        wait_without_spinning()
    from flashtile.bench import commands
    from flashtile.cli.bench import measure

    console = make_console()
    if show:
        console.print(commands.describe(command, commands.default_device()), markup=False)
        return True
    measure(console, command, choice, output, compare, against)
    return True
