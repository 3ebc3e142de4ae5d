"""State dicts of Hugging Face's transformers to the models here, and back. For each architecture a generator pairs
names of ours with those of theirs, one below the other; `Layout` says what differs beside names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flashtile.models.config import Activation, BertConfig, GPTConfig

Architecture = Literal["gpt2", "gpt_neox", "llama", "bert"]

#: Ends of names that hold no weight: masks, positions and frequencies that older versions stored.
_CONSTANTS = (".attn.bias", ".masked_bias", ".attention.bias", ".inv_freq", ".position_ids")
#: Tensors that are in a state dict for the second time, and what they are a copy of, where embeddings are tied.
_COPIES: dict[str, dict[str, str]] = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "gpt_neox": {"lm_head.weight": "gpt_neox.embed_in.weight"},
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
}
#: How the names of each begin.
_PREFIXES = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "llama": "model.", "bert": "bert."}


class Layout(Enum):
    """How a tensor of theirs lies in memory."""

    SAME = "as ours"
    TRANSPOSED = "[in, out], where a linear layer has [out, in]"
    BY_HEAD = "q, k and v of the first head, then of the second, where ours has q of all heads first"


class _Entry(NamedTuple):
    """`rows` are those of each of theirs, where they are several."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = Layout.SAME
    rows: tuple[int, ...] = ()


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig | BertConfig) -> dict[str, Tensor]:
    """A state dict of Hugging Face transformers, converted for `GPT` or `BertForPreTraining`.

    Args:
        state: state dict of `GPT2LMHeadModel`, `GPTNeoXForCausalLM`, `LlamaForCausalLM` or `BertForPreTraining`.
        config: from `config_from_hugging_face`.

    Returns:
        The tensors under flashtile's names. Tensors that need no conversion share memory with the given ones.

    Raises:
        ValueError: a name is missing, the model has no place for a name, or the config is of another model.
    """
    architecture = next((a for a, prefix in _PREFIXES.items() if any(name.startswith(prefix) for name in state)), "")
    if not architecture:
        raise ValueError(
            f"state: expected names that begin with one of {', '.join(map(repr, _PREFIXES.values()))}, got "
            f"{sorted(state)[:3]}; take the state dict of the model with its head"
        )
    entries = _entries(architecture, config)
    expected = {name for entry in entries for name in entry.theirs}
    missing = sorted(expected - state.keys())
    unknown = sorted(
        name for name in state.keys() - expected - _copies(architecture, config).keys() if not name.endswith(_CONSTANTS)
    )
    if missing or unknown:
        raise ValueError(
            f"state: expected the tensors of {architecture!r} with this config, got none for {missing[:3]}, and no "
            f"place for {unknown[:3]}; take config and state from one model"
        )
    return {entry.ours: _to_ours(entry, [state[name] for name in entry.theirs], config.heads) for entry in entries}


def to_hugging_face(
    state: Mapping[str, Tensor], config: GPTConfig | BertConfig, architecture: Architecture
) -> dict[str, Tensor]:
    """A state dict of `GPT` or `BertForPreTraining`, converted for transformers: undoes `from_hugging_face`.

    Args:
        state: state dict of a model with this config.
        config: configuration of the model.
        architecture: the architecture whose names the result has.

    Raises:
        ValueError: an unknown architecture, or one whose tensors differ from those of this model.
    """
    if architecture not in _ENTRIES:
        raise ValueError(f"architecture: expected one of {', '.join(map(repr, _ENTRIES))}, got {architecture!r}")
    entries = _entries(architecture, config)
    different = sorted({entry.ours for entry in entries} ^ state.keys())
    if different:
        raise ValueError(
            f"architecture: expected one with the tensors of this model, got {architecture!r}, which differs in "
            f"{different[:3]}"
        )
    theirs: dict[str, Tensor] = {}
    for entry in entries:
        theirs |= zip(entry.theirs, _to_theirs(entry, state[entry.ours], config.heads))
    return theirs | {copy: theirs[name] for copy, name in _copies(architecture, config).items()}


def _entries(architecture: str, config: GPTConfig | BertConfig) -> list[_Entry]:
    expected = BertConfig if architecture == "bert" else GPTConfig
    if not isinstance(config, expected):
        raise ValueError(
            f"config: expected a {expected.__name__} for {architecture!r}, got {type(config).__name__}; take config "
            "and state from one model"
        )
    return list(_ENTRIES[architecture](config))


def _to_ours(entry: _Entry, theirs: list[Tensor], heads: int) -> Tensor:
    if entry.layout is Layout.TRANSPOSED:
        return theirs[0].T.contiguous()
    if entry.layout is Layout.BY_HEAD:
        return theirs[0].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return theirs[0] if len(theirs) == 1 else torch.cat(theirs)


def _to_theirs(entry: _Entry, ours: Tensor, heads: int) -> tuple[Tensor, ...]:
    if entry.layout is Layout.TRANSPOSED:
        return (ours.T.contiguous(),)
    if entry.layout is Layout.BY_HEAD:
        return (ours.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),)
    return (ours,) if len(entry.theirs) == 1 else tuple(part.contiguous() for part in ours.split(entry.rows))


def _copies(architecture: str, config: GPTConfig | BertConfig) -> dict[str, str]:
    return _COPIES[architecture] if isinstance(config, BertConfig) or config.tied else {}


def _affine(
    ours: str, *theirs: str, bias: bool = True, layout: Layout = Layout.SAME, rows: tuple[int, ...] = ()
) -> Iterator[_Entry]:
    """Weight and bias of a linear layer or a norm."""
    yield _Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), layout, rows)
    if bias:
        layout = Layout.SAME if layout is Layout.TRANSPOSED else layout
        yield _Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), layout, rows)


def _ends(config: GPTConfig, token: str, norm: str) -> Iterator[_Entry]:
    """Embedding, last norm and head of a decoder."""
    yield _Entry("token.weight", (token,))
    yield from _affine("norm", norm, bias=config.norm == "layer")
    if not config.tied:
        yield _Entry("head.weight", ("lm_head.weight",))


def _gpt2(config: GPTConfig) -> Iterator[_Entry]:
    yield from _ends(config, "transformer.wte.weight", "transformer.ln_f")
    yield _Entry("position.weight", ("transformer.wpe.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _affine(f"{ours}.norm1", f"{theirs}.ln_1")
        yield from _affine(f"{ours}.mixer.Wqkv", f"{theirs}.attn.c_attn", layout=Layout.TRANSPOSED)
        yield from _affine(f"{ours}.mixer.out_proj", f"{theirs}.attn.c_proj", layout=Layout.TRANSPOSED)
        yield from _affine(f"{ours}.norm2", f"{theirs}.ln_2")
        yield from _affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc", layout=Layout.TRANSPOSED)
        yield from _affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj", layout=Layout.TRANSPOSED)


def _gpt_neox(config: GPTConfig) -> Iterator[_Entry]:
    yield from _ends(config, "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm")
    bias = config.attention_bias
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"gpt_neox.layers.{layer}"
        yield from _affine(f"{ours}.norm1", f"{theirs}.input_layernorm")
        yield from _affine(
            f"{ours}.mixer.Wqkv", f"{theirs}.attention.query_key_value", bias=bias, layout=Layout.BY_HEAD
        )
        yield from _affine(f"{ours}.mixer.out_proj", f"{theirs}.attention.dense", bias=bias)
        yield from _affine(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
        yield from _affine(f"{ours}.mlp.fc1", f"{theirs}.mlp.dense_h_to_4h")
        yield from _affine(f"{ours}.mlp.fc2", f"{theirs}.mlp.dense_4h_to_h")


def _llama(config: GPTConfig) -> Iterator[_Entry]:
    yield from _ends(config, "model.embed_tokens.weight", "model.norm")
    rows_kv = (config.heads if config.heads_kv is None else config.heads_kv) * config.head_dim
    hidden = 4 * config.width if config.hidden is None else config.hidden
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield from _affine(f"{ours}.norm1", f"{theirs}.input_layernorm", bias=False)
        yield from _affine(
            f"{ours}.mixer.Wqkv", *(f"{attention}.{part}_proj" for part in "qkv"),
            bias=config.attention_bias, rows=(config.width, rows_kv, rows_kv),
        )  # fmt: skip
        yield from _affine(f"{ours}.mixer.out_proj", f"{attention}.o_proj", bias=config.attention_bias)
        yield from _affine(f"{ours}.norm2", f"{theirs}.post_attention_layernorm", bias=False)
        yield from _affine(
            f"{ours}.mlp.fc1", f"{mlp}.up_proj", f"{mlp}.gate_proj", bias=config.mlp_bias, rows=(hidden, hidden)
        )
        yield from _affine(f"{ours}.mlp.fc2", f"{mlp}.down_proj", bias=config.mlp_bias)


def _bert(config: BertConfig) -> Iterator[_Entry]:
    for ours, theirs in (("token", "word"), ("position", "position"), ("segment", "token_type")):
        yield _Entry(f"bert.{ours}.weight", (f"bert.embeddings.{theirs}_embeddings.weight",))
    yield from _affine("bert.norm", "bert.embeddings.LayerNorm")
    yield from _affine("bert.pooler", "bert.pooler.dense")
    yield from _affine("transform", "cls.predictions.transform.dense")
    yield from _affine("norm", "cls.predictions.transform.LayerNorm")
    yield _Entry("bias", ("cls.predictions.bias",))
    yield from _affine("next_sentence", "cls.seq_relationship")
    for layer in range(config.layers):
        ours, theirs = f"bert.blocks.{layer}", f"bert.encoder.layer.{layer}"
        yield from _affine(
            f"{ours}.mixer.Wqkv", *(f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")),
            rows=(config.width,) * 3,
        )  # fmt: skip
        yield from _affine(f"{ours}.mixer.out_proj", f"{theirs}.attention.output.dense")
        yield from _affine(f"{ours}.norm1", f"{theirs}.attention.output.LayerNorm")
        yield from _affine(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense")
        yield from _affine(f"{ours}.mlp.fc2", f"{theirs}.output.dense")
        yield from _affine(f"{ours}.norm2", f"{theirs}.output.LayerNorm")


_ENTRIES: dict[str, Callable[[Any], Iterator[_Entry]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "bert": _bert,
}


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
