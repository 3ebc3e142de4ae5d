"""The Hopper kernels on a GPU, in sizes that have tiles, walks or kernels of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashtile
from flashtile.testing import AttentionCase, assert_close, check, make_inputs, run, with_arguments
from support.attention.attention_cases import check_again
from support.running.covering import turns

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

_BF16 = torch.bfloat16

_BASE = AttentionCase(batch=2, heads=4, heads_kv=2, seq_q=230, seq_k=230, head_dim=64, head_dim_v=64, dtype=_BF16)


_SHORT: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"arguments": {"causal": True}},
    "soft cap": {"arguments": {"causal": True, "softcap": 5.0}},
    "packed slopes": {
        "lengths_q": (129, 0, 70), "lengths_k": (136, 33, 90), "alibi_slopes": "h", "arguments": {"causal": True},
    },
    "packed": {"lengths_q": (129, 1, 64), "lengths_k": (136, 130, 1)},
    "lengths": {"key_lengths": (70, 200), "sinks": True},
}  # fmt: skip
_KINDS = [(width, (_BF16, torch.float16)[at % 2]) for at, width in enumerate(2 * [32, 40, 64, 72, 96, 112, 128])]


@pytest.mark.parametrize("name, kind", turns(_SHORT, _KINDS, 4), ids=str)
def test_short_calls(name: str, kind: tuple[int, torch.dtype]) -> None:
    check(replace(_BASE, head_dim=kind[0], head_dim_v=kind[0], dtype=kind[1], **_SHORT[name]), "hopper", "cuda")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [1, 64, 127, 128, 197, 256, 300, 512, 700, 1024])
def test_lengths_around_those_at_which_tiles_change(seq: int, head_dim: int, causal: bool) -> None:
    """Also in more tiles than a GPU takes at once."""
    for batch in (2, 40):
        case = replace(_BASE, batch=batch, seq_q=seq, seq_k=seq, head_dim=head_dim, head_dim_v=head_dim)
        check(with_arguments(case, causal=causal), "hopper", "cuda")


_PARTS = [
    (1, 2, 2, 4096, 77), (1, 2, 1, 4096, 130), (2, 3, 3, 1111, 300), (1, 8, 1, 2500, 64), (1, 1, 1, 5000, 1),
    (1, 8, 8, 2457, 2457),  # 160 walks or more: a thread block takes several parts
]  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("sizes, head_dim", turns(_PARTS, [40, 64, 128, 160, 256], 2), ids=str)
def test_walks_in_parts(sizes: tuple[int, ...], head_dim: int, deterministic: bool) -> None:
    """Walks over the queries are in parts, most of them because keys are few."""
    named = dict(zip(("batch", "heads", "heads_kv", "seq_q", "seq_k"), sizes))
    case = replace(_BASE, head_dim=head_dim, head_dim_v=head_dim, **named)
    for arguments in ({}, {"softcap": 5.0}):
        of_case = with_arguments(case, deterministic=deterministic, **arguments)
        first = check(of_case, "hopper", "cuda")
        if deterministic:
            again = run(of_case, make_inputs(of_case, "cuda"), "hopper")
            assert all(torch.equal(first[name], again[name]) for name in first)


_FLOAT32: dict[str, dict[str, Any]] = {
    "full": {"batch": 3, "seq_q": 512, "seq_k": 512},
    "causal, shared keys": {"seq_q": 643, "seq_k": 643, "arguments": {"causal": True}},
    "long, causal": {"batch": 1, "seq_q": 3000, "seq_k": 3000, "arguments": {"causal": True}},
    "one query, sinks": {"seq_q": 1, "seq_k": 700, "sinks": True},
    "rows that see nothing": {"seq_q": 300, "seq_k": 100, "sinks": True, "arguments": {"causal": True}},
    "one key, other scale": {"seq_k": 1, "arguments": {"scale": -0.1}},
    "window": {"seq_q": 700, "seq_k": 800, "arguments": {"window": (90, 3)}},
    "window, top left": {"seq_q": 517, "arguments": {"window": (None, 20), "align": "top_left"}},
    "heads divided": {"heads": 8, "heads_kv": 1, "seq_q": 2000, "seq_k": 70},
}


_FLOAT32_WIDTHS = [
    (128, 128), (96, 96), (72, 128), (128, 64), (80, 8), (256, 256), (192, 192), (144, 144), (192, 128), (256, 64),
    (192, 256), (128, 192), (512, 512), (320, 320), (512, 8), (72, 512),
]  # fmt: skip


@pytest.mark.parametrize("widths, name", turns(_FLOAT32_WIDTHS, _FLOAT32, 2), ids=str)
def test_backward_of_float32(widths: tuple[int, int], name: str) -> None:
    """Its sums have a fixed order, so each run has the same bits."""
    case = replace(_BASE, head_dim=widths[0], head_dim_v=widths[1], dtype=torch.float32, **_FLOAT32[name])
    inputs = make_inputs(case, "cuda")
    given = {**inputs.tensors, **case.keywords(), "device": "sm_90"}
    choice = flashtile.explain(inputs.q, inputs.k, inputs.v, **given)
    assert [(kernel.name, kernel.backend) for kernel in choice.kernels[-3:]] == [
        (name, "hopper") for name in ("dv", "dk", "dq")
    ]
    first = check(case, "auto", "cuda", inputs=inputs)
    for _ in range(3):
        again = run(case, make_inputs(case, "cuda"), "auto")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("widths, name", turns(_FLOAT32_WIDTHS, [*_FLOAT32][::-1], 1), ids=str)
def test_forward_of_float32(widths: tuple[int, int], name: str) -> None:
    """Its sums have a fixed order, so each run has the same bits."""
    case = replace(_BASE, head_dim=widths[0], head_dim_v=widths[1], dtype=torch.float32, **_FLOAT32[name])
    check_again(case, "hopper", 3, ("out", "lse"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [256, 512])
def test_forward_of_float32_with_infinite_and_missing_numbers(head_dim: int, causal: bool) -> None:
    """The parts of an infinite number are infinite and NaN. Scores are hidden before they count, values are not."""
    q, k, v = (torch.randn(1, 200, 2, head_dim, device="cuda") for _ in range(3))
    if causal:
        k[0, 150, 0] = torch.inf
    else:
        v[0, 130, 1, 7], v[0, 160, 1, 9] = torch.inf, torch.nan
    mine = flashtile.attention(q, k, v, causal=causal, backend="hopper", return_lse=True)
    oracle, eager = (
        flashtile.attention(*(t.to(dtype) for t in (q, k, v)), causal=causal, backend="reference", return_lse=True)
        for dtype in (torch.float64, torch.float32)
    )
    assert not oracle[0].isfinite().all()
    for name, actual, expected, of_eager in zip(("out", "lse"), mine, oracle, eager):
        assert_close(name, actual, expected, of_eager)
