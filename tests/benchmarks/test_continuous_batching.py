"""Continuous batching measured at a tiny size: both implementations choose the best tokens; a record."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")


def test_a_record_of_both(tmp_path, capsys):
    from benchmarks import continuous_batching
    from flashtile.integrations.transformers import unregister

    path = tmp_path / "record.json"
    sizes = ["--layers=1", "--heads=2", "--heads-kv=1", "--head-dim=16", "--vocabulary=50", "--page=16"]
    batch = ["--requests=2", "--prompt=24", "--new-tokens=3", "--batch-tokens=16", "--runs=1"]
    assert continuous_batching.main([*sizes, *batch, "--device=cpu", f"--output={path}"]) == 0
    unregister()
    ours, sdpa = json.loads(path.read_text("utf-8"))["rows"]
    assert (ours["impl"], sdpa["impl"]) == ("flashtile", "sdpa")
    for row in (ours, sdpa):
        assert row["best_tokens"] == 1 and row["largest_gap"] == 0 and row["tokens_per_s"] > 0
    printed = capsys.readouterr().out
    assert "2 requests" in printed and "before the first difference: [3, 3]" in printed


def test_wrong_tokens_are_told_from_rounded_ones():
    from benchmarks import continuous_batching

    options = continuous_batching.make_program().parse_args(
        ["--layers=1", "--heads=2", "--heads-kv=1", "--head-dim=16", "--vocabulary=50", "--prompt=8", "--new-tokens=2"]
    )
    model = continuous_batching.make_model(options, torch.device("cpu"))
    found = continuous_batching.check(model, [[1, 2, 3]], [[4, 5]])
    assert found["best_tokens"] < 1 and found["largest_gap"] > 1
    assert continuous_batching.first_differences([[4, 5], [6, 7]], [[4, 6], [6, 7]]) == [1, 2]
