"""Devices: found by the names that drivers give them; what bounds a kernel; the processor at hand."""

import pytest
import torch

from flashtile import io_model
from flashtile._backends.devices import KNOWN_DEVICES
from flashtile.io_model.work import PHILOX_INTEGERS, Transfer, Work
from support.running.each_case import each_case

H200 = io_model.DEVICES["H200"]


@each_case(
    "name, found",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("sm_80", "A100"),
        ("sm_90", "H100"),
        ("gfx942", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GH200 480GB", None),
        ("sm_75", None),
    ],
)
def test_names(name, found):
    device = io_model.find_device(name)
    assert (device and device.name) == found


@each_case("name", io_model.DEVICES)
def test_architectures_are_known_and_programs_fit(name):
    device = io_model.DEVICES[name]
    assert device.shared_memory >= KNOWN_DEVICES[device.arch].shared_memory
    assert device.flops[torch.bfloat16] > device.flops[torch.float32] > 0


def work(**arithmetic):
    return Work("w", "fwd", torch.bfloat16, (Transfer("t", 4800),), **arithmetic)


def test_a_kernel_takes_as_long_as_its_longest_part():
    assert work().seconds(H200) == pytest.approx(1e-9) and work().bound(H200) == "memory"
    assert work(flops=989.4e12).times(H200)["tensor cores"] == pytest.approx(1)
    assert work(flops=989.4e12).bound(H200) == "tensor cores"
    assert work(exponentials=16 * 132 * 1.83e9).times(H200)["exponentials"] == pytest.approx(1)
    assert work(exponentials=1e9).bound(H200) == "exponentials"
    words = 4 * 64 * 132 * 1.83e9 / PHILOX_INTEGERS
    assert work(words=words).times(H200)["random numbers"] == pytest.approx(1)
    assert work().times(H200)["cache"] == pytest.approx(4800 / (5120 * 1.83e9))


def test_heads_of_64_wait_for_exponentials_as_long_as_for_products():
    """On Hopper a product over 64 columns and its exponentials take the same time; over 128 the products take twice."""
    for head_dim, ratio in ((64, 1.0), (128, 2.0)):
        times = io_model.tiled(io_model.Shape(1, 1, 4096, head_dim), H200, backward=False).times(H200)
        assert times["tensor cores"] / times["exponentials"] == pytest.approx(ratio, rel=0.01)


def test_float32_products_are_no_work_of_tensor_cores():
    shape = io_model.Shape(1, 1, 1024, 64, dtype=torch.float32)
    assert io_model.standard(shape).bound(H200) == "arithmetic"
    with pytest.raises(ValueError, match=r"H200 has no rate for products of torch\.float64"):
        io_model.standard(io_model.Shape(1, 1, 64, 64, dtype=torch.float64)).seconds(H200)


def test_sums_over_kernels():
    found = io_model.standard(io_model.Shape(1, 2, 256, 64))
    assert found.seconds(H200) == pytest.approx(sum(w.seconds(H200) for w in found.kernels))
    assert found.bytes == found.phase("fwd").bytes + found.phase("bwd").bytes
    assert found.intensity == pytest.approx(found.flops / found.bytes)
    assert found.times(H200)["memory"] == pytest.approx(found.bytes / H200.bandwidth)
    assert found.exponentials == 2 * 256 * 256 and found.requested == found.bytes


def test_this_processor_is_measured():
    device = io_model.measure_cpu()
    assert device is io_model.measure_cpu() and device.arch == "cpu"
    assert 1e8 < device.bandwidth < 1e13 and 1e8 < device.flops[torch.float32] < 1e15
    assert 2**16 < device.cache < 2**32 and device.exponentials > 1e6 and device.integers > 1e6
    shape = io_model.Shape(1, 2, 512, 64, dtype=torch.float32)
    text = io_model.comparison(shape, device)
    assert "this CPU" in text and io_model.standard(shape).bound(device) in text
