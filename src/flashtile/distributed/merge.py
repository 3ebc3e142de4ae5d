"""Partial results put together one after another, in float32, by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile


class RunningMerge:
    """Attention over the keys so far, for the queries of a shard.

    With the results `out_i`, `lse_i` of disjoint keys it holds `m = max lse_i`, `l = Σ exp(lse_i - m)` and
    `acc = Σ exp(lse_i - m) · out_i`, and divides once, at the end. While the largest result stays the same, what is
    there is multiplied by exactly 1: so rounding errors do not pile up with the number of parts.

    Args:
        queries: `[batch, rows, heads, head_dim]`.
        head_dim_v: columns of the results.

    Reference:
        Dao et al., "FlashAttention" (2022), algorithm 1; Liu et al., "Ring Attention with Blockwise Transformers"
        (2023), section 3.
    """

    def __init__(self, queries: Tensor, head_dim_v: int) -> None:
        self._dtype = queries.dtype
        self._wide = torch.float64 if queries.dtype is torch.float64 else torch.float32
        self._queries, self._head_dim_v = queries, head_dim_v
        self._only: tuple[Tensor, Tensor] | None = None
        self._acc = self._max = self._sum = torch.empty(0)

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """Takes in a result of some rows: out `[batch, rows, heads, head_dim_v]`, lse `[batch, heads, rows]`."""
        if self._only is None and not self._acc.numel():
            if rows == (0, self._queries.shape[1]):
                self._only = out, lse
                return
            self._start()
        elif self._only is not None:
            first_out, first_lse = self._only
            self._only = None
            # A row that saw nothing has lse = -inf and out = 0: its sum is 0.
            self._acc = first_out.to(self._wide, copy=True, memory_format=torch.contiguous_format)
            self._max = first_lse.clone(memory_format=torch.contiguous_format)
            self._sum = (self._max != float("-inf")).to(self._wide)
        begin, end = rows
        flashtile.merge_attention_(
            self._acc[:, begin:end], self._max[..., begin:end], self._sum[..., begin:end], out, lse
        )

    def _start(self) -> None:
        batch, rows, heads, _ = self._queries.shape
        self._acc = self._queries.new_zeros(batch, rows, heads, self._head_dim_v, dtype=self._wide)
        self._max = self._queries.new_full((batch, heads, rows), float("-inf"), dtype=self._wide)
        self._sum = torch.zeros_like(self._max)

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out in the dtype of the queries and lse. `sinks` `[heads]`: logits that belong to no key."""
        if sinks is not None:
            batch, rows, heads, _ = self._queries.shape
            if not self._acc.numel() and self._only is None:
                self._start()
            nothing = self._queries.new_zeros(batch, 1, heads, self._head_dim_v).expand(-1, rows, -1, -1)
            self.add((0, rows), nothing, sinks.to(self._wide)[None, :, None].repeat(batch, 1, rows))
        if self._only is not None:
            return self._only
        if not self._acc.numel():
            self._start()
        blind = self._sum == 0
        total = self._sum.masked_fill(blind, 1)
        # As torch.logsumexp: a row with an infinite score has an infinite lse, though its weights are NaN.
        infinite = self._max == float("inf")
        lse = torch.where(blind | infinite, self._max, self._max + total.log())
        out = torch.empty(self._acc.shape, dtype=self._dtype, device=self._acc.device)
        torch.div(self._acc, _by_row(total), out=out)  # divided and rounded in one pass
        return out, lse


def _by_row(statistics: Tensor) -> Tensor:
    """`[batch, heads, rows]` as a factor of `[batch, rows, heads, head_dim]`."""
    return statistics.transpose(-1, -2).unsqueeze(-1)


class Sum:
    """A gradient that comes in parts of some rows, added up in float32, in the order in which they come.

    Parts of different rows stay as they are.

    Args:
        like: tensor `[batch, rows, heads, head_dim]` of which it is the gradient.
    """

    def __init__(self, like: Tensor) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._parts: list[tuple[int, int, Tensor]] = []

    def add(self, rows: tuple[int, int], part: Tensor) -> None:
        """Takes in a part."""
        begin, end = rows
        if all(end <= other_begin or other_end <= begin for other_begin, other_end, _ in self._parts):
            self._parts.append((begin, end, part))
            return
        total = self._joined(torch.float64 if self._dtype is torch.float64 else torch.float32)
        total[:, begin:end].add_(part)
        self._parts = [(0, self._shape[1], total)]

    def finish(self) -> Tensor:
        """In the dtype of the tensor, contiguous."""
        return self._joined(self._dtype)

    def _joined(self, dtype: torch.dtype) -> Tensor:
        """All parts in one tensor."""
        if len(self._parts) == 1 and self._parts[0][:2] == (0, self._shape[1]):
            return self._parts[0][2].to(dtype).contiguous()
        make = torch.empty if sum(end - begin for begin, end, _ in self._parts) == self._shape[1] else torch.zeros
        whole = make(self._shape, dtype=dtype, device=self._device)
        for begin, end, part in self._parts:
            whole[:, begin:end].copy_(part)
        return whole
