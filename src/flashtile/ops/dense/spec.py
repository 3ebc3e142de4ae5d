"""What a perceptron call means, apart from the numbers in its tensors.

With `R` rows of `K` columns, `F` hidden and `N` output columns::

    pre    = x weight1ᵀ + bias1                             [R, F], gated [R, 2F]
    hidden = act(pre)                                       [R, F]
    hidden = pre[:, :F] · act(pre[:, F:])                   gated: values first, then gates, as `F.glu` has them
    out    = hidden weight2ᵀ + bias2                        [R, N]

`pre` and `hidden` are rounded to the dtype of the tensors; products add up, and activations are computed, in float32
(float64 for float64).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: name -> the activation in PyTorch's words.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "silu": F.silu,
}


class ActivationSpec(NamedTuple):
    """The meaning of what lies between the products: scalars only, hashable.

    Attributes:
        activation: a name in `ACTIVATIONS`.
        gated: the second half of `pre` gates the first.
    """

    activation: str
    gated: bool

    def width(self, columns: int) -> int:
        """Columns of `hidden`, from those of `pre`."""
        return columns // 2 if self.gated else columns


class ActivationGradients(NamedTuple):
    """Results of a backward pass between the products.

    Attributes:
        dpre: `[R, F]`, gated `[R, 2F]`.
        dbias: `[F]` or `[2F]`, the sum of dpre over rows, before it is rounded; None where it is not wanted.
        hidden: `[R, F]`, made again; None where it is not wanted.
    """

    dpre: Tensor
    dbias: Tensor | None
    hidden: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
