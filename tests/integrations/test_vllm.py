"""The backend of vLLM against vLLM's own classes: requests of all kinds in one batch, on its layout of pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same

pytest.importorskip("vllm.v1.attention.backend")

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flashtile.integrations import vllm as plugin

HEADS, HEADS_KV, HEAD, PAGE, PAGES = 4, 2, 16, 8, 24
#: Tokens of each request in the batch, and before it; the last request only fills up the batch.
COUNTS, CACHED = [9, 1, 4, 0], [0, 20, 13, 0]
PADDED = 16


def _metadata(
    causal: Any = True, backend: Any = plugin.FlashtileBackend, most: int = 8, longest: int = 21,
    pages: int = PAGES // 4, captured: bool = False,
) -> tuple[plugin.FlashtileMetadata, Tensor]:  # fmt: skip
    starts = torch.tensor([0, *COUNTS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(0)).view(4, -1).int()
    lengths = torch.tensor(COUNTS, dtype=torch.int32) + torch.tensor(CACHED, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=4, num_actual_tokens=PADDED,
        max_query_len=max(COUNTS), max_seq_len=longest, block_table_tensor=table, slot_mapping=torch.empty(0),
        causal=causal,
    )  # fmt: skip
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=most))
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=HEAD, dtype=torch.float32)
    builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    return builder.build_for_cudagraph_capture(common) if captured else builder.build(0, common), table


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


_CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "soft_cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": _normal(HEADS, seed=5)},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "fp8": {"kv_cache_dtype": "fp8"},
    "shared_layer": {"kv_sharing_target_layer_name": "other"},
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_batch_is_its_requests(name):
    change = _CHANGES[name]
    batch, table = _metadata()
    impl = plugin.FlashtileBackend.get_impl_cls()(HEADS, HEAD, 0.3, HEADS_KV, **change)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
    rows = _normal(PAGES, HEADS_KV, PAGE, 2 * HEAD, seed=1)
    eight_bits = name == "fp8"
    cache = (rows * 30).to(torch.float8_e4m3fn).view(torch.uint8) if eight_bits else rows
    before = cache.clone()
    q, k, v = (_normal(PADDED, heads, HEAD, seed=seed) for seed, heads in ((2, HEADS), (3, HEADS_KV), (4, HEADS_KV)))
    output = torch.full((PADDED, HEADS * HEAD), float("nan"))
    found = impl.forward(layer, q, k, v, cache, batch, output)
    assert found is output
    wide = cache.view(torch.float8_e4m3fn).float() if eight_bits else cache
    keys, values = wide.transpose(1, 2).split(HEAD, dim=-1)
    if eight_bits:
        keys, values = keys * 0.02, values * 0.03
    shared, start = name == "shared_layer", 0
    assert torch.equal(cache, before) is shared
    for request, (count, cached) in enumerate(zip(COUNTS, CACHED)):
        if not count:
            continue
        own, total = slice(start, start + count), cached + count
        all_k, all_v = (x[table[request].long()].flatten(0, 1)[:total] for x in (keys, values))
        if not shared and not eight_bits:
            assert_same(all_k[cached:], k[own])
            assert_same(all_v[cached:], v[own])
        expected = flashtile.attention(
            q[own][None], all_k[None], all_v[None], causal=True, scale=0.3,
            window=(5, 0) if name == "window" else None, softcap=change.get("logits_soft_cap"),
            sinks=change.get("sinks"), backend="reference",
            alibi_slopes=torch.tensor(change["alibi_slopes"]) if name == "alibi" else None,
        )  # fmt: skip
        assert_same(output[own].view(-1, HEADS, HEAD), expected[0])
        start += count
    assert not output[start:].any(), "rows of no request"


@pytest.mark.parametrize(("longest", "width"), [(21, 3), (120, 15), (128, 16), (129, 18), (800, 104), (9999, 120)])
def test_tables_have_the_pages_of_the_longest_request(longest, width):
    """Rounded up by an eighth at most; those of a CUDA graph, which serves any batch, are whole."""
    batch, table = _metadata(longest=longest, pages=120)
    assert torch.equal(batch.pages, table[:, :width])
    captured, _ = _metadata(longest=longest, pages=120, captured=True)
    assert torch.equal(captured.pages, table)


def test_encoders_have_no_cache():
    batch, _ = _metadata(causal=False)
    impl = plugin.FlashtileImpl(HEADS, HEAD, 0.3, HEADS_KV, attn_type=AttentionType.ENCODER_ONLY)
    q, k, v = (_normal(PADDED, heads, HEAD, seed=seed) for seed, heads in ((2, HEADS), (3, HEADS_KV), (4, HEADS_KV)))
    out = impl.forward(None, q, k, v, torch.empty(0), batch, torch.empty(PADDED, HEADS, HEAD))
    assert_same(out[:9], flashtile.attention(q[None, :9], k[None, :9], v[None, :9], scale=0.3, backend="reference")[0])


def test_attention_in_chunks_by_vllms_own_metadata(monkeypatch):
    """Llama 4: vLLM cuts requests into chunks, more than there are requests."""
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False)
    chunks = pytest.importorskip("vllm.model_executor.layers.attention.chunked_local_attention")
    backend = chunks.create_chunked_local_attention_backend(plugin.FlashtileBackend, PAGE)
    batch, table = _metadata(backend=backend, most=4)
    impl = backend.get_impl_cls()(HEADS, HEAD, 0.3, HEADS_KV)
    q, k, v = (_normal(PADDED, heads, HEAD, seed=seed) for seed, heads in ((2, HEADS), (3, HEADS_KV), (4, HEADS_KV)))
    cache = _normal(PAGES, HEADS_KV, PAGE, 2 * HEAD, seed=1)
    output = impl.forward(None, q, k, v, cache, batch, torch.empty(PADDED, HEADS, HEAD))
    keys, values = cache.transpose(1, 2).split(HEAD, dim=-1)
    start = 0
    for request, (count, cached) in enumerate(zip(COUNTS, CACHED)):
        own, total = slice(start, start + count), cached + count
        all_k, all_v = (x[table[request].long()].flatten(0, 1)[:total] for x in (keys, values))
        assert_same(all_k[cached:], k[own])
        rows = torch.arange(total)
        seen = (rows // PAGE == rows[cached:, None] // PAGE) & (rows <= rows[cached:, None])
        expected = flashtile.attention(
            q[None, own], all_k[None], all_v[None], scale=0.3, mask=seen[None, None], backend="reference"
        )
        assert_same(output[own], expected[0])
        start += count


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_keys_of_an_encoder_by_vllms_own_metadata(cache_dtype):
    """Two requests begin and bring an encoder's rows; one goes on with rows that are there."""
    cross = pytest.importorskip("vllm.model_executor.layers.attention.cross_attention")
    backend = cross.create_cross_attention_backend(plugin.FlashtileBackend)
    encoded, counts, before = np.array([11, 5, 14]), torch.tensor([3, 1, 2]), torch.tensor([0, 6, 0])
    starts = torch.tensor([0, 3, 4, 6]).int()
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))[:6].view(3, 2).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=(counts + before).int(), num_reqs=3,
        num_actual_tokens=6, max_query_len=3, max_seq_len=7, block_table_tensor=table, slot_mapping=torch.empty(0),
        encoder_seq_lens=torch.from_numpy(encoded).int(), encoder_seq_lens_cpu=encoded,
        seq_lens_cpu_upper_bound=(counts + before).int(),
    )  # fmt: skip
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=HEAD, dtype=torch.float32)
    batch = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu")).build(0, common)
    impl = backend.get_impl_cls()(
        HEADS, HEAD, 0.3, HEADS_KV, attn_type=AttentionType.ENCODER_DECODER, kv_cache_dtype=cache_dtype
    )
    layer = SimpleNamespace(_k_scale=torch.tensor(0.04), _v_scale=torch.tensor(0.05), kv_sharing_target_layer_name=None)
    cache = _normal(PAGES, HEADS_KV, PAGE, 2 * HEAD, seed=1)
    if cache_dtype == "fp8":
        cache = (cache * 30).to(torch.float8_e4m3fn).view(torch.uint8)
    q, k, v = (_normal(rows, heads, HEAD, seed=rows) for rows, heads in ((6, HEADS), (25, HEADS_KV), (26, HEADS_KV)))
    output = impl.forward(layer, q, k, v[:25], cache, batch, torch.empty(6, HEADS, HEAD))
    again = impl.forward(layer, q, None, None, cache, batch, torch.empty(6, HEADS, HEAD))
    assert torch.equal(output, again)
    wide = cache.view(torch.float8_e4m3fn).float() if cache_dtype == "fp8" else cache
    keys, values = wide.transpose(1, 2).split(HEAD, dim=-1)
    if cache_dtype == "fp8":
        keys, values = keys * 0.04, values * 0.05
    for request, length in enumerate(encoded.tolist()):
        rows = [x[table[request].long()].flatten(0, 1)[None, :length] for x in (keys, values)]
        if request != 1 and cache_dtype == "auto":
            own = slice(0, 11) if request == 0 else slice(11, 25)
            assert torch.equal(rows[0][0], k[own])
            assert torch.equal(rows[1][0], v[own])
        part = slice(*starts[request : request + 2].tolist())
        assert_same(output[part], flashtile.attention(q[None, part], *rows, scale=0.3, backend="reference")[0])


def test_batch_invariance_is_that_of_the_cache(monkeypatch):
    """A request has the same bits alone, in a batch of one call, and whatever is in the other pages."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    impl = plugin.FlashtileBackend.get_impl_cls()(HEADS, HEAD, 0.3, HEADS_KV)
    batch, table = _metadata()
    q, k, v = (_normal(PADDED, heads, HEAD, seed=seed) for seed, heads in ((2, HEADS), (3, HEADS_KV), (4, HEADS_KV)))
    found, alone = (_normal(PAGES, HEADS_KV, PAGE, 2 * HEAD, seed=1) for _ in range(2))
    together = impl.forward(None, q, k, v, found, batch, torch.empty(PADDED, HEADS * HEAD))
    own = plugin.FlashtileMetadata(
        COUNTS[2],
        torch.tensor([0, COUNTS[2]]).int(),
        batch.cached[2:3],
        batch.lengths[2:3],
        COUNTS[2],
        table[2:3],
        True,
    )
    first = sum(COUNTS[:2])
    rows = (x[first : first + COUNTS[2]].contiguous() for x in (q, k, v))
    single = impl.forward(None, *rows, alone, own, torch.empty(COUNTS[2], HEADS * HEAD))
    assert torch.equal(together[first : first + COUNTS[2]], single)


def test_what_vllm_asks_and_does_before_serving(monkeypatch):
    for _ in range(2):  # vLLM asks plug-ins to bear it
        plugin.register()
    backend = AttentionBackendEnum[plugin.NAME].get_class()
    assert backend is plugin.FlashtileBackend
    capability = SimpleNamespace(to_int=lambda: 90)
    asked = (80, torch.bfloat16, "fp8_e5m2", 16, False, True, False, False, False, capability, AttentionType.DECODER)
    assert not backend.validate_configuration(*asked, has_sliding_window=True, use_non_causal=True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    reasons = backend.validate_configuration(*asked, use_batch_invariant=True)
    assert reasons == ["batch invariance is not supported with caches of 8 bits"]
    impl = plugin.FlashtileImpl(HEADS, HEAD, 0.3)
    profiled = impl.forward(None, *[torch.empty(0)] * 4, None, torch.full((3, 4), 7.0))
    assert not profiled.any()
    with pytest.raises(NotImplementedError, match="output_scale: expected None"):
        impl.forward(None, *[torch.empty(0)] * 4, None, torch.empty(3), output_scale=torch.ones(()))
    with pytest.raises(NotImplementedError, match="attn_type: expected decoder, encoder_only, encoder_decoder"):
        plugin.FlashtileImpl(HEADS, HEAD, 0.3, attn_type=AttentionType.ENCODER)
    with pytest.raises(NotImplementedError, match="causal: expected one value for all requests"):
        _metadata(causal=torch.ones(4, dtype=torch.bool))
