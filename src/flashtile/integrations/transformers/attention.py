"""The attention function of `attn_implementation="flashtile"`. Shape letters: B batch, H query heads, G key/value
heads, Q queries, K keys, D head_dim, V head_dim of the values."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flashtile
from flashtile import BlockMask
from flashtile.integrations.shared import token_window, widened
from flashtile.integrations.transformers import compact
from flashtile.integrations.transformers.compact import CompactMask
from flashtile.ops.common.sizes import exporting
from flashtile.prefix_trees import PrefixTree

#: Arguments that some models pass to attention, that change what it computes, and that are not served.
_REFUSED = {
    "cache": "a paged cache; let model.generate_batch or its manager call the model",
    "indices": "keys chosen by an indexer; use attn_implementation='eager', or 'sdpa' where the model has it",
    "block_indices": "blocks chosen by an indexer; use attn_implementation='eager', or 'sdpa' where the model has it",
    "sinks": "a sink for each query; use attn_implementation='eager'",
    "prefix_tree": "a tree of sequences; pad them, or leave out shards and batches of requests",
    "head_mask": "weights for heads; use attn_implementation='eager'",
}

_TREE_WITHOUT_MASK = (
    "prefix_tree: expected a tree of these tokens together with its mask, got one of them; pass all of "
    "prefix_tree_inputs to a model that hands its keyword arguments on to attention"
)

#: Up to so many queries are a step of generation.
_FEW_QUERIES = 16


class Visible(NamedTuple):
    """The keys in use that queries see."""

    keys: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    ends: Tensor | None = None
    block_mask: BlockMask | None = None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, prefix_tree: PrefixTree | None = None, output_attentions: bool | None = None,
    deterministic: bool | None = None, backend: str = "auto", **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer, with the arguments of transformers' attention functions.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, G, K, D]`.
        value: `[B, G, K, V]`.
        attention_mask: of `masks.make_mask`; or bool or floating point `[B, 1 | H, Q | 1, K]`, which then holds
            everything, causality too; or `[B, K]`, not 0 where a key is no padding.
        position_bias: `[1 | B, H, Q, K]`, added to the scores, with a gradient.
        s_aux: `[H]`, sinks.
        prefix_tree: the tree whose tokens these are; `prefix_tree_inputs` makes its mask.

    Returns:
        (out `[B, Q, H, V]`, None: there are no weights).
    """
    refuse(output_attentions, kwargs)
    block_mask = _tree_mask(module, prefix_tree, attention_mask, query, key, sliding_window)
    if block_mask is None:
        visible = visible_keys(module, attention_mask, query.shape[2], key.shape[2], is_causal, sliding_window)
    else:
        visible = Visible(key.shape[2], block_mask=block_mask)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "causal": visible.causal,
        "window": visible.window,
        "sinks": None if s_aux is None else widened(s_aux, query),
        "dropout_p": float(dropout),
        "deterministic": bool(deterministic),
        "backend": backend,
    }
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))  # [B, seq, heads, D]
    if position_bias is not None and visible.ends is not None:  # a bias needs the rows of queries × keys
        visible = visible._replace(ends=None, mask=_same_sequence(visible.ends, *query.shape[:2]))
    packed = _packed(visible, query, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if packed is not None:
        if position_bias is not None:
            raise ValueError("position_bias: expected None beside packed sequences, got a Tensor; pad them instead")
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (query, key, value))
        out: Tensor = flashtile.attention_varlen(q, k, v, **packed, **options)
        return out.view(*query.shape[:2], *out.shape[1:]), None
    if visible.keys < key.shape[1]:
        key, value = key[:, : visible.keys], value[:, : visible.keys]
        position_bias = None if position_bias is None else position_bias[..., : visible.keys]
    if query.shape[0] != key.shape[0]:  # queries that a model learns, one set for all
        query = query.expand(key.shape[0], -1, -1, -1)
    bias = _summed(position_bias, visible.bias, query)
    if visible.block_mask is not None:
        options["block_mask"] = visible.block_mask
    elif bias is None and visible.mask is None and _decodes(query, key, value, options):
        for name in ("dropout_p", "deterministic"):
            del options[name]
        return flashtile.attention_with_kv_cache(query, key, value, **options), None
    out = flashtile.attention(query, key, value, mask=visible.mask, bias=bias, **options)
    return out, None


def _decodes(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether a call is a step of generation, for which there are kernels that split the keys.

    Sizes are looked at last: where they are symbols, asking makes them a condition of the graph.
    """
    if exporting() or options["dropout_p"] or options["backend"] == "hopper" or query.is_meta:
        return False
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if recorded or torch.is_autocast_enabled(query.device.type):
        return False
    return query.shape[1] <= _FEW_QUERIES < key.shape[1]


def refuse(output_attentions: bool | None, others: dict[str, Any]) -> None:
    if output_attentions:
        raise ValueError(
            "output_attentions: expected False with attn_implementation='flashtile', which never has the weights in "
            "memory, got True; use attn_implementation='eager' for them"
        )
    for name, meaning in _REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(f"{name}: not served by attn_implementation='flashtile': {meaning}")


def visible_keys(
    module: nn.Module, attention_mask: Tensor | None, seq_q: int, seq_k: int, is_causal: bool | None,
    sliding_window: int | None,
) -> Visible:  # fmt: skip
    """The keys that a mask and the module's own attributes let queries see."""
    if attention_mask is None or attention_mask.dim() == 2:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return _by_module(attention_mask, seq_q, seq_k, bool(causal), sliding_window)
    mask = compact.decode(attention_mask)
    if mask is None:
        # A mask of transformers or of the user, which holds everything.
        if attention_mask.dtype is torch.bool:
            return Visible(seq_k, mask=attention_mask)
        return Visible(seq_k, bias=attention_mask)
    if mask.tree is not None:
        raise ValueError(_TREE_WITHOUT_MASK)
    band = mask.band
    if band.causal and is_causal is False and seq_q > 1 and not _tells_causality(module):
        raise ValueError(
            "is_causal: expected True or None beside a causal mask, which the model has made, got False; set "
            "config.is_causal = False, and its masks look both ways"
        )
    window: tuple[int | None, int | None] | None = None
    if band.windowed:
        width = _mask_window(module, sliding_window, band.causal)
        window = (width - 1, 0) if band.causal else (width, width)
    if mask.ends is not None:
        return Visible(seq_k, band.causal, window, ends=mask.ends)
    keys = _keys_in_use(mask, seq_k)
    # One query at the last key sees everything before it.
    causal = band.causal and bool(seq_q > 1 or window is not None)
    return Visible(keys, causal, window, mask=mask.visible)


def _tree_mask(
    module: Any, tree: PrefixTree | None, attention_mask: Tensor | None, query: Tensor, key: Tensor,
    sliding_window: int | None,
) -> BlockMask | None:  # fmt: skip
    """The keys that the tokens of a tree see in one layer; None if there is none."""
    if tree is None:
        return None
    mask = None if attention_mask is None else compact.decode(attention_mask)
    if mask is None or not mask.tree == query.shape[2] == key.shape[2] == tree.tokens.shape[0] or query.shape[0] != 1:
        raise ValueError(_TREE_WITHOUT_MASK)
    kinds = getattr(module.config, "layer_types", None)
    window = getattr(module.config, "sliding_window", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        window = None
    if window != sliding_window or not getattr(module, "is_causal", True):
        raise ValueError(
            f"prefix_tree: expected causal layers that pass the sliding_window of the config, {window}, got "
            f"{type(module).__name__} with {sliding_window}; pad the sequences instead"
        )
    return tree.block_mask(None if window is None else window - 1)


def _tells_causality(module: nn.Module) -> bool:
    """Whether the code of a layer passes is_causal itself: some say False wherever there is a mask, as that holds
    everything. Otherwise it is the user's word."""
    code = inspect.unwrap(type(module).forward).__code__
    return "is_causal" in code.co_names + code.co_varnames


def _by_module(
    attention_mask: Tensor | None, seq_q: int, seq_k: int, is_causal: bool, sliding_window: int | None
) -> Visible:
    """The meaning of a call without a mask, or with one that only tells padding: the module's attributes decide."""
    if is_causal and 1 < seq_q != seq_k:
        raise ValueError(
            f"attention_mask: expected a mask beside {seq_q} queries and {seq_k} keys of a causal layer, got None or "
            "one of keys only, which do not say where the first query lies; pass is_causal=False, or 4 dimensions"
        )
    window = token_window(sliding_window, is_causal)
    mask = None
    if attention_mask is not None:
        if attention_mask.shape[-1] != seq_k:
            raise ValueError(
                f"attention_mask: expected [batch, keys] for {seq_k} keys, got {list(attention_mask.shape)}; pass "
                "one of 4 dimensions"
            )
        mask = attention_mask.bool()[:, None, None, :]
    return Visible(seq_k, is_causal and bool(seq_q > 1 or window is not None), window, mask)


def _mask_window(module: nn.Module, passed: int | None, causal: bool) -> int:
    """The size of the window by which the mask was made, which is that of the configuration."""
    configured = getattr(getattr(module, "config", None), "sliding_window", None)
    if configured is None and (passed is None or not causal):
        raise ValueError(
            f"sliding_window: expected {type(module).__name__} to pass it or to have it in its config, as its mask has "
            "a window, got None; use attn_implementation='sdpa'"
        )
    if causal and passed is not None and configured is not None and passed != configured:
        raise ValueError(
            f"sliding_window: expected that of the config, {configured}, by which the mask was made, got {passed}; use "
            "attn_implementation='sdpa'"
        )
    width = passed if configured is None else configured
    assert width is not None
    return width


def _keys_in_use(mask: CompactMask, seq_k: int) -> int:
    if mask.visible is None and not (mask.band.causal or mask.band.windowed):
        return seq_k  # it hides nothing, whatever number of keys it was made for
    keys = mask.visible.shape[-1] if mask.visible is not None else mask.keys
    assert keys is not None
    if keys != seq_k and not (mask.band.prefix and keys < seq_k):
        raise ValueError(
            f"attention_mask: expected a mask for the {seq_k} keys of the layer, got one for {keys}; a model that adds "
            "keys of its own needs attn_implementation='sdpa'"
        )
    return keys


def _packed(
    visible: Visible, query: Tensor, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None,
    max_length_q: int | None, max_length_k: int | None,
) -> dict[str, Any] | None:  # fmt: skip
    """The lengths of a packed call, given by the user or found by the mask; None for a dense one."""
    if visible.ends is not None:
        # No sequence is longer than a row of the batch.
        starts = torch.nn.functional.pad(visible.ends, (1, 0))
        return {"cu_seqlens_q": starts, "max_seqlen_q": query.shape[1], "max_seqlen_k": query.shape[1]}
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return None
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: expected both or none, got one; pass the same twice")
    if visible.bias is not None or visible.mask is not None:
        if visible.mask is None or visible.mask.shape[2] > 1:
            return None  # a whole mask holds the sequences too, and eager attention knows nothing else
        raise ValueError(
            "attention_mask, cu_seq_lens_q: expected one of padding and packed sequences, got both; leave the "
            "attention_mask out"
        )
    return {
        "cu_seqlens_q": cu_seq_lens_q,
        "cu_seqlens_k": cu_seq_lens_k,
        "max_seqlen_q": max_length_q if isinstance(max_length_q, int) else None,
        "max_seqlen_k": max_length_k if isinstance(max_length_k, int) else None,
    }


def _same_sequence(ends: Tensor, batch: int, seq: int) -> Tensor:
    """bool `[B, 1, S, S]`: whether two rows lie in one of the packed sequences that end there."""
    row = torch.arange(batch * seq, dtype=ends.dtype, device=ends.device)
    sequence = torch.bucketize(row, ends, right=True).view(batch, 1, seq)
    return sequence[..., None] == sequence[..., None, :]


def _summed(position_bias: Tensor | None, bias: Tensor | None, query: Tensor) -> Tensor | None:
    if position_bias is None or bias is None:
        only = bias if position_bias is None else position_bias
        return None if only is None else widened(only, query)
    return widened(position_bias, query) + widened(bias, query)
