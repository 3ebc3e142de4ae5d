"""Every command through typer's runner: what it prints, its exit code, and its errors without traceback."""

import errno
import importlib.util
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

import flashtile.cli
from demo_parts.results import Results, scaling_table, training_table
from demo_parts.scaling import Point
from demo_parts.training import Training, make_plan
from flashtile.bench import commands, runner
from flashtile.bench.cases import Case
from flashtile.bench.companion_cases import OPERATIONS
from flashtile.bench.registry import BENCHMARKS
from flashtile.bench.report import Table, make_report
from flashtile.bench.start import UserError
from flashtile.bench.timing import HostTimer
from flashtile.cli import doctor, warmup
from flashtile.cli.bench import progress
from flashtile.cli.call import Call
from flashtile.cli.console import print_table, print_text
from flashtile.cli.explain import describe_io, parse_window
from flashtile.testing.kernel_checks import KernelCheck
from support.running.command_line import invoke
from support.running.each_case import each_case

pytestmark = pytest.mark.unpoisoned

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
#: Operations of the benchmark commands, beside the companions.
DRAWN = ("attention", "attention-host", "attention-breakdown", "decode", "train-step")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setitem(runner._SECONDS, "cpu", 0.01)
    monkeypatch.setattr(HostTimer, "CALLS", 1)


@pytest.mark.parametrize("command", [(), ("doctor",), ("explain",), ("warmup",), ("bench",)], ids=str)
def test_help(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0 and "Usage" in result.output


def test_the_help_of_explain_names_every_backend():
    said = invoke("explain", "--help").output
    line = next(line for line in said.splitlines() if "--backend" in line)
    assert all(backend in line for backend in ("auto", *doctor.backends()[0])), line


def test_doctor_tries_each_backend(monkeypatch):
    monkeypatch.setattr(doctor, "missing", lambda: [doctor.Missing("numbers", "counting", "pip install them")])
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.output and "Not here" in result.output and "pip install them" in result.output
    assert all(backend in result.output for backend in doctor.backends()[0]) and "works" in result.output


def test_doctor_fails_when_the_default_backend_does(monkeypatch):
    def fail(case, backend, device):
        raise RuntimeError(f"{backend} is ill\nand more")

    monkeypatch.setattr(doctor.testing, "check", fail)
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "RuntimeError: cpu is ill" in result.output and "does not work" in result.output


@pytest.mark.slow
def test_doctor_checks_kernels(monkeypatch):
    """Here the last check of each operation; all of them have a test of their own."""
    last = {check.operation: check for check in doctor.kernel_checks("cpu")}
    monkeypatch.setattr(doctor, "kernel_checks", lambda backend: list(last.values()))
    result = invoke("doctor", "--check-kernels")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines() if line.strip().startswith("cpu ")]
    operations = {line[1]: line[-1] for line in lines if line[-1].isdigit()}
    assert operations == dict.fromkeys(
        ("attention", "cache", "cross-entropy", "dense", "norm", "rotary", "softmax"), "0"
    )


def test_doctor_names_the_calls_that_are_wrong(monkeypatch):
    def wrong(device):
        raise AssertionError("out: largest error 3, allowed 1\nand more")

    checks = [
        KernelCheck("attention", "heads of 33 and 16", wrong),
        KernelCheck("norm", "rows of 3", lambda device: None),
    ]
    monkeypatch.setattr(doctor, "kernel_checks", lambda backend: checks)
    result = invoke("doctor", "--check-kernels")
    assert result.exit_code == 1
    assert "cpu: attention heads of 33 and 16: AssertionError: out: largest error 3, allowed 1" in result.output
    assert "rows of 3" not in result.output


def drawn(table, width, **options):
    console = Console(file=StringIO(), width=width)
    print_table(console, table, **options)
    return console.file.getvalue()


def test_a_word_wider_than_the_terminal_is_folded_and_nothing_is_cut_off():
    why = "RuntimeError: expected [batch, seq] and no[/end], got " + "a-word-that-is-longer-than-the-terminal" * 2
    shown = drawn(Table("Title", ["backend", "heading"], [["cpu", why]], words=True), 60)
    assert why.replace(" ", "") in "".join(shown.split()), shown


def tables_of_all_commands():
    """Tables of the committed records, from every command that has tables, and of the demo."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text("utf-8"))
        if all(row["op"] in (*DRAWN, *OPERATIONS) and "tflops" in row for row in record["rows"]):
            yield from make_report(record, record).tables
    points = [Point(name, 131072, 12345.6, 2**34) for name in ("flashtile", "plain")]
    trainings = {name: Training([5.0, 4.0], [1.0], 123456.0, 2**34) for name in ("flashtile", "plain")}
    results = Results(make_plan(CPU, 20.0), "a book", trainings, None, points, {})
    yield from (training_table(results), scaling_table(results))
    yield from doctor.tables([doctor.examine(backend) for backend in doctor.backends()[0]], [])
    call = Call(1, 8192, causal=True, dropout_p=0.1, device="sm_90")
    yield describe_io(call, "sm_90")


def widest_lines(table):
    """Lines with the longest cell or the longest word of a column: the widths of columns depend on no others."""
    sizes = (len, lambda cell: max(map(len, cell.split()), default=0))
    columns = range(len(table.headings))
    return [max(table.lines, key=lambda line: size(line[column])) for column in columns for size in sizes]


@pytest.mark.slow
def test_tables_fit_80_columns_and_break_no_word():
    count = 0
    for table in tables_of_all_commands():
        lines = widest_lines(table)
        shown = drawn(replace(table, lines=lines), 80)
        assert max(map(len, shown.splitlines())) <= 80, shown
        words = {word for line in (table.headings, *lines) for cell in line for word in cell.split()}
        assert words <= set(shown.split()), words - set(shown.split())
        count += 1
    assert count > 30


def test_parts_of_a_wide_table_repeat_what_names_a_line():
    lines = [["a" * 30, "fwd", "1" * 20, "2" * 20, "3" * 20]]
    shown = drawn(Table("Title", ["case", "phase", "one", "two", "three"], lines, keys=2), 80, emphasise=1)
    assert shown.count("a" * 30) == shown.count("fwd") == 3 and shown.count("Title") == 1
    assert all(digit * 20 in shown for digit in "123")


def test_text_is_wrapped_in_a_terminal_and_a_unit_stays_with_its_number():
    sentence = "The largest difference is far below what is allowed, which here is 12 MiB and 0.5 s or " + "x" * 30
    for terminal in (True, False):
        console = Console(file=StringIO(), width=72, force_terminal=terminal, highlight=False)
        print_text(console, f"  {sentence}\nend")
        lines = console.file.getvalue().splitlines()
        assert len(lines) == (3 if terminal else 2), lines
        assert not terminal or (lines[0].endswith("which here is") and lines[1].startswith("      12 MiB"))


@each_case("options", [("--dtype", "fp64", "--device", "sm_90"), ("--backend", "hopper", "--device", "cpu")])
def test_explain_fails_where_no_backend_serves_the_call_and_says_each_reason_once(options):
    result = invoke("explain", *options)
    assert result.exit_code == 1 and result.output.startswith("backend: none"), result.output
    reasons = [line.partition(": ")[2] for line in result.output.splitlines()]
    assert len(set(reasons)) == len(reasons) and "IO model" not in result.output
    assert result.output.count("its kernels are for sm_90") + result.output.count("backend='reference'") == 1


def test_explain_takes_a_call_without_keys():
    plain = invoke("explain", "--dtype", "fp32", "--device", "cpu", "--seq-k", 5, "--causal")
    empty = invoke("explain", "--dtype", "fp32", "--device", "cpu", "--seq-k", 0)
    assert plain.exit_code == empty.exit_code == 0 and plain.output.startswith("backend: cpu"), plain.output
    assert "the call is empty" in empty.output and "the call is empty" not in plain.output, empty.output


def test_explain_for_an_architecture_that_is_not_here():
    result = invoke("explain", "--device", "sm_90", "--head-dim", 128)
    assert result.exit_code == 0, result.output
    assert "hopper" in result.output
    assert "IO model: forward and backward on H100" in result.output and "out = weights · v" in result.output
    assert "IO model" not in invoke("explain", "--device", "sm_90", "--no-io").output


@each_case("name", ["h100", "H200", "GH-200"])
def test_explain_knows_gpus_by_their_names(name):
    result = invoke("explain", "--device", name)
    assert result.exit_code == 0 and result.output.startswith("backend: hopper on sm_90"), result.output
    assert f"on {'H200' if name == 'H200' else 'H100'}" in result.output


@each_case(
    "options, call",
    [
        (("--mask", "b11k"), lambda meta: {"mask": meta(2, 1, 1, 1024).bool()}),
        (("--bias", "1HQK"), lambda meta: {"bias": meta(1, 16, 1024, 1024).requires_grad_()}),
        (("--bias", "1HSS", "--seq-k", 77), lambda meta: {"bias": meta(1, 16, 1024, 77).requires_grad_()}),
        (("--sinks", "--align", "top_left"), lambda meta: {"sinks": meta(16).float(), "align": "top_left"}),
        (
            ("--block-mask", "window:256,0"),
            lambda meta: {"block_mask": flashtile.patterns.sliding_window(1024, 1024, 256, 0).to("meta")},
        ),
        (("--softcap", 30, "--alibi"), lambda meta: {"softcap": 30.0, "alibi_slopes": meta(16).float()}),
        (
            ("--lengths", "300,1024, 7", "--causal"),
            lambda meta: {"cu_seqlens_q": meta(4).int(), "max_seqlen_q": 1024, "max_seqlen_k": 1024, "causal": True},
        ),
    ],
)
def test_explain_describes_what_changes_scores_and_packed_calls(options, call):
    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    of_call = call(meta)
    rows = (1331,) if "cu_seqlens_q" in of_call else (2, 1024)
    q, k = meta(*rows, 16, 64), meta(*((2, 77) if "--seq-k" in options else rows), 16, 64)
    expected = str(flashtile.explain(q, k, k, device="sm_90", **of_call))
    result = invoke("explain", "--device", "h100", *(() if "--lengths" in options else ("--batch", 2)), *options)
    assert result.exit_code == 0 and result.output.startswith(expected), (result.output, expected)
    assert "sm_90 need not be in this machine: the answer is from flashtile's table of devices" in result.output
    assert "IO model: no figures, because it does not cover packed sequences" in " ".join(result.output.split())


def test_explain_describes_8_bit_inputs_and_answers_in_json():
    q = torch.empty(2, 64, 16, 64, dtype=torch.float8_e4m3fn, device="meta")
    ones = {f"descale_{name}": torch.empty(2, 16, device="meta") for name in "qkv"}
    expected = flashtile.explain(q, q, q, device="sm_90", **ones)
    options = ("--device", "h100", "--batch", 2, "--seq", 64, "--dtype", "fp8", "--json")
    found = json.loads(invoke("explain", *options).stdout)
    assert found["backend"] == expected.backend and found["rejected"] == expected.rejected
    assert [kernel["summary"] for kernel in found["kernels"]] == [kernel.summary for kernel in expected.kernels]
    assert not found["device_is_here"] and "8-bit inputs" in found["io_model"]
    lines = json.loads(invoke("explain", "--device", "h100", "--json").stdout)["io_model"]
    assert {"computation", "GFLOP", "GB moved"} <= lines[0].keys()
    nobody = invoke("explain", "--device", "h100", "--dtype", "fp64", "--json")
    assert nobody.exit_code == 1 and json.loads(nobody.stdout)["backend"] is None


@needs_no_gpu
def test_explain_says_that_the_gpu_it_is_asked_about_is_not_here():
    result = invoke("explain", "--device", "cuda")
    assert result.exit_code == 2 and "--device: expected a GPU that is here, got cuda" in result.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--device", "cpu", "--io"), "forward and backward on this CPU"),
        (("--device", "cpu"), "--io measures"),
        (("--device", "sm_75", "--dtype", "fp16"), "no data sheet of sm_75"),
        (("--device", "sm_90", "--seq", 0), "seq_q: expected an int of at least 1"),
        (("--device", "sm_90", "--head-dim", 128), "no figures of torch.float32 with heads of 128 on sm_90"),
        (("--device", "sm_90", "--head-dim", 512, "--dtype", "bf16"), "no figures of torch.bfloat16 with heads of 512"),
        (("--device", "sm_90", "--head-dim", 512, "--backend", "triton"), "out = weights · v"),
        (("--device", "sm_90", "--backend", "reference"), "expected one with tiles"),
    ],
    ids=str,
)
def test_explain_tells_what_moves_or_why_it_does_not(options, text):
    result = invoke("explain", "--dtype", "fp32", *options)
    assert result.exit_code == 0 and text in result.output, result.output


@pytest.mark.parametrize(
    "options, message",
    [
        (("--dtype", "int8"), "--dtype: expected one of fp16, bf16, fp32, fp64, fp8, got 'int8'"),
        (("--window", "many"), "--window: expected LEFT,RIGHT"),
        (("--mask", "BK"), "--mask: expected BHQK for [batch, heads, seq_q, seq_k], with 1 where"),
        (("--lengths", "3;4"), "--lengths: expected the lengths of packed sequences, such as 300,1024, got '3;4'"),
        (("--lengths", "3,4", "--seq-k", 4), "--seq-k: expected none beside --lengths"),
        (("--lengths", 5, "--batch", 3), "--batch: expected none beside --lengths"),
        (("--lengths", 5, "--seq", 5), "--seq: expected none beside --lengths"),
        (("--block-mask", "window:3"), "--block-mask: expected causal, window:LEFT,RIGHT"),
        (("--align", "left"), "align: expected one of 'bottom_right', 'top_left', got 'left'"),
        (("--device", "h300"), "got h300; name the architecture of a GPU whose name is not known"),
        (("--heads", 3, "--heads-kv", 2), "expected a number of heads that divides"),
        (("--dropout-p", 2), "expected a probability"),
        (("--backend", "magic"), "expected one of 'auto'"),
        (("--seq", 10**18), "--head-dim: expected tensors of fewer than 2**63 bytes, got shape (1, 10"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_explain_reports_mistakes(options, message):
    result = invoke("explain", *options)
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_windows_are_pairs():
    assert parse_window(None) is None
    assert parse_window("256, 0") == (256, 0)
    assert parse_window("none,7") == (None, 7)
    with pytest.raises(UserError):
        parse_window("1,2,3")


@needs_no_gpu
def test_warmup_without_a_gpu_says_so():
    result = invoke("warmup")
    assert result.exit_code == 2 and "nothing to compile for" in result.output


def test_warmup_runs_every_shape():
    wanted = warmup.shapes([8, 16], ["fp32"], None, heads=2, heads_kv=1, seq=16)
    for case in wanted:
        warmup.warm_up(case, CPU)
    assert len(wanted) == 4
    assert {(case.D, case.causal) for case in wanted} == {(d, c) for d in (8, 16) for c in (False, True)}


def test_warmup_reports_an_impossible_shape():
    with pytest.raises(UserError, match="head_dim from 1 to 512, got 600"):
        warmup.warm_up(*warmup.shapes([600], ["fp32"], True, 1, None, 4), CPU)


@needs_no_gpu
def test_bench_attention_prints_tables_and_writes_the_record(tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    cases = [Case(1, seq, 2, 2, 16, 16, causal=True, dtype="fp32") for seq in (64, 128)]
    monkeypatch.setitem(BENCHMARKS, "attention", replace(BENCHMARKS["attention"], choose=lambda given, device: cases))
    result = invoke("bench", "attention", "--cases", "causal-s64-fp32", "--impl", "sdpa-flash,sdpa-math", "-o", output)
    assert result.exit_code == 0, result.output
    assert "Attention fwd: TFLOP/s" in result.stdout and "Attention bwd: TFLOP/s" in result.stdout
    assert "[1/1" in result.stderr and "[1/1" not in result.stdout
    assert {row["impl"] for row in json.loads(output.read_text())["rows"]} == {"sdpa-flash", "sdpa-math"}


@each_case(
    "command, case, implementation",
    [
        ("attention", "d64-causal-s1024-fp32", "sdpa-flash"),
        ("companions", "cases of rotary:", "eager"),
        ("serving", "q1-b1-s2048", "matmul"),
        ("train", "gpt2-tiny-b2-s64-fp32", "transformers-sdpa"),
    ],
)
@needs_no_gpu
def test_bench_lists_its_choices(command, case, implementation):
    result = invoke("bench", command, "--list")
    assert result.exit_code == 0 and case in result.output and implementation in result.output


@each_case("option", ["attention --cases", "attention --impl", "attention --table", "companions --op"])
def test_bench_reports_unknown_names(option):
    result = invoke("bench", *option.split(), "nonsense")
    assert result.exit_code == 2 and "there are:" in result.output and "Traceback" not in result.output


@needs_no_gpu
@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_bench_refuses_what_is_no_time(seconds, monkeypatch):
    monkeypatch.setattr(commands, "Recorder", None)
    result = invoke("bench", "attention", "--quick", "--seconds", seconds)
    assert result.exit_code == 2 and "--seconds: expected a time of at least 0, got" in result.output, result.output


@needs_no_gpu
def test_a_record_stands_beside_a_later_one_and_makes_a_page(tmp_path):
    record, arguments = tmp_path / "record.json", ("bench", "host-time", "--quick", "--impl", "sdpa-flash")
    assert invoke(*arguments, "-o", record).exit_code == 0
    later = invoke(*arguments, "--compare", record)
    assert later.exit_code == 0 and "Beside the earlier record" in later.output, later.output
    page = invoke("report", record, "-o", tmp_path / "page.html")
    assert page.exit_code == 0 and "0 charts and 3 tables of a record:" in page.output, page.output
    assert "Host time" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.slow
@needs_no_gpu
def test_host_time_is_of_what_calls_may_have(tmp_path):
    output = tmp_path / "record.json"
    result = invoke("bench", "host-time", "--impl", "flashtile-cpu", "-o", output)
    assert result.exit_code == 0 and "Host time per call" in result.output, result.output
    rows = json.loads(output.read_text())["rows"]
    assert {row["op"] for row in rows} == {"attention-host"} and all(row["ms"] for row in rows), rows
    kinds = {key for row in rows for key in ("window", "lengths", "bias", "mask", "function") if row["case"].get(key)}
    assert len(kinds) == 5 and len(rows) == 3 * 11


def test_bench_reports_what_it_cannot_compare_with(tmp_path):
    both = invoke("bench", "train", "--compare", "a", "--against", "b")
    assert both.exit_code == 2 and "expected one of them, got both" in both.output
    for command in (("bench", "attention", "--compare"), ("report",)):
        missing = invoke(*command, tmp_path / "none.json")
        assert missing.exit_code == 2 and "cannot be read" in missing.output and "Traceback" not in missing.output
    nowhere = invoke("bench", "attention", "--against", "no-such-branch")
    assert nowhere.exit_code == 2 and "no-such-branch" in nowhere.output and "Traceback" not in nowhere.output


def test_bench_draws_a_bar_in_a_terminal():
    case = Case(1, 512, 4, 4, 64, 64)
    for terminal in (True, False):
        file = StringIO()
        with progress(Console(file=file, force_terminal=terminal, width=200)) as (on_case, announce):
            announce("compiling")
            on_case(0, 3, case, None)
            announce("checking fa4")
            begun = file.getvalue()  # before it has ended
            on_case(0, 3, case, [])
        written = file.getvalue()
        assert ("1/3" in written.replace("[1/3", "")) == terminal and "no speed" in written
        assert "checking fa4" in begun and ("measuring d64" in begun) == terminal
        assert ("compiling\n[1/3] d64-full-s512-bf16; checking fa4\n[1/3, 0 s]" in written) != terminal


def test_lists_are_words_commas_or_repeated_options(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "measure", lambda command, options, *rest: seen.append(options) or {"rows": []})
    for names in (("a", "b"), ("a,b",), ("a", "--impl", "b")):
        result = invoke("bench", "train", "--impl", *names, "--quick", "--context", 8, 16)
        assert result.exit_code == 0, result.output
        (options,) = (seen.pop(),)
        assert commands._split(options["impl"]) == ["a", "b"] and options["context"] == [8, 16] and options["quick"]
    stray = invoke("bench", "train", "--quick", "a")
    assert stray.exit_code == 2 and not seen


@needs_no_gpu
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_record_that_a_full_disk_does_not_take_is_said(tmp_path, monkeypatch):
    result = invoke("bench", "host-time", "--quick", "--output", "/dev/full")
    assert result.exit_code == 2 and "error: /dev/full cannot be written: No space left on device" in result.output
    record, write = tmp_path / "record.json", Path.write_text
    record.write_text("earlier")

    def half(self, text, **rest):
        write(self, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    result = invoke("bench", "host-time", "--quick", "--output", record)
    assert result.exit_code == 2 and record.read_text() == "earlier" and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "Recorder", None)
    monkeypatch.setattr(commands, "measure_against", None)
    record = tmp_path / "record.json"
    record.write_text('{"rows": []}')
    for arguments in (
        ("bench", "attention"),
        ("bench", "host-time"),
        ("bench", "serving", "--against", "HEAD"),
        ("report", record),
    ):
        result = invoke(*arguments, "-o", tmp_path)
        assert result.exit_code == 2 and "--output: expected a file that can be written, got" in result.output, result
    assert record.read_text() == '{"rows": []}'


def test_missing_packages_are_named_with_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        flashtile.cli.main()
    assert stop.value.code == (
        'the command line needs typer and rich: in a checkout of flashtile, pip install ".[cli]"'
    )
