"""The commands of `flashtile`: options, help texts and exit codes; the work is in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashtile.cli.console import make_console, run_command

app = typer.Typer(
    help="flashtile: exact attention in on-chip tiles. Try it, inspect it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Speed beside other implementations on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.command()
def demo(
    text_file: Annotated[
        Path | None, typer.Argument(help="Any file to learn from, text or not. Default: Python's own help texts.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for tables, figures and pictures.")] = Path(
        "demo-output"
    ),
    seconds: Annotated[
        float | None, typer.Option(min=10, help="Time for the whole run; default 85 on a CPU, 110 on a GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Training steps; default: what time allows.")] = None,
    pictures: Annotated[bool, typer.Option(help="Draw the PNGs; needs matplotlib.")] = True,
) -> None:
    """Train a small GPT on flashtile and on plain attention, and compare losses, speed and memory.

    Exits with 1 when the two loss curves disagree.
    """
    console = make_console()

    def work() -> bool:
        from flashtile.bench.commands import default_device
        from flashtile.cli.demo.command import Options, run_demo
        from flashtile.cli.demo.plan import make_plan

        device = default_device()
        plan = make_plan(device, seconds or (110 if device.type == "cuda" else 85))
        return run_demo(Options(text_file, output, steps, pictures), plan, console)

    run_command(work)
