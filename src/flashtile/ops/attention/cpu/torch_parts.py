"""How a call is cut into rectangles of scores that PyTorch's CPU flash attention computes.

In a rectangle either each row sees every key, or row `i` sees the keys up to `i`, both counted from the first. Whatever
else changes or hides scores is in a table of numbers that are added to them. A bias is such a table as it is. Another
table that differs from row to row is made for a few rows at a time, so that none is of queries × keys. Letters as in
`tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.cpu import tiles
from flashtile.ops.attention.cpu.scores import distances, near_diagonals, part, raised_to_near, segment_slopes
from flashtile.ops.attention.cpu.tiles import LOG2E, Band, Segment, compute_dtype, hidden, seen_by, segments
from flashtile.ops.attention.spec import AttentionSpec, BackwardInputs, SideInputs

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
    def queries_index(self) -> tuple[slice, slice, slice]:
        """The index of its queries in `[B, S, H, D]`."""
        return self.batches, self.rows, self.heads

    @property
    def statistics_index(self) -> tuple[slice, slice, slice]:
        """The index of its rows in `[B, H, S]`."""
        return self.batches, self.heads, self.rows

    @property
    def keys_index(self) -> tuple[slice, slice, slice]:
        """The index of its keys in `[B, S, Hkv, D]`."""
        return self.batches, self.keys, self.heads_kv


class Rectangle(NamedTuple):
    """Rows and keys of a segment, counted from its first; `causal` as in `Part`."""

    rows: range
    keys: range
    causal: bool


class _Changes(NamedTuple):
    """Tables that change or hide scores of a segment; None for what the call does not have.

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
            lowered = distances(near, keys) * -self.slopes
            table = lowered if table is None else lowered + table
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


def row_parts(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> Iterator[list[Part]]:
    """Lists of rectangles of q `[B, S, H, D]` and k `[B, S, Hkv, D]` in which something is visible: of the same rows
    and heads, with all keys that these see. B = 1 in a packed call."""
    heads, heads_kv = q.shape[2], k.shape[2]
    for segment in segments(q, k, side, spec):
        changes = _segment_changes(segment, q.dtype, side, spec)
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
    """The visible rectangles of a segment without a window: at most two, which differ in their keys only."""
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


def _segment_changes(segment: Segment, dtype: torch.dtype, side: SideInputs, spec: AttentionSpec) -> _Changes:
    bias, mask = (None if each is None else _at(each, 0, segment.batches) for each in (side.bias, side.mask))
    computed, lowest = compute_dtype(dtype), segment.visible.lowest
    if bias is not None and bias.dtype not in (dtype, computed):
        bias = bias.to(computed)  # that of an 8-bit call
    slopes = segment_slopes(segment, side)
    if slopes is not None:
        slopes = slopes.to(computed)
    diagonal = segment.diagonal + (0 if spec.origin is None else spec.origin.diagonal)
    last_row = segment.rows.stop - segment.rows.start - 1
    windowed = lowest is not None and last_row > 0 and last_row + lowest > 0
    return _Changes(bias, mask, slopes, diagonal, segment.visible, computed, windowed)


# Half of a small call's time is the way to it: this one is shorter than that through `torch.ops`.
_forward_op: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu

_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: Most queries of a rectangle without a diagonal whose heads of a group are stacked as rows. With more, products are
#: large without it, and copies of q and out cost more than reading the keys again.
_MOST_STACKED_QUERIES = 64

#: The same of the backward in 16 bits, where the kernel does not pack.
_MOST_STACKED_GRADIENTS = 512

#: Fewest and most keys of a split, and the number where none between them divides the keys. PyTorch's kernel reads 512
#: keys of one head, then those of the next head lie far away; in splits of 512 their lines are in the L2 already.
_SPLIT_KEYS = range(256, 769)
_USUAL_SPLIT = 512

#: Most rows, queries times heads of a group, of a call whose keys are split: with more, products take the time.
_MOST_SPLIT_ROWS = 32

#: Most elements of keys and values with which a single thread does not gain from splits: the caches hold them.
_MOST_UNSPLIT_ELEMENTS = 2**22

#: Copies of a single row that PyTorch's kernel gets where it is slow with one.
_COPIES_OF_SINGLE_ROW = 4

#: Fewest keys of such a row: with fewer, the library that multiplies several takes longer to begin (3 µs).
_FEWEST_KEYS_OF_COPIES = 64


class Statistics(NamedTuple):
    """`out` `[b, R, H, D]` and `lse` `[b, H, R]` of a rectangle."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, table: Tensor | None = None
) -> Statistics | None:
    """The result of a rectangle (`Part`), q `[b, R, H, D]`, k, v `[b, C, Hkv, D]`; None where it may be wrong."""
    group = q.shape[2] // k.shape[2]
    rows = q.shape[1]
    stacked = not causal and (rows == 1 or (group > 1 and rows <= _MOST_STACKED_QUERIES and table is None))
    q = _repeated(_stacked(q, group), k.shape[1]) if stacked else q.transpose(1, 2)
    reread = group > 1 and not stacked
    k, v = _by_head(k, reread), _by_head(v, reread)
    if table is None:
        out, lse = _forward_op(q, k, v, 0.0, causal, scale=scale)
        if _may_be_hidden(out, lse):
            return None
    else:
        of_rows = table.reshape(table.shape[0], -1, group, table.shape[3]) if stacked and table.shape[1] > 1 else table
        found = _with_hidden_rows(*_forward_op(q, k, v, 0.0, causal, attn_mask=of_rows, scale=scale), of_rows, causal)
        if found is None:
            return None
        out, lse = found
    if tiles.loses_infinite_scores() and lse.isnan().any():
        return None
    # An infinite score makes a row NaN; PyTorch's 16-bit kernel returns numbers for it.
    if out.dtype in (torch.bfloat16, torch.float16) and not math.isfinite(lse.sum().item()):
        out.masked_fill_((lse == float("inf")).unsqueeze(-1), float("nan"))
    if stacked:
        if q.shape[2] > group * rows:
            out, lse = out[:, :, : group * rows], lse[:, :, : group * rows]
        return Statistics(_unstacked(out, group), lse.reshape(lse.shape[0], -1, rows))
    return Statistics(out.transpose(1, 2), lse)


def _may_be_hidden(out: Tensor, lse: Tensor) -> bool:
    """Whether PyTorch took a row for one without a visible key: out = 0 and lse = 0, which hardly any other row has. So
    it does if all scores are -inf, and if they are NaN and fewer than a vector of the processor holds."""
    return not lse.all() and not bool(out[lse == 0].any(dim=-1).all())


def _with_hidden_rows(out: Tensor, lse: Tensor, table: Tensor, causal: bool) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a rectangle with a table, 0 and -inf where a row sees no key; None where PyTorch's result may be
    wrong.

    PyTorch's lse of a row without a visible key is 0, and so may be that of a row of NaN. The lse of others is NaN
    where a hidden key is infinite or NaN, because the table is added to its score.
    """
    least = lse.amin().item()
    if math.isnan(least):
        return None
    if least < torch.finfo(lse.dtype).min / LOG2E:
        # Tiles, on every backend, hold scores times log₂e: such a row sees no key there.
        hidden = lse < torch.finfo(lse.dtype).min / LOG2E
        out, lse = out.masked_fill(hidden.unsqueeze(-1), 0), lse.masked_fill(hidden, float("-inf"))
    zero = lse == 0
    if not zero.any():
        return out, lse
    seen = table != float("-inf")
    if causal:
        seen = seen.expand(-1, -1, lse.shape[2], -1).tril()
    hidden = ~seen.any(dim=-1)
    return None if (zero & ~hidden).any() else (out, lse.masked_fill(zero, float("-inf")))


def splitting_pays(q: Tensor, k: Tensor) -> bool:
    """Whether to split the keys of a call without a diagonal, q `[b, R, H, D]` and k `[b, C, Hkv, D]`."""
    batch, keys, heads_kv, head_dim = k.shape
    if batch > 1 or q.shape[1] * (q.shape[2] // heads_kv) > _MOST_SPLIT_ROWS or keys < 2 * _SPLIT_KEYS.start:
        return False
    # PyTorch's kernel gives the rows of a key/value head to one thread.
    return 2 * keys * heads_kv * head_dim > _MOST_UNSPLIT_ELEMENTS or heads_kv < torch.get_num_threads()


def attend_split(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Statistics | None:
    """As `attend` for few rows of one sequence: splits of the keys are batch entries of one call, merged by lse."""
    keys, heads_kv, head_dim = k.shape[1:]
    group = q.shape[2] // heads_kv
    count, size = _splits(keys)
    rows = group * q.shape[1]
    stacked = _repeated(_stacked(q, group), keys)
    whole = (k, v) if count * size == keys else (k[:, : count * size], v[:, : count * size])
    splits = [t.view(count, size, heads_kv, head_dim).transpose(1, 2) for t in whole]
    out, lse = _forward_op(stacked.expand(count, -1, -1, -1), *splits, 0.0, False, scale=scale)
    if _may_be_hidden(out, lse):
        return None
    if count * size < keys:
        rest = [t[:, count * size :].transpose(1, 2) for t in (k, v)]
        last_out, last_lse = _forward_op(stacked, *rest, 0.0, False, scale=scale)
        if _may_be_hidden(last_out, last_lse):
            return None
        out, lse = torch.cat((out, last_out)), torch.cat((lse, last_lse))
    weights = lse.softmax(0)
    # The largest weight is exp(largest lse - lse of all).
    total = lse.amax(0, keepdim=True) - weights.amax(0, keepdim=True).log_()
    if not math.isfinite(total.sum().item()):
        return None  # NaN, or infinite scores: see `attend` and `merged`
    out = (out * weights.unsqueeze(-1)).sum(0, keepdim=True).to(q.dtype)
    return Statistics(_unstacked(out[:, :, :rows], group), total[:, :, :rows].reshape(1, -1, q.shape[1]))


def _splits(keys: int) -> tuple[int, int]:
    """(number of splits, keys of each); what they leave over is one more."""
    for count in range(max(2, -(-keys // _SPLIT_KEYS[-1])), keys // _SPLIT_KEYS[0] + 1):
        if not keys % count:
            return count, keys // count
    return keys // _USUAL_SPLIT, _USUAL_SPLIT


def merged(first: Statistics, second: Statistics) -> Statistics:
    """The result of rows from those of two parts of their keys. PyTorch's lse of a part whose scores are all -inf is
    NaN, and so is that of a part with NaN: then that of the rows is NaN."""
    lse = torch.logaddexp(first.lse, second.lse)
    total = None
    for out, of_part in (first, second):
        weighted = out * _weights(of_part, lse)
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return Statistics(total.to(first.out.dtype), lse)


def with_logits(found: Statistics, logits: Tensor) -> Statistics:
    """The result of rows whose softmax has a logit `[H]` without a value besides."""
    lse = torch.logaddexp(found.lse, logits[:, None])
    return Statistics((found.out * _weights(found.lse, lse)).to(found.out.dtype), lse)


def _weights(of_part: Tensor, lse: Tensor) -> Tensor:
    """The share that a part has in the softmax of its rows, from lse of both `[b, H, R]`: `[b, R, H, 1]`."""
    weights = (of_part - lse).exp_().masked_fill_(of_part.isneginf(), 0)
    return weights.transpose(1, 2).unsqueeze(-1)


def gradients(
    given: BackwardInputs, causal: bool, scale: float, table: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a rectangle, from the out and lse of its rows over all their keys."""
    dout, _, q, k, v, out, lse = given
    group = q.shape[2] // k.shape[2]
    # In 16 bits the gradients of stacked rows take two thirds of the time, copies included.
    gains = q.itemsize < 4 and (q.shape[1] <= _MOST_STACKED_GRADIENTS or tiles.packs_16_bits())
    stacked = group > 1 and not causal and (q.shape[1] <= _MOST_STACKED_QUERIES or gains) and table is None
    dout, q, out = (_stacked(t, group) if stacked else t.transpose(1, 2) for t in (dout, q, out))
    if stacked:
        lse = lse.reshape(lse.shape[0], k.shape[2], -1)
    reread = group > 1 and not stacked
    k, v = _by_head(k, reread), _by_head(v, reread)
    dq, dk, dv = _backward_op(dout, q, k, v, out, lse, dropout_p=0.0, is_causal=causal, attn_mask=table, scale=scale)
    return _unstacked(dq, group) if stacked else dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _by_head(tensor: Tensor, reread: bool) -> Tensor:
    """`[b, C, Hkv, D]` to `[b, Hkv, C, D]`. A copy saves a tenth of the time if a head is reread, unless PyTorch's
    kernel packs rows."""
    heads_first = tensor.transpose(1, 2)
    copied = reread and (tensor.itemsize > 2 or not tiles.packs_16_bits())
    return heads_first.contiguous() if copied else heads_first


def _stacked(tensor: Tensor, group: int) -> Tensor:
    """The heads of a key/value head as rows: `[b, R, H, D]` to `[b, Hkv, G·R, D]`. A view where R is 1."""
    batch, rows, heads, head_dim = tensor.shape
    if rows == 1:
        return tensor.view(batch, heads // group, group, head_dim)
    by_head = tensor.view(batch, rows, heads // group, group, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(batch, heads // group, group * rows, head_dim)


def _repeated(stacked: Tensor, keys: int) -> Tensor:
    """Rows `[b, Hkv, G·R, D]` as PyTorch's kernel gets them: copies of a single one where it is slow with that."""
    if stacked.shape[2] > 1 or stacked.itemsize > 2 or keys < _FEWEST_KEYS_OF_COPIES or tiles.packs_16_bits():
        return stacked
    return stacked.repeat(1, 1, _COPIES_OF_SINGLE_ROW, 1)


def _unstacked(tensor: Tensor, group: int) -> Tensor:
    """The inverse of `_stacked`."""
    batch, heads_kv, rows, head_dim = tensor.shape
    if rows == group:
        return tensor.reshape(batch, 1, heads_kv * group, head_dim)
    by_head = tensor.view(batch, heads_kv, group, rows // group, head_dim).permute(0, 3, 1, 2, 4)
    return by_head.reshape(batch, rows // group, heads_kv * group, head_dim)
