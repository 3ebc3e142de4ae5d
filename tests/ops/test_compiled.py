"""Each function in one graph with dynamic shapes and numbers, and called with a second size and a second number."""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.models import GPT, GPTConfig
from flashtile.testing import assert_same

_SEED = torch.tensor([1, 2])

#: A call with a size, a number and leaves.
Call = Callable[..., Tensor | tuple[Tensor, ...]]
#: Shapes of the leaves of a size.
Shapes = Callable[[int], list[tuple[int, ...]]]


def _labels(size: int) -> Tensor:
    return torch.arange(size) % 5


def _scaling(number: float) -> flashtile.RotaryScaling:
    return flashtile.RotaryScaling("yarn", 2 + number, 64, attention_factor=number)


CALLS: dict[str, tuple[Call, Shapes]] = {
    "rowscale_const": (
        lambda size, number, x, r: flashtile.dropout_add_rms_norm(x, r, None, rowscale_const=number, prenorm=True),
        lambda size: [(size, 6)] * 2,
    ),
    "norm of two summands": (
        lambda size, number, x: flashtile.dropout_add_layer_norm(x, x, None, None, x1=x),
        lambda size: [(size, 6)],
    ),
    "dropout of a norm": (
        lambda size, number, x, w: flashtile.dropout_add_layer_norm(
            x, None, w, w, dropout_p=number, epsilon=number, dropout_seed=_SEED
        ),
        lambda size: [(size, 6), (6,)],
    ),
    "epsilon": (lambda size, number, x: flashtile.layer_norm(x, eps=number), lambda size: [(size, 6)]),
    "causal softmax": (
        lambda size, number, x: flashtile.scaled_causal_softmax(x, number),
        lambda size: [(2, size, size + 1)],
    ),
    "masked softmax": (
        lambda size, number, x: flashtile.scaled_masked_softmax(x, x > 1, number),
        lambda size: [(2, 2, size, size + 1)],
    ),
    "attention": (
        lambda size, number, q, k, v: flashtile.attention(
            q, k, v, causal=True, scale=number, softcap=2 + number, dropout_p=number, dropout_seed=_SEED
        ),
        lambda size: [(2, size, 2, 8)] * 3,
    ),
    "sdpa": (
        lambda size, number, q, k, v: flashtile.scaled_dot_product_attention(q, k, v, scale=number),
        lambda size: [(2, 2, size, 8)] * 3,
    ),
    "flex": (
        lambda size, number, q, k, v: flashtile.flex_attention(q, k, v, scale=number),
        lambda size: [(2, 2, size, 8)] * 3,
    ),
    "packed": (
        lambda size, number, q, k, v: flashtile.attention_varlen(q, k, v, torch.tensor([0, 3, size]), scale=number),
        lambda size: [(size, 2, 8)] * 3,
    ),
    "cross_entropy": (
        lambda size, number, x: flashtile.cross_entropy(
            x, _labels(size), label_smoothing=number, logit_scale=number, lse_square_scale=number
        ),
        lambda size: [(size, 7)],
    ),
    "cross_entropy in place": (
        lambda size, number, x: flashtile.cross_entropy(
            x * 1, _labels(size), inplace_backward=True, reduction="sum", logit_scale=-number, softcap=2.0
        ),
        lambda size: [(size, 7)],
    ),
    "linear_cross_entropy": (
        lambda size, number, x, w: flashtile.linear_cross_entropy(
            x, w, _labels(size), label_smoothing=number, logit_scale=number, lse_square_scale=number
        ),
        lambda size: [(size, 4), (7, 4)],
    ),
    "rotary": (
        lambda size, number, x: flashtile.apply_rotary(x, *flashtile.rotary_tables(size, 8, base=100 * number)),
        lambda size: [(2, size, 2, 8)],
    ),
    "scaled rotary": (
        lambda size, number, x: flashtile.apply_rotary(x, *flashtile.rotary_tables(size, 8, scaling=_scaling(number))),
        lambda size: [(2, size, 2, 8)],
    ),
    "dense with its residual": (
        lambda size, number, x, w: flashtile.fused_dense(x, w, return_residual=True),
        lambda size: [(size, 6), (4, 6)],
    ),
    "mlp": (
        lambda size, number, x, w, v: flashtile.fused_mlp(x, w, None, v, None),
        lambda size: [(size, 6), (4, 6), (6, 4)],
    ),
}


def results(call: Call, leaves: list[Tensor], size: int, number: float) -> list[Tensor]:
    """What a call gives, and the gradients of its leaves."""
    out = call(size, number, *leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    return [*outs, *torch.autograd.grad(sum(t.square().sum() for t in outs), leaves)]


@pytest.mark.parametrize("name, dynamic", [(name, True if name == "attention" else None) for name in CALLS], ids=str)
def test_second_size_and_number(name, dynamic):
    """Of which PyTorch makes symbols; `dynamic`: in the first call already."""
    call, shapes = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for size, number in ((6, 0.25), (9, 0.5)):
        leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes(size)]
        assert_same(results(compiled, leaves, size, number), results(call, leaves, size, number))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's default compiler needs a C++ compiler")
def test_the_default_compiler():
    def call(x: Tensor) -> Tensor:
        return flashtile.rms_norm(flashtile.attention(*(x * 2).chunk(3, dim=-1), causal=True).tanh())

    x = torch.randn(2, 9, 2, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = torch.compile(call, fullgraph=True)
    both = [(out, *torch.autograd.grad(out.square().sum(), x)) for out in (compiled(x), call(x))]
    assert_same(*both)


@pytest.mark.slow  # seconds of sizes as symbols
def test_model_of_dynamic_length():
    """With learned positions; test_prefix_trees.py has a model with rotary ones."""
    model = GPT(GPTConfig(vocabulary=20, context=16, layers=1, heads=2, width=8))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9):
        tokens = torch.arange(2 * length).view(2, length) % 20
        assert_same(compiled(tokens), model(tokens))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite(number):
    x = torch.ones(2, 3)
    for call in (
        lambda: flashtile.scaled_causal_softmax(x, number),
        lambda: flashtile.dropout_add_layer_norm(x, None, None, None, rowscale_const=number),
        lambda: flashtile.cross_entropy(x, torch.tensor([0, 1]), logit_scale=number),
    ):
        with pytest.raises(ValueError, match=f"expected a finite number, got {number}"):
            call()
