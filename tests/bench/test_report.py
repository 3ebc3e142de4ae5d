"""Ratios, means and tables, from rows written by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from flashtile.bench.cases import Case
from flashtile.bench.companion_cases import Copy, LayerNorm, RMSNorm
from flashtile.bench.record import geometric_mean, make_row, peers, ratios_to_best, ratios_to_peer
from flashtile.bench.registry import case_name
from flashtile.bench.report import host_table, mean_tables, reasons, speed_tables
from flashtile.bench.tables import tables
from support.running.each_case import each_case

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"
TIMES = {"flashtile-hopper": 1.0, "flashtile-triton": 4.0, "fast": 2.0, "slow": 8.0}
CASES = [Case(2, 512, 4, 4, 64, 64).record(), Case(1, 1024, 4, 2, 64, 64, window=(8, 0)).record()]


def row(impl, case, ms, phase="fwd", **more):
    speed = None if ms is None else 100 / ms
    return {"op": "attention", "phase": phase, "impl": impl, "case": CASES[case], "ms": ms, "tflops": speed, **more}


ROWS = [
    row("flashtile-triton", 0, 2.0),
    row("fast", 0, 1.0),
    row("slow", 0, 8.0),
    row("flashtile-triton", 1, 1.0),
    row("fast", 1, None, why="it broke"),
    row("slow", 1, 2.0),
]


def test_ratios_compare_with_the_fastest_peer_of_each_case():
    found = ratios_to_best(ROWS)
    assert [(one["peer"], one["ratio"]) for one in found] == [("fast", 0.5), ("slow", 2.0)]
    assert geometric_mean(one["ratio"] for one in found) == pytest.approx(1.0)
    assert ratios_to_best([row("flashtile-cpu", 0, 1.0), row("fast", 0, 1.0, phase="bwd")]) == []
    assert [one["ratio"] for one in ratios_to_peer(ROWS, "fast")] == [0.5], "what it did not run is left out"
    assert [one["ratio"] for one in ratios_to_peer(ROWS, "slow")] == [4.0, 2.0]
    assert math.isnan(geometric_mean([])) and peers([*ROWS, row("never", 0, None, why="x")]) == ["fast", "slow"]


def test_speed_table_shows_speeds_gaps_and_ratios():
    (table,) = speed_tables(ROWS)
    assert table.headings == ["case", "flashtile-triton", "fast", "slow", "flashtile-triton / best"]
    assert table.lines[0] == ["b2-h4-d64-full-s512-bf16", "50", "100", "12.5", "0.50"]
    assert table.lines[1][1:] == ["100", "–", "50", "2.00"]


def test_mean_table_holds_best_and_each_peer():
    lines = {line[0]: line[2:] for line in mean_tables(ROWS)[0].lines}
    lowest_at = ["fast", "b2-h4-d64-full-s512-bf16"]
    assert lines["flashtile-triton / best peer"] == ["1.00", "0.50", "2.00", "2", *lowest_at]
    assert lines["flashtile-triton / fast"] == ["0.50", "0.50", "0.50", "1", *lowest_at]
    assert mean_tables([ROWS[0]]) == []


def test_means_are_those_of_each_of_our_implementations_phases_and_tables():
    both = [{**row("", 0, ms, phase), "impl": impl} for phase in ("fwd", "bwd") for impl, ms in TIMES.items()]
    window = tables(torch.device("cuda"))["window"][0].record()
    rows = [*both, *({**one, "case": window} for one in both)]
    default, of_window = mean_tables(rows)
    assert default.title.endswith("default table") and of_window.title.endswith("window table")
    assert [line[:3] for line in default.lines if line[0].endswith("best peer")] == [
        [f"{impl} / best peer", phase, ratio]
        for impl, ratio in (("flashtile-hopper", "2.00"), ("flashtile-triton", "0.50"))
        for phase in ("fwd", "bwd")
    ]
    assert len(of_window.lines) == len(default.lines)


@each_case("path", sorted(RECORDS.glob("*attention*.json")))
def test_committed_records_are_summarised(path):
    rows = json.loads(path.read_text("utf-8"))["rows"]
    titles = ["Attention fwd: TFLOP/s", "Attention bwd: TFLOP/s"]
    if any("peak_mib" in row for row in rows):
        titles.append("Memory beside what stays (MiB)")
    assert [table.title for table in speed_tables(rows)] == titles
    assert mean_tables(rows)[0].title.endswith("varlen table" if "packed" in path.stem else "default table")


def test_reasons_are_counted_once():
    assert reasons(ROWS) == ["fast: it broke (b1-h4:2-d64-full-w8:0-g2-s1024-bf16 fwd)"]
    assert case_name(ROWS[0]) == "b2-h4-d64-full-s512-bf16"


def test_host_table_is_in_microseconds():
    rows = [row("a", 0, 0.0123, phase="fwd"), row("a", 0, None, phase="fwd+bwd", why="x")]
    assert host_table(rows).lines == [["a", "12.3", "–"]]


SMALL, LARGE = LayerNorm("bf16", 16, 1024), LayerNorm("bf16", 16, 4096)


def gb_row(case, impl, gbps, phase="fwd", **more):
    ms = None if gbps is None else case.bytes(phase) / gbps / 1e6
    return make_row(case.op, phase, impl, case.record(), ms=ms, gbps=gbps, **more)


COMPANIONS = [
    gb_row(Copy("bf16", 32), "eager", 1000.0),
    gb_row(Copy("bf16", 128), "eager", 4000.0),
    gb_row(SMALL, "flashtile-triton", 900.0),
    gb_row(SMALL, "eager", 450.0),
    gb_row(SMALL, "quack", 1000.0),
    gb_row(LARGE, "flashtile-triton", 3000.0),
    gb_row(LARGE, "quack", None, why="it broke"),
    gb_row(LARGE, "eager", 1000.0),
]


def test_speeds_are_beside_the_copy_of_about_the_same_size():
    (table,) = speed_tables(COMPANIONS)
    assert table.title == "Companions fwd: GB/s"
    ours = [f"flashtile-triton / {other}" for other in ("copy", "best")]
    assert table.headings == ["case", "eager", "flashtile-triton", "quack", *ours]
    lines = {line[0]: line[1:] for line in table.lines}
    assert lines["copy-32kib-bf16"] == ["1000", "–", "–", "–", "–"]
    assert lines[SMALL.name] == ["450", "900", "1000", "90%", "0.90"]
    assert lines[LARGE.name] == ["1000", "3000", "–", "75%", "3.00"]
    assert speed_tables(COMPANIONS[2:])[0].headings[-2:] == ["quack", "flashtile-triton / best"], "no share without one"
    # Neither another way to copy as many bytes, nor a copy of about as many, is one beside a faster copy.
    slower = [gb_row(Copy("bf16", 32), "compile", 800.0), gb_row(Copy("bf16", 64), "eager", 1200.0)]
    (table,) = speed_tables(COMPANIONS + slower)
    assert {line[0]: line[-2] for line in table.lines}[SMALL.name] == "75%"


def test_means_are_those_of_each_operation():
    others = [
        gb_row(RMSNorm("bf16", 16, 1024), impl, gbps) for impl, gbps in (("flashtile-triton", 2.0), ("eager", 4.0))
    ]
    norms, rms = mean_tables([*COMPANIONS, *others])
    assert norms.title == "Our speed over the peers': layer_norm" and rms.title.endswith(": rms_norm")
    lines = {line[0]: line[1:] for line in norms.lines}
    assert lines["flashtile-triton / best peer"] == ["fwd", "1.64", "0.90", "3.00", "2", "quack", SMALL.name]
    assert lines["flashtile-triton / eager"][1:4] == ["2.45", "2.00", "3.00"]
    assert rms.lines[0][2] == "0.50"


def test_the_same_sizes_of_two_operations_are_two_cases():
    both = [
        gb_row(kind("bf16", 16, 64), impl, 1.0)
        for kind in (LayerNorm, RMSNorm)
        for impl in ("flashtile-triton", "eager")
    ]
    assert len(speed_tables(both)[0].lines) == 2


def test_peaks_have_a_table():
    rows = [gb_row(SMALL, "flashtile-triton", 1.0, peak_mib=12.3), gb_row(SMALL, "eager", 1.0, peak_mib=1000.0)]
    peaks = speed_tables(rows)[-1]
    assert peaks.title == "Memory beside what stays (MiB)" and peaks.lines == [[SMALL.name, "12", "1000"]]
