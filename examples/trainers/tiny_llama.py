"""A tiny Llama on flashtile's attention and a tokenizer of letters, made on the spot: nothing is downloaded."""

from __future__ import annotations

import string
from typing import Any

import tokenizers
import transformers

from flashtile.integrations.transformers import register

LETTERS = string.ascii_lowercase + " .="
SPECIAL = ["<pad>", "<s>", "</s>"]


def make_tokenizer() -> Any:
    """One token for each letter."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def make_model(attention: str = "flashtile", seed: int = 0) -> Any:
    """A Llama of two layers, whose attention is flashtile's."""
    register()
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(LETTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def make_batch(texts: list[str]) -> dict[str, Any]:
    """Tokens, padded on the left, with labels: -100 for padding, and for the first token after it."""
    batch = make_tokenizer()(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 1:].masked_fill_(batch["attention_mask"][:, :-1] == 0, -100)
    return {**batch, "labels": labels}


TEXTS = ["the query sees the keys.", "softmax of tiles", "a = b.", "attention is a sum of values."]
