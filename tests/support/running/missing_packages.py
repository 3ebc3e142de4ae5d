"""Python in a process of its own, where packages are not to be found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import flashtile

SOURCE = Path(flashtile.__file__).parent.parent
#: Read by Python when it starts, also by the processes that it starts.
_HIDES = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name in {names!r} else find(name, *where)
"""


def run_without(names: Iterable[str], folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with some arguments in a folder, which gets the file that hides the packages."""
    (folder / "sitecustomize.py").write_text(_HIDES.format(names=set(names)), "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)]), "COLUMNS": "80"}
    # Bytecode of that file might be taken for the one of another test in the same second, if both are as long.
    command = [sys.executable, "-B", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=folder)
