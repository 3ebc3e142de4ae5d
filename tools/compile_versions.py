"""Compiles the Hopper kernels in every shipped form, and the portable ones for heads of v of other widths than those of
q and k, and for score functions with every other feature, with the Triton that is installed. No GPU need be there.

For another version than the pinned one, unpack its wheel and put it first on the path:

    pip download --no-deps --dest wheels triton==3.8.0 && unzip -q wheels/triton-3.8.0*.whl -d triton-3.8.0
    PYTHONPATH=triton-3.8.0:src:tests python tools/compile_versions.py

Prints a line for each. Fails where ptxas serialises a product, where the machine code is wrong
(`tests/support/compilation/control_flow.py`), or where a kernel does not compile.
"""

from __future__ import annotations

import sys

import triton

from flashtile._backends.devices import KNOWN_DEVICES
from flashtile._backends.gluon import SUMS_PASS_LOOPS
from flashtile._backends.launch import KernelSource
from support.attention import hopper_forms as shipped
from support.attention.attention_cases import SCORE_MOD_PAIRS
from support.attention.width_mixes import BACKWARD_MIXES, FORWARD_MIXES
from support.compilation import machine_code


def report(name: str, source: KernelSource, expected: bool = False, arch: str = "sm_90") -> bool:
    """Compiles a kernel and prints a line. Returns whether addresses are wrong, or products are serialised that are not
    expected to be."""
    line = f"triton {triton.__version__} {name}"
    try:
        binary = machine_code.binary_of(source, KNOWN_DEVICES[arch])
    except machine_code.WrongCodeError as error:
        print(f"{line}: WRONG ADDRESSES: {error}", flush=True)
        return True
    except Exception as error:  # whatever the compiler raises
        print(f"{line}: DOES NOT COMPILE: {error!r:.200}", flush=True)
        return True
    serialised = machine_code.serialises_products(binary)
    print(
        f"{line}: {binary.shared_memory} bytes of shared memory, {binary.spilled} spilled"
        f"{', SERIALISED' if serialised else ''}",
        flush=True,
    )
    return serialised and not expected


def main() -> int:
    forms = shipped.FORMS | shipped.SCORE_FORMS | shipped.BLOCK_FORMS | shipped.FP8_FORMS | shipped.FEATURE_FORMS
    problems = sum(
        report(f"forward {name}", machine_code.hopper_plan(call).kernel.source) for name, call in forms.items()
    )
    # A loop of their own for cut steps only those versions have whose ptxas makes no product wait for it.
    every = shipped.BACKWARD_FORMS | shipped.BACKWARD_FEATURE_FORMS | shipped.BACKWARD_FUNCTION_FORMS
    backward = {name: of for name, of in every.items() if SUMS_PASS_LOOPS or not of.schedule.loops.MASKS_LAST}
    for name, of in backward.items():
        for kernel in ("begin", "main") if of.schedule.loops.SINGLE_KEY_TILE else ("begin", "main", "end"):
            problems += report(f"backward {name} {kernel}", of.source(kernel), name in shipped.SERIALISED)
    for name, of in shipped.BIAS_GRADIENT_FORMS.items():
        problems += report(f"gradient of a bias {name}", of.source("bias"))
    for name, of in shipped.CAPTURED_GRADIENT_FORMS.items():
        problems += report(f"gradients of what a function reads {name}", of.source("captured"))
    of_several = {
        "wide backward": (shipped.WIDE_BACKWARD_FORMS, machine_code.apart_backward_sources),
        "forward of float32": (shipped.FLOAT32_FORWARD_FORMS, machine_code.float32_forward_sources),
        "backward of float32": (shipped.FLOAT32_BACKWARD_FORMS, machine_code.apart_backward_sources),
    }
    for title, (calls, sources) in of_several.items():
        for name, call in calls.items():
            problems += sum(report(f"{title} {name} {kernel}", source) for kernel, source in sources(call).items())
    mixes = {"forward": FORWARD_MIXES, "dq": BACKWARD_MIXES, "dkdv": BACKWARD_MIXES}
    for kernel, calls in mixes.items():
        for name, call in calls.items():
            problems += report(f"portable {kernel} {name}", machine_code.call_source(kernel, "sm_90", call))
    for arch in ("sm_90", "sm_80"):
        for name, (kernel, call) in machine_code.portable_calls(SCORE_MOD_PAIRS, arch).items():
            problems += report(f"portable {arch} {name}", machine_code.call_source(kernel, arch, call), True, arch)
    return problems


if __name__ == "__main__":
    sys.exit(main())
