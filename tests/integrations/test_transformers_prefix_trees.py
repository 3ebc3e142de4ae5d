"""Models of transformers over prefix trees: losses and gradients of the sequences one by one."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.integrations.transformers import prefix_tree_inputs
from flashtile.prefix_trees import PrefixTree
from flashtile.testing import Size, assert_close, assert_same, size
from support.models import transformers_cases
from support.models.transformers_cases import (
    ALL,
    LANGUAGE,
    READERS,
    VOCABULARY,
    Float64,
    build,
    decoder,
    transformers,
)
from support.running.each_case import each_case

registered = transformers_cases.registered


def make_tree() -> PrefixTree:
    """Two prompts with completions that are longer than the models' windows, and one that is empty."""
    generator = torch.Generator().manual_seed(0)
    prompt, other, *completions = (torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (9, 2, 7, 0, 4, 8))
    return PrefixTree.from_completions([(prompt, completions[:3]), (other, completions[3:])])


def results(model: Any, log_probs: list[Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.rand(each.shape, generator=generator, dtype=torch.float64) for each in log_probs]
    loss = torch.stack([(weight.to(each.dtype) * each).sum() for weight, each in zip(weights, log_probs)]).sum()
    model.zero_grad()
    loss.backward()
    grads = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"log_probs": torch.cat(log_probs).detach(), **grads}


def one_by_one(model: Any, tree: PrefixTree) -> dict[str, Tensor]:
    log_probs = []
    for tokens in tree.unpack(tree.tokens):
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        each = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        log_probs.append(torch.cat((each.new_zeros(1), each)))
    return results(model, log_probs)


# Not gpt-oss in bfloat16: whether two experts change places may hang on the last bit.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("mistral", torch.float32),
        ("gpt2", torch.float32),
        ("gemma3", torch.float32),
        ("gemma4", torch.float32),
        ("gpt-oss", torch.float32),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_single_sequences(name, dtype):
    tree, model = make_tree(), build(LANGUAGE[name], "flashtile", dtype)
    logits = model(**prefix_tree_inputs(model, tree)).logits
    actual = results(model, tree.unpack(tree.log_probs(logits)))
    eager = build(LANGUAGE[name], "eager", dtype)
    with Float64():
        oracle = one_by_one(copy.deepcopy(eager).double(), tree)
    expected = one_by_one(eager, tree)
    largest = max(size(value).typical for key, value in oracle.items() if key.startswith("d "))
    assert actual.keys() == oracle.keys()
    for key, value in actual.items():
        assert_close(key, value, oracle[key], expected[key], Size(largest, largest) if key[:2] == "d " else Size())


def test_the_logits_need_not_be_in_memory():
    tree, model = make_tree(), build(LANGUAGE["llama"], "flashtile")
    inputs = prefix_tree_inputs(model, tree)
    hidden = model.model(**inputs).last_hidden_state
    assert_same(tree.linear_log_probs(hidden, model.lm_head.weight), tree.log_probs(model(**inputs).logits))


@each_case("tiny, attention, error, message", [
        (ALL["llama"], "eager", ValueError, "expected attn_implementation='flashtile' with a prefix tree, got 'eager'"),
        (ALL["t5"], "flashtile", TypeError, "expected a causal model that takes position_ids, got T5"),
        (READERS["doge"], "flashtile", ValueError, r"expected full or sliding attention .*got \['doge'\]"),
        (ALL["llama4"], "flashtile", ValueError, "expected full or sliding attention .*'chunked_attention'"),
        (replace(ALL["llama"], arguments=decoder(rope_parameters={"rope_type": "dynamic", "factor": 2.0,
                                                                  "rope_theta": 10000.0})),
         "flashtile", ValueError, "expected rotary embeddings of fixed frequencies"),
    ])  # fmt: skip
def test_models_that_cannot_take_trees_are_named(tiny, attention, error, message):
    with pytest.raises(error, match=message):
        prefix_tree_inputs(build(tiny, attention), make_tree())


def test_a_tree_and_its_mask_belong_together():
    model = build(ALL["mistral"], "flashtile")
    inputs = prefix_tree_inputs(model, make_tree())
    for name in ("prefix_tree", "attention_mask"):
        with pytest.raises(ValueError, match="prefix_tree: expected a tree of these tokens together with its mask"):
            model(**{**inputs, name: None})
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["flashtile"]
    tokens = inputs["input_ids"].shape[1]
    q, k = torch.zeros(1, 4, tokens, 8), torch.zeros(1, 2, tokens, 8)
    mask, tree = inputs["attention_mask"], inputs["prefix_tree"]
    with pytest.raises(ValueError, match="pass the sliding_window of the config, 5, got MistralAttention with None"):
        function(model.model.layers[0].self_attn, q, k, k, mask, prefix_tree=tree)
    with pytest.raises(TypeError, match="tree: expected a PrefixTree, got list"):
        prefix_tree_inputs(model, [[1]])  # type: ignore[arg-type]
