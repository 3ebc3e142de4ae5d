"""Tiny random models of transformers, with inputs, and what is compared of them: logits, loss and gradients.

Nothing is downloaded. Each model is built three times with the same weights: with flashtile in float32, with
transformers' eager attention in float32, and with that in float64, the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flashtile.testing import Size, assert_close, size

transformers = pytest.importorskip("transformers", minversion="5.0")

VOCABULARY, SEQ = 97, 13


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    """For all tests of a module that takes this name: transformers knows flashtile's attention."""
    from flashtile.integrations.transformers import register, unregister

    transformers.logging.set_verbosity_error()
    register()
    yield
    unregister()


def decoder(**more: Any) -> dict[str, Any]:
    """Sizes of a decoder: 4 query heads, which share 2 of keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **sizes, **heads, **more}


def bart_sizes() -> dict[str, Any]:
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))}  # fmt: skip
    return {"d_model": 32, "vocab_size": VOCABULARY, "dropout": 0.0, **sizes}


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Tiny:
    """A model: its classes' names, its configuration, and the kind of its inputs."""

    config: str
    auto: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kind: str = "text"

    def make_config(self) -> Any:
        return getattr(transformers, self.config)(**self.arguments)


LANGUAGE = {
    "gpt2": Tiny("GPT2Config", "AutoModelForCausalLM", {
        "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "eos_token_id": 2}),
    "llama": Tiny("LlamaConfig", "AutoModelForCausalLM", decoder()),
    "mistral": Tiny("MistralConfig", "AutoModelForCausalLM", decoder(sliding_window=5)),
    "gemma2": Tiny("Gemma2Config", "AutoModelForCausalLM", decoder(
        sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)),
    "gemma3": Tiny("Gemma3TextConfig", "AutoModelForCausalLM", decoder(
        sliding_window=5, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"])),
    "gpt-oss": Tiny("GptOssConfig", "AutoModelForCausalLM", decoder(
        sliding_window=5, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": Tiny("Qwen2Config", "AutoModelForCausalLM", decoder(
        use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"])),
    "qwen3": Tiny("Qwen3Config", "AutoModelForCausalLM", decoder()),
    "gpt-neox": Tiny("GPTNeoXConfig", "AutoModelForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 64, "hidden_dropout": 0.0}),
    # Heads of 192 columns, those of the values of 128.
    "deepseek-v3": Tiny("DeepseekV3Config", "AutoModelForCausalLM", {
        **decoder(num_key_value_heads=4, head_dim=64), "moe_intermediate_size": 16, "n_shared_experts": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 1}),
    # Heads of 256 columns in windows, and of 512; the last layers take the keys of those before.
    "gemma4": Tiny("Gemma4TextConfig", "AutoModelForCausalLM", decoder(
        sliding_window=5, head_dim=256, global_head_dim=512, hidden_size_per_layer_input=8, num_hidden_layers=4,
        vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2)),
    "llama4": Tiny("Llama4TextConfig", "AutoModelForCausalLM", decoder(
        attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48, pad_token_id=0)),
}  # fmt: skip
OTHERS = {
    "bert": Tiny("BertConfig", "AutoModelForMaskedLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "modernbert": Tiny("ModernBertConfig", "AutoModelForMaskedLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "local_attention": 6, "global_attn_every_n_layers": 2, **TOKENS,
        "cls_token_id": 1, "sep_token_id": 2}),
    "t5": Tiny("T5Config", "AutoModelForSeq2SeqLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"}, "text to text"),
    "bart": Tiny("BartConfig", "AutoModelForSeq2SeqLM", {**bart_sizes(), "max_position_embeddings": 64},
                 "text to text"),
    "whisper": Tiny("WhisperConfig", "AutoModelForSpeechSeq2Seq", {
        **bart_sizes(), **TOKENS, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}, "speech"),
    "vit": Tiny("ViTConfig", "AutoModelForImageClassification", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 12, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "image"),
}  # fmt: skip
ALL = {**LANGUAGE, **OTHERS}
#: Models whose own code reads the masks, beside attention.
READERS = {
    "bigbird-pegasus": Tiny("BigBirdPegasusConfig", "AutoModelForSeq2SeqLM", {
        **bart_sizes(), "max_position_embeddings": 64, "attention_type": "original_full"}, "text to text"),
    "nllb-moe": Tiny("NllbMoeConfig", "AutoModelForSeq2SeqLM", {
        **bart_sizes(), "max_position_embeddings": 64, "num_experts": 4, "encoder_sparse_step": 1,
        "decoder_sparse_step": 1, "expert_capacity": 64}, "text to text"),
    # Layers of every kind; each 2 or 4 tokens give a key more.
    "deepseek-v4": Tiny("DeepseekV4Config", "AutoModelForCausalLM", {
        **decoder(num_key_value_heads=1, sliding_window=5, num_hidden_layers=3), "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}),
    "doge": Tiny("DogeConfig", "AutoModelForCausalLM", decoder()),
    "lasr": Tiny("LasrCTCConfig", "AutoModelForCTC", {
        "vocab_size": VOCABULARY, "encoder_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
            "num_mel_bins": 16, "subsampling_conv_channels": 16, "dropout": 0.0, "attention_dropout": 0.0,
            "activation_dropout": 0.0, "layerdrop": 0.0, "conv_kernel_size": 4}}, "heard text"),
}  # fmt: skip

#: A model whose layers say is_causal=False themselves where there is a mask.
MOONSHINE = Tiny("MoonshineConfig", "AutoModelForSpeechSeq2Seq", {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4, "pad_head_dim_to_multiple_of": None, **TOKENS,
    "decoder_start_token_id": 1}, "waveform")  # fmt: skip


class Float64(TorchFunctionMode):
    """Where a model casts to float32, for a norm or a softmax, it casts to float64: the oracle is one throughout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def build(tiny: Tiny, attention: str, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> Any:
    """A model with random weights, the same for a seed, large enough that attention is far from even."""
    settings = tiny.make_config()
    for name, value in config.items():
        setattr(settings, name, value)
    model = getattr(transformers, tiny.auto).from_config(
        settings, attn_implementation=attention, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                std = 1.0 if "sinks" in name or "relative" in name else 0.2
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.to(dtype).eval()


def make_inputs(tiny: Tiny, padding: str = "none") -> dict[str, Tensor]:
    """Inputs with labels; the first of two sequences is padded by 4 on the `padding` side."""
    generator = torch.Generator().manual_seed(3)
    if tiny.kind == "image":
        pixels = torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, VOCABULARY, (2, SEQ), generator=generator)
    if tiny.kind == "heard text":
        features = torch.randn(2, 80, 16, generator=generator, dtype=torch.float64)
        heard = torch.arange(80) < torch.tensor([[80], [80 if padding == "none" else 48]])
        return {"input_features": features, "attention_mask": heard, "labels": tokens[:, :4].clone()}
    if tiny.kind == "waveform":
        waves = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
        heard = (torch.arange(3000) < torch.tensor([[3000], [3000 if padding == "none" else 2000]])).long()
        return {"input_values": waves, "attention_mask": heard, "labels": tokens[:, :7].clone()}
    if tiny.kind == "speech":
        features = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
        return {"input_features": features, "labels": tokens[:, :7].clone()}
    mask = torch.ones_like(tokens)
    if padding != "none":
        mask[0, slice(0, 4) if padding == "left" else slice(SEQ - 4, SEQ)] = 0
    if tiny.kind == "text to text":
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.flip(1)[:, :7].clone()}
    # What a row of padding predicts means nothing, also where the next token is real.
    real = mask * torch.nn.functional.pad(mask, (1, -1))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(real == 0, -100)}


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of real tokens, loss and gradients."""
    dtype = next(model.parameters()).dtype
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            inputs = {**inputs, name: value.to(dtype)}
    out = model(**inputs)
    model.zero_grad()
    out.loss.backward()
    logits = out.logits.detach()
    if "attention_mask" in inputs and logits.shape[:2] == inputs["attention_mask"].shape:
        logits = logits[inputs["attention_mask"].bool()]
    grads = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "loss": out.loss.detach(), **grads}


def run_in_float64(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    with Float64():
        return run(copy.deepcopy(model).double(), inputs)


def check(
    tiny: Tiny,
    inputs: dict[str, Any],
    change: Callable[[Any], None] = lambda model: None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    attention: str = "flashtile",
) -> None:
    """Asserts logits, loss and gradients with flashtile by the tolerance policy. The oracle runs on the CPU."""
    ours, eager = build(tiny, attention, dtype), build(tiny, "eager", dtype)
    assert ours.config._attn_implementation == attention
    change(ours)
    change(eager)
    oracle = run_in_float64(eager, inputs)
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    actual, expected = run(ours.to(device), inputs), run(eager.to(device), inputs)
    assert actual.keys() == expected.keys() and "loss" in actual
    largest = max(size(value).typical for name, value in oracle.items() if name.startswith("d "))
    for name, value in actual.items():
        # The gradient of a bias of keys is 0: what each query adds cancels.
        lost = Size(largest, largest) if name.startswith("d ") else Size()
        assert_close(name, value.cpu(), oracle[name], expected[name].cpu(), lost)
