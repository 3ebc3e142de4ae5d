"""flash_attn_with_kvcache: appending in place, rotation, lengths, entries, padding and pages, by their definition."""

import pytest
import torch

from flashtile.testing import assert_close, assert_same
from support.attention.compat_cases import CALLS, Meaning, attention_by_definition, normal, served
from support.running.each_case import each_case

flash_attn_with_kvcache = served(2).flash_attn_with_kvcache
apply_rotary_emb_torch = served(2, "layers.rotary").apply_rotary_emb_torch

places = pytest.mark.parametrize(("device", "dtype"), CALLS)
LENGTHS, CAPACITY, NEW = [5, 0, 17], 24, 3
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "softmax_scale": 0.3}, Meaning(scale=0.3, causal=True)),
    "window": ({"window_size": (4, 0), "num_splits": 3}, Meaning(window=(4, 0))),
    "scores": ({"softcap": 2.0, "alibi_slopes": SLOPES}, Meaning(softcap=2.0, alibi_slopes=SLOPES)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


def tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(40.0), 0.3 ** torch.arange(rotary_dim / 2)).double()
    return angles.cos(), angles.sin()


def step(q, k, v, caches, meaning, rotary=None, interleaved=True, first=(0, 0, 0)):
    """The caches after the step, and outputs and lse of each sequence, one after another."""
    k_cache, v_cache = (cache.clone() for cache in caches)
    outs, lses = [], []
    for b, length in enumerate(LENGTHS):
        q_one, k_one = q[b : b + 1], k[b : b + 1]
        if rotary is not None:
            cos, sin = (table.to(q) for table in rotary)
            banded = meaning.causal or meaning.window != (-1, -1)
            rows = range(length, length + q.shape[1]) if banded else [length] * q.shape[1]
            q_one = apply_rotary_emb_torch(q_one, cos[list(rows)], sin[list(rows)], interleaved)
            new = slice(length, length + NEW)
            k_one = apply_rotary_emb_torch(k_one, cos[new], sin[new], interleaved)
        end = length + NEW
        k_cache[b, length:end], v_cache[b, length:end] = k_one[0], v[b]
        seen = slice(first[b], end)
        out, lse = attention_by_definition(q_one, k_cache[b : b + 1, seen], v_cache[b : b + 1, seen], meaning)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def inputs(dtype):
    q, k, v = normal(3, 2, 4, 16), normal(3, NEW, 2, 16, seed=1), normal(3, NEW, 2, 16, seed=2)
    caches = normal(3, CAPACITY, 2, 16, seed=3), normal(3, CAPACITY, 2, 16, seed=4)
    return [t.to(dtype) for t in (q, k, v, *caches)]


def check(results, dtype, meaning, **definition):
    """Results of a call on `inputs(dtype)`: out, lse and the caches; the latter may be None."""
    given = inputs(dtype)
    oracle = step(*(t.double() for t in given[:3]), [t.double() for t in given[3:]], meaning, **definition)
    eager = step(*given[:3], given[3:], meaning, **definition)
    for name, got, exact, plain in zip(("out", "lse", "k_cache", "v_cache"), results, oracle, eager):
        if got is not None:
            assert_close(name, got.cpu(), exact, plain)


def on(device, options):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


@places
@options_and_meaning
@each_case("rotary_dim, interleaved", [(0, True), (8, True), (16, False)])
def test_appends_and_rotates(interleaved, rotary_dim, options, meaning, device, dtype):
    q, k, v, k_cache, v_cache = (t.to(device) for t in inputs(dtype))
    rotary = tables(rotary_dim) if rotary_dim else None
    cos, sin = (None, None) if rotary is None else (table.to(device, dtype) for table in rotary)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, lengths, rotary_interleaved=interleaved, return_softmax_lse=True,
        **on(device, options),
    )  # fmt: skip
    check((out, lse, k_cache, v_cache), dtype, meaning, rotary=rotary, interleaved=interleaved)


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
