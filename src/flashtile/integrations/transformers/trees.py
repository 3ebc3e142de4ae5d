"""Prefix trees as inputs of models of transformers: many sequences in one row, shared prefixes once."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from flashtile.integrations.transformers import compact
from flashtile.integrations.transformers.context_parallel import check_frequencies
from flashtile.integrations.transformers.masks import READERS
from flashtile.integrations.transformers.registration import is_registered
from flashtile.prefix_trees import PrefixTree

_FULL, _SLIDING = "full_attention", "sliding_attention"


def prefix_tree_inputs(model: nn.Module, tree: PrefixTree) -> dict[str, Any]:
    """The arguments of a call of a causal language model, whose logits `[1, T, V]` are those of a tree's tokens.

    ::

        logits = model(**prefix_tree_inputs(model, tree)).logits
        log_probs = tree.unpack(tree.log_probs(logits))

    Sliding windows count positions in each sequence. The tree's masks are made here, which waits for a GPU once.

    Args:
        model: a causal model of transformers with `attn_implementation="flashtile"`, also within PEFT.
        tree: the sequences, on the device of the model.

    Raises:
        TypeError: tree is none, or the model takes no positions.
        ValueError: the model has another attention implementation, or layers that combine tokens in other ways.
    """
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"tree: expected a PrefixTree, got {type(tree).__name__}; create it with from_completions")
    base: Any = model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    if "position_ids" not in inspect.signature(base.forward).parameters or base.config.is_encoder_decoder:
        raise TypeError(f"model: expected a causal model that takes position_ids, got {type(base).__name__}")
    config = base.config.get_text_config()
    name = config._attn_implementation
    if not is_registered(name):
        raise ValueError(
            f"model: expected attn_implementation='flashtile' with a prefix tree, got {name!r}; "
            "call model.set_attn_implementation('flashtile')"
        )
    others = set(getattr(config, "layer_types", None) or ()) - {_FULL, _SLIDING}
    if getattr(config, "attention_chunk_size", None) is not None:
        others.add("chunked_attention")
    if getattr(base, "_is_stateful", False) or config.model_type in READERS:
        others.add(config.model_type)
    if others:
        raise ValueError(
            f"model: expected full or sliding attention in all layers with a prefix tree, got {sorted(others)}; pad "
            "the sequences instead"
        )
    check_frequencies(config)
    for left in _lefts(config):
        tree.block_mask(left)
    return {
        "input_ids": tree.tokens[None],
        "position_ids": tree.positions[None],
        "attention_mask": compact.tree_keys(tree.tokens.shape[0], tree.device),
        "prefix_tree": tree,
        "use_cache": False,
    }


def _lefts(config: Any) -> set[int | None]:
    """The windows of a model's layers."""
    window: int | None = getattr(config, "sliding_window", None)
    if window is None:
        return {None}
    kinds = getattr(config, "layer_types", None) or [_SLIDING]
    return {window - 1 if kind == _SLIDING else None for kind in kinds}
