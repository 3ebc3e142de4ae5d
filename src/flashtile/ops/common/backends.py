"""Backends of an operation as objects, and the choice among them: the first in a list that can serve a call. Nothing
that chooses knows one by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flashtile._backends import devices, observe
from flashtile.ops.common.checks import check_choice
from flashtile.ops.common.watch import watched


class StandardCall(NamedTuple):
    """The facts that decide which backend serves a call; `dtype` is float64 where any tensor of the call is."""

    operation: str
    requested: str
    device_type: str
    dtype: torch.dtype
    triton_missing: str | None
    interpreting: bool

    @property
    def label(self) -> str:
        return f"{self.operation}, {self.dtype} on {self.device_type}"


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation.

    Attributes:
        name: what users write as `backend=`.
        module: full name of the module that has the operation's functions, such as `forward` and `backward`. It is
            imported when it first serves a call, because launches need Triton.
        unsupported_reason: why the backend cannot serve a call; None where it can. If the call asks for "auto", also
            why it should not, such as that another backend is faster.
        describe: the kernels that a call would run, for `flashtile.explain`.
    """

    name: str
    module: str
    unsupported_reason: Callable[[Any], str | None]
    describe: Callable[[Any], tuple[Any, ...]] = lambda call: ()


class BackendChoice(NamedTuple):
    """The backend that serves a call, and why each other one does not. `backend`: its name, such as "triton", "cpu" or
    "reference"; None where none can serve the call. `reason`: why this one. `rejected`: backend -> why not."""

    backend: str | None
    reason: str
    rejected: dict[str, str]


class Backends:
    """The backends of an operation, in the order in which "auto" tries them. `operation`: its name. `call`: makes the
    description of a call from the arguments of `implementation`. It has the fields and the label of `StandardCall`, and
    may have more. `backends`: those of the operation."""

    def __init__(self, operation: str, call: Callable[..., Any], backends: Iterable[Backend]) -> None:
        self.by_name = {backend.name: backend for backend in backends}
        self._operation, self._call = operation, call
        self._logged: set[str] = set()
        #: The module that serves a call, remembered by the arguments, which are hashable.
        self.implementation = functools.lru_cache(maxsize=4096)(self._implementation)

    def check(self, requested: str) -> None:
        """Raises a ValueError where the argument `backend` names none of them."""
        if not (isinstance(requested, str) and (requested == "auto" or requested in self.by_name)):
            check_choice("backend", requested, ("auto", *self.by_name), "'auto' takes the first that serves the call")

    def choose(self, call: Any) -> BackendChoice:
        """The backend that a call asks for, or for "auto" the first that supports it."""
        if call.requested != "auto":
            rejected = {
                name: "another backend was asked for by name" for name in self.by_name if name != call.requested
            }
            reason = self.by_name[call.requested].unsupported_reason(call)
            if reason:
                return BackendChoice(None, reason, {call.requested: reason, **rejected})
            return BackendChoice(call.requested, "asked for by name", rejected)
        reasons = {name: backend.unsupported_reason(call) for name, backend in self.by_name.items()}
        rejected = {name: reason for name, reason in reasons.items() if reason}
        for name, reason in reasons.items():
            if not reason:
                return BackendChoice(name, f"the first choice for {call.dtype} on {call.device_type}", rejected)
        return BackendChoice(None, "; ".join(f"{name}: {why}" for name, why in rejected.items()), rejected)

    def _implementation(self, *facts: Any) -> ModuleType:
        """The module that serves a call; ValueError if the backend asked for, or every one, cannot."""
        call = self._call(*facts)
        choice = self.choose(call)
        if choice.backend is None:
            raise ValueError(f"backend: {call.requested!r} cannot serve this call: {choice.reason}")
        self._log(call, choice)
        module = importlib.import_module(self.by_name[choice.backend].module)
        return watched(self._operation, choice.backend, module)

    def _log(self, call: Any, choice: BackendChoice) -> None:
        """Writes a choice to the log `flashtile.select`, once: calls of other shapes are often chosen for alike."""
        why_not = "".join(f"; not {name}: {why}" for name, why in choice.rejected.items() if call.requested == "auto")
        line = f"{call.label}: {choice.backend} ({choice.reason}{why_not})"
        if line not in self._logged:
            self._logged.add(line)
            observe.log.info("%s", line)


def triton_unsupported_reason(call: Any) -> str | None:
    """Why Triton kernels do not serve a call; None where they do. The interpreter serves only calls that ask for it."""
    if call.triton_missing:
        return call.triton_missing
    if call.dtype is torch.float64:
        return "its kernels take float16, bfloat16 and float32, not float64; cast, or use backend='reference'"
    if call.device_type == "cpu" and not call.interpreting:
        return "it needs a GPU, and the tensors are on the CPU (TRITON_INTERPRET=1 runs its kernels there for testing)"
    if call.interpreting and call.requested == "auto":
        return "on a CPU it is interpreted, far slower than the cpu backend"
    return None


def cpu_unsupported_reason(call: StandardCall) -> str | None:
    """Why a CPU backend cannot serve a call; None where it can."""
    return None if call.device_type == "cpu" else f"it runs on the CPU, and the tensors are on {call.device_type}"


def _reference_unsupported_reason(call: StandardCall) -> str | None:
    if call.requested == "auto":
        return "it is the definition, written to be read; it runs only when asked for by name"
    return None


#: Operations whose Triton kernels are a folder, and whose reference is a file of its own.
_IN_FOLDERS = {"kv_cache"}


@functools.cache
def standard_backends(operation: str) -> Backends:
    """The backends `flashtile.ops.<operation>.{kernels, cpu, spec}`; the last has the reference.
    `implementation(requested, device, dtype)` of the result is the module that serves a call."""

    def call(requested: str, device: torch.device, dtype: torch.dtype) -> StandardCall:
        missing, interpreting = devices.triton_missing(), devices.interpreting()
        return StandardCall(operation, requested, device.type, dtype, missing, interpreting)

    package = f"flashtile.ops.{operation}"
    kernels, reference = ("triton.launch", "reference") if operation in _IN_FOLDERS else ("kernels", "spec")
    backends = (
        Backend("triton", f"{package}.{kernels}", triton_unsupported_reason),
        Backend("cpu", f"{package}.cpu", cpu_unsupported_reason),
        Backend("reference", f"{package}.{reference}", _reference_unsupported_reason),
    )
    return Backends(operation, call, backends)
