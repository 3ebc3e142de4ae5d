"""Packed sequences of which only some rows at the beginning count."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.compat.shared.keys import gathered_keys


class UsedRows(NamedTuple):
    """The rows that count, one sequence after another.

    Attributes:
        x: `[total, ...]`, as many rows as before; those past the last sequence are copies.
        cu_seqlens: `[batch + 1]` of the rows that count.
        row: for each row before, which it is now.
        counts: bool `[total]`, which rows before count.
    """

    x: Tensor
    cu_seqlens: Tensor
    row: Tensor
    counts: Tensor

    def back(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the rows, `[total, ...]` and `[heads, total]`, in the place of these; elsewhere 0 and -inf."""
        out = out.index_select(0, self.row).masked_fill(~self.counts[:, None, None], 0)
        return out, lse.index_select(1, self.row).masked_fill(~self.counts, -math.inf)


def only_used_rows(x: Tensor, cu_seqlens: Tensor, used: Tensor) -> UsedRows:
    """Takes the first `used[b]` rows of each packed sequence `b` of x `[total, heads, head_dim]`. Waits for nothing."""
    batch, total = cu_seqlens.shape[0] - 1, x.shape[0]
    rows, _, packed = gathered_keys(x, x, cu_seqlens, None, lengths=used)
    before = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(cu_seqlens.to(before.dtype), before, right=True) - 1
    inside = sequence.clamp(max=max(batch - 1, 0))
    within = before - cu_seqlens[inside]
    counts = (sequence < batch) & (within < used[inside]) if batch else torch.zeros_like(before, dtype=torch.bool)
    row = (packed[inside] + within).clamp(min=0, max=max(total - 1, 0)) if batch else before
    return UsedRows(rows, packed.to(cu_seqlens.dtype), row, counts)
