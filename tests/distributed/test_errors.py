"""What is refused, and how: on every rank, before anything is exchanged; and what a lost rank looks like."""

from pathlib import Path

import pytest
import torch

from flashtile.testing import assert_same
from support.distributed.jobs import JOBS, REFUSED, REFUSED_BY_HELPERS
from support.distributed.processes import start_once
from support.running.each_case import each_case
from support.running.missing_packages import run_without


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_once(JOBS, 2, tmp_path_factory, __name__)


@pytest.mark.slow
@each_case(
    "name, message",
    [
        ("shapes", "q: expected the same on all ranks, got ((1, 8, 2, 4), 'torch.float32', False) on rank 0 and"),
        ("settings", "causal: expected the same on all ranks, got True on rank 0 and False on rank 1 (and others"),
        ("bias", "bias: expected the same on all ranks, got None on rank 0 and ((1, 1, 16, 16)"),
        ("values", "dropout_seed: expected the same on all ranks, got [0, 0] on rank 0 and [1, 0] on rank 1"),
    ],
)
def test_ranks_that_come_with_different_calls_hear_of_it(name, message, results):
    assert message in results[0][name]
    assert name != "shapes" or "on rank 1" in results[0][name]
    assert "expected the same on all ranks" in results[1][name]


def test_values_are_compared_in_every_call(results):
    for of_rank in results:
        seeds, lengths = of_rank["values of earlier calls"]
        assert "dropout_seed: expected the same on all ranks" in seeds
        assert "key_lengths: expected the same on all ranks" in lengths


@each_case("name", REFUSED)
def test_what_a_strategy_cannot_do_is_refused(name, results):
    for of_rank in results:
        assert REFUSED[name][1] in of_rank["refused"][name]


@each_case("name", REFUSED_BY_HELPERS)
def test_what_helpers_refuse(name, results):
    for of_rank in results:
        assert REFUSED_BY_HELPERS[name][1] in of_rank["refused by helpers"][name]


def test_ranks_agree_once_for_each_kind_of_call(results):
    assert [of_rank["agreed"] for of_rank in results] == [[1, 1, 1, 2]] * 2


@pytest.mark.slow
def test_ranks_need_no_numpy(tmp_path):
    """They compare their calls, and compute one."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "import importlib.util, pathlib\n"
        "from support.distributed import jobs, processes\n"
        "assert importlib.util.find_spec('numpy') is None\n"
        "chosen = {name: jobs.JOBS[name] for name in ('shapes', 'agreed')}\n"
        "print(processes.start(chosen, 2, pathlib.Path(), method='fork'))\n"
    )
    done = run_without({"numpy"}, tmp_path, "-c", program)
    assert "q: expected the same on all ranks" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("'agreed': [1, 1, 1, 2]") == 2, done.stdout


def test_the_dropout_seed_is_that_of_the_first_rank(results):
    out, alone = results[0]["seed"]
    assert_same(out, alone)
    assert_same(results[1]["seed"][0], alone)


def test_a_lost_rank_is_named_with_the_step(results):
    assert "rank 0 (place 0 of 2) failed at forward, step 1 of 2, keys and values" in results[0]["lost"]
    assert "place 1" in results[0]["lost"]
    assert results[1]["lost"] == "gone"


def test_helpers(results):
    first, second = (of_rank["helpers"] for of_rank in results)
    assert first["positions"].tolist() == [0, 1, 6, 7]
    assert second["positions"].tolist() == [2, 3, 4, 5]
    assert first["contiguous"].tolist() == [0, 1, 2, 3]
    assert first["documents"].tolist() == [0, 1, 3, 0]
    assert second["documents"].tolist() == [2, 0, 1, 2]
    for found in (first, second):
        assert found["mean"] == 2
        assert found["grad"] == 0.25
        assert torch.equal(found["round"], torch.arange(16).view(2, 8))
