"""Heads of q and k that differ in width from those of v: every pair of widths, on a GPU, against float64.

ptxas 12.8 made wrong machine code for 24 of these pairs from an earlier form of the portable forward, in which v's tile
was loaded after `q kᵀ` (`ops/common/kernels.py`). Every result of the others was right.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashtile.testing import AttentionCase, check

_WIDTHS = (1, 7, 8, 16, 24, 32, 33, 40, 64, 72, 100, 129)


def _case(head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return AttentionCase(
        batch=1, seq_q=53, seq_k=113, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, arguments={"causal": True}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", _WIDTHS)
def test_every_pair(head_dim):
    for head_dim_v in _WIDTHS:
        check(_case(head_dim, head_dim_v), "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim_v", [width for width in _WIDTHS if width <= 32])
def test_v_with_a_narrower_swizzle_in_other_calls(head_dim_v):
    lengths: dict[str, Any] = {"lengths_q": (53, 0, 70), "lengths_k": (113, 20, 64)}
    for head_dim in (width for width in _WIDTHS if width > head_dim_v):
        case = _case(head_dim, head_dim_v, torch.float16)
        check(case, "triton", "cuda")
        check(replace(case, **lengths), "triton", "cuda")
