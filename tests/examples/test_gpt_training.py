"""The parts of the training script: data, schedule, gradients, what is counted, and the errors."""

import dataclasses
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
import train_gpt
from flashtile import testing
from flashtile.bench.training import TrainCase
from flashtile.models import GPT
from gpt_training import data
from gpt_training.learner import MODELS, Learner, learning_rate, model_config
from gpt_training.options import OptionError, Options, flag, parse
from gpt_training.processes import Processes, join_processes
from gpt_training.report import flops_of_token, peak_flops, peak_of_name

_CPU = torch.device("cpu")


@pytest.fixture
def alone():
    with join_processes("cpu", 1.0) as processes:
        yield processes


@pytest.fixture
def make(text, tmp_path):
    """Options, with the text and a small model unless told otherwise."""

    def options(**given: Any) -> Options:
        return Options(**{"data": text, "output": tmp_path / "run", "model": "tiny", "device": "cpu", **given})

    return options


def _open(options: Options, processes: Processes, context: int = 16) -> data.Text:
    return data.open_text(options, data.make_codec(options), context, processes)


# Data


def test_bytes_of_all_files_in_order(make, alone, tmp_path):
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    for name, content in (("b/one.txt", "second é"), ("a.txt", "first" * 10), ("c.txt", "third"), (".hidden", "no")):
        (folder / name).write_text(content, "utf-8")
    text = _open(make(data=folder, validation_share=0.3), alone, context=2)
    stored = bytes(torch.cat((text.training, text.validation)).tolist())
    assert stored == b"first" * 10 + b"\0" + "second é".encode() + b"\0third\0"
    assert len(text.validation) == int(0.3 * len(stored))
    assert text.codec.decode(text.codec.encode("naïve")) == "naïve"


def test_tokens_are_made_once_and_again_when_the_text_changes(make, alone, tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("some text " * 100)
    options = make(data=file)
    before = _open(options, alone)
    with monkeypatch.context() as patch:
        patch.setattr(data.ByteCodec, "encode_file", None)  # would fail
        assert _open(options, alone).fingerprint == before.fingerprint
    file.write_text("some test " * 101)
    assert _open(options, alone).fingerprint != before.fingerprint
    assert not list(options.cache_folder.glob("*.partial"))


def test_a_tokenizer_with_an_end_of_text(make, alone, text, tmp_path):
    pytest.importorskip("tokenizers")
    options = make(tokenizer=_write_tokenizer(text, tmp_path), end_of_text="<end>")
    opened = _open(options, alone)
    assert opened.training.dtype is torch.uint16 and opened.codec.vocabulary == 64
    tokens = [*opened.training.tolist(), *opened.validation.tolist()]
    assert opened.codec.decode(tokens) == text.read_text("utf-8") + "<end>"
    assert opened.codec.decode(opened.codec.encode("the tile")) == "the tile"
    without = _open(replace(options, end_of_text=None), alone)
    assert len(without.training) + len(without.validation) == len(tokens) - 1


def test_samples_with_a_tokenizer(make, text, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    options = make(tokenizer=_write_tokenizer(text, tmp_path), steps=1, sample=3, prompt="the tile")
    assert train_gpt.main(_arguments(options)) == 0
    assert "\nthe tile" in capsys.readouterr().out


def _write_tokenizer(text: Path, folder: Path) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=100, special_tokens=["<end>"], show_progress=False)
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _arguments(options: Options, *more: str) -> list[str]:
    """A command line for these options."""
    given = ((f.name, getattr(options, f.name)) for f in dataclasses.fields(options) if f.type != "bool")
    return [*(f"{flag(name)}={value}" for name, value in given if value is not None), *more]


def test_batches_are_a_function_of_seed_and_step_however_they_are_divided(make, alone):
    options = make(batch=2, accumulate=3)
    text = _open(options, alone)

    def windows(step: int, batch: int, accumulate: int, size: int, seed: int = 0) -> list[list[int]]:
        own = replace(options, batch=batch, accumulate=accumulate, seed=seed)
        shares = [data.training_batches(text, step, 16, own, Processes(r, size, _CPU, True)) for r in range(size)]
        assert {tuple(batch.shape) for share in shares for batch in share} == {(own.batch, 17)}
        return torch.cat([torch.cat(share) for share in shares]).sort(0).values.tolist()

    assert windows(5, 12, 1, 1) == windows(5, 2, 6, 1) == windows(5, 2, 3, 2) == windows(5, 1, 3, 4)
    assert windows(5, 12, 1, 1) != windows(6, 12, 1, 1)
    assert windows(5, 12, 1, 1) != windows(5, 12, 1, 1, seed=1)


def test_windows_reach_every_token_and_no_further(make, alone):
    text = data.Text(
        torch.arange(20, dtype=torch.uint8), torch.arange(100, 120, dtype=torch.uint8), "", data.ByteCodec()
    )
    options = make(batch=200, validation_batches=2)
    (batch,) = data.training_batches(text, 0, 16, options, alone)
    assert batch.dtype is torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(17).expand(200, 17))
    assert set(batch[:, 0].tolist()) == {0, 1, 2, 3}
    validation = torch.cat(list(data.validation_batches(text, 16, options, alone)))
    assert validation.shape == (400, 17)
    assert (validation[0, 0], validation[-1, -1]) == (100, 119)


# Schedule, gradients, counts


def test_the_learning_rate_rises_straight_and_falls_as_a_cosine(make):
    options = make(steps=101, warm_up=20, learning_rate=1.0, minimum_learning_rate=0.2)
    assert [learning_rate(step, options) for step in (0, 9, 19, 20)] == pytest.approx([0.05, 0.5, 1.0, 1.0])
    assert [learning_rate(step, options) for step in (60, 100)] == pytest.approx([0.6, 0.2])
    assert learning_rate(0, make(steps=1, warm_up=0)) == pytest.approx(6e-5)
    assert learning_rate(1, make(steps=2, warm_up=2)) == pytest.approx(6e-4)


def _gradients(learner: Learner, batches: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What the optimizer sees."""
    seen: list[torch.Tensor] = []
    learner._optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in learner._model.parameters())
    )
    learner.step(0, batches)
    return tuple(seen)


def test_gradients_of_two_batches_are_those_of_one(make, alone):
    options = make(clip=0.0)
    config = model_config(options, 256)
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    learner, whole = Learner(config, options, alone), Learner(config, options, alone)
    exact = GPT(config, dtype=torch.float64)
    exact.load_state_dict(learner._model.state_dict())
    exact.loss(tokens).backward()
    found, eager = _gradients(learner, list(tokens.split(4))), _gradients(whole, [tokens])
    for (name, parameter), ours, plain in zip(exact.named_parameters(), found, eager, strict=True):
        testing.assert_close(name, ours, parameter.grad, plain)


def test_gradients_are_clipped_and_matrices_alone_decay(make, alone):
    options = make(clip=1e-3, model="gpt2-small", layers=1, heads=2, width=8, context=32)
    learner = Learner(model_config(options, 256), options, alone)
    gradients = _gradients(learner, [torch.arange(66).view(2, 33)])
    assert torch.cat([g.flatten() for g in gradients]).norm() == pytest.approx(1e-3, rel=1e-3)
    decay, none = learner._optimizer.param_groups
    assert {p.dim() for p in decay["params"]} == {2} and {p.dim() for p in none["params"]} == {1}
    assert (decay["weight_decay"], none["weight_decay"]) == (0.1, 0.0)


def test_only_the_last_batch_of_a_step_synchronises(make, alone):
    options = make()
    learner = Learner(model_config(options, 256), options, replace(alone, launched=True))
    calls: list[int] = []

    def hook(state, bucket):
        calls.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    learner._loss.register_comm_hook(None, hook)
    learner.step(0, [torch.zeros(1, 17, dtype=torch.int64)] * 3)
    assert calls and len(calls) == len(set(calls))


def test_weights_are_those_of_the_seed_and_dropout_that_of_seed_and_step(make, alone):
    config = model_config(make(dropout=0.5), 256)
    batch = [torch.arange(34).view(2, 17)]

    def loss(step: int = 0, **options: Any) -> float:
        torch.manual_seed(torch.seed())
        return float(Learner(config, make(dropout=0.5, **options), alone).step(step, batch)[0])

    assert loss() == loss() != loss(step=1)
    assert loss() != loss(seed=1)


def test_attention_is_asked_for_the_same_gradients_in_every_run(make, alone, monkeypatch):
    asked = []

    def attention(*tensors, deterministic=False, **options):
        asked.append(deterministic)
        return original(*tensors, deterministic=deterministic, **options)

    original = flashtile.attention
    monkeypatch.setattr(flashtile, "attention", attention)
    options = make()
    Learner(model_config(options, 256), options, alone).step(0, [torch.zeros(2, 17, dtype=torch.int64)])
    assert asked and all(asked)


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-medium"])
def test_counts_the_work_of_a_model_as_the_benchmark_does(name):
    config = replace(MODELS[name], vocabulary=50304)
    case = TrainCase(name, 1, config.context)
    assert flops_of_token(GPT(config, device="meta")) == case.flops("fwd+bwd+step") / case.tokens


def test_peaks_by_name():
    names = {
        "NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L4": 121, "NVIDIA L40": None, "NVIDIA H20": None, "AMD Instinct MI300X": 1307.4,
    }  # fmt: skip
    assert {name: peak_of_name(name) for name in names} == {name: peak and peak * 1e12 for name, peak in names.items()}
    assert peak_flops(_CPU, "bf16", None) is None and peak_flops(_CPU, "fp32", 2.0) == 2e12


# Options and errors


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Options):
        assert f"  {flag(field.name)} " in shown or f"  {flag(field.name)}\n" in shown
        assert len(field.metadata["help"]) > 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": Path("nowhere")}, "--data: expected a text file or a folder of them, got nowhere"),
        ({"tokenizer": Path("nowhere")}, "--tokenizer: expected a tokenizer.json, got nowhere"),
        ({"end_of_text": "<end>"}, "--end-of-text: expected with --tokenizer only"),
        ({"steps": 0}, "--steps: expected at least 1, got 0"),
        ({"dropout": 1.0}, "--dropout: expected less than 1, got 1"),
        ({"clip": float("nan")}, "--clip: expected at least 0, got nan"),
        ({"data": Path("docs"), "output": Path("docs/run")}, "--output: expected a folder outside of --data, docs"),
        ({"data": Path("docs"), "cache": Path("docs")}, "--cache: expected a folder outside of --data, docs, got docs"),
        ({"output": Path("README.md")}, "--output: expected a folder, got README.md, as .*README.md is a file"),
        ({"cache": Path("README.md/cache")}, "--cache: expected a folder, got README.md/cache, as .*README.md is a"),
        ({"steps": 5, "warm_up": 6}, "--warm-up: expected at most --steps, 5, got 6"),
        ({"minimum_learning_rate": 1.0}, "--minimum-learning-rate: expected at most --learning-rate"),
        ({"parallel": "tp"}, "--parallel: expected one of ddp, fsdp, got 'tp'"),
        ({"sample": 1, "prompt": ""}, "--prompt: expected at least one character"),
    ],
)
def test_values_that_do_not_do(given, message, make, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(OptionError, match=message):
        make(**given)


@pytest.mark.parametrize("package, option", [("matplotlib", {"plot": True}), ("tokenizers", {"tokenizer": None})])
def test_says_which_package_is_missing(package, option, make, text, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(OptionError, match=f"needs {package}, which is not installed: pip install"):
        make(**{name: value or text for name, value in option.items()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context=30000"], "--data: expected at least 30001 tokens (the context and one) each for training and"),
        (["--width=10"], "model: width: expected a multiple of heads, 4, got 10"),
        (["--heads-kv=3"], "model: num_heads_kv: expected"),
        (["--sample=100"], "--sample: expected at most 60 tokens after the prompt's 4 (the context is 64), got 100"),
        (["--cp=3"], "--cp: expected a divisor of the number of processes, 1, got 3; start a multiple of 3"),
        (["--tp=2", "--parallel=fsdp"], "--tp: expected a divisor of the number of processes, 1, got 2"),
        (["--tp=2"], "--tp: expected with --parallel fsdp, without --dropout and without --compile"),
        (["--cp=2", "--compile"], "--compile: expected without --cp, got both"),
        (["--parallel=fsdp"], "--parallel: expected ddp in a process alone, got fsdp; start with torchrun"),
        (["--learning-rate=1e30", "--warm-up=0"], "--learning-rate: expected one at which loss and gradients stay"),
    ],
)
def test_mistakes_end_with_their_message(arguments, message, make, capsys):
    assert train_gpt.main(_arguments(make(steps=3, log_every=1), *arguments)) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"error: {message}") and found.count("\n") == 1


def test_mistakes_in_files(make, text, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").write_bytes("é".encode("latin-1") * 200)
    (tmp_path / "bad.json").write_text("{}")
    tokenizer = _write_tokenizer(text, tmp_path)
    for options, message in (
        (make(data=tmp_path / "empty"), "--data: expected at least one file in the folder, got none"),
        (make(tokenizer=tmp_path / "bad.json"), "--tokenizer: expected a tokenizer.json, got"),
        (make(tokenizer=tokenizer, end_of_text="<stop>"), "--end-of-text: expected a token of"),
        (make(tokenizer=tokenizer, sample=1, prompt="é"), "--prompt: expected text that the tokenizer knows, got 'é'"),
        (make(tokenizer=tokenizer, data=tmp_path / "latin"), "--data: expected UTF-8 with --tokenizer, got"),
    ):
        assert train_gpt.main(_arguments(options)) == 2
        assert f"error: {message}" in capsys.readouterr().err


def test_a_checkpoint_of_another_training(make, tmp_path, capsys):
    options = make(steps=2, batch=2)
    assert train_gpt.main(_arguments(options)) == 0
    (tmp_path / "other.txt").write_text("another text " * 100)
    cases = {
        "--output: expected a folder without checkpoints": [],
        "--resume: expected the model of": ["--resume", "--layers=3"],
        "--data: expected the text that": ["--resume", f"--data={tmp_path / 'other.txt'}"],
        "--seed: expected 0 as in": ["--resume", "--seed=1"],
        "--warm-up: expected 0 as in": ["--resume", "--warm-up=1"],
        "--precision: expected fp32 as in": ["--resume", "--precision=bf16"],
        "sequences in a step: expected 2 as in": ["--resume", "--accumulate=2"],
    }
    for message, arguments in cases.items():
        assert train_gpt.main([*_arguments(options), *arguments]) == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert json.loads((options.output / "step-00000002/run.json").read_text())["step"] == 2
