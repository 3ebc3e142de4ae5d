"""Partial results put together one after another, in float32, by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which results and gradients are summed, and lse comes."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class RunningMerge:
    """Attention over the keys so far, for the queries of a shard.

    With the results `out_i`, `lse_i` of disjoint keys it holds `m = max lse_i`, `l = Σ exp(lse_i - m)` and
    `acc = Σ exp(lse_i - m) · out_i`, and divides once, at the end. While the largest result stays the same, what is
    there is multiplied by exactly 1: so rounding errors do not pile up with the number of parts.

    Args:
        queries: `[batch, rows, heads, head_dim]`.
        head_dim_v: columns of the results.
        parts: how many results will come. A single result that has all rows is kept as it is.

    Reference:
        Dao et al., "FlashAttention" (2022), algorithm 1; Liu et al., "Ring Attention with Blockwise Transformers"
        (2023), section 3.
    """

    def __init__(self, queries: Tensor, head_dim_v: int, parts: int) -> None:
        self._dtype = queries.dtype
        self._wide = wide_dtype(queries.dtype)
        self._queries, self._head_dim_v, self._parts = queries, head_dim_v, parts
        self._only: tuple[Tensor, Tensor] | None = None
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # acc, max and sum

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """Takes in a result of some rows: out `[batch, rows, heads, head_dim_v]`, lse `[batch, heads, rows]`."""
        first = self._state is None and rows == (0, self._queries.shape[1])
        if first and self._parts == 1:
            self._only = out, lse
            return
        if self._state is None:
            self._state = self._start(first)
        acc, row_max, row_sum = self._state
        where = slice(*rows)
        flashtile.merge_attention_(acc[:, where], row_max[..., where], row_sum[..., where], out, lse, first=first)

    def _start(self, for_all: bool) -> tuple[Tensor, Tensor, Tensor]:
        """A merge of nothing; for a first result of all rows without its values."""
        batch, rows, heads, _ = self._queries.shape
        acc = self._queries.new_empty(batch, rows, heads, self._head_dim_v, dtype=self._wide)
        row_max, row_sum = self._queries.new_empty(2, batch, heads, rows, dtype=self._wide)
        if not for_all:
            acc.zero_()
            row_max.fill_(float("-inf"))
            row_sum.zero_()
        return acc, row_max, row_sum

    def finish(self, sinks: Tensor | None = None, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """out in the dtype of the queries and lse. `sinks` `[heads]`: logits that belong to no key; the last part, of
        all queries or of the first `rows`."""
        if sinks is not None:
            batch, queries, heads, _ = self._queries.shape
            rows = queries if rows is None else rows
            if self._state is None and self._only is None:
                self._state = self._start(False)
            nothing = self._queries.new_zeros(batch, 1, heads, self._head_dim_v).expand(-1, rows, -1, -1)
            self.add((0, rows), nothing, sinks.to(self._wide)[None, :, None].repeat(batch, 1, rows))
        if self._only is not None:
            return self._only
        return flashtile.finish_attention(*(self._state or self._start(False)), self._dtype)


class Sum:
    """A gradient `[batch, rows, heads, head_dim]` that comes in parts of some rows, added up in float32, in their
    order. Parts of different rows stay as they are."""

    def __init__(self, like: Tensor) -> None:
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._parts: list[tuple[int, int, Tensor]] = []

    def add(self, rows: tuple[int, int], part: Tensor) -> None:
        """Takes in a part."""
        begin, end = rows
        if all(end <= other_begin or other_end <= begin for other_begin, other_end, _ in self._parts):
            self._parts.append((begin, end, part))
            return
        total = self._joined(wide_dtype(self._dtype))
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


class Largest:
    """The largest score of each row so far, `[batch, heads, rows]`, -inf at first."""

    def __init__(self, queries: Tensor) -> None:
        batch, rows, heads, _ = queries.shape
        wide = wide_dtype(queries.dtype)
        self.scores = queries.new_full((batch, heads, rows), float("-inf"), dtype=wide)

    def add(self, rows: tuple[int, int], scores: Tensor) -> None:
        """Takes in those of some rows over some keys."""
        of_rows = self.scores[..., slice(*rows)]
        of_rows.copy_(torch.maximum(of_rows, scores))
