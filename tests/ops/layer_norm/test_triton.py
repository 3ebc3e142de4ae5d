"""The norm kernels against the fp64 oracle: in Triton's interpreter (small), and on a GPU (the same and larger)."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.testing import NormCase, assert_same, check_norm, make_norm_inputs, run_norm
from support.companions.norm_cases import COMBINED, DTYPES, EDGES, PAIRS, parameters
from support.running.covering import turns
from support.running.places import places


def _interpreted(cases: dict[str, NormCase]) -> list:
    """Small cases, with float16 for bfloat16: the interpreter of Triton 3.6 truncates to bfloat16."""
    cases = {name: replace(case, **_narrowed(case)) for name, case in cases.items() if case.hidden < 2**16}
    return parameters(cases)


def _narrowed(case: NormCase) -> dict[str, torch.dtype]:
    dtypes = {name: getattr(case, name) for name in ("dtype", "residual_dtype", "weight_dtype")}
    return {name: torch.float16 for name, dtype in dtypes.items() if dtype is torch.bfloat16}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", _interpreted(COMBINED | EDGES))
def test_interpreted_kernels_agree_with_the_oracle(case):
    check_norm(case, "triton")


@pytest.mark.interpreter
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("case", _interpreted(DTYPES))
def test_interpreted_kernels_take_all_dtypes(case, rms):
    check_norm(replace(case, rms=rms), "triton")


@places("interpreted", "gpu")
def test_kernels_read_no_factors_past_the_last_row(backend, device):
    """A tile has more rows than there are; what lies behind the factors is NaN, and would be in the sums over rows."""
    factors = torch.full((300,), float("nan"), device=device)
    factors[:3] = torch.tensor([0.5, 2.0, -1.0])
    x0, layerscale = torch.randn(3, 16, device=device), torch.randn(16, device=device, requires_grad=True)
    arguments = x0, None, None, None, 0.0, 1e-5, factors[:3], layerscale
    out = flashtile.dropout_add_layer_norm(*arguments, backend=backend)
    expected = flashtile.dropout_add_layer_norm(*arguments, backend="reference")
    upstream = torch.randn_like(out)
    grads = [torch.autograd.grad(result, layerscale, upstream)[0] for result in (out, expected)]
    assert_same(grads[0], grads[1])


@places("interpreted", "gpu")
def test_kernels_take_strided_inputs(backend, device):
    case = NormCase(shape=(12,), hidden=24, residual_dtype=torch.float32)
    inputs = make_norm_inputs(case, device)
    given = inputs.differentiable
    given["x0"] = torch.cat((given["x0"], given["x0"]), dim=1)[:, :24]  # another row stride
    given["residual"] = given["residual"][:1].expand(12, 24)
    given["weight"] = given["weight"].repeat_interleave(2)[::2]
    inputs.upstream[0] = inputs.upstream[0][:, :1].expand(12, 24)
    check_norm(case, backend, device, inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(COMBINED | EDGES))
def test_kernels_agree_with_the_oracle(case):
    check_norm(case, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hidden, name", turns([64, 768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768], DTYPES, 3)
)
def test_kernels_over_many_rows(hidden, name):
    for rms in (False, True):
        check_norm(replace(DTYPES[name], rms=rms, shape=(1531,), hidden=hidden), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 2047, 4096, 8192])
def test_kernels_with_everything(hidden):
    check_norm(replace(PAIRS["everything"], shape=(1201,), hidden=hidden), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [1024, 4096, 20000])
def test_results_are_the_same_in_every_run(hidden):
    case = replace(DTYPES["bf16"], shape=(2000,), hidden=hidden, arguments={"dropout_p": 0.1})
    inputs = make_norm_inputs(case, "cuda")
    first, second = run_norm(case, inputs, "triton"), run_norm(case, inputs, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
def test_the_mask_is_that_of_the_cpu():
    x0 = torch.ones(70, 333)
    seed = torch.tensor([17, 5])
    options = {"return_dropout_mask": True, "prenorm": True}
    here = flashtile.dropout_add_layer_norm(x0, None, None, None, 0.25, dropout_seed=seed, **options)
    there = flashtile.dropout_add_layer_norm(
        x0.cuda(), None, None, None, 0.25, dropout_seed=seed.cuda(), backend="triton", **options
    )
    assert torch.equal(here[2], there[2].cpu())
    assert torch.equal(here[2], there[1].cpu() != 0)


@pytest.mark.gpu
def test_offsets_pass_2_to_the_31():
    rows, hidden = 2**31 // 4096 + 3, 4096
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(hidden, device="cuda").bfloat16()
    x.requires_grad_()
    z = flashtile.rms_norm(x, backend="triton")
    last = x.detach()[-1:].requires_grad_()
    expected = flashtile.rms_norm(last, backend="triton")
    assert torch.equal(z.detach()[-1:], expected.detach())
    (dx,) = torch.autograd.grad(z, x, x.detach())
    (dlast,) = torch.autograd.grad(expected, last, last.detach())
    assert torch.equal(dx[-1:], dlast)


@pytest.mark.gpu
def test_a_cuda_graph_draws_fresh_dropout():
    x = torch.randn(64, 512, device="cuda")
    call = lambda: flashtile.dropout_add_layer_norm(x, None, None, None, 0.5, prenorm=True)[1]  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.gpu
def test_compiled_equals_eager():
    weight = torch.randn(300, device="cuda", requires_grad=True)
    x, residual = (torch.randn(40, 300, device="cuda", requires_grad=True) for _ in range(2))

    def function(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        z, summed = flashtile.dropout_add_rms_norm(x, residual, weight, prenorm=True, backend="triton")
        return (z * summed).sum()

    eager = torch.autograd.grad(function(x, residual), (x, residual, weight))
    compiled = torch.autograd.grad(torch.compile(function, fullgraph=True)(x, residual), (x, residual, weight))
    assert_same(compiled, eager)
