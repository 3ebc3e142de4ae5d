"""The cases that every backend of the softmax must get right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import Size, assert_close


@dataclass(frozen=True)
class SoftmaxCase:
    """One call: causal, or with a mask of a shape, or neither."""

    shape: tuple[int, ...] = (2, 3, 5, 37)
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: tuple[int, ...] | None = None
    scale: float = 0.7


def run(case: SoftmaxCase, backend: str, dtype: torch.dtype | None, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dout = (
        torch.randn(case.shape, generator=generator, dtype=torch.float64).to(case.dtype).to(dtype or case.dtype)
        for _ in range(2)
    )
    mask = None if case.mask is None else torch.rand(case.mask, generator=generator) < 0.4
    if mask is not None and mask.numel() > 1:
        mask.view(-1, mask.shape[-1])[0] = True  # a row without anything, where a row of the mask is one of x
        mask = mask.to(device)
    x, dout = x.to(device).requires_grad_(), dout.to(device)
    if case.causal:
        out = flashtile.scaled_causal_softmax(x, case.scale, backend=backend)
    else:
        out = flashtile.scaled_masked_softmax(x, mask, case.scale, backend=backend)
    (dx,) = torch.autograd.grad(out, x, dout)
    return {"out": out.detach(), "dx": dx}


def check(case: SoftmaxCase, backend: str, device: str = "cpu") -> None:
    """Asserts that a backend's forward and backward of a case agree with the fp64 oracle."""
    actual = run(case, backend, None, device)
    oracle = run(case, "reference", torch.float64, device)
    eager = run(case, "reference", None, device)
    # p · dout and its mean cancel in dx; of a row of one key nothing is left.
    largest = oracle["out"].abs().max().item() * abs(case.scale) if oracle["out"].numel() else 0.0
    for name, value in actual.items():
        lost = Size(largest, largest) if name == "dx" else Size()
        assert_close(f"{case}: {name}", value, oracle[name], eager[name], lost)


_BASE = SoftmaxCase()
CASES = {
    "plain": _BASE,
    "mask": replace(_BASE, mask=(2, 1, 5, 37)),
    "mask_heads": replace(_BASE, mask=(1, 3, 1, 37)),
    "mask_keys": replace(_BASE, mask=(2, 1, 1, 37)),
    "mask_rows": replace(_BASE, mask=(2, 3, 5, 1)),
    "mask_vector": replace(_BASE, mask=(37,)),
    "causal": replace(_BASE, causal=True, shape=(2, 3, 21, 21)),
    "causal_long": replace(_BASE, causal=True, shape=(2, 5, 37)),
    "causal_tall": replace(_BASE, causal=True, shape=(37, 5)),
    "negative_scale": replace(_BASE, scale=-1.5, mask=(2, 1, 5, 37)),
    "zero_scale": replace(_BASE, scale=0.0, causal=True, shape=(9, 9)),
    "fp16": replace(_BASE, dtype=torch.float16, mask=(2, 1, 5, 37)),
    "fp16_causal": replace(_BASE, dtype=torch.float16, causal=True, shape=(2, 1, 20, 20)),
    "one_key": replace(_BASE, shape=(2, 1, 3, 1), mask=(2, 1, 3, 1)),
    "no_keys": replace(_BASE, shape=(2, 1, 3, 0)),
    "no_rows": replace(_BASE, shape=(2, 1, 0, 5), mask=(2, 1, 1, 5)),
    "no_batch": replace(_BASE, shape=(0, 2, 3, 5), causal=True),
    "width_1000": replace(_BASE, shape=(1, 1, 3, 1000), mask=(1, 1, 3, 1000)),
    "width_2049_causal": replace(_BASE, shape=(3, 2049), causal=True),
    "width_16500_looped": replace(_BASE, shape=(1, 1, 2, 16500), mask=(1, 1, 2, 16500)),
    "width_16500_causal_looped": replace(_BASE, shape=(2, 16500), causal=True),
}


def parameters() -> list:
    return [pytest.param(case, id=name) for name, case in CASES.items()]
