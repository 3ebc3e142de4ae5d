"""The examples with others' trainers run, learn, and have the losses and gradients that those trainers have alone."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.prefix_trees import PrefixTree
from flashtile.testing import assert_close, assert_same
from support.distributed.processes import start
from support.models import transformers_cases
from support.models.torchtitan_cases import train_both

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
registered = transformers_cases.registered

# What these packages say of themselves, and of one another.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]


@pytest.fixture
def example(monkeypatch):
    """A function that imports an example where the packages that it needs are installed."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def imported(name: str, package: str) -> Any:
        pytest.importorskip(package)
        return importlib.import_module(name)

    return imported


@pytest.mark.parametrize("name", ["peft_lora", "accelerate_loop", "lightning_module"])
def test_examples_learn_and_go_on_from_checkpoints(name, example):
    losses = example(name, name.partition("_")[0]).main(24)
    assert len(losses) == 24 and losses[-1] < losses[0] - 0.05


def lora_results(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # 0 at first, which would hide the gradients of the other factor
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "recomputed"])
def test_gradients_of_lora(checkpoints, example):
    module = example("peft_lora", "peft")
    batch = importlib.import_module("tiny_llama").make_batch(["one text.", "another, longer text."])
    model = module.make_lora()
    if checkpoints:
        model.train().gradient_checkpointing_enable()
        model.enable_input_require_grads()
    actual = lora_results(model, batch)
    eager = lora_results(module.make_lora("eager"), batch)
    with transformers_cases.Float64():
        oracle = lora_results(module.make_lora("eager").double(), batch)
    assert len(actual) == 16 and all(value.abs().sum() > 0 for value in actual.values())
    for name, value in actual.items():
        assert_close(name, value, oracle[name], eager[name])


def test_lora_over_prefix_trees(example):
    from flashtile.integrations.transformers import prefix_tree_inputs

    model = example("peft_lora", "peft").make_lora()
    tokens = importlib.import_module("tiny_llama").make_tokenizer()(["a prompt = one", "a prompt = two."])["input_ids"]
    tree = PrefixTree.from_sequences(tokens)
    assert tree.tokens.shape[0] < sum(tree.lengths)
    together = tree.unpack(tree.log_probs(model(**prefix_tree_inputs(model, tree)).logits))
    sum(each.sum() for each in together).backward()
    found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    alone = [PrefixTree.from_sequences([each]) for each in tokens]
    single = [each.log_probs(model(each.tokens[None]).logits) for each in alone]
    sum(each.sum() for each in single).backward()
    assert_same(together, single)
    assert_same(found, [p.grad for p in model.parameters() if p.requires_grad])


def test_grpo_over_prefix_trees_is_grpo(example, tmp_path):
    """Log-probabilities, entropies and gradients, of prompts and completions of different lengths; and it trains."""
    module = example("trl_grpo", "trl")
    lengths = torch.tensor([[6, 3], [6, 5], [2, 4], [2, 0]])
    place = torch.arange(11)
    mask = (place >= 6 - lengths[:, :1]) & (place < 6 + lengths[:, 1:])
    tokens = torch.randint(3, 30, (4, 11), generator=torch.Generator().manual_seed(0))
    tokens[1, :6], tokens[3, :6] = tokens[0, :6], tokens[2, :6]
    found = []
    for kind in (module.trl.GRPOTrainer, module.PrefixTreeGRPOTrainer):
        trainer = module.make_trainer(kind, str(tmp_path), steps=1)
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, mask.long(), logits_to_keep=5, compute_entropy=True
        )
        completed = mask[:, -5:]
        log_probs[completed].sum().backward()
        grads = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        found.append((log_probs[completed], entropies[completed], grads))
    assert_same(found[1], found[0])
    rewards = module.main(steps=3)
    assert len(rewards) == 3


@pytest.mark.slow
def test_torchtitan_over_shards(tmp_path):
    """The losses are those of torchtitan's attention at each step, and training goes where PyTorch's gradients lead."""
    pytest.importorskip("torchtitan")
    for of_rank in start({"train": train_both}, 2, tmp_path):
        losses, own = of_rank["train"]["flashtile"]
        plain, _ = of_rank["train"]["plain"]
        assert_same(torch.tensor(losses), torch.tensor(own))
        assert_same(torch.tensor(losses), torch.tensor(plain))
        assert losses[-1] < losses[0] - 0.1
