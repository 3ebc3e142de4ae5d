"""The timers of calls on a GPU, and the memory beside inputs and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashtile.bench import timing
from flashtile.bench.cases import Case, make_inputs
from flashtile.bench.implementations import IMPLEMENTATIONS
from flashtile.bench.oracle import Bound
from flashtile.bench.timing import peak_facts


@pytest.mark.parametrize("estimate_ms, calls", [(0.01, 100), (0.9, 2), (3.0, 1), (7.0, None)])
def test_what_a_busy_host_may_have_taken_is_captured(
    estimate_ms: float, calls: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`calls`: of the graph; None where events suffice."""

    class Events:
        def __init__(self, function: object) -> None:
            self.estimate_ms = estimate_ms

    made = []
    monkeypatch.setattr(timing, "EventTimer", Events)
    monkeypatch.setattr(timing, "GraphTimer", lambda function, count: made.append(count))
    timing.make_timer(lambda: None, torch.device("cuda", 0))
    assert made == ([] if calls is None else [calls])
    made.clear()
    timing.make_timer(timing.Uncaptured(lambda: None), torch.device("cuda", 0))
    assert not made


@pytest.mark.gpu
def test_a_graph_whose_replay_is_wrong_is_refused() -> None:
    x, changing = torch.arange(1.0, 100.0, device="cuda"), torch.ones(9, device="cuda")

    def wrong() -> torch.Tensor:
        return x * 3 if torch.cuda.is_current_stream_capturing() else x * 2

    with torch.cuda.stream(torch.cuda.Stream()):
        for function in (lambda: x * 2, lambda: changing.mul_(1.1)):  # the second gives other results each time
            assert timing.make_timer(function, x.device).kind == "cuda-graph"
        with pytest.raises(timing.WrongReplayError):
            timing.make_timer(wrong, x.device)


def test_results_are_alike_up_to_rounding() -> None:
    one = [torch.arange(8.0), torch.ones(3)]
    assert timing._alike(one, [t * 1.001 for t in one])
    assert not timing._alike(one, [one[0], one[1] * 1.1]) and not timing._alike(one, [one[0], one[1] * torch.nan])


_CASE = Case(1, 1024, 4, 4, 64, 64, dtype="fp16")


def facts(impl: str, device: str, phase: str) -> dict[str, Any]:
    implementation = next(each for each in IMPLEMENTATIONS if each.name == impl)
    with implementation.context():
        bound = Bound(implementation, _CASE, make_inputs(_CASE, torch.device(device)))
        bound.results(phase)  # as the runner does, which judges them first
        return bound.facts(phase)


def test_nothing_is_told_of_a_cpu() -> None:
    assert peak_facts(lambda: [torch.ones(3)], [torch.ones(3)]) == {}
    assert facts("flashtile-cpu", "cpu", "bwd") == {}


@pytest.mark.gpu
def test_what_is_neither_input_nor_result_counts() -> None:
    mib = 2**20
    kept = torch.zeros(mib, device="cuda", dtype=torch.uint8)

    def call() -> list[torch.Tensor]:
        scratch = torch.empty(8 * mib, device="cuda", dtype=torch.uint8)
        result = torch.empty(2 * mib, device="cuda", dtype=torch.uint8)
        return [result, kept.view(2, -1), scratch[:0].clone()]

    assert peak_facts(call, [kept]) == {"peak_mib": 8.0}


@pytest.mark.gpu
def test_attention_takes_less_than_its_matrix_of_scores() -> None:
    matrix = 4 * 1024 * 1024 * 2 / 2**20
    ours = facts("flashtile-triton", "cuda", "bwd")["peak_mib"]
    plain = facts("sdpa-math", "cuda", "bwd")["peak_mib"]
    assert ours < matrix < plain
    assert facts("flashtile-triton", "cuda", "fwd") == {}
