"""flash_attn_with_kvcache: each argument beside its place in a call of `flashtile.attention_with_kv_cache`."""

import pytest
import torch

import flashtile
from flashtile.testing import assert_same
from support.attention.compat_cases import Meaning, attention_by_definition, normal, places, served
from support.running.each_case import each_case

flash_attn_with_kvcache = served(2).flash_attn_with_kvcache

LENGTHS, CAPACITY, NEW = [5, 0, 17], 24, 3
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
ORDER, PADDING = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([1, 0, 3], dtype=torch.int32)
#: Arguments of a call, and those of flashtile's, where causal is the default.
OPTIONS = {
    "plain": ({}, {"causal": False}),
    "causal": ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
    "window": ({"window_size": (4, 0), "num_splits": 3}, {"causal": False, "window": (4, 0), "num_splits": 3}),
    "scores": ({"softcap": 2.0, "alibi_slopes": SLOPES}, {"causal": False, "softcap": 2.0, "alibi_slopes": SLOPES}),
    "entries": ({"cache_batch_idx": ORDER}, {"causal": False, "cache_batch_indices": ORDER}),
    "padding": ({"cache_leftpad": PADDING}, {"causal": False, "cache_left_padding": PADDING}),
}


def inputs(dtype, device="cpu"):
    q, k, v = normal(3, 2, 4, 16), normal(3, NEW, 2, 16, seed=1), normal(3, NEW, 2, 16, seed=2)
    caches = normal(3, CAPACITY, 2, 16, seed=3), normal(3, CAPACITY, 2, 16, seed=4)
    return [t.to(device, dtype) for t in (q, k, v, *caches)]


def rotary_tables(rotary_dim, like):
    angles = torch.outer(torch.arange(40.0), 0.3 ** torch.arange(rotary_dim / 2))
    return {"rotary_cos": angles.cos().to(like), "rotary_sin": angles.sin().to(like)} if rotary_dim else {}


@places
@pytest.mark.parametrize("name", OPTIONS)
@each_case("rotary_dim, interleaved", [(0, True), (8, True), (16, False)])
def test_appends_and_rotates(interleaved, rotary_dim, name, device, dtype):
    given, ours = (
        {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        for options in OPTIONS[name]
    )
    q, k, v, *caches = inputs(dtype, device)
    stored = [cache.clone() for cache in caches]
    both = {**rotary_tables(rotary_dim, q), "rotary_interleaved": interleaved}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    found = flash_attn_with_kvcache(
        q, *stored, k, v, cache_seqlens=lengths, return_softmax_lse=True, **both, **given
    )  # fmt: skip
    expected = flashtile.attention_with_kv_cache(
        q, *caches, k, v, cache_lengths=lengths, return_lse=True, **both, **ours
    )  # fmt: skip
    for one, other in zip((*found, *stored), (*expected, *caches), strict=True):
        assert_same(one, other)


def test_nothing_appended_and_one_length_for_all():
    q, _, _, k_cache, v_cache = inputs(torch.float32)
    before = k_cache.clone()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
    expected, _ = attention_by_definition(q, k_cache[:, :7], v_cache[:, :7], Meaning())
    assert_same(out, expected)
    assert_same(
        flash_attn_with_kvcache(q, k_cache, v_cache), attention_by_definition(q, k_cache, v_cache, Meaning())[0]
    )
    assert torch.equal(k_cache, before)


def test_nothing_is_recorded():
    q, k, v, k_cache, v_cache = inputs(torch.float32)
    out = flash_attn_with_kvcache(q.requires_grad_(), k_cache, v_cache, k, v, cache_seqlens=4)
    assert not out.requires_grad


@each_case(
    "arguments, names",
    [
        ({"window_size": 4}, "window_size"),
        ({"cache_seqlens": 23}, "cache"),
        ({"num_splits": 1000}, "num_splits"),
        ({"alibi_slopes": SLOPES[:2]}, "alibi_slopes"),
    ],
)
def test_errors(arguments, names):
    q, k, v, k_cache, v_cache = inputs(torch.float32)
    with pytest.raises((TypeError, ValueError), match=names):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **{"cache_seqlens": 4, **arguments})
