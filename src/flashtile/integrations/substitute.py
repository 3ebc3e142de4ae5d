"""Functions of other libraries with flashtile's in their place, while a context is open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: A function that stands in the place of another library's.
Route = Callable[..., Any]


class Substitute:
    """The contexts that put functions in one place. They nest, also in several threads; the latest one applies.

    Args:
        begin: called when the first context is opened. Returns what restores the place as it was before.
        put: puts a function in the place.
    """

    def __init__(self, begin: Callable[[], Callable[[], None]], put: Callable[[Route], None]) -> None:
        self._begin, self._put = begin, put
        self._lock = threading.Lock()
        #: The functions of the contexts that are open, the latest last.
        self._active: list[Route] = []
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def by(self, route: Route) -> Iterator[None]:
        """In this context `route` stands in the place."""
        with self._lock:
            if self._restore is None:
                self._restore = self._begin()
            self._active.append(route)
            self._put(route)
        try:
            yield
        finally:
            with self._lock:
                del self._active[len(self._active) - 1 - self._active[::-1].index(route)]
                if self._active:
                    self._put(self._active[-1])
                elif self._restore is not None:
                    self._restore()
                    self._restore = None
