"""The CPU backend of the norms against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.testing import NormCase, check_norm
from support.companions.norm_cases import COMBINED, DTYPES, EDGES, parameters
from support.running.each_case import each_case


@each_case("case", (COMBINED | EDGES).values())
def test_agrees_with_the_oracle(case):
    check_norm(case, "cpu")


@each_case("rms", [False, True])
@pytest.mark.parametrize("case", parameters(DTYPES))
def test_dtypes_agree_with_the_oracle(case, rms):
    check_norm(replace(case, rms=rms, shape=(40,), hidden=300), "cpu")


@each_case("rms", [False, True])
def test_float64(rms):
    double = torch.float64
    check_norm(NormCase(rms=rms, dtype=double, residual_dtype=double, weight_dtype=double), "cpu")


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
