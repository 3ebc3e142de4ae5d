"""What soft cap, bias, ALiBi, masks and sinks mean: small examples by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same, check
from support.attention.attention_cases import BASE
from support.running.autograd import normal

INFINITY = float("inf")


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(batch: int = 2, seq_q: int = 5, seq_k: int = 7, heads: int = 4, heads_kv: int = 2) -> list[Tensor]:
    """Random q, k, v that want gradients."""
    sizes = ((seq_q, heads), (seq_k, heads_kv), (seq_k, heads_kv))
    return [normal(batch, *size, 8, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]


def scores_of(seq_q: int, seq_k: int, q: Tensor | None = None, **options: Any) -> Tensor:
    """The scores `[queries, keys]` of one head, read off by values that are unit vectors; -inf where hidden.

    Without q the products `q kᵀ` are 0, and what is left is what the options add.
    """
    q = torch.zeros(1, seq_q, 1, 1, dtype=torch.float64) if q is None else q
    k = torch.ones(1, seq_k, 1, 1, dtype=torch.float64)
    v = torch.eye(seq_k, dtype=torch.float64)[None, :, None]
    weights, lse = flashtile.attention(q, k, v, return_lse=True, **options)
    return weights[0, :, 0].log() + lse[0, 0, :, None]


def equal(actual: Any, expected: Any) -> None:
    assert_same(actual, expected)


# --- what becomes of a score ----------------------------------------------------------------------------------------


def test_scale_then_softcap_then_bias_and_alibi_then_mask():
    q, keys = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64), (3.0, -1.0, 5.0, 0.5)
    k, v = doubles(*keys).view(1, 4, 1, 1), doubles(1, 10, 100, 1000).view(1, 4, 1, 1)
    out, lse = flashtile.attention(
        q, k, v, scale=0.5, softcap=1.5, bias=doubles(0.3, -0.2, 7, 0.1), alibi_slopes=doubles(0.25),
        mask=torch.tensor([True, True, False, True]), return_lse=True,
    )  # fmt: skip
    # The one query lies at the last key, so the distances are 3, 2, 1, 0; the third key is masked.
    visible = [
        1.5 * math.tanh(0.5 * 2 * key / 1.5) + bias - 0.25 * distance
        for key, bias, distance in ((3.0, 0.3, 3), (-1.0, -0.2, 2), (0.5, 0.1, 0))
    ]
    total = sum(math.exp(score) for score in visible)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-12)
    weighted = sum(math.exp(score) * value for score, value in zip(visible, (1, 10, 1000)))
    assert out.item() == pytest.approx(weighted / total, rel=1e-12)


def test_saturated_softcap_lets_no_gradient_through():
    q, k, v = qkv()
    out = flashtile.attention(1e6 * q, k, v, softcap=1.0)
    dq, dk, dv = torch.autograd.grad(out.sin().sum(), (q, k, v))
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


# --- bias and mask --------------------------------------------------------------------------------------------------


def test_bias_adds_to_scores():
    bias = normal(3, 4)
    equal(scores_of(3, 4, bias=bias), bias)
    equal(scores_of(3, 4, bias=bias, causal=True), bias.masked_fill(torch.ones(3, 4).triu(2).bool(), -INFINITY))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 1, 1, 7), (1, 4, 5, 7)], ids=str)
def test_mask_is_a_bias_of_minus_infinity(shape):
    mask, inputs = normal(*shape) < 0.5, qkv()

    def results(**options: Any) -> tuple[Tensor, ...]:
        out, lse = flashtile.attention(*inputs, return_lse=True, **options)
        lse = lse.masked_fill(lse.isneginf(), 0)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), inputs)

    equal(results(mask=mask), results(bias=torch.zeros(shape, dtype=torch.float64).masked_fill(~mask, -INFINITY)))


SHAPES = [
    (), (1,), (7,), (5, 1), (5, 7), (4, 1, 1), (4, 5, 1), (4, 1, 7), (4, 5, 7), (1, 1, 1, 1), (2, 1, 1, 1),
    (2, 1, 1, 7), (2, 1, 5, 1), (2, 4, 1, 1), (1, 4, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_broadcasts_and_its_gradient_is_the_sum(shape):
    inputs, bias = qkv(), normal(*shape).requires_grad_()

    def results(bias_of_call: Tensor) -> tuple[Tensor, ...]:
        out, lse = flashtile.attention(*inputs, bias=bias_of_call, softcap=3.0, return_lse=True)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), [*inputs, bias])

    small, full = results(bias), results(bias.expand(2, 4, 5, 7).clone())
    assert small[-1].shape == shape
    equal(small, full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_bias_beside_16_bits(dtype):
    case = replace(BASE, dtype=dtype, bias="1hqk", bias_dtype=torch.float32)
    assert check(case, "cpu")["dbias"].dtype is torch.float32
    # What 16 bits cannot hold counts: a step of 2⁻¹² at 1.
    q, k, v = (t.detach().to(dtype) for t in qkv(1, 1, 1))
    _, lse = flashtile.attention(0 * q, k, v, bias=torch.tensor([1 + 2**-12]), return_lse=True)
    assert (lse == 1 + 2**-12).all()


# --- ALiBi ----------------------------------------------------------------------------------------------------------

DISTANCES = [
    ((2, 4), [[2, 1, 0, 1], [3, 2, 1, 0]]),
    ((4, 2), [[2, 3], [1, 2], [0, 1], [1, 0]]),
    ((3, 3), [[0, 1, 2], [1, 0, 1], [2, 1, 0]]),
    ((1, 5), [[4, 3, 2, 1, 0]]),
]


@pytest.mark.parametrize("options", [{}, {"align": "top_left"}, {"key_lengths": None}], ids=str)
@pytest.mark.parametrize("sizes, distances", DISTANCES, ids=str)
def test_alibi_distances(sizes, distances, options):
    if "key_lengths" in options:
        options = {"key_lengths": torch.tensor(sizes[1:])}
    scores = scores_of(*sizes, alibi_slopes=doubles(0.5), **options)
    equal(scores, -0.5 * torch.tensor(distances, dtype=torch.float64))


def test_alibi_distances_under_a_mask():
    slopes = doubles(1)
    hidden = scores_of(2, 4, alibi_slopes=slopes, causal=True, align="top_left")
    equal(hidden, doubles(-2, -INFINITY, -INFINITY, -INFINITY, -3, -2, -INFINITY, -INFINITY).view(2, 4))
    # Distances count from the end of all keys, not of the valid ones.
    short = scores_of(2, 4, alibi_slopes=slopes, key_lengths=torch.tensor([2]))
    equal(short, doubles(-2, -1, -INFINITY, -INFINITY, -3, -2, -INFINITY, -INFINITY).view(2, 4))


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_alibi_is_a_bias(shape):
    inputs, slopes = qkv(), normal(*shape).requires_grad_()
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()

    def results(**options: Any) -> tuple[Tensor, ...]:
        out, lse = flashtile.attention(*inputs, return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), [*inputs, slopes])

    equal(results(alibi_slopes=slopes), results(bias=-slopes[..., None, None] * distance))


# --- sinks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"key_lengths": torch.tensor([7, 0])}], ids=str)
def test_sink_of_minus_infinity_is_none(options):
    inputs, sinks = qkv(2, 9, 7), torch.full((4,), -INFINITY, dtype=torch.float64).requires_grad_()

    def results(**more: Any) -> tuple[Tensor, ...]:
        outputs = flashtile.attention(*inputs, return_lse=True, **options, **more)
        return *outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], retain_graph=True)

    equal(results(sinks=sinks), results())
    out = flashtile.attention(*inputs, sinks=sinks, **options)
    assert not torch.autograd.grad(out.sin().sum(), sinks)[0].any()


def test_sink_is_a_key_without_a_value():
    (q, k, v), sinks = qkv(), normal(4, seed=5).requires_grad_()
    nothing = torch.zeros_like(k[:, :1])

    def results(**options: Any) -> tuple[Tensor, ...]:
        out, lse = flashtile.attention(q, return_lse=True, **options)
        return out, lse, *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), (q, k, v, sinks))

    logits = torch.cat((sinks.new_zeros(4, 1, 7), sinks.view(4, 1, 1)), dim=-1)
    one_more = results(k=torch.cat((k, nothing), 1), v=torch.cat((v, nothing), 1), bias=logits)
    equal(results(k=k, v=v, sinks=sinks), one_more)


# --- packed sequences, sizes of zero --------------------------------------------------------------------------------


@pytest.mark.parametrize("slopes_shape", [(4,), (4, 4)], ids=["heads", "batch-heads"])
def test_packed_is_a_loop_of_dense_calls(slopes_shape):
    lengths_q, lengths_k = (3, 0, 5, 2), (4, 2, 1, 0)
    q, k, v = (normal(t, h, 8, seed=t).requires_grad_() for t, h in ((11, 4), (8, 2), (8, 2)))  # one row of no sequence
    bias, slopes, sinks = (normal(*s).requires_grad_() for s in ((1, 4, 5, 4), slopes_shape, (4,)))
    mask = normal(5, 4, seed=3) < 1
    cu_q, cu_k = cumulative(*lengths_q), cumulative(*lengths_k)
    options: dict[str, Any] = {"softcap": 2.0, "sinks": sinks, "return_lse": True}
    out, lse = flashtile.attention_varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=5, max_seqlen_k=4, bias=bias, mask=mask, alibi_slopes=slopes, **options
    )
    outs, lses = [], []
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k)):
        one, one_lse = flashtile.attention(
            q[None, cu_q[b] : cu_q[b + 1]], *(t[None, cu_k[b] : cu_k[b + 1]] for t in (k, v)),
            bias=bias[..., :rows, :keys], mask=mask[:rows, :keys],
            alibi_slopes=slopes if slopes.dim() == 1 else slopes[b], **options,
        )  # fmt: skip
        outs.append(one[0])
        lses.append(one_lse[0])
    assert not out[10:].any()
    assert (lse[:, 10:] == -INFINITY).all()
    whole, parts = (out[:10], lse[:, :10]), (torch.cat(outs), torch.cat(lses, dim=1))
    equal(whole, parts)
    learned = (q, k, v, bias, slopes, sinks)
    grads = [torch.autograd.grad(o.sin().sum() + e.sin().sum(), learned) for o, e in (whole, parts)]
    equal(*grads)


@pytest.mark.parametrize("batch, seq_q, seq_k", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_sizes_of_zero(batch, seq_q, seq_k):
    inputs, sinks = qkv(batch, seq_q, seq_k), normal(4).requires_grad_()
    shapes = (batch, 4, seq_q, seq_k), (batch, 4)
    bias, slopes = (torch.zeros(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    mask = torch.ones(batch, 1, 1, seq_k, dtype=torch.bool)
    outputs = flashtile.attention(
        *inputs, bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, softcap=1.0, return_lse=True
    )
    assert not outputs[0].any()
    equal(outputs[1], sinks[:, None].expand(batch, 4, seq_q))
    learned = (*inputs, bias, slopes, sinks)
    grads = torch.autograd.grad(outputs, learned, [torch.ones_like(o) for o in outputs])
    assert [grad.shape for grad in grads] == [t.shape for t in learned]
    assert not any(grad.any() for grad in grads[:-1])
    equal(grads[-1], torch.full_like(sinks, batch * seq_q))
