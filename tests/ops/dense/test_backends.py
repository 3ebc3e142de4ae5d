"""The backends of the linear layers against the fp64 oracle: on the CPU, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from dense_cases import MlpCase, check, parameters


@pytest.mark.parametrize("case", parameters())
def test_cpu(case: MlpCase) -> None:
    check(case, "cpu")


def test_cpu_float64() -> None:
    check(MlpCase(dtype=torch.float64, activation="gelu"), "cpu")
    check(MlpCase(dtype=torch.float64, gated=True, level=2), "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("case", parameters())
def test_interpreted(case: MlpCase) -> None:
    check(case, "triton")
