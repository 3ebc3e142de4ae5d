"""The two tasks: their examples, and what a model for them needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.lra import listops, pathfinder
from benchmarks.lra.examples import Examples


@dataclass(frozen=True)
class Task:
    """One of Long Range Arena's tasks.

    Attributes:
        make: number, seed, options, workers -> examples.
        options: how they are made.
        vocabulary: of the tokens.
        classes: of the labels.
        context: longest sequence.
        grid: side of the image whose pixels are the tokens, or None.
    """

    make: Callable[[int, int, Any, int], Examples]
    options: Any
    vocabulary: int
    classes: int
    context: int
    grid: int | None = None


def make_task(name: str, size: int | None = None, dashes: int | None = None) -> Task:
    """A task by its name.

    Args:
        name: "listops" or "pathfinder".
        size: longest expression, or side of an image; None for Long Range Arena's, 2,000 and 32.
        dashes: of a long path of Pathfinder.

    Raises:
        ValueError: there is no such task, or its examples cannot be made.
    """
    if name == "listops":
        longest = 2000 if size is None else size
        limits = listops.Limits(min_length=max(1, longest // 4), max_length=longest)
        return Task(listops.make_listops, limits, listops.VOCABULARY, listops.DIGITS, longest)
    if name == "pathfinder":
        side = 32 if size is None else size
        whole = side >= 32  # a smaller image has room for less
        drawing = pathfinder.Drawing(side, dashes or (6 if whole else 2), 3 if whole else 0)
        return Task(pathfinder.make_pathfinder, drawing, pathfinder.VOCABULARY, 2, side**2, side)
    raise ValueError(f"task: expected 'listops' or 'pathfinder', got {name!r}")
