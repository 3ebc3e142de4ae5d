"""Calls of a backend that are watched, if environment variables ask for it when flashtile is imported: named in
profiles, and searched for the first NaN."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashtile._backends import observe

#: Looks for NaN and infinities in what calls return.
CHECK_NAN = observe.switch("FLASHTILE_CHECK_NAN")

_log = logging.getLogger("flashtile.check_nan")


def watching() -> bool:
    """Whether calls are watched."""
    return observe.NVTX or CHECK_NAN


def watched(operation: str, backend: str, module: ModuleType) -> ModuleType:
    """The module of a backend, or where calls are watched something that looks like it."""
    if not watching():
        return module
    return _Watched(operation, backend, module)


class _Watched(ModuleType):
    """Functions of a module, each in a range of its name."""

    def __init__(self, operation: str, backend: str, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._operation, self._backend, self._module = operation, backend, module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not inspect.isfunction(value):
            return value
        watching = _watch(f"flashtile.{self._operation}.{name}[{self._backend}]", value)
        setattr(self, name, watching)  # found before `__getattr__` from now on
        return watching


def _watch(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        before = _inspect_inputs(label, {**dict(zip(parameters, arguments)), **more}) if CHECK_NAN else None
        with observe.named(label):
            result = function(*arguments, **more)
        if before is not None:
            _check_outputs(label, result, before)
        return result

    return call


def _inspect_inputs(label: str, inputs: dict[str, Any]) -> dict[str, str] | None:
    """Each tensor in words, marked where it holds -inf; None where one holds NaN or +inf: that came from elsewhere."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{label}: FLASHTILE_CHECK_NAN=1 reads values on the host, which a CUDA graph cannot capture; capture "
            "without it"
        )
    words = {}
    for name, tensor in _tensors("", inputs):
        nan, positive, negative = _count(tensor)
        if nan or positive:
            _log.warning("%s: input %s already has %d NaN and %d inf, so it is not checked", label, name, nan, positive)
            return None
        words[name] = f"{name} {_describe(tensor)}" + (f" with {negative} -inf" if negative else "")
    return words


def _check_outputs(label: str, result: Any, inputs: dict[str, str]) -> None:
    """Raises FloatingPointError where a result has what no input had. If an input hides something by -inf, infinite
    results may be right; and -inf may be in what comes after the first result of a forward, such as lse."""
    hides = any(words.endswith("-inf") for words in inputs.values())
    forward = ".forward[" in label
    for place, (name, tensor) in enumerate(_tensors("", result)):
        nan, positive, negative = _count(tensor)
        infinite = 0 if hides else positive + (0 if forward and place else negative)
        if nan or infinite:
            what = f"the gradient of {name}" if ".backward" in label else name or "its result"
            raise FloatingPointError(
                f"{label}: {what} {_describe(tensor)} has {nan} NaN and {positive + negative} inf, "
                f"and no input has any. Inputs: {'; '.join(inputs.values())}"
            )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in a value, with names such as `side.bias`."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield name, value.detach()
        return
    if isinstance(value, dict):
        entries = list(value.items())
    elif hasattr(value, "_fields"):
        entries = list(zip(value._fields, value))
    elif dataclasses.is_dataclass(value):
        entries = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        entries = [(f"result {place}", entry) for place, entry in enumerate(value)]
    else:
        return
    for key, entry in entries:
        yield from _tensors(f"{name}.{key}" if name else str(key), entry)


def _count(tensor: Tensor) -> tuple[int, int, int]:
    """Elements that are NaN, inf and -inf."""
    kinds = torch.stack([tensor.isnan().sum(), tensor.isposinf().sum(), tensor.isneginf().sum()])
    nan, positive, negative = kinds.tolist()
    return nan, positive, negative


def _describe(tensor: Tensor) -> str:
    """Shape, dtype, and the largest absolute value of what is finite."""
    largest = tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, |x| up to {largest:.3g}"
