"""Compiling and loading kernels at the same time: one that is launched now, and those that will be launched soon.

Triton's passes, ptxas and the C compiler let go of Python's lock, so threads share the work among the cores
(`decisions/compilers.md`). No thread is left when the launch returns, so a process may fork or end at any
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_soon: ContextVar[Callable[[], Iterable[Any]] | None] = ContextVar("plans that will be launched soon", default=None)


class Soon:
    """Within this context, the first launch of a plan also loads the kernels of other ones, if it has to load its own.
    `plans` gives these; nobody asks it if there is nothing to load."""

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


def run(tasks: Sequence[Callable[[], Any]]) -> None:
    """Runs tasks, each in a thread, and waits for all; a single one is left to the caller. The error of a task is not
    raised: whoever needs its result does it again, and gets the error where it belongs."""
    if len(tasks) > 1:
        with ThreadPoolExecutor(len(tasks)) as threads:
            for task in tasks:
                threads.submit(task)
