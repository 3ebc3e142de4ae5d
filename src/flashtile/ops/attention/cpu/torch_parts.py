"""How a call is cut into rectangles of scores that PyTorch's CPU flash attention computes.

In a rectangle either each row sees every key, or row `i` sees the keys up to `i`, both counted from the first. Whatever
else changes or hides scores is in a table of numbers that are added to them. A bias is such a table as it is. Another
table that differs from row to row is made for a few rows at a time, so that none is of queries × keys. Letters as in
`tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu.scores import distances, near_diagonals, part, raised_to_near
from flashtile.ops.attention.cpu.tiles import Band, Segment, compute_dtype, hidden, seen_by, segments
from flashtile.ops.attention.spec import AttentionSpec, SideInputs

#: Most rows of a table that is made, where all heads share it and where each has its own. PyTorch's kernel takes up to
#: 64 of them at a time, and is slower with fewer.
_SHARED_TABLE_ROWS = 256
_TABLE_ROWS = 64
#: Fewest of them, where keys are many, and where a window is narrow.
_FEWEST_TABLE_ROWS = 32
_FEWEST_WINDOW_ROWS = 64
#: Most elements of such a table for each thread, but at least a head of the fewest rows.
_TABLE_ELEMENTS_PER_THREAD = 2**19


class Part(NamedTuple):
    """A rectangle of scores: rows, heads and keys of some batch entries, as indices into tensors `[B, S, H, D]`.

    Attributes:
        heads: query heads.
        heads_kv: the key/value heads that they read.
        causal: row `i` of the rectangle sees its keys up to `i`; otherwise every row sees every key.
        table: what is added to its scores, `[b | 1, h | 1, R | 1, C | 1]`, -inf where a key is hidden; None = nothing.
        raised: by how much its scores are larger than those of the call, `[b | 1, h, R]`; None = not.
    """

    batches: slice
    rows: slice
    heads: slice
    keys: slice
    heads_kv: slice
    causal: bool
    table: Tensor | None
    raised: Tensor | None = None

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        """Where its queries are in `[B, S, H, D]`."""
        return self.batches, self.rows, self.heads

    @property
    def of_statistics(self) -> tuple[slice, slice, slice]:
        """Where its rows are in `[B, H, S]`."""
        return self.batches, self.heads, self.rows

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        """Where its keys are in `[B, S, Hkv, D]`."""
        return self.batches, self.keys, self.heads_kv


class Rectangle(NamedTuple):
    """Rows and keys of a segment, counted from its first; `causal` as in `Part`."""

    rows: range
    keys: range
    causal: bool


class _Changes(NamedTuple):
    """What changes or hides scores of a segment; None for what the call does not have.

    Attributes:
        bias, mask: `[b | 1, H | 1, Sq | 1, Sk | 1]`.
        slopes: of ALiBi, `[b | 1, H, 1, 1]`.
        diagonal: the key at which ALiBi's distance from row 0 is 0.
        visible: the band that all rows see. Its right side is not in tables where rectangles are causal.
        dtype: of tables that are made.
        windowed: rows see different first keys.
    """

    bias: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    diagonal: int
    visible: Band
    dtype: torch.dtype
    windowed: bool

    @property
    def made_by_row(self) -> bool:
        """Whether there are tables that are made, and differ from row to row."""
        by_row = any(each is not None and each.shape[2] > 1 for each in (self.bias, self.mask))
        return self.windowed or self.slopes is not None or (by_row and self.mask is not None)

    def size(self, dimension: int, whole: int) -> int:
        """The size of the tables in a dimension: `whole`, or 1 where they broadcast."""
        differ = any(each is not None and each.shape[dimension] > 1 for each in (self.bias, self.mask, self.slopes))
        return whole if differ else 1

    def cut(self, batches: slice, heads: slice) -> _Changes:
        """The changes of some heads and batch entries, which count from the segment's first."""
        bias, mask, slopes = (
            None if each is None else _at(_at(each, 0, batches), 1, heads)
            for each in (self.bias, self.mask, self.slopes)
        )
        return self._replace(bias=bias, mask=mask, slopes=slopes)

    def raised(self, rows: range) -> Tensor | None:
        """By how much scores relative to the nearest key are larger than those of the call: `[b | 1, H, R]`."""
        if self.slopes is None:
            return None
        raised = raised_to_near(self.diagonal, rows, self.visible.keys, self.slopes)
        return None if raised is None else raised.squeeze(-1)

    def table(self, rectangle: Rectangle, banded: bool) -> Tensor | None:
        """A table that PyTorch's kernel adds to the scores of a rectangle. `banded`: it holds the band, too."""
        rows, keys, _ = rectangle
        table = None if self.bias is None else part(self.bias, rows, keys)
        if self.slopes is not None:
            near = near_diagonals(self.diagonal, rows, self.visible.keys, self.dtype)
            alibi = distances(near, keys) * -self.slopes
            table = alibi if table is None else alibi + table
        shown = None if self.mask is None else part(self.mask, rows, keys)
        if banded:
            in_band = ~hidden(rows, keys, self.visible)
            shown = in_band if shown is None else shown & in_band
        if shown is not None:
            # 1 - 1/1 = 0 and 1 - 1/0 = -inf, in a third of the time of `torch.where`.
            of_mask = shown.to(self.dtype).reciprocal_().neg_().add_(1)
            if table is None:
                table = of_mask
            elif self.slopes is not None and torch.broadcast_shapes(table.shape, of_mask.shape) == table.shape:
                table.add_(of_mask)
            else:
                table = table + of_mask
        return table if table is None or table.dim() == 4 else table[None, None]


def _at(tensor: Tensor, dimension: int, index: slice) -> Tensor:
    """A part of a dimension, unless it broadcasts."""
    if tensor.shape[dimension] == 1:
        return tensor
    return tensor.narrow(dimension, index.start, index.stop - index.start)


def parts_of_rows(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> Iterator[list[Part]]:
    """The rectangles in which something is visible, q `[B, S, H, D]` and k `[B, S, Hkv, D]`; B = 1 in a packed call.
    Those of a list have the same rows and heads, and together all keys that these see."""
    heads, heads_kv = q.shape[2], k.shape[2]
    for segment in segments(q, k, side, spec):
        changes = _changes_of(segment, q.dtype, side, spec)
        if changes.made_by_row:
            yield from _small_parts(segment, changes, heads, heads_kv)
            continue
        whole = slice(0, heads)
        found = [
            _part(segment, segment.batches, whole, each, changes.table(each, banded=False), heads // heads_kv)
            for each in rectangles(segment)
        ]
        if found:
            yield found


def rectangles(segment: Segment) -> Iterator[Rectangle]:
    """The rectangles of a segment without a window in which something is visible. At most two, which differ in their
    keys only."""
    lowest, highest, last = segment.visible
    first_row, start, stop = 0, 0, last
    count = segment.rows.stop - segment.rows.start
    if lowest is not None:
        # One row, or a left side that hides nothing.
        start = max(0, lowest)
    if highest is not None and highest < last - 1:
        first_row = max(0, -highest)
        stop = first_row + highest + (count == 1)
    if first_row >= count or start >= last:
        return
    if start < stop:
        yield Rectangle(range(first_row, count), range(start, stop), False)
    if stop < last and count > 1:
        yield Rectangle(range(first_row, count), range(stop, last), True)


def _small_parts(segment: Segment, changes: _Changes, heads: int, heads_kv: int) -> Iterator[list[Part]]:
    """Some rows of some batch entries and heads at a time: a rectangle each, whose table is not too large."""
    group = heads // heads_kv
    count, batch = segment.rows.stop - segment.rows.start, segment.batches.stop - segment.batches.start
    lowest, highest, last = segment.visible
    width = last if lowest is None or highest is None else highest - lowest + 1
    most = _TABLE_ELEMENTS_PER_THREAD * torch.get_num_threads()
    most_rows = _TABLE_ROWS if changes.size(1, heads) > 1 else _SHARED_TABLE_ROWS
    rows = min(count, most_rows, max(_FEWEST_WINDOW_ROWS, width // 2))
    keys = max(1, min(last, width + rows))
    rows = min(rows, max(_FEWEST_TABLE_ROWS, most // keys))
    matrices = max(1, most // (rows * keys))
    heads_each = max(1, min(heads, matrices) // group) * group if changes.size(1, heads) > 1 else heads
    tables_each = changes.size(1, heads_each)
    entries = max(1, matrices // tables_each) if changes.size(0, batch) > 1 else batch
    if lowest is None and highest is None:
        # Each row sees all keys, so that nothing is lost in larger tables.
        rows = min(count, max(rows, most // (keys * tables_each * changes.size(0, entries))))
    for first in range(0, batch, entries):
        batches = slice(first, min(first + entries, batch))
        of_call = slice(segment.batches.start + batches.start, segment.batches.start + batches.stop)
        for head in range(0, heads, heads_each):
            some_heads = slice(head, min(head + heads_each, heads))
            of_these = changes.cut(batches, some_heads)
            for start in range(0, count, rows):
                some_rows = range(start, min(start + rows, count))
                if seen := seen_by(some_rows, segment.visible):
                    rectangle = Rectangle(some_rows, seen, False)
                    banded = not _sees_all(some_rows, seen, segment.visible)
                    table = of_these.table(rectangle, banded)
                    found = _part(segment, of_call, some_heads, rectangle, table, group)
                    yield [found._replace(raised=of_these.raised(some_rows))]


def _sees_all(rows: range, keys: range, visible: Band) -> bool:
    """Whether each of some rows sees all of some keys."""
    after = visible.lowest is None or keys[0] >= rows[-1] + visible.lowest
    return after and (visible.highest is None or keys[-1] <= rows[0] + visible.highest)


def _part(
    segment: Segment, batches: slice, heads: slice, rectangle: Rectangle, table: Tensor | None, group: int
) -> Part:
    rows, keys, causal = rectangle
    return Part(
        batches,
        slice(segment.rows.start + rows.start, segment.rows.start + rows.stop),
        heads,
        slice(segment.keys.start + keys.start, segment.keys.start + keys.stop),
        slice(heads.start // group, heads.stop // group),
        causal,
        table,
    )


def _changes_of(segment: Segment, dtype: torch.dtype, side: SideInputs, spec: AttentionSpec) -> _Changes:
    bias, mask = (None if each is None else _at(each, 0, segment.batches) for each in (side.bias, side.mask))
    computed, lowest = compute_dtype(dtype), segment.visible.lowest
    if bias is not None and bias.dtype not in (dtype, computed):
        bias = bias.to(computed)  # that of an 8-bit call
    slopes = side.alibi_slopes
    if slopes is not None:
        batch = segment.batches.stop - segment.batches.start
        slopes = slopes[None] if slopes.dim() == 1 else slopes[segment.sequence : segment.sequence + batch]
        slopes = slopes[:, :, None, None].to(computed)
    diagonal = segment.diagonal + (0 if spec.origin is None else spec.origin.diagonal)
    last_row = segment.rows.stop - segment.rows.start - 1
    windowed = lowest is not None and last_row > 0 and last_row + lowest > 0
    return _Changes(bias, mask, slopes, diagonal, segment.visible, computed, windowed)
