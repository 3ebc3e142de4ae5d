"""Python in a process of its own, with these sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_python(*arguments: str, cwd: Path | None = None, path: str = "", **variables: str) -> str:
    """What a process that must succeed prints.

    Args:
        arguments: of Python.
        path: where it looks for modules first.
        variables: of its environment.
    """
    places = [place for place in (path, str(ROOT / "src")) if place]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
