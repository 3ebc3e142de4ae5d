"""Models of transformers over shards of sequences: the logits, loss and gradients of one process."""

import pytest

from flashtile.testing import Size, assert_same, size
from support.distributed.processes import start_once
from support.distributed.transformers import JOBS, MODELS, alone
from support.running.each_case import each_case

_REFUSED = {
    "labels": "labels: expected None with shards of sequences, got a Tensor; models shift them",
    "mask": "attention_mask: expected None with shards of sequences, got a Tensor; leave it out",
    "positions": "position_ids: expected None with shards",
    "cache": "use_cache: expected False with shards of sequences, got True",
    "generate": "with shards of sequences",
    "twice": "got one that takes shards already",
    "rope": "got rope_type 'dynamic'",
    "long": "input_ids: expected at most 64 tokens in a row (max_position_embeddings), got 128 in the shards of all 2",
    "two sequences": "model: expected one with one sequence",
    "no model": "model: expected a transformers PreTrainedModel, got Linear",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_once(JOBS, 2, tmp_path_factory, __name__)


@pytest.mark.slow
@each_case("name", MODELS)
def test_models_over_shards_are_the_same_models(name, results):
    """Logits of all tokens and the loss on every rank; gradients that add up. Models round to float32 in places, so
    that is the dtype in which they are the same; the gradient of a bias of keys is 0, where all others cancel."""
    parts = [of_rank["context"] for of_rank in results]
    found = [part[name] for part in parts]
    expected = alone(name)
    largest = max(size(value).typical for key, value in expected.items() if key not in ("logits", "loss"))
    for key, value in expected.items():
        given = [part[key] for part in found] if key in ("logits", "loss") else [sum(part[key] for part in found)]
        for one in given:
            cancelled = Size() if key in ("logits", "loss") else Size(largest, largest)
            assert_same(one.float(), value.float(), key, cancelled)


@each_case("name", _REFUSED)
def test_what_shards_cannot_give_is_refused(name, results):
    for of_rank in results:
        assert _REFUSED[name] in of_rank["refused"][name]
