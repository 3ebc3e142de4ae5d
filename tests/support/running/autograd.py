"""Leaves, results with gradients, and compiled functions, for tests of operations as a part of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """A random leaf that wants a gradient; the same for a shape and seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random normal numbers, the same for a shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and, for random upstream gradients, input gradients."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [leaf(*o.shape, dtype=o.dtype, seed=7).detach() for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]


def compiled_with_count(function: Callable[..., Any]) -> tuple[Callable[..., Any], list]:
    """The function compiled without graph breaks, and a list that grows by one at each compilation."""
    compiler, compilations = torch._dynamo.lookup_backend("aot_eager"), []

    def counting(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return compiler(graph, inputs)

    return torch.compile(function, fullgraph=True, backend=counting), compilations
