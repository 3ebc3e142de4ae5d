"""The gate: every backend against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from flashtile.ops.gate.api import tanh_gate
from flashtile.testing import assert_close


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 1001), (0, 5)])
def test_backends(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    x, y, dout = torch.randn(3, *shape, dtype=torch.float64).to(dtype)

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, y)]
        out = tanh_gate(*leaves, 0.7, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    exact, eager = run("reference", torch.float64), run("reference", dtype)
    for name, found, oracle, plain in zip(("out", "dx", "dy"), run(backend, dtype), exact, eager):
        assert_close(name, found, oracle, plain)


def test_derivatives() -> None:
    leaves = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(tanh_gate, leaves) and torch.autograd.gradgradcheck(tanh_gate, leaves)


def test_operators() -> None:
    x, y = torch.randn(2, 4, 3)
    torch.library.opcheck(torch.ops.flashtile.gate_forward.default, (x, y, 0.7, "cpu"))
    torch.library.opcheck(torch.ops.flashtile.gate_backward.default, (x, x, y, 0.7, "cpu"))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"^y: expected torch.float32 \(3,\) as x, got torch.float32 \(2,\)"):
        tanh_gate(torch.ones(3), torch.ones(2))
