"""The attention backend of vLLM for models with multi-head latent attention: `--attention-backend FLASHTILE_MLA`.

Queries of decoding, absorbed into the latent space, are one call of `flashtile.attention_with_kv_cache` on vLLM's pages
of latent rows. Prompts are computed by a prefill backend, with keys and values of heads: the one that vLLM chooses, or
flashtile's, which the option `mla_prefill_backend` names `FLASHTILE_MLA` too. vLLM writes the rows.

This module needs vLLM, which loads it. Nothing here chooses kernels or copies caches.

Shape letters: T tokens that decode, H query heads, L latent columns, R rotated columns.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import flashtile
from flashtile.integrations.shared import cache_factors, not_served
from flashtile.integrations.vllm import EIGHT_BITS, MLA_NAME, ServedByFlashtile


class FlashtileMLABackend(ServedByFlashtile, MLACommonBackend):
    """The answers to what vLLM asks before it chooses flashtile."""

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[FlashtileMLAImpl]:
        return FlashtileMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashtileMLAMetadataBuilder]:
        return FlashtileMLAMetadataBuilder


class FlashtileMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's own, which takes requests with the same few tokens each for decoding. CUDA graphs serve such batches."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True


class FlashtileMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Attention of one layer."""

    can_return_lse_for_decode: bool = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        given = inspect.signature(MLACommonImpl).bind(*arguments, **options).arguments
        if given["attn_type"] != AttentionType.DECODER:
            raise not_served("attn_type", "decoder", given["attn_type"])
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if given[name]:  # vLLM's own prefill of latent attention has none of them
                raise not_served(name, "None", given[name])
        self._invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.supports_quant_query_input = False  # queries stay in 16 bits beside caches in 8

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attends to the latent rows of each request, of which the last belong to the tokens themselves.

        Args:
            q: `[T, H, L + R]`, or both parts by themselves.
            kv_c_and_k_pe_cache: `[pages, page_size, L + R]`.
            attn_metadata: vLLM's, with the requests that decode first.
            layer: has the factor of caches in 8 bits, `_k_scale`.

        Returns:
            out `[T, H, L]` and lse `[T, H]`.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        batch = attn_metadata.decode
        assert batch is not None  # vLLM calls it for batches that decode
        dtype = EIGHT_BITS.get(self.kv_cache_dtype)
        rows = kv_c_and_k_pe_cache if dtype is None else kv_c_and_k_pe_cache.view(dtype)
        keys = rows.unsqueeze(2)
        factors = {} if dtype is None else cache_factors(layer._k_scale, layer._k_scale)
        out, lse = flashtile.attention_with_kv_cache(
            q.unflatten(0, (batch.seq_lens.shape[0], -1)), keys, keys[..., : self.kv_lora_rank],
            cache_lengths=batch.seq_lens, block_table=batch.block_table, scale=self.scale, causal=attn_metadata.causal,
            batch_invariant=self._invariant, return_lse=True, **factors,
        )  # fmt: skip
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


class FlashtileMLAPrefill(MLAPrefillBackend):
    """Attention of prompts, with keys and values of heads."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Each token to those of its prompt's chunk up to itself. All are `[T, H, ...]`; lse is `[H, T]`.

        vLLM passes `out` and `output_scale` to backends that say so.
        """
        batch = self._prefill_metadata
        sizes = (batch.query_start_loc,) * 2 + (batch.max_query_len,) * 2
        found, lse = self._attend(q, k, v, sizes, causal=True)
        return (found, lse) if return_softmax_lse else found

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Each token to a slice of the rows before its chunk."""
        sizes = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        return self._attend(q, k, v, sizes, causal=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sizes: Any, causal: bool) -> tuple[Tensor, Tensor]:
        """`sizes`: where the queries and the keys of each prompt begin, and the longest of both."""
        starts, starts_k, longest, longest_k = sizes
        return flashtile.attention_varlen(
            q, k, v, starts, starts_k, max_seqlen_q=longest, max_seqlen_k=longest_k, causal=causal, scale=self.scale,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT), return_lse=True,
        )  # fmt: skip
