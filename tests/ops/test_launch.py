"""The launch layer: what a description of a kernel's parameters becomes, and what a launch passes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import weakref
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from flashtile._backends import clear_plans, devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)

import triton
import triton.language as tl

from flashtile._backends import launch, launcher, pipeline
from flashtile._backends.allocate import contiguous
from flashtile._backends.launch import ABSENT, GIVEN, Parameter, float32, int32, int64, pointer_to, stride_parameters
from flashtile._backends.launcher import Launcher
from flashtile._backends.pipeline import Kernel, Pipeline
from support.compilation.machine_code import compile_source
from support.running.each_case import each_case


@triton.jit
def scale_kernel(x_ptr, bias_ptr, stride_x_row, rows, factor, shift, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * stride_x_row + column, mask=column < WIDTH)
    tl.store(x_ptr + tl.program_id(0) * stride_x_row + column, x * factor + rows, mask=column < WIDTH)


_PARAMETERS = {
    "x_ptr": pointer_to(torch.float32, 16),
    "bias_ptr": pointer_to(None),
    **stride_parameters("x", {"row": 64, "head": 3}, 16),
    "rows": int32(5),
    "factor": float32(0.5),
    "shift": float32(None),
}
_CONSTANTS = {"BLOCK": 64, "WIDTH": 60, "OTHER": 1}
_CPU = torch.device("cpu")


def _plan(parameters: dict[str, Parameter], constants: dict[str, Any] = _CONSTANTS, programs: int = 5) -> launch.Plan:
    return Kernel(scale_kernel, parameters, constants, programs).plan(_CPU)


def test_a_description_becomes_types_multiples_constants_and_scalars():
    plan = _plan(_PARAMETERS)
    assert plan.source.types == ("*fp32", "constexpr", "i64", "i32", "fp32", "constexpr")
    assert plan.source.multiples == (16, 1, 16, 1, 1, 1)
    assert plan.source.constants == {"BLOCK": 64, "WIDTH": 60, "bias_ptr": None, "shift": None}
    assert plan.scalars == (64, 5, 0.5, None)


@each_case("missing", ["factor", "x_ptr", "WIDTH"])
def test_a_parameter_without_a_description_raises(missing):
    """It is not taken for an integer, nor for anything else."""
    parameters = {name: parameter for name, parameter in _PARAMETERS.items() if name != missing}
    constants = {name: value for name, value in _CONSTANTS.items() if name != missing}
    with pytest.raises(TypeError, match=f"scale_kernel: expected a description of each parameter, .* {missing}; add"):
        _plan(parameters, constants)


def test_what_a_launch_is_given_comes_first():
    with pytest.raises(AssertionError, match="comes before what the plan has"):
        _plan({**_PARAMETERS, "shift": Parameter("fp32", 1, GIVEN)})


def test_values_of_scalars_need_no_other_binary():
    other = {**_PARAMETERS, "rows": int32(77), "factor": float32(3.0)}
    assert _plan(other).source == _plan(_PARAMETERS).source
    assert _plan({**_PARAMETERS, "rows": int64(5)}).source != _plan(_PARAMETERS).source
    assert ABSENT == pointer_to(None)


def test_a_plan_is_compiled_at_its_first_launch(monkeypatch):
    made, passed = [], []

    def make_launch(source: Any, programs: int, scalars: tuple, device: torch.device) -> Any:
        made.append(source)
        return lambda *given: passed.append((programs, *given, *scalars))

    monkeypatch.setattr(launch, "make_launch", make_launch)
    plan = _plan(_PARAMETERS)
    assert not made
    plan.launch(1024)
    plan.launch(2048)
    assert made == [plan.source]
    assert passed == [(5, 1024, 64, 5, 0.5, None), (5, 2048, 64, 5, 0.5, None)]
    _plan(_PARAMETERS, programs=0).launch(1024)
    assert len(made) == 1 and len(passed) == 2


def test_plans_are_kept_until_they_are_cleared():
    made = []

    @launch.plan_cache
    def plan(rows: int) -> int:
        made.append(rows)
        return rows

    assert [plan(1), plan(1), plan(2)] == [1, 1, 2] and made == [1, 2]
    clear_plans()
    assert plan(1) == 1 and made == [1, 2, 1]


def _take(known: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches as with a Triton that has this launcher."""
    for module in (launch, launcher):
        monkeypatch.setattr(module, "launcher", lambda: known)


def _started(arguments: tuple, numbers: int) -> tuple[tuple[int, ...], list[int]]:
    """Grid, shared memory and stream, and as many arguments of a kernel, as the driver reads them."""
    config, function, parameters, more = arguments
    assert function is not None and more is None
    places = ctypes.cast(parameters, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)))
    words = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint64))[:7]
    grid = tuple(half for word in words[:4] for half in (word & 0xFFFFFFFF, word >> 32))[:7]
    assert words[5:] == [0, 0], "no attributes"
    return (*grid, words[4]), [places[at][0] for at in range(numbers)]


@pytest.mark.skipif("devices.interpreting()", reason="launches through the driver: needs TRITON_INTERPRET unset")
def test_a_launch_is_one_call_of_the_driver(monkeypatch):
    """With the stream, and what the kernel's machine code takes: no constants, no absent tensors."""
    started: list[Any] = []
    read = lambda *arguments: started.append(_started(arguments, 6))  # noqa: E731
    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=read))
    monkeypatch.setattr(launch, "_loaded", lambda source, device: launcher.LoadedFunction(7, 128, 4096))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    plan = _plan(_PARAMETERS)
    plan.launch(1024)
    gc.collect()
    plan.launch(2048)
    plan.launch(1024)
    expected = [((5, 1, 1, 128, 1, 1, 4096, 99), [address, 64, 5, _HALF, 0, 0]) for address in (1024, 2048, 1024)]
    assert started == expected


def test_a_thread_without_a_context_gets_one(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: calls.append("context"))
    launcher.call_again(lambda *given: calls.append("call"), (1, 2))
    assert calls == ["context", "call"]
    told = SimpleNamespace(cuGetErrorString=lambda error, text: None)
    monkeypatch.setattr(launcher, "driver", lambda: told)
    with pytest.raises(RuntimeError, match="CUDA: unknown error"):
        launcher.call_again(lambda *given: 719, ())


def test_a_kernel_that_the_device_has_no_room_for(monkeypatch):
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1000})
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    flags = dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"), 0)
    compiled = SimpleNamespace(packed_metadata=(4, 1, 1001), metadata=SimpleNamespace(**flags))
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory, Required: 1001"):
        launcher.load(compiled, 0)


class _Compiled:
    """Stands for a kernel that Triton has compiled, and unloads when nothing refers to it any more."""

    run, function, packed_metadata = staticmethod(lambda *passed: None), 1, ()


@pytest.mark.skipif("devices.interpreting()", reason="launches through the driver: needs TRITON_INTERPRET unset")
def test_a_kernel_stays_loaded(monkeypatch):
    _take(Launcher.OBJECT, monkeypatch)
    made: list[weakref.ref[_Compiled]] = []

    def compile_kernel(source: Any, device: Any) -> _Compiled:
        compiled = _Compiled()
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr(launch, "_LOADED", {})
    monkeypatch.setattr(launch, "compile_kernel", compile_kernel)
    monkeypatch.setattr(launch, "device_facts", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    plan = _plan(_PARAMETERS)
    kept = launch.make_launch(plan.source, 1, plan.scalars, torch.device("cpu"))
    gc.collect()
    assert kept is not None and made[0]() is not None


#: The bits of 0.5.
_HALF = 0x3F000000

_DESCRIPTOR = "tensordesc<bf16[1, 64, 1, 64],layout[3, 4]>"


@pytest.mark.parametrize(
    "types, given, scalars, words, all_arguments",
    [
        (("*fp32", "constexpr", "*bf16", "i32"), ("x", "z"), (1,), (1,), ("x", None, "z", 1)),
        (("constexpr", "*fp32", "i32", "constexpr"), ("y",), (1, None), (1,), (None, "y", 1, None)),
        (("*fp32", "*fp32", "constexpr", "i32"), ("x", "y"), (None, 1), (1,), ("x", "y", None, 1)),
        (("constexpr", "i32"), (), (1,), (1,), (None, 1)),
        ((_DESCRIPTOR, "constexpr", "*fp32", "fp32"), ("d", "y"), (0.5,), (_HALF,), ("d", None, "y", 0.5)),
    ],
)
def test_what_is_compiled_away_is_not_passed(types, given, scalars, words, all_arguments):
    source = launch.KernelSource(scale_kernel, types, (1,) * len(types), {}, 4)
    assert launch._words(source, scalars) == words
    assert launcher.with_absent(source, scalars, given) == all_arguments
    with pytest.raises(AssertionError, match="more is given than it takes"):
        launcher.with_absent(source, scalars, (*given, None))


def test_arguments_are_integers():
    """Floating point by its bits, negative numbers with the sign."""
    values = (("fp32", 0.5), ("fp32", 1), ("i32", -2), ("*bf16", 7), ("fp32", 1e300))
    assert [launch.word(*each) for each in values] == [_HALF, 0x3F800000, -2, 7, 0x7F800000]


def test_what_a_kernel_takes_for_a_descriptor():
    """Where it is, then its sizes and strides."""
    memory = array("q", range(50, 58))
    first, _ = memory.buffer_info()
    kernel = launcher.DriverKernel(launcher.LoadedFunction(7, 128, 0), 3, (-1,))
    descriptor = launcher.Descriptor(array("Q", (first + 16, first, first + 32)), memory)
    arguments, kept = launcher.single_arguments(kernel, 99, descriptor, 5, 6)
    assert _started(arguments, 8)[1] == [52, 50, 54, 5, 6, -1, 0, 0]
    assert kept is not None


@pytest.mark.skipif("devices.interpreting()", reason="launches through the driver: needs TRITON_INTERPRET unset")
def test_later_runs_of_a_pipeline_start_its_kernels_as_the_first(monkeypatch):
    """From what is remembered, for each stream and all addresses."""
    started: list[Any] = []
    stream = [99]
    read = lambda *arguments: started.append(_started(arguments, 6))  # noqa: E731
    for module in (launch, pipeline):
        monkeypatch.setattr(module, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=read))
    monkeypatch.setattr(launch, "_loaded", lambda source, device: launcher.LoadedFunction(7, 128, 4096))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernels = {
        name: Kernel(scale_kernel, _PARAMETERS, _CONSTANTS, programs, {"x_ptr": buffer})
        for name, programs, buffer in (("one", 5, "x"), ("two", 6, "out"), ("three", 7, "part"), ("none", 0, "x"))
    }
    out = contiguous((4,), torch.float32)
    of_pass = Pipeline(_CPU, kernels, ("x",), {"out": out}, {"first": 5, "part": 3})
    for address, stream[0] in ((1024, 99), (1024, 99), (2048, 99), (1024, 98), (1024, 99)):
        made = of_pass.run(address)
        found = [(grid[0], grid[-1], numbers) for grid, numbers in started]
        addresses = address, made[0].data_ptr(), made[1].data_ptr() + 32
        assert found == [(programs, stream[0], [at, 64, 5, _HALF, 0, 0]) for programs, at in zip((5, 6, 7), addresses)]
        started.clear()


def test_floating_point_is_not_given_to_launches():
    source = launch.KernelSource(scale_kernel, ("*fp32", "*bf16", "fp32"), (1, 1, 1), {}, 4)
    with pytest.raises(AssertionError, match="the same for all launches"):
        launch._words(source, ())


class Rows(NamedTuple):
    ptr: Any
    bias_ptr: Any
    count: Any
    stride: Any
    WIDTH: Any


@triton.jit
def grouped_kernel(x, factor, shift, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    pointers = x.ptr + tl.program_id(0) * x.stride + column
    loaded = tl.load(pointers, mask=column < x.WIDTH)
    if x.bias_ptr is not None:
        loaded += tl.load(x.bias_ptr + column, mask=column < x.WIDTH)
    tl.store(pointers, loaded * factor + x.count, mask=column < x.WIDTH)


_GROUPED = {
    "x": Rows(pointer_to(torch.float32, 16), pointer_to(None), int32(5), int64(64, 16), 60),
    "factor": float32(0.5),
    "shift": float32(None),
}


def _grouped_plan() -> launch.Plan:
    return Kernel(grouped_kernel, _GROUPED, {"BLOCK": 64}, 5).plan(_CPU)


def test_a_named_tuple_of_parameters_is_as_many_parameters(monkeypatch):
    _take(Launcher.DRIVER, monkeypatch)
    source = _grouped_plan().source
    assert source.names == ("x.ptr", "x.bias_ptr", "x.count", "x.stride", "x.WIDTH", "factor", "shift")
    assert source.types == ("*fp32", "constexpr", "i32", "i64", "constexpr", "fp32", "constexpr")
    assert source.multiples == (16, 1, 1, 16, 1, 1, 1)
    assert source.constants == {"BLOCK": 64, "x.bias_ptr": None, "x.WIDTH": 60, "shift": None}
    assert source.constant_names == ["BLOCK"]
    assert _grouped_plan().scalars == (5, 64, 60, 0.5, None)
    assert launch._words(source, _grouped_plan().scalars) == (5, 64, _HALF)
    assert source.nested("abcdefg") == {"x": Rows(*"abcde"), "factor": "f", "shift": "g"}


@pytest.mark.skipif("devices.interpreting()", reason="compiles: needs TRITON_INTERPRET unset")
def test_a_named_tuple_compiles_to_the_same_code():
    """As plain parameters do, which the machine code takes in the same order."""
    parameters = {**_PARAMETERS, "bias_ptr": pointer_to(None)}
    plain = Kernel(plain_kernel, parameters, _CONSTANTS, 5).plan(_CPU)
    hopper = devices.KNOWN_DEVICES["sm_90"]
    grouped, other = (compile_source(each.source, hopper).asm["ptx"] for each in (_grouped_plan(), plain))
    assert _code(grouped.replace("grouped_kernel", "plain_kernel")) == _code(other)


def _code(ptx: str) -> list[str]:
    return [
        line.strip() for line in ptx.splitlines() if line.strip().endswith(";") and not line.strip().startswith(".")
    ]


@triton.jit
def plain_kernel(x_ptr, bias_ptr, rows, stride_x_row, factor, shift, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, BLOCK)
    pointers = x_ptr + tl.program_id(0) * stride_x_row + column
    loaded = tl.load(pointers, mask=column < WIDTH)
    tl.store(pointers, loaded * factor + rows, mask=column < WIDTH)


class Table(NamedTuple):
    rows: Any
    inner: Any
    WIDTH: Any


class Inner(NamedTuple):
    shift: Any
    HALVES: Any


@triton.jit
def _halved(x, column, inner):
    tl.static_assert(inner.HALVES)
    return (x + inner.shift) * 0.5 if inner.HALVES else x + column


@triton.jit
def nested_kernel(x_ptr, table, BLOCK: tl.constexpr):
    tl.static_assert(table.WIDTH == 60)
    column = tl.arange(0, BLOCK)
    pointers = x_ptr + tl.program_id(0) * BLOCK + column
    inside = (column < table.WIDTH) & (tl.program_id(0) < table.rows)
    tl.store(pointers, _halved(tl.load(pointers, mask=inside), column, table.inner), mask=inside)


def _nested_plan() -> launch.Plan:
    described = {"x_ptr": pointer_to(torch.float32, 16), "table": Table(int32(4), Inner(float32(2.0), True), 60)}
    return Kernel(nested_kernel, described, {"BLOCK": 64}, 5).plan(_CPU)


@pytest.mark.skipif("devices.interpreting()", reason="compiles: needs TRITON_INTERPRET unset")
def test_a_constant_in_a_nested_named_tuple_is_one_when_the_kernel_compiles():
    """`tl.static_assert` refuses anything else. What is True at run time has no argument either."""
    source = _nested_plan().source
    assert source.types == ("*fp32", "i32", "fp32", "constexpr", "constexpr")
    assert source.constants == {"BLOCK": 64, "table.inner.HALVES": True, "table.WIDTH": 60}
    ptx = compile_source(source, devices.KNOWN_DEVICES["sm_90"]).asm["ptx"]
    assert [name in ptx for name in (f"{source.function.__name__}_param_{index}" for index in (2, 5))] == [True, False]


@pytest.mark.skipif("devices.interpreting()", reason="launches through the driver: needs TRITON_INTERPRET unset")
def test_another_launcher_is_given_tuples_and_constants():
    """As Triton's own launch gives them to its launcher object, whatever the version."""
    passed: list[tuple] = []
    compiled = SimpleNamespace(run=lambda *each: passed.append(each), function="f", packed_metadata="m")
    plan = _grouped_plan()
    run, arguments = launcher.with_all_arguments(compiled, plan.source, 5, plan.scalars)
    run(*arguments(99, 1024)[0])
    assert passed == [(5, 1, 1, 99, "f", "m", None, None, None, (1024, None, 5, 64, 60), 0.5, None, 64)]


@pytest.mark.parametrize(
    "version, hip, expected",
    [
        ("3.6.0", None, Launcher.DRIVER),
        ("3.7.1", None, Launcher.DRIVER),
        ("3.9.0+git1234", None, Launcher.DRIVER),
        ("3.10.0", None, Launcher.OBJECT),
        ("4.0.0", None, Launcher.OBJECT),
        ("3.6.0", "6.4", Launcher.OBJECT),
    ],
)
def test_the_launcher_follows_from_the_version(version, hip, expected, monkeypatch):
    """One that is not known is not guessed at."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launcher.launcher.__wrapped__() is expected


@pytest.mark.slow
@pytest.mark.skipif("devices.interpreting()", reason="launches through the driver: needs TRITON_INTERPRET unset")
def test_the_driver_reads_what_tritons_own_launcher_would_give_it(tmp_path):
    """Every byte of every parameter, of attention's kernels, in this version of Triton."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which Triton needs too to launch anything")
    command = [sys.executable, "-m", "stand_in_driver", str(tmp_path)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "tests"), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert kernels.count("attention_forward_kernel") == 3 and kernels.count("attention_backward_kernel") == 2
    assert {"attention_float32_forward_kernel", "attention_dkdv_kernel", "latent_attention_kernel"} < set(kernels)


@pytest.mark.interpreter
@pytest.mark.skipif("not devices.interpreting()", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "make, rows, expected",
    [(lambda: _plan(_PARAMETERS), 5, 5.5), (_grouped_plan, 5, 5.5), (_nested_plan, 4, 1.5)],
    ids=["plain", "named tuple", "nested named tuple"],
)
def test_the_interpreter_runs_a_plan(make, rows, expected):
    x = torch.ones(5, 64)
    make().launch(launch.pointer(x))
    assert (x[:rows, :60] == expected).all() and (x[:, 60:] == 1).all() and (x[rows:] == 1).all()
