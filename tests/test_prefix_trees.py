"""Prefix trees: what they hold, and that losses and gradients are those of the sequences one by one."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashtile.models import GPT, GPTConfig, plain_attention
from flashtile.modules import MHA
from flashtile.prefix_trees import PrefixTree
from flashtile.testing import Size, assert_close, assert_same, size
from support.running.each_case import each_case

GPT2 = GPTConfig(context=40, layers=2, heads=2, width=32, vocabulary=61)
LLAMA = replace(
    GPT2, heads=4, heads_kv=2, positions="rotary", norm="rms", activation="swiglu", attention_bias=False,
    mlp_bias=False, tied=False,
)  # fmt: skip


def drawn(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


def two_groups(**where: Any) -> PrefixTree:
    """Prompts with several completions, one of them empty, and more tokens than the context of the models."""
    prompt, other, *completions = drawn(11, 3, 7, 0, 12, 2, 9)
    return PrefixTree.from_completions([(prompt, completions[:3]), (other, completions[3:])], **where)


def deep(**where: Any) -> PrefixTree:
    a, b, c, d = drawn(5, 4, 6, 3)
    return PrefixTree.from_sequences([a + b + c, a + d, a + b, a + b + d, c], **where)


# --- what trees hold ------------------------------------------------------------------------------------------------


def test_completions():
    tree = PrefixTree.from_completions([([5, 6], [[7, 8], [], torch.tensor([9])]), (torch.tensor([1]), [[2]])])
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert tree.segments.tolist() == [0, 0, 1, 1, 3, 4, 5]
    assert [sequence.tolist() for sequence in tree.unpack(tree.tokens)] == [[5, 6, 7, 8], [5, 6], [5, 6, 9], [1, 2]]
    assert tree.lengths == [4, 2, 3, 2] and len(tree) == 4
    assert repr(tree) == "PrefixTree(4 sequences, 11 tokens, packed 7)"


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7))
def test_sequences_share_all_they_have_in_common(sequences):
    tree = PrefixTree.from_sequences(sequences)
    assert [sequence.tolist() for sequence in tree.unpack(tree.tokens)] == sequences
    prefixes = {tuple(each[: length + 1]) for each in sequences for length in range(len(each))}
    assert tree.tokens.shape[0] == len(prefixes)


@each_case("make", [two_groups, deep])
def test_masks_count_positions(make):
    tree = make()
    visible = tree.block_mask().to_dense()[0, 0]
    assert_same(visible.sum(-1), tree.positions + 1)
    near = tree.block_mask(left=2).to_dense()[0, 0]
    assert_same(near, visible & (tree.positions[:, None] - tree.positions <= 2))
    assert tree.block_mask(left=2) is tree.block_mask(left=2)


def test_segments_and_ends_of_ones_own():
    tree = PrefixTree([[1, 2], [3], [4]], [-1, 0, 0], ends=[0, 2, 2])
    assert [sequence.tolist() for sequence in tree.unpack(tree.tokens)] == [[1, 2], [1, 2, 4], [1, 2, 4]]
    assert PrefixTree([[1, 2], [3], [4]], [-1, 0, 0]).lengths == [3, 3]


@each_case("make", [two_groups, deep])
def test_log_probs_are_those_of_the_row_before(make):
    tree = make()
    logits = torch.randn(tree.tokens.shape[0], 61, dtype=torch.float64)
    rows = tree.unpack(torch.arange(tree.tokens.shape[0]))
    for each, path in zip(tree.unpack(tree.log_probs(logits[None], logit_scale=0.5)), rows):
        expected = (logits[path[:-1]] / 2).log_softmax(-1).gather(1, tree.tokens[path[1:], None])[:, 0]
        assert_same(each, torch.cat((logits.new_zeros(1), expected)))


@each_case(
    "arguments, error, message",
    [
        (([["a"]], [-1]), TypeError, r"segments\[0\]: expected a tensor or a list of ints"),
        (([torch.ones(2)], [-1]), ValueError, r"segments\[0\]: expected int64 \[length\], got torch.float32"),
        (([[1]], [0]), ValueError, "parents: expected segments before segment 0"),
        (([[1]], [-1, 0]), ValueError, "parents: expected one for each"),
        (([[1]], [-1], [1]), ValueError, "ends: expected numbers from 0 to 0"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    segments, parents, *ends = arguments
    with pytest.raises(error, match=message):
        PrefixTree(segments, parents, ends=ends[0] if ends else None)


def test_values_of_other_shapes_are_refused():
    tree = deep()
    with pytest.raises(ValueError, match="logits: expected"):
        tree.log_probs(torch.zeros(2, tree.tokens.shape[0], 61))
    with pytest.raises(ValueError, match="values: expected"):
        tree.unpack(torch.zeros(3))
    with pytest.raises(ValueError, match="left: expected at least 0, got -1"):
        tree.block_mask(left=-1)
    with pytest.raises(TypeError, match="left: expected an int or None"):
        tree.block_mask(left=1.5)  # type: ignore[arg-type]


# --- models ---------------------------------------------------------------------------------------------------------


def weighted(log_probs: list[Tensor]) -> Tensor:
    """A loss that weighs every token of every sequence otherwise."""
    generator = torch.Generator().manual_seed(5)
    weights = [torch.rand(each.shape, generator=generator, dtype=torch.float64) for each in log_probs]
    return -torch.stack([(weight.to(each) * each).sum() for weight, each in zip(weights, log_probs)]).sum()


def of_model(model: GPT, loss: Tensor, log_probs: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"log_probs": torch.cat(log_probs).detach(), **grads}


def one_by_one(model: GPT, tree: PrefixTree) -> dict[str, Tensor]:
    log_probs = []
    for tokens in tree.unpack(tree.tokens):
        logits = model(tokens[None])[0, :-1].to(torch.promote_types(torch.float32, model.token.weight.dtype))
        each = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        log_probs.append(torch.cat((each.new_zeros(1), each)))
    return of_model(model, weighted(log_probs), log_probs)


def make_model(config: GPTConfig, dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # so that attention is far from even
    return model.to(dtype)


def over_tree(model: GPT, tree: PrefixTree) -> list[Tensor]:
    hidden = model.hidden(tree.tokens[None], position_ids=tree.positions[None], block_mask=tree.block_mask())
    return tree.unpack(tree.linear_log_probs(hidden, model.output_weight))


def check(config: GPTConfig, make: Callable[..., PrefixTree], dtype: torch.dtype, device: str = "cpu") -> None:
    model = make_model(config, dtype)
    eager, oracle = one_by_one(model, make()), one_by_one(copy.deepcopy(model).double(), make())
    log_probs = over_tree(model.to(device), make(device=device))
    actual = of_model(model, weighted(log_probs), log_probs)
    largest = max(size(value).typical for name, value in oracle.items() if name != "log_probs")
    for name, value in actual.items():
        # The gradient of a bias of keys is 0: what each query adds cancels.
        lost = Size() if name == "log_probs" else Size(largest, largest)
        assert_close(name, value.cpu(), oracle[name], eager[name], lost)


MODELS = pytest.mark.parametrize(("config", "make"), [(GPT2, two_groups), (LLAMA, deep)], ids=["gpt2", "llama"])


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients_are_those_of_single_sequences(config, make, dtype):
    check(config, make, dtype)


@pytest.mark.gpu
@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients_on_a_gpu(config, make, dtype):
    check(config, make, dtype, "cuda")


def test_one_graph_serves_all_trees():
    model, graphs = make_model(replace(LLAMA, layers=1), torch.float32), CompileCounterWithBackend("eager")
    compiled = torch.compile(model.hidden, fullgraph=True, backend=graphs, dynamic=True)
    model(torch.zeros(1, 40, dtype=torch.int64))  # makes rotary tables that are long enough
    for lengths in ((2, 11, 5), (7, 3)):
        tree = PrefixTree.from_completions([(drawn(12)[0], drawn(*lengths))])
        arguments = {"position_ids": tree.positions[None], "block_mask": tree.block_mask()}
        expected = model.hidden(tree.tokens[None], **arguments)
        assert_same(compiled(tree.tokens[None], **arguments), expected)
    assert graphs.frame_count == 1


def test_what_trees_exclude_in_models_is_named():
    tree = deep()
    arguments = {"position_ids": tree.positions[None], "block_mask": tree.block_mask()}
    for config, attention, message in (
        (replace(GPT2, window=4), None, "position_ids: expected None with a window"),
        (GPT2, plain_attention, "position_ids, block_mask: expected None with _Exchanged as attention"),
    ):
        with pytest.raises(ValueError, match=message):
            GPT(config, attention)(tree.tokens[None], **arguments)
    model = GPT(GPT2)
    with pytest.raises(ValueError, match="expected None except for dense self-attention without a cache"):
        model(tree.tokens[None], model.new_cache(1, 40), **arguments)
    with pytest.raises(ValueError, match="position_ids: expected"):
        MHA(32, 4, causal=True, rotary_emb_dim=8)(torch.zeros(1, 2, 32), position_ids=torch.arange(3)[None])
