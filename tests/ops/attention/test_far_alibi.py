"""ALiBi of keys that all lie far from their queries: scores near -400, and weights that depend on their differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import Size, assert_close


def results(backend: str, dtype: torch.dtype, device: str, sinks: bool, batch: int) -> dict[str, Tensor]:
    """80 keys of 500, of which the last one is 410 keys and more from each query."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (batch, 10, 2, 16), "k": (batch, 500, 2, 16), "v": (batch, 500, 2, 16)}
    leaves = {
        name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    slopes = torch.rand(batch, 2, generator=generator) * 0.9 + 0.1
    dout = torch.randn(batch, 10, 2, 16, generator=generator).to(device, dtype)
    options = {"alibi_slopes": slopes.to(device, dtype).requires_grad_()}
    if sinks:
        options["sinks"] = torch.tensor([-300.0, -50.0]).to(device, dtype).requires_grad_()
    lengths = torch.full((batch,), 80, device=device)
    out, lse = flashtile.attention(**leaves, **options, key_lengths=lengths, return_lse=True, backend=backend)
    leaves |= options
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def check(backend: str, device: str = "cpu", sinks: bool = False, batch: int = 40) -> None:
    found, eager = (results(name, torch.float32, device, sinks, batch) for name in (backend, "reference"))
    oracle = results("reference", torch.float64, device, sinks, batch)
    # The gradient of a slope sums what ten rows pass on, numbers near 1, times distances near 410, and most cancels.
    cancelled = {"dalibi_slopes": Size(4100, 4100)}
    for name, value in found.items():
        assert_close(name, value, oracle[name], eager[name], cancelled.get(name, Size()))


@pytest.mark.parametrize(
    "by_torch, sinks", [(True, False), (False, False), (False, True)], ids=["torch", "tiles", "tiles-sinks"]
)
def test_cpu(by_torch: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_torch:
        from flashtile.ops.attention import cpu

        monkeypatch.setattr(cpu, "served_by_torch", lambda *_: (False, "flashtile tiles: the test wants them"))
    check("cpu", sinks=sinks)


@pytest.mark.interpreter
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_interpreted(sinks: bool) -> None:
    check("triton", sinks=sinks, batch=12)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_gpu(sinks: bool) -> None:
    check("triton", "cuda", sinks)
