"""The extensions of flash_attn 1: halves of functions, by their definition, and served under their own names."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn import functional as F

import flashtile.compat
from compat_cases import normal
from flashtile.compat.finder import EXTENSIONS
from flashtile.compat.flash_attn_v1.extensions import (
    fused_dense_lib,
    rotary_emb,
    scaled_masked_softmax_cuda,
    scaled_upper_triang_masked_softmax_cuda,
    xentropy_cuda_lib,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-3)


def perceptron(device):
    shapes = ((5, 6), (8, 6), (8,), (4, 8), (4,))
    leaves = [normal(*shape, seed=seed).float().to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    x, weight1, bias1, weight2, bias2 = leaves
    out = F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)
    dout = normal(5, 4, seed=7).to(out)
    return leaves, dout, torch.autograd.grad(out, leaves, dout)


@devices
def test_linear_layers(device):
    (x, weight1, bias1, weight2, _), dout, (dx, dw1, db1, dw2, db2) = perceptron(device)
    out1, before = fused_dense_lib.linear_gelu_forward(x, weight1, bias1, True, 0)
    close(before, F.linear(x, weight1, bias1))
    close(fused_dense_lib.linear_act_forward(x, weight1, bias1, False, False, 0)[0], before.relu())
    assert len(fused_dense_lib.linear_act_forward(x, weight1, bias1, True, False, 0)) == 1
    assert not before.requires_grad
    grads = fused_dense_lib.linear_gelu_linear_backward(x, before, out1, weight1, weight2, dout, 0)
    for got, wanted in zip(grads, (dx, dw1, db1, dw2, db2), strict=True):
        close(got, wanted)
    start = normal(5, 6, seed=9).to(x)
    grads = fused_dense_lib.linear_residual_gelu_linear_backward(
        x, before, out1, weight1, weight2, dout, buffer := start.clone(), 0
    )
    assert grads[0] is buffer
    close(buffer, start + dx)
    dbefore, dbias = fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, before, True, 0)
    close(dbias, db1)
    for got, wanted in zip(fused_dense_lib.linear_bias_backward(x, weight1, dbefore), (dx, dw1, db1), strict=True):
        close(got, wanted)
    assert fused_dense_lib.linear_bias_wgrad(x, dbefore, False)[1] is None
    for call in (
        lambda: fused_dense_lib.linear_act_forward(x, weight1, bias1, False, True, 0),
        lambda: fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, before, False, 0),
    ):
        with pytest.raises(ValueError, match=r"save_pre_act|is_gelu"):
            call()


@devices
def test_rotation(device):
    a, b = (normal(2, 5, 3, 4, seed=seed).float().to(device) for seed in range(2))
    angles = normal(5, 1, 4, seed=2).float().to(device)
    first, second = torch.empty_like(a), torch.empty_like(b)
    rotary_emb.apply_rotary(a, b, angles.cos(), angles.sin(), first, second, False)
    close(first, a * angles.cos() - b * angles.sin())
    close(second, a * angles.sin() + b * angles.cos())
    rotary_emb.apply_rotary(first, second, angles.cos(), angles.sin(), first, second, True)
    close(first, a)
    close(second, b)


@devices
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy(inplace, smoothing, device):
    logits, labels = normal(5, 11).float().to(device), torch.tensor([3, 0, 9, 10, 7], device=device)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, label_smoothing=smoothing, reduction="none")
    losses, lse = xentropy_cuda_lib.forward(logits, labels, smoothing)
    close(losses, expected.detach())
    close(lse, logits.logsumexp(1))
    dloss = normal(5, seed=1).float().to(device)
    grad = xentropy_cuda_lib.backward(dloss, logits, lse, labels, smoothing, inplace)
    close(grad, torch.autograd.grad(expected, leaf, dloss)[0])
    assert (grad.data_ptr() == logits.data_ptr()) is inplace
    with pytest.raises(ValueError, match="total_classes"):
        xentropy_cuda_lib.forward(logits, labels, smoothing, 22)


@devices
def test_softmax(device):
    x = normal(2, 3, 5, 5).float().to(device).requires_grad_()
    mask = (normal(2, 1, 5, 5, seed=1) < -0.5).to(device)
    causal = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)
    for out, hidden, backward in (
        (scaled_masked_softmax_cuda.forward(x, mask, 0.5), mask, scaled_masked_softmax_cuda.backward),
        (
            scaled_upper_triang_masked_softmax_cuda.forward(x.flatten(0, 1), 0.5).view(x.shape), causal,
            scaled_upper_triang_masked_softmax_cuda.backward,
        ),
    ):  # fmt: skip
        expected = (x * 0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        close(out, expected.detach())
        dout = normal(2, 3, 5, 5, seed=2).to(out)
        close(backward(dout, out, 0.5), torch.autograd.grad(expected, x, dout)[0])


@pytest.mark.parametrize("name", EXTENSIONS)
def test_served_by_their_own_names(name):
    flashtile.compat.install(name)
    try:
        assert importlib.import_module(name).__name__ == name
    finally:
        flashtile.compat.uninstall(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
