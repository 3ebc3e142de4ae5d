"""The Hopper kernels and their host side, on the emulated machine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.launch import ABSENT, KernelSource, Parameter, Plan, pointers
from flashtile._backends.launcher import with_absent
from flashtile._backends.pipeline import Pipeline
from flashtile._backends.tma import TmaTensor
from flashtile.ops.attention import hopper as attention_kernels
from flashtile.ops.attention import reference
from flashtile.ops.attention.call import describe_backward, describe_call
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs, Wanted
from flashtile.ops.common.split_keys.plan import SplitCall
from flashtile.ops.kv_cache import hopper as cache_kernels
from gluon_emulator import language
from gluon_emulator.machine import Machine
from gluon_emulator.memory import Descriptor, Memory, dtype_of
from gluon_emulator.values import BY_SIGNATURE, Pointer, Value, as_value
from support.attention.backend_calls import HOPPER

_LANGUAGE = "flashtile._backends.gluon"

#: Packages of kernels.
_PACKAGES = attention_kernels, cache_kernels

#: The type of a parameter that is a TMA descriptor.
_DESC = "tensordesc"


class EmulatedHopper:
    """The backend module `hopper` on a machine of so many multiprocessors. What comes first is drawn by lot.

    `held` of them work for another stream, all the time, so that programs which should begin there begin when others
    have ended.

    Attributes:
        launched: names of the kernels, in the order of their launches.
    """

    def __init__(self, multiprocessors: int, seed: int, held: int = 0) -> None:
        self.launched: list[str] = []
        self._resident = multiprocessors - held
        self._lots = random.Random(seed)
        self._memory = Memory()
        self._made: dict[str, Tensor] = {}  # by the last pipeline
        self._counter = torch.zeros(2, dtype=torch.int32)
        self.modules = _copies()
        machine = HOPPER._replace(multiprocessors=multiprocessors)
        changes = {
            "Pipeline": lambda *described, **more: self._emulated(_EmulatedPipeline(*described, **more)),
            "TmaTensor": _EmulatedTensor,
            "describe_call": functools.partial(describe_call, machine=machine),
            "describe_backward": lambda *given: describe_backward(*given)._replace(machine=machine),
            "tile_counter": lambda device: self._counter,
            "multiprocessors": lambda device: multiprocessors,
        }
        for module in self.modules.values():
            for name in changes.keys() & vars(module).keys():
                setattr(module, name, changes[name])

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        result = self.call(self.modules["launch"].forward, *arguments)
        assert not self._counter.any(), "a launch left its counter behind"
        return result

    def backward(self, inputs: BackwardInputs, side: SideInputs, spec: AttentionSpec, wanted: Wanted) -> Any:
        gradients = self.call(self.modules["launch"].backward, inputs, side, spec, wanted)
        if "row_statistics" not in self._made:
            return gradients
        return gradients._replace(bias=_bias_gradient(inputs, self._made["row_statistics"], side, spec))

    def latent(self, call: SplitCall, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Attention over a latent cache. `arguments`: q, the cache, the tensors of `rows.Sequences` and the factors as
        they are, and the length of all sequences."""

        def run(
            q: Tensor, cache: Tensor, indices: Sequence[Tensor | None], factors: Sequence[Tensor | None], length: int
        ) -> tuple[Tensor, Tensor]:
            pipeline = self.modules["latent"].latent_pipeline(call, torch.device("cpu"))
            out, lse, *_ = pipeline.run(*pointers((q, cache, *indices, *factors)), length)
            return out, lse

        return self.call(run, *arguments)

    def call(self, function: Callable, *arguments: Any) -> Any:
        """What a function returns. Kernels may touch the tensors given, and those that are made on the way."""
        self._memory = Memory()
        self._memory.know(self._counter, *tree_leaves(arguments))
        with self._memory:
            return function(*arguments)

    def _emulated(self, pipeline: Pipeline) -> Pipeline:
        for name, plan in pipeline.plans.items():
            if name == "combine":
                plan.launch = functools.partial(self._combine, plan)
            elif name in _PORTABLE:
                plan.launch = functools.partial(self._note, plan.source.function.__name__)
            elif plan.programs:
                plan.launch = functools.partial(self._launch_plan, plan)
        run = pipeline.run

        def run_and_keep(*given: Any) -> list[Any]:
            made = run(*given)
            self._made = dict(zip(pipeline.outputs, made))
            return made

        pipeline.run = run_and_keep
        return pipeline

    def _note(self, name: str, *given: Any) -> None:
        self.launched.append(name)

    def _combine(self, plan: Plan, *given: Any) -> None:
        """In the place of the portable kernel that puts the parts of splits together (`split_keys.attend`)."""
        source = plan.source
        self._note(source.function.__name__)
        of = dict(zip(source.names, with_absent(source, plan.scalars, given)))
        types = dict(zip(source.names, source.types))

        def tensor(name: str, *shape: int) -> Tensor:
            return self._memory.box(of[name], shape, contiguous_strides(shape), BY_SIGNATURE[types[name][1:]])

        rows, heads, seq_q, splits = (of[name] for name in ("rows", "heads", "seq_q", "splits"))
        width, batch = source.constants["HEAD_DIM_V"], rows // (heads * seq_q)
        served = torch.ones(seq_q, dtype=torch.bool)
        if types["most"] != "constexpr":
            queries = tensor("starts_ptr", of["batch"] + 1).diff()
            few = torch.repeat_interleave(queries <= of["most"], queries)
            served[: len(few)] = ~few
        parts = tensor("parts_ptr", splits, batch, seq_q, heads, width)[:, :, served].float()
        lse = tensor("parts_lse_ptr", splits, batch, heads, seq_q)[..., served].double()
        lse *= 1.0 if source.constants["OF_FORWARD"] else math.log(2)
        total = lse.logsumexp(0)
        weights = torch.exp(lse - total.clamp(min=-1e30)).transpose(-1, -2)[..., None]
        out = (parts.masked_fill(weights == 0, 0) * weights).sum(0)
        written = tensor("out_ptr", batch, seq_q, heads, width)
        written[:, served] = out.to(written.dtype)
        tensor("lse_ptr", batch, heads, seq_q)[..., served] = total.float()

    def _launch_plan(self, plan: Plan, *given: Any) -> None:
        self._launch(plan.source, plan.programs, *with_absent(plan.source, plan.scalars, given))

    def _launch(self, source: KernelSource, programs: int, *arguments: Any) -> None:
        function, names = source.function, source.names
        assert len(arguments) == len(names)
        given = {
            name: source.constants[name] if source.constants.get(name) is not None else _parameter(name, *each)
            for name, *each in zip(names, source.types, source.multiples, arguments)
        }
        constants = {name: source.constants[name] for name in source.constant_names}
        self.launched.append(function.__name__)
        with _disable_current_modes():
            machine = Machine(self._memory, self._lots, self._resident)
            machine.run(
                programs, source.num_warps, lambda: function(**source.nested(tuple(given.values())), **constants)
            )


def _parameter(name: str, of: str, multiple: int, argument: Any) -> Any:
    """What a kernel gets for a run-time argument, which must be what its compilation was promised."""
    if of == "constexpr":
        return None
    if of == _DESC:
        return argument
    if of.startswith("*"):
        argument = argument or 0  # None is an address too
    assert multiple == 1 or argument % multiple == 0, f"{name} must be a multiple of {multiple}: {argument}"
    if of.startswith("*"):
        return Value(argument, Pointer(BY_SIGNATURE[of[1:]]))
    return as_value(argument, BY_SIGNATURE[of])


class _EmulatedTensor(TmaTensor):
    """What TMA moves on the emulated machine."""

    @property
    def parameter(self) -> Parameter:
        return ABSENT if self.box is None else Parameter(_DESC)

    def maker(self) -> Callable[[int], tuple]:
        box, layout = self.box, self.layout
        assert box is not None and layout is not None
        described = dtype_of(self.dtype), list(box), layout.shape, layout.strides
        return lambda address: (Descriptor(*described, address, nan_outside=layout.nan_outside),)


#: The portable kernels of a pipeline, whose language this is not.
_PORTABLE = ("shares", "dbias", "bias_sum")


class _EmulatedPipeline(Pipeline):
    """With PyTorch's sums in the place of the portable kernels, which come last."""

    def __init__(self, *described: Any, **more: Any) -> None:
        super().__init__(*described, **more)
        self.run = functools.partial(self._run, self.run)

    def _run(self, run: Callable[..., list[Any]], *given: Any) -> list[Any]:
        made = run(*given)
        by_name = dict(zip(self.outputs, made))
        if "shares" in self.plans:
            for name in ("dk", "dv"):
                heads = by_name[name].shape[-2]
                by_name[name].copy_(by_name[f"{name}_shares"].unflatten(-2, (heads, -1)).sum(-2))
        if "bias_sum" in self.plans:
            by_name["dbias"].copy_(by_name["bias_parts"].sum(0))
        return made


def _bias_gradient(inputs: BackwardInputs, statistics: Tensor, side: SideInputs, spec: AttentionSpec) -> Tensor:
    """In the place of the portable kernel, whose language this is not: the reference, with lse and delta from the
    kernels' statistics."""
    assert side.bias is not None
    wide = [tensor.double() for tensor in (inputs.q, inputs.k, inputs.v)]
    exact = side._replace(bias=side.bias.double())
    with _disable_current_modes():
        out, lse = reference.forward(*wide, exact, spec)
        seen = lse > float("-inf")
        errors = (statistics[..., 0] - lse / math.log(2)).abs()[seen]
        assert not (errors > 0.05).any(), "statistics are not those of the scores"
        # Rows that see no key have no part in the gradient, whatever their dout is.
        dout = inputs.dout.masked_fill(~seen.transpose(-1, -2)[..., None], 0)
        dlse = (out * dout).sum(-1).transpose(-1, -2) - statistics[..., 1]
        upstream = dout.double(), dlse.masked_fill(~seen, 0)
        gradients = reference.backward(BackwardInputs(*upstream, *wide, out, lse), exact, spec, Wanted(bias=True))
    return gradients.bias.to(side.bias.dtype)


def _copies() -> dict[str, ModuleType]:
    """The modules of the Hopper kernels with the emulated language, as they are when they have been imported."""
    modules, imported = _imported_once_more()
    for name, module in modules.items():
        vars(module).clear()
        vars(module).update(imported[name])
        for value in imported[name].values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    return dict(modules)


@functools.cache
def _imported_once_more() -> tuple[dict[str, ModuleType], dict[str, dict[str, Any]]]:
    """The modules, imported once more with the emulated language, and what they define. Others keep those they have."""
    short = {package: [module.name for module in pkgutil.iter_modules(package.__path__)] for package in _PACKAGES}
    names = [f"{package.__name__}.{name}" for package, those in short.items() for name in those]
    with contextlib.ExitStack() as stack:
        for package, those in short.items():
            stack.enter_context(_set_aside(vars(package), those))
        stack.enter_context(_set_aside(sys.modules, [*names, _LANGUAGE]))
        sys.modules[_LANGUAGE] = language
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    return modules, {name: dict(vars(module)) for name, module in modules.items()}


def forget_copies() -> None:
    """For a test that changes what the modules' classes do: the next machine imports the modules anew."""
    _imported_once_more.cache_clear()


@contextlib.contextmanager
def _set_aside(names: dict[str, Any], those: list[str]) -> Iterator[None]:
    """Without some entries of a dictionary, which are afterwards as they were."""
    before = {name: names.pop(name) for name in those if name in names}
    try:
        yield
    finally:
        for name in those:
            names.pop(name, None)
        names.update(before)
