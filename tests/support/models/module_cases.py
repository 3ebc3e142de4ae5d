"""The check of modules against the same computation in plain PyTorch operations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashtile.testing import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

#: What a module, or its plain form, computes from inputs: outputs that take a gradient.
Forward = Callable[..., tuple[Tensor, ...]]


def check_module(
    module: nn.Module, forward: Forward, plain: Forward, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Asserts that outputs and all gradients are those of the plain form, by the tolerance policy.

    `forward(module, *inputs)` is under test, `plain(module, *inputs)` reads the module's parameters. Both get inputs
    and module in `dtype`; the oracle is `plain` in float64.
    """
    actual = _run(module, forward, inputs, dtype, device)
    oracle = _run(module, plain, [x.to(dtype) for x in inputs], torch.float64, device, dtype)
    eager = _run(module, plain, inputs, dtype, device)
    assert actual.keys() == oracle.keys()
    for name, value in actual.items():
        assert_close(name, value, oracle[name], eager[name])


def _run(
    module: nn.Module,
    function: Forward,
    inputs: list[Tensor],
    dtype: torch.dtype,
    device: str,
    rounded: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients; the parameters are rounded to another dtype before they are cast."""
    module = copy.deepcopy(module).to(device).to(rounded or dtype).to(dtype)
    given = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
    outputs = function(module, *given)
    upstream = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=upstream, dtype=torch.float64).to(out) for out in outputs]
    leaves = {f"d(input {i})": x for i, x in enumerate(given)} | {f"d({n})": p for n, p in module.named_parameters()}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | dict(zip(leaves, gradients, strict=True))
