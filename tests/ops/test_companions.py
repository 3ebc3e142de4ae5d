"""The CPU backends of the companions against the fp64 oracle: every case, and further dtypes."""

from dataclasses import replace

import pytest
import torch

from flashtile.testing import NormCase, check_norm
from support.companions import cross_entropy_cases, dense_cases, norm_cases, rotary_cases, softmax_cases
from support.companions.cross_entropy_cases import CrossEntropyCase
from support.companions.dense_cases import MlpCase
from support.companions.rotary_cases import RotaryCase
from support.companions.softmax_cases import SoftmaxCase

_DOUBLE, _DTYPES = torch.float64, (torch.bfloat16, torch.float64)
_NORMS = NormCase(dtype=_DOUBLE, residual_dtype=_DOUBLE, weight_dtype=_DOUBLE), *norm_cases.DTYPES.values()
#: What checks a case, the cases that kernels have too, and further ones.
COMPANIONS = {
    "cross-entropy": (
        cross_entropy_cases.check,
        cross_entropy_cases.CASES,
        [
            CrossEntropyCase((4, 50257), dtype, label_smoothing=0.1, lse_square_scale=0.01, **more)
            for dtype in _DTYPES for more in ({}, {"inplace_backward": True, "reduction": "none"})
        ],
    ),
    "dense": (
        dense_cases.check,
        dense_cases.CASES | dense_cases.NARROW_CASES,
        [MlpCase(dtype=_DOUBLE, activation="gelu"), MlpCase(dtype=_DOUBLE, gated=True, level=2)],
    ),
    "norm": (
        check_norm,
        norm_cases.COMBINED | norm_cases.EDGES,
        [replace(case, rms=rms, shape=(40,), hidden=300) for case in _NORMS for rms in (False, True)],
    ),
    "rotary": (
        rotary_cases.check,
        rotary_cases.COMBINED | rotary_cases.EDGES,
        [RotaryCase(dtype=dtype, **more)
         for dtype in _DTYPES for more in ({}, {"table_dtype": dtype, "interleaved": True})],
    ),
    "softmax": (
        softmax_cases.check,
        softmax_cases.CASES,
        [SoftmaxCase(shape, dtype=dtype, **more) for dtype in _DTYPES for shape, more in (
            ((1, 2, 300, 500), {"mask": (1, 1, 300, 500)}), ((2, 700, 700), {"causal": True}))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPANIONS)
def test_the_cpu_agrees_with_the_oracle(name):
    check, cases, further = COMPANIONS[name]
    for case in (*cases.values(), *further):
        check(case, "cpu")
