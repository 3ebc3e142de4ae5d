"""The cost model: its bytes and pairs are those of the schedules, and its limits are what they must be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashtile.distributed import explain_context_parallel
from flashtile.distributed.cost_model import H200, Load, Machine, cost, efficiency, overlap_length
from support.running.each_case import each_case
from tools import scaling_model

ROOT = Path(__file__).parents[2]
_LOAD = Load(131072)
_ENDLESS = replace(H200, near=1e30, far=1e30, memory=1e30, latency=0.0)


@each_case("strategy", ["ring", "all_gather", "all_to_all", "ring_all_to_all"])
@each_case("phase", ["fwd", "fwd+bwd"])
def test_nothing_is_lost_where_links_cost_nothing(strategy, phase):
    found = cost(strategy, _LOAD, 16, _ENDLESS, phase, inner=4)
    assert efficiency(found, _LOAD, 16, _ENDLESS, phase) == pytest.approx(1.0)
    assert efficiency(cost(strategy, _LOAD, 16, H200, phase, inner=4), _LOAD, 16, H200, phase) < 1.0


def test_one_rank_pays_nothing():
    for strategy in ("ring", "all_gather", "all_to_all", "ring_all_to_all"):
        assert efficiency(cost(strategy, _LOAD, 1, H200), _LOAD, 1, H200) == pytest.approx(1.0)


@each_case("causal", [True, False])
def test_transfers_are_hidden_from_the_length_that_the_formula_says(causal):
    machine = replace(H200, latency=0.0)
    edge = overlap_length(replace(_LOAD, causal=causal), machine, machine.near)
    for factor, hidden in ((0.9, False), (1.1, True)):
        load = Load(int(8 * edge * factor), causal=causal)
        assert (cost("ring", load, 8, machine, "fwd").exposed == 0) is hidden


def test_what_gathering_and_exchanging_hide():
    """Under a causal mask a rank's own keys are computed meanwhile; of two runs of heads half travels meanwhile."""
    machine = replace(H200, latency=0.0, memory=1e30)
    assert cost("all_gather", _LOAD, 4, machine, "fwd").exposed == 0
    assert cost("all_gather", replace(_LOAD, causal=False), 4, machine, "fwd").exposed > 0
    moved = 3 / 4 * _LOAD.tensor_bytes(_LOAD.length / 4, 2 * 32 + 2 * 8) / machine.near
    assert cost("all_to_all", _LOAD, 4, machine, "fwd").exposed == pytest.approx(moved / 2)
    short = replace(_LOAD, length=4096)
    assert cost("all_to_all", short, 4, machine, "fwd").exposed == pytest.approx(moved * 4096 / _LOAD.length)


@each_case("strategy", ["all_gather", "all_to_all"])
def test_bytes_are_those_of_the_explanation(strategy):
    """Where nothing but bytes costs anything."""
    machine = Machine(1e30, 1e30, near=1.0, far=1.0, latency=0.0)
    load = Load(4096, 8, 2, 64)
    shards = [torch.empty(1, 1024, h, 64, dtype=torch.bfloat16, device="meta") for h in (8, 2, 2)]
    received = explain_context_parallel(*shards, ranks=4, strategy=strategy, device="sm_90").received
    assert cost(strategy, load, 4, machine, "fwd").exposed == pytest.approx(received * (1.0))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="expected heads that the ranks divide"):
        cost("all_to_all", _LOAD, 64, H200)
    with pytest.raises(ValueError, match="expected one of ring"):
        cost("rang", _LOAD, 4, H200)


def test_rates_are_those_of_the_record():
    rows = json.loads((ROOT / "benchmarks/results/h200-attention.json").read_text("utf-8"))["rows"]
    rates = {
        row["phase"]: row["tflops"] for row in rows
        if row["impl"] == "flashtile-hopper" and row["case"]["S"] == 16384 and row["case"]["causal"]
        and row["case"]["D"] == row["case"]["Dv"] == 128 and row["case"]["H"] == row["case"]["Hkv"] == 16
    }  # fmt: skip
    assert (H200.forward, H200.backward) == pytest.approx((rates["fwd"] * 1e12, rates["bwd"] * 1e12), rel=2e-3)


def test_the_script_prints_tables_and_compares_with_a_record(tmp_path, monkeypatch, capsys):
    row = {
        "impl": "flashtile-ring", "phase": "fwd", "ms": 1.0, "efficiency": 0.9,
        "case": {"B": 1, "S": 131072, "H": 32, "Hkv": 8, "D": 128, "causal": True, "gpus": 4},
    }  # fmt: skip
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"rows": [row, {**row, "impl": "torch-context-parallel"}]}))
    for arguments, expected in ((["--ranks", "8"], "| 8 | 32k |"), (["--record", str(record)], "| 0.900 | 0.9")):
        monkeypatch.setattr("sys.argv", ["scaling_model.py", *arguments])
        scaling_model.main()
        printed = capsys.readouterr().out
        assert expected in printed
    assert printed.count("131,072") == 1


def test_the_decision_record_has_the_figures_of_the_record():
    """Measured and predicted efficiencies, forward and forward with backward."""
    gpus = 4
    rows = json.loads((ROOT / f"benchmarks/results/h200x{gpus}-context-parallel.json").read_text("utf-8"))["rows"]
    text = (ROOT / "decisions/other_kernels.md").read_text("utf-8")
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        strategy, case = row["impl"].removeprefix("flashtile-"), row["case"]
        if row["phase"] != "fwd" or row["ms"] is None or strategy not in ("ring", "all_to_all", "all_gather"):
            continue
        both = next((r for r in rows if (r["impl"], r["case"], r["phase"]) == (row["impl"], case, "fwd+bwd")), row)
        if both["ms"] is None or row["efficiency"] is None:
            continue
        load = Load(case["S"], case["H"], case["Hkv"], case["D"], case["causal"], case["B"])
        phases = ("fwd", "fwd+bwd")
        found = [efficiency(cost(strategy, load, gpus, H200, phase), load, gpus, H200, phase) for phase in phases]
        name = f"{case['S']:,}{', causal' if case['causal'] else ''}"
        measured = f"{row['efficiency']:.2f}/{both['efficiency']:.2f}"
        cells.setdefault(name, {})[strategy] = f"{measured} {found[0]:.2f}/{found[1]:.2f}"
    for name, row in cells.items():
        assert f"| {name} | {row['ring']} | {row['all_to_all']} | {row['all_gather']} |" in text
    assert len(cells) >= 5
