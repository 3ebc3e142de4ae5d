"""Continuous batching: `model.generate_batch` packs requests into one row and keeps their keys in a paged cache.

A batch is packed (transformers writes the new keys and gathers all keys of each request), or in a step that decodes one
token for each request it has a block table (the new keys are still to be written, and pages are read where they lie). A
model has another implementation meanwhile, which makes no masks: lengths say what a request sees.

Shape letters: R requests, H query heads, G key/value heads, Q and K queries and keys of all requests, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.generation.continuous_batching import continuous_api, initialization

import flashtile
from flashtile.integrations.shared import token_window, widened
from flashtile.integrations.transformers.attention import refuse
from flashtile.integrations.transformers.masks import pattern_within_sequences

#: Prefix of an implementation's name while a model's requests are batched. It has "flash" in it, because transformers
#: makes no masks for such names.
PREFIX = "flashtile-paged|"

#: The places where transformers chooses the implementation, and whether steps of decoding read pages.
_SWITCHES, _DECIDES = "switch_to_cb_friendly_attn", "ensure_decode_fast_path_is_available"

#: Arguments that transformers hands to attention for its cache and the rest of the model.
_OF_BATCH = ("cu_seq_lens_k", "max_length_k", "block_table", "read_index", "write_index", "k_cache", "v_cache")


def attend_paged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, cache: Any = None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None,
    output_attentions: bool | None = None, deterministic: bool | None = None, backend: str = "auto", **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer in a batch of requests.

    Args:
        query: `[1, H, Q, D]`.
        key, value: `[1, G, Q, D]`, the new ones; from transformers 5.24 on, packed, `[1, G, K, D]`, all.
        cache: the `PagedAttentionCache`, to which the new rows are written; None from 5.24 on, where the model has done
            so.
        cu_seq_lens_q: `[R + 1]`.
        kwargs: among them what `cache.update` reads and completes.

    Returns:
        (out `[1, Q, H, D]`, None: there are no weights).
    """
    packing = {name: kwargs.pop(name, None) for name in _OF_BATCH}
    refuse(output_attentions, kwargs)
    others = attention_mask is not None or position_bias is not None
    if cu_seq_lens_q is None or packing["write_index"] is None or others:
        raise ValueError(
            "cache: expected that of continuous batching with its lengths, without attention_mask and position_bias; "
            "call the model after its manager has stopped, or generate one batch with model.generate"
        )
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=packing)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "causal": bool(causal),
        "window": token_window(sliding_window, bool(causal)),
        "sinks": None if s_aux is None else widened(s_aux, query),
        "backend": backend,
    }
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))  # [Q or K, heads, D]
    lengths = packing["cu_seq_lens_k"]
    if packing["block_table"] is None:
        out: Tensor = flashtile.attention_varlen(
            q, k, v, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=lengths, max_seqlen_q=max_length_q,
            max_seqlen_k=packing["max_length_k"], dropout_p=float(dropout), deterministic=bool(deterministic),
            **options,
        )  # fmt: skip
        return out.unsqueeze(0), None
    k_pages, v_pages, block_table = _pages(module, packing)
    # Requests that only fill up a batch of fixed size have no keys and no pages: their rows go to page 0, which
    # transformers keeps free for that.
    out = flashtile.attention_with_kv_cache(
        q.unsqueeze(1), k_pages, v_pages, k.unsqueeze(1), v.unsqueeze(1),
        cache_lengths=(lengths.diff() - 1).clamp(min=0), block_table=block_table, **options,
    )  # fmt: skip
    return out.squeeze(1).unsqueeze(0), None


def _pages(module: Any, packing: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one layer, `[blocks, page, G, D]`, and the blocks of each request, `[R, blocks]`. transformers
    gives all pages of its memory from the first one on, of which only some belong to the layer."""
    kinds = initialization.group_layers_by_attn_type(module.config).values()
    step = 2 * next(len(layers) for layers in kinds if module.layer_idx in layers)
    table: Tensor = packing["block_table"].clamp(min=0) // step
    return packing["k_cache"][::step], packing["v_cache"][::step], table


def no_mask(*arguments: Any, mask_function: Callable[..., Any], **options: Any) -> None:
    """The mask of a batch of requests: None. ValueError unless it is causal, with or without a window."""
    band = pattern_within_sequences(mask_function)
    if band is None or not band.causal:
        raise ValueError(
            "attention_mask: expected causal attention, with or without a sliding window, in continuous batching, got "
            "another pattern; generate with model.generate"
        )


def serve_batches(names: Collection[str]) -> None:
    """Has transformers batch the requests of models whose implementation has a second name, with the prefix, in names.
    Its own rule goes by "flash" in the name."""
    manager = continuous_api.ContinuousBatchingManager
    switch, decide = getattr(manager, _SWITCHES), getattr(initialization, _DECIDES)
    if getattr(switch, "knows_flashtile", False):
        return

    @wraps(switch)
    def switched(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        name = model.config._attn_implementation
        if PREFIX + str(name) not in names:
            switch(self, model, *arguments, **options)
            return
        model.set_attn_implementation(PREFIX + name)
        self._original_attn_impl = name

    @wraps(decide)
    def decided(config: Any, cb_config: Any, user_requested: bool) -> None:
        if not str(config._attn_implementation).startswith(PREFIX):
            decide(config, cb_config, user_requested)
            return
        kinds = initialization.group_layers_by_attn_type(config)
        if not all(initialization.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
            cb_config.max_blocks_per_request = 0

    switched.knows_flashtile = True  # type: ignore[attr-defined]
    setattr(manager, _SWITCHES, switched)
    setattr(initialization, _DECIDES, decided)
