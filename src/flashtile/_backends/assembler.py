"""Settings of Triton's while it compiles a kernel: which ptxas makes machine code of its PTX, and tables of lines.

Triton's wheel has two, of CUDA 12 and of CUDA 13. From Triton 3.9 on it takes the newer one for sm_90 as well, which
keeps fewer values of the Hopper kernels in registers: forwards take up to twice as long
(`decisions/compilers.md`). The kernels of this package therefore take the older one there, unless a user has said
which one to take.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from triton import knobs

from flashtile._backends import observe
from flashtile._backends.devices import DeviceFacts, triton_version

#: Names that say which ptxas Triton calls for sm_90: its knob, and a user's variable.
_KNOB, _VARIABLE = "ptxas_blackwell", "TRITON_PTXAS_BLACKWELL_PATH"

#: The first Triton that takes the newer one for sm_90.
_FIRST = 3, 9


class _Shared:
    """A setting that threads share. The first one that compiles enters it, and the last one leaves it."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self._setting, self._entered = setting, contextlib.ExitStack()
        self._lock, self._threads = threading.Lock(), 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with self._lock:
            if not self._threads:
                self._entered.enter_context(self._setting())
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._entered.close()


@contextlib.contextmanager
def _with_older() -> Iterator[None]:
    knob = vars(knobs.nvidia)
    knob[_KNOB] = _older()
    try:
        yield
    finally:
        del knob[_KNOB]


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


_OLDER, _NO_LINES = _Shared(_with_older), _Shared(_without_lines)


@contextlib.contextmanager
def assembler(device: DeviceFacts) -> Iterator[dict[str, Any]]:
    """While this lasts, Triton takes the ptxas for `device`. Returns what `triton.compile` is given beside source,
    target and options: a key for its disk cache, which tells the two apart."""
    path = _older() if device.arch == "sm_90" and _VARIABLE not in os.environ else None
    if path is None or vars(knobs.nvidia).get(_KNOB, path) != path:
        yield {}
        return
    with _OLDER.entered():
        from triton._C.libtriton import get_cache_invalidating_env_vars

        yield {"_env_vars": {**get_cache_invalidating_env_vars(), _KNOB: knobs.nvidia.ptxas_blackwell.version}}


def without_line_tables() -> AbstractContextManager[None]:
    """While this lasts, kernels get no tables of lines unless FLASHTILE_LINE_INFO asks for them. ptxas chooses some
    registers by such tables, so a comment could change a kernel."""
    return contextlib.nullcontext() if observe.LINE_INFO else _NO_LINES.entered()


@functools.cache
def _older() -> str | None:
    """The path of Triton's ptxas of CUDA 12; None if Triton takes it for sm_90 by itself, or has none."""
    if triton_version() < _FIRST:
        return None
    try:
        tool = knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):  # "keep it until legacy ptxas is removed", says Triton 3.9
        return None
    return tool.path if tool.version.startswith("12.") else None
