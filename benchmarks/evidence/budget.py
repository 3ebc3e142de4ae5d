"""How many steps a script may take, given as a number or as minutes for the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Share of the minutes for training steps; the rest is for data, compilation and evaluation.
_SHARE = 0.75


@dataclass(frozen=True)
class Budget:
    """Either a number of steps for each run, or minutes for all of them together.

    Raises:
        ValueError: both are given, or neither, or one is not positive.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.steps, self.minutes) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ValueError(
                f"budget: expected either --steps or --minutes, and more than 0, got steps={self.steps} and "
                f"minutes={self.minutes}"
            )

    def steps_each(self, step_seconds: Sequence[float], repeats: int = 1) -> int:
        """Steps of each run, the same for all, when one step of each takes so many seconds and there are so many
        repetitions of them."""
        if self.steps is not None:
            return self.steps
        assert self.minutes is not None
        return max(1, int(60 * self.minutes * _SHARE / (repeats * sum(step_seconds))))
