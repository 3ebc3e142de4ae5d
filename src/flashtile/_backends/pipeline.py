"""The kernels of one pass and the buffers that they share, each described once, by name.

A `Kernel` describes one kernel: its function, what its parameters are, its constants, and how many thread blocks run. A
`Pipeline` has the kernels of a pass in order, and its buffers: tensors that each run is given, outputs, and parts of
one scratch buffer. A kernel takes a buffer through a parameter of the same name, such as `lse_ptr` or
`problem.side.lse` for "lse"; `Kernel.buffers` names the others. Launches, compilation ahead of time and tests follow
from this description.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile._backends import forgetters, observe, picker
from flashtile._backends.alignment import misalignment
from flashtile._backends.allocate import Layout, Scratch, allocator, layouts
from flashtile._backends.devices import interpreting
from flashtile._backends.launch import (
    GIVEN,
    KernelSource,
    Launch,
    Plan,
    Specialisation,
    plan_cache,
    pointer,
    pointers,
    specialise,
)
from flashtile._backends.launcher import call_again, driver, driver_arguments, word_addresses
from flashtile._backends.tma import TmaTensor


class Kernel(NamedTuple):
    """A kernel of a pass.

    Attributes:
        function: `@triton.jit` or `@gluon.jit`.
        parameters: by name; a `TmaTensor` for a TMA descriptor. More than the kernel takes may be here.
        constants: by name, likewise.
        programs: thread blocks; 0: it is not launched.
        buffers: of parameters whose names do not tell, the buffer.
        num_warps, num_stages, max_registers: as in `launch.KernelSource`.
    """

    function: Any
    parameters: Mapping[str, Any]
    constants: Mapping[str, Any]
    programs: int
    buffers: Mapping[str, str] = {}
    num_warps: int = 4
    num_stages: int = 1
    max_registers: int | None = None

    @property
    def moved(self) -> list[TmaTensor]:
        """The tensors that TMA moves, in the order of their parameters; those that this specialisation has."""
        given = map(self.parameters.get, self.function.arg_names)
        return [of for of in given if isinstance(of, TmaTensor) and of.box is not None]

    @property
    def described(self) -> dict[str, Any]:
        """The parameters as `launch.specialise` takes them."""
        return {name: of.parameter if isinstance(of, TmaTensor) else of for name, of in self.parameters.items()}

    @property
    def specialised(self) -> Specialisation:
        """Itself as it is compiled.

        Raises:
            TypeError: a parameter is not described.
        """
        options = self.num_warps, self.num_stages, self.max_registers
        return specialise(self.function, self.described, self.constants, *options)

    @property
    def source(self) -> KernelSource:
        return self.specialised.source

    def plan(self, device: torch.device) -> Plan:
        """Its launch. The run-time parameters whose values each launch is given come first; those whose values the plan
        has follow."""
        source, run_time = self.specialised
        given = [name for name, each in run_time.items() if each.value is GIVEN]
        scalars = (*[each.value for each in run_time.values()][len(given) :],)
        name = self.function.__name__
        assert GIVEN not in scalars, f"{name}: what a launch is given, {given}, comes before what the plan has"
        present = [name for name in given if run_time[name].type != "constexpr"]
        return Plan(source, self.programs, scalars, device, present)

    def buffer(self, parameter: str) -> str:
        """The buffer whose address a parameter takes."""
        name = parameter.rpartition(".")[2]
        return self.buffers.get(name) or name.removesuffix("_ptr")


class _Step(NamedTuple):
    """A launch.

    Attributes:
        makers: functions that make its descriptors from an address, and the places of these among all.
        places: of the addresses of its pointers, which follow.
        repeated: the place of a buffer for which there are several addresses, each with a launch of its own; None if
            there is one launch.
    """

    plan: Plan
    makers: Sequence[tuple[Callable[[int], tuple], int]]
    places: Sequence[int]
    repeated: int | None

    def descriptors(self, addresses: tuple) -> list[Any]:
        return [part for make, place in self.makers for part in make(addresses[place])]

    def launch(self, addresses: tuple) -> None:
        self.plan.launch(*self.descriptors(addresses), *[addresses[place] for place in self.places])


#: A tensor as launches take it: its address, or itself for the interpreter.
ADDRESS: Callable[[Tensor], Any] = pointer if interpreting() else Tensor.data_ptr


class Pipeline:
    """The launches of a pass.

    Attributes:
        plans: the launches of the kernels, by name, in order.
        outputs: layouts of what a run returns, by name.
        scratch: the parts of the buffer that kernels leave for one another; None where they leave nothing.
        launches: what a run launches, in order.
        run: enqueues the kernels. It is given addresses, as `launch.pointer` has them, and returns `outputs`, and
            behind them the scratch buffer, if there is one.
        on: the same from tensors, of which None are left out, and without the scratch buffer.
    """

    __slots__ = ("launches", "on", "outputs", "plans", "run", "scratch")

    def __init__(
        self,
        device: torch.device,
        kernels: Mapping[str, Kernel],
        given: Any,
        outputs: Mapping[str, Layout | None],
        scratch: Mapping[str, int] | None = None,
        zeroed: Collection[str] = (),
        repeated: Mapping[str, str] | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """
        Args:
            given: names of the buffers that `run` is given, in order; or a NamedTuple whose fields are these buffers,
                None for one that the call does not have.
            outputs: None for one that this call does not have.
            scratch: parts of the scratch buffer, in numbers of 32 bits; 0 for one that this call does not have.
            zeroed: outputs that are filled with zeros first, where they exist.
            repeated: kernels that are launched once for each address of a buffer; `run` is given a list for that one.
            unused: buffers that kernels take and do not touch, as their constants say. These get the address of the
                first buffer, and so do all buffers that this call does not have.

        Raises:
            TypeError: a kernel takes a buffer that the pass does not have.
        """
        self.plans = {name: kernel.plan(device) for name, kernel in kernels.items()}
        self.outputs = {name: layout for name, layout in outputs.items() if layout is not None}
        self.scratch = None if scratch is None else Scratch(**scratch)
        layouts = [*self.outputs.values(), *([] if self.scratch is None else [self.scratch.layout])]
        parts = () if self.scratch is None else ("", *self.scratch.parts)  # first the buffer itself
        fields: tuple[str, ...] = getattr(given, "_fields", ())
        places = dict.fromkeys((*unused, *fields, *outputs, *(scratch or ())), 0)
        given = [name for name, buffer in zip(fields, given) if buffer is not None] if fields else given
        places |= {name: place for place, name in enumerate((*given, *self.outputs, *parts))}
        launched = {name: kernel for name, kernel in kernels.items() if kernel.programs}
        self.launches = tuple(self.plans[name] for name in launched)
        often = {name: places[buffer] for name, buffer in (repeated or {}).items()}
        steps = [_step(kernel, self.plans[name], places, often.get(name)) for name, kernel in launched.items()]
        filled = [place for place, name in enumerate(self.outputs) if name in zeroed]
        self.run: Callable[..., list[Tensor]] = _runner(allocator(layouts, device), filled, self.scratch, steps, device)
        self.on = _on_tensors(self.run, len(self.outputs))


def launched(
    results: type | None, addresses: Callable[[Any], Hashable] = lambda tensors: misalignment(*tensors)
) -> Callable[[Callable[..., Pipeline]], Any]:
    """Makes a function of a backend, of `(tensors, *scalars)`, from one that plans its launches.

    The plan is a function of `(tensors, *scalars, at=, device=)`, where `tensors` are the layouts of a NamedTuple, and
    `at` is all that the plan is to know of addresses. It is kept for calls that look alike. The function that is made
    has the plan as `__wrapped__`, and as `pipeline(tensors, *scalars)` the launches for tensors that lie like these.

    Args:
        results: Tensor, for the first output, None if there is none; a NamedTuple with outputs for fields, None for one
            that there is not; or None for a function that writes to its tensors alone.
        addresses: what `at` is, from the tensors; without it, their addresses modulo 16, put together.
    """

    def launch(plan: Callable[..., Pipeline]) -> Any:
        planned = plan_cache(plan)

        def pipeline(tensors: Any, *scalars: Any) -> Pipeline:
            return planned(layouts(tensors), *scalars, at=addresses(tensors), device=tensors[0].device)

        @functools.wraps(plan)
        def run(tensors: Any, *scalars: Any) -> Any:
            launches = pipeline(tensors, *scalars)
            found = launches.on(tensors)
            if results is None or results is Tensor:
                return found[0] if found else None
            by_name = dict(zip(launches.outputs, found))
            return results._make(map(by_name.get, results._fields))  # type: ignore[attr-defined]

        run.pipeline = pipeline  # type: ignore[attr-defined]
        return run

    return launch


def _on_tensors(run: Callable[..., list[Tensor]], outputs: int) -> Callable[[Sequence[Tensor | None]], list[Tensor]]:
    """`Pipeline.on`."""
    return lambda tensors: run(*pointers(tensors))[:outputs]


def _runner(
    allocate: Callable[[], list[Tensor]],
    zeroed: Sequence[int],
    scratch: Scratch | None,
    steps: Sequence[_Step],
    device: torch.device,
) -> Callable[..., list[Tensor]]:
    """`Pipeline.run`. `zeroed`: places of outputs. Its own time counts: small calls wait for the host."""
    loaded: _Loaded | None = None
    index, always_named, profiling = device.index, observe.NVTX, observe.profiling

    def run(*given: Any) -> list[Tensor]:
        nonlocal loaded
        made = allocate()
        for place in zeroed:
            made[place].zero_()
        addresses = (*given, *map(ADDRESS, made))
        if loaded is not None and loaded.current_device() == index and not (always_named or profiling()):
            loaded.launch(addresses, loaded.current_stream(index))
            return made
        if scratch is not None:
            addresses += scratch.addresses(addresses[-1])
        for step in steps:
            if step.repeated is None:
                step.launch(addresses)
            else:
                for address in addresses[step.repeated]:
                    step.launch((*addresses[: step.repeated], address, *addresses[step.repeated + 1 :]))
        if loaded is None and steps and all(map(_by_driver, steps)):
            loaded = _Loaded(steps, scratch, len(given) + len(made))
        return made

    return run


def _by_driver(step: _Step) -> bool:
    """Whether the driver launches a kernel once, and it is loaded."""
    return step.repeated is None and isinstance(step.plan.launch, Launch) and step.plan.launch.kernel is not None


class _Loaded:
    """The kernels of a pipeline once they are loaded, and how the driver launches them. Their own time counts: small
    calls wait for the host.

    Attributes:
        current_device, current_stream: of PyTorch, by short names.
    """

    __slots__ = ("_moved", "_pack_into", "_scratch", "_start", "_steps", "current_device", "current_stream")

    def __init__(self, steps: Sequence[_Step], scratch: Scratch | None, count: int) -> None:
        """`count`: addresses of a run, without those of parts of the scratch buffer."""
        self._steps, self._scratch, self._start = steps, scratch, driver().cuLaunchKernelEx
        # Parts of the scratch buffer lie where that lies, which is the last.
        self._moved = picker([*dict.fromkeys(min(place, count - 1) for step in steps for _, place in step.makers)])
        self._pack_into = struct.Struct(f"{count + (0 if scratch is None else len(scratch.parts))}q").pack_into
        self.current_device, self.current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def launch(self, addresses: tuple[int, ...], stream: int) -> None:
        """Launches the kernels. Their arguments lie in memory that nobody else uses meanwhile."""
        unused = _unused_arguments(self, stream, *self._moved(addresses))
        arguments = unused.pop() if unused else self._arguments(addresses, stream)
        if arguments.addresses != addresses:
            arguments.addresses = addresses
            self._pack_into(arguments.numbers, 0, *self._with_scratch(addresses))
        start = self._start
        for each in arguments.of_driver:
            if start(*each):
                call_again(start, each)
        unused.append(arguments)

    def _with_scratch(self, addresses: tuple[int, ...]) -> tuple[int, ...]:
        return addresses if self._scratch is None else addresses + self._scratch.addresses(addresses[-1])

    def _arguments(self, addresses: tuple[int, ...], stream: int) -> _Arguments:
        return _Arguments(self._steps, addresses, self._with_scratch(addresses), stream)


class _Arguments:
    """The arguments of the launches of a pipeline, on one stream, and with descriptors of tensors at some addresses.

    Attributes:
        addresses: of the buffers of a run.
        numbers: these and those of the parts of the scratch buffer, where kernels find them.
        of_driver: the arguments of the driver's function, for each launch.
    """

    __slots__ = ("_kept", "addresses", "numbers", "of_driver")

    def __init__(
        self, steps: Sequence[_Step], addresses: tuple[int, ...], of_all: tuple[int, ...], stream: int
    ) -> None:
        self.addresses, self.numbers = addresses, array("q", of_all)
        self._kept, self.of_driver = [], []
        for step in steps:
            launch: Any = step.plan.launch
            descriptors = step.descriptors(of_all)
            places = array("Q")
            for each in descriptors:
                places += each.places
            places += word_addresses(self.numbers, step.places)
            arguments, memory = driver_arguments(launch.kernel, stream, places)
            self.of_driver.append(arguments)
            self._kept.append((descriptors, memory))


@functools.lru_cache(maxsize=4096)
def _unused_arguments(loaded: _Loaded, stream: int, *moved: int) -> list[_Arguments]:
    """Those for a pipeline, a stream, and tensors that TMA moves, that no thread uses now. The tensors of a repeated
    call are mostly where those of an earlier one were."""
    return []


forgetters.append(_unused_arguments.cache_clear)


def _step(kernel: Kernel, plan: Plan, places: Mapping[str, int], repeated: int | None) -> _Step:
    moved = kernel.moved
    pointers = [kernel.buffer(name) for name in plan.given if not isinstance(kernel.parameters.get(name), TmaTensor)]
    unknown = {*pointers, *(of.buffer for of in moved)} - places.keys()
    if unknown:
        raise TypeError(
            f"{kernel.function.__name__}: expected buffers of its pipeline, got {', '.join(sorted(unknown))}; name the "
            "buffer of each parameter in Kernel.buffers"
        )
    makers = [(of.maker(), places[of.buffer]) for of in moved]
    return _Step(plan, makers, [places[of] for of in pointers], repeated)
