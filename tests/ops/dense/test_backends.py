"""The backends of the linear layers against the fp64 oracle: in Triton's interpreter, and on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from flashtile.ops.dense.spec import ACTIVATIONS
from flashtile.testing import assert_close
from support.companions.dense_cases import MlpCase, check, make_operands, parameters, run_mlp
from support.running.places import places

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_dense = torch.ops.flashtile


@places("interpreted", "gpu")
@pytest.mark.parametrize("case", parameters())
def test_kernels_agree_with_the_oracle(case, backend, device):
    check(case, backend, device)


def check_steps(backend: str, pre: Tensor, dhidden: Tensor, activation: str, gated: bool) -> None:
    """Holds what lies between the products to the oracle, by itself."""

    def run(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        x, upstream = pre.to(dtype), dhidden.to(dtype)
        results = _dense.dense_activate_backward(upstream, x, activation, gated, True, True, backend)
        hidden = _dense.dense_activate(x, activation, gated, backend)
        names = ("dpre", "dbias", "made", "hidden", "total")
        return dict(zip(names, (*results, hidden, _dense.dense_column_sum(x, backend))))

    actual, eager = run(backend, pre.dtype), run("reference", pre.dtype)
    oracle = run("reference", torch.float64)
    for name, value in actual.items():
        assert_close(f"{activation}-{gated}-{tuple(pre.shape)}: {name}", value, oracle[name], eager[name])


@places("cpu", "interpreted", "gpu")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes(activation, backend, device):
    """Large numbers and NaN, each in a column of its own; where relu is 0 it stops an infinite gradient."""
    infinity, nan = float("inf"), float("nan")
    pre = torch.tensor([[0.0, -0.0, 1e-10, -1e-10, 30.0, -30.0, 1e4, -1e4, 6e4, -6e4, nan]], device=device)
    for upstream in (1.0, 0.0, nan) + ((-infinity,) if "relu" in activation else ()):
        check_steps(backend, pre, torch.full_like(pre, upstream), activation, False)
        gates = torch.cat((torch.full_like(pre, 2.0), pre), dim=1)
        check_steps(backend, gates, torch.full_like(pre, upstream), activation, True)
    if "relu" in activation:
        infinite = torch.full_like(pre, infinity)
        dpre, *_ = _dense.dense_activate_backward(infinite, pre, activation, False, False, False, backend)
        assert not dpre[pre <= 0].any()


def _normal(*shape: int, dtype: torch.dtype, device: str = "cuda", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", [_FP16, _BF16, _FP32], ids=str)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 100), (4099, 255), (1000, 1001), (5000, 4096), (33, 16384)])
def test_gpu_steps(rows, width, dtype, gated):
    pre = _normal(rows, (1 + gated) * width, dtype=dtype)
    for activation in ACTIVATIONS:
        check_steps("triton", pre, _normal(rows, width, dtype=dtype, seed=1), activation, gated)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [_FP16, _BF16], ids=str)
def test_gpu_larger(dtype, level):
    check(MlpCase((3, 500), (512, 2048, 256), dtype, level=level), "triton", "cuda")
    check(MlpCase((3, 500), (512, 1408, 512), dtype, "silu", gated=True, level=level), "triton", "cuda")


@pytest.mark.gpu
def test_gpu_misaligned():
    """Addresses and widths that 16 bytes do not divide."""
    flat = _normal(5 * 600 + 1, dtype=_BF16)
    check_steps("triton", flat[1:].view(5, 600), _normal(5, 300, dtype=_BF16), "silu", True)
    check_steps("triton", flat[:-1].view(1000, 3), flat[1:].view(1000, 3), "gelu", False)


@pytest.mark.gpu
def test_gpu_is_the_same_in_every_run():
    case = MlpCase((4, 1000), (256, 1024, 256), _BF16, "silu", gated=True, level=1)
    first, second = (run_mlp(case, "triton", None, "cuda") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [_FP16, _BF16, _FP32], ids=str)
def test_gpu_wide_buffers(dtype):
    """A float32 buffer takes products that were never rounded to 16 bits."""
    x, dout = _normal(300, 64, dtype=dtype), _normal(300, 96, dtype=dtype, seed=1)
    buffer = _normal(96, 64, dtype=_FP32, seed=2)
    before = buffer.clone()

    def eager(dtype: torch.dtype) -> Tensor:
        return before.to(dtype) + dout.to(dtype).t() @ x.to(dtype)

    dweight, dbias = flashtile.linear_bias_wgrad(x, dout, main_grad=buffer, backend="triton")
    assert dweight is buffer and dbias is not None
    assert_close("main_grad", buffer, eager(torch.float64), eager(_FP32))
    assert_close("dbias", dbias, dout.double().sum(0), dout.sum(0))
    same = before.to(dtype, copy=True)
    flashtile.linear_bias_wgrad(x, dout, main_grad=same, bias=False)
    oracle = before.to(dtype).double() + dout.double().t() @ x.double()
    assert_close("main_grad of the dtype", same, oracle, before.to(dtype) + dout.t() @ x)


@pytest.mark.gpu
def test_gpu_backward_adds_to_wide_buffers():
    case, names = MlpCase((50,), (64, 128, 32), _BF16), ("weight1", "weight2")
    operands, upstream = make_operands(case, "cuda")
    given: dict[str, Any] = {name: t.requires_grad_() for name, t in operands.items() if t is not None}
    buffers = [torch.zeros_like(given[name], dtype=_FP32) for name in names]
    out = flashtile.fused_mlp(**given, main_grad1=buffers[0], main_grad2=buffers[1])
    out.backward(upstream[0])
    assert given["weight1"].grad is None and given["weight2"].grad is None
    oracle, eager = run_mlp(case, "reference", torch.float64, "cuda"), run_mlp(case, "reference", None, "cuda")
    for name, buffer in zip(names, buffers):
        assert_close(f"main_grad of {name}", buffer, oracle[f"d{name}"], eager[f"d{name}"].float())


@pytest.mark.gpu
def test_gpu_autocast():
    x, weight, bias = (_normal(*shape, dtype=_FP32).requires_grad_() for shape in ((40, 64), (96, 64), (96,)))
    with torch.autocast("cuda", _BF16):
        out, expected = flashtile.fused_dense(x, weight, bias), F.linear(x, weight, bias)
    assert out.dtype is _BF16 and torch.equal(out, expected)
    grads = torch.autograd.grad(out.float().square().sum(), (x, weight, bias))
    assert all(grad.dtype is _FP32 for grad in grads)


@pytest.mark.gpu
def test_gpu_graph():
    """A captured forward and backward, replayed with other numbers."""
    case = MlpCase((64,), (64, 256, 64), _BF16, "silu", gated=True)
    operands, upstream = make_operands(case, "cuda")
    given: dict[str, Any] = {name: t.requires_grad_() for name, t in operands.items() if t is not None}

    def step() -> tuple[Tensor, ...]:
        out = flashtile.fused_mlp(**given, activation="silu", gated=True)
        return torch.autograd.grad(out, list(given.values()), upstream[0])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        given["x"].copy_(_normal(64, 64, dtype=_BF16, seed=5))
    graph.replay()
    for name, ours, expected in zip(given, captured, step()):
        assert_close(f"d{name}", ours, expected.double(), expected)


@pytest.mark.gpu
def test_gpu_offsets_pass_2_to_the_31():
    rows = 2**31 // 4096 + 300
    pre = torch.zeros(rows, 4096, dtype=_BF16, device="cuda")
    pre[-7:] = _normal(7, 4096, dtype=_BF16)
    last = pre[-7:].clone()
    for gated in (False, True):
        hidden = _dense.dense_activate(pre, "silu", gated, "triton")
        assert torch.equal(hidden[-7:], _dense.dense_activate(last, "silu", gated, "triton"))
        dpre, dbias = _dense.dense_activate_backward(hidden, pre, "silu", gated, True, False, "triton")
        expected = _dense.dense_activate_backward(hidden[-7:].clone(), last, "silu", gated, True, False, "reference")
        assert_close("dpre", dpre[-7:], expected[0].double(), expected[0])
        assert_close("dbias", dbias, expected[1].double(), expected[1])
        del hidden, dpre
    assert_close("total", _dense.dense_column_sum(pre, "triton"), last.double().sum(0), last.sum(0))
