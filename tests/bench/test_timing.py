"""The timers of calls on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashtile.bench import timing


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
