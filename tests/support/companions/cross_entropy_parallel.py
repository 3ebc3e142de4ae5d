"""What each of several processes runs that share a vocabulary: asserts that they get what one process gets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flashtile
from flashtile.testing import assert_same

_OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "reduction": "none", "return_z_loss": True},
    {"label_smoothing": 0.2, "logit_scale": 0.7, "lse_square_scale": 0.01, "reduction": "sum", "return_z_loss": True},
    {"inplace_backward": True, "lse_square_scale": 0.01},
    {"softcap": 3.0, "logit_scale": -0.7, "label_smoothing": 0.1},
    {"class_weights": True, "label_smoothing": 0.1},
    {"class_weights": True, "softcap": 3.0, "reduction": "none"},
]


def run_process(rank: int, size: int, store: str, backend: str, device: str) -> None:
    """One of `size` processes that meet at the file `store`; "cuda" is the GPU of its number."""
    engine = "gloo"
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.running.interpreter_speed import skip_needless_work

        skip_needless_work()
    if device == "cuda":
        engine = "nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(engine, init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        for options in _OPTIONS:
            check(rank, size, options, backend, device)
        check(rank, size, _OPTIONS[2], backend, device, shift=1e4)
        for options in ({}, {"label_smoothing": 0.1, "reduction": "none"}, {"reduction": "sum"}, _OPTIONS[5]):
            check_linear(rank, size, options, backend, device)
        check_no_second_derivative(backend, device)
    finally:
        dist.destroy_process_group()


def check(rank: int, size: int, options: dict[str, Any], backend: str, device: str, shift: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 13 * size, generator=generator) + shift
    logits[2, : 13 * size - 1] = float("-inf")  # a process has nothing of this row
    labels = torch.tensor([0, 13, -100, 13 * size - 1, 12, 13 * size])
    if options.get("reduction") != "none":
        labels[5] = 5
    logits, labels = logits.to(device), labels.to(device)
    options = with_weights(options, 13 * size, device)
    whole = logits.clone().requires_grad_()
    part = logits[:, rank * 13 : (rank + 1) * 13].clone().requires_grad_()
    found = flashtile.cross_entropy(part, labels, process_group=dist.group.WORLD, backend=backend, **options)
    expected = flashtile.cross_entropy(whole, labels, backend=backend, **options)
    assert_same(found, expected)
    loss, expected_loss = (out[0] if isinstance(out, tuple) else out for out in (found, expected))
    dloss = torch.arange(1.0, loss.numel() + 1, device=device).view(loss.shape)
    (dpart,) = torch.autograd.grad(loss, part, dloss)
    (dwhole,) = torch.autograd.grad(expected_loss, whole, dloss)
    assert_same(dpart, dwhole[:, rank * 13 : (rank + 1) * 13])


def with_weights(options: dict[str, Any], vocabulary: int, device: str) -> dict[str, Any]:
    """The options with the class weights that they ask for."""
    weights = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1)).to(device)
    return options | {"class_weights": weights} if options.get("class_weights") else options


def check_linear(rank: int, size: int, options: dict[str, Any], backend: str, device: str) -> None:
    """Each process has some rows of the weight, and x."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((9, 4), (7 * size, 4), (7 * size,))
    )
    labels = torch.tensor([0, 6, 7 * size - 1, -100, 1, 2, 3, 4, 5], device=device)
    rows = slice(7 * rank, 7 * (rank + 1))
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    part = [t.clone().requires_grad_() for t in (x, weight[rows], bias[rows])]
    group = dist.group.WORLD
    options = with_weights(options, 7 * size, device)
    found = flashtile.linear_cross_entropy(
        part[0], part[1], labels, part[2], process_group=group, backend=backend, **options
    )
    expected = flashtile.linear_cross_entropy(whole[0], whole[1], labels, whole[2], backend=backend, **options)
    assert_same(found, expected)
    dloss = torch.arange(1.0, found.numel() + 1, device=device).view(found.shape)
    dx, dweight, dbias = torch.autograd.grad(found, part, dloss)
    expected_dx, expected_dweight, expected_dbias = torch.autograd.grad(expected, whole, dloss)
    assert_same((dx, dweight, dbias), (expected_dx, expected_dweight[rows], expected_dbias[rows]))


def check_no_second_derivative(backend: str, device: str) -> None:
    logits = torch.randn(2, 3, device=device, requires_grad=True)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    loss = flashtile.cross_entropy(logits, labels, process_group=dist.group.WORLD, backend=backend)
    with pytest.raises(RuntimeError, match="process_group: expected a backward without create_graph"):
        torch.autograd.grad(loss, logits, create_graph=True)
