"""Loss curves of GPT-2, steps of BERT and what they read: real text, batches of real lengths, right results alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bert, gpt2
from benchmarks.bert import IGNORED, make_batch, sequences
from benchmarks.common import batch_of, load_text
from benchmarks.gpt2 import differences
from flashtile.bench import runner

CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path):
    """Three documents of paragraphs of different lengths."""
    for name, words in (("a.txt", (5, 9, 30)), ("b.md", (100,)), ("c.py", (3, 3, 3, 40, 2))):
        (tmp_path / name).write_text("\n\n".join(" ".join(f"w{n}" for n in range(count)) for count in words))
    (tmp_path / "no.bin").write_bytes(b"\0" * 50)
    return load_text(tmp_path)


def test_text_of_a_folder_is_its_text_files_in_order(text, tmp_path):
    files = [tmp_path / name for name in ("a.txt", "b.md", "c.py")]
    assert bytes(text.tokens.tolist()) == b"".join(file.read_bytes() for file in files)
    assert text.documents == [0, *(sum(f.stat().st_size for f in files[: n + 1]) for n in range(3))]
    assert load_text(files[0]).documents == [0, files[0].stat().st_size]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected a file or a folder with text, got .*empty"):
        load_text(tmp_path / "empty")


def test_default_text_is_that_of_python(monkeypatch):
    monkeypatch.setattr("benchmarks.common._MOST_BYTES", 100_000)
    text = load_text()
    assert len(text.tokens) == 100_000 and "standard library" in text.name and len(text.sha256) == 64
    assert b"import" in bytes(text.tokens.tolist())


def test_batches_are_pieces_of_the_text(text):
    batch = batch_of(text, 4, 20, seed=3)
    assert batch.shape == (4, 20) and batch.dtype is torch.int64
    whole = bytes(text.tokens.tolist())
    assert all(bytes(row.tolist()) in whole for row in batch)
    assert torch.equal(batch, batch_of(text, 4, 20, seed=3)) and not torch.equal(batch, batch_of(text, 4, 20, seed=4))
    with pytest.raises(ValueError, match="take a shorter context"):
        batch_of(text, 1, len(text.tokens), seed=0)


def test_sequences_are_whole_paragraphs(text):
    """A sequence has at most 16 tokens, the first of which stands for the sequence."""
    lengths = [len(sequence) for sequence in sequences(text, 16, 1000)]
    # a: 5 + 9, then 30 = 15 + 15; b: 100 = 6 · 15 + 10; c: 3 + 3 + 3, then 40 = 15 + 15 + 10 with 2 more.
    assert lengths == [15, 16, 16, *[16] * 6, 11, 10, 16, 16, 13]
    assert all(sequence[0] == 1 and min(sequence[1:]) >= 5 for sequence in sequences(text, 16, 1000))


def test_a_batch_asks_for_some_tokens_of_every_sequence(text):
    batch = make_batch(text, 10, 16, 1000)
    asked = batch.labels != IGNORED
    assert asked.any(1).all() and not (asked & ~batch.mask).any() and not asked[:, 0].any()
    assert (batch.tokens[asked] == 2).all() and (batch.labels[asked] >= 5).all()
    assert not batch.tokens[~batch.mask].any()
    lengths = batch.mask.sum(1)
    some = batch.shortest_and_longest()
    assert some.mask.sum(1).tolist() == [lengths.min(), lengths.max()] == [10, 16]
    with pytest.raises(ValueError, match="expected text for 99 sequences, got 14"):
        make_batch(text, 99, 16, 1000)


def test_curves_of_eager_and_flashtile_are_one(tmp_path, capsys):
    pytest.importorskip("transformers")
    data, output = tmp_path / "text.txt", tmp_path / "record.json"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    arguments = ["--model=gpt2-tiny", "--steps=40", "--batch=4", "--context=32", f"--data={data}", "--device=cpu"]
    assert gpt2.main([*arguments, f"--output={output}"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["impl"] for row in rows] == ["transformers-eager", "flashtile"]
    assert all(len(row["curve"]) == 40 and row["curve"][-1] < row["curve"][0] - 0.3 for row in rows)
    ((largest, mean),) = differences(rows).values()
    assert mean <= largest < 0.01
    assert "smoothed losses of the second half: at most 0.00" in capsys.readouterr().out


def test_differences_see_another_curve():
    row = {"impl": "one", "curve": [4.0 - 0.01 * step for step in range(100)]}
    other = {"impl": "other", "curve": [loss + 0.5 for loss in row["curve"]]}
    assert differences([row, other])["other"] == pytest.approx((0.5, 0.5))
    broken = {"impl": "broken", "curve": [*row["curve"][:-1], None]}
    assert differences([row, broken])["broken"][0] == float("inf")


def test_wrong_options_end_with_a_line(tmp_path, capsys):
    assert gpt2.main(["--model=gpt2-tiny", "--impl", "flashtile"]) == 2
    assert "either --steps or --minutes" in capsys.readouterr().err
    assert bert.main(["--model=bert-tiny", f"--data={tmp_path}"]) == 2
    assert "a folder with text" in capsys.readouterr().err


@pytest.fixture
def case(text, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.0)
    monkeypatch.setattr(runner, "_LEAST_SAMPLES", 1)
    return bert.make_case("bert-tiny", 12, 16, "fp32", text)


def _run(case, *implementations):
    return runner.run_case(
        case[0], implementations, CPU, problem=lambda c, device: bert.BertProblem(case[1], c, device)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bert_packed_and_padded_are_the_same_training(case, dtype):
    case = (replace(case[0], dtype=dtype), case[1])
    rows = _run(case, *(bert.IMPLEMENTATIONS[name] for name in bert.IMPLEMENTATIONS if "compile" not in name))
    for row in rows:
        assert row["ms"] is not None, row
        assert row["tokens_per_s"] == pytest.approx(sum(case[0].lengths) / row["ms"] * 1e3)
        assert row["case"]["lengths"] == list(case[0].lengths) and row["op"] == "bert-step"


def _blind(config, state):
    """Sees its padding when asked for logits."""
    model = bert._flashtile(config, state)
    logits = model.inner.forward
    model.inner.forward = lambda tokens, mask, total: logits(tokens, None)
    return model


def _frozen(config, state):
    """One block does not learn."""
    model = bert._flashtile(config, state)
    model.inner.bert.blocks[1].requires_grad_(False)
    return model


def test_bert_that_sees_its_padding_or_does_not_learn_gets_no_speed(case):
    builds = {"blind": _blind, "frozen": _frozen}
    blind, frozen = _run(case, *(bert.Implementation(name, build=build) for name, build in builds.items()))
    assert blind["ms"] is None and blind["why"].startswith("wrong result: token_loss: ")
    assert frozen["ms"] is None and frozen["why"].startswith("wrong result: token_loss_after: ")


@pytest.mark.slow
def test_under_autocast_right_and_wrong_are_far_apart(case, tmp_path, monkeypatch):
    """In six layers rounding adds up. It leaves right models a speed by no luck, and wrong ones none."""
    monkeypatch.setitem(bert.MODELS, "bert-small", (6, 4, 128, 256))
    words = [" ".join(f"w{7 * n + m}" for m in range((60, 12, 55, 30, 50)[n % 5])) for n in range(40)]
    (tmp_path / "long.txt").write_text("\n\n".join(words))
    case = bert.make_case("bert-small", 4, 64, "bf16", load_text(tmp_path / "long.txt"), seed=0)
    right = [bert.IMPLEMENTATIONS[name] for name in ("flashtile", "transformers-sdpa", "transformers-flashtile")]
    wrong = [bert.Implementation("blind", build=_blind), bert.Implementation("frozen", build=_frozen)]
    rows = _run(case, *right, *wrong)
    reasons = _reasons(rows[: len(right)])
    assert not reasons, "\n".join(reasons)
    assert len(_reasons(rows[len(right) :])) == len(wrong)


def test_under_autocast_ours_is_held_to_hidden_states_of_its_own_dtype(case):
    """Between layers, of which each ends in a norm: PyTorch's give float32, ours the dtype of what they norm."""
    some, state = case[1].shortest_and_longest(), bert.BertForPreTraining(case[0].config).state_dict()
    dtypes = []
    for build in (bert._flashtile, bert._narrow_eager, bert._transformers("eager")):
        model = build(case[0].config, state)
        last = model.inner.bert.blocks[-1] if model.ours else model.inner.bert.encoder.layer[-1]
        last.register_forward_hook(lambda module, inputs, out: dtypes.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(some)
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def _reasons(rows):
    """Why implementations have no speed."""
    return [f"{row['impl']}: {row['why']}" for row in rows if row["ms"] is None]


def test_flops_are_those_of_the_tokens_that_are_there(case):
    lengths = case[0].lengths
    products = 2 * (4 + 8) * 32**2 + 32**2 + 128 * 32  # weights of two layers, and of the head
    attention = sum(2 * 2 * 2 * length**2 * 32 for length in lengths)
    assert case[0].flops("") == 3 * (2 * products * sum(lengths) + attention)


def test_bert_script_writes_a_record(text, tmp_path, capsys):
    pytest.importorskip("transformers")
    output = tmp_path / "record.json"
    arguments = ["--model=bert-tiny", "--impl", "flashtile", "transformers-sdpa", "--batch", "2", "4", "--context=16"]
    options = [f"--data={tmp_path}", "--device=cpu", "--seconds=0.01", f"--output={output}"]
    assert bert.main([*arguments, *options]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["impl"], row["case"]["B"]) for row in rows] == [
        (impl, size) for size in (2, 4) for impl in ("flashtile", "transformers-sdpa")
    ]
    assert all(row["ms"] > 0 and row["text_sha256"] == text.sha256 for row in rows)
    assert "% of the batch" in capsys.readouterr().out


@pytest.mark.gpu
def test_scripts_run_on_a_gpu(text, tmp_path):
    pytest.importorskip("transformers")
    arguments = ["--model=bert-base", "--batch", "4", "--context=128", "--seconds=0.05", "--device=cuda"]
    data = tmp_path / "long.txt"
    data.write_text(" ".join(f"word{n}" for n in range(4000)))
    output = tmp_path / "bert.json"
    assert bert.main([*arguments, f"--data={data}", f"--output={output}"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["impl"] for row in rows] == list(bert.IMPLEMENTATIONS)
    reasons = _reasons(rows)
    assert not reasons, "\n".join(reasons)
    assert all(row["peak_mib"] > 0 for row in rows)
    output = tmp_path / "gpt2.json"
    arguments = ["--steps=20", "--batch=2", "--context=256", "--device=cuda", f"--data={data}", f"--output={output}"]
    assert gpt2.main(arguments) == 0
    rows = json.loads(output.read_text())["rows"]
    ((largest, _),) = differences(rows).values()
    assert largest < 0.05, [row["curve"] for row in rows]


def test_the_figures_of_the_document_are_those_of_the_record():
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu-gpt2-curves.json"
    eager, ours = (row["curve"] for row in json.loads(record.read_text())["rows"])
    assert len(eager) == len(ours) == 1000
    assert 0 < max(abs(a - b) for a, b in zip(eager, ours)) <= 1e-6
    assert sum(eager[-100:]) / 100 < eager[0] - 2
