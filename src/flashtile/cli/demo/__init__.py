"""`flashtile demo`: trains a small GPT on flashtile and on plain attention, and compares losses, speed and memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


@dataclass(frozen=True)
class Options:
    """The choices of the user, as options of the command line, which show their help without torch."""

    text_file: Annotated[
        Path | None, Argument(help="Any file to learn from, text or not. Default: Python's own help texts.")
    ] = None
    output: Annotated[Path, Option("--output", "-o", help="Folder for tables, figures and pictures.")] = Path(
        "demo-output"
    )
    steps: Annotated[int | None, Option(min=2, help="Training steps; default: what time allows.")] = None
    pictures: Annotated[
        bool | None,
        Option("--pictures/--no-pictures", help="Draw the PNGs; default: where matplotlib is installed."),
    ] = None
