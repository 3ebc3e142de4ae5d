"""The script that times the forward against the size of its tiles."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import io_model
from flashtile.testing import assert_close
from support.running.places import of_kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tile_sweep.py"
SHAPE = io_model.Shape(1, 2, 70, 16, dtype=torch.float16, causal=True)
H200 = io_model.DEVICES["H200"]


@pytest.fixture
def tile_sweep(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("tile_sweep")


@of_kernels
@pytest.mark.parametrize("block_q", (16, 32))
def test_tiles_are_those_asked_for_and_give_the_result(tile_sweep, caplog, block_q, device):
    inputs = tile_sweep.make_inputs(SHAPE, device)
    with caplog.at_level("INFO", logger="flashtile.select"):
        out = tile_sweep.make_call(inputs, block_q, SHAPE.causal)()[0]
    assert tile_sweep.tile_configs.choose_tiles.__name__ == "choose_tiles", "the tables serve again"
    (made,) = [record.message for record in caplog.records]
    assert f"BLOCK_M={block_q}," in made
    oracle, eager = (
        flashtile.attention(*(x.to(dtype) for x in inputs), causal=True, backend="reference")
        for dtype in (torch.float64, SHAPE.dtype)
    )
    assert_close("out", out, oracle, eager)


def test_rows_and_table(tile_sweep):
    (point,) = io_model.sweep(SHAPE, H200, (64,))
    kernels = [{"name": "k", "bytes_read": 4e9, "bytes_written": 2e9, "cache_bytes": 5e9}]
    rows = [tile_sweep.row(SHAPE, point, 1.5, 0.0, found) for found in (kernels, None)]
    first, second = tile_sweep.table(rows).markdown().splitlines()[2:]
    assert first.startswith("| 64 ×") and "6.000" in first and "5.00" in first and second.count("–") == 2
    assert json.loads(json.dumps(rows))[0]["counted"]["cache_bytes"] == 5e9


@pytest.mark.gpu
def test_the_whole_on_a_gpu(tmp_path):
    if io_model.find_device(torch.cuda.get_device_name()) is None:
        pytest.skip(f"no data sheet of {torch.cuda.get_device_name()}")
    output = tmp_path / "tiles.json"
    arguments = ["--batch", "1", "--seq", "2048", "--no-counters", "--output", output]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["case"]["block_q"] for row in rows] == [16, 32, 64, 128]
    assert all(row["ms"] > 0 for row in rows)
