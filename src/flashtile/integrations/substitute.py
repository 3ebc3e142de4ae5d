"""Functions of other libraries with flashtile's in their place, while a context is open."""

from __future__ import annotations

import threading
import warnings
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
        unserved: what to warn of when the last context ends and no function has set `served`; None = nothing.
    """

    def __init__(
        self, begin: Callable[[], Callable[[], None]], put: Callable[[Route], None], unserved: str | None = None
    ) -> None:
        self._begin, self._put, self._unserved = begin, put, unserved
        self.served = False
        self._lock = threading.Lock()
        #: The functions of the contexts that are open, the latest last.
        self._active: list[Route] = []
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def by(self, route: Route) -> Iterator[None]:
        """In this context `route` stands in the place."""
        with self._lock:
            if self._restore is None:
                self._restore, self.served = self._begin(), False
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
        if self._unserved and not (self._active or self.served):
            warnings.warn(self._unserved, stacklevel=5)
