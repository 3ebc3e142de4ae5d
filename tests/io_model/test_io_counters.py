"""The script that reads a GPU's counters: its parsing, its errors, its row; on a GPU the whole."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import io_model
from support.running.each_case import each_case

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "io_counters.py"
RECORD = SCRIPT.parent / "results" / "h200-io.json"
spec = importlib.util.spec_from_file_location("io_counters", SCRIPT)
io_counters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(io_counters)

H200 = io_model.DEVICES["H200"]
SHAPE = io_model.Shape(2, 2, 64, 16, dtype=torch.float32, causal=True, dropout_p=0.1)
CSV = """==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Context","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","byte","byte"
"0","7","void gemm<float, 4>(int)","1","1,024","2048"
"1","7","attention_forward_kernel","1","300.00","0"
"""


def test_kernels_are_read_from_what_ncu_prints():
    assert io_counters.parse(CSV) == [
        {"name": "void gemm<float, 4>(int)", "bytes_read": 1024, "bytes_written": 2048},
        {"name": "attention_forward_kernel", "bytes_read": 300, "bytes_written": 0},
    ]
    assert io_counters.parse("==WARNING== No kernels were profiled.\n") == []


@each_case(
    "text, message",
    [
        (CSV.replace("dram__bytes_read.sum", "other"), "no column 'dram__bytes_read.sum'"),
        (CSV.replace('"byte","byte"', '"Mbyte","byte"'), "expected bytes, ncu printed 'Mbyte'"),
        (CSV.replace('"1,024"', '"n/a"'), "counted nothing for void gemm"),
    ],
)
def test_what_ncu_did_not_count_is_an_error(text, message):
    with pytest.raises(io_counters.CountersError, match=message):
        io_counters.parse(text)


def fake_ncu(tmp_path, body):
    path = tmp_path / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def options(*arguments):
    return io_counters._parser().parse_args(arguments)


def test_the_child_gets_the_case_and_its_kernels_come_back(tmp_path):
    ncu = fake_ncu(tmp_path, f"open({str(tmp_path / 'seen')!r}, 'w').write(' '.join(sys.argv[1:]))\nprint({CSV!r})")
    child = io_counters.child_of(SCRIPT, "standard", options("--seq", "77", "--causal"), ("dropout", "dtype"))
    found = io_counters.profile(ncu, "standard", child)
    assert len(found) == 2
    seen = (tmp_path / "seen").read_text()
    assert "--child standard --batch 64 --heads 16 --seq 77 --head-dim 64 --dropout 0.1 --dtype bf16 --causal" in seen
    assert "--clock-control none" in seen and "--profile-from-start off" in seen


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit(1)", "may not read the GPU's counters"),
        ("print('no such child'); sys.exit(9)", "ncu ended with 9 for flashtile:\nno such child"),
        ("print('==PROF== nothing')", "counted no kernel of flashtile"),
    ],
    ids=["permission", "failed", "nothing"],
)
def test_what_ncu_says_is_passed_on(tmp_path, body, message):
    with pytest.raises(io_counters.CountersError, match=message):
        io_counters.profile(fake_ncu(tmp_path, body), "flashtile", [str(SCRIPT)])


def test_without_ncu_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(io_counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(io_counters, "_PLACES", ())
    monkeypatch.delenv("NCU", raising=False)
    with pytest.raises(io_counters.CountersError, match="--no-counters"):
        io_counters.find_ncu()
    monkeypatch.setenv("NCU", str(SCRIPT))
    assert io_counters.find_ncu() == str(SCRIPT)
    monkeypatch.delenv("NCU")
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    monkeypatch.setattr(io_counters, "_PLACES", (f"{tmp_path}/*/ncu",))
    assert io_counters.find_ncu() == str(tmp_path / "2025.3" / "ncu")


def test_both_computations_run():
    """On a CPU: the calls whose traffic is counted on a GPU."""
    for name in ("standard", "flashtile"):
        dq, dk, dv = io_counters.make_call(name, SHAPE, "cpu")()
        assert dq.shape == dk.shape == dv.shape and all(t.isfinite().all() for t in (dq, dk, dv))


def test_the_table_compares_what_was_counted_with_what_was_predicted():
    model = io_model.standard(SHAPE)
    kernels = [{"name": "k", "bytes_read": int(model.bytes), "bytes_written": int(model.bytes)}]
    rows = [io_counters.row("standard", SHAPE, model, H200, 2.5, found) for found in (kernels, None)]
    first, second = io_counters.table(rows).markdown().splitlines()[2:]
    assert "2.000" in first and "2.500" in first and second.count("–") == 2
    assert json.loads(json.dumps(rows))[0]["counted"]["kernels"] == kernels
    assert rows[1]["why"] == "run with --no-counters"


@each_case("row", json.loads(RECORD.read_text("utf-8"))["rows"])
def test_the_model_predicts_what_the_record_counted(row):
    """The model as it is, whatever it predicted when the record was made. The record has the portable kernels."""
    case = row["case"]
    shape = io_model.Shape(
        *(case[key] for key in "BHSD"),
        dtype=getattr(torch, case["dtype"]),
        causal=case["causal"],
        dropout_p=case["dropout_p"],
    )
    model = io_model.standard(shape) if row["impl"] == "standard" else io_model.tiled(shape, H200, backend="triton")
    counted = row["counted"]["bytes_read"], row["counted"]["bytes_written"]
    assert (model.bytes_read, model.bytes_written) == pytest.approx(counted, rel=0.03)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_script_says_so(capsys):
    assert io_counters.main([]) == 2 and capsys.readouterr().err.startswith("io_counters: needs a GPU")


@pytest.mark.gpu
def test_the_whole_on_a_gpu(tmp_path):
    """Counted traffic of both computations is that of the model, within 15 %; where ncu is missing, times."""
    if io_model.find_device(torch.cuda.get_device_name()) is None:
        pytest.skip(f"no data sheet of {torch.cuda.get_device_name()}")
    try:
        io_counters.find_ncu()
        counters = []
    except io_counters.CountersError:
        counters = ["--no-counters"]
    output = tmp_path / "io.json"
    arguments = ["--batch", "16", *counters, "--output", output]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["impl"]: row for row in json.loads(output.read_text())["rows"]}
    assert rows["flashtile"]["ms"] < rows["standard"]["ms"]
    for row in rows.values():
        predicted = sum(row["predicted"][key] for key in ("bytes_read", "bytes_written"))
        if counters:
            assert row["counted"] is None
        else:
            counted = sum(row["counted"][key] for key in ("bytes_read", "bytes_written"))
            assert abs(counted / predicted - 1) < 0.15, row["impl"]
