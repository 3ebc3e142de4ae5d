"""How a launch reaches the driver, or Triton's interpreter. Versions of Triton differ in the function for the driver,
and in what that function takes.

Triton's launcher object looks at every argument of every launch, and encodes TMA descriptors anew each time. That takes
as long as all the rest of a call. The C functions behind it that are known here are therefore called directly, with
plain arguments: no tuples, no constants, and descriptors that are encoded already (`tma.descriptor_maker`).

CUDA takes from each argument as many bytes as the parameter has, and reads no argument past the last parameter. Every
argument but a descriptor is therefore an integer of 64 bits, floating point by its bits. Triton 3.6 writes a function
in C for each list of parameter types, and a C compiler takes about a third of a second: zeros fill up to a multiple of
16 arguments there, and a kernel finds a function that was compiled for another one.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from flashtile._backends import observe
from flashtile._backends.devices import triton_version


class Launcher(enum.Enum):
    """The kinds of function that a launch may call."""

    TYPED_FUNCTION = "the C function that Triton writes for a list of parameter types"
    GENERAL_FUNCTION = "the C function for all kernels, which is told the types and takes the arguments as a tuple"
    OBJECT = "Triton's launcher object, whatever is behind it"


@functools.cache
def launcher() -> Launcher:
    """The one that this Triton has."""
    if torch.version.hip is not None or triton_version() > _NEWEST_KNOWN:
        return Launcher.OBJECT
    return Launcher.TYPED_FUNCTION if triton_version() == (3, 6) else Launcher.GENERAL_FUNCTION


#: The newest Triton whose C function is known here.
_NEWEST_KNOWN = 3, 9
#: With `Launcher.TYPED_FUNCTION` arguments come in so many.
_TOGETHER = 16


def filling(types: Sequence[str]) -> int:
    """How many zeros follow the arguments of these parameters."""
    return -len(types) % _TOGETHER if launcher() is Launcher.TYPED_FUNCTION else 0


def launcher_types(types: Sequence[str]) -> list[str]:
    """The types that Triton's function is made for or told, of a kernel whose parameters have these."""
    return [of if of.startswith("tensordesc") else "i64" for of in types] + ["i64"] * filling(types)


def word(of: str, value: Any) -> Any:
    """The argument for a value of a type: float32 goes as an integer of its bits."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value if of == "fp32" else value


def placed(places: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in tuples, of which `places` has the numbers."""
    return tuple(arguments[at] if isinstance(at, int) else placed(at, arguments) for at in places)


#: Held while a kernel's C function is loaded. Triton 3.6 loads each as a module of the same name. For a name Python
#: keeps one object, which gets the function of any module that is loaded again. A thread could thus take that of
#: another.
_loading = threading.Lock()


def direct(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The C function that launches a kernel, which was compiled for `launcher_types`: `function(programs, 1, 1, stream,
    *before, *arguments)`, and what `before` is."""
    with _loading:
        run = compiled.run  # loads the binary
    function, metadata = compiled.function, compiled.packed_metadata
    assert not run.global_scratch_size and not run.profile_scratch_size
    flags, hooks, scratch = (run.launch_cooperative_grid, run.launch_pdl), (None, None), (None, None)
    if launcher() is Launcher.TYPED_FUNCTION:
        return _unwrapped(run.launch), (function, *flags, *scratch, metadata, None, *hooks)
    types = run.arg_annotations, run.kernel_signature
    before = function, *flags, metadata, None, *hooks, *scratch, *types
    return _taking_one(triton.runtime.driver.active.utils.launch, 4 + len(before)), before


def _taking_one(launch: Callable[..., None], others: int) -> Callable[..., None]:
    """The general function takes the arguments of a kernel as one, behind so many others."""

    def enqueue(*passed: Any) -> None:
        launch(*passed[:others], passed[others:])

    return enqueue


def _unwrapped(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton 3.6 wraps its function for a kernel with descriptors in one that encodes them."""
    wrapped = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    return wrapped.get("launcher", launch)


def with_absent(source: Any, scalars: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """All run-time arguments of a kernel, a `launch.KernelSource`: None for those that are compiled away and not
    given."""
    rest = iter(given)
    types = source.types[: len(source.types) - len(scalars)]
    arguments = (*[None if of == "constexpr" else next(rest) for of in types], *scalars)
    assert not [*rest], f"{source.function.__name__}: more is given than it takes"
    return arguments


def with_all_arguments(run: Callable[..., None], source: Any, scalars: tuple[Any, ...]) -> Callable[..., None]:
    """Passes on what Triton's launcher object takes for a kernel, a `launch.KernelSource`: tuples for NamedTuples, and
    the constants."""
    constants = [source.constants[name] for name in source.constant_names]
    places = tuple(source.nested(range(len(source.types))).values())
    others = 4 + 5  # before the arguments

    def enqueue(*passed: Any) -> None:
        arguments = with_absent(source, scalars, passed[others:])
        run(*passed[:others], *placed(places, arguments), *constants)

    return enqueue


# --- Triton's interpreter, which runs a kernel on a CPU, program after program: for tests -----------------------------


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
