"""The command line, `flashtile`. It needs typer and rich: `pip install "flashtile[cli]"`."""

from __future__ import annotations

import importlib.util
import sys

from flashtile.bench.numpy_warning import silence_numpy_warning


def main() -> None:
    """Runs the command line, or says what to install for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'the command line needs {" and ".join(missing)}: pip install "flashtile[cli]"')
    silence_numpy_warning()
    from flashtile.cli.app import app

    app()
