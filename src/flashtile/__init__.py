"""flashtile: exact attention in tiles that stay in fast on-chip memory."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _runs_a_command() -> bool:
    """Whether this process is `flashtile`, or `python -m` with `flashtile` or its benchmarks.

    Their help and version are shown without torch, so a command loads the public names when it first uses one. Any
    other program gets them at once, because `import flashtile` also registers the operators.
    """
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # Python is still looking for the module that it is to run
        return not {"flashtile", "flashtile.bench", "flashtile.bench.distributed"}.isdisjoint(sys.orig_argv)
    return os.path.splitext(os.path.basename(program))[0] == "flashtile"


if TYPE_CHECKING or not _runs_a_command():
    from flashtile._public import *  # noqa: F403
    from flashtile._public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """A public name; the first that is asked for loads them all."""
        public = import_module("flashtile._public")
        names = {each: getattr(public, each) for each in ("__all__", *public.__all__)}
        globals().update(names)
        if name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        return names[name]
