"""The CPU backend: blocks of rows that stay in cache, so that no copy of the logits in float32 is ever whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.ops.common.rows import BLOCK, compute_dtype, row_blocks
from flashtile.ops.cross_entropy import spec as formulas
from flashtile.ops.cross_entropy.spec import CrossEntropySpec, LossInputs, LossUpstream, Results, Statistics


def forward(inputs: LossInputs, spec: CrossEntropySpec) -> Results:
    """The losses."""
    return formulas.losses(read(inputs, spec), inputs.labels, spec, inputs.class_weights)


def read(inputs: LossInputs, spec: CrossEntropySpec) -> Statistics:
    """The statistics of the columns that are here."""
    logits, labels, weights = inputs
    dtype, count = compute_dtype(logits.dtype), logits.shape[0]
    pivot, exp_sum, target, total = (torch.zeros(count, dtype=dtype, device="cpu") for _ in range(4))
    column, here = _columns(labels, logits, spec)
    for rows, scratch in _blocks(logits):
        block = _scores(logits[rows], scratch, spec)
        pivot[rows], zero = formulas.choose_pivot(block, spec, 1)
        torch.gather(block, 1, column[rows], out=target[rows, None])
        torch.sub(block, zero[:, None], out=scratch)
        if spec.label_smoothing and weights is None:
            torch.sum(scratch, 1, out=total[rows])
        elif spec.label_smoothing and weights is not None:
            torch.mv(scratch, formulas.weights_here(weights, logits.shape[1], spec), out=total[rows])
        torch.sum(_exponentials(scratch, spec), 1, out=exp_sum[rows])
    counts = labels != spec.ignore_index
    normaliser = torch.stack((pivot.where(counts, 0), exp_sum.where(counts, 1)), 1)
    return Statistics(normaliser, target.where(here & counts, 0), total.where(counts, 0))


def backward(given: LossUpstream, spec: CrossEntropySpec, inplace: bool = False) -> Tensor:
    """The gradient of the logits; in their memory where asked for."""
    _, _, logits, labels, weights, normaliser = given
    dlogits = logits if inplace else formulas.empty_gradient(logits)
    factors = formulas.factors(given, spec)
    pivot = normaliser[:, 0]
    of_exponentials = formulas.exponential_factors(normaliser, labels, spec, weights)
    column, here = _columns(labels, logits, spec)
    of_target = -formulas.shares(labels, weights, spec)[0] * here.to(pivot.dtype)
    of_all: Any = spec.label_smoothing / spec.vocabulary
    if weights is not None:
        of_all = of_all * formulas.weights_here(weights, logits.shape[1], spec)
    ignored = labels == spec.ignore_index
    for rows, wanted in _blocks(logits):
        block = _scores(logits[rows], wanted, spec)
        slope = formulas.cap_slope(block, spec) if spec.softcap else None
        torch.sub(block, pivot[rows, None], out=wanted)
        _exponentials(wanted, spec).mul_(of_exponentials[rows, None])
        if spec.label_smoothing:
            wanted.sub_(of_all)
        wanted.scatter_add_(1, column[rows], of_target[rows, None])
        if slope is not None:
            wanted.mul_(slope)
        torch.mul(wanted, factors[rows, None], out=dlogits[rows])
        if ignored[rows].any():
            dlogits[rows].masked_fill_(ignored[rows, None], 0)
    return dlogits


def _exponentials(differences: Tensor, spec: CrossEntropySpec) -> Tensor:
    """`exp(score - largest score)`, in place, from the logits less that of the largest score."""
    return (differences if spec.factor == 1 else differences.mul_(spec.factor)).exp_()


def _scores(logits: Tensor, scratch: Tensor, spec: CrossEntropySpec) -> Tensor:
    """Logits in the dtype that computes, under the soft cap scores; `scratch`, of that dtype, has them if need be."""
    if spec.softcap:
        return scratch.copy_(logits).mul_(spec.logit_scale / spec.softcap).tanh_().mul_(spec.softcap)
    return logits if logits.dtype is scratch.dtype else scratch.copy_(logits)


def _columns(labels: Tensor, logits: Tensor, spec: CrossEntropySpec) -> tuple[Tensor, Tensor]:
    """The column of each label, `[rows, 1]`, the first or last one where it has none here; and whether it has one."""
    column = labels.to(torch.int64) - spec.first
    here = (column >= 0) & (column < logits.shape[1])
    return column.clamp_(0, logits.shape[1] - 1)[:, None], here


def multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient by a scalar, in place, in float32 whatever its dtype."""
    flat, dtype = gradient.view(-1), compute_dtype(gradient.dtype)
    for first in range(0, flat.numel(), BLOCK):
        block = flat[first : first + BLOCK]
        block.copy_(block.to(dtype) * factor)


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows that are computed together, and memory `[rows, columns]` for them in the dtype that computes."""
    scratch = None
    count, columns = logits.shape
    for rows in row_blocks(count, columns, BLOCK * torch.get_num_threads()):
        if scratch is None:  # as large as the first block, of which none is larger
            scratch = torch.empty(rows.stop, columns, dtype=compute_dtype(logits.dtype), device="cpu")
        yield rows, scratch[: rows.stop - rows.start]
