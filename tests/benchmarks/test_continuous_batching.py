"""Continuous batching measured at a tiny size: both implementations give the same tokens, and a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5.20")


def test_a_record_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import continuous_batching
    from flashtile.integrations.transformers import unregister

    path = tmp_path / "record.json"
    sizes = ["--layers=1", "--heads=2", "--heads-kv=1", "--head-dim=16", "--vocabulary=50", "--page=16"]
    batch = ["--requests=2", "--prompt=24", "--new-tokens=3", "--batch-tokens=16", "--runs=1"]
    assert continuous_batching.main([*sizes, *batch, "--device=cpu", f"--output={path}"]) == 0
    unregister()
    ours, sdpa = json.loads(path.read_text("utf-8"))["rows"]
    assert (ours["impl"], sdpa["impl"]) == ("flashtile", "sdpa")
    assert sdpa["same_tokens"] == 1 and min(ours["tokens_per_s"], sdpa["tokens_per_s"]) > 0
    assert "2 requests" in capsys.readouterr().out
