"""What operations on rows have in common: the dtype that computes, blocks of rows for a CPU's caches, strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Elements of a block of rows: its temporaries together fit the second-level cache of a core.
BLOCK = 1 << 17


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums and statistics are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Consecutive rows of a matrix, so many elements at a time."""
    step = max(1, elements // max(columns, 1))
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def last_contiguous(tensor: Any) -> Any:
    """A tensor or None, the last dimension contiguous: backends take any other strides."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()
