"""How a launch reaches NVIDIA's driver, or Triton's interpreter.

Triton's launcher object looks at every argument of every launch, and encodes TMA descriptors anew each time. That takes
longer than all the rest of a call. With the versions of Triton that are known here a launch therefore calls the
driver's own function and remembers its arguments, because the tensors of a repeated call are mostly where those of an
earlier one were: a launch is then a look-up and a call of C.

CUDA takes from each argument as many bytes as the parameter has. Every argument but a descriptor is therefore an
integer of 64 bits, floating point by its bits. Behind the parameters of a kernel Triton adds two pointers, to memory
that these kernels do not ask for.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import triton

from flashtile._backends import observe
from flashtile._backends.devices import triton_version


class Launcher(enum.Enum):
    """The function that a launch calls."""

    DRIVER = "the function of NVIDIA's driver"
    OBJECT = "Triton's launcher object, whatever is behind it"


@functools.cache
def launcher() -> Launcher:
    """The one that it calls with this Triton."""
    return Launcher.OBJECT if torch.version.hip is not None or triton_version() > _NEWEST_KNOWN else Launcher.DRIVER


#: The newest Triton of which it is known what its kernels take.
_NEWEST_KNOWN = 3, 9


def word(of: str, value: Any) -> Any:
    """The argument for a value of a type: float32 goes as an integer of its bits."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value if of == "fp32" else value


def placed(places: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in tuples, of which `places` has the numbers."""
    return tuple(arguments[at] if isinstance(at, int) else placed(at, arguments) for at in places)


# --- NVIDIA's driver --------------------------------------------------------------------------------------------------


@functools.cache
def driver() -> Any:
    """Its functions let go of Python's lock. They return 0, or the number of an error."""
    return ctypes.CDLL("libcuda.so.1")


def call_again(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Calls a function of the driver that has failed, and has done nothing. Perhaps this is the first that a thread
    asks of a GPU: such a thread has no context yet.

    Raises:
        RuntimeError: it fails again.
    """
    torch.cuda.mem_get_info()  # as any call of CUDA's runtime, it gives the thread the context of its device
    error = function(*arguments)
    if error:
        raise_error(error)


def raise_error(error: int) -> NoReturn:
    """Raises an error of the driver."""
    text = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()} ({error})")


class Descriptor:
    """An encoded TMA descriptor.

    Attributes:
        places: the addresses of what a kernel takes for it: the descriptor itself, its sizes and its strides.
        kept: the memory there.
    """

    __slots__ = ("kept", "places")

    def __init__(self, places: array[int], kept: Any) -> None:
        self.places, self.kept = places, kept


class DriverKernel:
    """A launch of a kernel that is loaded.

    Attributes:
        function: the driver's.
        grid: the beginning of CUDA's CUlaunchConfig, in words of 64 bits.
        places: the addresses of the arguments that are the same for all launches.
    """

    __slots__ = ("_fixed", "function", "grid", "places")

    def __init__(self, loaded: LoadedFunction, programs: int, fixed: Sequence[int]) -> None:
        """`fixed`: the last arguments, which are the same for all launches."""
        self.function = _POINTER(loaded.function)
        one = 1 << 32  # the second half of a word
        self.grid = programs | one, 1 | loaded.threads << 32, 1 | one, loaded.shared_memory
        self._fixed = array("q", (*fixed, 0, 0))
        self.places = word_addresses(self._fixed)


def word_addresses(words: array[int], numbers: Iterable[int] | None = None) -> array[int]:
    """The addresses of words of 64 bits: of those with these numbers, or of all."""
    first, count = words.buffer_info()
    return array("Q", [first + 8 * at for at in (range(count) if numbers is None else numbers)])


class LoadedFunction(NamedTuple):
    """A kernel on a device: the driver's function, threads of a program, and bytes of its shared memory."""

    function: int
    threads: int
    shared_memory: int


def load(compiled: Any, device: int) -> LoadedFunction:
    """Loads a kernel that Triton has compiled, for the rest of the process.

    Raises:
        triton.runtime.errors.OutOfResources: its programs take more shared memory than the device has.
    """
    warps, clusters, shared = compiled.packed_metadata
    metadata, utils = compiled.metadata, triton.runtime.driver.active.utils
    assert clusters == 1 and not (metadata.launch_cooperative_grid or metadata.launch_pdl)
    assert not (metadata.global_scratch_size or metadata.profile_scratch_size)
    most = utils.get_device_properties(device)["max_shared_mem"]
    if shared > most:
        raise triton.runtime.errors.OutOfResources(shared, most, "shared memory")
    _, function, *_ = utils.load_binary(compiled.name, compiled.kernel, shared, device)
    return LoadedFunction(function, 32 * warps, shared)


def driver_arguments(kernel: DriverKernel, stream: int, places: array[int]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of the driver's `cuLaunchKernelEx`, and the memory that some of them are in. `places`: addresses of
    the kernel's first arguments, which stay there."""
    parameters, config = places + kernel.places, array("Q", (*kernel.grid, stream, 0, 0))
    of_config, of_parameters = (_POINTER(each.buffer_info()[0]) for each in (config, parameters))
    return (of_config, kernel.function, of_parameters, None), (parameters, config)


#: A pointer as an argument of a function of C.
_POINTER = ctypes.c_void_p.from_param


def single_arguments(kernel: DriverKernel, stream: int, *given: Any) -> tuple[tuple[Any, ...], Any]:
    """The same of a launch by itself. `given`: the first arguments of the kernel, descriptors and integers."""
    places = array("Q")
    descriptors = [each for each in given if isinstance(each, Descriptor)]  # which come first
    for each in descriptors:
        places += each.places
    numbers = array("q", given[len(descriptors) :])
    arguments, memory = driver_arguments(kernel, stream, places + word_addresses(numbers))
    return arguments, (memory, numbers, descriptors)


# --- Triton's launcher object -----------------------------------------------------------------------------------------


def with_absent(source: Any, scalars: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """All run-time arguments of a kernel, a `launch.KernelSource`: None for those that are compiled away and not
    given."""
    rest = iter(given)
    types = source.types[: len(source.types) - len(scalars)]
    arguments = (*[None if of == "constexpr" else next(rest) for of in types], *scalars)
    assert not [*rest], f"{source.function.__name__}: more is given than it takes"
    return arguments


def with_all_arguments(
    compiled: Any, source: Any, programs: int, scalars: tuple[Any, ...]
) -> tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]:
    """Triton's launcher object for a kernel, a `launch.KernelSource`, and a function from the stream and what a launch
    is given to its arguments: tuples for NamedTuples, and the constants."""
    run = compiled.run  # loads the binary
    before = compiled.function, compiled.packed_metadata, None, None, None
    constants = [source.constants[name] for name in source.constant_names]
    places = tuple(source.nested(range(len(source.types))).values())

    def start(*passed: Any) -> None:
        try:
            run(*passed)
        except RuntimeError:  # perhaps it encodes a descriptor in a thread without a context: `call_again`
            torch.cuda.mem_get_info()
            run(*passed)

    def arguments(stream: int, *given: Any) -> tuple[Any, ...]:
        passed = with_absent(source, scalars, given)
        return (programs, 1, 1, stream, *before, *placed(places, passed), *constants), compiled

    return start, arguments


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
