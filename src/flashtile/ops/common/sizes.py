"""Whether PyTorch exports, and comparing sizes. While it traces, a size that depends on data is not known
(`x[kept].shape[0]`), and a condition on it raises. An open condition is checked when the traced program runs."""

from __future__ import annotations

import torch


def exporting() -> bool:
    """Whether `torch.export` traces. In torch 2.11, PyTorch's public function is true for `torch.compile` too."""
    return torch.compiler._is_exporting_flag


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


def broadcasts(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether each size is 1 or the expected one. If that is open, the traced program requires the expected one."""
    return len(found) == len(expected) and not any(
        not known(size == 1) and differ((size,), (wanted,)) for size, wanted in zip(found, expected)
    )


def exceeds(size: int, most: int) -> bool:
    """Whether a size is known to be too large. If that is open, the traced program requires that it is not."""
    if known(size > most):
        return True
    if not known(size <= most):
        torch._check(size <= most)
    return False
