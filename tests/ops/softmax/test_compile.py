"""The softmax kernels compiled ahead of time for every architecture, none of which need be present."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import devices
from flashtile._backends.allocate import Layout, contiguous, contiguous_strides
from flashtile._backends.launch import KernelSource, Plan
from flashtile.ops.common.tiles import held_row_tile
from flashtile.ops.softmax import kernels
from flashtile.ops.softmax.spec import Merge, MergedPart, SoftmaxGradient, SoftmaxInputs, SoftmaxSpec
from support.compilation.checked_code import check_code
from support.compilation.machine_code import TURNS, Binary, call_on, check_fit, once_in_families, sass

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_KERNELS = ("forward", "backward")


class Call(NamedTuple):
    """A call as the launch sees it: aligned; a mask `[batch, 1, seq_q, seq_k]` where there is one."""

    width: int = 2048
    dtype: torch.dtype = _BF16
    causal: bool = False
    mask: bool = False
    rows: int = 2048


def plan(kernel: str, device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a call."""
    x = contiguous((8, 16, call.rows, call.width), call.dtype)
    mask = Layout(x.shape, (call.rows * call.width, 0, call.width, 1), torch.bool) if call.mask else None
    tensors = SoftmaxInputs(x, mask) if kernel == "forward" else SoftmaxGradient(x, x)
    spec, gpu = SoftmaxSpec(0.1, call.causal), torch.device("cuda", 0)
    with mock.patch.object(kernels, "device_facts", return_value=device):
        return kernels._pipeline(kernel, tensors, (0, 0), spec, gpu).plans[kernel]


_CALLS = {
    "causal": Call(causal=True),
    "mask": Call(mask=True),
    "mask_looped": Call(40000, mask=True),
    "causal_looped": Call(40000, causal=True),
    "16384": Call(16384, causal=True),
    "short": Call(200, mask=True),
    "fp32": Call(4096, _FP32),
}


def _source(arch: str, kernel: str, name: str) -> KernelSource:
    return plan(kernel, devices.KNOWN_DEVICES[arch], call_on(arch, _CALLS[name])).source


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    return {(kernel, name): _source(arch, kernel, name) for kernel in _KERNELS for name in _CALLS}


def _matrix() -> dict[tuple[str, str, str], int]:
    """What is compiled, and the on-chip memory that it must fit."""
    cases = [(arch, kernel, "causal") for kernel, archs in zip(_KERNELS, TURNS) for arch in archs]
    cases += [("sm_90", kernel, name) for kernel in _KERNELS for name in _CALLS if name != "causal"]
    return once_in_families(cases, _source)


_MATRIX = _matrix()


@pytest.mark.parametrize("arch, kernel, name", [pytest.param(*case, id="-".join(case)) for case in _MATRIX])
def test_compiles_without_spills(arch, kernel, name):
    on_hopper = arch == "sm_90"
    check_code(_source(arch, kernel, name), arch, _check_code, _MATRIX[arch, kernel, name], on_hopper, on_hopper)


def _check_code(binary: Binary, shared_memory: int, reads_vectors: bool, writes_vectors: bool) -> None:
    check_fit(binary, shared_memory)
    assert not reads_vectors or "LDG.E.128" in sass(binary), "rows are read in whole vectors"
    assert not writes_vectors or sass(binary).count("STG.E.128") == sass(binary).count("STG.E"), "and written so"


def test_other_numbers_of_rows_need_no_other_binary():
    for kernel in _KERNELS:
        device = devices.KNOWN_DEVICES["sm_90"]
        assert plan(kernel, device, Call(rows=77)).source == plan(kernel, device, Call()).source


@pytest.mark.parametrize("rows, width, programs", [(0, 64, 0), (5, 0, 0), (1, 2048, 128), (64, 64, 256)])
def test_programs(rows, width, programs):
    for kernel in _KERNELS:
        assert plan(kernel, devices.KNOWN_DEVICES["sm_90"], Call(width, rows=rows)).programs == programs


@pytest.mark.parametrize("width", [1, 17, 1024, 2049, 8192, 16385])
def test_cuts_are_sound(width):
    for device in devices.KNOWN_DEVICES.values():
        config = held_row_tile(width, device)
        assert config.num_warps * device.warp_size <= 1024
        assert 8 <= config.rows * config.block_n // (config.num_warps * device.warp_size) <= 32


def merge_plan(step: str, dtype: torch.dtype, width: int, device: devices.DeviceFacts) -> Plan:
    """The plan of a merge of aligned tensors `[2, 100, 3, width]`, in memory for a multiple of 16 columns."""
    shape, memory, of_rows = (2, 100, 3, width), (2, 100, 3, -(-width // 16) * 16), contiguous((2, 3, 100), _FP32)
    acc, out = (Layout(shape, contiguous_strides(memory), of) for of in (_FP32, dtype))
    tensors = Merge(acc, of_rows, of_rows) if step == "finish" else MergedPart(acc, of_rows, of_rows, out, of_rows)
    outputs = {"out": out, "lse": of_rows} if step == "finish" else {}
    with mock.patch.object(kernels, "device_facts", return_value=device):
        return kernels._merge_pipeline(step, tensors, 0, outputs, torch.device("cuda", 0)).plans[step]


def _merges() -> list[Any]:
    """The step with the most numbers for some architectures, all steps and widths for the one that they were run
    on."""
    cases = [("next", 512, arch) for arch in TURNS[0]]
    return cases + [(*case, "sm_90") for case in (("next", 40), ("next", 128), ("first", 128), ("finish", 128))]


@pytest.mark.parametrize("kernel, width, arch", _merges())
def test_the_merge_compiles_without_spills(kernel, width, arch):
    device = devices.KNOWN_DEVICES[arch]
    plan = merge_plan(kernel, _FP16 if arch == "sm_75" else _BF16, width, device)
    reads_vectors = arch == "sm_90" and width != 40
    check_code(plan.source, arch, _check_code, device.shared_memory, reads_vectors, False)


@pytest.mark.parametrize("dtype", [_BF16, _FP32], ids=str)
def test_the_merge_reads_statistics_before_any_thread_writes_them(dtype):
    """Threads read a row's maximum in two layouts, so that others than the one which writes it have it too."""
    device = devices.KNOWN_DEVICES["sm_90"]
    check_code(merge_plan("next", dtype, 64, device).source, "sm_90", _check_order)


def _check_order(binary: Binary) -> None:
    # The barrier is of another dialect from version to version.
    kinds = re.findall(r"\b(?:tt\.load|tt\.store|barrier)\b", binary.asm["ttgir"])
    first_store = kinds.index("tt.store")
    assert kinds[first_store - 1] == "barrier"
    assert kinds[: first_store - 1] == ["tt.load"] * (first_store - 1), "statistics are read before"
    assert kinds.count("tt.load") - (first_store - 1) == 2, "and acc and out after"
