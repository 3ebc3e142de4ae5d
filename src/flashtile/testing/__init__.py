"""Input makers, the oracle check and the one tolerance policy: what flashtile's tests, and yours, compare with."""

from flashtile.testing.cases import AttentionCase, Inputs, check, make_inputs, run, with_arguments
from flashtile.testing.tolerance import Size, allowed_error, assert_close, error, size

__all__ = [
    "AttentionCase",
    "Inputs",
    "Size",
    "allowed_error",
    "assert_close",
    "check",
    "error",
    "make_inputs",
    "run",
    "size",
    "with_arguments",
]
