"""A way to compute a case, bound to its own copy of the case's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashtile.bench.companions.case import Case, Inputs, Tensors, Way
from flashtile.bench.memory import peak_facts


class Bound:
    """Calls of one implementation in one case, without arguments."""

    def __init__(self, way: Way, case: Case, inputs: Inputs) -> None:
        self.way = way
        self._case, self._inputs = case, inputs
        self._leaves = [own.clone().requires_grad_() for own in self._own_leaves()]
        # Some peers look at whether a leaf wants a gradient even where autograd is off. Writing to `data`, unlike to
        # `detach()`, leaves a graph that was kept for the backward valid.
        self._constants = [leaf.data for leaf in self._leaves]
        self._outputs: Tensors = []
        self._upstream: Tensors = []

    @property
    def calls(self) -> Mapping[str, Callable[[], Any]]:
        """The call that is timed in each phase."""
        return {"fwd": self.forward, "bwd": self.backward, "fwd+bwd": self.forward_backward}

    def forward(self) -> Tensors:
        """A forward that keeps nothing for a backward."""
        with torch.no_grad():
            return _as_list(self.way.function(*self._constants))

    def backward(self) -> tuple[Tensor, ...]:
        """The backward alone."""
        return torch.autograd.grad(self._outputs, self._leaves, self._upstream, retain_graph=True)

    def forward_backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(_as_list(self.way.function(*self._leaves)), self._leaves, self._upstream)

    def results(self, phase: str) -> dict[str, Tensor]:
        """Runs a phase once on fresh copies of the inputs; outputs, and after a backward gradients (`d` + name)."""
        self._refresh()
        if phase == "fwd":
            return self._named_outputs(self.forward())
        outputs = _as_list(self.way.function(*self._leaves))
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
        """For forward and backward together on a GPU: the memory that they take in addition to inputs and gradients."""
        return peak_facts(self.forward_backward, self._leaves) if phase == "fwd+bwd" else {}

    def _own_leaves(self) -> Tensors:
        return self.way.own_leaves(list(self._inputs.leaves.values()))

    def _refresh(self) -> None:
        """Peers that work in place have written over what they were given."""
        for constant, source in zip(self._constants, self._own_leaves(), strict=True):
            constant.copy_(source)

    def _named_outputs(self, outputs: Tensors) -> dict[str, Tensor]:
        return dict(zip(self._case.outputs, self.way.outputs(outputs), strict=True))


def _as_list(outputs: Any) -> Tensors:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
