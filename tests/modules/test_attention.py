"""Attention modules: each call is that of the function; options, packing, dropout in training only."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.modules import FlashCrossAttention, FlashSelfAttention, alibi_slopes
from flashtile.testing import assert_same
from support.models.module_cases import DEVICES
from support.running.each_case import each_case

_SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
#: Options of the modules, and of flashtile.attention, whose numbers have tests of their own.
OPTIONS = [
    ({}, {}),
    (
        {"causal": True, "softmax_scale": 0.3, "window_size": (3, -1)},
        {"causal": True, "scale": 0.3, "window": (3, None)},
    ),
    ({"window_size": (2, 4), "deterministic": True}, {"window": (2, 4), "deterministic": True}),
    ({"alibi_slopes": _SLOPES, "window_size": (-1, 1)}, {"alibi_slopes": _SLOPES, "window": (None, 1)}),
]


def check(found, expected, leaves):
    dout = torch.randn_like(found)
    of_both = ([out, *torch.autograd.grad(out, leaves, dout)] for out in (found, expected))
    assert_same(*of_both)


@pytest.mark.parametrize("device", DEVICES)
@each_case("options, ours", OPTIONS)
def test_a_call_is_that_of_the_function(options, ours, device):
    if "alibi_slopes" in ours:
        ours = {**ours, "alibi_slopes": _SLOPES.to(device)}
    alone, across = FlashSelfAttention(**options), FlashCrossAttention(**options)
    shapes = (2, 11, 3, 4, 8), (2, 5, 4, 8), (2, 9, 2, 2, 8), (10, 3, 4, 8), (11, 2, 2, 8)
    qkv, q, kv, rows, rows_kv = leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    check(alone(qkv), flashtile.attention(*qkv.unbind(2), **ours), leaves[:1])
    check(across(q, kv), flashtile.attention(q, *kv.unbind(2), **ours), leaves[1:3])
    ends, ends_k = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 3, 3, 10], [0, 5, 7, 11]))
    expected = flashtile.attention_varlen(*rows.unbind(1), ends, max_seqlen_q=7, max_seqlen_k=7, **ours)
    check(alone(rows, cu_seqlens=ends, max_seqlen=7), expected, [rows])
    expected = flashtile.attention_varlen(
        rows[:, 0], *rows_kv.unbind(1), ends, ends_k, max_seqlen_q=7, max_seqlen_k=5, **ours
    )
    check(across(rows[:, 0], rows_kv, None, ends, 7, ends_k, 5), expected, [rows, rows_kv])


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
    qkv, cu_seqlens = torch.randn(2, 6, 3, 2, 8), torch.tensor([0, 6])
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
