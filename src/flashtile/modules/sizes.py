"""Sizes that modules are made of."""

from __future__ import annotations

import numbers

import torch


def check_sizes(**sizes: int) -> None:
    """Raises where a size is no int or below 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt, numbers.Integral)):
            raise TypeError(f"{name}: expected an int, got {size!r}; use int(...)")
        if size < 0:
            raise ValueError(f"{name}: expected at least 0, got {size}; it is a size")
