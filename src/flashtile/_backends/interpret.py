"""Launches in Triton's interpreter, which runs a kernel on a CPU, program after program: for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

from flashtile._backends import observe
from flashtile._backends.launcher import with_absent


def interpreted(source: Any, programs: int, scalars: tuple[Any, ...], range_name: str) -> Callable[..., None]:
    """A function `launch(*given)` that runs so many programs of a kernel, a `launch.KernelSource`."""
    _keep_comparisons_bool()

    def launch(*given: Any) -> None:
        values = dict(zip(source.names, map(_as_bytes, with_absent(source, scalars, given))))
        in_groups = {name for name in values if "." in name}
        values |= {name: source.constants[name] for name, of in zip(source.names, source.types) if of == "constexpr"}
        # A field that is a constant has no annotation to say so.
        values |= {
            name: triton.language.constexpr(values[name])
            for name in in_groups & source.constants.keys()
            if values[name] is not None
        }
        constants = {name: source.constants[name] for name in source.constant_names}
        with observe.named(range_name):
            source.function[(programs,)](**source.nested(tuple(values.values())), **constants)

    return launch


def _as_bytes(argument: Any) -> Any:
    """A mask as kernels read it: the interpreter takes the dtype from the tensor."""
    is_mask = isinstance(argument, torch.Tensor) and argument.dtype is torch.bool
    return argument.view(torch.uint8) if is_mask else argument


@functools.cache
def _keep_comparisons_bool() -> None:
    """The interpreter keeps a comparison under the type of what it compares. Made as large as a tile, it becomes such
    numbers, and Triton 3.9 refuses them as a mask."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, of: Any, scalar: Any) -> Any:
        is_comparison = scalar.data.dtype == bool
        return splat(self, of, TensorHandle(scalar.data, triton.language.int1) if is_comparison else scalar)

    InterpreterBuilder.create_splat = create_splat
