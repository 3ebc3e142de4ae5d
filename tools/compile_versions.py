"""Compiles every shipped form of the Hopper kernels with the Triton that is installed; no GPU need be there.

For another version than the pinned one, unpack its wheel and put it first on the path:

    pip download --no-deps --dest wheels triton==3.8.0 && unzip -q wheels/triton-3.8.0*.whl -d triton-3.8.0
    PYTHONPATH=triton-3.8.0:src:tests python tools/compile_versions.py

Prints a line for each, and fails where a product is serialised, where a register may be read before it has a value, or
where a kernel does not compile.
"""

from __future__ import annotations

import sys

import triton

from control_flow import unset_registers
from flashtile._backends.gluon import SUMS_PASS_LOOPS
from hopper_forms import BACKWARD_FORMS, BLOCK_FORMS, FORMS, FP8_FORMS, SCORE_FORMS, SERIALISED
from machine_code import Binary, compile_hopper, compile_hopper_backward, sass, serialises_products


def report(name: str, binary: Binary, expected: bool = False) -> bool:
    """Prints a line. Returns whether products are serialised that are not expected to be, or the code is wrong."""
    serialised = serialises_products(binary)
    unset = bool(unset_registers(sass(binary)))
    print(
        f"triton {triton.__version__} {name}: {binary.shared_memory} bytes of shared memory, "
        f"{binary.spilled} spilled{', SERIALISED' if serialised else ''}{', UNSET REGISTERS' if unset else ''}",
        flush=True,
    )
    return unset or (serialised and not expected)


def main() -> int:
    forms = FORMS | SCORE_FORMS | BLOCK_FORMS | FP8_FORMS
    problems = sum(report(f"forward {name}", compile_hopper(call)) for name, call in forms.items())
    # A loop of their own for cut steps only those versions have whose ptxas makes no product wait for it.
    backward = {name: of for name, of in BACKWARD_FORMS.items() if SUMS_PASS_LOOPS or not of.cut_last}
    for name, variant in backward.items():
        for kernel in ("begin", "main", "end"):
            binary = compile_hopper_backward(kernel, variant)
            problems += report(f"backward {name} {kernel}", binary, name in SERIALISED)
    return problems


if __name__ == "__main__":
    sys.exit(main())
