"""FlashAttention-3's interface: values by their definition, what is accepted without effect, what raises."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import sys

import pytest
import torch

import flashtile.compat
from compat_cases import (
    PLACES,
    Meaning,
    attention_by_definition,
    check_against,
    cumulative,
    normal,
    packed_by_definition,
)
from flashtile.compat.flash_attn_3.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

places = pytest.mark.parametrize(("device", "dtype"), PLACES)
OPTIONS = {
    "plain": ({}, Meaning()),
    "causal": ({"causal": True, "num_splits": 4, "pack_gqa": True, "sm_margin": 8}, Meaning(causal=True)),
    "window": ({"window_size": (4, 2), "softcap": 2.0, "deterministic": True}, Meaning(window=(4, 2), softcap=2.0)),
}
options_and_meaning = pytest.mark.parametrize(("options", "meaning"), OPTIONS.values(), ids=OPTIONS.keys())


@places
@options_and_meaning
def test_dense(options, meaning, device, dtype):
    q, k, v = normal(2, 9, 4, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 24, seed=2)
    check_against(
        lambda q, k, v: flash_attn_func(q, k, v, **options),
        lambda q, k, v: attention_by_definition(q, k, v, meaning)[0], [q, k, v], device, dtype,
    )  # fmt: skip
    options = {name: value for name, value in options.items() if name not in ("num_splits", "pack_gqa")}
    check_against(
        lambda qkv: flash_attn_qkvpacked_func(qkv, **options),
        lambda qkv: attention_by_definition(*qkv.unbind(2), meaning)[0], [normal(2, 9, 3, 4, 16)], device, dtype,
    )  # fmt: skip
    check_against(
        lambda qkv: flash_attn_qkvpacked_func(qkv, **options, num_heads_q=4),
        lambda qkv: attention_by_definition(*qkv.split((4, 2, 2), 2), meaning)[0],
        [normal(2, 9, 8, 16)], device, dtype,
    )  # fmt: skip


@places
@options_and_meaning
@pytest.mark.parametrize("used", ["", "q", "k", "qk"])
def test_packed(used, options, meaning, device, dtype):
    lengths_q, lengths_k = [5, 0, 9, 3], [7, 4, 9, 11]
    lengths = cumulative(lengths_q, device), cumulative(lengths_k, device), 9, 11
    used_q = [3, 0, 9, 0] if "q" in used else lengths_q
    used_k = [7, 2, 4, 10] if "k" in used else lengths_k
    given = {
        f"seqused_{name}": torch.tensor(counts, dtype=torch.int32, device=device)
        for name, counts in (("q", used_q), ("k", used_k)) if name in used
    }  # fmt: skip

    def definition(q, k, v):
        rows_q, rows_k = (
            [row for start, count in zip(ends.tolist(), counts) for row in range(start, start + count)]
            for ends, counts in ((lengths[0], used_q), (lengths[1], used_k))
        )
        out = packed_by_definition(q[rows_q], k[rows_k], v[rows_k], used_q, used_k, meaning)[0]
        return torch.zeros(17, 4, 24).to(out).index_copy(0, torch.tensor(rows_q, device=device), out)

    check_against(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, *lengths, **given, **options), definition,
        [normal(17, 4, 16), normal(31, 2, 16, seed=1), normal(31, 2, 24, seed=2)], device, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 2])
def test_packed_without_sequences(rows):
    """Rows of no sequence are 0, also beside numbers of used rows."""
    keys, ends = torch.randn(0, 2, 8), torch.zeros(1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    out = flash_attn_varlen_func(torch.randn(rows, 4, 8), keys, keys, ends, ends, 0, 0, seqused_q=none, seqused_k=none)
    assert torch.equal(out, torch.zeros(rows, 4, 8))


@places
def test_cache(device, dtype):
    q, k, v = (normal(2, 1, heads, 16, seed=heads).to(device, dtype) for heads in (4, 2, 2))
    pages = normal(4, 16, 2, 16).to(device, dtype)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)
    plan = get_scheduler_metadata(2, 1, 32, 4, 2, 16, lengths)
    out, lse = flash_attn_with_kvcache(
        q, pages, pages.clone(), k, v, cache_seqlens=lengths, page_table=table, causal=True, scheduler_metadata=plan,
        return_softmax_lse=True,
    )  # fmt: skip
    keys = pages[table[0].long()].flatten(0, 1)[:6]
    assert torch.equal(keys[5], k[0, 0]) and lse.shape == (2, 4, 1)
    values = torch.cat((keys[:5], v[0]))
    expected, _ = attention_by_definition(*(t[None].double() for t in (q[0], keys, values)), Meaning())
    torch.testing.assert_close(out[0].double(), expected[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(2, 5), (9,)], ids=["dense", "packed"])
def test_combine(shape):
    outs, lses = normal(3, *shape, 4, 8).float(), normal(3, *shape, 4, seed=1).float()
    out, lse = flash_attn_combine(outs, lses)
    torch.testing.assert_close(lse, lses.logsumexp(0))
    torch.testing.assert_close(out, ((lses - lse).exp()[..., None] * outs).sum(0))
    assert flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype is torch.bfloat16
    buffer = torch.empty_like(out, dtype=torch.float16)
    assert flash_attn_combine(outs, lses, buffer)[0] is buffer
    with pytest.raises(ValueError, match="out: expected"):
        flash_attn_combine(outs, lses, buffer[:1])


def test_8_bit_inputs():
    (q, q_descale), (k, k_descale), (v, v_descale) = (
        flashtile.quantize_fp8(x, 2)
        for x in (torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16))
    )
    factors = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    ours = {f"descale_{name[0]}": factor for name, factor in factors.items()}
    expected = flashtile.attention(q, k, v, causal=True, **ours)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, **factors), expected)
    ends = cumulative([9, 9])
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 9, 9, causal=True, **factors)
    torch.testing.assert_close(out, expected.flatten(0, 1))
    qkv = torch.cat([x.view(torch.uint8) for x in (q, k, v)], 2).view(torch.float8_e4m3fn)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, **factors), expected)
    with pytest.raises(ValueError, match="q_descale: expected None"):
        flash_attn_with_kvcache(q, k, v, q_descale=q_descale)


X = torch.randn(1, 5, 2, 8)


@pytest.mark.parametrize(
    "arguments",
    [{"qv": X}, {"q_descale": X}, {"k_descale": X}, {"v_descale": X}, {"attention_chunk": 4}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_is_not_served(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}: expected"):
        flash_attn_func(X, X, X, **arguments)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        flash_attn_varlen_func(X[0], X[0], X[0], cumulative([5]), cumulative([5]), 5, 5, **arguments)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        flash_attn_with_kvcache(X, X, X, **arguments)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"])
def test_what_the_cache_does_not_take(name):
    with pytest.raises(ValueError, match=f"{name}: expected None"):
        flash_attn_with_kvcache(X, X, X, **{name: 5})
    with pytest.raises(ValueError, match="qkv: expected shape"):
        flash_attn_qkvpacked_func(X)


def test_served_under_its_own_name():
    flashtile.compat.install("flash_attn_interface")
    try:
        module = importlib.import_module("flash_attn_interface")
        assert module.flash_attn_func.__module__ == "flash_attn_interface"
        assert metadata.version("flash-attn-3") == "3.0.0b1"
        assert flashtile.compat.installed() == {"flash_attn_interface": 3}
    finally:
        flashtile.compat.uninstall("flash_attn_interface")
    assert "flash_attn_interface" not in sys.modules
