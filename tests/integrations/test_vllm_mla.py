"""The backend of vLLM for latent attention against vLLM's own classes: requests that decode on its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing import assert_same

pytest.importorskip("vllm.model_executor.layers.attention.mla_attention")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashtile.integrations import vllm, vllm_mla

HEADS, LATENT, ROTATED, PAGE, PAGES = 4, 256, 64, 4, 18
LENGTHS = [9, 3, 21]
_PLACE = {
    "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": 128, "qk_rope_head_dim": ROTATED,
    "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None,
}  # fmt: skip


def _impl(cache: str = "auto", **change: Any) -> vllm_mla.FlashtileMLAImpl:
    arguments = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": cache, "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER, "kv_sharing_target_layer_name": None,
    }  # fmt: skip
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        return vllm_mla.FlashtileMLAImpl(HEADS, LATENT + ROTATED, 0.1, 1, **arguments | change, **_PLACE)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(("queries", "causal"), [(1, True), (3, True), (3, False)])
def test_requests_that_decode_are_requests_alone(cache, queries, causal):
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).view(3, -1).int()
    rows = _normal(PAGES, PAGE, LATENT + ROTATED, seed=1)
    given, factor = rows, 1.0
    if cache == "fp8":
        given, factor = (rows * 30).to(torch.float8_e4m3fn).view(torch.uint8), 0.04
        rows = given.view(torch.float8_e4m3fn).float() * factor
    tokens = 3 * queries
    metadata = MLACommonMetadata(
        num_reqs=3, max_query_len=queries, max_seq_len=max(LENGTHS), num_actual_tokens=tokens,
        query_start_loc=torch.arange(0, tokens + 1, queries).int(), slot_mapping=torch.empty(0), num_decodes=3,
        num_decode_tokens=tokens, num_prefills=0, causal=causal, head_dim=LATENT + ROTATED,
        decode=MLACommonDecodeMetadata(table, torch.tensor(LENGTHS).int(), None),
    )  # fmt: skip
    q = _normal(tokens, HEADS, LATENT + ROTATED, seed=2)
    layer = SimpleNamespace(_k_scale=torch.tensor([factor]))
    out, lse = _impl(cache).forward_mqa(q.split((LATENT, ROTATED), dim=-1), given, metadata, layer)
    assert out.shape == (tokens, HEADS, LATENT) and lse.shape == (tokens, HEADS)
    for request, length in enumerate(LENGTHS):
        own = slice(request * queries, (request + 1) * queries)
        keys = rows[table[request].long()].flatten(0, 1)[None, :length, None]
        expected, expected_lse = flashtile.attention(
            q[None, own], keys, keys[..., :LATENT], causal=causal, scale=0.1, return_lse=True, backend="reference"
        )
        assert_same(out[own], expected[0])
        assert_same(lse[own], expected_lse[0].T.contiguous())


def test_prompts_are_prompts_alone():
    """New tokens among themselves, and to rows before them, merged by their lse as vLLM does."""
    backend = vllm_mla.FlashtileMLAPrefill(
        num_heads=HEADS, scale=0.1, kv_lora_rank=LATENT, qk_nope_head_dim=128, qk_rope_head_dim=ROTATED, v_head_dim=128,
        vllm_config=None,
    )  # fmt: skip
    new, before = [9, 1, 4], [0, 5, 13]
    starts, starts_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (new, before))
    backend.prepare_metadata(MLACommonPrefillMetadata(torch.empty(0), starts, max(new)))
    q, k = (_normal(sum(new), HEADS, 192, seed=seed) for seed in (1, 2))
    old_k, v, old_v = (_normal(n, HEADS, d, seed=d + n) for n, d in ((18, 192), (14, 128), (18, 128)))
    chunk = SimpleNamespace(
        query_start_loc=starts, cu_seq_lens=starts_k, max_query_len=max(new), max_seq_len=max(before)
    )
    out, lse = backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=True)
    assert torch.equal(backend.run_prefill_new_tokens(q, k, v, return_softmax_lse=False), out)
    old_out, old_lse = backend.run_prefill_context_chunk(chunk, q, old_k, old_v)
    share = torch.sigmoid(lse - old_lse).T[..., None]
    merged = share * out + (1 - share) * old_out
    for request in range(3):
        own, rows = (slice(*ends[request : request + 2].tolist()) for ends in (starts, starts_k))
        keys, values = (torch.cat(both)[None] for both in ((old_k[rows], k[own]), (old_v[rows], v[own])))
        expected = flashtile.attention(q[None, own], keys, values, causal=True, scale=0.1, backend="reference")[0]
        assert_same(merged[own], expected)


def test_what_vllm_asks():
    vllm.register()
    backend = AttentionBackendEnum[vllm.MLA_NAME].get_class()
    assert backend is vllm_mla.FlashtileMLABackend and backend.is_mla()
    assert MLAPrefillBackendEnum[vllm.MLA_NAME].get_class() is vllm_mla.FlashtileMLAPrefill
    assert vllm_mla.FlashtileMLAPrefill.get_name() == vllm.MLA_NAME
    capability = SimpleNamespace(to_int=lambda: 90)
    asked = (576, torch.bfloat16, "fp8", 64, True, False, False, False, False, capability, AttentionType.DECODER)
    assert not backend.validate_configuration(*asked)
    for change in ({"logits_soft_cap": 3.0}, {"sliding_window": 4}, {"attn_type": AttentionType.ENCODER}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(change))}: expected"):
            _impl(**change)
