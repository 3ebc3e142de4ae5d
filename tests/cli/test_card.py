"""`flashtile bench card`: checks, measurements, one record, and a verdict."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from flashtile._backends import tuned
from flashtile.bench import card, commands, runner
from flashtile.bench.base import Implementation
from flashtile.bench.cases import Case
from flashtile.bench.companion_cases import RMSNorm
from flashtile.bench.implementations import build_flashtile
from flashtile.bench.record import read_record
from flashtile.cli import doctor
from flashtile.testing.kernel_checks import KernelCheck
from flashtile.tuning import rows_in_use
from support.running.command_line import invoke

pytestmark = [
    pytest.mark.unpoisoned,
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces what is measured on a CPU"),
]
CASES = {"attention": [Case(1, 32, 2, 2, 8, 8, dtype="fp32")], "companions": [RMSNorm("fp32", 16, 32)]}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two cases, two checks, and two implementations, one of which fails and tells where."""
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(card, "card_cases", lambda device: CASES)
    monkeypatch.setattr(
        doctor, "kernel_checks", lambda backend: [KernelCheck("norm", "rows of 3", lambda device: None)]
    )
    choose = commands.choose_implementations

    def fail(case, inputs):
        raise RuntimeError(f"nothing at {Path.home()}/cache/x")

    def chosen(command, names, device):
        if command == "companions":
            return choose(command, ["flashtile-cpu", "eager"], device)
        found = [Implementation("flashtile-cpu", build=build_flashtile("cpu")), Implementation("failing", build=fail)]
        return [*found, Implementation("peer", build=build_flashtile("reference"))]

    monkeypatch.setattr(commands, "choose_implementations", chosen)


def test_a_card_is_checked_and_measured_and_the_record_names_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/homes/ada")
    monkeypatch.chdir(tmp_path)
    row = tuned.TunedRow("a", {"D": 64}, {"tile": 32}, 1.0, 2.0)
    monkeypatch.setattr("flashtile.cli.card.rows_in_use", lambda device: [row])
    result = invoke("bench", "card")
    assert result.exit_code == 0, result.output
    record = read_record(Path("card-cpu.json"))
    assert record["tuned"] == [{"choice": "a", "key": {"D": 64}, "cut": {"tile": 32}, "ms": 1.0, "shipped_ms": 2.0}]
    assert record["checks"] == [{"backend": "cpu", "operation": "norm", "calls": 1, "wrong": []}]
    assert [row["op"] for row in record["rows"]] == ["attention"] * 6 + ["rms_norm"] * 4
    whys = {row["why"] for row in record["rows"] if "why" in row}
    assert whys == {"RuntimeError: nothing at …"} and record["command"] == "flashtile bench card"
    assert "ours / best" in result.stdout and "flashtile is faster than the fastest peer in" in result.stdout
    assert "record: card-cpu.json" in result.stdout and "docs/hardware.md" in result.stdout
    assert "[2/2" in result.stderr, "the cases of all parts are counted together"


def test_a_wrong_kernel_is_in_the_record_and_in_the_exit_status(tmp_path, monkeypatch):
    def wrong(device):
        raise AssertionError("out: largest error 3\nand more")

    monkeypatch.setattr(doctor, "kernel_checks", lambda backend: [KernelCheck("norm", "rows of 3", wrong)])
    output = tmp_path / "new" / "record.json"
    result = invoke("bench", "card", "--output", output)
    assert result.exit_code == 1, result.output
    found = json.loads(output.read_text("utf-8"))["checks"]
    assert found[0]["wrong"] == ["rows of 3: AssertionError: out: largest error 3"]


def test_a_record_without_a_commit_is_announced(tmp_path, monkeypatch):
    monkeypatch.setattr("flashtile.bench.record.commit", lambda: None)
    result = invoke("bench", "card", "--output", tmp_path / "record.json")
    assert "flashtile is not imported from a checkout" in result.output
    assert json.loads((tmp_path / "record.json").read_text("utf-8"))["commit"] is None


def test_a_place_that_takes_no_record_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "run_checks", None)
    result = invoke("bench", "card", "--output", tmp_path)
    assert result.exit_code == 2 and "--output: expected a file that can be written, got" in result.output


def test_the_rows_in_use_are_those_of_the_table_that_calls_read(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    row = tuned.TunedRow("a", {"D": 64}, {"tile": 32}, 1.0, 2.0)
    tuned.write(tmp_path / "table.json", "a card", [row])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for named, expected in ((tmp_path / "table.json", [row]), ("0", [])):
        monkeypatch.setenv("FLASHTILE_TUNED", str(named))
        assert [*rows_in_use(torch.device("cuda"))] == expected
    assert not rows_in_use(torch.device("cpu"))
