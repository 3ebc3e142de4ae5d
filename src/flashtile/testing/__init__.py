"""Input makers, the oracle check and the one tolerance policy: what flashtile's tests, and yours, compare with."""

from flashtile.testing.cases import AttentionCase, Inputs, check, make_inputs, run, with_arguments
from flashtile.testing.norms import NormCase, NormInputs, check_norm, make_norm_inputs, run_norm
from flashtile.testing.tolerance import Size, allowed_error, assert_close, assert_same, error, size

__all__ = [
    "AttentionCase",
    "Inputs",
    "NormCase",
    "NormInputs",
    "Size",
    "allowed_error",
    "assert_close",
    "assert_same",
    "check",
    "check_norm",
    "error",
    "make_inputs",
    "make_norm_inputs",
    "run",
    "run_norm",
    "size",
    "with_arguments",
]
