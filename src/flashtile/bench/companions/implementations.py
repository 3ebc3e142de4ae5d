"""Implementations of the companion operations that are measured beside one another: ours and the peers.

How each calls an operation is with the operation's cases (`Case.ways`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from flashtile.bench.cases import select_named


@dataclass(frozen=True)
class Implementation:
    """One way to compute companion operations.

    Attributes:
        name: as it stands in records.
        devices: device types it is measured on.
        package: what must be installed: its name for `import` and in a registry. None where nothing must be.
        context: what must be entered around its calls.
    """

    name: str
    devices: tuple[str, ...]
    package: tuple[str, str] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def missing(self) -> str | None:
        """Why it cannot run at all, or None."""
        if self.package is None or importlib.util.find_spec(self.package[0]) is not None:
            return None
        return f"{self.package[1]} is not installed"


IMPLEMENTATIONS = (
    Implementation("flashtile-triton", ("cuda",)),
    Implementation("flashtile-cpu", ("cpu",)),
    Implementation("eager", ("cuda", "cpu")),
    Implementation("compile", ("cuda", "cpu")),
    Implementation("liger", ("cuda",), ("liger_kernel", "liger-kernel")),
    Implementation("quack", ("cuda",), ("quack", "quack-kernels")),
)


#: Left out of a quick run on a CPU: torch.compile takes longer there than all measurements.
_SLOW_TO_START = "compile"


def select_implementations(names: Sequence[str], device: torch.device, quick: bool = False) -> list[Implementation]:
    """The named implementations, or all of a device; with `quick` on a CPU, all but torch.compile.

    Raises:
        ChoiceError: a name is unknown, or not for this device.
    """
    here = {
        implementation.name: implementation
        for implementation in IMPLEMENTATIONS
        if device.type in implementation.devices
    }
    left_out = _SLOW_TO_START if quick and device.type == "cpu" else None
    return select_named("--impl", names or [name for name in here if name != left_out], here, device.type)
