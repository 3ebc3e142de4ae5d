"""`python -m flashtile.compat [options] script.py args…`: runs a program with `flash_attn` served by flashtile."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from flashtile.compat.finder import install
from flashtile.compat.signatures import SERVED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashtile.compat",
        usage="python -m flashtile.compat [--name NAME] [--version N] [--override] (-m MODULE | SCRIPT) [ARGS ...]",
        description="Runs a script or a module with flash_attn served by flashtile.",
    )
    names = ", ".join(SERVED)
    parser.add_argument("--name", default="flash_attn", choices=list(SERVED), help=f"what is served: {names}")
    parser.add_argument("--version", type=int, help="its major version; flash_attn has 2 (default) and 1")
    parser.add_argument("--override", action="store_true", help="also where a real one is installed")
    parser.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module")
    parser.add_argument("script", nargs="?", help="run a script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it finds in sys.argv")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Installs, and runs the program as `python` would: as `__main__`, with its own `sys.argv` and `sys.path[0]`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.module and options.script is None:
        parser.error("expected a script, or -m and a module")
    try:
        install(options.name, options.version, options.override)
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if options.module:
        # `python -m flashtile.compat` has put the working directory where `python -m` would.
        sys.argv = list(options.module)
        runpy.run_module(options.module[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [options.script, *options.arguments]
    if not getattr(sys.flags, "safe_path", False):  # with -P neither folder is in the path, and its first is another
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
