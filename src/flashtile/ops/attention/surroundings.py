"""The values that a Python function reads beside its arguments.

Something that was made by calling a function, such as its traced steps or the mask that it describes, may be used again
as long as all of that is as it was.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_SEQUENCES = (tuple, list, torch.Size)
#: What always does the same, if it is a library's.
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class Surroundings(NamedTuple):
    """A function's results can depend on these beside its arguments.

    Attributes:
        key: equal where two functions do the same with tensors of the same numbers.
        tensors: those within reach, in a fixed order.
    """

    key: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(function: Callable[..., Any]) -> Surroundings | None:
        """None where that cannot be told: then the function has to be called anew each time."""
        key: list[Any] = []
        tensors: list[Tensor] = []
        if not _describe(function, key, tensors, ()):
            return None
        return Surroundings(tuple(key), tuple(tensors))


def _describe(found: Any, key: list[Any], tensors: list[Tensor], within: tuple[Any, ...]) -> bool:
    """Adds a value that a function can see to the key and the tensors; False where what it does may change unseen."""
    if isinstance(found, Tensor):
        key.append((found.dtype, tuple(found.shape), found.requires_grad))
        tensors.append(found)
        return True
    if isinstance(found, _PLAIN):
        key.append((type(found), repr(found)))
        return True
    for outer in within:
        if found is outer:
            return True
    reachable = _reachable(found, key)
    if reachable is None:
        key.append(found)
        if not isinstance(found, _FIXED):
            return False
        return _of_library(found.__name__ if isinstance(found, types.ModuleType) else found.__module__)
    within = (*within, found)
    return all(_describe(value, key, tensors, within) for value in reachable)


def _reachable(found: Any, key: list[Any]) -> Iterable[Any] | None:
    """The values inside a function or a container, which is added to the key; None for other objects, and for functions
    of which that cannot be told."""
    kind = type(found)
    if kind is types.FunctionType:
        return _reachable_from_function(found, key)
    if kind in _SEQUENCES:
        key.append((kind, len(found)))
        return found
    if kind is dict and all(isinstance(name, str) for name in found):
        key.append((kind, *found))
        return found.values()
    if kind is functools.partial:
        key.append((kind, len(found.args), *found.keywords))
        return [found.func, *found.args, *found.keywords.values()]
    return None


def _reachable_from_function(function: types.FunctionType, key: list[Any]) -> list[Any] | None:
    names = _names(function.__code__)
    if names is None:
        return None
    values = []
    if cells := function.__closure__:
        try:
            values += [cell.cell_contents for cell in cells]
        except ValueError:  # a variable of an outer function that has no value yet
            return None
    of_module = function.__globals__
    if names:
        names = () if _of_library(of_module.get("__name__")) else tuple([name for name in names if name in of_module])
        values += [of_module[name] for name in names]
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    key.append((function.__code__, names, len(positional), *named))
    values += positional
    values += named.values()
    return values


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...] | None:
    """The global names that a function reads, those of functions inside it too; None if it imports what may change."""
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and not _of_library(instruction.argval):
            return None
        if instruction.opname == "LOAD_NAME" or "GLOBAL" in instruction.opname:
            names[instruction.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            of_inner = _names(inner)
            if of_inner is None:
                return None
            names |= dict.fromkeys(of_inner)
    return tuple(names)


def _of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in ("torch", "math", "builtins", "operator")
