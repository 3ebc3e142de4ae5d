"""An attention backend of vLLM: `VLLM_ATTENTION_BACKEND=FLASHTILE`, or `--attention-backend FLASHTILE`.

vLLM finds `register` by the entry point `vllm.general_plugins`. A layer of a batch, in which requests bring chunks of
prompts, single tokens, or tokens to be verified, is one call of `flashtile.attention_with_kv_cache` on vLLM's pages.

This module needs vLLM, which loads it. Nothing here chooses kernels or copies caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.mla.prefill.registry import register_mla_prefill_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import flashtile
from flashtile.integrations.shared import cache_factors, not_served, token_window, widened

NAME = "FLASHTILE"
#: The backend of models with multi-head latent attention, in `flashtile.integrations.vllm_mla`.
MLA_NAME = "FLASHTILE_MLA"

#: vLLM's names of caches in 8 bits, and their dtypes.
EIGHT_BITS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)


def register() -> None:
    """Makes the backends known to vLLM by their names. vLLM may call it several times in a process."""
    if NAME in AttentionBackendEnum.__members__:
        return
    register_backend(NAME, "flashtile.integrations.vllm.FlashtileBackend")
    register_backend(MLA_NAME, "flashtile.integrations.vllm_mla.FlashtileMLABackend")
    register_mla_prefill_backend(MLA_NAME, "flashtile.integrations.vllm_mla.FlashtileMLAPrefill")


class ServedByFlashtile:
    """The answers that both backends give alike when vLLM asks about flashtile."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *EIGHT_BITS]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.to_int() >= 75)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any, **more: Any
    ) -> str | None:
        """The reason why vLLM's batch invariance is not there with this cache, or None."""
        eight_bits = envs.VLLM_BATCH_INVARIANT and kv_cache_dtype in EIGHT_BITS
        return "batch invariance is not supported with caches of 8 bits" if eight_bits else None


class FlashtileBackend(ServedByFlashtile, AttentionBackend):
    """The answers to what vLLM asks before it chooses flashtile."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashtileImpl]:
        return FlashtileImpl

    @staticmethod
    def get_builder_cls() -> type[FlashtileMetadataBuilder]:
        return FlashtileMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 512

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@dataclass
class FlashtileMetadata:
    """A batch, for all layers.

    Attributes:
        tokens: rows of q that count; some at the end may belong to no request.
        starts: `[requests + 1]`, where the queries of each request begin.
        cached: int32 `[requests]`, tokens of each that are in the cache already.
        lengths: int32 `[requests]`, tokens of each with those of the batch.
        longest: queries of a request at most.
        pages: `[requests, pages of a request]`, as many as the longest may have.
        causal: whether tokens see no later ones.
        slot_mapping: int64, where an encoder's keys go; vLLM sets it for layers that have those.
    """

    tokens: int
    starts: Tensor
    cached: Tensor
    lengths: Tensor
    longest: int
    pages: Tensor
    causal: bool
    slot_mapping: Tensor | None = None


class FlashtileMetadataBuilder(AttentionMetadataBuilder[FlashtileMetadata]):
    """Makes the metadata of a batch. All that a CUDA graph reads stays where it is, so graphs serve any batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        self._cached = torch.zeros(most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashtileMetadata:
        """Nothing here waits for the GPU. vLLM passes 0 as `common_prefix_len`."""
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise not_served("causal", "one value for all requests", "one for each")
        requests = common.num_reqs
        starts = common.query_start_loc[: requests + 1]
        # Attention in chunks makes more requests than there are, and no graphs.
        cached = (
            self._cached[:requests] if requests <= len(self._cached) else torch.empty_like(common.seq_lens[:requests])
        )
        lengths = common.seq_lens[:requests]
        torch.sub(lengths, starts.diff(), out=cached)
        cached.clamp_(min=0)  # requests that only fill up a batch have neither tokens nor a length
        return FlashtileMetadata(
            common.num_actual_tokens, starts, cached, lengths, int(common.max_query_len),
            common.block_table_tensor[:requests, : self._width(common.max_seq_len)], common.causal,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashtileMetadata:
        """The metadata of a CUDA graph, whose pages are as many as any later batch may have."""
        common = common_attn_metadata
        return replace(self.build(0, common), pages=common.block_table_tensor[: common.num_reqs])

    def _width(self, tokens: int) -> int:
        """Pages of a request with so many tokens. Memory for gathered rows is in proportion to it. Rounded up by an
        eighth at most, so that lengths that grow step by step are few kinds of calls."""
        pages = max(1, -(-int(tokens) // self.kv_cache_spec.block_size))
        step = 1 << max(0, pages.bit_length() - 4)
        return -(-pages // step) * step


class FlashtileImpl(AttentionImpl[FlashtileMetadata]):
    """Attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if attn_type not in _TYPES:
            raise not_served("attn_type", ", ".join(_TYPES), attn_type)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._sliding_window = sliding_window
        self._options: dict[str, Any] = {
            "scale": self.scale, "softcap": logits_soft_cap or None, "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
        }  # fmt: skip
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self._sinks = sinks

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: FlashtileMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Appends the new keys and values to the pages, and attends to all keys of each request.

        Args:
            layer: has the factors of caches in 8 bits, `_k_scale` and `_v_scale`.
            query: `[tokens, heads, head_size]`, of a padded batch more.
            key, value: `[tokens, kv_heads, head_size]`. In a layer with an encoder's keys those of requests that are
                new, or None.
            kv_cache: `[pages, kv_heads, page_size, 2 head_size]`, keys before values.
            output: `[tokens, heads, head_size]`, or with heads and columns in one; is written.
        """
        for name, factor in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if factor is not None:
                raise NotImplementedError(f"{name}: expected None, got a tensor; the output is not quantised here")
        if attn_metadata is None:  # vLLM measures how much memory a model needs
            return output.fill_(0)
        batch = attn_metadata
        q = self._rows(query)[: batch.tokens]
        options = self._options | self._on_device(q)
        if self.attn_type == AttentionType.ENCODER_ONLY:
            k, v = (self._rows(rows)[: batch.tokens] for rows in (key, value))
            out = flashtile.attention_varlen(
                q, k, v, batch.starts, max_seqlen_q=batch.longest, max_seqlen_k=batch.longest,
                window=token_window(self._sliding_window, False), **options,
            )  # fmt: skip
        else:
            keys, values = self._caches(kv_cache)
            if keys.dtype in EIGHT_BITS.values():
                options |= cache_factors(layer._k_scale, layer._v_scale)
            # A layer that reads the keys of another one brings none, and those of its tokens are there.
            new: dict[str, Any] = {"cache_lengths": batch.lengths}
            if self.attn_type == AttentionType.ENCODER_DECODER:
                for rows, cache, name in ((key, keys, "descale_k"), (value, values, "descale_v")):
                    if rows is not None:
                        _store(self._rows(rows), cache, options.get(name), batch.slot_mapping)
            elif self.kv_sharing_target_layer_name is None:
                k, v = (self._rows(rows)[: batch.tokens] for rows in (key, value))
                new = {"k": k, "v": v, "cache_lengths": batch.cached}
            out = flashtile.attention_with_kv_cache(
                q, keys, values, block_table=batch.pages, cu_seqlens_q=batch.starts, max_seqlen_q=batch.longest,
                causal=batch.causal, window=token_window(self._sliding_window, batch.causal), **new, **options,
            )  # fmt: skip
        output[: batch.tokens].copy_(out.view(output[: batch.tokens].shape))
        return output

    def _rows(self, rows: Any) -> Tensor:
        """`[tokens, heads, head_size]`."""
        found: Tensor = rows.unflatten(-1, (-1, self.head_size)) if rows.dim() == 2 else rows
        return found

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values, `[pages, page_size, kv_heads, head_size]`: views."""
        dtype = EIGHT_BITS.get(self.kv_cache_dtype)
        if dtype is not None:
            kv_cache = kv_cache.view(dtype)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def _on_device(self, q: Tensor) -> dict[str, Any]:
        """Slopes and sinks, on the device of q."""
        found = {}
        if self._slopes is not None:
            self._slopes = self._slopes.to(q.device)
            found["alibi_slopes"] = self._slopes
        if self._sinks is not None:
            found["sinks"] = widened(self._sinks, q)
        return found


def _store(rows: Tensor, cache: Tensor, factor: Tensor | None, slots: Tensor | None) -> None:
    """Writes the rows of an encoder to their slots of a cache `[pages, page_size, kv_heads, head_size]`."""
    assert slots is not None  # of vLLM's metadata for such layers
    rows = rows[: slots.shape[0]]
    if factor is not None:
        limit = torch.finfo(cache.dtype).max
        rows = (rows.float() / factor).clamp(-limit, limit).to(cache.dtype)
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)  # PyTorch writes no rows of 8-bit floats
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
