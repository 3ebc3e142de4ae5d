"""How kernels are described, compiled, launched and watched, for all operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

#: Functions that empty each memory of decisions about calls and launches (`clear_plans`).
forgetters: list[Callable[[], None]] = []


def clear_plans() -> None:
    """Forgets all plans, and calls that have one, for tests and tools that change what they are made from. Compiled
    kernels stay."""
    for forget in forgetters:
        forget()


def picker(places: Sequence[int]) -> Callable[[Any], tuple]:
    """A function that picks the elements at some places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1)) if places else lambda elements: ()
