"""The command line, `flashtile`. It needs typer and rich: `pip install "flashtile[cli]"`."""

from __future__ import annotations

import importlib.util
import sys

from flashtile.bench.before_torch import silence_numpy_warning


def main(*command: str) -> None:
    """Runs the command line, or says what to install for it.

    Args:
        command: what comes before the arguments of the process: nothing for `flashtile` itself, "bench" for its
            benchmarks.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'the command line needs {" and ".join(missing)}: pip install "flashtile[cli]"')
    silence_numpy_warning()
    from flashtile.cli.app import app

    sys.argv[1:1] = command  # a record has the arguments of its run
    app(prog_name="flashtile")
