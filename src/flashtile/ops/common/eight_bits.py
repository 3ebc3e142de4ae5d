"""Numbers in 8 bits: the dtypes, the factors that stand beside them, and the rounding."""

from __future__ import annotations

import torch
from torch import Tensor

#: The dtypes, and their largest numbers.
EIGHT_BITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
#: The smallest factor, so that quotients by it stay finite.
_SMALLEST = 2.0**-100


def factors_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 factors with which the largest magnitudes become the largest number of the dtype."""
    factors = (largest.float() / EIGHT_BITS[dtype]).clamp(min=_SMALLEST)
    return factors.masked_fill_(largest == 0, 1.0)  # zeros are zeros with any factor; two small ones would make 0


def rounded(quotients: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that were divided by their factors, in 8 bits: cut off at the largest, to the nearest."""
    limit = EIGHT_BITS[dtype]
    quotients = quotients.clamp(-limit, limit)
    return (quotients.round() if dtype is torch.int8 else quotients).to(dtype)
