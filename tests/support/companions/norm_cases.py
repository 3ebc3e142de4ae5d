"""The cases that every backend of the norms must get right: features alone and in pairs, and the edges of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from flashtile.testing import NormCase
from support.running.covering import combined_cases

_FP16, _BF16, _FP32 = torch.float16, torch.bfloat16, torch.float32

_BASE = NormCase(shape=(3, 5), hidden=37)


def _with(*tensors: str, **arguments: object) -> Callable[[NormCase], NormCase]:
    def change(case: NormCase) -> NormCase:
        names = tuple(dict.fromkeys((*case.tensors, *tensors)))
        return replace(case, tensors=names, arguments={**case.arguments, **arguments})

    return change


#: What can be asked of one call. Each changes a case; those that exclude each other share a word.
_FEATURES: dict[str, Callable[[NormCase], NormCase]] = {
    "rms": lambda case: replace(case, rms=True),
    "no_bias": lambda case: replace(case, tensors=tuple(name for name in case.tensors if name != "bias")),
    "no_weight": lambda case: replace(case, weight_dtype=None),
    "residual": lambda case: replace(case, residual_dtype=_FP32),
    "residual_in_fp32": _with(residual_in_fp32=True),
    "narrow": lambda case: replace(case, dtype=_BF16),
    "dropout": _with(dropout_p=0.3),
    "two_outputs": _with("weight1", "bias1"),
    "parallel": _with("x1"),
    "scaled rowscale": _with("rowscale"),
    "scaled layerscale": _with("layerscale"),
    "scaled const": _with(rowscale_const=-1.5),
    "scaled x0_subset": _with("x0_subset"),
    "out_subset": _with("out_subset"),
    "zero_centered": _with(zero_centered_weight=True),
    "epsilon": _with(epsilon=0.5),
}


def _exclude(first: str, second: str) -> bool:
    return {first.split()[0], second.split()[0]} == {"parallel", "scaled"}


def _pairs() -> dict[str, NormCase]:
    cases = {"plain": _BASE}
    cases.update({name: change(_BASE) for name, change in _FEATURES.items()})
    for (first, change), (second, other) in combinations(_FEATURES.items(), 2):
        if not _exclude(first, second):
            cases[f"{first}+{second}"] = other(change(_BASE))
    cases["everything"] = _BASE
    for name, change in _FEATURES.items():
        if name not in ("rms", "no_bias", "no_weight", "parallel"):
            cases["everything"] = change(cases["everything"])
    return cases


PAIRS = _pairs()


def _combined() -> dict[str, NormCase]:
    """Every pair of features in fewer cases, for tests that take long; features alone, and all of them, too."""
    cases = {name: case for name, case in PAIRS.items() if "+" not in name}
    return cases | combined_cases(
        _BASE,
        list(_FEATURES),
        lambda case, name: _FEATURES[name](case),
        lambda first, second: not _exclude(first, second),
    )


COMBINED = _combined()

#: What the kernels are compiled for beside widths: both norms, both directions of mixed dtypes.
DTYPES = {
    "fp32": replace(_BASE, residual_dtype=_FP32),
    "bf16": replace(_BASE, dtype=_BF16, residual_dtype=_BF16, weight_dtype=_BF16),
    "fp16": replace(_BASE, dtype=_FP16, residual_dtype=_FP16, weight_dtype=_FP16),
    "bf16+fp32": replace(_BASE, dtype=_BF16, residual_dtype=_FP32, weight_dtype=_FP32),
    "bf16+fp32+bf16": replace(_BASE, dtype=_BF16, residual_dtype=_FP32, weight_dtype=_BF16),
    "fp32+bf16": replace(_BASE, dtype=_FP32, residual_dtype=_BF16, weight_dtype=_FP16),
    "fp16+weights": replace(_BASE, dtype=_FP16, weight_dtype=_FP32),
}

#: Widths at the edges of what tiles hold, and rows that fill them in part.
EDGES = {
    "one_column": replace(_BASE, hidden=1),
    "two_columns": replace(_BASE, hidden=2),
    "one_row": replace(_BASE, shape=(1,)),
    "vector": replace(_BASE, shape=()),
    "no_rows": replace(_BASE, shape=(0, 4), residual_dtype=_FP32),
    "no_rows_subset": _with("out_subset", "layerscale", dropout_p=0.5)(replace(_BASE, shape=(0,))),
    "many_rows": replace(_BASE, shape=(150,), hidden=16),
    "width_1000": replace(_BASE, hidden=1000),
    "width_2049": replace(_BASE, shape=(3,), hidden=2049),
    "width_2048_dropout": _with("layerscale", dropout_p=0.3)(replace(_BASE, shape=(6,), hidden=2048)),
    "width_8193_looped": replace(_BASE, shape=(9,), hidden=8193),
    "width_4100_everything_looped": _with("weight1", "bias1", "layerscale", dropout_p=0.3)(
        replace(_BASE, shape=(5,), hidden=4100, residual_dtype=_FP32)
    ),
    "width_16500_looped": replace(_BASE, shape=(1,), hidden=16500, residual_dtype=_FP32),
    "width_16500_rms_looped": replace(_BASE, shape=(2,), hidden=16500, rms=True),
    "width_65536": replace(_BASE, shape=(2,), hidden=65536),
}


def parameters(cases: dict[str, NormCase]) -> list:
    return [pytest.param(case, id=name.replace(" ", "_")) for name, case in cases.items()]
