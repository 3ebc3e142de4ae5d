"""Benchmarks of the operations beside attention: what a case of one is, ways to compute it, and the problem of a case.

The formula, in ordinary PyTorch functions, serves three times: as the implementations `eager` and `compile`, in float64
as the oracle, and in the dtype of the inputs for the tolerance policy. It runs on as many rows at a time as fit into
memory; gradients of tensors without rows are summed over these parts in float64.
"""

from __future__ import annotations

import functools
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashtile.bench import base
from flashtile.bench.base import AnyCase, Bound, Implementation, Inputs, Verdict, Way, as_list, judge

#: Makes a way from `Inputs.others`; ours takes a backend too.
Build = Callable[..., Way]


def call(path: str, *arguments: Any, read: Sequence[str] = (), names: Sequence[str] = (), **options: Any) -> Build:
    """The function at a path, imported when it is needed: of the leaves, the others that it reads, and arguments.
    `names`: of the last leaves, which are passed by name."""

    def build(others: dict[str, Tensor], **more: Any) -> Way:
        module, _, name = path.rpartition(".")
        function, tensors = getattr(importlib.import_module(module), name), [others[each] for each in read]

        def called(*leaves: Tensor) -> Any:
            count = len(leaves) - len(names)
            named = {**options, **more, **dict(zip(names, leaves[count:]))}
            return function(*leaves[:count], *tensors, *arguments, **named)

        return Way(called)

    return build


class Random:
    """Random tensors of a case, drawn on the device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        # In the dtype itself: the largest inputs would take twice their memory in float32.
        drawn = torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)
        return drawn if scale == 1.0 else drawn.mul_(scale)

    def labels(self, rows: int, classes: int) -> Tensor:
        return torch.randint(classes, (rows,), generator=self._generator, device=self.device)

    def booleans(self, *shape: int, probability: float) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device) < probability


@dataclass(frozen=True)
class Companion(AnyCase, ABC):
    """One call of a companion operation. Shapes are names of fields, such as "rows columns"."""

    dtype: str

    phases: ClassVar[tuple[str, ...]] = ("fwd", "bwd")
    #: Shapes of what takes a gradient, and of what the formula returns; "" is a mean over all rows.
    leaves: ClassVar[Mapping[str, str]]
    outputs: ClassVar[Mapping[str, str]]
    #: Shapes of what each phase reads beside them, and names of the leaves and outputs that a backward reads.
    tables: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[tuple[str, ...]] = ()
    #: Leaves, others and outputs with a row (first dimension) for each row of the problem; other leaves belong to all.
    rowwise: ClassVar[frozenset[str]] = frozenset(("x", "out"))
    #: Rows, columns and features of the products of matrices in a forward.
    products: ClassVar[tuple[str, ...]] = ()
    #: How "flashtile", and the packages that have the operation, are called.
    packages: ClassVar[Mapping[str, Build]] = {}

    @property
    def name(self) -> str:
        """Such as `layer_norm-16384x4096-bf16`."""
        return f"{self.op}-{self.size}-{self.dtype}"

    @property
    def size(self) -> str:
        """The part of the name between operation and dtype."""
        return "x".join(str(value) for name, value in vars(self).items() if name != "dtype")

    def shape(self, sizes: str) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in sizes.split())

    def width(self) -> int:
        """Elements of the widest matrix of the formula, for each row of the problem."""
        shapes = {**self.leaves, **self.outputs}
        widths = [math.prod(self.shape(shapes[name])[1:]) for name in self.rowwise & shapes.keys()]
        return max([*widths, *(self.shape(sizes)[-1] for sizes in self.products)])

    def make_inputs(self, random: Random) -> Inputs:
        """Random tensors. Weights of layers are so small that a product keeps the variance."""
        leaves = {}
        for name, sizes in self.leaves.items():
            shape = self.shape(sizes)
            of_layer = name.startswith("weight") and len(shape) > 1
            leaves[name] = random.normal(*shape, scale=shape[-1] ** -0.5 if of_layer else 1.0)
        upstream = [
            random.normal(*self.shape(sizes)) if sizes else torch.ones((), dtype=random.dtype, device=random.device)
            for sizes in self.outputs.values()
        ]
        return Inputs(leaves, self.others(random, leaves), upstream if len(self.phases) > 1 or self.products else [])

    def others(self, random: Random, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that take no gradient."""
        return {}

    @abstractmethod
    def formula(self, *leaves: Any, **others: Any) -> Any:
        """The output, or outputs, in plain PyTorch, in the dtype of the leaves, for any number of rows."""

    def ways(self) -> dict[str, Build]:
        """Name of an implementation that has the operation -> how it computes it."""
        calls = dict(self.packages)
        found: dict[str, Build] = {"eager": self.eager, "compile": self._compiled}
        if ours := calls.pop("flashtile", None):
            found |= {f"flashtile-{backend}": functools.partial(ours, backend=backend) for backend in ("triton", "cpu")}
        return found | calls

    def eager(self, others: dict[str, Tensor]) -> Way:
        """The formula as PyTorch runs it."""
        return Way(lambda *leaves: self.formula(*leaves, **others))

    def lacks(self, implementation: str, phase: str) -> str | None:
        """Why an implementation that has the operation cannot run one of its phases, or None."""
        return None

    def _compiled(self, others: dict[str, Tensor]) -> Way:
        """The same formula through `torch.compile`, for these sizes alone."""
        torch.compiler.reset()  # the limit on recompilations counts those of all cases together
        way = self.eager(others)
        return replace(way, function=torch.compile(way.function, dynamic=False, fullgraph=True))

    def with_bits(self, results: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`others` with the random bits of an implementation that draws its own, read off its results; AssertionError
        if they cannot be such bits."""
        raise AssertionError(f"{self.op} draws no random bits")

    def bytes(self, phase: str) -> int:
        """A forward reads leaves and tables and writes outputs; a backward reads what is saved, tables and the
        gradients of outputs, and writes those of leaves; both read and write each of the forward and its gradient."""
        named = {**self.leaves, **self.outputs}
        shapes = [*named.values(), *self.tables, *(named[name] for name in self.saved if phase == "bwd")]
        elements = sum(math.prod(self.shape(sizes)) for sizes in shapes if sizes)
        return (2 if phase == "fwd+bwd" else 1) * elements * self.torch_dtype.itemsize

    def flops(self, phase: str) -> float | None:
        """A backward has two products for each of the forward's."""
        forward = sum(2.0 * math.prod(self.shape(sizes)) for sizes in self.products)
        return (forward if phase == "fwd" else 3 * forward) if self.products else None


IMPLEMENTATIONS = (
    Implementation("flashtile-triton", ("cuda",)),
    Implementation("flashtile-cpu", ("cpu",)),
    Implementation("eager"),
    Implementation("compile"),
    Implementation("liger", ("cuda",), package=("liger_kernel", "liger-kernel")),
    Implementation("quack", ("cuda",), package=("quack", "quack-kernels")),
)


class CompanionProblem(base.Problem):
    """A case on a device. How implementations call the operation is with its cases (`Companion.ways`)."""

    def __init__(self, case: Companion, device: torch.device) -> None:
        super().__init__(case, device)
        self.phases, self._ways = case.phases, case.ways()

    @functools.cached_property
    def _inputs(self) -> Inputs:
        return self.case.make_inputs(Random(self.device, self.case.torch_dtype))

    @functools.cached_property
    def _expected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self._evaluate(self._inputs.others)

    def _evaluate(self, others: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The results in float64, and in the dtype of the inputs."""
        return evaluate(self.case, self._inputs, others, torch.float64), evaluate(self.case, self._inputs, others)

    def measured_phases(self, implementation: Implementation) -> Sequence[str]:
        return self.phases if implementation.name in self._ways else ()

    def unsupported(self, implementation: Implementation, phase: str) -> str | None:
        return super().unsupported(implementation, phase) or self.case.lacks(implementation.name, phase)

    def bind(self, implementation: Implementation) -> Bound:
        way = self._ways[implementation.name](self._inputs.others)
        return Bound(way, self._inputs, tuple(self.case.outputs), peak="fwd+bwd")

    def judge(self, bound: Bound, phase: str, results: dict[str, Tensor]) -> Verdict:
        exact, eager = self._expected
        if bound.way.own_bits:
            try:
                exact, eager = self._evaluate(self.case.with_bits(results, self._inputs))
            except AssertionError as error:
                return Verdict(float("inf"), f"wrong result: {error}")
        return judge(
            (name, *parts) for name, found in results.items() for parts in _pieces(found, exact[name], eager[name])
        )


#: Elements of one float64 matrix that the check may hold at once, beside the results themselves, where there is memory.
_ELEMENTS = {"cuda": 2**28, "cpu": 2**22}


def evaluate(
    case: Companion, inputs: Inputs, others: dict[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients of the formula, in the dtype of the inputs or in another one."""
    device, rows = next((t.device, len(t)) for name, t in inputs.leaves.items() if name in case.rowwise)
    # A power of two: the share of some rows in a mean over all is then exact in any dtype, where the rows are one too.
    step = 1 << max(1, base.check_elements(_ELEMENTS[device.type], device) // case.width()).bit_length() - 1
    by_rows: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for start in range(0, rows, step):

        def pick(name: str, tensor: Tensor, start: int = start) -> Tensor:
            part = tensor[start : start + step] if name in case.rowwise else tensor
            return part.to(dtype) if dtype is not None and part.is_floating_point() else part

        leaves = {name: pick(name, leaf).clone().requires_grad_() for name, leaf in inputs.leaves.items()}
        picked = {name: pick(name, tensor) for name, tensor in others.items()}
        outputs = dict(zip(case.outputs, as_list(case.formula(*leaves.values(), **picked)), strict=True))
        share = min(step, rows - start) / rows  # of these rows in means over all
        outputs = {name: out if name in case.rowwise else out * share for name, out in outputs.items()}
        found = {name: out.detach() for name, out in outputs.items()}
        if inputs.upstream:
            upstream = [pick(name, d) for name, d in zip(outputs, inputs.upstream, strict=True)]
            gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
            found |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
        for name, part in found.items():
            if name in case.rowwise or name.removeprefix("d") in case.rowwise:
                by_rows.setdefault(name, []).append(part)
            else:
                sums[name] = part.double().add_(sums.get(name, 0))
    added = {name: value.to(dtype or case.torch_dtype) for name, value in sums.items()}
    return {name: torch.cat(parts) for name, parts in by_rows.items()} | added


def _pieces(found: Tensor, exact: Tensor, eager: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of some rows: the result in the dtype of the formula, and the two others."""
    if not found.dim() or found.shape != exact.shape:
        yield found.to(eager.dtype), exact, eager
        return
    elements = base.check_elements(_ELEMENTS[found.device.type], found.device)
    step = max(1, elements // max(1, found[0].numel() if len(found) else 1))
    for start in range(0, len(found), step):
        rows = slice(start, start + step)
        yield found[rows].to(eager.dtype), exact[rows], eager[rows]
