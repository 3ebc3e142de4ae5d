"""ALiBi of keys that all lie far from their queries: scores near -400, and weights that depend on their differences."""

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import Size, assert_close
from support.attention.cpu_tiles import use_only_tiles
from support.attention.far_alibi import check as check_far_alibi


def results(backend: str, dtype: torch.dtype, device: str, more: str, batch: int) -> dict[str, Tensor]:
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
    if "sinks" in more:
        options["sinks"] = torch.tensor([-300.0, -50.0]).to(device, dtype).requires_grad_()
    if "bias" in more:
        options["bias"] = torch.randn(1, 2, 10, 500, generator=generator).to(device, dtype).requires_grad_()
    lengths = torch.full((batch,), 80, device=device)
    out, lse = flashtile.attention(**leaves, **options, key_lengths=lengths, return_lse=True, backend=backend)
    leaves |= options
    seen = {name: tensor.detach() for name, tensor in leaves.items() if name not in ("v", "sinks")}
    sums = flashtile.attention_column_sums(**seen, lse=lse.detach(), key_lengths=lengths, backend=backend)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out, "lse": lse, "sums": sums} | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def check(backend: str, device: str = "cpu", more: str = "", batch: int = 4) -> None:
    found, eager = (results(name, torch.float32, device, more, batch) for name in (backend, "reference"))
    oracle = results("reference", torch.float64, device, more, batch)
    # The gradient of a slope sums what ten rows pass on, numbers near 1, times distances near 410, and most cancels.
    cancelled = {"dalibi_slopes": Size(4100, 4100)}
    for name, value in found.items():
        assert_close(name, value, oracle[name], eager[name], cancelled.get(name, Size()))


@pytest.mark.parametrize("by_torch, more", [(True, ""), (False, ""), (False, "sinks and bias")])
def test_cpu(by_torch, more, monkeypatch):
    if not by_torch:
        use_only_tiles(monkeypatch)
    check("cpu", more=more)


@pytest.mark.interpreter
@pytest.mark.parametrize("more", ["", "sinks and bias"])
def test_interpreted(more):
    check("triton", more=more)


@pytest.mark.interpreter
def test_far_keys_have_the_weights_of_near_ones_interpreted():
    check_far_alibi("triton", 16)


@pytest.mark.gpu
@pytest.mark.parametrize("more", ["", "sinks", "bias"])
def test_gpu(more):
    check("triton", "cuda", more, batch=40)


@pytest.mark.hopper
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_far_keys_have_the_weights_of_near_ones(backend, head_dim):
    check_far_alibi(backend, head_dim, "cuda")
