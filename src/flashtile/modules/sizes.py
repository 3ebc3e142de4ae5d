"""Checks of sizes that modules are made of; and comparing those of tensors, which may depend on data, while PyTorch
traces (as `flashtile.ops.common.sizes` does for operations)."""

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


def known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes is known to hold."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    return torch.fx.experimental.symbolic_shapes.guard_or_false(condition)


def differ(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether shapes are known to differ. If that is open, the traced program requires that they are equal."""
    if not torch.compiler.is_compiling():
        return found != expected
    if len(found) != len(expected):
        return True
    for size, wanted in zip(found, expected):
        if known(size != wanted):
            return True
        if not known(size == wanted):
            torch._check(size == wanted)
    return False
