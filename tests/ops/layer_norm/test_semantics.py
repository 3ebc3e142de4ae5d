"""What the norms mean: against PyTorch's own, and against the formulas written out; on the reference and on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.testing import assert_same
from support.running.autograd import leaf, normal
from support.running.each_case import each_case

both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
both_norms = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])

_SEED = torch.tensor([11, 3])


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, rms: bool, eps: float = 1e-5) -> Tensor:
    if not rms:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    z = F.rms_norm(x, x.shape[-1:], weight, eps)
    return z if bias is None else z + bias


def dropout_add(rms: bool, *arguments: Any, **options: Any) -> Any:
    return (flashtile.dropout_add_rms_norm if rms else flashtile.dropout_add_layer_norm)(*arguments, **options)


@both_backends
@both_norms
def test_plain_norms_are_those_of_pytorch(rms, backend):
    x, weight, bias = normal(2, 3, 50), normal(50, seed=1), normal(50, seed=2)
    function = flashtile.rms_norm if rms else flashtile.layer_norm
    assert_same(function(x, backend=backend), norm(x, None, None, rms))
    assert_same(function(x, weight, backend=backend), norm(x, weight, None, rms))
    assert_same(function(x, weight, bias, 0.1, backend=backend), norm(x, weight, bias, rms, 0.1))
    zero_centered = function(x, weight - 1, bias, zero_centered_weight=True, backend=backend)
    assert_same(zero_centered, norm(x, weight, bias, rms))


@both_backends
@both_norms
def test_the_sum_is_what_the_formula_says(rms, backend):
    x0, residual, weight, bias = normal(4, 5, 16), normal(4, 5, 16, seed=1), normal(16, seed=2), normal(16, seed=3)
    rowscale, layerscale = normal(4, 5, seed=4), normal(16, seed=5)
    z, x, mask = dropout_add(
        rms, x0, residual, weight, bias, 0.25, 1e-3, rowscale, layerscale, True, False, True,
        rowscale_const=0.5, dropout_seed=_SEED, backend=backend,
    )  # fmt: skip
    expected = x0 * rowscale[..., None] * 0.5 * layerscale * mask / 0.75 + residual
    assert_same(x, expected)
    assert_same(z, norm(expected, weight, bias, rms, 1e-3))
    assert 0.5 < mask.double().mean() < 0.95 and mask.shape == x0.shape


@both_backends
@both_norms
def test_parallel_residual(rms, backend):
    x0, x1, residual = (normal(6, 40, seed=seed) for seed in range(3))
    weight, bias, weight1, bias1 = (normal(40, seed=seed) for seed in range(3, 7))
    z, z1, x, mask, mask1 = dropout_add(
        rms, x0, residual, weight, bias, 0.4, x1=x1, weight1=weight1, bias1=bias1, prenorm=True,
        return_dropout_mask=True, dropout_seed=_SEED, backend=backend,
    )  # fmt: skip
    assert_same(x, x0 * mask / 0.6 + x1 * mask1 / 0.6 + residual)
    assert_same(z, norm(x, weight, bias, rms))
    assert_same(z1, norm(x, weight1, bias1, rms))
    assert not torch.equal(mask, mask1)


@both_backends
def test_subsets(backend):
    x0, residual, weight = normal(3, 8), normal(2, 4, 8, seed=1), normal(8, seed=2)
    x0_subset = torch.tensor([[0, 3, 1, 0], [0, 0, 0, 2]])
    out_subset = torch.tensor([[4, 0, 1, 0], [0, 2, 0, 0]], dtype=torch.int32)
    z, x = flashtile.dropout_add_layer_norm(
        x0, residual, weight, None, x0_subset=x0_subset, out_subset=out_subset, out_numrows=5, rowscale_const=2.0,
        prenorm=True, backend=backend,
    )  # fmt: skip
    expected = residual.clone().view(8, 8)
    for row, source in ((1, 2), (2, 0), (7, 1)):
        expected[row] += 2 * x0[source]
    assert_same(x, expected.view(2, 4, 8))
    normed = norm(expected, weight, None, rms=False)
    assert_same(z, torch.stack((normed[2], normed[5], 0 * normed[0], normed[0], 0 * normed[0])))


@both_backends
@each_case("count", range(1, 5))
def test_what_is_returned(count, backend):
    x0 = normal(2, 3, 4)
    options = {"prenorm": count > 1, "return_dropout_mask": count > 2, "backend": backend}
    if count == 4:
        options["weight1"] = normal(4, seed=3)
    results = flashtile.dropout_add_layer_norm(x0, None, None, None, **options)
    assert isinstance(results, Tensor) if count == 1 else len(results) == count
    if count > 2:
        assert results[-1].dtype is torch.bool and results[-1].all(), "nothing is dropped without dropout"


@both_backends
@each_case(
    "dtype, residual_dtype, in_fp32, expected",
    [
        (torch.bfloat16, None, False, torch.bfloat16),
        (torch.bfloat16, None, True, torch.float32),
        (torch.bfloat16, torch.bfloat16, True, torch.bfloat16),  # the residual says it
        (torch.bfloat16, torch.float32, False, torch.float32),
        (torch.float32, torch.float16, False, torch.float16),
        (torch.float64, None, True, torch.float64),
    ],
)
def test_dtypes(dtype, residual_dtype, in_fp32, expected, backend):
    x0 = normal(3, 4, dtype=dtype)
    residual = None if residual_dtype is None else normal(3, 4, dtype=residual_dtype)
    z, x = flashtile.dropout_add_rms_norm(x0, residual, None, residual_in_fp32=in_fp32, prenorm=True, backend=backend)
    assert (z.dtype, x.dtype) == (dtype, expected)


@both_backends
@both_norms
def test_z_is_the_norm_of_the_x_that_is_returned(rms, backend):
    x0, residual = (normal(20, 300, seed=seed, dtype=torch.float32) for seed in range(2))
    z, x = dropout_add(rms, x0, residual.bfloat16(), None, None, prenorm=True, backend=backend)
    again = (flashtile.rms_norm if rms else flashtile.layer_norm)(x.float(), backend=backend)
    assert_same(z, again)


@both_backends
def test_nothing_added_returns_the_input_which_gradients_reach(backend):
    x0 = normal(3, 4).requires_grad_()
    z, x = flashtile.dropout_add_layer_norm(x0, None, None, None, prenorm=True, backend=backend)
    assert x.data_ptr() == x0.data_ptr()
    (grad,) = torch.autograd.grad((z, x), x0, (torch.zeros_like(z), torch.ones_like(x)))
    assert torch.equal(grad, torch.ones_like(x0))


@both_backends
@each_case("used", ["z", "z1", "x"])
def test_gradients_through_one_output(used, backend):
    x0, residual, weight = (normal(*shape, seed=len(shape)).requires_grad_() for shape in ((3, 6), (3, 6), (6,)))
    arguments = (x0, residual, weight, None, 0.5)
    options = {"weight1": weight.detach(), "prenorm": True, "dropout_seed": _SEED}
    place = ("z", "z1", "x").index(used)

    def grads(backend: str) -> tuple[Tensor | None, ...]:
        out = flashtile.dropout_add_layer_norm(*arguments, **options, backend=backend)[place]
        return torch.autograd.grad(out.sin().sum(), (x0, residual, weight), allow_unused=True)

    for actual, expected in zip(grads(backend), grads("reference"), strict=True):
        assert_same(actual, expected)


@both_backends
def test_rows_of_equal_elements(backend):
    x = torch.full((2, 64), 3.0, requires_grad=True)
    z = flashtile.layer_norm(x, backend=backend)
    (grad,) = torch.autograd.grad(z, x, torch.ones_like(z))
    assert torch.equal(z, torch.zeros_like(z)) and grad.isfinite().all()
    zeros = torch.zeros(2, 64)
    assert torch.equal(flashtile.rms_norm(zeros, backend=backend), zeros)


@both_backends
@both_norms
def test_nan_stays_in_its_row(rms, backend):
    x = normal(5, 30)
    x[2, 7] = float("nan")
    function = flashtile.rms_norm if rms else flashtile.layer_norm
    broken = function(x, backend=backend).isnan().any(dim=1)
    assert broken.tolist() == [False, False, True, False, False]


def test_the_same_elements_are_dropped_on_every_backend_and_in_every_shape():
    options = {"return_dropout_mask": True, "dropout_seed": _SEED}
    x0 = normal(6, 10)
    _, flat = flashtile.dropout_add_layer_norm(x0, None, None, None, 0.5, backend="cpu", **options)
    _, shaped = flashtile.dropout_add_rms_norm(x0.view(2, 3, 10), None, None, None, 0.5, backend="reference", **options)
    assert torch.equal(flat.view(2, 3, 10), shaped)
    _, narrower = flashtile.dropout_add_layer_norm(x0[:4, :7].contiguous(), None, None, None, 0.5, **options)
    assert torch.equal(narrower, flat[:4, :7]), "a function of row and column, whatever the size"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p):
    x0 = torch.ones(1000, 1003)
    _, mask = flashtile.dropout_add_layer_norm(
        x0, None, None, None, p, return_dropout_mask=True, dropout_seed=torch.tensor([8, 9])
    )
    for dim in ((0, 1), 0, 1):
        rate = mask.double().mean(dim=dim)
        deviation = (p * (1 - p) / (mask.numel() / rate.numel())) ** 0.5
        assert ((rate - (1 - p)).abs() < 5.5 * deviation).all()
    kept = mask.double() - (1 - p)
    for shift in ((0, 1), (0, 2), (0, 4), (1, 0)):
        assert abs((kept * kept.roll(shift, (0, 1))).mean()) < 5 * p * (1 - p) / mask.numel() ** 0.5


def test_checkpointing_draws_the_same_dropout():
    x = leaf(20, 30)
    call = lambda x: flashtile.dropout_add_layer_norm(x, None, None, None, 0.5).sin()  # noqa: E731
    torch.manual_seed(1)
    plain = torch.autograd.grad(call(x).sum(), x)
    torch.manual_seed(1)
    checkpointed = torch.autograd.grad(checkpoint(call, x, use_reentrant=False).sum(), x)
    assert_same(list(checkpointed), list(plain))


def test_a_large_mean_does_not_swallow_the_variance():
    x = torch.randn(8, 1000) + 1e4
    expected = torch.nn.functional.layer_norm(x.double(), (1000,))
    assert (flashtile.layer_norm(x) - expected).abs().max() < 5e-3


def test_narrow_statistics_are_float32():
    # Statistics kept in bfloat16 would make the gradient wrong in its second digit.
    x = (torch.randn(50, 512) * 3 + 5).bfloat16().requires_grad_()
    weight = torch.ones(512, dtype=torch.bfloat16)
    dz = torch.randn(50, 512).bfloat16()
    (narrow,) = torch.autograd.grad(flashtile.layer_norm(x, weight), x, dz)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.layer_norm(wide, (512,)), wide, dz.double())
    assert (narrow - expected).abs().max() < 2**-7 * expected.abs().max()
