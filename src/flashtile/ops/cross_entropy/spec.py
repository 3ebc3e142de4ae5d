"""What a cross-entropy call means, apart from the numbers in its tensors.

For a row of logits `[vocabulary]` and its label y, in float32 (float64 for float64)::

    s    = logit_scale · logits, or with a soft cap softcap · tanh(logit_scale · logits / softcap)
    lse  = ln Σ exp(s)
    z    = lse_square_scale · lse²
    loss = a · w[y] · (lse - s[y]) + b · Σ w · (lse - s) + z
    a    = 1 - label_smoothing,   b = label_smoothing / vocabulary

with class weights w, which are 1 if there are none, and with the gradient g of the loss from above::

    dlogits = g · logit_scale · (exp(s - lse) · (a · w[y] + b · Σ w + 2 · lse_square_scale · lse)
                                 - b · w - a · w[y] · [column = y]),   with a soft cap times 1 - (s / softcap)²

Of a row, lse is not kept but two numbers, its normaliser. A rounded lse is as wrong as an offset that all logits share
is large, and softmax and loss with it::

    pivot   = the logit of the largest s
    exp_sum = Σ exp(logit_scale · (logits - pivot))               lse = logit_scale · pivot + ln exp_sum

Losses and gradients are made of differences from the pivot, in which the offset is gone. With a soft cap, pivots and
differences are those of s, whose size the cap bounds, and the factor on them is 1. Where the label is
`ignore_index`, loss and gradient are 0, whatever the row holds. Where it lies outside of the vocabulary, they are NaN.
The mean is the sum over the rows that are not ignored, over their number, or over the sum of their w[y].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Longest row that any backend takes.
MAX_COLUMNS = 2**30
REDUCTIONS = ("none", "mean", "sum")


class CrossEntropySpec(NamedTuple):
    """The meaning of a call: scalars only, hashable.

    Attributes:
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor on the logits.
        lse_square_scale: factor on lse² in the loss.
        ignore_index: the label of rows that do not count.
        reduction: of the losses: "none", "mean" or "sum".
        z_loss: whether the part of lse² is also a result of its own.
        first: the label of the first column, where the vocabulary is spread over processes.
        vocabulary: columns of all processes together.
        group: name of the group of those processes; empty where there is only this one.
        softcap: bound of the scores; 0 = none.
    """

    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    ignore_index: int
    reduction: str
    z_loss: bool
    first: int
    vocabulary: int
    group: str
    softcap: float = 0.0

    @property
    def factor(self) -> float:
        """On the differences that losses and gradients are made of: logits, or scores under a soft cap."""
        return 1.0 if self.softcap else self.logit_scale


class Results(NamedTuple):
    """What a forward pass gives.

    Attributes:
        loss: `[rows]`, or a scalar where it is reduced.
        z_loss: of the same shape; None where it is not asked for.
        normaliser: `[rows, 2]`, pivot and exp_sum; of ignored rows it means nothing.
        scale: scalar, 1 / the number of rows that count, or the sum of their class weights; only of a mean.
    """

    loss: Tensor
    z_loss: Tensor | None
    normaliser: Tensor
    scale: Tensor | None


class Statistics(NamedTuple):
    """What is known of rows after the columns that are here were read; of ignored rows it means nothing.

    Attributes:
        normaliser: `[rows, 2]`, pivot and exp_sum.
        target: `[rows]`, the logit of the label; 0 where the label has no column here.
        total: `[rows]`, `Σ w · (logits - pivot)`; 0 without smoothing.

    Under a soft cap, scores take the place of logits.
    """

    normaliser: Tensor
    target: Tensor
    total: Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def gradient_strides(logits: Tensor) -> tuple[int, int]:
    """Strides of the gradient of logits `[rows, columns]`.

    Nearly contiguous: each row begins where, within 16 bytes, that of the logits does, so that both can be read and
    written in whole vectors.
    """
    columns, vector = logits.shape[1], 16 // logits.element_size()
    return columns + (logits.stride(0) - columns) % vector, 1
