"""Floating-point operations of operators with matrix products, for `torch.utils.flop_counter`.

A formula gets the arguments of its operator and `out_val`, its results. It counts as PyTorch's own do: two operations
for each multiplication and addition, of matrix products alone, and pairs that a mask hides too.

PyTorch's module imports Triton, which `import flashtile` does not. The formulas are therefore registered when a program
imports that module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[str, Callable[..., int]] = {}


def register_flops(name: str, formula: Callable[..., int]) -> None:
    """Registers the formula of an operator `flashtile::name`."""
    _FORMULAS[name] = formula
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _register(counter, name)
    elif _ON_IMPORT not in sys.meta_path:
        sys.meta_path.insert(0, _ON_IMPORT)


def product_flops(rows: int, inner: int, columns: int) -> int:
    """FLOPs of a product `[rows, inner] [inner, columns]`."""
    return 2 * rows * inner * columns


def values_on_host(tensor: Tensor) -> list[int] | None:
    """The values of an index tensor; None where it has none, as a fake one, or they cannot be read now."""
    if type(tensor) is not Tensor or tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return tensor.tolist()


def _register(counter: ModuleType, name: str) -> None:
    counter.register_flop_formula(getattr(torch.ops.flashtile, name), get_raw=True)(_FORMULAS[name])


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds PyTorch's module of the counter as the finders behind it do, and registers the formulas once it was
    imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another copy of flashtile may be there
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = self._then_register(loader.exec_module)
        return spec

    def _then_register(self, execute: Callable[[ModuleType], Any]) -> Callable[[ModuleType], Any]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            for name in _FORMULAS:
                _register(module, name)

        return exec_module


_ON_IMPORT = _OnImport()
