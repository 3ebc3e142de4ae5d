"""DTensors and FSDP2 around parts: the results and gradients of one process."""

import pytest

from flashtile.testing import assert_same
from support.distributed.processes import check_pairs, start, start_once
from support.distributed.tensors import FOUR, JOBS
from support.running.each_case import each_case


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_once(JOBS, 2, tmp_path_factory, __name__)


@pytest.mark.slow
def test_results_and_gradients_over_four_ranks_are_those_of_one_process(tmp_path):
    """A mesh of two dimensions."""
    results = start(FOUR, 4, tmp_path)
    for job in FOUR:
        check_pairs(job, results)


@pytest.mark.slow
@each_case("job", ["calls", "plans", "modules", "compiled", "fully sharded"])
def test_results_and_gradients_are_those_of_one_process(job, results):
    check_pairs(job, results)


def test_public_functions_return_what_one_process_gets_or_raise(results):
    """Caches, running results, and functions that look at the numbers."""
    raise_ = {"attention_with_kv_cache", "attention_backward", "attention_column_sums", "attention_probs"}
    for of_rank in results:
        refused = {name.partition(":")[0] for name, pair in of_rank["public"].items() if pair is None}
        assert refused == {*raise_, "merge_attention_"}
        for name, pair in of_rank["public"].items():
            if pair is not None:
                assert_same(*pair, name)


def test_ranks_drop_the_same_elements(results):
    for of_rank in results:
        for found, first in of_rank["seeds"]:
            assert_same(found, first)


def test_what_cannot_be_sharded_is_refused(results):
    messages = (
        "weight: expected a DTensor beside x, got a plain tensor that wants a gradient",
        "weight: expected a DTensor on the mesh of x",
        "process_group: expected None with DTensors",
        "main_grad: expected None with DTensors",
        "acc, row_max, row_sum: expected plain tensors, got DTensors",
        "flashtile.attention_cached.default does not have a sharding strategy registered",
        "flashtile.attention_backward.default does not have a sharding strategy registered",
        "q: expected a plain tensor of this rank, got a DTensor",
        "fc1: expected all 256 values and gates, got 128",
    )
    for of_rank in results:
        for found, message in zip(of_rank["refused"], messages, strict=True):
            assert message in found
