"""The loss modules: PyTorch's names and results; they do what the functions do."""

from typing import Any

import torch
from torch import nn

import flashtile
from flashtile.modules import CrossEntropyLoss, LinearCrossEntropyLoss
from flashtile.testing import assert_same
from support.running.each_case import each_case

_OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none", "label_smoothing": 0.1},
    {"ignore_index": 2},
    {"weight": torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0]), "label_smoothing": 0.1},
]


@each_case("options", _OPTIONS)
def test_in_the_place_of_pytorch(options):
    input, target = torch.randn(7, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 2, 0])
    loss, expected = CrossEntropyLoss(**options)(input, target), nn.CrossEntropyLoss(**options)(input, target)
    assert_same(loss, expected)
    grads = (torch.autograd.grad(out.sum(), input)[0] for out in (loss, expected))
    assert_same(*grads)


def test_more_options():
    input, target = torch.randn(2, 7, 5, requires_grad=True), torch.randint(5, (2, 7))
    options: dict[str, Any] = {"logit_scale": 0.5, "lse_square_scale": 0.1, "return_z_loss": True}
    module = CrossEntropyLoss(**options, inplace_backward=True)
    expected = flashtile.cross_entropy(input, target, **options)
    found = module(input, target)
    assert_same(found, expected)
    (dinput,) = torch.autograd.grad(found[0], input)
    assert dinput.data_ptr() == input.data_ptr()
    assert not module.state_dict() and not list(module.parameters())
    described = "logit_scale=0.5, lse_square_scale=0.1, inplace_backward=True, return_z_loss=True"
    assert repr(module) == f"CrossEntropyLoss({described})"


def test_options_may_change():
    input, target = torch.randn(7, 5), torch.randint(5, (7,))
    module = CrossEntropyLoss(label_smoothing=0.3)
    module.label_smoothing = 0.0
    assert torch.equal(module(input, target), flashtile.cross_entropy(input, target))
    assert repr(module) == "CrossEntropyLoss()"


def test_class_weights_are_a_buffer_and_scores_capped():
    input, layer, target = torch.randn(2, 7, 4), nn.Linear(4, 9), torch.randint(9, (2, 7))
    weights = torch.rand(9)
    module = CrossEntropyLoss(weights, softcap=2.0)
    expected = flashtile.cross_entropy(layer(input), target, class_weights=weights, softcap=2.0)
    assert_same(module(layer(input), target), expected)
    assert list(module.state_dict()) == ["weight"] and "softcap=2.0" in repr(module)
    linear = LinearCrossEntropyLoss(class_weights=weights, softcap=2.0)
    assert_same(linear(input, layer.weight, target, layer.bias), expected)
    assert list(linear.state_dict()) == ["class_weights"]


@each_case("bias", [False, True])
def test_linear(bias):
    input, layer, target = torch.randn(2, 7, 4), nn.Linear(4, 9, bias=bias), torch.randint(9, (2, 7))
    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": 3}
    module = LinearCrossEntropyLoss(**options)
    loss = module(input, layer.weight, target, layer.bias)
    expected = CrossEntropyLoss(**options)(layer(input), target)
    assert_same(loss, expected)
    grads = (torch.autograd.grad(out, tuple(layer.parameters())) for out in (loss, expected))
    assert_same(*grads)
    assert repr(module) == "LinearCrossEntropyLoss(ignore_index=3, label_smoothing=0.1)"
