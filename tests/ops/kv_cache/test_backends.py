"""The backends against the fp64 oracle: on the CPU, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kv_cache_cases import EDGES, PAIRS, CacheCase, check, parameters


@pytest.mark.parametrize("case", parameters(PAIRS | EDGES))
def test_cpu(case: CacheCase) -> None:
    check(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["append", "rotary halves", "everything"])
def test_cpu_dtypes(name: str, dtype: torch.dtype) -> None:
    check(replace(PAIRS[name], dtype=dtype), "cpu")
