"""Tables and pictures of the training scripts' records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.evidence.__main__ import main
from benchmarks.evidence.summary import summary

ROOT = Path(__file__).parent.parent.parent


def _row(op, impl, case, **found):
    empty = {"ms": None, "tflops": None, "gbps": None, "error": None}
    return {**empty, "op": op, "phase": "train", "impl": impl, "case": case, **found}


def _rows():
    for seed, accuracy in enumerate((0.5, 0.52, 0.54)):
        case = {"seed": seed, "steps": 100}
        yield _row("lra-listops", "flashtile", case, ms=2.0, accuracy=accuracy, peak_mib=1234.4)
    yield _row("lra-pathfinder", "standard", {"seed": 0, "steps": 7}, ms=4.0, accuracy=1.0, peak_mib=None)
    for context, ms in ((1024, 10.0), (65536, None)):
        case = {"model": "gpt2-small", "B": 1, "S": context}
        speed = {"ms": ms, "tokens_per_s": 102400.0, "mfu": 0.25, "peak_mib": 10.0}
        yield _row("train-step", "transformers-eager", case, **(speed if ms else {"why": "OutOfMemoryError: no"}))
    for impl in ("transformers-eager", "flashtile"):
        case = {"model": "gpt2-small", "steps": 3}
        yield _row("train-curve", impl, case, ms=5.0, curve=[3.0, 2.0, 1.0 if impl == "flashtile" else None])


def test_tables_have_means_and_what_could_not_run():
    text = summary(list(_rows()))
    assert "| listops | flashtile | 52.0 ± 2.0 | 3 | 100 | 2.00 | 1,234 |" in text
    assert "| pathfinder | standard | 100.0 | 1 | 7 | 4.00 |  |" in text
    assert "| gpt2-small | 1024 | 1 | transformers-eager | 10.0 | 102,400 | 25.0% | 10 |" in text
    assert "| gpt2-small | 65536 | 1 | transformers-eager |  |  |  | out of memory |" in text
    assert "| gpt2-small | flashtile | 3 | 1.0000 | 5.0 |" in text
    assert "| gpt2-small | transformers-eager | 3 | not finite | 5.0 |" in text
    assert summary([]) == ""


def test_pictures_are_drawn_and_always_the_same(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"rows": list(_rows())}))
    for folder in ("one", "two"):
        assert main([str(record), f"--output={tmp_path / folder}"]) == 0
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"loss-gpt2-small.svg", "context-gpt2-small.svg", "lra-listops.svg", "lra-pathfinder.svg"}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert "loss-gpt2-small.svg" in capsys.readouterr().out


def test_the_picture_and_figures_of_the_document_are_those_of_the_record(tmp_path):
    pytest.importorskip("matplotlib")
    record = ROOT / "benchmarks" / "results" / "cpu-gpt2-curves.json"
    eager, ours = (row["curve"] for row in json.loads(record.read_text())["rows"])
    assert len(eager) == len(ours) == 1000
    assert 0 < max(abs(a - b) for a, b in zip(eager, ours)) <= 1e-6
    assert sum(eager[-100:]) / 100 < eager[0] - 2
    # Versions of matplotlib draw differently; that a picture is of these losses its caption and place tell.
    assert main([str(record), f"--output={tmp_path}"]) == 0
    document = (ROOT / "docs" / "training_evidence.md").read_text("utf-8")
    (drawn,) = tmp_path.iterdir()
    assert f"images/{drawn.name}" in document and (ROOT / "docs" / "images" / drawn.name).exists()


def test_what_is_no_record_ends_with_a_line(tmp_path, capsys):
    assert main([str(tmp_path / "missing.json")]) == 2
    for text in ("{}", "[]", "no JSON"):
        (tmp_path / "wrong.json").write_text(text)
        assert main([str(tmp_path / "wrong.json")]) == 2
    assert capsys.readouterr().err.count("records: expected a record, got") == 4
