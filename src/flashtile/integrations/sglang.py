"""An attention backend of SGLang: `--attention-backend flashtile`.

SGLang finds `register` by the entry point `sglang.srt.plugins`. The new keys and values of a layer are written by
SGLang's own pool. Attention of a batch is then one call of `flashtile.attention_with_kv_cache` on the pool's pages.

This module needs SGLang, which loads it. Nothing here chooses kernels or copies caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.server_args import add_attention_backend_choices
from torch import Tensor

import flashtile
from flashtile.integrations.shared import cache_factors, not_served, token_window, widened

NAME = "flashtile"

_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DECODE, ForwardMode.IDLE)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def register() -> None:
    """Makes the backend known to SGLang by its name, also for deterministic inference. It may be called again."""
    if NAME not in ATTENTION_BACKENDS:
        add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(FlashtileBackend)


@dataclass
class FlashtileMetadata:
    """A batch, for all layers.

    Attributes:
        lengths: int32 `[requests]`, tokens of each with those of this batch.
        pages: int32 `[requests, max pages]`.
        window_pages: the same in the pool of layers with a sliding window, where that is another one.
        window_slots: `[tokens]`, where that pool keeps the tokens of this batch.
        starts: int32 `[requests + 1]`, where the queries of each request begin; None for one query each.
        longest: queries of a request at most.
        hidden: int32 `[requests]`, first tokens of each that are not visible.
        chunks: the batch for layers with attention in chunks, if it has several queries of a request: each part of a
            request that lies in one chunk is a request there.
    """

    lengths: Tensor
    pages: Tensor
    window_pages: Tensor | None
    window_slots: Tensor | None
    starts: Tensor | None = None
    longest: int | None = None
    hidden: Tensor | None = None
    chunks: FlashtileMetadata | None = None


class FlashtileBackend(AttentionBackend):
    """Attention of all layers of a model whose cache has keys and values of heads, or latent rows.

    Args:
        model_runner: SGLang's, with the pools that the batches are in.

    Raises:
        NotImplementedError: for encoder-decoder models, speculative decoding, context parallelism, and caches of other
            layouts or in 4 bits.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        for name, found in (
            ("an encoder-decoder model", model_runner.model_config.is_encoder_decoder),
            ("speculative decoding", model_runner.spec_algorithm.is_speculative()),
            ("context parallelism", get_parallel().attn_cp_size > 1 or get_parallel().attn_dcp_size > 1),
        ):
            if found:
                raise not_served("model_runner", "a decoder with a cache of keys and values", name)
        self._pool = model_runner.token_to_kv_pool
        _check_pool(self._pool)
        self._invariant: bool = get_exec().deterministic.enable_deterministic_inference
        self._latent = isinstance(self._pool, MLATokenToKVPool)
        self._window_pool = self._pool if isinstance(self._pool, SWAKVPool) else None
        self._page_size: int = model_runner.page_size
        self._slots: Tensor = model_runner.req_to_token_pool.req_to_token
        self._chunk: int | None = model_runner.attention_chunk_size
        if self._invariant and self._pool.dtype in _EIGHT_BITS:
            raise not_served("token_to_kv_pool.dtype", "16 bits or more in deterministic inference", self._pool.dtype)
        if self._invariant and self._chunk is not None:
            raise not_served("model_runner", "no attention in chunks in deterministic inference", "a model with it")
        self._graphs: FlashtileMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of a batch without a CUDA graph. Nothing here waits for the GPU."""
        mode = forward_batch.forward_mode
        if mode not in _MODES:
            raise not_served("forward_mode", "EXTEND, MIXED, SPLIT_PREFILL, DECODE or IDLE", mode.name)
        for name in ("spec_info", "multi_item_delimiter_indices"):
            if getattr(forward_batch, name) is not None:
                raise not_served(f"forward_batch.{name}", "None", "a value")
        if mode.is_idle():
            return
        batch = self._metadata(forward_batch)
        if not mode.is_decode():
            new = forward_batch.extend_seq_lens
            batch.starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            if forward_batch.extend_seq_lens_cpu is not None:
                batch.longest = int(max(forward_batch.extend_seq_lens_cpu))
            if self._chunk is not None:
                batch.chunks = self._cut(batch, forward_batch, self._chunk)
        self.forward_metadata = batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """All that a CUDA graph reads stays where it is, so a graph serves any batch of its size."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._slots.device)

        shape = max_bs, -(-self._slots.shape[1] // self._page_size)
        self._graphs = FlashtileMetadata(zeros(max_bs), zeros(*shape), None, None)
        if self._window_pool is not None:
            self._graphs.window_pages, self._graphs.window_slots = zeros(*shape), zeros(max_num_tokens).long()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Makes the metadata of a batch that a CUDA graph computes, or will."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise not_served("forward_mode", "DECODE in a CUDA graph", forward_batch.forward_mode.name)
        kept, found = self._graphs, self._metadata(forward_batch, whole_width=True)
        if kept is None:
            raise RuntimeError("init_cuda_graph_state: expected a call before the first CUDA graph; call it")
        if kept.window_slots is not None:
            kept.window_slots.zero_()  # requests that only fill up the batch write to slot 0, which is nobody's
        self.forward_metadata = FlashtileMetadata(
            _written(kept.lengths, found.lengths), _written(kept.pages, found.pages),
            None if found.window_pages is None else _written(kept.window_pages, found.window_pages),
            None if found.window_slots is None else _written(kept.window_slots, found.window_slots),
        )  # fmt: skip

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Writes the new keys and values to SGLang's pool, and attends to all keys of each request.

        Args:
            q: `[tokens, heads · head_dim]`, or with heads and columns apart.
            k, v: `[tokens, kv_heads, head_dim]`; None for a layer that reads the keys of another one.
            layer: a `RadixAttention`, with the sizes, the scale, the window and the factors of caches in 8 bits.
            save_kv_cache: whether k and v are not in the pool yet.
            **options: `sinks`, `[heads]`; others raise unless they are None or False.

        Returns:
            `[tokens, heads · v_head_dim]`.
        """
        sinks = options.pop("sinks", None)
        self._check_layer(layer, options)
        batch: Any = self.forward_metadata
        if self._latent and layer.v_head_dim != self._pool.kv_lora_rank:
            return self._prompt_attention(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            slots = KVWriteLoc.for_batch(forward_batch, swa_loc=batch.window_slots)
            if self._latent:  # this pool takes no factors
                self._pool.set_kv_buffer(layer, slots, k if layer.k_scale is None else k / layer.k_scale, v)
            else:
                self._pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        keys, values = (rows.unflatten(0, (-1, self._page_size)) for rows in self._pool.get_kv_buffer(layer.layer_id))
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        extras: dict[str, Any] = {"batch_invariant": self._invariant}
        if keys.dtype in _EIGHT_BITS:
            extras |= cache_factors(layer.k_scale, layer.k_scale if self._latent else layer.v_scale)
        if sinks is not None:
            extras["sinks"] = widened(sinks, q)
        if layer.use_irope and self._chunk is not None:
            batch = batch if batch.chunks is None else batch.chunks
            extras["cache_left_padding"] = _hidden(batch.lengths, self._chunk) if batch.hidden is None else batch.hidden
        if batch.starts is None:
            q = q.unsqueeze(1)
        else:
            extras |= {"cu_seqlens_q": batch.starts, "max_seqlen_q": batch.longest}
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        before = layer.sliding_window_size  # tokens before the token itself
        in_window_pool = self._window_pool is not None and self._window_pool.layers_mapping[layer.layer_id][1]
        out = flashtile.attention_with_kv_cache(
            q, keys, values, cache_lengths=batch.lengths,
            block_table=batch.window_pages if in_window_pool else batch.pages, scale=layer.scaling, causal=causal,
            window=token_window(before + 1 if before > -1 else None, causal), softcap=layer.logit_cap or None, **extras,
        )  # fmt: skip
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def _prompt_attention(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> Tensor:
        """Latent attention of whole prompts, for which SGLang computes keys and values of heads."""
        batch: Any = self.forward_metadata
        before = forward_batch.extend_prefix_lens_cpu
        if save_kv_cache or k is None or v is None or batch.starts is None or before is None or any(before):
            raise not_served(
                "layer.v_head_dim", f"{self._pool.kv_lora_rank}, the latent columns, except for whole prompts",
                f"{layer.v_head_dim} for others",
            )  # fmt: skip
        q, k = (rows.reshape(-1, heads, layer.qk_head_dim)
                for rows, heads in ((q, layer.tp_q_head_num), (k, layer.tp_k_head_num)))  # fmt: skip
        out = flashtile.attention_varlen(
            q, k, v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim), batch.starts, max_seqlen_q=batch.longest,
            max_seqlen_k=batch.longest, causal=True, scale=layer.scaling, softcap=layer.logit_cap or None,
            batch_invariant=self._invariant,
        )  # fmt: skip
        return out.flatten(1)

    def _metadata(self, forward_batch: Any, whole_width: bool = False) -> FlashtileMetadata:
        """Lengths and pages of the requests, up to the longest one if that is known on the host."""
        width = self._slots.shape[1]
        if not whole_width and forward_batch.seq_lens_cpu is not None:
            width = int(forward_batch.seq_lens_cpu.max())
        requests = forward_batch.req_pool_indices
        slots = self._slots[:, : width : self._page_size].index_select(0, requests)
        window_pages = window_slots = None
        if self._window_pool is not None:
            # Tokens that left the window have no slot any more. Nothing reads those.
            window_pages = self._window_pool.translate_loc_from_full_to_swa(slots).clamp(min=0).int() // self._page_size
            window_slots = self._window_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        return FlashtileMetadata(forward_batch.seq_lens.int(), slots // self._page_size, window_pages, window_slots)

    def _cut(self, batch: FlashtileMetadata, forward_batch: Any, chunk: int) -> FlashtileMetadata:
        """The batch with its requests cut where chunks of so many tokens begin."""
        counts, ends = forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu
        if counts is None or ends is None:
            raise not_served("seq_lens_cpu", "the lengths on the host beside attention in chunks", None)
        parts = []
        for request, (count, end) in enumerate(zip(counts, ends.tolist())):
            first = end - count
            while first < end:
                stop = min(first // chunk * chunk + chunk, end)
                parts.append((request, stop - first, stop))
                first = stop
        numbers, queries, stops = (
            torch.tensor(parts, dtype=torch.int32, device=batch.lengths.device).view(-1, 3).unbind(1)
        )
        window_pages = None if batch.window_pages is None else batch.window_pages.index_select(0, numbers)
        starts = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
        longest = max((part[1] for part in parts), default=0)
        return FlashtileMetadata(
            stops.contiguous(), batch.pages.index_select(0, numbers), window_pages, None, starts, longest,
            _hidden(stops, chunk),
        )  # fmt: skip

    def _check_layer(self, layer: Any, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if value is not None and value is not False:
                raise not_served(name, "None", type(value).__name__)
        for name, expected, got, served in (
            ("is_cross_attention", "False", layer.is_cross_attention, not layer.is_cross_attention),
            ("attn_type", "DECODER or ENCODER_ONLY", layer.attn_type,
             layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)),
            ("pos_encoding_mode", "NONE", layer.pos_encoding_mode, layer.pos_encoding_mode == "NONE"),
            ("logit_capping_method", "tanh", layer.logit_capping_method, layer.logit_capping_method == "tanh"),
            ("xai_temperature_len", "none", layer.xai_temperature_len, layer.xai_temperature_len <= 0),
        ):  # fmt: skip
            if not served:
                raise not_served(f"layer.{name}", expected, got)


def _check_pool(pool: Any) -> None:
    """Refuses all pools but those of keys and values, or latent rows, by tokens, whose numbers stand for themselves up
    to a factor."""
    if type(pool) is MLATokenToKVPool and not pool.use_dsa:
        return
    parts = {SWAKVPool: ("full_kv_pool", "swa_kv_pool"), HybridLinearKVPool: ("full_kv_pool",)}.get(type(pool))
    for part in [pool] if parts is None else [getattr(pool, name) for name in parts]:
        if type(part) is not MHATokenToKVPool:
            raise not_served("token_to_kv_pool", "MHATokenToKVPool or MLATokenToKVPool", type(part).__name__)
        if part.is_quantized_kv_cache or part.kv_cache_layout != "nhd":
            layout = "a quantised cache" if part.is_quantized_kv_cache else part.kv_cache_layout
            raise not_served("token_to_kv_pool", "the layout nhd in 8 or more bits", layout)


def _hidden(lengths: Tensor, chunk: int) -> Tensor:
    """The tokens before the chunk of each request's last token."""
    return (lengths - 1).clamp(min=0) // chunk * chunk


def _written(buffer: Any, new: Tensor) -> Tensor:
    found: Tensor = buffer[: new.shape[0]].copy_(new)
    return found
