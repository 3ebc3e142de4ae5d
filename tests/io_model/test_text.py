"""Tables."""

from flashtile import io_model

H200 = io_model.DEVICES["H200"]
SHAPE = io_model.Shape(64, 16, 1024, 64, dropout_p=0.1)


def test_comparison_has_a_line_for_each_computation_and_kernel():
    short, long = (io_model.comparison(SHAPE, H200, kernels=kernels).splitlines() for kernels in (False, True))
    assert short[0] == "forward and backward on H200" and short[1].split()[:2] == ["GFLOP", "GB"]
    assert [line.split()[0] for line in short[2:]] == ["standard", "tiled"]
    kernels = len(io_model.standard(SHAPE).kernels) + len(io_model.tiled(SHAPE, H200).kernels)
    assert len(long) == len(short) + kernels
    assert short[2].split()[1:3] == ["825", "42.9"]


def test_summary_ends_with_the_sum():
    lines = io_model.summary(io_model.tiled(SHAPE, H200), H200).splitlines()
    assert lines[1].startswith("forward (hopper") and lines[-1].startswith("tiled")


def test_sweep_names_tiles_that_do_not_fit():
    table = io_model.sweep_table(io_model.sweep(SHAPE, H200, (64, 2048)))
    first, second = table.splitlines()[1:]
    assert first.startswith("64 × 64") and "too much" not in first
    assert "(too much)" in second
