"""The benchmark of context parallelism: its record, its cases, and what it does with what cannot run."""

from __future__ import annotations

import functools
import json
import shlex

import pytest
import torch
import torch.multiprocessing as mp

from flashtile.bench.distributed import PHASES, bench_distributed, cases_named
from flashtile.bench.start import UserError
from flashtile.bench.timing import covered, describe_profile, summary
from support.distributed.processes import forking


@pytest.mark.slow
def test_a_record_of_two_processes(tmp_path, capfd, monkeypatch):
    output = tmp_path / "record.json"
    arguments = ["--gpus=2", "--impl", "flashtile-ring", "torch-cp-alltoall"]
    monkeypatch.setattr("sys.argv", ["flashtile", "bench", "distributed", "--output", str(output), *arguments])
    forking(afresh=True)
    monkeypatch.setattr(mp, "spawn", functools.partial(mp.start_processes, start_method="forkserver"))
    bench_distributed(output, gpus=2, impl=arguments[2:])
    record = json.loads(output.read_text("utf-8"))
    assert record["command"] == "flashtile bench distributed --gpus=2 --impl flashtile-ring torch-cp-alltoall"
    rows = {(row["impl"], row["phase"]): row for row in record["rows"]}
    assert set(rows) == {
        (impl, phase) for impl in ("flashtile-one-gpu", "flashtile-ring", "torch-cp-alltoall") for phase in PHASES
    }
    case = rows["flashtile-ring", "fwd"]["case"]
    assert all(row["case"] == case and case["gpus"] == 2 for row in record["rows"])
    alone, ring = rows["flashtile-one-gpu", "fwd"], rows["flashtile-ring", "fwd"]
    assert alone["efficiency"] == 1.0
    assert alone["ms"] == pytest.approx(sum(alone["ms_of_gpus"]) / 2)
    assert ring["efficiency"] == pytest.approx(alone["ms"] / (2 * ring["ms"]))
    assert 0 < ring["error"] < 1e-5
    if not torch.cuda.is_available():
        failed = rows["torch-cp-alltoall", "fwd"]
        assert failed["ms"] is None and "NotImplementedError" in failed["why"]
    said = capfd.readouterr()
    assert "flashtile-ring" in said.out and "Traceback" not in said.err
    assert torch.cuda.is_available() or said.out.startswith("no GPU is here: one case of 128 tokens"), said.out


def test_cases_are_of_all_gpus_together():
    cases = cases_named("cuda", 4)
    assert {case.S for case in cases} == {2**15, 2**17, 2**18, 2**19}
    assert {case.causal for case in cases if case.S < 2**19} == {True, False}
    assert max(case.S for case in cases_named("cuda", 4, quick=True)) == 2**17
    causal, full = (next(c for c in cases if c.causal is kind and c.S == 2**15) for kind in (True, False))
    assert full.flops("fwd") == 2 * causal.flops("fwd") == 4 * 32 * 2**30 * 128
    assert full.flops("fwd+bwd") == 3.5 * full.flops("fwd")
    assert full.cut(2048).S == 2048 and full.cut(2**20) == full


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lengths": [7]}, r"--lengths: no 7 on this benchmark; there are: \d+"),
        ({"mask": "none"}, "--mask: no none on this benchmark; there are: both, causal, full"),
        ({"impl": ["nothing"]}, "--impl: no nothing on"),
        ({"seconds": -1.0}, "--seconds: expected a time of at least 0, got -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_match_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        bench_distributed(tmp_path / "record.json", **options)
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="--output: expected a file that can be written, got"):
        bench_distributed(tmp_path, gpus=None)


def test_the_command_is_the_module_and_passes_its_options_on(tmp_path, monkeypatch):
    pytest.importorskip("typer")
    from flashtile.bench import distributed
    from support.running.command_line import invoke

    seen = []
    monkeypatch.setattr(distributed, "bench_distributed", lambda output, **options: seen.append((output, options)))
    given = shlex.split(
        "--gpus 2 --quick --lengths 64 128 --mask causal --impl a b,c --seconds 0.5 --profile --limit 9"
    )
    result = invoke("bench", "distributed", "--output", str(tmp_path / "r.json"), *given)
    assert result.exit_code == 0, result.output
    expected = {
        "gpus": 2, "quick": True, "lengths": [64, 128], "mask": "causal", "impl": ["a", "b", "c"], "seconds": 0.5,
        "profile": True, "limit": 9.0,
    }  # fmt: skip
    assert seen == [(tmp_path / "r.json", expected)]


def test_what_is_covered():
    assert covered([], [(0, 1)]) is None
    assert covered([(0, 2), (1, 4)], [(1, 2), (3, 9)]) == 0.5
    assert covered([(0, 1)], [(0, 1), (0, 1)]) == 1.0


def test_a_profile_says_what_is_hidden():
    kernels = [
        ("attention_forward_kernel", (0.0, 3000.0)), ("ncclDevKernel_SendRecv", (1000.0, 5000.0)),
        ("merge_part_kernel", (3000.0, 4000.0)), ("vectorized_elementwise_kernel", (6000.0, 7000.0)),
    ]  # fmt: skip
    found = summary(kernels, 1)
    assert found == {"attention": 3, "transfers": 4, "merging": 1, "other": 1, "idle": 1, "hidden": 0.75}
    assert summary(kernels, 2)["attention"] == 1.5
    assert describe_profile(found).endswith("idle 1.000 ms  hidden 0.75")
    assert summary([], 1) == {}
