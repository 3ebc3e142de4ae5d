"""Which backend serves a call: a pure choice from the request, the device and the dtypes, with its reasons."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from flashtile._backends import devices, observe
from flashtile.ops.common.watch import watched

BACKENDS = ("auto", "reference", "cpu", "triton")

#: In the order in which "auto" tries them.
_AUTOMATIC = ("triton", "cpu")


class BackendChoice(NamedTuple):
    """The backend that serves a call, and why each other one does not.

    Attributes:
        backend: its name, such as "triton", "cpu" or "reference"; None where none can serve the call.
        reason: why this one.
        rejected: backend -> why not.
    """

    backend: str | None
    reason: str
    rejected: dict[str, str]


def choose_backend(
    requested: str, device_type: str, dtype: torch.dtype, triton_missing: str | None, interpreting: bool
) -> BackendChoice:
    """The choice, from facts alone. `dtype` is float64 where any tensor of the call is."""
    obstacles = {
        "triton": triton_obstacle(device_type, dtype, triton_missing, interpreting),
        "cpu": cpu_obstacle(device_type),
        "reference": None,
    }
    why_not_reference = "it is the definition, written to be read; it runs only when asked for by name"
    return choose(requested, obstacles, _AUTOMATIC, f"{dtype} on {device_type}", interpreting, why_not_reference)


def choose(
    requested: str,
    obstacles: dict[str, str | None],
    automatic: tuple[str, ...],
    call: str,
    interpreting: bool,
    why_not_reference: str,
) -> BackendChoice:
    """The choice among backends, each with what stands in its way, or None.

    Args:
        requested: a backend by name, or "auto" for the first of `automatic` that nothing stands in the way of.
        call: what is asked for, in words.
        why_not_reference: the reason why "auto" never takes the reference.
    """
    if requested != "auto":
        obstacle = obstacles[requested]
        rejected = {name: "another backend was asked for by name" for name in obstacles if name != requested}
        if obstacle:
            return BackendChoice(None, obstacle, {requested: obstacle, **rejected})
        return BackendChoice(requested, "asked for by name", rejected)
    # The interpreter is for testing kernels: it never serves a call that did not ask for it.
    if interpreting:
        slow = obstacles["triton"] or "on a CPU it is interpreted, far slower than the cpu backend"
        obstacles = {**obstacles, "triton": slow}
    rejected = {name: obstacle for name in automatic if (obstacle := obstacles[name])}
    rejected["reference"] = why_not_reference
    for name in automatic:
        if not obstacles[name]:
            return BackendChoice(name, f"the first choice for {call}", rejected)
    return BackendChoice(None, "; ".join(f"{name}: {why}" for name, why in rejected.items()), rejected)


def cpu_obstacle(device_type: str) -> str | None:
    """Why a CPU backend cannot serve a call; None when it can."""
    return None if device_type == "cpu" else f"it runs on the CPU, and the tensors are on {device_type}"


def triton_obstacle(device_type: str, dtype: torch.dtype, triton_missing: str | None, interpreting: bool) -> str | None:
    """Why Triton kernels cannot serve a call; None when they can."""
    if triton_missing:
        return triton_missing
    if dtype is torch.float64:
        return "its kernels take float16, bfloat16 and float32, not float64; cast, or use backend='reference'"
    if device_type == "cpu" and not interpreting:
        return "it needs a GPU, and the tensors are on the CPU (TRITON_INTERPRET=1 runs its kernels there for testing)"
    return None


@functools.cache
def implementation(operation: str, backend: str, device_type: str, dtype: torch.dtype) -> ModuleType:
    """The module that serves a call of an operation: `flashtile.ops.<operation>.{reference, cpu, triton.launch}`.

    Raises:
        ValueError: the backend asked for, or every one for "auto", cannot serve it.
    """
    choice = choose_backend(backend, device_type, dtype, devices.triton_missing(), devices.interpreting())
    if choice.backend is None:
        raise ValueError(f"backend: {backend!r} cannot serve this call: {choice.reason}")
    log_choice(f"{operation}, {dtype} on {device_type}", requested=backend, choice=choice)
    part = "triton.launch" if choice.backend == "triton" else choice.backend
    return watched(operation, choice.backend, importlib.import_module(f"flashtile.ops.{operation}.{part}"))


def log_choice(call: str, requested: str, choice: BackendChoice) -> None:
    """Writes a choice to the log `flashtile.select`: called when it is made, and not when it is remembered."""
    why_not = "".join(f"; not {name}: {why}" for name, why in choice.rejected.items() if requested == "auto")
    observe.log.info("%s: %s (%s%s)", call, choice.backend, choice.reason, why_not)
