"""Sizes that modules are made of, and whether a layer's parameters can be read in place of a call of the layer."""

from __future__ import annotations

import numbers

import torch
from torch import nn


def check_sizes(**sizes: int) -> None:
    """Raises where a size is no int or below 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt, numbers.Integral)):
            raise TypeError(f"{name}: expected an int, got {size!r}; use int(...)")
        if size < 0:
            raise ValueError(f"{name}: expected at least 0, got {size}; it is a size")


def computes_only(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """True if a call of a layer runs the forward of one of these classes, and nothing else: no forward of a subclass or
    of the instance, and no hook."""
    own = "forward" in vars(layer) or type(layer).forward not in [kind.forward for kind in kinds]
    return not (own or is_hooked(layer))


def is_hooked(layer: nn.Module) -> bool:
    """True if a hook runs before or after the layer's forward or backward, of the layer or of all modules."""
    every = nn.modules.module
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )
