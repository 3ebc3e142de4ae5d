"""Runs the Hopper kernels' own source on a CPU: Gluon has no interpreter, and few have such a GPU at hand.

The modules of `flashtile.ops.attention.hopper` are imported once more, with this language instead of Gluon
(`language`), and launch on a machine of a few multiprocessors (`machine`), whose events come in random order. What is
checked beside results: every access to device memory, that nothing is read before it is there or after it was released,
that barriers count right and end, that products are waited for, and fences before TMA reads.

What is not: layouts, registers and machine code (tests/ops/attention/test_hopper.py compiles the kernels for that),
what threads of one warpgroup owe each other, and the order of memory between multiprocessors.
"""

from gluon_emulator.hopper import EmulatedHopper, forget_copies

__all__ = ["EmulatedHopper", "forget_copies"]
