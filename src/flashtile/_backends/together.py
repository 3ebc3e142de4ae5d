"""Compiling kernels at the same time: one that is launched now, and those that a program will launch soon.

Triton's passes and ptxas let go of Python's lock, so threads share the work among the cores: forward and backward take
3.0 s on two cores instead of 4.5 (`docs/engineering_log/compilers.md`). No thread is left when the launch returns, so a
process may fork or end at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_soon: ContextVar[Callable[[], Iterable[Any]] | None] = ContextVar("plans that will be launched soon", default=None)


class Soon:
    """Within this context, the first launch of a plan also compiles the kernels of other ones, if it has to compile its
    own. `plans` gives these; nobody asks it if there is nothing to compile."""

    __slots__ = ("_before", "_plans")

    def __init__(self, plans: Callable[[], Iterable[Any]]) -> None:
        self._plans = plans

    def __enter__(self) -> None:
        self._before = _soon.set(self._plans)

    def __exit__(self, *_: object) -> None:
        _soon.reset(self._before)


def launched_soon() -> tuple[Any, ...]:
    """The plans that will be launched soon, as far as that is known."""
    plans = _soon.get()
    return () if plans is None else tuple(plans())


#: What was compiled beside something else, and has not been taken.
_compiled: dict[Hashable, Any] = {}


def compile_all(kernels: Mapping[Hashable, Callable[[], Any]]) -> None:
    """Compiles the kernels, each in a thread, and waits for all; `take` gives them. A single one is left to whoever
    launches it. So is one that does not compile: its launch tries again, and raises the error where it belongs."""
    new = {key: kernel for key, kernel in kernels.items() if key not in _compiled}
    if len(new) < 2:
        return
    with ThreadPoolExecutor(len(new)) as threads:
        running = {key: threads.submit(kernel) for key, kernel in new.items()}
    _compiled.update({key: of.result() for key, of in running.items() if of.exception() is None})


def take(key: Hashable) -> Any:
    """A kernel that was compiled beside another one, once; None for any other."""
    return _compiled.pop(key, None)
