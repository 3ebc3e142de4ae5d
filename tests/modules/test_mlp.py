"""The perceptron modules: keys, defaults and results; buffers of gradients by switch only."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.modules import FusedDense, FusedMlp, GatedMlp, Mlp
from flashtile.testing import assert_same
from support.running.each_case import each_case

_KEYS = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@each_case("options", [{}, {"bias": False}, {"dtype": torch.float64}])
def test_dense_in_the_place_of_pytorch(options):
    ours, theirs = FusedDense(6, 4, **options), nn.Linear(6, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 6, dtype=options.get("dtype", torch.float32))
    assert_same(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict())


@each_case("module", [Mlp, GatedMlp, FusedMlp])
def test_keys_shapes_and_defaults(module):
    made = module(12)
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    hidden = 128 if module is GatedMlp else 48
    rows = 2 * hidden if module is GatedMlp else hidden
    assert list(shapes) == _KEYS
    assert shapes == dict(zip(_KEYS, [(rows, 12), (rows,), (12, hidden), (12,)]))
    small = module(12, 128, 5, bias1=False, dtype=torch.float64)
    assert list(small.state_dict()) == ["fc1.weight", "fc2.weight", "fc2.bias"]
    assert list(module(12, bias2=False).state_dict()) == _KEYS[:3]
    assert small(torch.randn(2, 3, 12, dtype=torch.float64)).shape == (2, 3, 5)


def test_hidden_features_of_gates_are_rounded_up():
    assert GatedMlp(100).fc1.weight.shape == (768, 100)  # 266, to 384
    assert GatedMlp(100, 129, multiple_of=64).fc2.weight.shape == (100, 192)
    assert FusedMlp(100, gated=True).fc1.weight.shape == (768, 100)
    assert FusedMlp(100, 130, gated=True).fc1.weight.shape == (260, 100)


def test_mlp_takes_any_activation():
    x, module = torch.randn(2, 3, 6), Mlp(6, 10, activation=torch.sin)
    assert_same(module(x), module.fc2(torch.sin(module.fc1(x))))


def test_gates_are_the_second_half():
    x, module = torch.randn(2, 3, 6), GatedMlp(6, 10, multiple_of=1)
    assert_same(module(x), module.fc2(F.glu(module.fc1(x))))


@each_case("level", [0, 1, 2])
@each_case(
    "name, plain",
    [
        ("gelu_tanh", Mlp(6, 10, 4, activation=gelu_tanh)),
        ("relu", Mlp(6, 10, 4, activation=F.relu)),
        ("silu", GatedMlp(6, 10, 4, activation=F.silu, multiple_of=1)),
        ("gelu", GatedMlp(6, 10, 4, activation=F.gelu, multiple_of=1)),
    ],
)
def test_fused_is_plain(name, plain, level):
    fused = FusedMlp(6, 10, 4, activation=name, gated=isinstance(plain, GatedMlp), checkpoint_level=level)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 6, requires_grad=True)
    assert_same(fused(x), plain(x))
    parameters = [(x, *module.parameters()) for module in (fused, plain)]
    grads = [torch.autograd.grad(m(x).square().sum(), p) for m, p in zip((fused, plain), parameters)]
    assert_same(*grads)


def test_buffers_of_gradients_by_switch_only():
    x = torch.randn(5, 6)
    dense, mlp = FusedDense(6, 4, accumulate_main_grad=True), FusedMlp(6, 10, accumulate_main_grad=True)
    weights = [dense.weight, mlp.fc1.weight, mlp.fc2.weight]
    with pytest.raises(ValueError, match="weight: expected an attribute main_grad"):
        dense(x)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    expected = torch.autograd.grad(F.linear(x, dense.weight, dense.bias).sum(), dense.weight)[0]
    for _ in range(2):
        dense(x).sum().backward()
        mlp(x).sum().backward()
    assert_same(dense.weight.main_grad, 2 * expected)
    assert all(weight.grad is None and weight.main_grad.any() for weight in weights)
    assert dense.bias.grad is not None

    before = dense.weight.main_grad.clone()
    plain = FusedDense(6, 4)
    plain.weight.main_grad = before
    plain(x).sum().backward()
    assert plain.weight.grad is not None and torch.equal(before, dense.weight.main_grad)


def test_frozen_weights_need_no_buffer():
    mlp = FusedMlp(6, 10, accumulate_main_grad=True).requires_grad_(False)
    assert mlp(torch.randn(5, 6, requires_grad=True)).requires_grad
    with torch.no_grad():
        assert FusedDense(6, 4, accumulate_main_grad=True)(torch.randn(5, 6)).shape == (5, 4)


def test_autocast_of_wide_parameters():
    x, mlp = torch.randn(5, 6), FusedMlp(6, 10, gated=True, activation="silu")
    for weight in (mlp.fc1.weight, mlp.fc2.weight):
        weight.main_grad = torch.zeros_like(weight)
    mlp.accumulate_main_grad = True
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert mlp.fc1.weight.main_grad.any() and mlp.fc2.weight.main_grad.any()
    assert mlp.fc1.bias.grad.dtype is torch.float32


class Adapted(nn.Linear):
    """A layer with something beside its weight, as adapters add it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


@each_case("level", [0, 1, 2])
@each_case("kind", ["subclass", "wrapped", "hook"])
def test_fused_mlp_calls_layers_that_do_more_than_a_linear_layer(kind, level):
    module = FusedMlp(6, 10, gated=True, activation="squared_relu", checkpoint_level=level)
    if kind == "hook":
        module.fc2.register_forward_hook(lambda layer, given, out: out + 1)
    else:
        fc1, fc2 = nn.Linear(6, 20), Adapted(10, 6)
        module.fc1, module.fc2 = fc1, (nn.Sequential(fc2) if kind == "wrapped" else fc2)  # type: ignore[assignment]
    x = torch.randn(2, 6, requires_grad=True)
    values, gates = module.fc1(x).chunk(2, -1)
    expected = module.fc2(values * F.relu(gates).square())
    leaves = [x, *module.parameters()]
    out = module(x)
    assert_same(out, expected)
    assert_same(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))
    module.accumulate_main_grad = True
    with pytest.raises(TypeError, match=r"fc1, fc2: expected torch\.nn\.Linear without hooks"):
        module(x)


@each_case("activation", ["gelu_tanh", "gelu", "relu", "squared_relu", "silu"])
def test_layers_that_are_called_have_the_same_activation(activation):
    module, x = FusedMlp(6, 10, activation=activation), torch.randn(2, 6)
    expected = module(x)
    module.fc1.register_forward_pre_hook(lambda layer, given: None)
    assert_same(module(x), expected)
    module.activation = "tanh"
    with pytest.raises(ValueError, match="activation: expected one of"):
        module(x)


def test_fused_mlp_takes_parametrized_and_fused_layers():
    module, x = FusedMlp(6, 10), torch.randn(2, 6)
    module.fc2 = FusedDense(10, 6)
    nn.utils.parametrizations.weight_norm(module.fc1)
    expected = module.fc2(gelu_tanh(module.fc1(x)))
    assert_same(module(x), expected)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert_same(compiled(x), expected)


@each_case("kind", [Mlp, GatedMlp, FusedMlp])
def test_sizes_are_numbers(kind):
    with pytest.raises(TypeError, match=r"in_features: expected an int, got 8\.0"):
        kind(8.0, 16)
    with pytest.raises(ValueError, match="out_features: expected at least 0, got -3"):
        kind(8, 16, -3)
