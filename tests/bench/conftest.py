"""What tests of the benchmarks share."""

import pytest

from flashtile.bench import runner


@pytest.fixture
def short_measuring(monkeypatch):
    """One sample of each phase on a CPU."""
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(runner, "_LEAST_SAMPLES", 1)
