"""The vocabulary of the tiled CPU attention: which tiles there are, and how one tile of scores is made.

Shapes::

    B batch   S sequence   H query heads   Hkv key/value heads   G = H // Hkv query heads of one key/value head
    N matrices of a block = its batch entries × its key/value heads
    R query rows of a tile   C keys of a tile   D, Dv head dimensions

The G query heads that read one key/value head are stacked into the rows of one matrix, `[N, G·R, D]`, so that keys
and values are never repeated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.ops.attention.philox import (
    head_words,
    keep_head_tile,
    positions,
    scratch_numbers,
    sequence_heads,
)
from flashtile.ops.attention.spec import AttentionSpec, SideInputs
from flashtile.ops.attention.spec import lse_dtype as compute_dtype  # of scores, statistics and accumulators

#: Scores carry a factor log₂e, because PyTorch's `exp2` takes a third of the time of its `exp`.
LOG2E = math.log2(math.e)
LN2 = math.log(2)

#: Score elements of a block's tile for each thread: with fewer the calls' own cost shows, with more they leave the L2.
_TILE_ELEMENTS_PER_THREAD = 2**18
#: Numbers of 64 bits in which dropout bits are made together, for each thread, three for four elements. Half as many
#: take 5 % longer, because PyTorch's calls show, and twice as many as long.
_DROPOUT_NUMBERS_PER_THREAD = 3 * 2**16
#: Keys of a tile, and rows of a tile over all the heads that share its keys. Multiples of 16, as dropout's groups.
_TILE_KEYS = 256
_TILE_ROWS = 256
#: The same where a block mask leaves small tiles empty.
SMALL_TILE = 128
#: The same in the batch-invariant mode, whose tiles are always whole. Small ones, because a step of decoding fills one.
_WHOLE_KEYS, _WHOLE_ROWS = 128, 64


class Band(NamedTuple):
    """Key `j < keys` is visible to row `i` if `lowest <= j - i <= highest`; None = no limit."""

    lowest: int | None
    highest: int | None
    keys: int


class Segment(NamedTuple):
    """Batch entries (dense) or one sequence (packed) that see alike, as indices into tensors `[B, S, ...]`.

    Attributes:
        batches: the batch entries; the only one of a packed call.
        rows: their query rows.
        keys: their keys, without those past a key length.
        visible: what rows see, counted from the first of `rows` and of `keys`.
        sequence: number of the first batch entry or sequence, for the dropout bits.
        diagonal: seq_k - seq_q.
    """

    batches: slice
    rows: slice
    keys: slice
    visible: Band
    sequence: int
    diagonal: int


class Block(NamedTuple):
    """The matrices that are computed together: some batch entries and key/value heads of a segment.

    Attributes:
        batches, rows, keys, visible: as in `Segment`.
        heads: the query heads.
        heads_kv: the key/value heads that they read.
        group: G.
        tile_rows: R.
        tile_keys: C.
        dropout_words: `head_words` of each stacked query head, int64 `[N·G, 3]`; None without dropout.
        sequence: number of the first batch entry or sequence.
        diagonal: the key at which ALiBi's distance from row 0 is 0; seq_k - seq_q, but in a part of a larger call.
        whole: of the batch-invariant mode: it is one matrix, and all tiles are whole ones at absolute positions. What
            of them lies outside of the segment is zeros and hidden.
        first_row: where the first tile begins; negative where its first rows lie outside.
    """

    batches: slice
    rows: slice
    keys: slice
    visible: Band
    heads: slice
    heads_kv: slice
    group: int
    tile_rows: int
    tile_keys: int
    dropout_words: Tensor | None
    sequence: int
    diagonal: int
    whole: bool = False
    first_row: int = 0

    @property
    def seq_q(self) -> int:
        return self.rows.stop - self.rows.start


class KeyTile(NamedTuple):
    """Keys `start` to `stop`; every row of the tile sees those from `clear_start` to `clear_stop`."""

    start: int
    stop: int
    clear_start: int
    clear_stop: int


def segments(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> Iterator[Segment]:
    """The segments with queries, and keys or a row logit. q, k `[B, S, H, D]`; B = 1 in a packed call."""
    if side.packed:
        yield from _packed_segments(side, spec)
        return
    batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    lengths = [seq_k] * batch if side.key_lengths is None else side.key_lengths.clamp(max=seq_k).tolist()
    first = 0
    for length, entries in groupby(lengths):
        batches = slice(first, first + len(list(entries)))
        if seq_q and (length or side.has_row_logit):
            visible = _band(seq_q, seq_k, length, spec)
            yield Segment(batches, slice(0, seq_q), slice(0, length), visible, first, seq_k - seq_q)
        first = batches.stop


def _packed_segments(side: SideInputs, spec: AttentionSpec) -> Iterator[Segment]:
    for sequence, rows, keys, one in side.sequences():
        seq_q, seq_k = rows.stop - rows.start, keys.stop - keys.start
        length = seq_k if one.key_lengths is None else min(seq_k, int(one.key_lengths))
        if seq_q and (length or side.has_row_logit):
            keys = slice(keys.start, keys.start + length)
            yield Segment(slice(0, 1), rows, keys, _band(seq_q, seq_k, length, spec), sequence, seq_k - seq_q)


def _band(seq_q: int, seq_k: int, keys: int, spec: AttentionSpec) -> Band:
    diagonal = 0 if spec.top_left else seq_k - seq_q
    lowest = None if spec.window_left is None else diagonal - spec.window_left
    highest = None if spec.window_right is None else diagonal + spec.window_right
    return Band(lowest, highest, keys)


def blocks(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec, small: bool = False) -> Iterator[Block]:
    """The blocks of a call. q and k are `[B, S, H, D]`; B = 1 in a packed call. `small`: of small tiles.

    PyTorch's products may differ in their last bits with the sizes of matrices, with how many there are, and with the
    place of a row. In the batch-invariant mode each matrix is therefore alone, all have one size, and the place of a
    row follows from its diagonal: a chunk of a sequence has its rows where the sequence has them.
    """
    heads, heads_kv = q.shape[2], k.shape[2]
    group, whole = heads // heads_kv, spec.batch_invariant
    for segment in segments(q, k, side, spec):
        first_row = 0
        if whole:
            tile_rows, tile_keys, entries, heads_each = max(16, _WHOLE_ROWS // group // 16 * 16), _WHOLE_KEYS, 1, 1
            if not spec.top_left and spec.block_shape is None:
                first_row = -(segment.diagonal % tile_rows)
        else:
            # Grouped heads leave fewer matrices to fill a batch with, so theirs are larger (measured 10-20 % faster).
            all_rows = _TILE_ROWS if group == 1 else 2 * _TILE_ROWS
            all_rows, most_keys = (SMALL_TILE * group, SMALL_TILE) if small else (all_rows, _TILE_KEYS)
            tile_rows = min(max(16, all_rows // group // 16 * 16), segment.rows.stop - segment.rows.start)
            tile_keys = min(most_keys, segment.visible.keys)
            matrices = _TILE_ELEMENTS_PER_THREAD * torch.get_num_threads() // (group * tile_rows * max(tile_keys, 1))
            entries, heads_each = max(1, matrices // heads_kv), max(1, matrices)
        for first in range(segment.batches.start, segment.batches.stop, entries):
            batches = slice(first, min(first + entries, segment.batches.stop))
            for head in range(0, heads_kv, heads_each):
                of_kv = slice(head, min(head + heads_each, heads_kv))
                of_q = slice(of_kv.start * group, of_kv.stop * group)
                first_sequence = segment.sequence + first - segment.batches.start
                yield Block(
                    batches, segment.rows, segment.keys, segment.visible, of_q, of_kv, group,
                    tile_rows=tile_rows, tile_keys=tile_keys, sequence=first_sequence,
                    dropout_words=_dropout_words(first_sequence, batches, of_q, heads, side, spec),
                    diagonal=segment.diagonal + (0 if spec.origin is None else spec.origin.diagonal),
                    whole=whole, first_row=first_row,
                )  # fmt: skip


def _dropout_words(
    first_sequence: int, batches: slice, of_q: slice, heads: int, side: SideInputs, spec: AttentionSpec
) -> Tensor | None:
    if side.dropout_seed is None:
        return None
    sequences = range(first_sequence, first_sequence + batches.stop - batches.start)
    return head_words(side.dropout_seed, sequence_heads(sequences, range(of_q.start, of_q.stop), heads, spec.origin))


def query_tiles(block: Block) -> Iterator[range]:
    for start in range(block.first_row, block.seq_q, block.tile_rows):
        stop = start + block.tile_rows
        yield range(start, stop if block.whole else min(stop, block.seq_q))


def within(tile: Tensor, block: Block, rows: range, keys: range | KeyTile) -> tuple[Tensor, range, range]:
    """The part of a tile `[..., R, C]` whose rows and keys the block has, a view, and these rows and keys."""
    inner = range(max(rows.start, 0), min(rows.stop, block.seq_q))
    columns = range(keys.start, min(keys.stop, block.visible.keys))
    tile = tile[..., inner.start - rows.start : inner.stop - rows.start, : max(len(columns), 0)]
    return tile, inner, columns


def seen_by(rows: range, visible: Band) -> range:
    """The keys that any of some rows sees."""
    start = 0 if visible.lowest is None else max(0, rows[0] + visible.lowest)
    stop = visible.keys if visible.highest is None else min(visible.keys, rows[-1] + visible.highest + 1)
    return range(start, stop)


def are_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite; False also where a sum of them is not."""
    return all(tensor.sum(dtype=compute_dtype(tensor.dtype)).isfinite() for tensor in tensors)


def visible_key_tiles(rows: range, visible: Band, tile_keys: int, whole: bool = False) -> Iterator[KeyTile]:
    """The key tiles in which any of `rows` sees a key, in ascending order. `whole`: as in `Block`."""
    seen = seen_by(rows, visible)
    if not seen:
        return
    start, stop = seen.start, seen.stop
    clear_start = 0 if visible.lowest is None else rows[-1] + visible.lowest
    clear_stop = visible.keys if visible.highest is None else min(rows[0] + visible.highest + 1, visible.keys)
    # From a multiple of 16, because the dropout bits come in groups of 16.
    along = tile_keys if whole else 16
    for first in range(start // along * along, stop, tile_keys):
        last = first + tile_keys if whole else min(first + tile_keys, stop)
        clear = max(first, clear_start), min(last, clear_stop)
        yield KeyTile(first, last, *(clear if clear[0] < clear[1] else (last, last)))


def score_tile(keys: KeyTile, q_tile: Tensor, k_matrices: Tensor, scratch: Tensor) -> Tensor:
    """The scores of one tile, `[N, G·R, C]` times log₂e in `scratch`, before anything changes or hides them. `q_tile`:
    `[N, G·R, D]`, multiplied by scale · log₂e. `k_matrices`: `[N, S, D]`."""
    return product(q_tile, k_matrices[:, keys.start : keys.stop].transpose(1, 2), scratch)


def mask_band(scores: Tensor, block: Block, rows: range, keys: KeyTile) -> None:
    """Puts -inf where a row does not see a key, into a tile `[N, G·R, C]`. The only place that reads the band."""
    # [N, G, R, C]; only the columns that some row does not see are masked.
    by_head = scores.unflatten(1, (block.group, len(rows)))
    for columns in (range(keys.start, keys.clear_start), range(keys.clear_stop, keys.stop)):
        if columns:
            part = by_head[..., columns.start - keys.start : columns.stop - keys.start]
            hide(part, ~hidden(rows, columns, block.visible))
    if block.whole:
        inner = within(by_head, block, rows, keys)[1]
        by_head[..., : inner.start - rows.start, :] = float("-inf")
        by_head[..., inner.stop - rows.start :, :] = float("-inf")


def hide(scores: Tensor, shown: Tensor) -> None:
    """Puts -inf where `shown` is False, in integers: PyTorch's `masked_fill_` goes element by element."""
    number, minus_infinity = (torch.int64, -(2**52)) if scores.dtype is torch.float64 else (torch.int32, -(2**23))
    kept = shown.to(number).neg_()  # all bits or none
    scores.view(number).bitwise_and_(kept).bitwise_or_(kept.bitwise_not_().bitwise_and_(minus_infinity))


def hidden(rows: range, columns: range, visible: Band) -> Tensor:
    """Keys of a tile that a row does not see: bool `[R, C]`."""
    distance = (
        torch.arange(columns.start, columns.stop, device="cpu")
        - torch.arange(rows.start, rows.stop, device="cpu")[:, None]
    )
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if visible.lowest is not None:
        hidden |= distance < visible.lowest
    if visible.highest is not None:
        hidden |= distance > visible.highest
    if columns.stop > visible.keys:
        hidden[:, max(visible.keys - columns.start, 0) :] = True
    return hidden


def keep_weights(block: Block, rows: range, keys: KeyTile, spec: AttentionSpec, scratch: Scratch) -> Tensor | None:
    """1 where dropout keeps a weight, else 0, `[N, G·R, C]` in the compute dtype (faster than bool), or None."""
    if not spec.dropout_p:
        return None
    assert block.dropout_words is not None
    at = positions(rows, range(keys.start, keys.stop), spec.origin)
    shape = len(block.dropout_words), len(rows), keys.stop - keys.start
    kept = scratch.kept[: math.prod(shape)].view(shape)
    together = len(scratch.bits) // scratch_numbers(*at)
    for some, of_matrices in zip(kept.split(together), block.dropout_words.split(together)):
        some.copy_(keep_head_tile(of_matrices, spec.dropout_p, *at, scratch.bits))
    return kept.view(-1, block.group * len(rows), shape[2])


def product(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    """`a @ b` in the front of a scratch buffer: a new tensor for each tile would fault its pages in each time."""
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return torch.bmm(a, b, out=scratch[: math.prod(shape)].view(shape))


def add_product(total: Tensor, a: Tensor, b: Tensor, scratch: Tensor) -> None:
    """`total += a @ b`. Not by `baddbmm_`: into a slice that multiplies one matrix after another."""
    total.add_(product(a, b, scratch))


def converted(tile: Tensor, scratch: Tensor) -> Tensor:
    """A tile in the dtype of the scratch buffer, and in it unless it has that dtype already."""
    return tile if tile.dtype is scratch.dtype else scratch[: tile.numel()].view(tile.shape).copy_(tile)


class Scratch(NamedTuple):
    """Flat memory that the tiles of a block use in turn.

    Attributes:
        scores, dweights: a tile `[N, G·R, C]` each, in the compute dtype.
        converted: a tile `[N, G·R, C]` in the product dtype.
        products: a tile `[N, G·R, D]` or `[N, C, D]` in the product dtype.
        kept: a tile `[N, G·R, C]` in the compute dtype; empty without dropout.
        bits: int64, in which the bits of some matrices of a tile are made; empty without dropout.
    """

    scores: Tensor
    dweights: Tensor
    converted: Tensor
    products: Tensor
    kept: Tensor
    bits: Tensor


def make_scratch(block: Block, q: Tensor, v: Tensor) -> Scratch:
    matrices = (block.batches.stop - block.batches.start) * (block.heads_kv.stop - block.heads_kv.start)
    rows = block.group * block.tile_rows
    tile = matrices * rows * block.tile_keys
    product_tile = matrices * max(rows, block.tile_keys) * max(q.shape[-1], v.shape[-1])
    computed, multiplied = compute_dtype(q.dtype), product_dtype(q.dtype)
    dropped = block.dropout_words is not None
    return Scratch(
        q.new_empty(tile, dtype=computed),
        q.new_empty(tile, dtype=computed),
        q.new_empty(tile if multiplied is not computed else 0, dtype=multiplied),
        q.new_empty(product_tile, dtype=multiplied),
        q.new_empty(tile if dropped else 0, dtype=computed),
        q.new_empty(_dropout_scratch_size(block) if dropped else 0, dtype=torch.int64),
    )


def _dropout_scratch_size(block: Block) -> int:
    """Numbers for the dropout bits of matrices that are made together, wherever in groups of 16 a tile begins."""
    of_a_tile = scratch_numbers(range(15, 15 + block.tile_rows), range(15, 15 + block.tile_keys))
    return max(_DROPOUT_NUMBERS_PER_THREAD * torch.get_num_threads(), of_a_tile)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights and score gradients are multiplied with the inputs.

    bfloat16 stays bfloat16 where the CPU multiplies it, at twice the speed of float32; what is rounded then is what
    eager attention rounds too. The scores are always made in the compute dtype.
    """
    return dtype if dtype is torch.bfloat16 and has_bfloat16_matmul() else compute_dtype(dtype)


@functools.cache
def has_bfloat16_matmul() -> bool:
    return torch.cpu._is_avx512_bf16_supported()


@functools.cache
def has_float16_matmul() -> bool:
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


@functools.cache
def has_x86_vectors() -> bool:
    """Whether PyTorch uses AVX, and so MKL's products of 16-bit matrices that give float32, as its forward wants."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


@functools.cache
def emulates_bfloat16() -> bool:
    """Whether PyTorch multiplies bfloat16 by float32 on an x86 processor, which has no such products."""
    return has_x86_vectors() and not has_bfloat16_matmul()


@functools.cache
def packs_16_bits() -> bool:
    """Whether PyTorch's kernel packs 16-bit keys and values for AMX; else single rows go element by element."""
    return torch.cpu._is_amx_tile_supported()


@functools.cache
def loses_infinite_scores() -> bool:
    """Whether PyTorch's kernels are those for any processor, whose lse of a row with an infinite score is NaN."""
    return torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def key_view(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of keys or values, a view: `[B, S, Hkv, D]` to `[b, h, S, D]`."""
    return tensor[block.batches, block.keys, block.heads_kv].transpose(1, 2)


def row_view(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of a tensor of queries, a view: `[B, S, H, D]` to `[b, h, G, S, D]`."""
    rows = tensor[block.batches, block.rows, block.heads].unflatten(2, (-1, block.group))
    return rows.permute(0, 2, 3, 1, 4)


def statistics_view(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of row statistics, a view: `[B, H, S]` to `[b, h, G, S, 1]`."""
    return tensor[block.batches, block.heads, block.rows].unflatten(1, (-1, block.group)).unsqueeze(-1)


def load_keys(block: Block, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies the block's part of keys or values to `[N, S, D]`; S of whole blocks is a multiple of a tile's keys."""
    view = key_view(block, tensor)
    if block.whole:
        view = F.pad(view, (0, 0, 0, -view.shape[2] % block.tile_keys))
    return _copied(view, dtype).flatten(0, 1)


def store_keys(block: Block, tensor: Tensor, matrices: Tensor) -> None:
    """Writes `[N, S, D]` to the block's part of the gradient of keys or values."""
    target = key_view(block, tensor)
    target.copy_(matrices[:, : target.shape[2]].view(target.shape))


def load_rows(view: Tensor, rows: range, dtype: torch.dtype, outside: float = 0.0) -> Tensor:
    """Copies some rows of `[b, h, G, S, D]` to `[N, G·R, D]`. `outside`: what rows have that there are not."""
    seq_q = view.shape[3]
    before, after = max(-rows.start, 0), max(rows.stop - seq_q, 0)
    view = view[:, :, :, max(rows.start, 0) : rows.stop]
    if before or after:
        view = F.pad(view, (0, 0, before, after), value=outside)
    return _copied(view, dtype).flatten(0, 1).flatten(1, 2)


def _copied(view: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(view.shape, dtype=dtype, device="cpu").copy_(view)


def store_rows(view: Tensor, rows: range, tile: Tensor) -> None:
    """Writes `[N, G·R, D]` to some rows of `[b, h, G, S, D]`."""
    target = view[:, :, :, max(rows.start, 0) : rows.stop]
    tile = tile.view(*view.shape[:3], len(rows), view.shape[4])
    first = max(-rows.start, 0)
    target.copy_(tile[:, :, :, first : first + target.shape[3]])
