"""Compiles every shipped form of the Hopper kernels with the Triton that is installed; no GPU need be there.

For another version than the pinned one, unpack its wheel and put it first on the path:

    pip download --no-deps --dest wheels triton==3.8.0 && unzip -q wheels/triton-3.8.0*.whl -d triton-3.8.0
    PYTHONPATH=triton-3.8.0:src:tests python tools/compile_versions.py

Prints a line for each, and fails where a product is serialised or a kernel does not compile.
"""

from __future__ import annotations

import sys

import triton

from hopper_forms import FORMS
from machine_code import compile_hopper, serialised_products


def main() -> int:
    problems = 0
    for name, call in FORMS.items():
        binary = compile_hopper(call)
        serialised = serialised_products(binary, "sm_90a")
        problems += bool(serialised)
        print(
            f"triton {triton.__version__} {name}: {binary.shared_memory} bytes of shared memory, "
            f"{binary.spilled} spilled{', SERIALISED' if serialised else ''}",
            flush=True,
        )
    return problems


if __name__ == "__main__":
    sys.exit(main())
