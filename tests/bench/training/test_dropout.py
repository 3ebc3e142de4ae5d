"""Training steps with dropout: every implementation drops in every place, and wrong dropout gets no speed."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.bert import __main__ as bert_script
from benchmarks.bert import problem as bert
from benchmarks.bert.batches import IGNORED, Batch
from flashtile.bench import runner
from flashtile.bench import training_steps as dropout
from flashtile.bench.base import Implementation
from flashtile.bench.commands import as_arguments, measure
from flashtile.bench.report import speed_tables
from flashtile.bench.start import UserError
from flashtile.bench.training import (
    IMPLEMENTATIONS,
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

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASE = TrainCase("gpt2-tiny", 3, 16, "fp32", dropout_p=0.1)
BY_NAME = {each.name: each for each in IMPLEMENTATIONS}


@pytest.fixture(autouse=True)
def short_measuring(monkeypatch):
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(runner, "_LEAST_SAMPLES", 1)


def run(case, *chosen):
    return runner.run_case(case, chosen, CPU, TrainProblem)


def bert_case():
    tokens, mask = torch.randint(5, 128, (12, 16)), torch.ones(12, 16, dtype=torch.bool)
    mask[::2, 9:] = False
    labels = tokens.masked_fill(torch.rand(12, 16) > 0.3, IGNORED).masked_fill(~mask, IGNORED)
    batch = Batch(tokens.masked_fill(~mask, 0), labels, mask, int(mask.sum()))
    return bert.BertCase("bert-tiny", 12, 16, "fp32", tuple(mask.sum(1).tolist()), 0.1), batch


def run_bert(case, batch, *chosen):
    return runner.run_case(case, chosen, CPU, lambda case, device: bert.BertProblem(case, batch, device))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_right_dropout_gets_a_speed(dtype):
    """Which is judged after the same training without dropout."""
    case, names = replace(CASE, dtype=dtype), ["flashtile", "flashtile-fused-loss", "plain"]
    for row in run(case, *(BY_NAME[name] for name in names)):
        assert row["ms"] is not None, row
        assert (row["op"], row["phase"], row["case"]) == ("train-step", "fwd+bwd+step", case.record())
        assert row["tokens_per_s"] == pytest.approx(case.tokens / row["ms"] * 1e3) and row["mfu"] is None
        assert row["tflops"] == pytest.approx(case.flops("") / row["ms"] / 1e9)


def test_right_dropout_of_transformers_gets_a_speed():
    pytest.importorskip("transformers")
    for row in run(CASE, *(BY_NAME[f"transformers-{name}"] for name in ("eager", "sdpa", "flashtile"))):
        assert row["ms"] is not None, row


def test_right_dropout_of_bert_gets_a_speed():
    pytest.importorskip("transformers")
    for row in run_bert(*bert_case(), *bert.select(["flashtile", "transformers-sdpa", "transformers-flashtile"])):
        assert row["ms"] is not None, row
        assert row["case"]["dropout_p"] == 0.1


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_another_probability_gets_no_speed(dropout_p):
    other = Implementation(
        "other", build=lambda case, weights: build_plain(replace(case, dropout_p=dropout_p), weights)
    )
    (row,) = run(replace(CASE, S=32), other)
    assert row["ms"] is None and "dropout_fall: mean" in row["why"]


def test_gradients_of_what_was_not_dropped_get_no_speed():
    def build(case, weights):
        model = build_plain(case, weights)
        same = dict(zip(weights, model.parameters, strict=True))

        def loss(tokens):
            gradient = token_losses(plain_logits(case, same, tokens[:, :-1], 0.0), tokens).mean()
            return model.loss(tokens).detach() + gradient - gradient.detach()

        return replace(model, loss=loss)

    (row,) = run(CASE, Implementation("other", build=build))
    assert row["ms"] is None and row["why"].startswith("wrong dropout: dropout_fall: mean")
    assert "dropout_rise" not in row["why"]


def test_bert_that_drops_nothing_gets_no_speed():
    pytest.importorskip("transformers")
    case, batch = bert_case()

    def build(config, state):
        return bert._flashtile(replace(config, dropout=0.0, attention_dropout=0.0), state)

    (row,) = run_bert(case, batch, Implementation("other", build=build))
    assert row["ms"] is None and row["why"].startswith("wrong dropout: dropout_spread: mean 0.000e+00")


def test_wrong_training_without_dropout_is_found_first():
    def build(case, weights):
        model = build_plain(case, weights)
        return replace(model, logits=lambda tokens: 1.01 * model.logits(tokens))

    (row,) = run(CASE, Implementation("other", build=build))
    assert row["ms"] is None and row["why"].startswith("wrong result: token_loss")


def test_training_begins_again_after_the_check_without_dropout():
    """The effect of dropout is measured from the first weights, with a new optimizer."""
    weights, tokens = make_weights(CASE, CPU), make_tokens(CASE, CPU)
    once, alone = (Training(build_plain(CASE, weights), tokens, False, drops=True) for _ in range(2))
    found, expected = once.results(""), dropout.sample(alone, tokens)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_what_is_compiled_is_compiled_for_training_alone():
    """The check without dropout runs eagerly, and steps with dropout are one graph that is compiled once."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def build(case, weights):
        model = BY_NAME["flashtile"].build(case, weights)
        return replace(model, loss=torch.compile(model.loss, backend=backend, fullgraph=True, dynamic=False))

    (row,) = run(CASE, Implementation("other", build=build))
    assert row["ms"] is not None, row
    assert len(graphs) == 1


def test_samples_that_are_not_finite_are_wrong():
    reference = {"dropout_rise": torch.tensor([0.0, 1.0, 2.0])}
    assert dropout.judge_dropout(reference, reference).why is None
    verdict = dropout.judge_dropout({"dropout_rise": torch.tensor([0.0, 1.0, float("nan")])}, reference)
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
    assert bert_script.main(["--model=bert-tiny", f"--dropout={dropout_p}"]) == 2
    assert "--dropout: expected a probability" in capsys.readouterr().err
