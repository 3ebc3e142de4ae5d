"""The commands of `flashtile`: options, help texts and exit codes; the work is in the modules beside this one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import flashtile
from flashtile.bench.start import wait_without_spinning
from flashtile.cli.bench_app import bench
from flashtile.cli.call import Call, Calls
from flashtile.cli.console import ends, make_console, print_json, print_table, print_text, takes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print("flashtile", flashtile.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """flashtile: exact attention in on-chip tiles. Inspect it, measure it."""


@app.command()
@ends
def doctor(
    check_kernels: Annotated[
        bool,
        typer.Option("--check-kernels", help="Compare every kernel with the reference, over many layouts of tensors."),
    ] = False,
    as_json: _Json = False,
) -> bool:
    """Show versions, the device and what is missing, and try each backend.

    Exits with 1 when the backend that "auto" takes here does not work, or a kernel gives a wrong result.
    """

    wait_without_spinning()
    from flashtile.cli import doctor as module

    console, lacks = make_console(), module.missing()
    backends, default = module.backends()
    diagnoses = [module.examine(backend) for backend in backends]
    auto = next(d for d in diagnoses if d.backend == default)
    if not as_json:
        for table in module.tables(diagnoses, lacks):
            print_table(console, table)
        verdict = "works" if auto.problem is None else "does not work"
        print_text(console, f'backend="auto" takes {auto.backend} here, which {verdict}.')
    results = module.run_checks(console, show=not as_json) if check_kernels else []
    if as_json:
        print_json(module.as_data(diagnoses, auto, lacks, results))
    return auto.problem is None and not any(result.problem for result in results)


@app.command()
@ends
@takes(Call)
def explain(
    call: Call,
    io: Annotated[
        bool | None,
        typer.Option("--io/--no-io", help="FLOPs, bytes and least time, standard and in tiles; default: on a GPU."),
    ] = None,
    as_json: _Json = False,
) -> bool:
    """Say which backend and kernel a call would take, and why, without running it.

    Exits with 1 when no backend serves the call.
    """

    from flashtile.cli import explain as module

    console = make_console()
    explanation = module.explain(call)
    served = explanation.backend is not None
    tells_io = served and io is not False
    io_work = module.describe_io(call, explanation.device, measure=bool(io)) if tells_io else None
    if as_json:
        print_json(module.as_data(call, explanation, io_work))
        return served
    print_text(console, str(explanation))
    if not call.present:
        print_text(
            console,
            f"{explanation.device} need not be in this machine: the answer is from flashtile's table of devices",
        )
    if isinstance(io_work, str):
        print_text(console, io_work)
    elif io_work is not None:
        print_table(console, io_work)
    return served


@app.command()
@ends
def report(
    records: Annotated[list[Path], typer.Argument(help="Records, as `flashtile bench --output` writes them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> bool:
    """Draw benchmark records as one page of HTML that needs no network."""

    from flashtile.bench.html import write_report

    console = make_console()
    written = write_report(records, output)
    for note in written.notes:
        print_text(console, note, "yellow")
    of = "a record" if len(records) == 1 else f"{len(records)} records"
    print_text(console, f"{written.pictures} charts and {written.tables} tables of {of}: {output}")
    return True


@app.command()
@ends
def warmup(
    head_dim: Annotated[list[int], typer.Option(min=1, help="Head size; repeat for several.")] = [64, 128],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="fp16, bf16 or fp32; repeat for several.")] = ["bf16"],  # noqa: B006
    causal: Annotated[bool | None, typer.Option(help="One of the two only; default: both.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="Key/value heads; default: as query heads.")] = None,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length, which may decide the tiles.")] = 2048,
) -> bool:
    """Compile kernels ahead into Triton's cache on disk, by running each shape once with batch 1."""

    from rich.progress import Progress

    from flashtile.cli import warmup as module

    device = module.require_gpu()
    wanted = module.shapes(head_dim, dtype, causal, heads, heads_kv, seq)
    console, begin = make_console(), time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("compiling", total=len(wanted))
        for case in wanted:
            progress.update(task, description=case.name)
            module.warm_up(case, device)
            progress.advance(task)
    seconds = time.perf_counter() - begin
    print_text(console, f"kernels for {len(wanted)} shapes are ready, after {seconds:.0f} s.")
    return True


@app.command()
@ends
@takes(Calls)
def tune(
    calls: Calls,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time after which no measurement begins.")] = 10.0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile; default: one for each core.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure what the table has too.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show the table, and stop.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the table to this file, and stop.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Remove the table, and stop.")] = False,
) -> bool:
    """Measure how kernels are cut best on this GPU, and keep that in a table, which later processes read.

    Results are checked before a time counts. Stop at any time: rows that are found stay, and the next run goes on. A
    table is for one kind of GPU, one version of flashtile and one of Triton.
    """

    from flashtile.cli import tune as module

    console, table = make_console(), module.open_table()
    if show or export or reset:
        return module.manage(table, export, reset, console)
    return module.run(calls, table, minutes * 60, jobs, again, console)
