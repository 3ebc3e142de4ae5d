"""Derivatives of score functions: PyTorch's activations and others, against autograd on numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import flashtile
from flashtile.ops.attention.gpu.score_source import unsupported_operation
from flashtile.ops.attention.score_program import INPUTS, UPSTREAM, apply, parse, run
from flashtile.ops.attention.score_tracing import derivative
from flashtile.testing import assert_same

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "celu": functional.celu,
    "elu": lambda x: functional.elu(x, alpha=1.5),
    "gelu": functional.gelu,
    "hardshrink": functional.hardshrink,
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardtanh": lambda x: functional.hardtanh(x, -0.5, 2.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.2),
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "relu6": functional.relu6,
    "selu": functional.selu,
    "silu": functional.silu,
    "softplus": lambda x: functional.softplus(x, beta=2, threshold=3),
    "softshrink": functional.softshrink,
    "softsign": functional.softsign,
    "tanhshrink": functional.tanhshrink,
    "threshold": lambda x: functional.threshold(x, 0.1, 0.0),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1),
    "atanh": lambda x: torch.atanh(torch.tanh(0.5 * x)),
    "sgn": lambda x: x * torch.sgn(x) + torch.sgn(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_as_autograd_on_numbers(name, dtype):
    """Also at the ends of pieces, and where exponentials overflow."""
    function = FUNCTIONS[name]
    edges = torch.tensor([0.1, 0.5, 1, 1.5, 2, 3, 6, 20, 100] if name != "atanh" else [0.5, 1.0], dtype=dtype)
    score = torch.cat((torch.linspace(-4, 4, 101, dtype=dtype), edges, -edges)).requires_grad_()
    upstream = torch.linspace(1, 2, score.numel(), dtype=dtype)
    traced = flashtile.trace_score_mod(lambda s, b, h, q, k: function(s), dtype=dtype)
    inputs = {**dict.fromkeys(INPUTS, torch.zeros(1, dtype=torch.int32)), INPUTS[0]: score.detach(), UPSTREAM: upstream}
    found = apply(parse(traced.program), inputs, traced.captured)
    gradient = derivative(traced.program, dtype)
    assert gradient.score is not None
    of_score = run(gradient.program, inputs, lambda *_: score)[gradient.score]
    # PyTorch's derivative of hardsigmoid in float64 has 1/6 in float32.
    expected = functional.relu6(score + 3) / 6 if name == "hardsigmoid" else function(score)
    assert_same((found, of_score), (expected.detach(), torch.autograd.grad(expected, score, upstream)[0]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_have_the_derivatives_of_what_they_have(name):
    function = FUNCTIONS[name]
    program = flashtile.trace_score_mod(lambda s, b, h, q, k: function(s)).program
    missing = unsupported_operation(program, with_derivative=False)
    assert unsupported_operation(program, with_derivative=True) == missing


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.heaviside(x, x), "derivative for aten::heaviside"),
        (lambda x: torch.mvlgamma(x + 9, 2), r"aten\.unsqueeze.* not elementwise"),
    ],
    ids=["heaviside", "mvlgamma"],
)
def test_what_has_none_is_refused_before_the_forward(function, why):
    q, weights = torch.randn(1, 5, 2, 8), torch.ones(5)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return function(score * weights[k_index])

    for wants_gradient in (q, weights):
        wants_gradient.requires_grad_()
        with pytest.raises(ValueError, match=f"score_mod: expected a function whose derivative .*{why}.*no_grad"):
            flashtile.attention(q, q, q, score_mod=score_mod)
        with torch.no_grad():
            assert flashtile.attention(q, q, q, score_mod=score_mod).isfinite().all()
        wants_gradient.requires_grad_(False)


def test_functions_are_traced_within_transforms():
    """`torch.func` would wrap the symbols of a function that no earlier call has traced."""
    q, weights = torch.randn(1, 5, 2, 8), torch.randn(2)

    def loss(q: Tensor, weights: Tensor) -> Tensor:
        score_mod = lambda score, b, h, q_index, k_index: torch.tanh(score) + weights[h] * (0.37 * q_index)  # noqa: E731
        return flashtile.attention(q, q, q, score_mod=score_mod).square().sum()

    found = torch.func.grad(loss, argnums=(0, 1))(q, weights)
    leaves = q.clone().requires_grad_(), weights.clone().requires_grad_()
    for gradient, expected in zip(found, torch.autograd.grad(loss(*leaves), leaves)):
        assert_same(gradient, expected)
