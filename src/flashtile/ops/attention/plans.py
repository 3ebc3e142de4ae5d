"""What the launches of all GPU kernels have in common: outputs, the sign of the scale, clipped windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.ops.attention.spec import FP8, AttentionSpec, SideInputs, Table, plain_side, table_of
from flashtile.ops.attention.tile_lists import Grid, Places
from flashtile.ops.common.checks import MAX_POSITIONS, check_rows

#: Windows are clipped to this: no sequence is longer.
WIDEST_WINDOW = MAX_POSITIONS


class BlockSizes(NamedTuple):
    """The sizes of a block mask: how many numbers its lists have, how many patterns there are, and for how many queries
    and keys it was built."""

    numbers: int
    patterns: int
    seq_q: int
    seq_k: int


class CapturedShape(NamedTuple):
    """What a plan needs to know of a contiguous tensor that a score function reads."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def large(self) -> bool:
        """Whether it has more elements than 32 bits count."""
        return math.prod(self.shape) >= 2**31


class SideShape(NamedTuple):
    """What a plan needs to know of the side inputs.

    Attributes:
        alibi: dimensions of the slopes; 0 without.
        blocks: sizes of the block mask; None without one.
        pattern_misalignment: address of its patterns modulo 16.
        captured: of the tensors that the score function reads.
        descales: strides of the factors of 8-bit q, k and v; None for one that is not there.
    """

    sequences: int | None = None
    index_dtypes: tuple[torch.dtype, torch.dtype] | None = None
    key_lengths_dtype: torch.dtype | None = None
    dropout: bool = False
    bias: Table | None = None
    mask: Table | None = None
    alibi: int = 0
    sinks: bool = False
    blocks: BlockSizes | None = None
    pattern_misalignment: int = 0
    descales: tuple[tuple[int, ...] | None, ...] = (None, None, None)
    captured: tuple[CapturedShape, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether a side input changes the scores."""
        return self.bias is not None or self.mask is not None or self.alibi > 0


PLAIN_SIDE = SideShape()


def side_shape(side: SideInputs) -> SideShape:
    if plain_side(side):
        return PLAIN_SIDE
    sequences, index_dtypes = packing(side)
    return SideShape(
        sequences,
        index_dtypes,
        None if side.key_lengths is None else side.key_lengths.dtype,
        side.dropout_seed is not None,
        table_of(side.bias),
        table_of(side.mask),
        0 if side.alibi_slopes is None else side.alibi_slopes.dim(),
        side.sinks is not None,
        block_sizes(side),
        0 if side.block_patterns is None else side.block_patterns.data_ptr() & 15,
        descale_strides(side),
        tuple(CapturedShape(tensor.dtype, tuple(tensor.shape)) for tensor in side.captured),
    )


def descale_strides(side: SideInputs) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if descale is None else descale.stride() for descale in side.descales)


def positive_scale(q: Tensor, spec: AttentionSpec) -> tuple[Tensor, AttentionSpec, int]:
    """The kernels take the maximum before they scale, so the scale must be positive: its sign, or 0, moves into q.

    Returns:
        A contiguous copy of q, the spec, and the factor that leads from the gradient of that q to the gradient of the
        given one.
    """
    if not spec.scale:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), spec._replace(scale=1.0), 0
    negative = (q.view(torch.uint8) ^ 0x80).view(FP8) if q.dtype is FP8 else -q
    # The negative of an expanded q need not be contiguous: PyTorch may choose an order whose last dimension is not
    # innermost.
    return negative.contiguous(), spec._replace(scale=-spec.scale), -1


def may_hide_rows(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> bool:
    """Whether a row may see no key, as far as the host knows. A sink does not count."""
    if spec.score_program is not None:
        return True
    if not (side.key_lengths is side.mask is side.bias is side.block_lists is None):
        return True
    left, right = spec.window_left, spec.window_right
    if left is not None and right is not None and left + right < 0:
        return True
    if side.cu_seqlens_q is not None and side.cu_seqlens_k is not None:
        # Sequences with as many queries as keys: each row sees the key on its diagonal, unless a side is negative.
        same = side.cu_seqlens_q.data_ptr() == side.cu_seqlens_k.data_ptr()
        return not same or (left or 0) < 0 or (right or 0) < 0
    return band_hides_rows(spec, q.shape[1], k.shape[1])


def band_hides_rows(spec: AttentionSpec, seq_q: int, seq_k: int) -> bool:
    """Whether a band hides all keys from the first or the last rows of a dense call."""
    left, right = spec.window_left, spec.window_right
    shift = 0 if spec.top_left else seq_k - seq_q
    return (right is not None and shift + right < 0) or (left is not None and seq_q - 1 + shift - left >= seq_k)


def contiguous_on_16_bytes(out: Tensor) -> Tensor:
    """An out that every kernel can read, wherever it lay. On Hopper they are compiled for that, elsewhere for where q,
    k, v and dout lie."""
    out = out.contiguous()
    return out.clone() if out.data_ptr() % 16 else out


class Window(NamedTuple):
    """Keys visible on each side of the diagonal, as kernels take them."""

    left: Any
    right: Any


def clipped_window(spec: AttentionSpec) -> tuple[int, int]:
    """Both sides of the window as kernels take them; 0 for a side that is unlimited, which they do not read."""
    left, right = (max(-WIDEST_WINDOW, min(side or 0, WIDEST_WINDOW)) for side in (spec.window_left, spec.window_right))
    return left, right


def packing(side: SideInputs) -> tuple[int | None, tuple[torch.dtype, torch.dtype] | None]:
    """Number of packed sequences, and how their lengths are stored; None and None for a dense call."""
    if side.cu_seqlens_q is None or side.cu_seqlens_k is None:
        return None, None
    return side.cu_seqlens_q.shape[0] - 1, (side.cu_seqlens_q.dtype, side.cu_seqlens_k.dtype)


class CallSizes(NamedTuple):
    """The sizes that the shapes of q, k and v tell. `batch` counts batch entries, or the sequences of a packed call."""

    batch: int
    rows_q: int
    rows_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int


def call_sizes(shapes: Sequence[Sequence[int]], side: SideShape) -> CallSizes:
    """The sizes of a call, from the shapes of q, k and v.

    Raises:
        ValueError: there are more queries or keys than kernels count.
    """
    q_shape, _, v_shape = shapes
    (rows_q, heads, head_dim), (rows_k, heads_kv, head_dim_v) = q_shape[-3:], v_shape[-3:]
    check_rows("q", rows_q, MAX_POSITIONS)
    check_rows("k", rows_k, MAX_POSITIONS)
    batch = q_shape[0] if side.sequences is None else side.sequences
    return CallSizes(batch, rows_q, rows_k, heads, heads_kv, head_dim, head_dim_v)


def tiles_of(rows: int, block: int, batch: int, packed: bool) -> int:
    """Tiles of a sequence; of a packed call the slots of all its sequences, whose lengths the host does not know: each
    has as many as it has tiles, or one more."""
    return rows // block + batch + 1 if packed else -(-rows // block)


class BlockPlaces(NamedTuple):
    """What tells a kernel where its part of a block mask's lists is: where its lines, tiles, kinds and bits begin, how
    far a batch entry and a head lead, and where the order of rows begins. None without a block mask, and the last
    along columns, which come in their own order."""

    offsets: int | None = None
    tiles: int | None = None
    kinds: int | None = None
    bits: int | None = None
    stride_batch: int | None = None
    stride_head: int | None = None
    order: int | None = None


def block_sizes(side: SideInputs) -> BlockSizes | None:
    """The sizes of the block mask of a call; None without one."""
    if side.block_lists is None or side.block_patterns is None:
        return None
    # A mask has the lengths of a dense call, or the bounds of the lengths in a packed one.
    return BlockSizes(side.block_lists.shape[0], side.block_patterns.shape[0], side.max_seqlen_q, side.max_seqlen_k)


def block_places(spec: AttentionSpec, sizes: BlockSizes | None, by_column: bool) -> BlockPlaces:
    """For a kernel that walks along rows, or along columns, of a block mask."""
    if spec.block_shape is None or sizes is None:
        return BlockPlaces()
    batch, heads, *tile = spec.block_shape
    grid = Grid((batch, heads, sizes.seq_q, sizes.seq_k), (tile[0], tile[1]))
    places = Places.of(grid, sizes.numbers, sizes.patterns)
    lines = grid.tiles_k if by_column else grid.tiles_q
    strides = heads * lines if batch > 1 else 0, lines if heads > 1 else 0
    if by_column:
        return BlockPlaces(places.column_offsets, places.rows, places.row_kinds, places.column_bits, *strides)
    own = places.row_offsets, places.columns, places.kinds, places.row_bits
    return BlockPlaces(*own, *strides, places.row_order)
