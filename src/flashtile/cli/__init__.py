"""The command line, `flashtile`. It needs typer and rich: `pip install "flashtile[cli]"`."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

#: torch warns like this wherever NumPy is missing, which flashtile does not need.
_NO_NUMPY = "Failed to initialize NumPy"


def main() -> None:
    """Runs the command line, or says what to install for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'the command line needs {" and ".join(missing)}: pip install "flashtile[cli]"')
    _silence_numpy_warning()
    from flashtile.cli.app import app

    app()


def _silence_numpy_warning() -> None:
    """In this process, and in those that it starts."""
    warnings.filterwarnings("ignore", _NO_NUMPY, UserWarning)
    others = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join([*([others] if others else []), f"ignore:{_NO_NUMPY}:UserWarning"])
