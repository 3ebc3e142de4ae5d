"""Long Range Arena by our own generators: the tasks are what their definitions say; every way to attend learns them."""

import dataclasses
import json
import math
import random
import statistics

import pytest
import torch

from benchmarks.common import Budget
from benchmarks.lra import __main__ as script
from benchmarks.lra import listops, pathfinder
from benchmarks.lra.examples import Examples, Task
from benchmarks.lra.model import ATTENTIONS, Classifier
from flashtile.testing import assert_close
from support.running.each_case import each_case

_SHORT = listops.Limits(min_length=20, max_length=120)
_SMALL = pathfinder.Drawing(24, dashes=3, distractors=1)


def _tokens(text: str) -> list[int]:
    names = {word: token for token, word in enumerate(["", *map(str, range(10)), "[MIN", "[MAX", "[MED", "[SM", "]"])}
    return [names[word] for word in text.split()]


@each_case(
    "text, value",
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MIN 3 [MAX 1 8 ] ]", 3),
        ("[SM 5 6 [SM 9 9 ] ]", 9),  # 5 + 6 + 8 = 19
        ("[MED 1 9 4 ]", 4),
        ("[MED 1 4 8 9 ]", 6),
        ("[MED 1 2 ]", 1),  # the mean, rounded down
    ],
)
def test_listops_values(text, value):
    assert listops.evaluate(_tokens(text)) == value


def test_listops_are_as_defined():
    made = listops.make_listops(300, 3, _SHORT)
    assert len(made) == 300 and made.tokens.dtype is torch.uint8
    depths, widths = [], []
    for row, length, label in zip(made.tokens, made.lengths.tolist(), made.labels.tolist()):
        tokens = row[:length].tolist()
        assert 20 <= length <= 120 and 0 not in tokens and not row[length:].any()
        assert listops.evaluate(tokens) == label
        open_widths, deepest = [], 0
        for token in tokens:
            if token == listops.CLOSE:
                widths.append(open_widths.pop())
            if token != listops.CLOSE and open_widths:
                open_widths[-1] += 1
            if listops.FIRST_OPERATOR <= token < listops.CLOSE:
                open_widths.append(0)
            deepest = max(deepest, len(open_widths))
        assert not open_widths
        depths.append(deepest)
    assert 1 < max(depths) < 10, "operators lie within at most 9 others"
    assert (min(widths), max(widths)) == (2, 10)
    assert set(made.labels.tolist()) == set(range(10))


def test_batches_have_few_widths():
    made = listops.make_listops(60, 0, _SHORT)
    for rows in torch.arange(60).split(4):
        batch = made.batch(rows, torch.device("cpu"))
        width = min(64 * math.ceil(int(batch.lengths.max()) / 64), made.tokens.shape[1])
        assert batch.tokens.shape == (4, width) and torch.equal(batch.labels, made.labels[rows])
    assert sum(len(batch) for batch in made.batches(7, torch.device("cpu"))) == 60


def _pieces(image: torch.Tensor) -> int:
    """How many dashes and dots an image has: bright pixels that touch are one."""
    left = {tuple(place) for place in (image > 127).nonzero().tolist()}
    found = 0
    while left:
        found, edge = found + 1, [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
    return found


def test_pathfinder_images_are_as_defined():
    made = pathfinder.make_pathfinder(60, 1)
    assert made.tokens.shape == (60, 1024) and made.lengths.tolist() == [1024] * 60
    assert 15 < int(made.labels.sum()) < 45
    drawing = pathfinder.Drawing()
    dashes = 2 * drawing.dashes + drawing.distractors * (drawing.dashes // 3)
    pieces = [_pieces(image.view(32, 32)) for image in made.tokens]
    # Two dashes may touch at a bend, and a dot lies on the end of one.
    assert dashes - 6 <= statistics.mean(pieces) <= dashes


@each_case("label", [0, 1])
def test_dots_are_ends_of_one_path_or_of_two(label):
    for seed in range(10):
        dashes, dots = pathfinder._scene(label, random.Random(seed), _SMALL)
        first, second = dashes[: _SMALL.dashes], dashes[_SMALL.dashes : 2 * _SMALL.dashes]
        ends = [{path[0][0], path[-1][1]} for path in (first, second)]
        assert set(dots) == ends[0] if label else (dots[0] in ends[0] and dots[1] in ends[1])
        for a in first:
            assert all(math.dist(p, q) >= _SMALL.distance for b in second for p in a for q in b)


@pytest.mark.slow
def test_a_seed_makes_the_same_examples_in_any_number_of_processes():
    for make, limits, workers in ((listops.make_listops, _SHORT, 2), (pathfinder.make_pathfinder, _SMALL, 1)):
        alone, again, other = make(140, 5, limits), make(140, 5, limits, workers=workers), make(140, 6, limits)
        assert all(map(torch.equal, alone, again))
        assert not torch.equal(alone.labels, other.labels)


@each_case(
    "make, expected",
    [
        (lambda: listops.Limits(max_args=1), "max_args >= 2"),
        (lambda: listops.Limits(min_length=9, max_length=8), "min_length <= max_length"),
        (lambda: pathfinder.Drawing(16, dashes=9), "nine tenths of the size"),
        (lambda: Budget(), "either --steps or --minutes"),
        (lambda: Budget(3, 1.0), "either --steps or --minutes"),
        (lambda: Budget(0), "more than 0"),
    ],
)
def test_what_cannot_be_made_raises(make, expected):
    with pytest.raises(ValueError, match=expected):
        make()


def test_a_drawing_without_room_ends(monkeypatch):
    monkeypatch.setattr(pathfinder, "_SCENES", 20)
    with pytest.raises(ValueError, match="hardly room"):
        pathfinder.make_pathfinder(1, 0, pathfinder.Drawing(distractors=40))


def test_minutes_are_divided_among_the_runs():
    assert Budget(minutes=2).steps_each([0.25, 0.5], repeats=4) == 30
    assert Budget(minutes=1e-6).steps_each([1.0]) == 1
    assert Budget(steps=7).steps_each([100.0], repeats=9) == 7


def _classified(name: str, batch: Examples, dtype: torch.dtype, grid: int | None = None) -> dict[str, torch.Tensor]:
    """Logits and gradients of a small classifier with one way to attend."""
    torch.manual_seed(0)
    task = Task(listops.make_listops, None, listops.VOCABULARY, 10, batch.tokens.shape[1], grid)
    model = Classifier(task, ATTENTIONS[name], layers=2, width=32, heads=2).to(dtype)
    logits = model(batch)
    torch.nn.functional.cross_entropy(logits, batch.labels).backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("name", ["sdpa", "flashtile", "flashtile-packed"])
@pytest.mark.parametrize("grid", [None, 8])
def test_exact_ways_to_attend_are_the_standard_one(name, grid):
    batch = listops.make_listops(6, 0, dataclasses.replace(_SHORT, max_length=64))
    if grid:
        batch = Examples(torch.randint(1, 15, (3, 64), dtype=torch.uint8), torch.full((3,), 64), batch.labels[:3])
    found, eager = _classified(name, batch, torch.float32, grid), _classified("standard", batch, torch.float32, grid)
    oracle = _classified("standard", batch, torch.float64, grid)
    for part, tensor in found.items():
        assert_close(f"{name}: {part}", tensor, oracle[part], eager[part])


def test_the_block_sparse_way_is_attention_under_its_mask():
    batch = Examples(torch.randint(1, 15, (2, 200), dtype=torch.uint8), torch.tensor([200, 130]), torch.tensor([1, 2]))
    sparse = _classified("block-sparse", batch, torch.float64)["logits"]
    dense = _classified("standard", batch, torch.float64)["logits"]
    assert (sparse - dense).abs().max() > 1e-3 * dense.abs().max()
    short = Examples(batch.tokens[:, :60], torch.tensor([60, 40]), batch.labels)  # one tile: nothing is left out
    for part, tensor in _classified("block-sparse", short, torch.float64).items():
        oracle = _classified("standard", short, torch.float64)[part]
        assert_close(part, tensor, oracle, oracle)


_TINY = ["--steps=4", "--batch=4", "--layers=1", "--width=32", "--heads=2", "--examples=40", "--held-out=16",
         "--device=cpu"]  # fmt: skip


@pytest.mark.parametrize("task", ["listops", "pathfinder"])
def test_the_script_writes_a_record(task, tmp_path, capsys):
    output = tmp_path / "record.json"
    size = "--size=64" if task == "listops" else "--size=16"
    assert script.main([f"--task={task}", size, "--seeds=2", f"--output={output}", *_TINY]) == 0
    record = json.loads(output.read_text())
    ways = set(ATTENTIONS) - ({"flashtile-packed"} if task == "pathfinder" else set())
    assert {(row["impl"], row["case"]["seed"]) for row in record["rows"]} == {(w, s) for w in ways for s in (0, 1)}
    for row in record["rows"]:
        assert row["op"] == f"lra-{task}" and row["ms"] > 0 and 0 <= row["accuracy"] <= 1
        assert row["case"]["steps"] == 4 and len(row["curve"]) == 4 and row["seconds"] > 0
    # The same weights and batches: the exact ways begin with the same loss.
    first = {row["impl"]: row["curve"][0] for row in record["rows"] if row["case"]["seed"] == 0}
    assert first["standard"] == pytest.approx(first["flashtile"], rel=1e-4)
    assert first["standard"] == pytest.approx(first["sdpa"], rel=1e-4)
    assert "python -m benchmarks.lra" in record["command"]
    assert capsys.readouterr().out.count("accuracy") == len(record["rows"])


@pytest.mark.slow
def test_a_model_learns(tmp_path):
    """Expressions of a few tokens, of which the model soon knows more than by chance."""
    output = tmp_path / "record.json"
    arguments = ["--task=listops", "--size=12", "--impl", "flashtile", "--seeds=1", f"--output={output}", *_TINY]
    replaced = {"--steps=4": "--steps=150", "--batch=4": "--batch=64", "--examples=40": "--examples=2000",
                "--held-out=16": "--held-out=256"}  # fmt: skip
    assert script.main([*(replaced.get(each, each) for each in arguments), "--learning-rate=3e-3"]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["accuracy"] > 0.25 and row["curve"][-1] < row["curve"][0]


def test_wrong_options_end_with_a_line(capsys):
    assert script.main(["--task=listops"]) == 2
    assert "either --steps or --minutes" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_script_runs_on_a_gpu(tmp_path):
    output = tmp_path / "record.json"
    arguments = [
        "--task=listops",
        "--size=256",
        "--seeds=1",
        "--steps=5",
        "--batch=8",
        "--examples=64",
        "--held-out=32",
    ]
    assert script.main([*arguments, "--device=cuda", f"--output={output}"]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert {row["impl"] for row in rows} == set(ATTENTIONS)
    assert all(row["peak_mib"] > 0 and row["loss"] is not None for row in rows)
