"""`use_flashtile_flex`: whose attention runs inside and outside, and that all comes back as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flashtile
from flashtile.integrations import use_flashtile_flex
from flashtile.testing import assert_same

PYTORCHS = torch_flex.flex_attention


@pytest.fixture(autouse=True)
def pytorchs_own_afterwards() -> Iterator[None]:
    yield
    assert torch_flex.flex_attention is PYTORCHS


def halved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 0.5 * score


def test_holds_inside_nests_and_is_undone() -> None:
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with use_flashtile_flex():
        out = torch_flex.flex_attention(query, query, query, halved)
        assert_same(out, flashtile.flex_attention(query, query, query, halved))
        with use_flashtile_flex(backend="hopper"), pytest.raises(ValueError, match="'hopper' cannot serve"):
            torch_flex.flex_attention(query, query, query)
        torch_flex.flex_attention(query, query, query).sum().backward()  # PyTorch's has no backward on a CPU
    assert torch_flex.flex_attention is PYTORCHS
    with pytest.raises(ValueError, match="backend"), use_flashtile_flex(backend="fast"):
        pass
    with pytest.raises(ValueError, match="kernel_options"), use_flashtile_flex():
        torch_flex.flex_attention(query, query, query, kernel_options={"BLOCK_M": 16})


def test_models_of_transformers_run_on_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(3, 37, (2, 20))
    padding = torch.ones_like(tokens)
    padding[0, 15:] = 0
    expected = model(tokens, attention_mask=padding).logits
    model.set_attn_implementation("flex_attention")
    with use_flashtile_flex():
        found = model(tokens, attention_mask=padding).logits
        found.sum().backward()
    seen = padding.bool()
    assert_same(found[seen], expected[seen])
