"""The backend of SGLang against SGLang's own pools, layers and batches: requests of several lengths in its slots."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same

pytest.importorskip("sglang.srt.layers.attention.base_attn_backend")

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from flashtile.integrations import sglang as plugin

HEADS, HEADS_KV, HEAD = 4, 2, 16
SLOTS, CONTEXT = 128, 32
#: Tokens of each request in a batch that extends, and before it.
COUNTS, CACHED = [9, 1, 4], [0, 20, 13]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """SGLang's settings of deterministic inference, which a server publishes."""
    found = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(plugin, "get_exec", lambda: SimpleNamespace(deterministic=found))
    return found


@pytest.fixture(autouse=True)
def _one_process():
    with get_parallel().override(attn_cp_size=1, attn_dcp_size=1, dcp_enabled=False):
        yield


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _runner(page_size: int = 1, dtype: torch.dtype = torch.float32, pool: str = "", **change: Any) -> Any:
    sizes = {"page_size": page_size, "dtype": dtype, "head_num": HEADS_KV, "head_dim": HEAD, "device": "cpu"}
    found: Any
    if pool == "window":
        found = SWAKVPool(
            size=SLOTS, size_swa=SLOTS, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **sizes
        )
        mapping = torch.randperm(SLOTS // page_size, generator=torch.Generator().manual_seed(7)) + 1
        pages = torch.cat((torch.zeros(1, dtype=torch.long), mapping))
        found.register_mapping((pages[:, None] * page_size + torch.arange(page_size)).flatten())
    elif pool == "linear":
        states = SimpleNamespace(mem_usage_bytes=lambda: 0, get_kv_size_bytes=lambda: 0, mem_usage=0)
        found = HybridLinearKVPool(size=SLOTS, full_attention_layer_ids=[0], mamba_pool=states, **sizes)
    else:
        found = MHATokenToKVPool(size=SLOTS, layer_num=1, enable_memory_saver=False, **sizes)
    runner = SimpleNamespace(
        req_to_token_pool=ReqToTokenPool(4, CONTEXT, "cpu", enable_memory_saver=False), token_to_kv_pool=found,
        page_size=page_size, use_mla_backend=False, attention_chunk_size=None, spec_algorithm=SpeculativeAlgorithm.NONE,
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )  # fmt: skip
    return SimpleNamespace(**(vars(runner) | change))


def _place(runner: Any) -> None:
    """Gives requests 1 to 4 all the slots of a context, page by page."""
    page, pages = runner.page_size, CONTEXT // runner.page_size
    order = torch.randperm(SLOTS // page, generator=torch.Generator().manual_seed(0)) + 1  # page 0 belongs to nobody
    slots = (order[:, None] * page + torch.arange(page)).view(4, pages * page)
    runner.req_to_token_pool.write((slice(1, 5), slice(None)), slots.int())


def _batch(runner: Any, mode: ForwardMode, counts: list[int], cached: list[int]) -> ForwardBatch:
    requests, new = torch.tensor([2, 3, 1, 4][: len(counts)]), torch.tensor(counts)
    lengths = new + torch.tensor(cached)
    table = runner.req_to_token_pool.req_to_token
    slots = [table[request, start : start + count] for request, start, count in zip(requests, cached, counts)]
    return ForwardBatch(
        forward_mode=mode, batch_size=len(counts), input_ids=torch.zeros(sum(counts)), req_pool_indices=requests,
        seq_lens=lengths, out_cache_loc=torch.cat(slots).long(), seq_lens_sum=int(lengths.sum()), seq_lens_cpu=lengths,
        extend_seq_lens=new, extend_seq_lens_cpu=counts,
    )  # fmt: skip


def _layer(**change: Any) -> RadixAttention:
    return RadixAttention(HEADS, HEAD, 0.3, HEADS_KV, 0, **change)


def _rows(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    q = _normal(tokens, HEADS * HEAD, seed=seed)
    return q, _normal(tokens, HEADS_KV, HEAD, seed=seed + 1), _normal(tokens, HEADS_KV, HEAD, seed=seed + 2)


def _fill(runner: Any, layer: RadixAttention) -> None:
    """Tokens that earlier batches wrote."""
    everything = runner.req_to_token_pool.req_to_token[1:5].flatten().long()
    swa = (
        runner.token_to_kv_pool.translate_loc_from_full_to_swa(everything)
        if isinstance(runner.token_to_kv_pool, SWAKVPool)
        else None
    )
    _, k, v = _rows(len(everything), 50)
    runner.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(everything, swa), k, v, layer.k_scale, layer.v_scale)


def _expected(runner: Any, layer: RadixAttention, batch: ForwardBatch, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of each request by itself, on rows gathered from the pool."""
    causal = layer.attn_type == AttentionType.DECODER
    left = layer.sliding_window_size
    keys, values = (rows.float() for rows in runner.token_to_kv_pool.get_kv_buffer(0))
    if layer.k_scale is not None:
        keys, values = keys * layer.k_scale, values * layer.v_scale
    outs, start = [], 0
    counts = batch.extend_seq_lens_cpu if batch.forward_mode.is_extend() else [1] * batch.batch_size
    for request, length, count in zip(batch.req_pool_indices, batch.seq_lens, counts):
        slots = runner.req_to_token_pool.req_to_token[request, :length].long()
        if isinstance(runner.token_to_kv_pool, SWAKVPool):
            slots = runner.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        own = q[start : start + count].view(1, count, HEADS, HEAD)
        chunk, rows = runner.attention_chunk_size, torch.arange(length)
        queries = rows[length - count :, None]
        seen = None if chunk is None else (rows // chunk == queries // chunk)[None, None]
        outs.append(flashtile.attention(
            own, keys[slots][None], values[slots][None], causal=causal, scale=layer.scaling, sinks=sinks,
            window=(left, 0 if causal else left) if left > -1 else None, softcap=layer.logit_cap or None,
            mask=seen, backend="reference",
        ).view(count, -1))  # fmt: skip
        start += count
    return torch.cat(outs)


_SINKS = _normal(HEADS, seed=5)
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor | None]] = {
    "plain": ({}, {}, None),
    "pages": ({"page_size": 8}, {}, None),
    "window": ({}, {"sliding_window_size": 5}, None),
    "window_pool": ({"pool": "window", "page_size": 4}, {"sliding_window_size": 5}, None),
    "linear_layers_pool": ({"pool": "linear", "page_size": 4}, {}, None),
    "soft_cap_and_sinks": ({}, {"logit_cap": 3.0}, _SINKS),
    "fp8": ({"dtype": torch.float8_e4m3fn, "page_size": 4}, {}, None),
    "fp8_e5m2": ({"dtype": torch.float8_e5m2}, {}, None),
    "chunks": ({"attention_chunk_size": 8, "page_size": 4}, {"use_irope": True}, None),
    "chunks_in_a_window_pool": (
        {"attention_chunk_size": 8, "pool": "window", "page_size": 4},
        {"use_irope": True},
        None,
    ),
    "encoder": ({}, {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 5}, None),
}


@pytest.mark.parametrize("name", _CASES)
@torch.no_grad()
def test_batches_are_their_requests(name):
    change, of_layer, sinks = _CASES[name]
    runner, layer = _runner(**change), _layer(**of_layer)
    if name.startswith("fp8"):
        layer.k_scale, layer.v_scale = torch.tensor(0.02), torch.tensor([0.03])
    _place(runner)
    backend = plugin.FlashtileBackend(runner)
    options = {} if sinks is None else {"sinks": sinks}
    batch = _batch(runner, ForwardMode.EXTEND, COUNTS, CACHED)
    _fill(runner, layer)
    backend.init_forward_metadata(batch)
    q, k, v = _rows(sum(COUNTS), 60)
    out = backend.forward(q, k.clone(), v.clone(), layer, batch, **options)
    assert_same(out, _expected(runner, layer, batch, q, sinks))
    if name == "plain":
        assert_same(runner.token_to_kv_pool.get_key_buffer(0)[batch.out_cache_loc], k)
        assert_same(backend.forward(q, None, None, layer, batch), out)  # of a layer that shares these keys
    if name != "encoder":
        batch = _batch(runner, ForwardMode.DECODE, [1] * 3, [count + cached for count, cached in zip(COUNTS, CACHED)])
        batch.seq_lens_cpu = None  # lengths that only the device knows
        backend.init_forward_metadata(batch)
        q, k, v = _rows(3, 70)
        assert_same(backend.forward(q, k, v, layer, batch, **options), _expected(runner, layer, batch, q, sinks))


LATENT, ROTATED = 32, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@torch.no_grad()
def test_latent_rows(dtype):
    """Whole prompts as heads of keys and values, everything else absorbed into the latent columns."""
    page = 4
    pool = MLATokenToKVPool(
        size=SLOTS, page_size=page, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROTATED, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    runner = _runner(page_size=page, token_to_kv_pool=pool, use_mla_backend=True)
    _place(runner)
    layer = RadixAttention(HEADS, LATENT + ROTATED, 0.3, 1, 0, v_head_dim=LATENT)
    factor = 1.0
    if dtype.itemsize == 1:
        factor, layer.k_scale = 0.04, torch.tensor(0.04)
    everything = runner.req_to_token_pool.req_to_token[1:5].flatten().long()
    rows = _normal(len(everything), 1, LATENT + ROTATED, seed=50)
    pool.set_kv_buffer(layer, everything, rows / factor, rows[..., :LATENT])
    backend = plugin.FlashtileBackend(runner)
    for mode, counts in ((ForwardMode.EXTEND, COUNTS), (ForwardMode.DECODE, [1] * 3)):
        batch = _batch(runner, mode, counts, CACHED)
        backend.init_forward_metadata(batch)
        q = _normal(sum(counts), HEADS * (LATENT + ROTATED), seed=60)
        k = _normal(sum(counts), 1, LATENT + ROTATED, seed=61)
        out, start = backend.forward(q, k, k[..., :LATENT], layer, batch), 0
        kept = pool.get_key_buffer(0).float() * factor
        for request, length, count in zip(batch.req_pool_indices, batch.seq_lens, counts):
            keys = kept[runner.req_to_token_pool.req_to_token[request, :length].long()][None]
            own = q[start : start + count].view(1, count, HEADS, -1)
            expected = flashtile.attention(own, keys, keys[..., :LATENT], causal=True, scale=0.3, backend="reference")
            assert_same(out[start : start + count], expected.view(count, -1))
            start += count
    batch = _batch(runner, ForwardMode.EXTEND, COUNTS, [0] * 3)
    batch.extend_prefix_lens_cpu = [0] * 3
    backend.init_forward_metadata(batch)
    prompts = RadixAttention(HEADS, 24, 0.3, HEADS, 0, v_head_dim=16)
    q, k, v = (_normal(sum(COUNTS), HEADS * width, seed=width) for width in (24, 25, 16))
    k = k[:, : HEADS * 24].contiguous()
    out = backend.forward(q, k, v, prompts, batch, save_kv_cache=False)
    start = 0
    for count in COUNTS:
        own = (rows[start : start + count].view(1, count, HEADS, -1) for rows in (q, k, v))
        expected = flashtile.attention(*own, causal=True, scale=0.3, backend="reference")
        assert_same(out[start : start + count], expected.view(count, -1))
        start += count
    batch.extend_prefix_lens_cpu = [0, 4, 0]
    with pytest.raises(NotImplementedError, match=r"layer\.v_head_dim: expected 32, the latent columns"):
        backend.forward(q, k, v, prompts, batch, save_kv_cache=False)


@torch.no_grad()
def test_a_cuda_graph_serves_other_batches_of_its_size():
    """A graph of 4 requests is captured, and replayed with 4 and with 3, of which a view as SGLang makes it tells."""
    runner, layer = _runner(pool="window", page_size=4), _layer(sliding_window_size=5)
    _place(runner)
    _fill(runner, layer)
    backend = plugin.FlashtileBackend(runner)
    backend.init_cuda_graph_state(6, 6)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    slots = torch.zeros(4, dtype=torch.long)  # SGLang keeps what a graph reads where it is
    static = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=4, input_ids=slots, req_pool_indices=torch.zeros_like(slots),
        seq_lens=torch.full_like(slots, fill), out_cache_loc=slots, seq_lens_sum=4 * fill,
    )  # fmt: skip
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    captured = backend.forward_metadata
    for cached in ([4, 20, 13, 8], [5, 21, 14]):
        count = len(cached)
        batch = _batch(runner, ForwardMode.DECODE, [1] * count, cached)
        for kept, new, rest in (
            (slots, batch.out_cache_loc, 0), (static.req_pool_indices, batch.req_pool_indices, 0),
            (static.seq_lens, batch.seq_lens, fill),
        ):  # fmt: skip
            kept.fill_(rest)[:count] = new
        buffers = SimpleNamespace(
            input_ids=slots, positions=slots, req_pool_indices=static.req_pool_indices, seq_lens=static.seq_lens,
            seq_lens_cpu=static.seq_lens, mamba_track_indices=None,
        )  # fmt: skip
        view = build_replay_fb_view(batch, buffers, 4, count, 4, None, fill, ForwardMode.DECODE, False)
        backend.init_forward_metadata_out_graph(view)
        backend.forward_metadata = captured
        q, k, v = _rows(4, seed=70 + count)
        before = runner.token_to_kv_pool.get_key_buffer(0).clone()
        out = backend.forward(q, k, v, layer, static)
        assert_same(out[:count], _expected(runner, layer, batch, q, None))
        written = (runner.token_to_kv_pool.get_key_buffer(0) != before).any(-1).any(-1).nonzero().flatten()
        own = runner.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        assert set(written.tolist()) <= {0, *own.tolist()}
    with pytest.raises(NotImplementedError, match="forward_mode: expected DECODE in a CUDA graph, got EXTEND"):
        backend.init_forward_metadata_out_graph(_batch(runner, ForwardMode.EXTEND, COUNTS, CACHED))


@torch.no_grad()
def test_deterministic_inference_is_batch_invariant(deterministic):
    deterministic.enable_deterministic_inference = True
    runner, layer = _runner(), _layer()
    _place(runner)
    _fill(runner, layer)
    backend, (q, k, v) = plugin.FlashtileBackend(runner), _rows(sum(COUNTS), 60)
    outs = []
    for first, count in ((0, 3), (0, 1)):  # the first request with others, and alone
        batch = _batch(runner, ForwardMode.EXTEND, COUNTS[:count], CACHED[:count])
        backend.init_forward_metadata(batch)
        rows = (x[: sum(COUNTS[:count])].contiguous() for x in (q, k, v))
        outs.append(backend.forward(*rows, layer, batch)[: COUNTS[first]])
    assert torch.equal(*outs)
    for change in ({"dtype": torch.float8_e4m3fn}, {"attention_chunk_size": 8}):
        with pytest.raises(NotImplementedError, match="deterministic inference"):
            plugin.FlashtileBackend(_runner(**change))


def test_sglang_knows_the_backend():
    for _ in range(2):
        plugin.register()
    assert choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(plugin.NAME) == 1
    runner = _runner()
    assert isinstance(ATTENTION_BACKENDS[plugin.NAME](runner), plugin.FlashtileBackend)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args(["--model-path", "none", "--attention-backend", plugin.NAME])
    assert options.attention_backend == plugin.NAME


@pytest.mark.parametrize("change, named", [
    ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "an encoder-decoder model"),
    ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative decoding"),
    ({"token_to_kv_pool": object()}, "token_to_kv_pool: expected MHATokenToKVPool or MLATokenToKVPool, got object"),
])  # fmt: skip
def test_models_that_are_not_served_are_named(change, named):
    with pytest.raises(NotImplementedError, match=named):
        plugin.FlashtileBackend(_runner(**change))


def test_context_parallelism_is_named():
    with get_parallel().override(attn_dcp_size=2), pytest.raises(NotImplementedError, match="context parallelism"):
        plugin.FlashtileBackend(_runner())


@pytest.mark.parametrize("change, options, named", [
    ({"is_cross_attention": True}, {}, "layer.is_cross_attention"),
    ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "layer.attn_type"),
    ({"pos_encoding_mode": "ALIBI"}, {}, "layer.pos_encoding_mode"),
    ({"logit_capping_method": "sigmoid"}, {}, "layer.logit_capping_method"),
    ({}, {"k_rope": torch.ones(1)}, "k_rope: expected None, got Tensor"),
    ({}, {"return_lse": True}, "return_lse: expected None, got bool"),
])  # fmt: skip
def test_layers_and_batches_that_are_not_served_are_named(change, options, named):
    runner = _runner()
    backend = plugin.FlashtileBackend(runner)
    batch = _batch(runner, ForwardMode.EXTEND, COUNTS, CACHED)
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=named):
        backend.forward(*_rows(sum(COUNTS), 60), _layer(**change), batch, **options)
    batch.spec_info = object()
    with pytest.raises(NotImplementedError, match=r"forward_batch\.spec_info: expected None"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(NotImplementedError, match="got TARGET_VERIFY"):
        backend.init_forward_metadata(batch)
