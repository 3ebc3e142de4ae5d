"""Prefix trees measured against padded batches, at a tiny size: both compute the same, and trees keep less."""

import json
import re
from pathlib import Path

from benchmarks import prefix_trees

ROOT = Path(__file__).parents[2]


def test_a_record_of_both(tmp_path, capsys):
    path = tmp_path / "record.json"
    sizes = ["--layers=1", "--width=32", "--heads=2", "--vocabulary=50", "--prompt=64", "--completion=16"]
    command = [*sizes, "--completions", "4", "--seconds=0.01", "--device=cpu", f"--output={path}"]
    assert prefix_trees.main(command) == 0
    batch, tree = json.loads(path.read_text("utf-8"))["rows"]
    assert (batch["impl"], tree["impl"]) == ("flashtile-padded-batch", "flashtile-prefix-tree")
    assert tree["error"] < 1e-4 and batch["ms"] > 0 and tree["saved_mib"] < batch["saved_mib"]
    assert "4 completions of a prompt of 64 tokens" in capsys.readouterr().out


def test_the_numbers_of_the_guide_are_those_of_the_record():
    rows = json.loads((ROOT / "benchmarks/results/cpu-prefix-trees.json").read_text("utf-8"))["rows"]
    guide = (ROOT / "docs/training.md").read_text("utf-8").partition("## Prefix trees")[2]
    numbers = [f"{row[key]:,.0f}" for row in rows for key in ("ms", "saved_mib")]
    assert len(numbers) == 8 and set(numbers) <= set(re.findall(r"[\d,]*\d", guide))
