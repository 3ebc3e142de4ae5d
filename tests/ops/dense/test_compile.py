"""The kernels between the matrix products compiled ahead of time for every architecture, none of which need be present.

What is held: nothing spills, memory is read and written 16 bytes at a time, the backward reads ahead, and programs that
stay on a multiprocessor fit there together.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import devices
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import KernelSource, Plan
from flashtile._backends.pipeline import Pipeline
from flashtile.ops.dense import kernels
from flashtile.ops.dense.spec import ACTIVATIONS, Activated, ActivationSpec, ActivationUpstream, Summed, Wanted
from support.compilation.checked_code import check_code
from support.compilation.machine_code import (
    TURNS,
    Binary,
    call_on,
    check_fit,
    once_in_families,
    sass,
    sharing_a_multiprocessor,
)

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_KERNELS = ("activate", "activate_backward", "column_sum")
_HOPPER = devices.KNOWN_DEVICES["sm_90"]


class Call(NamedTuple):
    """A call as the launch sees it; `misalignment` of all addresses modulo 16."""

    activation: str = "gelu_tanh"
    gated: bool = False
    width: int = 4096
    dtype: torch.dtype = _BF16
    wants_hidden: bool = False
    wants_bias: bool = True
    rows: int = 16384
    misalignment: int = 0


def plan(kernel: str, device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a call."""
    if kernel == "activate":
        spec = ActivationSpec(call.activation, call.gated)
        given = Activated(contiguous((call.rows, call.width * (1 + call.gated)), call.dtype))
        return _planned(kernels.activate, device, given, spec, at=call.misalignment).plans["activate"]
    return sum_pipeline(kernel, device, call).plans["main"]


def sum_pipeline(kernel: str, device: devices.DeviceFacts, call: Call) -> Pipeline:
    """The launches of what may sum columns."""
    x = contiguous((call.rows, call.width), call.dtype)
    given = ActivationUpstream(x, contiguous((call.rows, call.width * (1 + call.gated)), call.dtype))
    scalars = (ActivationSpec(call.activation, call.gated), Wanted(call.wants_bias, call.wants_hidden))
    if kernel == "column_sum":
        given, scalars = Summed(x), ()
    return _planned(getattr(kernels, kernel), device, given, *scalars, at=call.misalignment)


def _planned(function: Any, device: devices.DeviceFacts, *arguments: Any, at: int) -> Any:
    with (
        mock.patch.object(kernels, "device_facts", return_value=device),
        mock.patch.object(kernels, "multiprocessors", return_value=132),
    ):
        return function.__wrapped__(*arguments, at=at, device=torch.device("cuda", 0))


_CALLS = {
    **{name: Call(name) for name in ACTIVATIONS},
    **{f"gated_{name}": Call(name, gated=True, wants_hidden=True) for name in ACTIVATIONS},
    "no_bias": Call(wants_bias=False, wants_hidden=True),
    "fp32": Call(dtype=_FP32, wants_hidden=True),
    "fp32_gated": Call("silu", dtype=_FP32, gated=True, wants_hidden=True),
    "narrow": Call(width=48),
    "odd": Call(width=1001, gated=True),
    "misaligned": Call(misalignment=2),
}
#: What is compiled for architectures that nobody has run these kernels on: what takes most registers of each.
_ELSEWHERE = {"activate": "gelu", "activate_backward": "gated_gelu"}
_ON_HOPPER = {
    "activate": ("gelu", "gated_gelu_tanh", "squared_relu", "fp32_gated", "narrow", "odd"),
    "activate_backward": tuple(name for name in _CALLS if name not in ("relu", "squared_relu", "silu")),
    "column_sum": ("gelu", "fp32", "odd"),
}


def _source(arch: str, kernel: str, name: str) -> KernelSource:
    return plan(kernel, devices.KNOWN_DEVICES[arch], call_on(arch, _CALLS[name])).source


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    return {(kernel, name): _source(arch, kernel, name) for kernel in _KERNELS for name in _CALLS}


def _matrix() -> dict[tuple[str, str, str], int]:
    """What is compiled, and the on-chip memory that it must fit."""
    cases = [(arch, *case) for case, archs in zip(_ELSEWHERE.items(), TURNS) for arch in archs if arch != "sm_90"]
    cases += [("sm_90", kernel, name) for kernel, names in _ON_HOPPER.items() for name in names]
    return once_in_families(cases, _source)


_MATRIX = _matrix()


@pytest.mark.parametrize("arch, kernel, name", [pytest.param(*case, id="-".join(case)) for case in _MATRIX])
def test_fits_and_spills_nothing(arch, kernel, name):
    source = _source(arch, kernel, name)
    memory = _MATRIX[arch, kernel, name] // sharing_a_multiprocessor(source)
    if arch == "sm_90" and name not in ("odd", "misaligned"):
        check_code(source, arch, _check_vectors, memory, kernel)
    else:
        check_code(source, arch, check_fit, memory)


def _check_vectors(binary: Binary, shared_memory: int, kernel: str) -> None:
    """Memory is read and written 16 bytes at a time, and by kernels that stay ahead of its use."""
    check_fit(binary, shared_memory)
    lines = sass(binary).splitlines()
    ahead = kernel != "activate"
    reads = [line for line in lines if ("LDGSTS" in line if ahead else "LDG.E" in line)]
    assert reads and all(".128" in line for line in reads)
    if ahead:
        assert not any("LDG.E" in line for line in lines), "nothing is read at the moment when it is needed"
    writes = [line for line in lines if "STG.E" in line]
    assert any(".128" in line for line in writes) or kernel == "column_sum"
    narrow = [line for line in writes if ".128" not in line]
    assert len(narrow) <= (0 if kernel == "activate" else 4), "only partial sums are written otherwise"


@pytest.mark.parametrize("name", ["gelu_tanh", "odd"])
def test_reduce_compiles(name):
    reduce = sum_pipeline("activate_backward", _HOPPER, _CALLS[name]).plans["reduce"]
    check_code(reduce.source, "sm_90", check_fit, _HOPPER.shared_memory)


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", _KERNELS)
def test_other_numbers_of_rows_need_no_other_binary(kernel):
    assert plan(kernel, _HOPPER, Call(rows=77)).source == plan(kernel, _HOPPER, Call()).source


@pytest.mark.parametrize("rows, width", [(0, 64), (5, 0), (0, 0)])
@pytest.mark.parametrize("kernel", _KERNELS)
def test_nothing_is_launched_for_nothing(kernel, rows, width):
    assert plan(kernel, _HOPPER, Call(rows=rows, width=width)).programs == 0
    if kernel != "activate":
        assert not sum_pipeline(kernel, _HOPPER, Call(rows=rows, width=width)).launches


@pytest.mark.parametrize(
    "rows, width, splits, programs",
    [(16384, 16384, 4, 256), (16384, 4096, 16, 256), (16, 4096, 1, 16), (17, 4096, 2, 32), (99, 300000, 1, 1172)],
)
def test_partial_sums_are_few(rows, width, splits, programs):
    """As many programs as are on the GPU at once, each with a strip of columns, and no split without a tile."""
    found = sum_pipeline("activate_backward", _HOPPER, Call(rows=rows, width=width))
    main, reduce = found.launches
    assert (main.programs, main.scalars, reduce.scalars) == (programs, (rows, splits), (splits,))
    assert found.scratch is not None and found.scratch.parts == {"partial": (0, splits * width)}


@pytest.mark.parametrize("width", [1, 17, 255, 257, 1024, 16385])
def test_cuts_are_sound(width):
    cuts = [(kernels.activate_config(width, device), device) for device in devices.KNOWN_DEVICES.values()]
    cuts += [
        (kernels.backward_config(width, gated, size, device), device)
        for device in devices.KNOWN_DEVICES.values() for gated in (False, True) for size in (2, 4, 6, 12)
    ]  # fmt: skip
    for config, device in cuts:
        assert config.num_warps * device.warp_size <= 1024
        assert config.block_n & (config.block_n - 1) == 0 and config.rows & (config.rows - 1) == 0
        assert config.rows * config.block_n // (config.num_warps * device.warp_size) in (8, 16)
        assert config.num_stages >= 1
