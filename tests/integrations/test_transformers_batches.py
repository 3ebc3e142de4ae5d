"""Continuous batching of transformers: requests of different lengths, token for token those of eager attention."""

import functools
from typing import Any

import pytest
import torch

import flashtile
from support.models.transformers_cases import LANGUAGE, build, registered, transformers  # noqa: F401

if transformers.__version__.startswith(("5.17.", "5.18.", "5.19.")):
    pytest.skip("transformers before 5.20 batches requests in another way", allow_module_level=True)

PROMPTS = [list(range(3, 3 + length)) for length in (5, 23, 1, 17, 9)]


def batched(name: str, attention: str, blocks: int = 0, device: str = "cpu", **more: Any) -> list[list[int]]:
    """The tokens that follow each prompt. Chunks of 16 tokens cut prompts; 3 requests at a time are in a batch."""
    model = build(LANGUAGE[name], attention).to(device)
    generation = transformers.GenerationConfig(max_new_tokens=14, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(**{
        "page_size": 16, "num_blocks": 12, "max_batch_tokens": 16, "max_requests_per_batch": 3,
        "max_blocks_per_request": blocks, "auto_switch_to_flash": False, **more,
    })  # fmt: skip
    found = model.generate_batch(
        PROMPTS, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    assert model.config._attn_implementation == attention
    assert not any(request.error for request in found.values())
    return [found[request].generated_tokens for request in sorted(found, key=lambda name: int(name.split("_")[1]))]


@functools.cache
def one_by_one(name: str, device: str = "cpu") -> list[list[int]]:
    """The same by eager attention, whose own form for batches leaves out soft caps."""
    model, found = build(LANGUAGE[name], "eager").to(device), []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt], device=device)
        out = model.generate(tokens, max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture
def calls(monkeypatch):
    """Names of flashtile's functions as they are called; transformers computes in a thread of its own."""
    found: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            found.append(name)
            return function(*arguments, **options)

        return call

    for name in ("attention_varlen", "attention_with_kv_cache"):
        monkeypatch.setattr(flashtile, name, watched(name, getattr(flashtile, name)))
    return found


# Full attention; a window in all layers; in some, with sinks; in some, with a soft cap.
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt-oss", "gemma2"])
def test_requests_are_those_of_eager(name, calls):
    assert batched(name, "flashtile") == one_by_one(name)
    assert set(calls) == {"attention_varlen"}


@pytest.mark.parametrize("name, attention", [("llama", "paged|eager"), ("mistral", "sdpa")])
def test_requests_are_those_of_transformers_own_batches(name, attention):
    assert batched(name, "flashtile", 4) == batched(name, attention)


@pytest.mark.parametrize("padded, blocks, page", [(False, 4, 16), (True, 4, 8), (False, None, 8), (True, None, 16)])
def test_steps_of_decoding_read_pages(padded, blocks, page, calls, monkeypatch):
    if padded:  # as for CUDA graphs: three requests fill up to four
        runner = transformers.generation.continuous_batching.model_runner.ModelRunner
        monkeypatch.setattr(runner, "pad_inputs", property(lambda self: True, lambda self, pads: None), raising=False)
    found = batched("llama", "flashtile", blocks, max_requests_per_batch=4, page_size=page)
    assert found == one_by_one("llama")
    assert set(calls) == {"attention_varlen", "attention_with_kv_cache"}


def test_any_registered_name_is_batched():
    from flashtile.integrations.transformers import register, unregister

    register("tiles", backend="reference")
    assert batched("llama", "tiles", 4) == one_by_one("llama")
    unregister("tiles")


def test_what_is_not_batched_is_refused():
    from flashtile.integrations.transformers.attention import attend
    from flashtile.integrations.transformers.paged import attend_paged, no_mask

    model = build(LANGUAGE["llama"], "flashtile")
    layer, x = model.model.layers[0].self_attn, torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="cache: expected that of continuous batching"):
        attend_paged(layer, x, x, x, None)
    with pytest.raises(ValueError, match=r"cache: not served by .*generate_batch"):
        attend(layer, x, x, x, None, cache=object())
    for other in (transformers.masking_utils.bidirectional_mask_function, lambda b, h, q, k: k >= 0):
        with pytest.raises(ValueError, match="attention_mask: expected causal attention"):
            no_mask(mask_function=other)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_requests_on_a_gpu(name, graphs):
    actual = batched(name, "flashtile", 4, device="cuda", use_cuda_graph=graphs)
    assert actual == one_by_one(name, "cuda")
