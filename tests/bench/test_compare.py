"""A record beside an earlier one, and this tree beside another commit."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.bench import commands
from flashtile.bench.cases import Case
from flashtile.bench.record import read_record
from flashtile.bench.report import comparison_tables, differences, make_report
from flashtile.bench.start import UserError

CASE = Case(1, 512, 4, 4, 64, 64).record()
CPU = torch.device("cpu")

#: Stands for a commit's benchmarks: writes a record of one case, with the time in `ms.txt` of its tree.
FAKE = """
import json, pathlib, subprocess, sys
tree = pathlib.Path(__file__).parents[3]
ms = float((tree / "ms.txt").read_text())
if "--fail" in sys.argv:
    sys.exit("no such option")
commit = subprocess.run(["git", "-C", tree, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout
case = json.loads((tree / "case.json").read_text())
row = {"op": "attention", "phase": "fwd", "impl": "flashtile-cpu", "case": case, "ms": ms, "tflops": 1 / ms}
record = {"machine": {}, "versions": {}, "commit": commit.strip(), "command": " ".join(sys.argv[1:]), "rows": [row]}
pathlib.Path(sys.argv[sys.argv.index("--output") + 1]).write_text(json.dumps(record))
"""


def row(ms, impl="flashtile-cpu", phase="fwd", **more):
    return {"op": "attention", "phase": phase, "impl": impl, "case": CASE, "ms": ms, "tflops": 1.0, **more}


def test_speeds_beside_an_earlier_record():
    now = [row(2.0), row(3.0, phase="bwd"), row(None, impl="slow", why="x"), row(1.0, impl="new")]
    then = [row(3.0), row(3.0, phase="bwd"), row(1.0, impl="slow")]
    speeds, means = comparison_tables(now, then, "title")
    assert speeds.title == "title" and [line[1:] for line in speeds.lines] == [
        ["flashtile-cpu", "fwd", "3", "2", "1.500"],
        ["flashtile-cpu", "bwd", "3", "3", "1.000"],
    ]
    assert means.lines[0] == ["flashtile-cpu", "fwd", "1.500", "1.500", "1.500", "1"]


def test_what_differs_between_two_machines_is_named():
    here = {"machine": {"cpu": "a", "cpu_cores": 2}, "versions": {"torch": "2"}, "rows": []}
    there = {"machine": {"cpu": "b", "cpu_cores": 2}, "versions": {"torch": "1", "liger": None}, "rows": []}
    assert differences(here, there) == ["cpu: b there, a here", "torch: 1 there, 2 here"]
    report = make_report({**here, "rows": [row(1.0)]}, there)
    assert report.notes[-1].startswith("the earlier record has a time for none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON file"),
        ("[]", "expected an object with a list"),
        ('{"rows": [{"op": "attention"}]}', "expected rows with op, phase, impl, case, ms in .*, got row 1"),
        ('{"rows": ["attention"]}', "got row 1: attention; "),
    ],
)
def test_what_is_no_record_is_refused(text, message, tmp_path):
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_record(path)


def git(folder, *arguments):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *settings, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two commits, the second of which is twice as fast; flashtile seems to run from it."""
    root = tmp_path / "repository"
    package = root / "src" / "flashtile"
    (package / "bench").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bench" / "__init__.py").write_text("")
    (package / "bench" / "__main__.py").write_text(FAKE)
    (root / "case.json").write_text(json.dumps(CASE))
    git(tmp_path, "init", "--quiet", str(root))
    for ms in ("4.0", "2.0"):
        (root / "ms.txt").write_text(ms)
        git(root, "add", "-A")
        git(root, "commit", "--quiet", "-m", ms)
    monkeypatch.setattr(flashtile, "__file__", str(package / "__init__.py"))
    return root


def test_two_commits_run_in_turns_with_the_same_arguments(repository, tmp_path):
    seen = []
    report = commands.compare_with_commit(
        "attention", {"cases": ["a,b"], "quick": True}, "HEAD~1", tmp_path / "both.json", lambda *run: seen.append(run)
    )
    assert [tree for tree, *_ in seen] == ["HEAD~1", "here", "here", "HEAD~1", "HEAD~1", "here"]
    assert [runs for _, runs, _ in seen] == list(range(6)) and seen[0][2] == 6
    assert report.tables[0].lines[0][1:] == ["flashtile-cpu", "fwd", "4", "2", "2.000"]
    assert report.tables[-1].lines[0] == ["here", "0.0%", "0.0%", "1"]
    record = json.loads((tmp_path / "both.json").read_text())
    here, there = record["rows"]
    assert there["impl"] == f"flashtile-cpu@{record['against']}" and here["round_ms"] == [2.0] * 3
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1


def test_the_tree_that_is_worked_on_counts_as_it_is(repository):
    (repository / "ms.txt").write_text("1.0")
    here, there = commands.measure_against("HEAD", ["attention"], lambda *run: None, rounds=1)
    assert (here["rows"][0]["ms"], there["rows"][0]["ms"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("ref", "arguments", "message"),
    [
        ("nowhere", ["attention"], "rev-parse"),
        ("HEAD", ["attention", "--fail"], "ended with 1 in .*\n.*no such option"),
    ],
)
def test_what_cannot_be_compared_is_named(repository, ref, arguments, message):
    with pytest.raises(UserError, match=message):
        commands.measure_against(ref, arguments, lambda *run: None, rounds=1)


def test_outside_a_checkout_there_is_nothing_to_compare_with(tmp_path, monkeypatch):
    monkeypatch.setattr(flashtile, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(UserError, match="expected flashtile to run from a git checkout"):
        commands.checkout()


def test_the_median_of_rounds_and_its_speed():
    records = [{"commit": "c", "rows": [row(ms, gbps=12 / ms)]} for ms in (1.0, 3.0, 2.0)]
    (merged,) = commands.merge(records)["rows"]
    assert merged["ms"] == 2.0 and merged["gbps"] == pytest.approx(6.0) and merged["round_ms"] == [1.0, 3.0, 2.0]
    broken = commands.merge([*records, {"commit": "c", "rows": [row(None, why="it broke")]}])["rows"][0]
    assert broken["ms"] is None and broken["why"] == "it broke"


def test_options_become_arguments_of_the_module():
    options = {"op": ["copy,rotary"], "cases": None, "impl": None, "quick": True, "seconds": 0.5, "jobs": None}
    assert commands.as_arguments("companions", options, CPU) == [
        *("companions", "--op", "copy", "rotary", "--impl", "flashtile-cpu", "--quick", "--seconds", "0.5")
    ]
    assert commands.as_arguments("train", {"impl": ["plain"], "quick": False}, CPU) == ["train", "--impl", "plain"]
    assert commands.ours("host-time", CPU) == ["flashtile-cpu"]
    assert commands.ours("train", CPU) == ["flashtile", "flashtile-fused-loss", "flashtile-compile"]


def test_flashtile_runs_from_this_checkout():
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("the tests run outside a git checkout")
    assert commands.checkout() == root
