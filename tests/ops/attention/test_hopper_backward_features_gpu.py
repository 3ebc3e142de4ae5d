"""Gradients of the Hopper backward with dropout, bias, masks and key lengths on a GPU, beside the float64 reference.

The forward runs on the portable kernels here: any backward follows any forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import flashtile
from flashtile.ops.attention import select
from flashtile.testing import AttentionCase, check, make_inputs, with_arguments
from support.running.covering import turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BASE = AttentionCase(
    batch=2, heads=4, heads_kv=2, seq_q=317, seq_k=443, head_dim=64, head_dim_v=64, dtype=torch.bfloat16
)
_FEATURES: dict[str, dict[str, Any]] = {
    "padding mask": {"mask": "b11k"},
    "padding as lengths": {"key_lengths": (443, 130)},
    "no keys": {"key_lengths": (0, 7), "arguments": {"causal": True}},
    "dense mask": {"mask": "b1qk", "arguments": {"deterministic": True}},
    "T5": {"bias": "1hqk", "arguments": {"scale": 1.0}},
    "bias and tiles": {"bias": "1hqk", "block_mask": (128, 128)},
    "bias and function": {"bias": "1hqk", "score_mod": True, "constant": ("score_mod",)},
    "pair bias": {"bias": "bhqk", "bias_dtype": torch.float32},
    "triangle": {"bias": "1hqk", "mask": "b11k", "key_lengths": (443, 200)},
    "dropout": {"arguments": {"dropout_p": 0.1, "causal": True}},
    "dropout of capped scores": {"arguments": {"dropout_p": 0.3, "softcap": 5.0, "deterministic": True}},
    "slopes": {"alibi_slopes": "bh", "arguments": {"causal": True}},
    "slopes of capped scores": {"alibi_slopes": "h", "sinks": True, "arguments": {"softcap": 5.0, "window": (200, 60)}},
    "all and slopes": {
        "bias": "1hqk", "mask": "b11k", "key_lengths": (443, 200), "alibi_slopes": "bh", "sinks": True,
        "arguments": {"dropout_p": 0.2, "softcap": 5.0, "deterministic": True},
    },
    "all": {
        "bias": "1hqk", "mask": "b11k", "key_lengths": (443, 200), "alibi_slopes": "h", "constant": ("alibi_slopes",),
        "sinks": True, "arguments": {"dropout_p": 0.2, "window": (200, 60)},
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _only_the_backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Forwards of the portable kernels; what has served the backwards."""
    serve, served = select.implementation, []

    def implementation(phase: Any, q: Any, k: Any, v: Any, side: Any, spec: Any, backend: str, **more: Any) -> Any:
        if phase == "backward":
            served.append(backend)
        portable = phase == "forward" and backend == "hopper"
        return serve(phase, q, k, v, side, spec, "triton" if portable else backend, **more)

    monkeypatch.setattr(select, "implementation", implementation)
    yield served
    assert "hopper" in served


def _case(change: dict[str, Any], base: AttentionCase) -> AttentionCase:
    change = dict(change)
    arguments = change.pop("arguments", {})
    return with_arguments(replace(base, **change), **arguments)


_WIDTHS = [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]


@pytest.mark.parametrize(
    "feature, kind", turns(_FEATURES, product(_WIDTHS, (torch.bfloat16, torch.float16)), 4), ids=str
)
def test_gradients(feature: str, kind: tuple[tuple[int, int], torch.dtype]) -> None:
    (head_dim, head_dim_v), dtype = kind
    base = replace(_BASE, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    check(_case(_FEATURES[feature], base), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "feature", ["dense mask", "T5", "dropout", "padding mask", "bias and tiles", "bias and function"]
)
def test_whole_tiles(feature: str, head_dim: int) -> None:
    """No tile ends past a table."""
    base = replace(_BASE, seq_q=384, seq_k=512, head_dim=head_dim, head_dim_v=head_dim)
    check(_case(_FEATURES[feature], base), "hopper", "cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"dropout_p": 0.2, "causal": True}},
        {"bias": "1hqk", "mask": "11qk"},
        {"bias": "1hqk", "arguments": {"causal": True, "deterministic": True}},
        {"bias": "11qk", "block_mask": (64, 128), "key_lengths": (129, 20, 1, 100)},
        {"key_lengths": (129, 20, 1, 100), "arguments": {"dropout_p": 0.2, "deterministic": True}},
        {"alibi_slopes": "bh", "arguments": {"causal": True}},
        {"alibi_slopes": "h", "arguments": {"softcap": 5.0}},
    ],
    ids=str,
)
def test_packed(change: dict[str, Any], head_dim: int) -> None:
    lengths = {"lengths_q": (129, 0, 1, 300), "lengths_k": (129, 33, 1, 400)}
    check(_case(change, replace(_BASE, **lengths, head_dim=head_dim, head_dim_v=head_dim)), "hopper", "cuda")


def test_windows_of_swin() -> None:
    sizes = {"batch": 64, "heads": 6, "heads_kv": 6, "seq_q": 49, "seq_k": 49, "head_dim": 32, "head_dim_v": 32}
    check(replace(_BASE, **sizes, bias="1hqk"), "hopper", "cuda")


@pytest.mark.parametrize(
    "change",
    [{"key_lengths": (700, 260)}, {"mask": "b1qk"}, {"arguments": {"dropout_p": 0.1}}, {"alibi_slopes": "h"}],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_order_is_the_same_every_time(head_dim: int, change: dict[str, Any]) -> None:
    base = replace(_BASE, batch=2, seq_q=700, seq_k=700, head_dim=head_dim, head_dim_v=head_dim)
    case = with_arguments(_case(change, base), deterministic=True)
    inputs = make_inputs(case, "cuda")

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        given = dict(inputs.tensors)
        if "alibi_slopes" in given:
            given["alibi_slopes"] = given["alibi_slopes"].detach().requires_grad_()
        out = flashtile.attention(*leaves, **given, **case.keywords(), backend="hopper")
        leaves += [given["alibi_slopes"]] if "alibi_slopes" in given else []
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = gradients()
    for _ in range(3):
        assert all(map(torch.equal, first, gradients()))
