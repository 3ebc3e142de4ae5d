"""`flashtile.flex_attention` against PyTorch's function of this name, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashtile
from flashtile.ops.attention import flex
from flashtile.testing import assert_same

HEADS, SEQ = 4, 150


def inputs(heads_kv: int = HEADS, seq_k: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(2, heads, rows, 16, generator=generator, dtype=torch.float64)

    return normal(HEADS, SEQ), normal(heads_kv, seq_k), normal(heads_kv, seq_k)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 30)


TABLE = torch.linspace(-1, 1, 2 * SEQ, dtype=torch.float64)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[q - k + SEQ]


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 0.7 * torch.tanh(score / 0.7)


@pytest.mark.parametrize("score_mod", [None, relative, capped], ids=["none", "relative", "capped"])
@pytest.mark.parametrize("mask_mod", [None, causal, sliding], ids=["all", "causal", "sliding"])
def test_agrees_with_pytorch(score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None) -> None:
    query, key, value = inputs()
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, SEQ, SEQ, device="cpu")
    found = flashtile.flex_attention(query, key, value, score_mod, block_mask, 0.3)
    expected = torch_flex.flex_attention(query, key, value, score_mod, block_mask, 0.3)
    assert_same(found, expected)


def test_statistics_as_asked_for() -> None:
    query, key, value = inputs(seq_k=70)
    scores = query @ key.transpose(-1, -2) / 4 * 0.5
    half: Callable[..., Tensor] = lambda score, b, h, q, k: 0.5 * score  # noqa: E731
    out, lse = flashtile.flex_attention(query, key, value, half, return_lse=True)
    assert_same((out, lse), (scores.softmax(-1) @ value, scores.logsumexp(-1)))
    _, aux = flashtile.flex_attention(query, key, value, half, return_aux=AuxRequest(lse=True, max_scores=True))
    assert_same((aux.lse, aux.max_scores), (scores.logsumexp(-1), scores.amax(-1)))
    _, aux = flashtile.flex_attention(query, key, value, half, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    assert_same(aux.max_scores, scores.amax(-1))
    _, aux = flashtile.flex_attention(query, key, value, return_aux=AuxRequest())
    assert aux.lse is None
    assert aux.max_scores is None


def test_grouped_heads_and_gradients() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs(heads_kv=2))
    table = torch.randn(HEADS, 2 * SEQ, dtype=torch.float64, requires_grad=True)

    def learned(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + table[h, q - k + SEQ]

    out: Any = flashtile.flex_attention(query, key, value, learned, enable_gqa=True)
    place = torch.arange(SEQ)[:, None] - torch.arange(SEQ) + SEQ
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 4 + table[:, place]
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    leaves = query, key, value, table
    assert_same(
        (out, *torch.autograd.grad(out.sin().sum(), leaves)),
        (expected, *torch.autograd.grad(expected.sin().sum(), leaves)),
    )
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flashtile.flex_attention(query, key, value)


def test_a_mask_of_pytorch_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs()
    block_mask = create_block_mask(causal, None, None, SEQ, SEQ, device="cpu")
    conversions = []
    convert = flashtile.BlockMask.from_flex
    monkeypatch.setattr(flex.BlockMask, "from_flex", lambda mask: (conversions.append(mask), convert(mask))[1])
    first = flashtile.flex_attention(query, key, value, block_mask=block_mask)
    assert_same(flashtile.flex_attention(query, key, value, block_mask=block_mask), first)
    assert len(conversions) == 1
    assert_same(flashtile.flex_attention(query, key, value, block_mask=convert(block_mask)), first)


def test_a_function_that_changes_nothing_costs_nothing() -> None:
    query, key, value = (tensor.float().transpose(1, 2) for tensor in inputs())
    answer = flashtile.explain(query, key, value, score_mod=lambda score, *_: score)
    assert "PyTorch's CPU flash attention" in answer.kernels[0].name


def test_refusals() -> None:
    query, key, value = inputs()
    with pytest.raises(ValueError, match="kernel_options: expected None"):
        flashtile.flex_attention(query, key, value, kernel_options={"BLOCK_M": 32})
    with pytest.raises(ValueError, match="return_lse, return_aux"):
        flashtile.flex_attention(query, key, value, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(ValueError, match="query: expected 4 dimensions"):
        flashtile.flex_attention(query[0], key, value)
    with pytest.raises(TypeError, match="enable_gqa"):
        flashtile.flex_attention(query, key, value, enable_gqa=1)  # type: ignore[arg-type]
