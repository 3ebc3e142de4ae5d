"""Attention modules: each call is the plain computation; options, packing, dropout in training only."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.modules import FlashCrossAttention, FlashSelfAttention, alibi_slopes
from flashtile.testing import assert_same
from support.models.module_cases import DEVICES, alibi_bias, attention_in_full, band, check_module
from support.running.each_case import each_case

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "softmax_scale": 0.3, "window_size": (3, -1), "deterministic": True},
    {"window_size": (2, 4)},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    {"alibi_slopes": torch.tensor([1.0, 0.3, 0.1, 2.0]), "window_size": (-1, 1)},
]


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def visible(options: dict, seq_q: int, seq_k: int, like: torch.Tensor) -> torch.Tensor:
    seen = band(seq_q, seq_k, options.get("causal", False), options.get("window_size", (-1, -1)))
    return seen.to(like.device)


def plain(options: dict, q, k, v):
    lengths = q.shape[1], k.shape[1]
    slopes = options.get("alibi_slopes")
    bias = None if slopes is None else alibi_bias(slopes, *lengths).to(q.device)
    return attention_in_full(q, k, v, visible(options, *lengths, q), options.get("softmax_scale"), bias)


@pytest.mark.parametrize("device", DEVICES)
@each_case("dtype", [torch.float32, torch.bfloat16])
@each_case("options", OPTIONS)
def test_dense(options, dtype, device):
    qkv = torch.randn(2, 11, 3, 4, 8)
    check_module(
        FlashSelfAttention(**options),
        lambda module, qkv: (module(qkv),),
        lambda _, qkv: (plain(options, *qkv.unbind(2)),),
        [qkv], dtype, device,
    )  # fmt: skip
    check_module(
        FlashCrossAttention(**options),
        lambda module, q, kv: (module(q, kv),),
        lambda _, q, kv: (plain(options, q, *kv.unbind(2)),),
        [torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 2, 8)], dtype, device,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@each_case("options", OPTIONS)
def test_packed(options, device):
    lengths_q, lengths_k = [3, 0, 7], [5, 2, 4]
    cu_q, cu_k = cumulative(lengths_q).to(device), cumulative(lengths_k).to(device)

    def in_turn(q, k, v, cu_k):
        parts = [
            plain(options, q[None, a:b], k[None, c:d], v[None, c:d])[0]
            for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        ]
        return (torch.cat(parts),)

    check_module(
        FlashSelfAttention(**options),
        lambda module, qkv: (module(qkv, cu_seqlens=cu_q, max_seqlen=7),),
        lambda _, qkv: in_turn(*qkv.unbind(1), cu_q),
        [torch.randn(10, 3, 4, 8)], torch.float32, device,
    )  # fmt: skip
    check_module(
        FlashCrossAttention(**options),
        lambda module, q, kv: (module(q, kv, None, cu_q, 7, cu_k, 5),),
        lambda _, q, kv: in_turn(q, *kv.unbind(1), cu_k),
        [torch.randn(10, 4, 8), torch.randn(11, 2, 2, 8)], torch.float32, device,
    )  # fmt: skip


def test_causal_of_a_call_comes_before_the_modules_own():
    qkv = torch.randn(2, 6, 3, 2, 8)
    module = FlashSelfAttention(causal=True)
    assert torch.equal(module(qkv, causal=False), FlashSelfAttention()(qkv))
    assert torch.equal(FlashSelfAttention()(qkv, causal=True), module(qkv))
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    assert torch.equal(FlashCrossAttention()(q, kv, causal=True), module(qkv))


def test_drops_in_training_only():
    qkv = torch.randn(2, 6, 3, 2, 8)
    module = FlashSelfAttention(attention_dropout=0.5)
    assert torch.equal(module.eval()(qkv), FlashSelfAttention()(qkv))
    torch.manual_seed(3)
    dropped = module.train()(qkv)
    torch.manual_seed(3)
    assert torch.equal(dropped, flashtile.attention(*qkv.unbind(2), dropout_p=0.5))
    assert not torch.equal(dropped, module.eval()(qkv))


def test_slopes_of_alibi():
    assert_same(alibi_slopes(8), 2.0 ** -torch.arange(1, 9))
    assert_same(alibi_slopes(6), 2.0 ** -torch.tensor([2, 4, 6, 8, 1, 3]).float())
    assert alibi_slopes(1).tolist() == [2.0**-8]


@each_case("heads, error", [(0, ValueError), (-1, ValueError), (4.0, TypeError), (True, TypeError)])
def test_slopes_of_no_number_of_heads_are_refused(heads, error):
    with pytest.raises(error, match=f"heads: expected .*, got {heads}; pass the number of query heads"):
        alibi_slopes(heads)


def test_slopes_follow_the_device_and_stay_wide():
    """In a module that was cast, and with slopes of each sequence."""
    qkv, slopes = torch.randn(2, 6, 3, 2, 8), torch.rand(2, 2)
    module = FlashSelfAttention(alibi_slopes=slopes).bfloat16()
    expected = [FlashSelfAttention(alibi_slopes=slopes[i])(qkv[i : i + 1]) for i in range(2)]
    assert_same(module(qkv), torch.cat(expected))
    wide = [FlashSelfAttention(alibi_slopes=slopes[i])(qkv[i : i + 1].double()) for i in range(2)]
    assert_same(module(qkv.double()), torch.cat(wide))
    assert not module.state_dict()


def test_slopes_outlive_a_call_without_values():
    qkv = torch.randn(2, 6, 3, 2, 8)
    module = FlashSelfAttention(alibi_slopes=alibi_slopes(2))
    expected = module(qkv)
    assert module(qkv.to("meta")).is_meta
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(qkv.double()))
    assert torch.equal(module(qkv), expected)


def test_mistakes_are_explained():
    qkv, cu_seqlens = torch.randn(2, 6, 3, 2, 8), cumulative([6])
    with pytest.raises(ValueError, match=r"qkv: expected shape \[batch, seq, 3, heads, head_dim\], got \[6, 3, 2, 8\]"):
        FlashSelfAttention()(qkv[0])
    with pytest.raises(ValueError, match=r"qkv: expected shape \[total, 3, heads, head_dim\], got \[2, 6, 3, 2, 8\]"):
        FlashSelfAttention()(qkv, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"kv: expected shape \[batch, seq, 2, heads, head_dim\], got"):
        FlashCrossAttention()(qkv[:, :, 0], qkv)
    with pytest.raises(ValueError, match="max_seqlen: expected None without cu_seqlens"):
        FlashSelfAttention()(qkv, max_seqlen=6)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected None without cu_seqlens"):
        FlashCrossAttention()(qkv[:, :, 0], qkv[:, :, 1:], cu_seqlens_k=cu_seqlens)
    with pytest.raises(TypeError, match="window_size: expected a pair"):
        FlashSelfAttention(window_size=None)
    with pytest.raises(ValueError, match="window: expected left from 0"):
        FlashSelfAttention(window_size=(-2, 0))(qkv)
    with pytest.raises(ValueError, match="alibi_slopes: expected constants"):
        FlashSelfAttention(alibi_slopes=torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match=r"alibi_slopes: expected shape \[heads_q\] = \[2\]"):
        FlashSelfAttention(alibi_slopes=torch.ones(3))(qkv)
