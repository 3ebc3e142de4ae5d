"""flashtile: exact attention in tiles that stay in fast on-chip memory."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"


def _runs_a_command() -> bool:
    """Whether this process is `flashtile`, or `python -m` with `flashtile` or its benchmarks.

    Their help and version are shown without torch, so a command loads the public names when it first uses one. Any
    other program gets them at once, because `import flashtile` also registers the operators.
    """
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":  # Python is still looking for the module that it is to run
        return not {"flashtile", "flashtile.bench"}.isdisjoint(sys.orig_argv)
    return os.path.splitext(os.path.basename(program))[0] == "flashtile"


#: What users reach as attributes of the package. Each is imported when it is first asked for.
_MODULES = (
    "compat",
    "distributed",
    "integrations",
    "io_model",
    "learn",
    "models",
    "modules",
    "prefix_trees",
    "testing",
)

#: Names of other libraries -> what does the same here.
_ELSEWHERE = {
    **dict.fromkeys(("flash_attn_func", "flash_attn_qkvpacked_func", "memory_efficient_attention"), "attention"),
    **dict.fromkeys(("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "varlen_attn"), "attention_varlen"),
    "flash_attn_with_kvcache": "attention_with_kv_cache",
    "create_block_mask": "BlockMask.from_predicate",
    "MultiheadAttention": "modules.MHA",
    **{name: f"modules.{name}" for name in ("MHA", "LayerNorm", "RMSNorm", "pad_input", "unpad_input")},
}

if TYPE_CHECKING:
    from flashtile import compat as compat
    from flashtile import distributed as distributed
    from flashtile import integrations as integrations
    from flashtile import io_model as io_model
    from flashtile import learn as learn
    from flashtile import models as models
    from flashtile import modules as modules
    from flashtile import prefix_trees as prefix_trees
    from flashtile import testing as testing

if TYPE_CHECKING or not _runs_a_command():
    from flashtile._public import *  # noqa: F403
    from flashtile._public import __all__ as __all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A module; in a command also a public name, the first of which loads them all."""
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if "__all__" not in globals():
            public = import_module("flashtile._public")
            names = {each: getattr(public, each) for each in ("__all__", *public.__all__)}
            globals().update(names)
            if name in names:
                return names[name]
        here = f"; use {__name__}.{_ELSEWHERE[name]} (docs/migrating.md)" if name in _ELSEWHERE else ""
        message = f"module {__name__!r} has no attribute {name!r}{here}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES} - {"Any", "TYPE_CHECKING", "import_module", "os", "sys"})
