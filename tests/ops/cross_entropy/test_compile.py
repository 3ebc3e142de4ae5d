"""The cross-entropy kernels compiled ahead of time for every architecture, none of which need be present."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import devices
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.launch import KernelSource, Plan
from flashtile._backends.pipeline import Pipeline
from flashtile.ops.cross_entropy import kernels
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, LossInputs, LossUpstream
from support.compilation.checked_code import check_code
from support.compilation.machine_code import TURNS, Binary, call_on, check_fit, once_in_families, sass

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """A call as the launch sees it: contiguous logits, but for `padding` between rows and the address modulo 16."""

    width: int = 50257
    dtype: torch.dtype = _BF16
    label_dtype: torch.dtype = torch.int64
    smoothing: float = 0.0
    scale: float = 1.0
    padding: int = 0
    misalignment: int = 0
    rows: int = 8192
    partial: bool = False
    weighted: bool = False
    softcap: float = 0.0

    def spec(self) -> CrossEntropySpec:
        return CrossEntropySpec(self.smoothing, self.scale, 0.01, -100, "mean", False, 0, self.width, "", self.softcap)

    def inputs(self) -> LossInputs:
        """The layouts of its tensors."""
        logits: Any = Layout((self.rows, self.width), (self.width + self.padding, 1), self.dtype)
        labels: Any = contiguous((self.rows,), self.label_dtype)
        weights: Any = contiguous((self.width + 1,), _FP32) if self.weighted else None
        return LossInputs(logits, labels, weights)


def forward_plan(device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a forward call."""
    function = kernels.read if call.partial else kernels.forward
    return _planned(function, device, call.inputs(), call.spec(), at=call.misalignment).plans["forward"]


def backward_plan(device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a backward call whose gradient has memory of its own."""
    scalar: Any = contiguous((), _FP32)
    normaliser: Any = contiguous((call.rows, 2), _FP32)
    given = LossUpstream(scalar, scalar, *call.inputs(), normaliser)
    return _planned(kernels.backward, device, given, call.spec(), at=call.misalignment).plans["backward"]


def _planned(function: Any, device: devices.DeviceFacts, *arguments: Any, **at: int) -> Pipeline:
    with mock.patch.object(kernels, "device_facts", return_value=device):
        return function.__wrapped__(*arguments, device=torch.device("cuda", 0), **at)


_PLANS = {"forward": forward_plan, "backward": backward_plan}
_CALLS = {
    "50257": Call(),
    "padded": Call(padding=47, smoothing=0.1),
    "128256": Call(128256, scale=-0.5, label_dtype=torch.int32),
    "256000": Call(256000, partial=True, smoothing=0.1),
    "fp32": Call(dtype=_FP32, smoothing=0.1),
    "short": Call(1001),
    "capped": Call(softcap=30.0),
    "weighted": Call(smoothing=0.1, weighted=True, softcap=30.0),
}
_HOPPER = devices.KNOWN_DEVICES["sm_90"]


def _source(arch: str, kernel: str, name: str) -> KernelSource:
    return _PLANS[kernel](devices.KNOWN_DEVICES[arch], call_on(arch, _CALLS[name])).source


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    return {(kernel, name): _source(arch, kernel, name) for kernel in _PLANS for name in _CALLS}


def _matrix() -> dict[tuple[str, str, str], int]:
    """What is compiled, and the on-chip memory that it must fit."""
    cases = [(arch, kernel, "50257") for kernel, archs in zip(_PLANS, TURNS) for arch in archs]
    cases += [("sm_90", kernel, name) for kernel in _PLANS for name in _CALLS if name != "50257"]
    return once_in_families(cases, _source)


_MATRIX = _matrix()


@pytest.mark.parametrize("arch, kernel, name", [pytest.param(*case, id="-".join(case)) for case in _MATRIX])
def test_rows_of_any_width_are_read_in_whole_vectors(arch, kernel, name):
    source, memory = _source(arch, kernel, name), _MATRIX[arch, kernel, name]
    call = _CALLS[name]
    if arch == "sm_90" and not call.weighted and not call.softcap:  # class weights begin elsewhere, and tanh divides
        of_rows = 5 if kernel == "backward" else 2 + (call.smoothing > 0)  # differences from the first logit
        check_code(source, arch, _check_vectors, memory, kernel, of_rows)
    else:
        check_code(source, arch, check_fit, memory)


def _check_vectors(binary: Binary, shared_memory: int, kernel: str, of_rows: int) -> None:
    check_fit(binary, shared_memory)
    code = sass(binary)
    loads = re.findall(r"LDG\.E(\S*)", code)
    assert loads.count(".128") >= 2
    scalar = len(loads) - loads.count(".128")
    assert scalar <= of_rows, "beside labels and what there is one of for a row"
    # The exponential is one instruction: without it, small results would take three more.
    assert code.count("MUFU.EX2") and "FSETP.GEU.AND P0, PT, |" not in code.split("MUFU.EX2")[0]
    if kernel == "backward":
        assert "STG.E.128" in code, "tiles inside of a row are written so, too"
        assert ".128" not in "".join(re.findall(r"LDG\S*", code.partition("MUFU.EX2")[2])), "all loads come first"


def test_gradients_at_another_distance_from_a_vector():
    """Rows whose gradient cannot lie as they do are read and written in narrower vectors."""
    for misalignment, vector in ((0, 8), (2, 1), (4, 2), (8, 4)):
        plan = backward_plan(_HOPPER, Call(misalignment=misalignment))
        assert plan.source.constants["VECTOR"] == vector
        check_code(plan.source, "sm_90", check_fit, _HOPPER.shared_memory)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64], ids=str)
def test_reduction_compiles(label_dtype, mean):
    spec = Call().spec()._replace(reduction="mean" if mean else "sum", z_loss=True)
    call = Call(label_dtype=label_dtype, weighted=mean == (label_dtype is torch.int64))
    plan = _planned(kernels.forward, _HOPPER, call.inputs(), spec, at=0).plans["reduce"]
    check_code(plan.source, "sm_90", check_fit, _HOPPER.shared_memory)


@pytest.mark.parametrize("dtype", [_BF16, _FP32], ids=str)
def test_multiplication_is_in_whole_vectors(dtype):
    plan = _planned(kernels._multiply_pipeline, _HOPPER, dtype, 2**20).plans["multiply"]
    check_code(plan.source, "sm_90", _check_moves)


def _check_moves(binary: Binary) -> None:
    code = sass(binary)
    assert "LDG.E.128" in code and "STG.E.128" in code


@pytest.mark.parametrize("plan", _PLANS.values(), ids=_PLANS)
def test_other_rows_and_strides_need_no_other_binary(plan):
    expected = plan(_HOPPER, Call()).source
    assert plan(_HOPPER, Call(rows=77)).source == expected
    assert plan(_HOPPER, Call(padding=5)).source == expected
    assert plan(_HOPPER, Call(padding=64)).source == expected


@pytest.mark.parametrize(
    "width, rows, programs", [(50257, 3, 39), (4089, 7, 7), (4090, 7, 14), (10, 5, 5), (10, 0, 0), (1, 1, 1)]
)
def test_programs(width, rows, programs):
    """Tiles of the backward: one more where a row may begin inside of a vector."""
    assert backward_plan(_HOPPER, Call(width, rows=rows)).programs == programs
    assert forward_plan(_HOPPER, Call(width, rows=rows)).programs == rows


@pytest.mark.parametrize("width", [1, 7, 8, 17, 1000, 1024, 4096, 4097, 50257, 2**30])
def test_cuts_are_sound(width):
    cuts = itertools.product(devices.KNOWN_DEVICES.values(), (2, 4), (False, True), (False, True))
    for device, itemsize, aligned, backward in cuts:
        vector = 16 // itemsize if aligned else 1
        config = kernels.tile_config(kernels.TileKey(width, itemsize, vector, backward), device)
        threads = config.num_warps * device.warp_size
        assert config.block_n & (config.block_n - 1) == 0 and config.block_n % vector == 0
        assert threads <= 1024 and config.block_n * itemsize <= 64 * threads
        assert config.block_n <= max(64 * vector, 2 * (width + vector))
