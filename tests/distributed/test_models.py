"""Models over several processes: the logits and gradients of one."""

from dataclasses import replace

import pytest
import torch

from flashtile.distributed import vocabulary_loss
from flashtile.models import GPT
from flashtile.testing import assert_same
from support.distributed.models import CONFIGS, JOBS, alone
from support.distributed.processes import check_pairs, start_once
from support.running.each_case import each_case


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_once(JOBS, 2, tmp_path_factory, __name__)


@pytest.fixture(scope="module")
def expected():
    return {name: alone(config) for name, config in CONFIGS.items()}


@pytest.mark.slow
@each_case("strategy", ["ring", "all_to_all"])
@each_case("name", CONFIGS)
def test_context_parallel_models_are_the_same_model(name, strategy, results, expected):
    """Logits of all tokens and the loss on every rank; gradients that add up to those of one process."""
    parts = [of_rank["context"] for of_rank in results]
    found = [part[f"{name}-{strategy}"] for part in parts]
    for key, value in expected[name].items():
        given = [part[key] for part in found]
        if key in ("logits", "loss"):
            for one in given:
                assert_same(one, value)
        else:
            assert_same(sum(given), value, key)


def test_what_cannot_be_sharded_is_refused(results):
    for of_rank in results:
        found = of_rank["refused"]
        assert "tokens: expected at most 32 in a row (the context), got 40 in the shards of all 2 ranks" in found[0]
        assert "cache: expected None with shards of sequences" in found[1]
        assert "model: expected one with flashtile.modules.MHA, got Linear" in found[2]
        assert "give GPT no attention=" in found[3]
        assert "got a Bert" in found[4]
        assert "tokens: expected whole sequences for loss, got a model of context_parallel" in found[5]


@each_case("strategy", ["ring", "all_to_all"])
def test_context_parallel_blocks_are_computed_again_by_activation_checkpointing(strategy, results):
    for of_rank in results:
        kept, again = of_rank["checkpointed"][strategy]
        assert_same(again, kept)


@each_case("shards", [False, True])
@each_case("fused", [False, True])
@each_case("name", CONFIGS)
def test_tensor_parallel_models_are_the_same_model(name, fused, shards, results, expected):
    parts = [of_rank["tensor"] for of_rank in results]
    for part in parts:
        found = part[f"{name}-{fused}-{shards}"]
        for key, value in expected[name].items():
            if key != "logits":
                assert_same(found[key], value, key)


@each_case("job", ["layers", "second"])
def test_layers_cut_over_ranks_are_the_whole_ones(job, results):
    check_pairs(job, results)


def test_plans_that_cannot_be_are_refused(results):
    messages = (
        "model: expected a flashtile.models.GPT, got Linear",
        "mesh: expected a number of ranks that divides the 4 query and 1 key/value heads, got 2",
        "plan: expected no attention dropout, got 0.1",
        "mesh: expected a number of ranks that divides the 3 features, got 2",
        "x: expected a number of tokens that the 2 ranks divide with sequence_parallel=True, got 3",
        "x: expected shape (..., tokens, features) with sequence_parallel=True, got (4,)",
        "x: expected shape (..., tokens, features) with sequence_parallel=True, got (4,)",
        "mesh: expected one dimension, got 2",
        "mesh: expected a torch.distributed DeviceMesh, got ProcessGroup",
        "embedding: expected one without padding_idx, max_norm, scale_grad_by_freq, sparse, got {'padding_idx': 0}",
        "got {'max_norm': 1.0}",
        "plan: expected Mlp with return_residual=False, got True",
        "plan: expected FusedMlp with accumulate_main_grad=False, got True",
        "tokens: expected numbers from 0 to 3, got 4",
        "tokens: expected numbers from 0 to 3, got -1",
        "model: expected whole weights for logits, got a model of tensor_parallel_plan",
        "model: expected whole weights for a loss, got",
        "model: expected whole weights for generation, got",
        "model: expected whole weights for initialise, got",
        "layer: expected a torch.nn.Linear, got support.distributed.models._Adapted",
        "layer: expected a torch.nn.Linear, got torch.nn.utils.parametrize.ParametrizedLinear",
        "layer: expected a torch.nn.Embedding, got torch.nn.modules.linear.Linear",
    )
    for of_rank in results:
        for found, message in zip(of_rank["refused plans"], messages, strict=True):
            assert message in found


def test_the_loss_of_a_model_that_is_whole_is_not_that_of_parts():
    whole = GPT(replace(CONFIGS["gpt2"], fused_loss=True))
    for model, got in ((whole, "one that is whole"), (whole.blocks, "ModuleList")):
        with pytest.raises(TypeError, match=f"model: expected a GPT that tensor_parallel_plan has divided, got {got}"):
            vocabulary_loss(model, torch.zeros(1, 2, 16), torch.zeros(1, 2, dtype=torch.int64), None)
