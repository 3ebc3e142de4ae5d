"""Models of transformers over sequences that are cut over ranks: their attention, masks and positions exchanged."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from flashtile.distributed import context_parallel_attention
from flashtile.distributed.context_parallel import Strategy
from flashtile.distributed.layout import LayoutKind
from flashtile.distributed.places import mesh_places
from flashtile.distributed.sharding import kept_positions
from flashtile.integrations.shared import check_options, widened
from flashtile.integrations.transformers import compact
from flashtile.integrations.transformers.attention import refuse, visible_keys
from flashtile.integrations.transformers.masks import pattern_within_sequences
from flashtile.integrations.transformers.registration import add_implementation

#: Arguments that a call may not bring, and what to do instead.
_REFUSED = {
    "attention_mask": "leave it out; pad at the end, where causal tokens before do not look, and ignore those labels",
    "position_ids": "leave them out: they are made of the mesh and the layout",
    "past_key_values": "generate with a model of its own, without shards",
    "labels": "models shift them and take means within a shard: cut shifted labels with shard_sequence, and compute "
    "the loss from the logits with mean_over_shards",
}
#: Rotary embeddings whose frequencies depend on the longest position, which each rank would see for its shard alone.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_names = map("flashtile-context-parallel-{}".format, itertools.count())


def context_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, *, strategy: Strategy = "ring", layout: LayoutKind = "zigzag",
    backend: str = "auto", deterministic: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Makes a model of transformers take shards of sequences: its layers attend over the tokens of all ranks.

    The model gets an attention implementation of its own, and its calls get the positions of the shard's tokens.
    Parameters and state-dict keys stay the same. Pass it the shards of tokens that `shard_sequence` cuts, without a
    mask or labels, and compute the loss from its logits with `mean_over_shards`. The gradients of parameters are this
    rank's parts, which FSDP or DDP sums. Causal, bidirectional and sliding-window attention, soft cap, sinks, grouped
    heads and dropout are supported. No other part of the model may combine different tokens, as convolutions do.

    Args:
        model: a model whose attention can be exchanged, and whose forward takes `position_ids`.
        mesh, strategy, layout: as in `flashtile.distributed.context_parallel_attention`.
        backend, deterministic: the same.

    Returns:
        The model.

    Raises:
        TypeError: model is no such model.
        ValueError: the model takes shards already, or has frequencies that depend on the sequence length. In later
            calls: an argument cannot be computed from shards.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        raise TypeError(
            f"model: expected one with one sequence, whose forward takes position_ids, got {type(model).__name__}; "
            "call context_parallel_attention in its attention"
        )
    if getattr(model, "_flashtile_shards", False):
        raise ValueError("model: expected one that takes whole sequences, got one that takes shards already")
    check_frequencies(model.config)
    check_options(backend, deterministic)
    options = {
        "mesh": mesh, "strategy": strategy, "layout": layout, "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    name = next(_names)
    add_implementation(name, functools.partial(_attend, options), _make_mask)
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(functools.partial(_prepare, mesh, layout), with_kwargs=True, prepend=True)
    model._flashtile_shards = True  # type: ignore[assignment]
    return model


def check_frequencies(config: Any) -> None:
    """Raises if the rotary frequencies of a model depend on the longest position of a call."""
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _ROPE_BY_LENGTH:
            raise ValueError(f"model: expected rotary embeddings of fixed frequencies, got rope_type {kind!r}")


def _rope_types(parameters: Any) -> list[str]:
    """The types of all layers, if layers differ."""
    if not isinstance(parameters, dict):
        return []
    kinds = [kind for entry in parameters.values() for kind in _rope_types(entry)]
    return [*kinds, parameters["rope_type"]] if "rope_type" in parameters else kinds


def _prepare(
    mesh: DeviceMesh, layout: LayoutKind, model: PreTrainedModel, arguments: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of the model, checked, with the positions of the shard's tokens."""
    bound = inspect.signature(model.forward).bind_partial(*arguments, **given).arguments
    given = {**{k: v for k, v in bound.items() if k not in ("kwargs", "args")}, **bound.get("kwargs", {})}
    for name, remedy in _REFUSED.items():
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: expected None with shards of sequences, got a {type(given[name]).__name__}; {remedy}"
            )
    if given.get("use_cache"):
        raise ValueError(f"use_cache: expected False with shards of sequences, got True; {_REFUSED['past_key_values']}")
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise ValueError("input_ids: expected tokens, or inputs_embeds, got neither")
    if tokens.shape[1] < 2:
        raise ValueError("input_ids: expected at least 2 tokens on each rank, got fewer; take fewer ranks")
    longest = getattr(model.config, "max_position_embeddings", None)
    ranks = mesh_places(mesh).ranks
    length = tokens.shape[1] * ranks
    if longest is not None and length > longest and getattr(model.config, "rope_parameters", None) is None:
        raise ValueError(
            f"input_ids: expected at most {longest} tokens in a row (max_position_embeddings), got {length} in the "
            f"shards of all {ranks} ranks"
        )
    given["position_ids"] = kept_positions(length, mesh, layout, tokens.device).expand(tokens.shape[0], -1)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    return (), given


def _make_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None, device: torch.device | str = "cpu", **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The result of transformers' mask functions for shards: the band of the whole sequence that is visible. Positions
    jump where chunks meet, and so look like packed sequences to transformers, but are none."""
    band = None if torch.compiler.is_compiling() else pattern_within_sequences(mask_function)
    if band is None or attention_mask is not None or q_length != kv_length:
        raise ValueError(
            "attention_mask: expected a causal or full pattern with shards of sequences, with or without a sliding "
            "window, of as many keys as queries, and no torch.compile, got another; take another attention there"
        )
    return compact.all_keys(band, kv_length, device)


def _attend(
    shards: dict[str, Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    output_attentions: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer over the tokens of all ranks: arguments and results as of `attention.attend`."""
    refuse(output_attentions, kwargs)
    for name in ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: expected None with shards of sequences, got a {type(kwargs[name]).__name__}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key: expected the {query.shape[2]} tokens of the queries with shards of sequences, got {key.shape[2]}; "
            "use no cache"
        )
    if attention_mask is not None and compact.decode(attention_mask) is None:
        raise ValueError("attention_mask: expected None with shards of sequences, got one of queries × keys")
    visible = visible_keys(module, attention_mask, query.shape[2], key.shape[2], is_causal, sliding_window)
    out = context_parallel_attention(
        *(t.transpose(1, 2) for t in (query, key, value)), **shards, causal=visible.causal, window=visible.window,
        scale=scaling, softcap=softcap, sinks=None if s_aux is None else widened(s_aux, query),
        dropout_p=float(dropout), reduce_gradients=False,
    )  # fmt: skip
    return out, None
