"""Small calls drawn at random: what is drawn, and a record on a CPU."""

from __future__ import annotations

import json

from benchmarks import small_calls
from flashtile.bench import tables
from flashtile.bench.cases import Case


def test_the_same_calls_are_drawn_again_and_are_small() -> None:
    cases = tables.small_cases(200, seed=3)
    assert cases == tables.small_cases(200, seed=3) != tables.small_cases(200, seed=4)
    assert all(case.B * case.S <= 2**14 for case in cases)
    assert {bool(case.lengths) for case in cases} == {bool(case.dropout_p) for case in cases} == {True, False}


def test_a_record_has_eager_times_and_those_of_the_device(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(small_calls, "small_cases", lambda count, seed: [Case(1, 16, 2, 2, 8, 8, dtype="fp32")])
    small_calls.main(["--seconds", "0.001", "--output", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text("utf-8"))
    timed = {(row["op"], row["phase"]) for row in record["rows"] if row["impl"] == "flashtile-auto" and row["ms"] > 0}
    eager, in_graphs = ("fwd-nograd", "fwd+bwd"), ("fwd", "bwd")
    assert timed == {*(("attention-eager", phase) for phase in eager), *(("attention", phase) for phase in in_graphs)}
    assert "best peer" in capsys.readouterr().out
