"""Trains a small GPT on flashtile and on plain attention, and compares losses, speed and memory.

python examples/demo.py [TEXT_FILE] [--seconds 85]

Needs typer and rich, and matplotlib for the pictures; in the checkout: pip install ".[cli,plots]".
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo_parts.isolation import run_piece
from demo_parts.results import (
    OURS,
    PLAIN,
    Results,
    scaling_table,
    training_table,
    verdict,
    write_results,
)
from demo_parts.scaling import measure_scaling
from demo_parts.training import FEWEST_STEPS, Plan, Training, compare, load_text, make_plan, train
from flashtile.bench.commands import default_device
from flashtile.bench.start import UserError, how_to_install, installed
from flashtile.cli.console import ends, make_console, print_table, print_text
from flashtile.models import flashtile_attention, plain_attention
from flashtile.models.gpt import CausalAttention

#: Steps that tell how long a step takes.
_PILOT_STEPS = 5
#: Shares of the time: planned for the trial and the two trainings; by which these stop if the machine has turned slower
#: since the trial; by which everything is measured.
_TRAINING_SHARE, _TRAINED_SHARE, _MEASURED_SHARE = 0.55, 0.75, 0.93

ATTENTIONS: dict[str, CausalAttention] = {OURS: flashtile_attention, PLAIN: plain_attention}


def run_demo(
    plan: Plan,
    console: Console,
    text_file: Path | None,
    output: Path,
    steps: int | None = None,
    pictures: bool | None = None,
    attentions: dict[str, CausalAttention] | None = None,
) -> bool:
    """Trains twice, measures attention alone, writes the results. The options are those of `main`. Returns whether the
    loss curves agree. Raises UserError if the text, the output folder or the installation is at fault, PieceFailedError
    if a training failed."""
    begin = time.perf_counter()
    attentions = attentions or ATTENTIONS
    text, text_name = load_text(text_file, plan.model.context)
    _make_folder(output)
    if pictures and not installed("matplotlib"):
        raise UserError(f"--pictures needs matplotlib: {how_to_install('plots')}")
    model = plan.model
    print_text(
        console,
        f"A GPT of {model.layers} layers, width {model.width}, learns {len(text):,} bytes of {text_name} on "
        f"{plan.device.type}, from the same seed twice: on flashtile's attention, and on plain attention with its "
        "N×N matrices.",
    )

    end = math.inf
    if steps is None:
        end = begin + _TRAINED_SHARE * plan.seconds
        with console.status("timing a few steps of each"):
            steps = _steps_that_fit(plan, text, attentions, begin)
    trainings = _train_both(console, plan, text, attentions, steps, end)
    comparison = compare(plan, trainings[OURS], trainings[PLAIN])
    with console.status("measuring attention alone") as status:
        left = begin + _MEASURED_SHARE * plan.seconds - time.perf_counter()
        points, stopped = measure_scaling(
            plan,
            attentions,
            left,
            lambda *what: status.update("measuring attention alone: {} at length {}".format(*what)),
        )
    results = Results(plan, text_name, trainings, comparison, points, stopped)
    drawn = pictures is not False and installed("matplotlib")
    write_results(results, output, drawn)

    print_table(console, training_table(results))
    print_table(console, scaling_table(results), emphasise=1)
    print_text(console, verdict(results), "green" if comparison.agree else "bold red")
    if pictures is None and not drawn:
        print_text(console, f"Pictures need matplotlib: {how_to_install('plots')}", "yellow")
    kinds = "Tables and pictures" if drawn else "Tables"
    print_text(console, f"{time.perf_counter() - begin:.0f} s in all. {kinds}: {output}/")
    return comparison.agree


def _make_folder(folder: Path) -> None:
    doing = "make"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        doing = "write into"  # one that was there may be another's, and the results would be lost in the end
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot {doing} the output folder {folder}: {error.strerror}") from None


def _steps_that_fit(plan: Plan, text: bytes, attentions: dict[str, CausalAttention], begin: float) -> int:
    """As many steps as both trainings have time for, found by a short trial of each."""
    seconds_per_step = 0.0
    for name in (OURS, PLAIN):
        trial: Training = run_piece(train, plan, text, attentions[name], _PILOT_STEPS, device=plan.device)
        seconds_per_step += plan.batch * plan.model.context / trial.tokens_per_second
    seconds = _TRAINING_SHARE * plan.seconds - (time.perf_counter() - begin)
    return max(FEWEST_STEPS, min(plan.max_steps, int(seconds / seconds_per_step)))


def _train_both(
    console: Console, plan: Plan, text: bytes, attentions: dict[str, CausalAttention], steps: int, end: float
) -> dict[str, Training]:
    """Both trainings, the same number of steps of each: less than `steps` where `end` comes first."""
    half = (end - time.perf_counter()) / 2
    ours = _train(console, plan, OURS, steps, partial(train, plan, text, attentions[OURS], steps, seconds=half))
    steps, rest = len(ours.losses), end - time.perf_counter()
    plain = _train(console, plan, PLAIN, steps, partial(train, plan, text, attentions[PLAIN], steps, seconds=rest))
    return {OURS: replace(ours, losses=ours.losses[: len(plain.losses)]), PLAIN: plain}


def _train(console: Console, plan: Plan, name: str, steps: int, function: Callable[..., Training]) -> Training:
    columns = (
        TextColumn("{task.description:>22}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps, loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"training on {name}", total=steps, loss="–")

        def on_step(step: int, loss: float) -> None:
            progress.update(task, completed=step + 1, loss=f"{loss:.3f}")

        return run_piece(function, device=plan.device, on_report=on_step)


@ends
def main(
    text_file: Annotated[
        Path | None, typer.Argument(help="Any file to learn from, text or not. Default: Python's own help texts.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for tables, figures and pictures.")] = Path(
        "demo-output"
    ),
    steps: Annotated[int | None, typer.Option(min=2, help="Training steps; default: what time allows.")] = None,
    pictures: Annotated[
        bool | None,
        typer.Option("--pictures/--no-pictures", help="Draw the PNGs; default: where matplotlib is installed."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=10, max=86_400, help="Time for the whole run; default 85 on a CPU, 110 on a GPU."),
    ] = None,
) -> bool:
    """Train a small GPT on flashtile and on plain attention, and compare losses, speed and memory.

    Exits with 1 when the two loss curves disagree.
    """
    device = default_device()
    plan = make_plan(device, seconds or (110 if device.type == "cuda" else 85))
    return run_demo(plan, make_console(), text_file, output, steps, pictures)


if __name__ == "__main__":
    typer.run(main)
