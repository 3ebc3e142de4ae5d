"""The training script as a whole: it learns, goes on bit for bit, and is the same over several processes."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import train_gpt
from gpt_training.learner import Learner
from support.models.training_runs import (
    Run,
    arguments_of,
    assert_close,
    assert_same_bits,
    entries,
    launch,
    torchrun,
    without_the_last_checkpoint,
)

# A checkpoint is read here in a process that has joined no others.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def train(text, tmp_path):
    """Runs the program: `train(folder, options...)`, a small model with everything written in each third step."""

    def run(folder: Path | str, *options: Any, device: str = "cpu") -> int:
        return train_gpt.main(arguments_of(text, tmp_path, folder, *options, device=device))

    return run


def _interrupt(monkeypatch: pytest.MonkeyPatch, when: int, how: Callable[[], None]) -> None:
    """Does something before the step of this number."""
    step = Learner.step

    def interrupted(self: Learner, number: int, batches: list[torch.Tensor]) -> Any:
        if number == when:
            how()
        return step(self, number, batches)

    monkeypatch.setattr(Learner, "step", interrupted)


def test_learns_reports_and_samples(train, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ["--steps=60", "--batch=8", "--learning-rate=5e-3", "--log-every=20", "--peak-tflops=0.5"]
    assert train("run", *options, "--prompt=the key", "--sample=20", "--temperature=0", "--plot") == 0
    entries = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    assert {1, 20, 40, 60} <= losses.keys()
    assert losses[1] > 5.3 and losses[60] < 2.8
    assert entries[-1]["validation_loss"] < 2.8
    reported = next(entry for entry in entries if entry["step"] == 20)
    assert reported["tokens_per_second"] > 0 and 0 < reported["mfu"] < 1
    out = capsys.readouterr().out
    assert "125,248 parameters, fp32, 1 × CPU" in out and "\nthe key" in out
    assert len(out.split("\nthe key")[1].rstrip("\n")) <= 20
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_signal_ends_it_and_it_resumes_bit_for_bit(train, tmp_path, monkeypatch, capsys):
    options = ["--model=gpt2-small", "--layers=2", "--heads=2", "--width=32", "--context=48"]
    options += ["--precision=bf16", "--fused-loss", "--dropout=0.2", "--accumulate=2"]
    assert train("whole", *options) == 0
    with monkeypatch.context() as patch:
        _interrupt(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("parts", *options) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 5" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train("parts", *options, "--resume") == 0
    assert "resumed after step 5" in capsys.readouterr().out
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_a_killed_run_resumes_from_its_last_checkpoint_bit_for_bit(train, tmp_path, monkeypatch, capsys):
    assert train("whole") == 0

    def die() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        _interrupt(patch, 4, die)
        with pytest.raises(MemoryError):
            train("parts")
    assert [entry["step"] for entry in entries(tmp_path / "parts")][-1] == 4
    with (tmp_path / "parts/metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "lo')
    assert train("parts", "--resume") == 0
    assert "resumed after step 3" in capsys.readouterr().out
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


def test_a_checkpoint_that_was_cut_off_is_none(train, tmp_path, monkeypatch, capsys):
    save = dcp.save

    def cut_off(state: Any, checkpoint_id: Path) -> None:
        save(state, checkpoint_id=checkpoint_id)
        if "6" in checkpoint_id.name:
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", cut_off)
        with pytest.raises(OSError, match="no space"):
            train("run")
    assert (tmp_path / "run/step-00000006.partial").is_dir()
    assert train("run", "--resume") == 0
    assert "resumed after step 3" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-00000003", "step-00000006"]


def test_keeps_the_newest_checkpoints(train, tmp_path):
    assert train("run", "--save-every=1", "--keep=3") == 0
    assert sorted(p.name[-1] for p in (tmp_path / "run").glob("step-*")) == ["4", "5", "6"]


def test_resuming_without_a_checkpoint_begins_and_after_the_end_does_nothing(train, tmp_path, capsys):
    assert train("run", "--resume") == 0
    assert "starting at the first step" in capsys.readouterr().out
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert train("run", "--resume") == 0
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_terminal_gets_a_bar_and_the_same_lines(train, monkeypatch, capsys):
    pytest.importorskip("rich")
    assert train("plain") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert train("bar") == 0
    shown = capsys.readouterr().out
    assert len(lines) == 2 and all(line in shown for line in lines)
    assert "6/6" in shown


@pytest.mark.slow
def test_compiled_is_the_same(train, tmp_path, monkeypatch):
    """`torch.compile` stops short of generating C++."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert train("eager", "--layers=1") == train("compiled", "--layers=1", "--compile") == 0
    assert_close(tmp_path / "eager", tmp_path / "compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [["--fused-loss"], ["--dropout=0.1", "--accumulate=2"], ["--compile"]], ids=str)
def test_resumes_bit_for_bit_on_a_gpu(options, train, tmp_path, monkeypatch):
    train = partial(train, device="cuda")
    # With this many tokens more than two tiles of keys add to a gradient of queries, so that their order shows.
    options = [*options, "--model=llama-small", "--layers=2", "--context=1024", "--peak-tflops=100", "--sample=10"]
    assert train("whole", *options) == 0
    with monkeypatch.context() as patch:
        _interrupt(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train("parts", *options) == 128 + signal.SIGTERM
    assert train("parts", *options, "--resume") == 0
    assert_same_bits(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.gpu
def test_learns_on_a_gpu(train, tmp_path):
    assert train("run", "--steps=60", "--batch=8", "--learning-rate=5e-3", "--log-every=20", device="cuda") == 0
    assert entries(tmp_path / "run")[-1]["validation_loss"] < 2.8


def test_activations_made_again_are_the_same(train, tmp_path):
    assert train("kept", "--dropout=0.1") == train("again", "--dropout=0.1", "--checkpoint-activations") == 0
    assert_same_bits(tmp_path / "kept", tmp_path / "again")


@pytest.mark.slow
def test_processes_that_divide_batches_weights_and_sequences_are_one(train, text, tmp_path):
    """FSDP under torchrun; tensor and context parallel, with FSDP and with DDP. Their checkpoints go on in one process
    and in several, and one's in four."""
    assert train("one") == 0
    of = partial(arguments_of, text, tmp_path)
    torchrun(2, of("sharded", "--batch=1", "--accumulate=2", "--parallel=fsdp", "--sample=5"))
    shared = of("shared", "--batch=2", "--cp=2", "--parallel=fsdp", "--checkpoint-activations", "--fused-loss")
    in_two = of("shared-in-two", "--cp=2", "--cp-strategy=all_to_all", "--fused-loss", "--resume")
    in_four = of("one-in-four", "--tp=2", "--batch=2", "--parallel=fsdp", "--resume")
    runs = (
        Run(4, of("cut", "--tp=2", "--cp=2", "--parallel=fsdp", "--sample=5")),
        Run(4, in_four, (tmp_path / "one", tmp_path / "one-in-four")),
        Run(4, shared),
        Run(2, in_two, (tmp_path / "shared", tmp_path / "shared-in-two")),
    )
    assert launch(runs, tmp_path) == [[], [], [], []]
    for folder in ("sharded", "cut"):
        without_the_last_checkpoint(tmp_path / folder, tmp_path / f"{folder}-in-one")
        assert train(f"{folder}-in-one", "--resume") == 0
    for folder in ("sharded", "sharded-in-one", "cut", "cut-in-one", "one-in-four", "shared", "shared-in-two"):
        assert_close(tmp_path / "one", tmp_path / folder)
