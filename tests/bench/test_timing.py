"""Which timer a call on a GPU gets."""

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
