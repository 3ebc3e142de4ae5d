"""The command line, `flashtile`. It needs typer and rich, which the extra `cli` installs."""

from __future__ import annotations

import importlib.util
import os
import sys

from flashtile.bench.start import how_to_install, silence_numpy_warning


def main(*command: str) -> None:
    """Runs the command line, or says what to install. `command`: what comes before the process's arguments."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the command line needs {' and '.join(missing)}: {how_to_install('cli')}")
    silence_numpy_warning()
    from flashtile.cli.app import app

    sys.argv[1:1] = command  # a record has the arguments of its run
    try:
        try:
            app(prog_name="flashtile")
        finally:
            sys.stdout.flush()
    except OSError as error:  # such as a full disk
        where = "" if error.filename is None else f"{error.filename}: "
        # Python flushes stdout again at exit, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
