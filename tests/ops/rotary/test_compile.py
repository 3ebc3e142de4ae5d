"""The rotary kernel compiled ahead of time for every architecture, none of which need be present."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
import torch

from support.compilation import needs_triton  # noqa: F401

# isort: split
from flashtile._backends import devices
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import KernelSource, Plan
from flashtile.ops.rotary import kernels
from flashtile.ops.rotary.spec import RotarySpec, Rotation
from support.compilation.checked_code import check_code
from support.compilation.machine_code import TURNS, Binary, call_on, check_fit, once_in_families, sass
from support.compilation.spills import companion_spills

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_HOPPER = devices.KNOWN_DEVICES["sm_90"]


class Call(NamedTuple):
    """A call as the launch sees it: contiguous, aligned."""

    shape: tuple[int, ...] = (4, 4096, 32, 128)
    half: int = 64
    dtype: torch.dtype = _BF16
    table_dtype: torch.dtype = _FP32
    inplace: bool = False
    interleaved: bool = False
    heads_q: int = 32
    heads_rotated: int = 32
    offsets_dtype: torch.dtype | None = None
    sequences: int | None = None
    of_rows: int | None = None


def plan(device: devices.DeviceFacts, call: Call) -> Plan:
    """The plan of a call."""
    has_k = call.heads_q < call.heads_rotated
    table = contiguous((8192, call.half), call.table_dtype)
    ids = call.offsets_dtype and call.of_rows and contiguous((call.shape[0], call.of_rows), call.offsets_dtype)
    rotation = Rotation(
        contiguous(call.shape, call.dtype), table, table, table if has_k else None, table if has_k else None,
        contiguous(call.shape[:1], call.offsets_dtype) if call.offsets_dtype and not ids else None,
        None if call.sequences is None else contiguous((call.sequences + 1,), torch.int32), ids,
    )  # fmt: skip
    spec = RotarySpec(call.interleaved, False, call.heads_q, call.heads_rotated, 0)
    with mock.patch.object(kernels, "device_facts", return_value=device):
        pipeline = kernels.forward.__wrapped__(rotation, spec, call.inplace, at=0, device=torch.device("cuda", 0))
    return pipeline.plans["rotary"]


_CALLS = {
    "plain": Call(),
    "interleaved": Call(interleaved=True),
    "few_heads": Call((4, 4096, 8, 128), table_dtype=_BF16, heads_q=8, heads_rotated=8),
    "inplace": Call(inplace=True, heads_rotated=24, heads_q=24),
    "partial": Call((4, 4096, 32, 80), 16),
    "head_96": Call((4, 4096, 32, 96), 48),
    "fp32": Call(dtype=_FP32),
    "ids": Call(offsets_dtype=torch.int64, of_rows=4096),
    "everything": Call(
        (16384, 12, 200), 50, interleaved=True, heads_q=4, heads_rotated=8, offsets_dtype=torch.int64, sequences=5
    ),
}


def _source(arch: str, name: str) -> KernelSource:
    return plan(devices.KNOWN_DEVICES[arch], call_on(arch, _CALLS[name])).source


def sources(arch: str) -> dict[tuple[str, str], KernelSource]:
    """What is compiled of every call here, by kernel and call (also for `tools/compile_survey.py`)."""
    return {("rotary", name): _source(arch, name) for name in _CALLS}


def _matrix() -> dict[tuple[str, str], int]:
    """What is compiled, and the on-chip memory that it must fit."""
    cases = [(arch, name) for arch in TURNS[0] for name in ("plain", "everything")]
    cases += [("sm_90", name) for name in _CALLS if name not in ("plain", "everything")]
    return once_in_families(cases, _source)


_MATRIX = _matrix()


@pytest.mark.parametrize("arch, name", [pytest.param(*case, id="-".join(case)) for case in _MATRIX])
def test_fits(arch, name):
    source = _source(arch, name)
    spilled = companion_spills(arch, "rotary", "rotary", name)
    vectors = arch == "sm_90" and name != "everything"
    direct = vectors and name not in ("interleaved", "head_96")
    check_code(source, arch, _check_code, _MATRIX[arch, name], spilled, vectors, direct)


def _check_code(binary: Binary, shared_memory: int, spilled: int, vectors: bool, direct: bool) -> None:
    """With `direct`, angles go straight to their pairs, not through shared memory."""
    check_fit(binary, shared_memory, spilled)
    if vectors:
        _assert_memory_is_read_and_written_16_bytes_at_a_time(sass(binary))
    if direct:
        assert not binary.shared_memory and "BAR.SYNC" not in sass(binary)


def _assert_memory_is_read_and_written_16_bytes_at_a_time(code: str) -> None:
    assert code.count("STG.E.128") == code.count("STG.E")
    assert code.count("LDG.E.128") >= code.count("STG.E.128"), "the angles may be read otherwise"


@pytest.mark.parametrize("change", [{"shape": (2, 999, 32, 128)}, {"heads_rotated": 20, "heads_q": 20}], ids=str)
def test_other_sizes_need_no_other_binary(change):
    assert plan(_HOPPER, Call(**change)).source == plan(_HOPPER, Call()).source


@pytest.mark.parametrize(
    "shape, half, inplace, programs",
    [
        ((4, 4096, 32, 128), 64, False, 16384),
        ((0, 4096, 32, 128), 64, False, 0),
        ((4, 0, 32, 128), 64, True, 0),
        ((4, 4, 32, 128), 0, True, 0),
    ],
)
def test_programs(shape, half, inplace, programs):
    assert plan(_HOPPER, Call(shape, half, inplace=inplace)).programs == programs


@pytest.mark.parametrize("half", [0, 1, 16, 40, 64, 128, 256, 1000])
@pytest.mark.parametrize("heads", [1, 3, 32, 100])
def test_cuts_are_sound(heads, half):
    config = kernels.rotary_config(heads, 2 * half + 3, half, _HOPPER)
    assert config.block_s * config.block_h * config.block_half <= 1024
    assert config.block_half >= half and config.block_rest >= 3
