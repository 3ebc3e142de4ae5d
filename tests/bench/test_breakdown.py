"""The breakdown: its steps are those of standard attention, and what is told of their times."""

import json
from pathlib import Path

import pytest
import torch

from flashtile.bench import breakdown, runner
from flashtile.bench.base import select_implementations
from flashtile.bench.breakdown import BREAKDOWN, FUSED, STANDARD, BreakdownProblem, Steps, causal_mask, scores
from flashtile.bench.cases import Case
from flashtile.bench.html import charts
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.report import breakdown_tables, comparison_tables, make_report
from flashtile.bench.start import UserError
from flashtile.testing import assert_same
from support.running.command_line import invoke
from support.running.each_case import each_case

pytestmark = pytest.mark.usefixtures("short_measuring")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = Case(2, 24, 3, 3, 8, 8, causal=True, dropout_p=0.25, dtype="fp64")
FORWARD = ["q kᵀ", "mask", "softmax", "dropout", "weights · v"]
BACKWARD = ["dout · vᵀ", "dv", "dropout, backward", "softmax, backward", "dq", "dk"]


@each_case("causal", [False, True])
@each_case("dropout_p", [0.0, 0.25])
def test_the_steps_are_standard_attention_and_its_gradients(causal, dropout_p):
    case = Case(2, 24, 3, 3, 8, 4, causal=causal, dropout_p=dropout_p, dtype="fp64")
    steps = Steps(case, CPU)
    for _ in range(2):  # as often as they are timed
        found = {name: call() for name, call in steps.calls.items()}
    q, k, v = (tensor.clone().requires_grad_() for tensor in (steps.q, steps.k, steps.v))
    mask = causal_mask(24, torch.float64, CPU) if causal else None
    weights = scores(q, k, mask).softmax(dim=-1)
    if dropout_p:
        assert 0.6 < steps.keeps.double().mean() < 0.9
        weights = weights * steps.keeps / (1 - dropout_p)
    out = weights @ v
    assert_same(found["fwd, weights · v"], out)
    expected = torch.autograd.grad(out, (q, k, v), steps.dout)
    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        assert_same(found[f"bwd, {name}"], gradient)
    all_steps = [*(f"fwd, {name}" for name in FORWARD), *(f"bwd, {name}" for name in BACKWARD)]
    wanted = [name for name in all_steps if causal or name != "fwd, mask"]
    assert list(found) == [name for name in wanted if dropout_p or "dropout" not in name]


def test_rows_hold_each_step_and_one_call_of_ours():
    case = Case(1, 64, 2, 2, 16, 16, causal=True, dropout_p=0.1, dtype="fp32")
    chosen = select_implementations(BENCHMARKS["breakdown"].implementations, [], CPU)
    rows = runner.run_case(case, [STANDARD, *chosen], CPU, BreakdownProblem, 0.0)
    standard = [(row["phase"], row["step"]) for row in rows if row["impl"] == "standard"]
    assert standard == [("fwd", step) for step in FORWARD] + [("bwd", step) for step in BACKWARD]
    ours = [row for row in rows if row["impl"] != "standard"]
    assert [(row["impl"], row["phase"], row["step"]) for row in ours] == [
        ("flashtile-cpu", phase, FUSED) for phase in ("fwd", "bwd")
    ]
    assert all(row["ms"] > 0 and row["case"] == case.record() for row in rows)
    assert all(row["error"] < 1e-4 for row in ours), "judged as in the other benchmarks"
    json.dumps(rows)


def by_hand(impl, phase, step, ms, **more):
    return {"op": BREAKDOWN, "phase": phase, "impl": impl, "case": CASE.record(), "step": step, "ms": ms, **more}


def rows_by_hand():
    times = {("standard", "mask"): 1.0, ("standard", "softmax"): 3.0, ("flashtile-cpu", FUSED): 2.0}
    return [by_hand(impl, "fwd", step, ms) for (impl, step), ms in times.items()]


def test_tables_sum_the_steps_and_compare_them_with_one_call():
    (table,) = breakdown_tables(rows_by_hand())
    assert table.title == "Where the forward spends its time"
    assert table.lines == [
        ["mask", "1", "25%"],
        ["softmax", "3", "75%"],
        ["standard, all steps", "4", "100%"],
        ["flashtile-cpu, one call", "2", "50%"],
    ]
    broken = by_hand("flashtile-cpu", "bwd", FUSED, None, why="wrong")
    report = make_report({"rows": [*rows_by_hand(), broken]})
    assert report.tables == [table] and "flashtile-cpu: wrong" in report.notes[0]


def test_steps_are_compared_with_themselves():
    slower = [{**row, "ms": row["ms"] * 2} for row in rows_by_hand()]
    table, means = comparison_tables(rows_by_hand(), slower, "t")
    assert [line[2] for line in table.lines] == ["fwd, mask", "fwd, softmax", f"fwd, {FUSED}"]
    assert {line[2] for line in means.lines} == {"2.000"}


def test_the_page_has_a_chart_of_it():
    part = charts.record_part(charts.Named({"rows": rows_by_hand()}, Path("breakdown.json")))
    (chart,) = part.charts
    assert chart.title == "Forward, step by step" and chart.unit == "ms" and not part.tables
    assert chart.cases == {"mask": {"standard": 1.0}, "softmax": {"standard": 3.0}, FUSED: {"flashtile-cpu": 2.0}}


@each_case("case", [Case(1, 64, 4, 2, 16, 16), Case(1, 64, 2, 2, 16, 16, window=(8, 0))])
def test_other_cases_are_refused(case):
    with pytest.raises(UserError, match="expected a dense case"):
        BreakdownProblem(case, CPU)


def test_matrices_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    with pytest.raises(UserError, match=r"take 14 GiB, and 1 are free; take a smaller --batch or --seq"):
        BreakdownProblem(breakdown.default_case(CUDA), CUDA)


def test_the_command_measures_and_prints(tmp_path):
    output = tmp_path / "record.json"
    options = ["--seq", "32", "--heads", "2", "--head-dim", "8", "--full", "--dropout-p", "0", "--seconds", "0"]
    result = invoke("bench", "breakdown", *options, "--output", output)
    assert result.exit_code == 0 and "Where the backward spends its time" in result.stdout, result.output
    rows = json.loads(output.read_text())["rows"]
    assert {row["step"] for row in rows} == {"q kᵀ", "softmax", "weights · v", *BACKWARD, FUSED} - {"dropout, backward"}
    assert rows[0]["case"]["S"] == 32 and not rows[0]["case"]["causal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "--dtype: no int8"),
        (["--impl", "nobody"], "there are:"),
        (["--dropout-p", "1"], "dropout_p: expected a probability in [0, 1), got 1.0"),
        (["--head-dim", "513"], "expected head_dim from 1 to 512, got 513"),
        (["--seq", "10000000"], "take a smaller --batch or --seq"),
    ],
    ids=["dtype", "impl", "dropout", "head_dim", "memory"],
)
def test_mistakes_are_reported(options, message, monkeypatch):
    monkeypatch.setattr(breakdown, "Steps", None)  # nothing is measured before
    result = invoke("bench", "breakdown", "--seq", 16, "--seconds", 0, *options)
    assert result.exit_code == 2 and message in result.stderr, result.output


@pytest.mark.gpu
def test_on_a_gpu():
    case = Case(4, 512, 8, 8, 64, 64, causal=True, dropout_p=0.1)
    chosen = select_implementations(BENCHMARKS["breakdown"].implementations, [], CUDA)
    with runner.side_stream(CUDA):
        rows = runner.run_case(case, [STANDARD, *chosen], CUDA, BreakdownProblem, 0.02)
    assert all(row["ms"] is not None or row["impl"] == "flashtile-hopper" for row in rows), rows
    assert any(row["impl"] == "flashtile-triton" for row in rows)
