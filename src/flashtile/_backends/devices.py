"""Facts about devices: architecture, shared memory, and how to name them. No formulas of any operation."""

from __future__ import annotations

import functools
import platform
import re
import sys
from typing import Any, NamedTuple

import torch

from flashtile._backends import forgetters
from flashtile._backends.tuned import Tuned, table_for


class DeviceFacts(NamedTuple):
    """Facts of a GPU that kernel selection needs.

    Attributes:
        arch: "sm_90" or "gfx942".
        shared_memory: bytes of on-chip memory that one program may use.
        tuned: cuts that a user measured on it; None where kernels are cut by the shipped tables.
    """

    arch: str
    shared_memory: int
    tuned: Tuned | None = None

    @property
    def is_cuda(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 for AMD."""
        return int(self.arch[3:]) if self.is_cuda else 0

    @property
    def has_fp8_products(self) -> bool:
        """Whether it multiplies float8_e4m3fn as it is, and Triton writes that."""
        return self.capability >= 89 or self.arch in ("gfx950", "interpreter")

    @property
    def warp_size(self) -> int:
        return 64 if self.arch.startswith("gfx9") else 32


_KIB = 1024

#: Architectures that the kernels are compiled and checked for, with the shared memory of one program.
#: CUDA: "Maximum amount of shared memory per thread block", CUDA programming guide, compute capabilities.
#: AMD: LDS per workgroup, CDNA3/CDNA4 and RDNA3 instruction set guides.
KNOWN_DEVICES = {
    facts.arch: facts
    for facts in (
        DeviceFacts("sm_75", 64 * _KIB),
        DeviceFacts("sm_80", 163 * _KIB),
        DeviceFacts("sm_86", 99 * _KIB),
        DeviceFacts("sm_89", 99 * _KIB),
        DeviceFacts("sm_90", 227 * _KIB),
        DeviceFacts("sm_100", 227 * _KIB),
        DeviceFacts("sm_120", 99 * _KIB),
        DeviceFacts("gfx942", 64 * _KIB),
        DeviceFacts("gfx950", 160 * _KIB),
        DeviceFacts("gfx1100", 64 * _KIB),
    )
}

#: GPUs of each architecture, by the names that people say; "RTX 30" is a series. docs/hardware.md has the same.
CARDS = {
    "sm_75": ("T4", "RTX 20"),
    "sm_80": ("A100", "A30"),
    "sm_86": ("A10", "A40", "RTX 30", "RTX A6000"),
    "sm_89": ("L4", "L40", "L40S", "RTX 40", "RTX 6000 Ada"),
    "sm_90": ("H100", "H200", "H800", "GH200"),
    "sm_100": ("B200", "GB200"),
    "sm_120": ("RTX 50", "RTX PRO 6000"),
    "gfx942": ("MI300A", "MI300X", "MI325X"),
    "gfx950": ("MI350X", "MI355X"),
    "gfx1100": ("RX 7900 XT", "RX 7900 XTX"),
}
#: A card of a series of GeForce RTX: the series, and the rest of the name.
_OF_A_SERIES = re.compile(r"(rtx20(?=[678])|rtx[345]0)[5-9]0(ti|super|tisuper)?")

#: Multiprocessors (AMD: compute units) of a large GPU of each, for questions about one that is not present.
_TYPICAL_MULTIPROCESSORS = {
    "sm_75": 72, "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "gfx942": 304, "gfx950": 256, "gfx1100": 96,
}  # fmt: skip

#: Older builds of torch bring an older one, whose language the kernels do not speak. `pyproject.toml` says the same.
_OLDEST_TRITON = (3, 6)

#: Stands for the CPU when Triton's interpreter runs the kernels there.
INTERPRETER = DeviceFacts("interpreter", 227 * _KIB)


def triton_missing() -> str | None:
    """Why Triton cannot be used in this process; None when it can."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); {_triton_remedy()}"
    if triton_version() < _OLDEST_TRITON:
        return (
            f"its kernels need Triton {'.'.join(map(str, _OLDEST_TRITON))} or newer, and {triton.__version__} is "
            "installed; take a build of torch that brings a newer one"
        )
    return None


def _triton_remedy() -> str:
    """How Triton comes onto this machine. A build of torch for GPUs brings the one it was made with, which on ROCm and
    XPU is another package than on CUDA."""
    if sys.platform != "linux":
        return f"there is none for {platform.system()}, and the CPU backend needs none"
    if torch.version.cuda or torch.version.hip or torch.version.xpu:
        return f"torch {torch.__version__} brings one that it needs, so install torch again, with its dependencies"
    return "a build of torch for GPUs brings it; beside one for CPUs, to develop kernels, pip install triton"


def triton_version() -> tuple[int, ...]:
    """The first two numbers of the version of Triton, which must be installed."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


@functools.cache
def interpreting() -> bool:
    """Whether TRITON_INTERPRET=1 runs the kernels on the CPU."""
    if triton_missing():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU (AMD: compute units); one for the interpreter."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def architecture_named(name: str) -> str | None:
    """The architecture of a GPU, from its name or its own: "sm_90" for "H100", "h100" and "sm_90". None for others."""
    if name in KNOWN_DEVICES:
        return name
    plain = _plain(name)
    series = _OF_A_SERIES.fullmatch(plain)
    wanted = series[1] if series else plain
    return next((arch for arch, cards in CARDS.items() if wanted in map(_plain, cards)), None)


def _plain(name: str) -> str:
    """A name in small letters, without spaces and hyphens."""
    return re.sub(r"[\s_-]", "", name.lower())


def typical_multiprocessors(facts: DeviceFacts) -> int:
    """Multiprocessors of a large GPU of an architecture."""
    return _TYPICAL_MULTIPROCESSORS.get(facts.arch, 1)


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a device that is present; reads its properties once."""
    if device.type == "cpu":
        return INTERPRETER._replace(tuned=table_for(None))
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        facts = KNOWN_DEVICES.get(arch, DeviceFacts(arch, 64 * _KIB))
    else:
        facts = DeviceFacts(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin)
    return facts._replace(tuned=table_for(properties.name))


forgetters.append(device_facts.cache_clear)


def compile_target(facts: DeviceFacts) -> Any:
    """The target for which Triton compiles."""
    from triton.backends.compiler import GPUTarget

    if facts.is_cuda:
        return GPUTarget("cuda", facts.capability, facts.warp_size)
    return GPUTarget("hip", facts.arch, facts.warp_size)
