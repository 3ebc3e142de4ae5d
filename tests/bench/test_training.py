"""Training steps: FLOPs counted by hand, the plain formula beside flashtile's, wrong training and dropout found."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import bert
from benchmarks.bert import IGNORED, Batch
from flashtile.bench import runner, training_steps
from flashtile.bench import training as problem
from flashtile.bench.base import Implementation, select_implementations
from flashtile.bench.commands import as_arguments, measure
from flashtile.bench.report import mean_tables, reasons, speed_tables
from flashtile.bench.start import UserError
from flashtile.bench.training import (
    IMPLEMENTATIONS,
    MODELS,
    TrainCase,
    Training,
    TrainProblem,
    build_plain,
    chosen_cases,
    make_tokens,
    make_weights,
    plain_logits,
    token_losses,
)
from flashtile.bench.training_steps import judge_losses, peak_tflops
from support.running.each_case import each_case

pytestmark = pytest.mark.usefixtures("short_measuring")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = TrainCase("gpt2-tiny", 3, 8, "fp32")
DROPPED = TrainCase("gpt2-tiny", 3, 16, "fp32", dropout_p=0.1)
BY_NAME = {each.name: each for each in IMPLEMENTATIONS}


def run(case, *chosen):
    return runner.run_case(case, chosen, CPU, TrainProblem)


def test_flops_count_the_models_products():
    sizes = MODELS["gpt2-tiny"]
    # Products of a token: four products of width², two of 4 · width², the head; attention sees (S / 2) keys, twice.
    products = sizes.layers * (4 + 8) * 64**2 + 256 * 64
    attention = sizes.layers * 2 * 2 * (8 / 2) * 64
    assert CASE.flops("fwd+bwd+step") == 3 * 3 * 8 * (2 * products + attention)


def test_models_have_the_parameters_of_gpt2():
    """GPT-2 small has 124 million with a vocabulary of 50,257, and medium 355."""
    for model, millions in (("gpt2-small", 124.48), ("gpt2-medium", 354.87)):
        weights = make_weights(TrainCase(model, 1, 1024), torch.device("meta"))
        assert sum(weight.numel() for weight in weights.values()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_a_trained_model_goes_on_training():
    """Its weights are those after the steps, its losses those of text that it has begun to learn."""
    case = replace(CASE, steps=60)
    before, after = make_weights(case, CPU), problem.trained_weights(case, CPU)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    tokens = make_tokens(case, CPU)
    assert 0 <= tokens.min() and tokens.max() < 256 and not torch.equal(tokens, make_tokens(CASE, CPU))
    losses = [build_plain(case, weights).loss(tokens).item() for weights in (before, after)]
    assert losses[1] < losses[0] - 0.1
    (row,) = run(case, BY_NAME["flashtile"])
    assert row["ms"] is not None and row["case"]["steps"] == 60 and "after60" in case.name


def changed(**changes):
    def build(case, weights):
        model = build_plain(case, weights)
        return replace(model, **{name: change(model) for name, change in changes.items()})

    return Implementation("changed", build=build)


def test_wrong_training_gets_no_speed():
    """Of wrong logits; of a loss of other labels; of a weight that is not trained; of fewer parameters."""

    def shifted(model):
        return lambda tokens: token_losses(model.logits(tokens[:, :-1]), tokens.roll(1, dims=1)).mean()

    def all_but_one(model):
        return [*model.parameters[:-1], torch.zeros_like(model.parameters[-1], requires_grad=True)]

    rows = run(
        CASE,
        changed(logits=lambda model: lambda tokens: model.logits(tokens) * 1.01),
        changed(loss=shifted),
        changed(parameters=all_but_one),
        changed(parameters=lambda model: model.parameters[:-1]),
    )
    assert all(row["ms"] is None for row in rows)
    of_logits, of_labels, of_weight, fewer = (row["why"] for row in rows)
    assert of_logits.startswith("wrong result: token_loss: largest error")
    assert "token_loss_after: largest error" in of_labels and "token_loss: " not in of_labels
    assert "token_loss_after" in of_weight
    assert fewer.startswith("ValueError: changed has")


@each_case("autocast", [False, True])
def test_parts_of_a_batch_train_as_the_whole(autocast):
    weights, tokens = make_weights(CASE, CPU), make_tokens(CASE, CPU)
    whole, parts = (Training(build_plain(CASE, weights), tokens, autocast, batch).results("") for batch in (None, 2))
    wide = {name: weight.double() for name, weight in weights.items()}
    exact = Training(build_plain(CASE, wide), tokens, False, None).results("")
    verdict = judge_losses(parts, exact, whole, autocast)
    assert verdict.why is None, verdict


def test_peaks_are_known_by_name(monkeypatch):
    assert peak_tflops(CPU) is None
    for name, peak in (("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA X1", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(CUDA) == peak


def test_choosing():
    assert [case.name for case in chosen_cases({"model": ["gpt2-medium"], "batch": 4}, CUDA)] == [
        "gpt2-medium-b4-s1024-bf16"
    ]
    assert [case.model for case in chosen_cases({}, CUDA)] == ["gpt2-small", "gpt2-medium"]
    assert [each.name for each in select_implementations(IMPLEMENTATIONS, [], CUDA)] == [
        "flashtile", "flashtile-fused-loss", "flashtile-compile",
        "transformers-eager", "transformers-sdpa", "transformers-compile",
    ]  # fmt: skip
    with pytest.raises(UserError, match="--model: no gpt2-small on cpu; there are: gpt2-tiny"):
        chosen_cases({"model": ["gpt2-small"]}, CPU)


def test_contexts_keep_the_number_of_tokens():
    names = [case.name for case in chosen_cases({"model": ["gpt2-small"], "context": [1024, 4096, 65536]}, CUDA)]
    assert names == ["gpt2-small-b16-s1024-bf16", "gpt2-small-b4-s4096-bf16", "gpt2-small-b1-s65536-bf16"]
    assert [case.B for case in chosen_cases({"batch": 2, "context": [4096]}, CUDA)] == [2, 2]
    arguments = as_arguments("train", {"model": ["gpt2-small"], "context": [1024, 4096], "batch": 2}, CUDA)
    assert arguments[1:8] == ["--model", "gpt2-small", "--context", "1024", "4096", "--batch", "2"]


def test_of_long_contexts_the_first_tokens_are_checked(monkeypatch):
    monkeypatch.setattr(problem, "_CHECKED_TOKENS", 5)
    oracle_tokens = []

    def watched(case, weights):
        model = build_plain(case, weights)
        return replace(model, loss=lambda tokens: (oracle_tokens.append(tokens.shape[1]), model.loss(tokens))[1])

    monkeypatch.setattr(problem, "build_plain", watched)
    case = replace(CASE, S=12)
    (row,) = run(case, BY_NAME["flashtile"])
    assert set(oracle_tokens) == {6}, "the oracle holds all scores, and sees no whole sequence"
    assert row["ms"] is not None and row["case"]["S"] == 12
    results = Training(build_plain(case, make_weights(case, CPU)), make_tokens(case, CPU), False).results("")
    assert results["token_loss"].shape == (3, 5)
    wrong = changed(logits=lambda model: lambda tokens: model.logits(tokens) * 1.01)
    assert run(case, wrong)[0]["why"].startswith("wrong result")


def test_what_has_no_memory_for_a_whole_sequence_is_a_reason(monkeypatch):
    monkeypatch.setattr(problem, "_CHECKED_TOKENS", 5)

    def short_of_memory(model):
        def loss(tokens):
            if tokens.shape[1] > 6:
                raise torch.OutOfMemoryError("tried to allocate all scores")
            return model.loss(tokens)

        return loss

    small, right = run(replace(CASE, S=12), changed(loss=short_of_memory), BY_NAME["plain"])
    assert small["ms"] is None and small["why"] == "left out: it does not fit the memory that is free on this GPU"
    assert right["ms"] is not None


def test_tables_of_training():
    def row(impl, tokens_per_s, **more):
        ms = None if tokens_per_s is None else 72e3 / tokens_per_s
        figures = {"ms": ms, "tflops": 1.0, "tokens_per_s": tokens_per_s, "mfu": 0.25}
        return {"op": "train-step", "phase": "fwd+bwd+step", "impl": impl, "case": CASE.record(), **figures, **more}

    rows = [row("flashtile", 200.0), row("transformers-sdpa", 100.0), row("other", None, mfu=None, why="no")]
    speeds, shares = speed_tables(rows)
    assert speeds.lines == [["gpt2-tiny-b3-s8-fp32", "200", "100", "2.00"]]
    assert shares.lines == [["gpt2-tiny-b3-s8-fp32", "25.0%", "25.0%"]]
    assert mean_tables(rows)[0].lines[0][:3] == ["flashtile / best peer", "fwd+bwd+step", "2.00"]
    assert reasons(rows) == ["other: no (gpt2-tiny-b3-s8-fp32 fwd+bwd+step)"]


# --- with dropout ---------------------------------------------------------------------------------------------------


def bert_case():
    tokens, mask = torch.randint(5, 128, (12, 16)), torch.ones(12, 16, dtype=torch.bool)
    mask[::2, 9:] = False
    labels = tokens.masked_fill(torch.rand(12, 16) > 0.3, IGNORED).masked_fill(~mask, IGNORED)
    batch = Batch(tokens.masked_fill(~mask, 0), labels, mask, int(mask.sum()))
    return bert.BertCase("bert-tiny", 12, 16, "fp32", tuple(mask.sum(1).tolist()), 0.1), batch


def run_bert(case, batch, *chosen):
    return runner.run_case(case, chosen, CPU, lambda case, device: bert.BertProblem(batch, case, device))


@pytest.mark.parametrize("dtype, transformers", [("fp32", ("eager", "sdpa", "flashtile")), ("bf16", ())])
def test_right_dropout_gets_a_speed(dtype, transformers):
    """Which is judged after the same training without dropout."""
    if transformers:
        pytest.importorskip("transformers")
    case, names = replace(DROPPED, dtype=dtype), ["flashtile", "flashtile-fused-loss", "plain"]
    for row in run(case, *(BY_NAME[name] for name in (*names, *(f"transformers-{name}" for name in transformers)))):
        assert row["ms"] is not None, row
        assert (row["op"], row["phase"], row["case"]) == ("train-step", "fwd+bwd+step", case.record())
        assert row["tokens_per_s"] == pytest.approx(case.tokens / row["ms"] * 1e3) and row["mfu"] is None
        assert row["tflops"] == pytest.approx(case.flops("") / row["ms"] / 1e9)


@pytest.mark.slow
def test_right_dropout_of_bert_gets_a_speed():
    """What drops nothing gets none."""
    pytest.importorskip("transformers")

    def build(config, state):
        return bert._flashtile(replace(config, dropout=0.0, attention_dropout=0.0), state)

    right = [bert.IMPLEMENTATIONS[name] for name in ("flashtile", "transformers-sdpa", "transformers-flashtile")]
    *rows, wrong = run_bert(*bert_case(), *right, Implementation("other", build=build))
    for row in rows:
        assert row["ms"] is not None, row
        assert row["case"]["dropout_p"] == 0.1
    assert wrong["ms"] is None and wrong["why"].startswith("wrong dropout: dropout_spread: mean 0.000e+00")


def test_wrong_dropout_gets_no_speed():
    """Of another probability; with the gradients of what was not dropped; training that is wrong without dropout."""

    def of_probability(dropout_p):
        return lambda case, weights: build_plain(replace(case, dropout_p=dropout_p), weights)

    def build_whole(case, weights):
        model = build_plain(case, weights)
        same = dict(zip(weights, model.parameters, strict=True))

        def loss(tokens):
            gradient = token_losses(plain_logits(case, same, tokens[:, :-1], 0.0), tokens).mean()
            return model.loss(tokens).detach() + gradient - gradient.detach()

        return replace(model, loss=loss)

    def build_wrong(case, weights):
        model = build_plain(case, weights)
        return replace(model, logits=lambda tokens: 1.01 * model.logits(tokens))

    builds = of_probability(0.0), of_probability(0.2), build_whole, build_wrong
    rows = run(replace(DROPPED, S=32), *(Implementation("other", build=build) for build in builds))
    assert all(row["ms"] is None for row in rows)
    none, more, whole, wrong = (row["why"] for row in rows)
    assert "dropout_fall: mean" in none and "dropout_fall: mean" in more
    assert whole.startswith("wrong dropout: dropout_fall: mean") and "dropout_rise" not in whole
    assert wrong.startswith("wrong result: token_loss")


def test_training_begins_again_after_the_check_without_dropout():
    """The effect of dropout is measured from the first weights, with a new optimizer."""
    weights, tokens = make_weights(DROPPED, CPU), make_tokens(DROPPED, CPU)
    once, alone = (Training(build_plain(DROPPED, weights), tokens, False, drops=True) for _ in range(2))
    found, expected = once.results(""), training_steps.sample(alone, tokens)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_is_compiled_is_compiled_for_training_alone():
    """The check without dropout runs eagerly, and steps with dropout are one graph that is compiled once."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def build(case, weights):
        model = build_plain(case, weights)
        return replace(model, loss=torch.compile(model.loss, backend=backend, fullgraph=True, dynamic=False))

    (row,) = run(DROPPED, Implementation("other", build=build))
    assert row["ms"] is not None, row
    assert len(graphs) == 1


def test_samples_that_are_not_finite_are_wrong():
    reference = {"dropout_rise": torch.tensor([0.0, 1.0, 2.0])}
    assert training_steps.judge_dropout(reference, reference).why is None
    verdict = training_steps.judge_dropout({"dropout_rise": torch.tensor([0.0, 1.0, float("nan")])}, reference)
    assert verdict.why is not None and verdict.error == float("inf")


def test_cases_and_records_say_the_dropout(tmp_path):
    (case,) = chosen_cases({"model": ["gpt2-small"], "dropout": 0.1}, CUDA)
    assert case.name == "gpt2-small-b16-s1024-p0.1-bf16" and case.record()["dropout_p"] == 0.1
    assert "dropout_p" not in replace(case, dropout_p=0.0).record()
    arguments = as_arguments("train", {"model": ["gpt2-small"], "dropout": 0.1}, CUDA)
    assert arguments[1:5] == ["--model", "gpt2-small", "--dropout", "0.1"]
    output = tmp_path / "record.json"
    record = measure(
        "train", {"model": ["gpt2-tiny"], "impl": ["plain"], "batch": 1, "dropout": 0.1, "seconds": 0.0}, output
    )
    assert json.loads(output.read_text()) == record
    assert speed_tables(record["rows"])[0].lines[0][0] == "gpt2-tiny-b1-s64-p0.1-fp32"


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, float("nan")])
def test_what_is_no_probability_is_refused(dropout_p, capsys):
    with pytest.raises(UserError, match=r"--dropout: expected a probability in \[0, 1\), got"):
        chosen_cases({"dropout": dropout_p}, CPU)
    assert bert.main(["--model=bert-tiny", f"--dropout={dropout_p}"]) == 2
    assert "--dropout: expected a probability" in capsys.readouterr().err
