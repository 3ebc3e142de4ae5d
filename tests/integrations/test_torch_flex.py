"""`use_flashtile_flex`: whose attention runs inside and outside, and that all comes back as it was."""

import __future__

import functools

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import flex_attention

import flashtile
from flashtile.integrations import use_flashtile_flex
from flashtile.testing import assert_same

PYTORCHS = flex_attention.__code__
_DEFAULTS = flex_attention.__defaults__, flex_attention.__kwdefaults__


@pytest.fixture(autouse=True)
def pytorchs_own_afterwards():
    yield
    assert torch_flex.flex_attention is flex_attention
    assert flex_attention.__code__ is PYTORCHS


def halved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 0.5 * score


def test_holds_inside_nests_and_is_undone():
    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    with use_flashtile_flex():
        out = torch_flex.flex_attention(query, query, query, halved)
        assert_same(out, flashtile.flex_attention(query, query, query, halved))
        with use_flashtile_flex(backend="hopper"), pytest.raises(ValueError, match="'hopper' cannot serve"):
            torch_flex.flex_attention(query, query, query)
        torch_flex.flex_attention(query, query, query).sum().backward()  # PyTorch's has no backward on a CPU
    assert flex_attention.__code__ is PYTORCHS
    with pytest.raises(ValueError, match="backend"), use_flashtile_flex(backend="fast"):
        pass
    with pytest.raises(ValueError, match="kernel_options"), use_flashtile_flex():
        torch_flex.flex_attention(query, query, query, kernel_options={"BLOCK_M": 16})


def test_reaches_a_name_that_was_imported_before_and_what_was_compiled():
    query = torch.randn(1, 2, 5, 8)
    compiled = [
        torch.compile(flex_attention, fullgraph=True, backend="eager"),
        torch.compile(lambda *qkv: flex_attention(*qkv, scale=2.0), fullgraph=True, backend="eager"),
    ]
    expected = [function(query, query, query) for function in compiled]
    learned = query.clone().requires_grad_()  # PyTorch's function has no backward on a CPU
    with use_flashtile_flex():
        for function, result in zip([flex_attention, *compiled], [expected[0], *expected]):
            out = function(learned, learned, learned)
            assert_same(out, result)
            out.sum().backward()
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(learned, learned, learned)
    assert torch.equal(compiled[0](query, query, query), expected[0])


def test_parameters_are_those_of_pytorch():
    """`torch.compile` remembers the parameters of a function, whose code is another one in a context."""
    with use_flashtile_flex():
        code = flex_attention.__code__
        assert code is not PYTORCHS
        assert (flex_attention.__defaults__, flex_attention.__kwdefaults__) == _DEFAULTS
    count = code.co_argcount + code.co_kwonlyargcount
    assert code.co_varnames[:count] == PYTORCHS.co_varnames[:count]
    # Whether annotations are read late has nothing to do with parameters, and differs between versions of PyTorch.
    flags, pytorchs = (each & ~__future__.annotations.compiler_flag for each in (code.co_flags, PYTORCHS.co_flags))
    assert (code.co_argcount, flags) == (PYTORCHS.co_argcount, pytorchs)


@pytest.mark.slow
def test_models_of_transformers_run_on_it(monkeypatch):
    """They compile the function; here that stops short of generating C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
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
