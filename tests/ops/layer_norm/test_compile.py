"""Every norm kernel compiled ahead of time for every architecture, none of which need be present.

What is held: nothing spills more than was found when the cuts were chosen, memory is read and written 16 bytes at a
time, the backward reads ahead, and programs that stay on a multiprocessor fit there together.
"""

from __future__ import annotations

import re
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
from flashtile.ops.common.tiles import held_row_tile
from flashtile.ops.layer_norm import kernels
from flashtile.ops.layer_norm.spec import MAX_COLUMNS, NormSpec, Operands, Upstream, Wanted
from support.compilation.checked_code import check_code
from support.compilation.machine_code import (
    Binary,
    binary_of,
    call_on,
    check_fit,
    once_in_families,
    sass,
    sharing_a_multiprocessor,
    with_news,
)
from support.compilation.spills import companion_spills

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32
_HOPPER = devices.KNOWN_DEVICES["sm_90"]


class Call(NamedTuple):
    """A call as the launch sees it.

    Attributes:
        optional: names of the optional tensors that are there.
        misalignment: the addresses of all tensors modulo 16.
    """

    width: int
    dtype: torch.dtype = _BF16
    sum_dtype: torch.dtype = _BF16
    weight_dtype: torch.dtype = _BF16
    optional: tuple[str, ...] = ("weight", "bias")
    rms: bool = False
    dropout_p: float = 0.0
    rows: int = 4096
    misalignment: int = 0

    def spec(self) -> NormSpec:
        return NormSpec(self.rms, 1e-5, self.dropout_p, 1.0, False, self.sum_dtype, self.rows)

    def dtypes(self, fields: tuple[str, ...]) -> dict[str, torch.dtype | None]:
        """By name; None for a tensor that is not there."""
        found = dict.fromkeys(("weight", "bias", "weight1", "bias1", "layerscale"), self.weight_dtype)
        found |= {
            "x0": self.dtype,
            "x1": self.dtype,
            "residual": self.sum_dtype,
            "rowscale": _FP32,
            "x": self.sum_dtype,
        }
        found |= {"x0_subset": torch.int32, "out_subset": torch.int64, "dropout_seed": torch.int64}
        found |= {"mean": _FP32, "rstd": _FP32, "dz": self.dtype, "dz1": self.dtype, "dx": self.sum_dtype}
        always = {"x", "rstd"} | (set() if self.rms else {"mean"})
        always |= {"dropout_seed"} if self.dropout_p else set()
        always |= {"dz"} | {
            given for given, tensor in (("dz1", "weight1"), ("dx", "residual")) if tensor in self.optional
        }
        always |= {"x0"} if "residual" in fields or "layerscale" in self.optional else set()
        return {name: found[name] if name in always or name in self.optional else None for name in fields}

    def tensors(self, kind: type) -> Any:
        """The layouts of `Operands` or `Upstream`."""
        matrices = {"x0", "x1", "residual", "x", "dz", "dz1", "dx"}
        rows = {"mean", "rstd", "rowscale", "x0_subset", "out_subset"}
        shapes = {**dict.fromkeys(matrices, (self.rows, self.width)), **dict.fromkeys(rows, (self.rows,))}
        dtypes = self.dtypes(kind._fields).items()
        return kind(*[None if t is None else contiguous(shapes.get(name, (self.width,)), t) for name, t in dtypes])


def forward_plan(device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a forward call."""
    return _planned(kernels.forward, device, call, call.tensors(Operands)).plans["forward"]


def backward_pipeline(device: devices.DeviceFacts, call: Call) -> Pipeline:
    """The launches of a backward call with a gradient of x from above where there is a residual."""
    wanted = Wanted(call.rows, "residual" in call.optional, "x1" in call.optional, True)
    return _planned(kernels.backward, device, call, call.tensors(Upstream), wanted)


def _planned(function: Any, device: devices.DeviceFacts, call: Call, tensors: Any, *wanted: Wanted) -> Any:
    with (
        mock.patch.object(kernels, "device_facts", return_value=device),
        mock.patch.object(kernels, "multiprocessors", return_value=132),
    ):
        facts = {"at": call.misalignment, "device": torch.device("cuda", 0)}
        return function.__wrapped__(tensors, call.spec(), *wanted, **facts)


_PLANS = {"forward": forward_plan, "backward": lambda device, call: backward_pipeline(device, call).plans["main"]}
_EVERYTHING = ("weight", "bias", "residual", "weight1", "bias1", "layerscale", "rowscale", "x0_subset", "out_subset")

_CALLS = {
    "1024": Call(1024),
    "4096": Call(4096),
    "8192": Call(8192),
    "16384": Call(16384),
    "65536": Call(MAX_COLUMNS),
    "fp32": Call(4096, _FP32, _FP32, _FP32),
    "mixed": Call(4096, sum_dtype=_FP32, weight_dtype=_FP32, optional=("weight", "bias", "residual"), dropout_p=0.1),
    "rms": Call(4096, optional=("weight",), rms=True),
    "odd": Call(1001, optional=("weight", "bias", "residual")),
    "dropout": Call(8192, optional=("weight", "bias", "residual"), dropout_p=0.1),
    "dropout_looped": Call(16384, optional=("weight", "bias", "residual"), dropout_p=0.1),
    "parallel": Call(4096, optional=("weight", "bias", "residual", "x1", "weight1", "bias1"), dropout_p=0.1),
    "everything": Call(4096, sum_dtype=_FP32, weight_dtype=_FP32, optional=_EVERYTHING, dropout_p=0.1),
    "everything_looped": Call(20000, sum_dtype=_FP32, weight_dtype=_FP32, optional=_EVERYTHING, dropout_p=0.1),
    "fp32_looped": Call(4100, _FP32, _FP32, _FP32, (*_EVERYTHING[:3], "weight1", "bias1", "layerscale"), dropout_p=0.3),
}
#: What is compiled for other architectures than sm_90, and on which: those that differ in memory or instructions. Long
#: rows take steps, for which the size of memory decides.
_OTHERS = {
    "forward": {"4096": ("sm_75", "gfx942"), "65536": ("sm_75",), "everything": ()},
    "backward": {"4096": ("sm_80", "gfx1100"), "65536": ("sm_86",), "everything": ("sm_75",)},
}


def _source(arch: str, phase: str, call: Call) -> KernelSource:
    return _PLANS[phase](devices.KNOWN_DEVICES[arch], call_on(arch, call)).source


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    return {(phase, name): _source(arch, phase, call) for phase in _PLANS for name, call in _CALLS.items()}


def _matrix() -> dict[tuple[str, str, str], int]:
    """What is compiled, and the on-chip memory that it must fit."""
    calls = [(arch, phase, name) for phase in _PLANS for name, archs in _OTHERS[phase].items() for arch in archs]
    calls += [("sm_90", phase, name) for phase in _PLANS for name in _CALLS]
    return once_in_families(calls, lambda arch, phase, name: _source(arch, phase, _CALLS[name]))


_MATRIX = _matrix()


def _with_kernels() -> list[Any]:
    kernels = {case: _source(*case[:2], _CALLS[case[2]]).function.__name__ for case in _MATRIX}
    return [pytest.param(*case, kernel, id="-".join(case)) for case, kernel in kernels.items()]


@pytest.mark.parametrize("arch, phase, name, kernel", _with_kernels())
def test_fits(arch, phase, name, kernel):
    source = _source(arch, phase, _CALLS[name])
    memory = _MATRIX[arch, phase, name] // sharing_a_multiprocessor(source)
    spilled = companion_spills(arch, "layer_norm", phase, name)
    vectors_of = phase if arch == "sm_90" and name in _WIDE else None
    adds_in_threads = (arch, phase, name) == ("sm_90", "backward", "dropout_looped")
    check_code(source, arch, _check_code, memory, spilled, vectors_of, adds_in_threads)


def _check_code(
    binary: Binary, shared_memory: int, spilled: int, vectors_of: str | None, adds_in_threads: bool
) -> None:
    check_fit(binary, shared_memory, spilled)
    if vectors_of:
        _assert_memory_is_read_and_written_16_bytes_at_a_time(vectors_of, sass(binary))
    if adds_in_threads:
        _assert_partial_sums_are_added_within_threads(sass(binary))


_WIDE = ["1024", "4096", "8192", "16384", "65536", "fp32", "rms", "dropout", "dropout_looped"]


def _assert_memory_is_read_and_written_16_bytes_at_a_time(phase: str, code: str) -> None:
    rows = 2 * 16 if phase == "forward" else 16
    wide = code.count("LDG.E.128") + code.count("LDGSTS.E.BYPASS.128") + code.count("LDGSTS.E.BYPASS.LTC128B.128")
    assert wide, "rows are read in whole vectors"
    assert code.count("STG.E.128") + code.count("STG.E.EF.128"), "rows are written in whole vectors"
    narrow = [line for line in code.splitlines() if "STG.E" in line and ".128" not in line]
    assert len(narrow) <= rows, "only statistics are written otherwise"
    if phase == "backward":
        assert "LDGSTS" in code, "the next rows are read while these are worked on"


def test_dropout_bits_are_made_where_they_are_used():
    """Without dropout as with it, only the two sums of a row pass through shared memory."""
    call = Call(4096, optional=("weight", "bias", "residual"))
    exchanges = [
        sass(binary_of(_source("sm_90", "forward", call._replace(dropout_p=p)), _HOPPER)).count("STS")
        for p in (0.0, 0.1)
    ]
    assert exchanges[0] == exchanges[1]


def test_long_rows_with_dropout_are_held_whole_where_sums_are_few():
    def looped(width: int, *more: str) -> bool:
        call = Call(width, optional=("weight", "bias", "residual", *more), dropout_p=0.1)
        return backward_pipeline(_HOPPER, call).plans["main"].source.constants["BLOCK_N"] < width

    assert not looped(8192) and not looped(8192, "layerscale")
    assert looped(8192, "weight1", "bias1") and looped(8193)


def _assert_partial_sums_are_added_within_threads(code: str) -> None:
    """In a step along a long row, warps wait for one another only for arriving tiles and for the sums of the row."""
    assert "LDGSTS.E.BYPASS.128" in code and "LDGSTS.E.64" not in code
    assert len(re.findall(r"\bSTS", code)) <= 6


_REDUCE = {name: backward_pipeline(_HOPPER, call).plans.get("reduce") for name, call in _CALLS.items()}


@pytest.mark.parametrize("name", with_news({name: plan.source for name, plan in _REDUCE.items() if plan is not None}))
def test_reduce_compiles(name):
    plan = _REDUCE[name]
    assert plan is not None
    check_code(plan.source, "sm_90", check_fit, _HOPPER.shared_memory)


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", _PLANS.values(), ids=_PLANS)
def test_other_numbers_of_rows_need_no_other_binary(plan):
    assert plan(_HOPPER, Call(1000)).source == plan(_HOPPER, Call(1000, rows=77)).source


@pytest.mark.parametrize(
    "misalignment, width, multiples", [(0, 4096, (16, 16)), (2, 4096, (2, 16)), (0, 1001, (16, 1)), (8, 1004, (8, 4))]
)
def test_alignment(misalignment, width, multiples):
    source = forward_plan(_HOPPER, Call(width, misalignment=misalignment)).source
    found = dict(zip(source.function.arg_names, source.multiples, strict=False))
    assert (found["x0_ptr"], found["stride_x0"]) == (found["z_ptr"], found["stride_residual"]) == multiples


@pytest.mark.parametrize("rows, programs", [(0, 0), (1, 1), (100, 100), (263, 263), (10**6, 264)])
def test_backward_programs_stay(rows, programs):
    found = backward_pipeline(_HOPPER, Call(4096, rows=rows))
    assert found.plans["main"].programs == programs
    assert (found.scratch.parts if found.scratch else {}) == ({"partial": (0, 2 * programs * 4096)} if programs else {})


@pytest.mark.parametrize("width", [1, 16, 17, 100, 1024, 1025, 2048, 4097, 8192, 8193, 16385, MAX_COLUMNS])
def test_cuts_are_sound(width):
    cuts = [(held_row_tile(width, device), device) for device in devices.KNOWN_DEVICES.values()]
    cuts += [
        (kernels.backward_config(kernels.BackwardKey(width, sums, size, dropout), device), device)
        for device in devices.KNOWN_DEVICES.values()
        for sums in range(6) for size in (4, 6, 12, 20) for dropout in (False, True)
    ]  # fmt: skip
    for config, device in cuts:
        assert config.num_warps * device.warp_size <= 1024
        assert config.block_n & (config.block_n - 1) == 0 and config.rows & (config.rows - 1) == 0
        assert 8 <= config.rows * config.block_n // (config.num_warps * device.warp_size) <= 32
        assert config.num_stages >= 1
        assert config.looped(width) or config.block_n < max(32, 2 * width)
