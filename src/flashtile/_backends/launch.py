"""Compiling Triton kernels and launching them with little host time. No formulas of any operation.

Triton's own launcher inspects every argument of every call to find the right specialisation (about 9 µs on the host).
Here the caller states the specialisation, so a launch is one C call. The same statement serves ahead-of-time
compilation for a GPU that is not present, and Triton's interpreter.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from flashtile._backends import observe
from flashtile._backends.devices import DeviceFacts, interpreting

TRITON_3_6 = triton.__version__.startswith("3.6.")

#: Before the name of a kernel, in the range of its launch.
_RANGE = "flashtile::launch "

#: Names of element types in Triton signatures.
ELEMENT_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}


class KernelSource(NamedTuple):
    """One specialisation of a kernel: all that decides its machine code but the target.

    Attributes:
        function: the `@triton.jit` or `@gluon.jit` kernel; its run-time parameters come before its constants.
        types: type of each run-time parameter, in order: "*bf16", "i32", "fp32", ...; "constexpr" for one that this
            specialisation does not use: its constant is None, and so is what a launch passes in its place.
        multiples: for each run-time parameter, a power of two that divides it (bytes for pointers).
        constants: value of each `tl.constexpr` parameter by name.
        num_warps: warps per program.
        num_stages: depth of the software pipeline of loads.
        max_registers: of a thread, so that programs which stay on a multiprocessor fit there together; None = free.
            Only NVIDIA's compiler takes it.
    """

    function: Any
    types: tuple[str, ...]
    multiples: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def compile_kernel(source: KernelSource, device: DeviceFacts) -> CompiledKernel:
    """Compiles for `device`, which need not be present. Uses Triton's disk cache."""
    names = source.function.arg_names
    signature = dict(zip(names, source.types))
    signature.update(dict.fromkeys(names[len(source.types) :], "constexpr"))
    attributes = {
        (index,): [["tt.divisibility", multiple]]
        for index, (of, multiple) in enumerate(zip(source.types, source.multiples))
        if multiple > 1 and of != "constexpr"  # from 3.7 on what is not passed must state nothing
    }
    make_source = _gluon_source() if source.function.is_gluon() else ASTSource
    ast = make_source(source.function, signature, constexprs=source.constants, attrs=attributes)
    # Fused multiply-adds are Triton's default no longer from 3.10 on.
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    if source.max_registers and device.is_cuda:
        options["maxnreg"] = source.max_registers
    return triton.compile(ast, target=_target(device), options=options)


def _gluon_source() -> type[ASTSource]:
    from flashtile._backends.gluon import GluonASTSource

    return GluonASTSource


def _target(device: DeviceFacts) -> GPUTarget:
    if device.is_cuda:
        return GPUTarget("cuda", device.capability, device.warp_size)
    return GPUTarget("hip", device.arch, device.warp_size)


def make_launcher(source: KernelSource, device: torch.device, facts: DeviceFacts) -> Callable[..., None]:
    """A function `launch(programs, *run_time_arguments)` that enqueues the kernel on the device's current stream.

    Pointer arguments are what `pointer` returns. Compiles on the way, unless Triton's disk cache has the kernel.
    """
    name = source.function.__name__
    _log_kernel(name, source, device)
    if interpreting():
        return functools.partial(_interpret, source)
    with torch.cuda.device(device):
        compiled = compile_kernel(source, facts)
        run = _direct_run(compiled)
    constants = tuple(source.constants[name] for name in source.function.arg_names[len(source.types) :])
    index = device.index
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    always_named, profiling, range_name = observe.NVTX, observe.profiling, _RANGE + name

    def launch(programs: int, *arguments: Any) -> None:
        if current_device() == index and not (always_named or profiling()):
            run(programs, current_stream(index), arguments, constants)
        else:
            with torch.cuda.device(index), observe.named(range_name):
                run(programs, current_stream(index), arguments, constants)

    return launch


def _log_kernel(name: str, source: KernelSource, device: torch.device) -> None:
    """Writes a new kernel to the log `flashtile.select`, with its tiles and whatever else has a size, but strides."""
    sizes = {k: v for k, v in source.constants.items() if type(v) is int and not k.startswith("STRIDE")}
    cut = ", ".join(f"{key}={value}" for key, value in sizes.items())
    observe.log.info(
        "kernel %s for %s: %d warps, %d stages, %s", name, device, source.num_warps, source.num_stages, cut
    )


def _direct_run(compiled: CompiledKernel) -> Callable[[int, int, tuple, tuple], None]:
    """Enqueues a loaded kernel: `run(programs, stream, arguments, constants)`.

    Triton's launcher object adds scratch memory, which these kernels do not use, before it calls its C function. With
    the one version whose C function is known here, that is called directly, which saves a microsecond.
    """
    launcher = compiled.run  # loads the binary
    function, metadata = compiled.function, compiled.packed_metadata
    if not (TRITON_3_6 and type(launcher).__name__ == "CudaLauncher"):
        return lambda programs, stream, arguments, constants: launcher(
            programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants
        )
    assert not launcher.global_scratch_size and not launcher.profile_scratch_size
    enqueue = _c_function(launcher.launch)
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    fixed = (function, *flags, None, None, metadata, None, None, None)
    return lambda programs, stream, arguments, constants: enqueue(
        programs, 1, 1, stream, *fixed, *arguments, *constants
    )


def _c_function(launch: Callable[..., None]) -> Callable[..., None]:
    """Triton 3.6 wraps the launch of a kernel with TMA descriptors in a function that encodes them on every call. The
    arguments here hold them encoded (`tma.descriptor_maker`)."""
    wrapped = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    return wrapped.get("launcher", launch)


def _interpret(source: KernelSource, programs: int, *arguments: Any) -> None:
    names = source.function.arg_names[len(source.types) :]
    with observe.named(_RANGE + source.function.__name__):
        source.function[(programs,)](*arguments, **{name: source.constants[name] for name in names})


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


#: The form in which `launch` takes a tensor or None: its address, or itself for the interpreter.
pointer: Callable[[Tensor | None], Any] = (lambda tensor: tensor) if interpreting() else _address
