"""The demo from end to end in a tiny size, and each of its parts."""

import json
import sys
import time
from dataclasses import replace
from functools import partial
from io import StringIO
from multiprocessing import forkserver

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from rich.console import Console
from typer.testing import CliRunner

import demo
import flashtile
from demo import run_demo
from demo_parts import isolation, scaling, training
from demo_parts.isolation import PieceFailedError, run_piece
from demo_parts.results import Results, draw_scaling, scaling_table, training_table, verdict
from demo_parts.scaling import Point
from flashtile.bench.start import UserError
from flashtile.models import GPT, GPTConfig, flashtile_attention, plain_attention
from support.distributed.processes import forking
from support.running.each_case import each_case

pytestmark = pytest.mark.unpoisoned

CPU = torch.device("cpu")
TINY = replace(
    training.make_plan(CPU, 20.0),
    model=GPTConfig(context=32, layers=1, heads=2, width=32),
    batch=2,
    max_steps=12,
    lengths=(64, 128),
)
SENTENCES = b"It was a bright cold day in April, and the clocks were striking thirteen. " * 20

not_causal = partial(flashtile.attention, causal=False)
broken = partial(flashtile.attention, backend="nonsense")


def sleeping(q, k, v):
    time.sleep(30)
    return flashtile_attention(q, k, v)


@pytest.fixture(autouse=True, scope="module")
def forked_from_the_server_of_all_tests():
    """It has imported what an optimizer and other tests need; the demo's own would leave that to each process."""
    forking()
    forkserver.ensure_running()


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(SENTENCES)
    return path


@pytest.fixture
def in_this_process(monkeypatch):
    """Pieces run here: in a process of its own each would import flashtile, which takes longer than its work."""
    monkeypatch.setattr(isolation, "_in_process", lambda function, arguments, report, _: function(*arguments, report))


def quiet_console():
    return Console(file=open("/dev/null", "w"), width=120)


def results(losses_ours=(5.0, 4.0), losses_plain=(5.0, 4.0), points=(), stopped=None):
    trainings = {
        "flashtile": training.Training(list(losses_ours), [1.0, 1.0, 1.0], 1000.0, 2**20),
        "plain": training.Training(list(losses_plain), [1.0, 1.0, 1.0], 500.0, 2**30),
    }
    comparison = training.compare(TINY, *trainings.values())
    return Results(TINY, "a book", trainings, comparison, list(points), stopped or {})


def test_demo_writes_everything_and_agrees(book, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "made" / "output"
    assert run_demo(TINY, quiet_console(), book, output)
    found = json.loads((output / "results.json").read_text())
    assert found["comparison"]["agree"] and found["text"] == "book.txt"
    losses = found["training"]["flashtile"]["losses"]
    assert len(losses) >= 2 and losses[-1] < losses[0]
    assert all(found["training"][name]["tokens_per_second"] > 0 for name in ("flashtile", "plain"))
    measured = {(point["implementation"], point["length"]) for point in found["attention"]}
    assert ("flashtile", 64) in measured and ("plain", 64) in measured
    page = (output / "report.md").read_text()
    assert "loss curves agree" in page and "| 64 |" in page and "attention.png" in page
    for picture in ("attention.png", "losses.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")


def test_a_call_that_took_no_new_memory_is_drawn(tmp_path):
    """The process may have had enough of it already; then there is no ratio."""
    pytest.importorskip("matplotlib")
    draw_scaling(results(points=[Point("flashtile", 64, 2.0, 0), Point("plain", 64, 5.0, 2**20)]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_demo_detects_a_wrong_attention(book, tmp_path, in_this_process):
    attentions = {"flashtile": not_causal, "plain": plain_attention}
    plan, output = replace(TINY, lengths=(64,)), tmp_path / "output"
    assert not run_demo(plan, quiet_console(), book, output, steps=2, pictures=False, attentions=attentions)
    assert "DISAGREE" in (tmp_path / "output" / "report.md").read_text()


def off_by_4_percent(q, k, v):
    return flashtile.attention(q, k, v, causal=True, scale=1.04 * q.shape[-1] ** -0.5)


def without_gradient_of_q(q, k, v):
    return flashtile.attention(q.detach(), k, v, causal=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_small_errors_show_in_the_first_gradients(monkeypatch, autocast):
    monkeypatch.setattr(training, "_cuda_batch", lambda device: 4)
    sizes = GPTConfig(context=64, layers=2, heads=2, width=128)
    config = replace(training.make_plan(torch.device("cuda" if autocast else "cpu"), 20.0), device=CPU, model=sizes)
    ours, plain, scaled, missing = (
        training.train(config, SENTENCES, f, 2, lambda *r: None)
        for f in (flashtile_attention, plain_attention, off_by_4_percent, without_gradient_of_q)
    )
    right = training.compare(config, ours, plain)
    assert right.agree and right.gradient_difference < config.gradient_tolerance / 4
    for wrong in (scaled, missing):
        found = training.compare(config, wrong, plain)
        assert not found.agree and found.gradient_difference > 4 * config.gradient_tolerance


def test_the_learning_rate_warms_up():
    config = replace(TINY, learning_rate=2.0, warm_up_steps=4)
    assert [training.learning_rate(config, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_gradients_are_clipped():
    torch.manual_seed(0)
    model = GPT(TINY.model)
    with torch.no_grad():
        model.token.weight *= 100  # large logits, large gradients
    batch = torch.randint(256, (2, 33))
    model.loss(batch).backward()
    assert gradient_norm(model) > 2
    training._step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, autocast=False)
    assert gradient_norm(model) == pytest.approx(1.0, rel=1e-3)


def gradient_norm(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def test_a_training_stops_when_its_time_is_over():
    short = training.train(TINY, SENTENCES, flashtile_attention, 500, lambda *r: None, seconds=0.0)
    assert len(short.losses) == training.FEWEST_STEPS and short.tokens_per_second > 0


def test_both_trainings_are_cut_to_the_same_steps(book, tmp_path, in_this_process):
    config = replace(TINY, max_steps=10_000, seconds=1.0, lengths=(64,))
    assert run_demo(config, quiet_console(), book, tmp_path, pictures=False)
    found = json.loads((tmp_path / "results.json").read_text())["training"]
    assert len({len(found[name]["losses"]) for name in ("flashtile", "plain")}) == 1


@each_case(
    "ours, agree",
    [
        ((5.0, 4.0), True),
        ((5.001, 4.0), False),
        ((5.0, 4.0005), True),
        ((5.0, 4.1), False),
        ((5.0, float("nan")), False),
    ],
)
def test_comparison_holds_first_and_later_losses_to_their_tolerances(ours, agree):
    found = results(ours).comparison
    assert found.agree is agree
    assert ("DISAGREE" in verdict(results(ours))) is not agree


def test_tables_show_ratios_where_both_were_measured():
    points = [
        Point("flashtile", 64, 2.0, 2**20),
        Point("plain", 64, 5.0, 8 * 2**20),
        Point("flashtile", 128, 4.0, 2**21),
    ]
    table = scaling_table(results(points=points))
    assert table.lines == [
        ["64", "1.0", "8.0", "8.0×", "2.0", "5.0", "2.5×"],
        ["128", "2.0", "–", "–", "4.0", "–", "–"],
    ]
    assert training_table(results()).lines[1] == ["plain", "5.0000", "4.0000", "500", "1,024"]


def test_memory_of_plain_attention_is_quadratic_and_seen():
    ours, plain = (
        run_piece(scaling.measure, TINY, f, 1024, device=CPU)[1] for f in (flashtile_attention, plain_attention)
    )
    matrix = TINY.heads * 1024**2 * 4
    assert 2 * matrix < plain < 10 * matrix
    assert ours < plain / 2


def test_lengths_are_announced_until_one_would_be_too_expensive(monkeypatch):
    course = []

    def measured(function, config, attention, length, **options):
        course.append(("measured", length))
        return 0.001, 10 * length**2, 0.001

    def announce(name, length):
        course.append((name, length))

    monkeypatch.setattr(scaling, "run_piece", measured)
    monkeypatch.setattr(scaling, "free_memory", lambda device: 2 * 10 * 256**2 + 1)
    config = replace(TINY, lengths=(64, 128, 256, 512))
    points, stopped = scaling.measure_scaling(config, {"plain": plain_attention}, 60.0, announce)
    assert [point.length for point in points] == [64, 128, 256]
    assert course == [(what, length) for length in (64, 128, 256) for what in ("plain", "measured")]
    assert stopped["plain"].startswith("length 512 may need")
    points, stopped = scaling.measure_scaling(config, {"plain": plain_attention}, 0.0, announce)
    assert [point.length for point in points] == [64] and "s left" in stopped["plain"]


def ignore(*what):
    pass


def calls_that_take(monkeypatch, seconds):
    """Every length takes these seconds a call; memory is ample."""
    monkeypatch.setattr(scaling, "run_piece", lambda *arguments, **options: (1.0, 1, 1e3 * seconds[arguments[-1]]))
    monkeypatch.setattr(scaling, "free_memory", lambda device: 2**40)


def test_scaling_foresees_what_the_next_length_costs(monkeypatch):
    config = replace(TINY, lengths=(64, 128, 256))
    calls_that_take(monkeypatch, {64: 0.01, 128: 1.0})
    points, stopped = scaling.measure_scaling(config, {"plain": plain_attention}, 60.0, ignore)
    assert [point.length for point in points] == [64, 128]  # the last doubling cost 100 times as much
    assert stopped["plain"] == "length 256 may take 201 s of the 60 s left"
    calls_that_take(monkeypatch, {64: 0.25, 128: 1.0, 256: 4.0})
    points, stopped = scaling.measure_scaling(config, {"plain": plain_attention}, 60.0, ignore)
    assert len(points) == 3 and not stopped


def test_a_measurement_never_outlasts_the_time(monkeypatch):
    monkeypatch.setattr(scaling, "_LEAST_SECONDS", 0.5)
    begin = time.perf_counter()
    points, stopped = scaling.measure_scaling(TINY, {"slow": sleeping}, 0.5, ignore)
    assert not points and "not done after" in stopped["slow"]
    assert time.perf_counter() - begin < 10


def test_a_failing_piece_says_why():
    with pytest.raises(PieceFailedError, match="expected one of 'auto'"):
        run_piece(scaling.measure, TINY, broken, 64, device=CPU)


def test_a_killed_process_is_noticed(capfd):
    with pytest.raises(PieceFailedError, match="its process ended with code 1"):
        run_piece(sys.exit, device=CPU)


def test_default_text_is_long():
    content, name = training.load_text(None, 512)
    assert len(content) > 100_000 and name == "Python's help topics"


def test_any_bytes_are_a_text(tmp_path):
    path = tmp_path / "noise.bin"
    path.write_bytes(bytes(range(256)) * 4)
    content, name = training.load_text(path, 64)
    assert len(content) == 1024 and name == "noise.bin"


def test_a_text_that_cannot_be_used_is_explained(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    messages = {
        "empty": "holds 0 bytes",
        "short": "needs at least 128",
        "missing": "there is no file",
        ".": "is a folder",
    }
    for name, message in messages.items():
        with pytest.raises(UserError, match=message):
            training.load_text(tmp_path / name, 64)


def test_output_that_is_a_file_is_explained(book):
    with pytest.raises(UserError, match="cannot make the output folder"):
        run_demo(TINY, quiet_console(), book, book, pictures=False)


def test_an_output_folder_that_takes_no_file_is_explained_before_any_work(book, tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(demo.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(demo, "_steps_that_fit", None)
    with pytest.raises(UserError, match=r"cannot write into the output folder .*: Permission denied"):
        run_demo(TINY, quiet_console(), book, tmp_path, pictures=False)


@pytest.fixture
def without_matplotlib(monkeypatch):
    monkeypatch.setattr("flashtile.bench.start.importlib.util.find_spec", lambda name: None)


def test_without_matplotlib_the_demo_goes_on_and_names_the_extra(book, tmp_path, without_matplotlib, in_this_process):
    output = tmp_path / "output"
    console = Console(file=StringIO(), width=80)
    assert run_demo(replace(TINY, lengths=(64,)), console, book, output, steps=2)
    said = console.file.getvalue()
    assert 'in a checkout of flashtile, pip install ".[plots]"' in said and "memory saved" in said
    assert sorted(path.name for path in output.iterdir()) == ["report.md", "results.json"]


def test_pictures_asked_for_by_name_need_matplotlib_before_any_work(book, tmp_path, without_matplotlib):
    with pytest.raises(UserError, match="there is no file"):  # the arguments come first
        run_demo(TINY, quiet_console(), tmp_path / "missing", tmp_path / "output", pictures=True)
    with pytest.raises(
        UserError, match=r'--pictures needs matplotlib: in a checkout of flashtile, pip install "\.\[plots\]"'
    ):
        run_demo(TINY, quiet_console(), book, tmp_path / "output", pictures=True)


def test_steps_fit_the_time(monkeypatch):
    trial = training.Training([5.0], [], TINY.batch * TINY.model.context * 10.0, 0)  # a tenth of a second a step
    monkeypatch.setattr(demo, "run_piece", lambda *arguments, device: trial)
    begin = demo.time.perf_counter()
    long = replace(TINY, seconds=1000.0, max_steps=77)
    assert demo._steps_that_fit(long, SENTENCES, demo.ATTENTIONS, begin) == 77
    assert 40 <= demo._steps_that_fit(replace(long, seconds=16.0), SENTENCES, demo.ATTENTIONS, begin) <= 44
    assert demo._steps_that_fit(replace(long, seconds=0.1), SENTENCES, demo.ATTENTIONS, begin) == 12


def test_a_gpu_gets_a_larger_model(monkeypatch):
    monkeypatch.setattr(training, "_cuda_batch", lambda device: 16)
    large = training.make_plan(torch.device("cuda"), 110.0)
    assert large.model.width == 768 and large.model.context >= 1024 and large.autocast
    assert large.attention_dtype is torch.bfloat16


def invoke(*arguments):
    app = typer.Typer()
    app.command()(demo.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def test_the_command_ends_with_the_place_of_its_results(tmp_path, monkeypatch, in_this_process):
    tiny = replace(TINY, model=GPTConfig(context=16, layers=1, heads=1, width=16), batch=1, lengths=(64,))
    monkeypatch.setattr(demo, "make_plan", lambda device, seconds: tiny)
    result = invoke("--output", tmp_path / "here", "--steps", 3, "--no-pictures")
    assert result.exit_code == 0, result.output
    assert "The loss curves agree" in result.output
    assert result.output.strip().splitlines()[-1].endswith(f"{tmp_path / 'here'}/")


def test_the_command_exits_with_1_when_losses_disagree(monkeypatch):
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: False)
    assert invoke().exit_code == 1


@pytest.mark.parametrize("seconds", ["inf", "nan", "9"])
def test_the_command_needs_a_time_that_ends(tmp_path, seconds):
    result = invoke("--seconds", seconds, "--output", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output and not (tmp_path / "out").exists()


def test_the_command_reports_a_missing_file_without_traceback(tmp_path):
    result = invoke(tmp_path / "missing [draft].txt", "--output", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "error: there is no file" in result.output and "missing [draft].txt" in result.output
