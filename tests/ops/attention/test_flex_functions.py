"""Functions as users of FlexAttention write them, unchanged: makers of functions, masks of masks, tables that functions
close over, partial functions and modules. Each against PyTorch's function on a CPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import and_masks, create_block_mask, noop_mask, or_masks

import flashtile
from flashtile.testing import assert_same, size

BATCH, HEADS, SEQ = 2, 4, 192
Function = Callable[..., Any]


# Masks


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def sliding_window(size: int) -> Function:
    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx <= size

    return and_masks(near, causal)


def prefix_lm(length: int) -> Function:
    return or_masks(lambda b, h, q_idx, kv_idx: kv_idx < length, causal)


def padded(lengths: Tensor) -> Function:
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def document_entries(inner: Function, offsets: Tensor) -> Function:
    """A mask within each document, whose positions count from the document's start."""
    document_id = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets[1:] - offsets[:-1])

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = document_id[q_idx] == document_id[kv_idx]
        q_logical = q_idx - offsets[document_id[q_idx]]
        kv_logical = kv_idx - offsets[document_id[kv_idx]]
        return same & inner(b, h, q_logical, kv_logical)

    return mask_mod


def dilated(window: int, step: int) -> Function:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= window) & ((distance % step) == 0) & (kv_idx <= q_idx)

    return mask_mod


def natten(width: int, height: int, kernel: int) -> Function:
    def place(index: Tensor) -> tuple[Tensor, Tensor]:
        return index // width, index % width

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        (q_y, q_x), (kv_y, kv_x) = place(q_idx), place(kv_idx)
        center_x = q_x.clamp(kernel // 2, (width - 1) - kernel // 2)
        center_y = q_y.clamp(kernel // 2, (height - 1) - kernel // 2)
        near = (center_x - kv_x).abs() <= kernel // 2
        return near & ((center_y - kv_y).abs() <= kernel // 2)

    return mask_mod


def of_modality(kinds: Tensor) -> Function:
    """Pictures within a text see themselves whole: tokens of one number above 0 are one picture."""

    def together(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kinds[b, q_idx] == kinds[b, kv_idx]) & (kinds[b, q_idx] > 0)

    return or_masks(causal, together)


def jagged(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Heads with windows of their own."""
    return and_masks(causal, lambda b, h, q, kv: q - kv < 16 * (h + 1))(b, h, q_idx, kv_idx)


KINDS = (torch.arange(SEQ) // 40 % 2 * (torch.arange(SEQ) // 40)).expand(BATCH, SEQ)
OFFSETS = torch.tensor([0, 50, 51, 130, SEQ])
MASKS: dict[str, Function] = {
    "noop": noop_mask,
    "causal": causal,
    "sliding window": sliding_window(30),
    "prefix": prefix_lm(70),
    "padding": and_masks(causal, padded(torch.tensor([150, SEQ]))),
    "documents": document_entries(causal, OFFSETS),
    "prefix in documents": document_entries(prefix_lm(20), OFFSETS),
    "dilated": dilated(60, 4),
    "natten": natten(16, 12, 5),
    "modalities": of_modality(KINDS),
    "windows of heads": jagged,
}

# Scores


def alibi(heads: int) -> Function:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * scale

    return score_mod


def tanh_softcap(cap: int) -> Function:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def of_natural_numbers(score_mod: Function, offsets: Tensor) -> Function:
    """A function of scores within documents, whose positions count from the document's start."""
    document_id = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets[1:] - offsets[:-1])

    def changed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_logical = q_idx - offsets[document_id[q_idx]]
        return score_mod(score, b, h, q_logical, kv_idx - offsets[document_id[kv_idx]])

    return changed


class RelativeBias(torch.nn.Module):
    """T5's buckets of distances."""

    def __init__(self, buckets: int, heads: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.table = torch.nn.Parameter(torch.randn(buckets, heads, dtype=torch.float64))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(q_idx - kv_idx)
        exact = self.buckets // 2
        large = exact + (torch.log(distance.clamp(min=1) / exact) / 2 * exact).to(torch.int32)
        bucket = torch.where(distance < exact, distance, large.clamp(max=self.buckets - 1))
        return score + self.table[bucket, h]


def checkerboard(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def of_queries(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, weight: Tensor) -> Tensor:
    return score * weight[b, q_idx]


def silu(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.nn.functional.silu(score)


GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.rand(BATCH, SEQ, generator=GENERATOR, dtype=torch.float64)
SCORES: dict[str, Function] = {
    "alibi": alibi(HEADS),
    "soft cap": tanh_softcap(2),
    "alibi in documents": of_natural_numbers(alibi(HEADS), OFFSETS),
    "checkerboard": checkerboard,
    "silu": silu,
    "partial": functools.partial(of_queries, weight=WEIGHT),
}


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(BATCH, HEADS, SEQ, 16, generator=generator, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask = create_block_mask(MASKS[name], BATCH, HEADS, SEQ, SEQ, device="cpu")
    query, key, value = inputs()
    expected = torch_flex.flex_attention(query, key, value, block_mask=mask)
    assert_same(flashtile.flex_attention(query, key, value, block_mask=mask), expected)
    own = flashtile.BlockMask.from_predicate(MASKS[name], BATCH, HEADS, SEQ, SEQ, device="cpu")
    assert_same(flashtile.flex_attention(query, key, value, block_mask=own), expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    query, key, value = inputs()
    mask = create_block_mask(MASKS["documents"], BATCH, HEADS, SEQ, SEQ, device="cpu")
    expected = torch_flex.flex_attention(query, key, value, SCORES[name], mask)
    assert_same(flashtile.flex_attention(query, key, value, SCORES[name], mask), expected)


def test_a_module_with_buckets_and_its_gradient():
    module = RelativeBias(16, HEADS)
    query, key, value = inputs()
    found = flashtile.flex_attention(query, key, value, module)
    assert_same(found.detach(), torch_flex.flex_attention(query, key, value, module).detach())
    (gradient,) = torch.autograd.grad(found.sin().sum(), module.table)
    index = torch.arange(SEQ)
    scores = query @ key.transpose(-1, -2) / 4
    bias = module(torch.zeros(1, 1, 1, 1), None, torch.arange(HEADS).view(-1, 1, 1), index[:, None], index)
    by_hand = torch.softmax(scores + bias, -1) @ value
    (of_bias,) = torch.autograd.grad(by_hand.sin().sum(), bias)
    # The gradients of a row's scores cancel: their sum is 0.
    expected, cancelled = (
        torch.autograd.grad(bias, module.table, of, retain_graph=True)[0] for of in (of_bias, of_bias.abs())
    )
    assert_same(gradient, expected, cancelled=size(cancelled))
