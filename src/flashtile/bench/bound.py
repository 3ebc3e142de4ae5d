"""An implementation bound to its own copy of a case's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.bench.cases import Case, Inputs
from flashtile.bench.functions import learns
from flashtile.bench.implementations import Implementation
from flashtile.bench.memory import peak_facts
from flashtile.bench.timing import Uncaptured


class Bound:
    """Calls of one implementation in one case, without arguments.

    Making one runs the forward that `backward` goes through.
    """

    def __init__(
        self, implementation: Implementation, case: Case, inputs: Inputs, first_call_ms: float | None = None
    ) -> None:
        self.implementation = implementation
        self._own_dropout = implementation.own_dropout and case.dropout_p > 0
        self._first_call = {} if first_call_ms is None else {"first_call_ms": first_call_ms}
        self._heads_first = implementation.heads_first
        self._function = implementation.build(case, inputs)
        own = [self.change_layout(t) for t in (inputs.q, inputs.k, inputs.v)]
        if inputs.bias is not None:
            own.append(inputs.bias)  # heads come first in every layout
        self._more = [] if inputs.bias is None else ["dbias"]
        if learns(case.function):
            own += inputs.tables
            self._more = [f"dtable{number}" for number, _ in enumerate(inputs.tables)]
        self._leaves = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in own]
        self._out = self.forward()
        # In the strides of the output, so that no implementation has to rearrange it first.
        self._dout = torch.empty_like(self._out, requires_grad=False).copy_(self.change_layout(inputs.dout))

    def change_layout(self, tensor: Tensor) -> Tensor:
        """From flashtile's layout to the implementation's, and back."""
        return tensor.transpose(1, 2) if self._heads_first else tensor

    def forward(self) -> Tensor:
        """A forward as in training: what the backward needs is kept."""
        return self._function(*self._leaves)

    def forward_without_grad(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self) -> tuple[Tensor, ...]:
        """The backward alone."""
        return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """The call that is timed in each phase.

        PyTorch keeps the seed of a forward outside a graph on the host, where a captured backward cannot read it.
        """
        return {"fwd": self.forward, "bwd": Uncaptured(self.backward) if self._own_dropout else self.backward}

    def results(self, phase: str) -> dict[str, Tensor]:
        """Runs phase "fwd" or "bwd"; the tensors that the oracle judges, in flashtile's layout."""
        if phase == "fwd":
            return {"out": self.change_layout(self.forward())}
        dq, dk, dv, *more = self.backward()
        tensors = (*map(self.change_layout, (self._out, dq, dk, dv)), *more)
        return dict(zip(("out", "dq", "dk", "dv", *self._more), tensors, strict=True))

    def facts(self, phase: str) -> dict[str, Any]:
        """For a backward on a GPU: the memory that it and its forward take in addition to inputs and gradients. For a
        forward: the time of the first call in a new process, where it was measured."""
        return peak_facts(self.forward_backward, self._leaves) if phase == "bwd" else self._first_call

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self._leaves, self._dout)
