"""Observation of flashtile in a process, by environment variables read when flashtile is imported: names in profiles,
and a log of what is chosen. `docs/performance.md` tells users.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ON, _OFF = ("1", "true", "on"), ("", "0", "false", "off")
_LOGS = ("select",)

#: Choices of backends and kernels, each once, at level INFO.
log = logging.getLogger("flashtile.select")

#: Whether a profiler of PyTorch records now: what `torch.profiler` and `emit_nvtx` switch on.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def switch(name: str) -> bool:
    """An environment variable that is 1 or 0.

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(name, "").strip().lower()
    if value not in (*_ON, *_OFF):
        raise ValueError(
            f"{name}: expected 1 or 0 in the environment, got {os.environ[name]!r}; set it to 1, or unset it"
        )
    return value in _ON


#: NVTX ranges around calls and launches, for profilers that PyTorch does not know of, such as Nsight Systems.
NVTX = switch("FLASHTILE_NVTX")


#: Kernels keep tables of their source's lines, for profilers that show them, such as Nsight Compute.
LINE_INFO = switch("FLASHTILE_LINE_INFO")


@contextmanager
def named(name: str) -> Iterator[None]:
    """A range of that name in PyTorch's profile, and with FLASHTILE_NVTX=1 on a machine with a GPU also in NVTX."""
    nvtx = NVTX and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def start_logs() -> None:
    """Writes to standard error what FLASHTILE_LOG asks for.

    Raises:
        ValueError: it asks for something that there is not.
    """
    wanted = [part.strip() for part in os.environ.get("FLASHTILE_LOG", "").split(",") if part.strip()]
    unknown = [part for part in wanted if part not in _LOGS]
    if unknown:
        raise ValueError(f"FLASHTILE_LOG: expected {', '.join(_LOGS)}, got {', '.join(unknown)}; set it to one of them")
    for part in wanted:
        logger = logging.getLogger(f"flashtile.{part}")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


start_logs()


def log_kernel(source: Any, device: Any) -> None:
    """Writes a new kernel, a `launch.KernelSource`, to the log, with its tiles and whatever else has a size, but
    strides."""
    named = ((name.rpartition(".")[2], value) for name, value in source.constants.items())
    sizes = {name: value for name, value in named if type(value) is int and "STRIDE" not in name}
    cut = ", ".join(f"{key}={value}" for key, value in sizes.items())
    name, warps, stages = source.function.__name__, source.num_warps, source.num_stages
    log.info("kernel %s for %s: %d warps, %d stages, %s", name, device, warps, stages, cut)
