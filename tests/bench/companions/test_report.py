"""Tables of companion records, from rows written by hand."""

from flashtile.bench.companion_cases import Copy, LayerNorm, RMSNorm
from flashtile.bench.report import mean_tables, speed_tables

SMALL, LARGE = LayerNorm("bf16", 16, 1024), LayerNorm("bf16", 16, 4096)


def row(case, impl, gbps, phase="fwd", **more):
    ms = None if gbps is None else case.bytes(phase) / gbps / 1e6
    return {
        "op": case.op,
        "phase": phase,
        "impl": impl,
        "case": case.record(),
        "ms": ms,
        "tflops": None,
        "gbps": gbps,
        **more,
    }


ROWS = [
    row(Copy("bf16", 32), "eager", 1000.0),
    row(Copy("bf16", 128), "eager", 4000.0),
    row(SMALL, "flashtile-triton", 900.0),
    row(SMALL, "eager", 450.0),
    row(SMALL, "quack", 1000.0),
    row(LARGE, "flashtile-triton", 3000.0),
    row(LARGE, "quack", None, why="it broke"),
    row(LARGE, "eager", 1000.0),
]


def test_speeds_are_beside_the_copy_of_about_the_same_size():
    (table,) = speed_tables(ROWS)
    assert table.title == "Companions fwd: GB/s"
    assert table.headings == [
        "case",
        "eager",
        "flashtile-triton",
        "quack",
        "flashtile-triton / copy",
        "flashtile-triton / best",
    ]
    lines = {line[0]: line[1:] for line in table.lines}
    assert lines["copy-32kib-bf16"] == ["1000", "–", "–", "–", "–"]
    assert lines[SMALL.name] == ["450", "900", "1000", "90%", "0.90"]
    assert lines[LARGE.name] == ["1000", "3000", "–", "75%", "3.00"]


def test_a_slow_copy_is_no_yardstick_beside_a_faster_one():
    """Neither another way to copy as many bytes, nor a copy of about as many; one of far more is no match."""
    others = [row(Copy("bf16", 32), "compile", 800.0), row(Copy("bf16", 64), "eager", 1200.0)]
    (table,) = speed_tables(ROWS + others)
    assert {line[0]: line[-2] for line in table.lines}[SMALL.name] == "75%"


def test_no_share_without_a_copy():
    assert speed_tables(ROWS[2:])[0].headings[-2:] == ["quack", "flashtile-triton / best"]


def test_means_are_those_of_each_operation():
    others = [row(RMSNorm("bf16", 16, 1024), impl, gbps) for impl, gbps in (("flashtile-triton", 2.0), ("eager", 4.0))]
    norms, rms = mean_tables([*ROWS, *others])
    assert norms.title == "Our speed over the peers': layer_norm" and rms.title.endswith(": rms_norm")
    lines = {line[0]: line[1:] for line in norms.lines}
    assert lines["flashtile-triton / best peer"] == ["fwd", "1.64", "0.90", "3.00", "2", "quack", SMALL.name]
    assert lines["flashtile-triton / eager"][1:4] == ["2.45", "2.00", "3.00"]
    assert rms.lines[0][2] == "0.50"


def test_the_same_sizes_of_two_operations_are_two_cases():
    both = [
        row(kind("bf16", 16, 64), impl, 1.0) for kind in (LayerNorm, RMSNorm) for impl in ("flashtile-triton", "eager")
    ]
    assert len(speed_tables(both)[0].lines) == 2


def test_peaks_have_a_table():
    rows = [row(SMALL, "flashtile-triton", 1.0, peak_mib=12.3), row(SMALL, "eager", 1.0, peak_mib=1000.0)]
    peaks = speed_tables(rows)[-1]
    assert peaks.title == "Memory beside what stays (MiB)" and peaks.lines == [[SMALL.name, "12", "1000"]]
