"""The norm modules: PyTorch's arguments, keys and results; dropout in training only."""

import pytest
import torch
from torch import nn

from flashtile.modules import DropoutAddLayerNorm, DropoutAddRMSNorm, LayerNorm, RMSNorm
from flashtile.testing import assert_same
from support.running.each_case import each_case


@each_case("options", [{}, {"eps": 0.1}, {"elementwise_affine": False}, {"bias": False}, {"dtype": torch.float64}])
@each_case("shape", [6, (6,), (4, 6)])
@each_case("ours, theirs", [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)])
def test_in_the_place_of_pytorch(ours, theirs, shape, options):
    if theirs is nn.RMSNorm:
        options = {name: value for name, value in options.items() if name != "bias"}
    module, expected = ours(shape, **options), theirs(shape, **options)
    for parameter in expected.parameters():
        nn.init.normal_(parameter)
    module.load_state_dict(expected.state_dict())
    x = torch.randn(3, 4, 6, dtype=options.get("dtype", torch.float32))
    assert_same(module(x), expected(x))
    again = theirs(shape, **options)
    again.load_state_dict(module.state_dict())


def test_rms_norm_default_eps_is_that_of_pytorch():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 16).to(dtype) * 1e-3
        assert_same(RMSNorm(16, dtype=dtype)(x), nn.RMSNorm(16, dtype=dtype)(x))


def test_parameters_may_be_wider_than_the_input():
    x = torch.randn(3, 8).bfloat16()
    assert LayerNorm(8)(x).dtype is torch.bfloat16
    assert RMSNorm(8)(x).dtype is torch.bfloat16


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"expected the last dimensions \(4, 6\), got shape \(6, 4\)"):
        LayerNorm((4, 6))(torch.randn(6, 4))


@each_case("module", [DropoutAddLayerNorm, DropoutAddRMSNorm])
def test_dropout_add(module):
    x0, residual = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    norm = module(8, prenorm=True, p=0.5, eps=1e-3)
    assert set(norm.state_dict()) == ({"weight", "bias"} if module is DropoutAddLayerNorm else {"weight"})
    _, x = norm.eval()(x0, residual)
    assert torch.equal(x, x0 + residual)
    _, x = norm.train()(x0, residual)
    assert not torch.equal(x, x0 + residual)
    plain = (nn.LayerNorm if module is DropoutAddLayerNorm else nn.RMSNorm)(8, eps=1e-3)
    assert_same(module(8, eps=1e-3)(x0), plain(x0))
    assert module(8, prenorm=True, residual_in_fp32=True)(x0.bfloat16())[1].dtype is torch.float32
