"""Which backend serves a call: a pure choice that can explain itself."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import Tensor


def implementation(q: Tensor, backend: str) -> ModuleType:
    """The module (`forward`, `backward`) that serves a call on q's device."""
    name = backend if backend != "auto" else ("triton" if q.device.type == "cuda" else "cpu")
    return importlib.import_module(
        {
            "cpu": "flashtile.ops.attention.cpu",
            "reference": "flashtile.ops.attention.reference",
            "triton": "flashtile.ops.attention.triton.launch",
        }[name]
    )
