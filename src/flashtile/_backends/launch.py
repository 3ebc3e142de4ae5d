"""Compiling Triton kernels and launching them with little host time. No formulas of any operation.

Triton's own launcher inspects every argument of every call to find the right specialisation (about 9 µs on the host).
Here an operation describes a kernel's parameters once, by name: a `Parameter` has the type, what divides the value, and
the value, unless that differs from call to call. `pipeline.Kernel` makes a `Plan` of the description, whose launch is
one C call. The same description serves ahead-of-time compilation for a GPU that is not present, and Triton's
interpreter.

A kernel's parameter may be a NamedTuple; its description is then one too, of parameters, constants and NamedTuples. It
is flattened: its fields are arguments like others, by names such as "numbers.bias.rows".

An operation looks its plans up under what a call looks like from outside (`plan_cache`). A call like an earlier one
thus costs no decision and no compilation.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource, CompiledKernel

from flashtile._backends import forgetters, observe, together
from flashtile._backends.assembler import assembler, without_line_tables
from flashtile._backends.devices import DeviceFacts, compile_target, device_facts, interpreting
from flashtile._backends.launcher import (
    DriverKernel,
    Launcher,
    LoadedFunction,
    call_again,
    driver,
    interpreted,
    launcher,
    load,
    single_arguments,
    with_all_arguments,
    word,
)

#: Before the name of a kernel, in the range of its launch.
_RANGE = "flashtile::launch "

#: Names of element types in Triton signatures.
ELEMENT_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
}

#: Stands for the value of a parameter that each launch is given.
GIVEN: Any = object()


class Parameter(NamedTuple):
    """A run-time parameter of a kernel in one specialisation.

    Attributes:
        type: as Triton writes it: "*bf16", "i32", "fp32", ...; "constexpr" for one that this specialisation does not
            use. The kernel sees None then.
        multiple: a power of two that divides it (bytes for pointers).
        value: what every launch of a plan passes; `GIVEN` for what differs from launch to launch.
    """

    type: str
    multiple: int = 1
    value: Any = GIVEN


#: A parameter that a specialisation does not use.
ABSENT = Parameter("constexpr")


def optional(present: bool, parameter: Parameter) -> Parameter:
    """A parameter that only some specialisations use."""
    return parameter if present else ABSENT


def pointer_to(dtype: torch.dtype | None, multiple: int = 1) -> Parameter:
    """A tensor's address, which each launch is given; None: there is no tensor."""
    return ABSENT if dtype is None else Parameter("*" + ELEMENT_TYPES[dtype], multiple)


def int32(value: int | None, multiple: int = 1) -> Parameter:
    """An integer, such as a number of rows; None: the specialisation has none."""
    return _number("i32", value, multiple)


def int64(value: int | None, multiple: int = 1) -> Parameter:
    """An integer that may pass 32 bits, such as a stride in elements."""
    return _number("i64", value, multiple)


def float32(value: float | None) -> Parameter:
    return _number("fp32", value, 1)


def _number(of: str, value: Any, multiple: int) -> Parameter:
    return Parameter("constexpr", 1, None) if value is None else Parameter(of, multiple, value)


def stride_parameters(name: str, strides: Mapping[str, int | None], multiple: int = 1) -> dict[str, Parameter]:
    """The parameters `stride_<name>_<dimension>`, in elements."""
    return {f"stride_{name}_{dimension}": int64(stride, multiple) for dimension, stride in strides.items()}


def named_constants(cut: Any) -> dict[str, Any]:
    """The fields of a NamedTuple as constants of kernels, by their names in capitals, such as BLOCK_N."""
    return {name.upper(): value for name, value in cut._asdict().items()}


class GroupShape(NamedTuple):
    """A NamedTuple without its values: the class, and for each field None or the shape of the NamedTuple there."""

    kind: type
    fields: tuple[GroupShape | None, ...]


class KernelSource(NamedTuple):
    """One specialisation of a kernel: all that decides its machine code but the target.

    Attributes:
        function: the `@triton.jit` or `@gluon.jit` kernel; its run-time parameters come before its constants. The
            fields of a parameter that is a NamedTuple count as parameters, and its constants among them as run-time
            parameters of type "constexpr".
        types: type of each run-time parameter, in order: "*bf16", "i32", "fp32", ...; "constexpr" for one that this
            specialisation does not use: its constant is None, and launches pass nothing in its place.
        multiples: for each run-time parameter, a power of two that divides it (bytes for pointers).
        constants: value of each parameter that is a constant or not used, by name.
        num_warps: warps per program.
        num_stages: depth of the software pipeline of loads.
        max_registers: of a thread, so that programs which stay on a multiprocessor fit there together; None = free.
            Only NVIDIA's compiler takes it.
        groups: each run-time parameter that is a NamedTuple: its name and the `GroupShape`.
    """

    function: Any
    types: tuple[str, ...]
    multiples: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None
    groups: tuple[tuple[str, GroupShape], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the run-time parameters; a field of a NamedTuple is "parameter.field"."""
        groups, count = dict(self.groups), len(self.types)
        return tuple(leaf for name in self.function.arg_names for leaf, _ in _leaves(name, groups.get(name)))[:count]

    @property
    def constant_names(self) -> list[str]:
        """Names of the parameters that are constants in every specialisation, in order."""
        fields = sum(len(list(_leaves(name, group))) - 1 for name, group in self.groups)
        return self.function.arg_names[len(self.types) - fields :]

    def nested(self, flat: Sequence[Any]) -> dict[str, Any]:
        """By the names of the kernel's run-time parameters, what is given for each of `names`."""
        groups, rest = dict(self.groups), iter(flat)
        constants = set(self.constant_names)
        return {name: _nested(groups.get(name), rest) for name in self.function.arg_names if name not in constants}


#: Describes a parameter that is a NamedTuple: the same NamedTuple of parameters, of values that are constants, and of
#: descriptions like this one.
Group = tuple[Any, ...]


def _leaves(name: str, group: GroupShape | None, path: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The fields of a parameter, or itself: their names, and where Triton finds them, by the numbers of fields."""
    if group is None:
        yield name, path
    else:
        for index, (field, shape) in enumerate(zip(group.kind._fields, group.fields)):  # type: ignore[attr-defined]
            yield from _leaves(f"{name}.{field}", shape, (*path, index))


def _nested(group: GroupShape | None, flat: Iterator[Any]) -> Any:
    """The NamedTuple, made of the next values of `flat`."""
    return next(flat) if group is None else group.kind(*(_nested(shape, flat) for shape in group.fields))


class Specialisation(NamedTuple):
    """A kernel as it is compiled, and its run-time parameters by name, with the fields of NamedTuples."""

    source: KernelSource
    run_time: dict[str, Parameter]


def specialise(
    function: Any,
    parameters: Mapping[str, Parameter | Group],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 1,
    max_registers: int | None = None,
) -> Specialisation:
    """The specialisation of a kernel, all of whose parameters are described. `parameters` and `constants` may have more
    than it takes, so that kernels which belong together share them.

    Raises:
        TypeError: a parameter is described in neither of them.
    """
    names = function.arg_names
    unknown = [name for name in names if name not in parameters and name not in constants]
    if unknown:
        raise TypeError(
            f"{function.__name__}: expected a description of each parameter, got none of {', '.join(unknown)}; add it "
            "to the parameters or the constants of the kernel's plan"
        )
    known = {name: constants[name] for name in names if name in constants}
    described = {name: parameters[name] for name in names if name not in known}
    assert list(described) == names[: len(described)], f"{function.__name__}: run-time parameters come before constants"
    run_time: dict[str, Parameter] = {}
    shapes = [(name, _flatten(name, each, run_time)) for name, each in described.items()]
    known |= {name: parameter.value for name, parameter in run_time.items() if parameter.type == "constexpr"}
    known |= {name: None for name, value in known.items() if value is GIVEN}
    source = KernelSource(
        function,
        types=(*[parameter.type for parameter in run_time.values()],),
        multiples=(*[parameter.multiple for parameter in run_time.values()],),
        constants=known,
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=max_registers,
        groups=(*[(name, shape) for name, shape in shapes if shape is not None],),
    )
    return Specialisation(source, run_time)


def _flatten(name: str, described: Any, found: dict[str, Parameter]) -> GroupShape | None:
    """Adds a parameter, or the fields of a NamedTuple and of those in it, and returns the NamedTuple's shape; a plain
    value is a constant. Plans of new shapes wait for this."""
    if type(described) is Parameter:
        found[name] = described
    elif isinstance(described, tuple) and hasattr(described, "_fields"):
        fields = zip(described._fields, described)
        return GroupShape(type(described), (*[_flatten(f"{name}.{field}", each, found) for field, each in fields],))
    else:
        found[name] = Parameter("constexpr", 1, described)
    return None


class Plan:
    """A launch without what differs from call to call: `plan.launch(*given)`, where tensors are as `pointer` has them.
    It is given the run-time parameters that the plan has no value of, but for those that are compiled away.

    The kernel is compiled at the first launch, unless Triton's disk cache has it.

    Attributes:
        source: what is launched.
        programs: thread blocks; 0: `launch` does nothing.
        given: names of the parameters that launches are given, in order.
        scalars: the last run-time arguments, which are the same for all launches.
        launch: enqueues the kernel on the device's current stream.
    """

    __slots__ = ("device", "given", "launch", "programs", "scalars", "source")

    def __init__(
        self,
        source: KernelSource,
        programs: int,
        scalars: tuple[Any, ...],
        device: torch.device,
        given: Sequence[str] = (),
    ) -> None:
        self.source, self.programs, self.scalars, self.device, self.given = source, programs, scalars, device, given
        self.launch: Callable[..., None] = self._first_launch if programs else _launch_nothing

    def _first_launch(self, *given: Any) -> None:
        if _noted:
            _noted[-1].append(self.source)
            return
        if not interpreting():
            _load_with_others(self)
        self.launch = make_launch(self.source, self.programs, self.scalars, self.device)
        self.launch(*given)


_noted: list[list[KernelSource]] = []


@contextlib.contextmanager
def noting_kernels() -> Iterator[list[KernelSource]]:
    """Within this context plans that were not launched before launch nothing, so results are undefined: what they would
    compile is noted."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def _launch_nothing(*given: Any) -> None:
    """Stands for a launch of no programs."""


_Made = TypeVar("_Made")


def plan_cache(make: Callable[..., _Made]) -> functools._lru_cache_wrapper[_Made]:
    """Keeps what a function plans, by its arguments: all that a call shows without its tensors' contents."""

    @functools.wraps(make)
    def plan(*arguments: Any, **named: Any) -> _Made:
        with _collecting_nothing():
            return make(*arguments, **named)

    cached = functools.lru_cache(maxsize=4096)(plan)
    forgetters.append(cached.cache_clear)
    return cached


def compile_kernel(source: KernelSource, device: DeviceFacts) -> CompiledKernel:
    """Compiles for `device`, which need not be present. Uses Triton's disk cache."""
    constants = source.constant_names
    signature = {**source.nested(source.types), **dict.fromkeys(constants, "constexpr")}
    paths = _paths(source)
    attributes = {
        path: [["tt.divisibility", multiple]]
        for path, of, multiple in zip(paths.values(), source.types, source.multiples)
        if multiple > 1 and of != "constexpr"  # from 3.7 on what is not passed must state nothing
    }
    known = {paths.get(name, name): value for name, value in source.constants.items()}
    make_source = _gluon_source() if source.function.is_gluon() else ASTSource
    ast = make_source(source.function, signature, constexprs=known, attrs=attributes)
    # Fused multiply-adds are Triton's default no longer from 3.10 on.
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    if source.max_registers and device.is_cuda:
        options["maxnreg"] = source.max_registers
    with _collecting_nothing(), without_line_tables(), assembler(device) as cache_key:
        return triton.compile(ast, target=compile_target(device), options=options, **cache_key)


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Python's search for cyclic garbage takes 5 to 10 % of the time to compile, half of that to plan, and finds
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _paths(source: KernelSource) -> dict[str, tuple[int, ...]]:
    """The place where Triton finds each run-time parameter: its number, and in a NamedTuple the number of the field."""
    groups, known = dict(source.groups), set(source.constant_names)
    return {
        leaf: path
        for index, name in enumerate(source.function.arg_names)
        if name not in known
        for leaf, path in _leaves(name, groups.get(name), (index,))
    }


def _gluon_source() -> type[ASTSource]:
    from flashtile._backends.gluon import GluonASTSource

    return GluonASTSource


def make_launch(
    source: KernelSource, programs: int, scalars: tuple[Any, ...], device: torch.device
) -> Callable[..., None]:
    """A function `launch(*given)` that enqueues so many programs of a kernel on the device's current stream."""
    name = _RANGE + source.function.__name__
    if interpreting():
        observe.log_kernel(source, device)
        return interpreted(source, programs, scalars, name)
    loaded = _loaded(source, device)
    if isinstance(loaded, LoadedFunction):
        kernel = DriverKernel(loaded, programs, _words(source, scalars))
        return Launch(driver().cuLaunchKernelEx, functools.partial(single_arguments, kernel), device, name, kernel)
    return Launch(*with_all_arguments(loaded, source, programs, scalars), device, name)


class Launch:
    """A launch of a kernel that is loaded, a function of what each launch is given.

    Attributes:
        start: enqueues the kernel.
        arguments: a function from the stream and what the launch is given to those of `start`, and what keeps them.
        kernel: what the driver launches; None where Triton's launcher object does.
    """

    __slots__ = ("_device", "_name", "arguments", "kernel", "start")

    def __init__(
        self,
        start: Callable[..., Any],
        arguments: Callable[..., tuple[tuple[Any, ...], Any]],
        device: torch.device,
        name: str,
        kernel: DriverKernel | None = None,
    ) -> None:
        self.start, self.arguments, self.kernel, self._device, self._name = start, arguments, kernel, device, name

    def __call__(self, *given: Any) -> None:
        if unseen(self._device):
            self._enqueue(given)
        else:
            with torch.cuda.device(self._device), observe.named(self._name):
                self._enqueue(given)

    def _enqueue(self, given: tuple[Any, ...]) -> None:
        arguments, _ = self.arguments(torch._C._cuda_getCurrentRawStream(self._device.index), *given)
        if self.start(*arguments):
            call_again(self.start, arguments)


def unseen(device: torch.device) -> bool:
    """Whether a launch needs nothing but a call of the driver: the device is the current one, and no profile is to have
    the launch's name."""
    return torch._C._cuda_getDevice() == device.index and not (observe.NVTX or observe.profiling())


def _words(source: KernelSource, scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a kernel behind those that a launch is given, for the driver: without constants and parameters
    that are compiled away."""
    first = len(source.types) - len(scalars)
    assert "fp32" not in source.types[:first], f"{source.function.__name__}: float32 is the same for all launches"
    return (*[word(of, value) for of, value in zip(source.types[first:], scalars) if of != "constexpr"],)


#: Kernels that are on a device, for the rest of the process: as the driver has them, or as Triton has compiled them.
_LOADED: dict[tuple[Any, ...], LoadedFunction | CompiledKernel] = {}


def _load_with_others(plan: Plan) -> None:
    """Compiles and loads the kernel of a plan together with those of the plans that will be launched soon."""
    if _key(plan.source, plan.device) not in _LOADED:
        plans = [each for each in (plan, *together.launched_soon()) if each.programs]
        new = {_key(each.source, each.device): each for each in plans}
        together.run([functools.partial(_loaded, each.source, each.device) for each in new.values()])


def _key(source: KernelSource, device: torch.device) -> tuple[Any, ...]:
    return (*source._replace(constants=tuple(source.constants.items())), device)  # type: ignore[arg-type]


def _loaded(source: KernelSource, device: torch.device) -> LoadedFunction | CompiledKernel:
    key = _key(source, device)
    found = _LOADED.get(key)
    if found is None:
        observe.log_kernel(source, device)
        with torch.cuda.device(device):
            compiled = compile_kernel(source, device_facts(device))
            if launcher() is Launcher.DRIVER:
                compiled = load(compiled, triton.runtime.driver.active.get_current_device())
            found = _LOADED[key] = compiled
    return found


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


#: The form in which `launch` takes a tensor: its address, or itself for the interpreter. None is for a kernel whose
#: constants say that there is no tensor.
pointer: Callable[[Tensor | None], Any] = (lambda tensor: tensor) if interpreting() else _address
#: The same of several. None stands for one that the specialisation does not have, and is left out.
pointers: Callable[[Iterable[Tensor | None]], list[Any]] = (
    (lambda tensors: [tensor for tensor in tensors if tensor is not None]) if interpreting() else _addresses
)
