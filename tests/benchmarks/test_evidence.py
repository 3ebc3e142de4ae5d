"""Tables of the training scripts' records."""

import json
from pathlib import Path

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


def test_the_figures_of_the_document_are_those_of_the_record():
    record = ROOT / "benchmarks" / "results" / "cpu-gpt2-curves.json"
    eager, ours = (row["curve"] for row in json.loads(record.read_text())["rows"])
    assert len(eager) == len(ours) == 1000
    assert 0 < max(abs(a - b) for a, b in zip(eager, ours)) <= 1e-6
    assert sum(eager[-100:]) / 100 < eager[0] - 2
