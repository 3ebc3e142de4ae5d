"""Configurations of Hugging Face's transformers as those of the models here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashtile.models.config import Activation, BertConfig, GPTConfig

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

#: Sizes here, and their names in most configurations.
_SIZES = {
    "context": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocabulary": "vocab_size",
    "hidden": "intermediate_size",
    "initial_std": "initializer_range",
}


def config_from_hugging_face(config: Any) -> GPTConfig | BertConfig:
    """The `GPTConfig` or `BertConfig` of a Hugging Face model.

    Args:
        config: configuration of GPT-2, GPT-NeoX, Llama or BERT: an object of transformers, or its `to_dict()`.

    Raises:
        TypeError: config is neither of these.
        ValueError: another architecture, an option that the models here do not have, or a missing option.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(f"config: expected a configuration of transformers or a dict, got {type(config).__name__}")
    given = dict(config if isinstance(config, Mapping) else config.to_dict())
    architecture = given.get("model_type")
    if architecture not in _CONFIGS:
        raise ValueError(f"config: expected model_type {', '.join(map(repr, _CONFIGS))}, got {architecture!r}")
    try:
        return _CONFIGS[architecture](given)
    except KeyError as option:
        raise ValueError(
            f"config: expected a value of {option}, got none; pass the object itself, or its to_dict()"
        ) from None


def _gpt2_config(given: dict[str, Any]) -> GPTConfig:
    _expect(given, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GPTConfig(
        context=given["n_positions"],
        layers=given["n_layer"],
        heads=given["n_head"],
        width=given["n_embd"],
        vocabulary=given["vocab_size"],
        hidden=given["n_inner"],
        norm_eps=given["layer_norm_epsilon"],
        activation=_activation(given["activation_function"]),
        tied=given["tie_word_embeddings"],
        embedding_dropout=given["embd_pdrop"],
        attention_dropout=given["attn_pdrop"],
        residual_dropout=given["resid_pdrop"],
        initial_std=given["initializer_range"],
    )


def _sizes(given: dict[str, Any]) -> dict[str, Any]:
    return {ours: given[theirs] for ours, theirs in _SIZES.items()}


def _gpt_neox_config(given: dict[str, Any]) -> GPTConfig:
    rotary = _rotary(given)
    head_dim = given["hidden_size"] // given["num_attention_heads"]
    return GPTConfig(
        **_sizes(given),
        positions="rotary",
        rotary_dim=int(head_dim * rotary.get("partial_rotary_factor", 1.0)),
        rotary_base=rotary["rope_theta"],
        norm_eps=given["layer_norm_eps"],
        activation=_activation(given["hidden_act"]),
        attention_bias=given["attention_bias"],
        parallel=given["use_parallel_residual"],
        tied=given["tie_word_embeddings"],
        embedding_dropout=given["hidden_dropout"],
        attention_dropout=given["attention_dropout"],
        residual_dropout=given["hidden_dropout"],
    )


def _llama_config(given: dict[str, Any]) -> GPTConfig:
    _expect(given, hidden_act="silu", head_dim=given["hidden_size"] // given["num_attention_heads"])
    return GPTConfig(
        **_sizes(given),
        heads_kv=given["num_key_value_heads"],
        positions="rotary",
        rotary_base=_rotary(given)["rope_theta"],
        norm="rms",
        norm_eps=given["rms_norm_eps"],
        activation="swiglu",
        attention_bias=given["attention_bias"],
        mlp_bias=given["mlp_bias"],
        tied=given["tie_word_embeddings"],
        attention_dropout=given["attention_dropout"],
    )


def _bert_config(given: dict[str, Any]) -> BertConfig:
    _expect(given, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    _expect(given, tie_word_embeddings=True)
    return BertConfig(
        **_sizes(given),
        segments=given["type_vocab_size"],
        activation=_activation(given["hidden_act"]),
        norm_eps=given["layer_norm_eps"],
        dropout=given["hidden_dropout_prob"],
        attention_dropout=given["attention_probs_dropout_prob"],
    )


_CONFIGS: dict[str, Callable[[dict[str, Any]], GPTConfig | BertConfig]] = {
    "gpt2": _gpt2_config,
    "gpt_neox": _gpt_neox_config,
    "llama": _llama_config,
    "bert": _bert_config,
}


def _rotary(given: dict[str, Any]) -> dict[str, Any]:
    """Base and share of the rotation, which older versions of transformers had outside of `rope_parameters`."""
    _expect(given, rope_scaling=None)
    rotary = given.get("rope_parameters") or {
        "rope_theta": given.get("rope_theta", given.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": given.get("rotary_pct", 1.0),
    }
    _expect(rotary, rope_type="default")
    return rotary


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ValueError(f"config: expected an activation of {', '.join(map(repr, _ACTIVATIONS))}, got {name!r}")
    return _ACTIVATIONS[name]


def _expect(given: Mapping[str, Any], **options: Any) -> None:
    """Options that the models here have in one way only; where they are left out, they are so."""
    for name, expected in options.items():
        if given.get(name, expected) not in (expected, None):
            raise ValueError(
                f"config: expected {name} {expected!r}, got {given[name]!r}; the models here have no other"
            )
