"""The parts of all benchmarks: cases, implementations, and the problem of a case, which binds implementations to its
tensors and judges their results."""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtile import testing
from flashtile.bench.start import UserError, installed
from flashtile.bench.timing import Timer, Uncaptured, make_timer, peak_facts

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}

_Named = TypeVar("_Named")
_Case = TypeVar("_Case", bound="AnyCase")


class AnyCase:
    """One call. Cases are frozen dataclasses, whose fields are the keys of `case` in a record."""

    op: ClassVar[str]  # in records
    #: Fields that earlier records do not have; where a case has their default, its record has none of them either.
    later: ClassVar[tuple[str, ...]] = ()
    dtype: str

    @property
    def name(self) -> str:
        """A readable identifier, that `--cases` patterns match."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """Its kind; means are taken over the cases of a kind."""
        return self.op

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @classmethod
    def from_record(cls: type[_Case], record: Mapping[str, Any]) -> _Case:
        """The case of a record's row; keys that an older record does not have take their defaults."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})

    def record(self) -> dict[str, Any]:
        """The `case` object of a record: the same for every implementation."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name not in self.later or value != getattr(type(self), name)
        }

    def flops(self, phase: str) -> float | None:
        """Floating-point operations of a phase; None where bytes are what counts."""
        return None

    def bytes(self, phase: str) -> int:
        """Bytes that must move at least: every input read once, every output written once."""
        raise NotImplementedError

    def unit(self, phase: str) -> str:
        """The unit of what limits its speed."""
        return "GB/s" if self.flops(phase) is None else "TFLOP/s"


@dataclass(frozen=True)
class Implementation:
    """One way to compute the cases of a benchmark."""

    name: str
    devices: tuple[str, ...] = ("cuda", "cpu")
    #: From a case and its tensors, what computes it.
    build: Callable[..., Any] = lambda *given: None
    #: Why it cannot run a case on a device, or None.
    unsupported: Callable[[Any, torch.device], str | None] = lambda case, device: None
    package: tuple[str, str] | None = None  # a module that must be installed, and its name in a registry
    heads_first: bool = False  # its layout is `[B, H, S, D]` instead of `[B, S, H, D]`; not of packed batches
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # around its calls
    default: bool = True  # measured when no `--impl` is given
    own_dropout: bool = False  # it draws bits of its own, so no other implementation drops the same weights
    compiles: bool = True  # at its first call
    judged: bool = True  # its results are those of the case; not of a copy, or of a step of a case

    @property
    def ours(self) -> bool:
        return is_ours(self.name)

    def missing(self) -> str | None:
        """Why it cannot run at all, or None."""
        module, name = self.package or ("torch", "")
        return None if installed(module) else f"{name} is not installed"

    def reason(self, case: Any, device: torch.device) -> str | None:
        """Why it cannot run a case here, or None."""
        return self.missing() or self.unsupported(case, device)


class Verdict(NamedTuple):
    """Judgement of one phase: the largest absolute difference from the oracle, and what is wrong, or None."""

    error: float
    why: str | None


def judge(tensors: Iterable[tuple[str, Tensor, Tensor, Tensor]]) -> Verdict:
    """Holds results to the project's one tolerance policy. `tensors`: name (which may come several times, with its
    parts), what was found, the exact result, and the eager one in the result's dtype."""
    worst, wrong = 0.0, dict[str, str]()
    for name, found, exact, eager in tensors:
        if found.shape != exact.shape:
            wrong.setdefault(name, f"{name}: shape {found.shape}, expected {exact.shape}")
            continue
        worst = max(worst, testing.error(found, exact) if bool(found.isfinite().all()) else float("inf"))
        try:
            testing.assert_close(name, found, exact, eager)
        except AssertionError as error:
            wrong.setdefault(name, str(error))
    return Verdict(worst, "wrong result: " + "; ".join(wrong.values()) if wrong else None)


Tensors = list[Tensor]


@dataclass
class Inputs:
    """Tensors of a case."""

    leaves: dict[str, Tensor]  # take a gradient
    others: dict[str, Tensor]  # labels, masks, tables
    upstream: Tensors  # the gradients of the outputs, in their order


@dataclass(frozen=True)
class Way:
    """How an implementation computes a case, in the layout it calls its own."""

    function: Callable[..., Any]  # own leaves -> its output, or outputs
    own_leaves: Callable[[Tensors], Tensors] = list  # from the case's leaves
    own_upstream: Callable[[Tensors], Tensors] = list  # from the gradients of the case's outputs
    outputs: Callable[[Tensors], Tensors] = list  # from its outputs to the case's
    gradients: Callable[[Tensors], Tensors] = list  # from the gradients of its leaves to those of the case's
    own_bits: bool = False  # drops elements by random bits of its own, which must be read off its results


class Bound:
    """Calls of one implementation with its own copies of the leaves, without arguments. `outputs`: their names. `peak`:
    the phase that is told the memory of forward and backward. `records`: the forward keeps what a backward needs.
    `captured`: a CUDA graph may hold the backward."""

    def __init__(
        self, way: Way, inputs: Inputs, outputs: Sequence[str], peak: str, records: bool = False, captured: bool = True
    ) -> None:
        self.way, self._inputs, self._names, self._peak = way, inputs, outputs, peak
        self._records, self._captured = records, captured
        copies = (own.clone(memory_format=torch.contiguous_format) for own in self._own_leaves())
        self._leaves = [copy.requires_grad_() for copy in copies]
        # Some peers look at whether a leaf wants a gradient even where autograd is off. Writing to `data`, unlike to
        # `detach()`, leaves a graph that was kept for the backward valid.
        self._constants = [leaf.data for leaf in self._leaves]
        self._outputs: Tensors = []
        self._upstream: Tensors = []

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """For each phase what is timed."""
        backward = self.backward if self._captured else Uncaptured(self.backward)
        forward = self.forward if self._records else self.forward_without_grad
        others = {"fwd+bwd": self.forward_backward, "fwd-nograd": self.forward_without_grad}
        return {"fwd": forward, "bwd": backward, **others}

    def forward(self) -> Tensors:
        """A forward as in training: what the backward needs is kept."""
        return as_list(self.way.function(*self._leaves))

    def forward_without_grad(self) -> Tensors:
        """A forward that keeps nothing for a backward."""
        with torch.no_grad():
            return as_list(self.way.function(*self._constants))

    def backward(self) -> tuple[Tensor, ...]:
        """The backward alone, through the graph of the last results of a backward."""
        return torch.autograd.grad(self._outputs, self._leaves, self._upstream, retain_graph=True)

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self._leaves, self._upstream)

    def results(self, phase: str) -> dict[str, Tensor]:
        """Runs a phase once on fresh copies of the inputs; outputs, and after a backward gradients (`d` + name)."""
        for constant, source in zip(self._constants, self._own_leaves(), strict=True):
            constant.copy_(source)  # peers that work in place have written over what they were given
        if not phase.endswith("bwd"):
            return self._named_outputs(self.calls[phase]())
        outputs = self.forward()
        upstream = zip(outputs, self.way.own_upstream(self._inputs.upstream), strict=True)
        # In the strides of the outputs, so that no implementation has to rearrange them first.
        self._upstream = [torch.empty_like(out, requires_grad=False).copy_(d) for out, d in upstream]
        results = self._named_outputs([out.detach().clone() for out in outputs])
        if phase == "bwd":
            self._outputs = outputs  # the graph that every backward alone goes through
        gradients = torch.autograd.grad(outputs, self._leaves, self._upstream, retain_graph=phase == "bwd")
        names = [f"d{name}" for name in self._inputs.leaves]
        return results | dict(zip(names, self.way.gradients(list(gradients)), strict=True))

    def facts(self, phase: str) -> dict[str, Any]:
        """Further keys of the row of a phase."""
        return peak_facts(self.forward_backward, self._leaves) if phase == self._peak else {}

    def _own_leaves(self) -> Tensors:
        return self.way.own_leaves(list(self._inputs.leaves.values()))

    def _named_outputs(self, outputs: Tensors) -> dict[str, Tensor]:
        return dict(zip(self._names, self.way.outputs(outputs), strict=True))


def as_list(outputs: Any) -> Tensors:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


class Problem(ABC):
    """A case on a device."""

    phases: tuple[str, ...] = ("fwd", "bwd")

    def __init__(self, case: Any, device: torch.device) -> None:
        self.case, self.device, self.op = case, device, case.op

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        """Why an implementation cannot run a phase here, or None."""
        return implementation.reason(self.case, self.device)

    def measured_phases(self, implementation: Implementation) -> Sequence[str]:
        """The phases of an implementation that have rows; none where it is not meant for the case."""
        return self.phases

    def labels(self, phase: str) -> dict[str, Any]:
        """Keys of the rows of a phase, where its name does not say all."""
        return {}

    def timer(self, call: Callable[[], Any]) -> Timer:
        return make_timer(call, self.device)

    @abstractmethod
    def bind(self, implementation: Implementation) -> Any:
        """An implementation with its own copy of the tensors: a `Bound`, or what has its calls, results and facts."""

    @abstractmethod
    def judge(self, bound: Any, phase: str, results: dict[str, Tensor]) -> Verdict:
        """Whether the results of a phase are right."""

    def speed(self, phase: str, ms: float) -> dict[str, Any]:
        """The keys of a row that say its speed beside the time, `tflops` and `gbps` among them."""
        flops = self.case.flops(phase)
        return {"tflops": None if flops is None else flops / ms / 1e9, "gbps": self.case.bytes(phase) / ms / 1e6}


def is_ours(impl: str) -> bool:
    return impl.startswith("flashtile")


def select_named(option: str, names: Iterable[str], known: Mapping[str, _Named], place: str) -> list[_Named]:
    """The things that an option names, each once. Raises UserError if a name is unknown in this place."""
    chosen = dict.fromkeys(names)
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"{option}: no {', '.join(unknown)} on {place}; there are: {', '.join(known)}")
    return [known[name] for name in chosen]


def select_implementations(
    implementations: Iterable[Implementation], names: Sequence[str], device: torch.device
) -> list[Implementation]:
    """The named implementations, or a device's defaults. Raises UserError for an unknown name."""
    here = {each.name: each for each in implementations if device.type in each.devices}
    return select_named("--impl", names or [each.name for each in here.values() if each.default], here, device.type)


def select_cases(cases: Sequence[_Case], patterns: Sequence[str]) -> list[_Case]:
    """The cases whose name matches a shell pattern (`d64-causal-*`) or has a bare word. UserError if none does."""
    chosen = [] if patterns else list(cases)
    for pattern in patterns:
        glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = [case for case in cases if fnmatch.fnmatch(case.name, glob)]
        if not found:
            names = ", ".join(case.name for case in cases)
            raise UserError(f"--cases: {pattern!r} matches no case; there are: {names}")
        chosen += [case for case in found if case not in chosen]
    return chosen


def spread(count: int, total: int, device: torch.device) -> Tensor:
    """`count` indices of `total`, evenly spaced, the first and the last among them; at least two of two or more."""
    return torch.linspace(0, total - 1, min(max(2, count), total), device=device).round().long()


def free_memory(device: torch.device) -> int:
    """Bytes of memory that can still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return int(dict(line.split(":", 1) for line in file)["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return (device_memory(device) or 2**34) // 2


def half_dtype(device: torch.device) -> str:
    """The dtype of 16 bits that is measured on a device: bfloat16, or float16 on GPUs without bfloat16 products."""
    lacks = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if device.type == "cuda" and lacks else "bf16"


def check_elements(most: int, device: torch.device) -> int:
    """Elements of one float64 matrix that a check may hold at once: `most`, or fewer on a GPU with little memory, of
    which one matrix takes a 32nd."""
    return min(most, (device_memory(device) or 2**40) // 256)


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
