"""The check of modules against the same computation in plain PyTorch operations, and the plain form of attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flashtile.testing import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

#: What a module, or its plain form, computes from inputs: outputs that take a gradient.
Forward = Callable[..., tuple[Tensor, ...]]


def check_module(
    module: nn.Module, forward: Forward, plain: Forward, inputs: list[Tensor], dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Asserts that outputs and all gradients are those of the plain form, by the tolerance policy.

    `forward(module, *inputs)` is under test, `plain(module, *inputs)` reads the module's parameters. Both get inputs
    and module in `dtype`; the oracle is `plain` in float64.
    """
    actual = _run(module, forward, inputs, dtype, device)
    oracle = _run(module, plain, [x.to(dtype) for x in inputs], torch.float64, device, dtype)
    eager = _run(module, plain, inputs, dtype, device)
    assert actual.keys() == oracle.keys()
    for name, value in actual.items():
        assert_close(name, value, oracle[name], eager[name])


def _run(
    module: nn.Module,
    function: Forward,
    inputs: list[Tensor],
    dtype: torch.dtype,
    device: str,
    rounded: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients; the parameters are rounded to another dtype before they are cast."""
    module = copy.deepcopy(module).to(device).to(rounded or dtype).to(dtype)
    given = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
    outputs = function(module, *given)
    upstream = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=upstream, dtype=torch.float64).to(out) for out in outputs]
    leaves = {f"d(input {i})": x for i, x in enumerate(given)} | {f"d({n})": p for n, p in module.named_parameters()}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | dict(zip(leaves, gradients, strict=True))


def attention_in_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention by its matrices: q `[B, Sq, Hq, D]`, k and v `[B, Sk, Hkv, D]`, visible and bias broadcast to
    `[B, Hq, Sq, Sk]`; a row that sees nothing is 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).nan_to_num(0)
    return (weights.to(v.dtype) @ v).transpose(1, 2)


def band(seq_q: int, seq_k: int, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """Which keys a query sees, bool `[seq_q, seq_k]`; the last query lies at the last key."""
    distance = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    left, right = window[0], 0 if causal else window[1]
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def alibi_bias(slopes: Tensor, seq_q: int, seq_k: int) -> Tensor:
    """What ALiBi adds to the scores, `[heads, seq_q, seq_k]`."""
    distance = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    return -slopes[:, None, None] * distance.abs()
