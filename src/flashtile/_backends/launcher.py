"""Arguments of Triton's C function for a launch, of such types that one function serves many kernels.

Triton writes and compiles one in C for each list of parameter types, and a C compiler takes about a third of a second.
But CUDA takes from each argument as many bytes as the parameter has, and reads no argument past the last parameter. So
every argument but a TMA descriptor is an integer of 64 bits here, floating point by its bits, and zeros fill up to a
multiple of 16 arguments. A kernel then finds a function that was compiled for another one.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Sequence
from typing import Any

#: Arguments come in so many.
_TOGETHER = 16


def arguments_of(of: str) -> int:
    """Arguments for a parameter: of a descriptor, which is given encoded, itself, its shape and its strides."""
    return 1 + 2 * (of[: of.index("]")].count(",") + 1) if of.startswith("tensordesc") else 1


def filling(types: Sequence[str]) -> int:
    """How many zeros follow the arguments of these parameters."""
    return -len(types) % _TOGETHER


def launcher_types(types: Sequence[str]) -> list[str]:
    """The types for which Triton writes its function, of a kernel whose parameters have these."""
    return [of if of.startswith("tensordesc") else "i64" for of in types] + ["i64"] * filling(types)


def word(of: str, value: Any) -> Any:
    """The argument for a value of a type: float32 goes as an integer of its bits."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value if of == "fp32" else value


def placed(places: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in tuples, of which `places` has the numbers."""
    return tuple(arguments[at] if isinstance(at, int) else placed(at, arguments) for at in places)


def c_function(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton 3.6 wraps the launch of a kernel with TMA descriptors in a function that encodes them on every call. The
    arguments here hold them encoded (`tma.descriptor_maker`)."""
    wrapped = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    return wrapped.get("launcher", launch)


def with_all_arguments(launcher: Callable[..., None], source: Any) -> Callable[..., None]:
    """Passes on what Triton's launcher object takes for a kernel, a `launch.KernelSource`: tuples for NamedTuples, and
    the constants."""
    constants = [source.constants[name] for name in source.constant_names]
    places = tuple(source.nested(range(len(source.types))).values())
    others = 4 + 5  # before the arguments

    def enqueue(*passed: Any) -> None:
        launcher(*passed[:others], *placed(places, passed[others:]), *constants)

    return enqueue
