"""The benchmark of the batch-invariant mode: both kinds of calls in one record, and the ratios of the mode."""

import json
from pathlib import Path

import pytest
import torch

from flashtile.bench.commands import measure
from flashtile.bench.html.charts import Named, record_part
from flashtile.bench.record import mode_ratios
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.report import mode_tables
from flashtile.bench.runner import run_case

BENCHMARK = BENCHMARKS["invariance"]
CASE = {"B": 1, "S": 64, "H": 2, "Hkv": 2, "D": 16, "Dv": 16}
TIMES = {"flashtile-auto": 2.0, "flashtile-deterministic": 3.0, "flashtile-invariant": 4.0, "fast": 1.0, "slow": 9.0}
ROWS = [
    {"op": op, "phase": "fwd", "impl": impl, "case": CASE, "ms": ms, "tflops": 1.0, "gbps": 1.0}
    for op, names in (("attention", TIMES), ("serving", ("flashtile-auto", "flashtile-invariant")))
    for impl, ms in ((name, TIMES[name]) for name in names)
]


def test_ratios_are_over_the_default_determinism_and_the_fastest_peer():
    assert [ratios for _, ratios in mode_ratios(ROWS)] == [
        {"flashtile-auto": 0.5, "flashtile-deterministic": 0.75, "fast": 0.25},
        {"flashtile-auto": 0.5},
    ]
    (table,) = mode_tables(ROWS)
    assert [line[1:] for line in table.lines] == [
        ["fwd", "0.50", "0.75", "fast", "0.25"],
        ["fwd", "0.50", "–", "–", "–"],
    ]
    assert mode_tables(ROWS[:2]) == []


def test_the_page_has_a_picture_for_each_operation_and_phase():
    charts = record_part(Named({"rows": ROWS}, Path("r.json"))).charts
    found = {chart.title: chart for chart in charts if "batch-invariant" in chart.title}
    title = "forward: speed in the batch-invariant mode"
    assert set(found) == {f"Attention, {title}", f"Serving, {title}"}
    table = found[f"Attention, {title}"].table()
    assert table.headings == ["case", "flashtile", "flashtile, deterministic", "the fastest peer"]
    assert [line[1:] for line in table.lines] == [["0.5", "0.75", "0.25"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures what a machine without a GPU would")
def test_all_of_ours_are_right_in_training_decoding_and_mixed_batches(tmp_path):
    output = tmp_path / "record.json"
    measure("invariance", {"quick": True, "seconds": 0.0}, output)
    rows = json.loads(output.read_text())["rows"]
    assert {row["op"] for row in rows} == {"attention", "serving"}
    assert [row["why"] for row in rows if row["ms"] is None] == []
    assert [len(ratios) for _, ratios in mode_ratios(rows)] == [3, 3, 2, 1]
    cuda = BENCHMARK.tables(torch.device("cuda"))
    assert {case.S for case in cuda["decode"]} == {4096, 16384, 65536, 131072}


@pytest.mark.gpu
@pytest.mark.parametrize("table", ["training", "decode", "mixed"])
def test_gpu_results_are_right(table):
    device = torch.device("cuda")
    case = BENCHMARK.tables(device)[table][0]
    rows = run_case(case, [each for each in BENCHMARK.implementations if each.ours], device, BENCHMARK.problem, 0.01)
    assert all(row["ms"] is not None for row in rows), rows
