"""Memory that a kernel is given for its results, filled so that what it leaves as it was is seen."""

from __future__ import annotations

import torch
from torch import Tensor

#: Blocks of a size: as many as a backward has results of the size of its inputs, and one for scratch.
_BLOCKS = 4


def leave_nan(*like: Tensor) -> None:
    """On a GPU: leaves NaN in free memory of these sizes, which the next results of such sizes come to lie in.

    Otherwise they would lie where those of an earlier call lay, and a tile that no thread block computes would hold
    that call's right numbers.
    """
    blocks = [torch.empty_like(tensor) for tensor in like if tensor.is_cuda for _ in range(_BLOCKS)]
    for block in blocks:
        if block.is_floating_point() and block.dtype.itemsize > 1:
            block.fill_(float("nan"))
