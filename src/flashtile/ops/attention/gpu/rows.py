"""The form of the tables by which kernels are cut: rows for heads up to some widths, each with what justifies it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Row(Generic[Config]):
    """A row of a table. Its name is that of the table, with its widths.

    Attributes:
        head_dim, head_dim_v: of the widest heads that it holds.
        config: how kernels are cut.
        measured: the figures that justify it, beside those of the next best, in the units of the table; "" if it
            follows from registers and shared memory.
    """

    head_dim: int
    head_dim_v: int
    config: Config
    measured: str = ""

    def holds(self, head_dim: int, head_dim_v: int) -> bool:
        """Whether it is for such heads."""
        return head_dim <= self.head_dim and head_dim_v <= self.head_dim_v


def first_row(rows: Iterable[Row[Config]], head_dim: int, head_dim_v: int) -> Config:
    """The config of the first row that holds such heads."""
    return next(row.config for row in rows if row.holds(head_dim, head_dim_v))
