"""Floating-point operations of the operators, as PyTorch counts those of its flash attention: two products forward and
five backward over all pairs of a query and a key of one sequence, whether or not a mask shows them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from flashtile.ops.attention.arguments import SIDE
from flashtile.ops.attention.spec import SideInputs
from flashtile.ops.common.flops import product_flops, values_on_host


def _pairs(q: Tensor, k: Tensor, side: SideInputs) -> int:
    """Pairs of a query and a key, of all sequences and heads."""
    if side.cu_seqlens_q is None or side.cu_seqlens_k is None:
        batch, seq_q, heads, _ = q.shape
        return batch * seq_q * k.shape[1] * heads
    ends = values_on_host(side.cu_seqlens_q), values_on_host(side.cu_seqlens_k)
    if ends[0] is None or ends[1] is None:
        return q.shape[0] * side.max_seqlen_k * q.shape[1]  # at most
    lengths = [[end - start for start, end in pairwise(each)] for each in ends if each is not None]
    return sum(of_q * of_k for of_q, of_k in zip(*lengths)) * q.shape[1]


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    return product_flops(_pairs(q, k, SideInputs(*rest[:SIDE])), q.shape[-1] + v.shape[-1], 1)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any
) -> int:
    """Scores again, dq and dk; the gradient of the weights, and dv."""
    return product_flops(_pairs(q, k, SideInputs(*rest[:SIDE])), 3 * q.shape[-1] + 2 * v.shape[-1], 1)


def column_sums(q: Tensor, k: Tensor, lse: Tensor, *rest: Any, **_: Any) -> int:
    return product_flops(_pairs(q, k, SideInputs(*rest[:SIDE])), q.shape[-1], 1)
