"""What the launches of attention with split keys (over a cache, or of a few queries) need beside their pointers: cuts,
sizes and strides, from a `SplitCall`, which has no lengths that stand in a tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashtile._backends.alignment import power_of_two_factor
from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.devices import DeviceFacts, device_facts, interpreting, multiprocessors
from flashtile._backends.launch import (
    GIVEN,
    Parameter,
    float32,
    int32,
    int64,
    named_constants,
    pointer_to,
)
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows
from flashtile.ops.common.split_keys.attend import ByHead, Parts, Prefix, attend_kernel, combine_kernel
from flashtile.ops.common.split_keys.configs import (
    COMBINING,
    MANY_KEYS,
    AttendTiles,
    TileKey,
    choose_split_count,
    choose_tiles,
    combine_cut,
    fewer_stages,
    tile_width,
)
from flashtile.ops.common.split_keys.rows import (
    CacheStrides,
    Descales,
    RowStrides,
    Sequences,
    TableStrides,
    Window,
)
from flashtile.ops.common.tiles import box_rows


class Cut(NamedTuple):
    """The cut of attention's forward in the batch-invariant mode, whose bits a call is to have. `tiles`: their rows are
    queries there. `precision`: of products. `widths`: columns of tiles of q and k, and of v."""

    tiles: AttendTiles
    precision: str
    widths: tuple[int, int]


def wide_cut(dtype: torch.dtype, head_dim: int, head_dim_v: int, facts: DeviceFacts, allow_tf32: bool) -> Cut:
    """The cut in that mode of heads that the forward does not have: as of many rows without pages."""
    tiles = choose_tiles(facts._replace(tuned=None), TileKey(dtype, head_dim, head_dim_v, rows=1024))
    return Cut(tiles, _dot_precision(dtype, facts, allow_tf32), (tile_width(head_dim), tile_width(head_dim_v)))


#: Bytes that a copy past the registers moves at least.
_ASYNCHRONOUS = 4

#: Rows of a page that TMA moves at least: those that are swizzled together.
_MOVED_ROWS = 8

_Shape = tuple[int, ...]


class SplitCall(NamedTuple):
    """A call as its plan sees it.

    Attributes:
        shape: (batch, seq_q, heads_q, heads_kv, head_dim, head_dim_v).
        strides: those of q, k and v without the last, used ones: (batch or outer, row, head).
        misalignment: of the addresses of q, k and v, modulo 16.
        capacity: rows that a sequence of keys can have.
        index_dtypes: of what `rows.Sequences` has; None for one that there is not.
        page_size, stride_table, pages: of a cache in pages, and how many there are; else 0.
        tree: of the tree, the strides between sequences and between queries, and how many columns it has.
        cut: in the batch-invariant mode; None else.
        most: packed sequences of more queries are left to another kernel, and so are rows of nobody; None: none are.
        total_q: queries of all sequences, where they are packed: seq_q is that of the longest then. None else.
        seq_new: rows that a length does not count, without starts of new rows.
        window_left, window_right: keys visible on each side of the diagonal; None = all.
        diagonal: the key on the diagonal of the first query; None: that of the last query is the last row of its
            sequence.
        slope_diagonal: likewise, for the distances of ALiBi.
        visible: rows of a sequence that its queries see at most.
        softcap: 0 = none.
        slope_dims: dimensions of ALiBi's slopes; 0 without.
        num_splits: 0 = to be chosen.
        cache_dtype: of k and v; None for that of q.
        descale_strides: of the factors of k and v, `[outer, rows, heads_kv]`; None without.
        values_in_keys: v is the first columns of k.
        one_factor: k and v have the same factors, or none.
    """

    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int]
    strides: tuple[_Shape, ...]
    misalignment: int
    capacity: int
    scale: float
    allow_tf32: bool
    index_dtypes: tuple[torch.dtype | None, ...] = (None,) * 7
    page_size: int = 0
    stride_table: int = 0
    total_q: int | None = None
    seq_new: int = 0
    window_left: int | None = None
    window_right: int | None = None
    diagonal: int | None = None
    slope_diagonal: int | None = None
    visible: int = 0
    softcap: float = 0.0
    slope_dims: int = 0
    row_logits: bool = False
    num_splits: int = 0
    cache_dtype: torch.dtype | None = None
    descale_strides: tuple[_Shape | None, ...] = (None, None)
    tree: tuple[int, int, int] | None = None
    values_in_keys: bool = False
    one_factor: bool = True
    cut: Cut | None = None
    most: int | None = None
    pages: int = 0

    @property
    def indices(self) -> tuple[str, ...]:
        """Names of those that there are of `rows.Sequences`."""
        return tuple(name for name, dtype in zip(Sequences._fields, self.index_dtypes) if dtype is not None)

    @property
    def is_plain(self) -> bool:
        """Whether nothing depends on the head, or on the place of a key before the diagonal."""
        return self.window_left is None and not self.slope_dims and not self.row_logits

    @property
    def heads_may_be_rows(self) -> bool:
        """Whether the query heads that share keys may be rows of one tile, of a sequence with one query."""
        _, _, heads, heads_kv, *_ = self.shape
        return heads > heads_kv and self.is_plain

    @property
    def few_sequences(self) -> int:
        """Packed sequences that have one query, about, where others have as many as the longest."""
        batch, seq_q, *_ = self.shape
        longest = ((self.total_q or 0) - batch) // max(seq_q - 1, 1)
        return max(1, min(batch, batch - longest))

    @property
    def moves_pages(self) -> bool:
        """Whether pages, if there are any, are boxes that TMA moves, of at least the rows that are swizzled
        together."""
        return box_rows(self.page_size, _MOVED_ROWS) == _MOVED_ROWS

    @property
    def cache_itemsize(self) -> int:
        return (self.cache_dtype or self.dtype).itemsize

    @property
    def cache_strides(self) -> list[tuple[int, int, int]]:
        """Strides of k and v (outer, row, head). Behind a page of one row comes the next page."""
        return [(outer, outer if self.page_size == 1 else row, head) for outer, row, head in self.strides[1:]]


def split_pipeline(call: SplitCall, device: torch.device) -> Pipeline:
    """The pipeline of a call. It is given q, k and v, those that there are of `rows.Sequences`, slopes, sinks, and the
    factors `[outer, rows, heads_kv]` of 8-bit k and v; last the length of all sequences, where no tensor has them.
    First outputs: out `[batch, seq_q, heads_q, head_dim_v]` and lse `[batch, heads_q, seq_q]`; packed `[total_q,
    heads_q, head_dim_v]` and `[heads_q, total_q]`."""
    given, attend, splits = attending(call, device)
    kernels, outputs = with_combining(call, {"attend": attend}, splits, device)
    return Pipeline(device, kernels, given, outputs)


def attending(call: SplitCall, device: torch.device, segments: int = 0) -> tuple[tuple[str, ...], Kernel, int]:
    """Inputs of a call's pipeline, the kernel that attends, and its splits. `segments`: of a prefix, whose results, as
    `attend.Prefix` has them, it adds."""
    facts = device_facts(device)
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    group_rows = heads // heads_kv * (seq_q if call.most is None else 1)
    check_rows("q", seq_q, MAX_POSITIONS)
    check_rows("q with all heads that share keys", max(group_rows, heads // heads_kv * (call.total_q or 0)))
    pointer_multiple, stride_multiple = _multiples(call)
    whole_words = min(pointer_multiple, stride_multiple * call.cache_itemsize) >= _ASYNCHRONOUS
    served = batch if call.most is None else call.few_sequences
    short = call.page_size > 0 or call.visible <= MANY_KEYS or max(head_dim, head_dim_v) <= 64
    eight_bits, many = call.cache_itemsize == 1, short and served * heads_kv >= multiprocessors(device)
    tile_key = TileKey(call.dtype, head_dim, head_dim_v, group_rows, call.page_size, whole_words, eight_bits, many=many)
    tiles = choose_tiles(facts, tile_key) if call.cut is None else fewer_stages(facts, call.cut.tiles, tile_key)
    with_rows, launched = row_tiles(call, tiles.block_m)
    splits = choose_split_count(
        tiles, tile_key, with_rows * heads_kv, call.visible, facts, multiprocessors(device), call.num_splits
    )
    programs = launched * heads_kv * splits
    check_programs("q", programs)
    factors = (name for name, of in zip("kv", call.descale_strides) if of is not None)
    by_head = ["slopes"] * bool(call.slope_dims) + ["sinks"] * call.row_logits
    given = ("q", "k_cache", "v_cache", *call.indices, *by_head, *factors, "length")
    return given, _attend_kernel(call, tiles, splits, programs, facts, segments), splits


class Segments(NamedTuple):
    """The forward of attention over a prefix in segments.

    Attributes:
        kernel: with the buffers "rows", "k_cache", "v_cache", "prefix_lengths", "prefix_out", "prefix_lse", "counter".
        number: how many there are.
        rows: of each; the last may have fewer.
        dynamic: thread blocks take tiles as they come, and the launch needs the counter.
    """

    kernel: Kernel
    number: int
    rows: int
    dynamic: bool


def with_combining(
    call: SplitCall, kernels: dict[str, Kernel], splits: int, device: torch.device
) -> tuple[dict[str, Kernel], dict[str, Layout | None]]:
    """Kernels and outputs of a pipeline whose kernel writes "out" and "lse"; or of several splits "parts" and
    "parts_lse", which another kernel puts together."""
    outputs: dict[str, Layout | None] = dict(zip(("out", "lse"), shaped_results(call)))
    if splits > 1:
        results = Combined(call.dtype, shaped_results(call)[0].shape)
        if call.most is not None:
            results = results._replace(starts=call.index_dtypes[4], batch=call.shape[0], most=call.most)
        kernels = {**kernels, "combine": combining(results, splits, device_facts(device), multiprocessors(device))}
        outputs |= dict(zip(("parts", "parts_lse"), shaped_parts(call, splits)))
    return kernels, outputs


#: The buffers of a kernel that writes the parts of splits.
PARTIAL_RESULTS = {"out_ptr": "parts", "lse_ptr": "parts_lse"}


def row_tiles(call: SplitCall, block_m: int) -> tuple[int, int]:
    """Tiles of queries and heads of a key/value head that can have rows, and those that a grid has: some tiles between
    packed sequences are empty."""
    batch, seq_q, heads, heads_kv, _, _ = call.shape
    group = heads // heads_kv
    if call.total_q is None:
        both = batch * -(-group * seq_q // block_m)
        return both, both
    if not batch:
        return 0, 0
    if call.most is not None:
        return call.few_sequences, batch * -(-call.most * group // block_m)
    whole = call.total_q * group // block_m
    return whole + min(batch, call.total_q), whole + batch + 1


def _attend_kernel(
    call: SplitCall, tiles: AttendTiles, splits: int, programs: int, facts: DeviceFacts, segments: int
) -> Kernel:
    """`segments`: of a prefix, whose results it adds."""
    partial = splits > 1
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    packed = call.total_q is not None
    q_strides, k_strides, v_strides = call.strides
    left, right = call.window_left, call.window_right
    # A single query at the last row, which nothing is right of.
    last = call.diagonal is None and seq_q == 1 and not packed and right is not None and right >= 0
    right = None if last else right
    window = (None if side is None else max(-MAX_POSITIONS, min(side, MAX_POSITIONS)) for side in (left, right))
    pointers, multiple = _multiples(call)
    tree = call.tree or (None, None, None)
    widths, precision = (
        (tile_width(head_dim), tile_width(head_dim_v)),
        _dot_precision(call.dtype, facts, call.allow_tf32),
    )
    if call.cut is not None:
        widths, precision = call.cut.widths, call.cut.precision
    statistic = pointer_to(torch.float32)
    even = head_dim_v % 2 == 0 and min(pointers, multiple) >= 2
    pairs = call.cache_itemsize == 1 and even and widths[1] >= 32
    parameters = {
        "q_ptr": pointer_to(call.dtype, pointers),
        **dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), pointer_to(call.cache_dtype or call.dtype, pointers)),
        "out_ptr": pointer_to(torch.float32 if partial else call.dtype, 16),
        "lse_ptr": statistic,
        "sequences": Sequences(*map(pointer_to, call.index_dtypes)),
        "by_head": ByHead(
            *(pointer_to(torch.float32 if there else None) for there in (call.slope_dims, call.row_logits))
        ),
        "descales": Descales(*(pointer_to(None if of is None else torch.float32) for of in call.descale_strides)),
        "prefix": Prefix(*(pointer_to(of if segments else None, 16) for of in (call.dtype, torch.float32))),
        "length": Parameter("i32", 1, GIVEN),
        "q_strides": RowStrides(*(int64(stride, multiple) for stride in q_strides)),
        "k_strides": _cache_strides(k_strides, multiple, call),
        "v_strides": _cache_strides(v_strides, multiple, call),
        "descale_strides": Descales(*map(factor_strides, call.descale_strides)),
        "table_strides": TableStrides(
            int64(call.stride_table),
            int32(None if not call.slope_dims else heads if call.slope_dims == 2 else 0),
            int64(tree[0]),
            int64(tree[1]),
            int32(tree[2]),
        ),
        "batch": int32(batch),
        "heads_kv": int32(heads_kv),
        "seq_q": int32(None if packed else seq_q),
        "most": int32(call.most),
        "total_q": int32(call.total_q),
        "seq_new": int32(call.seq_new if call.index_dtypes[5] is None else None),
        "capacity": int32(call.capacity),
        "parts": Parts(int32(splits), int32(segments or None)),
        "window": Window(*map(int32, (*window, call.diagonal, call.slope_diagonal))),
        "scale": float32(call.scale),
        "softcap": float32(call.softcap or None),
    }
    constants = {
        "GROUP": heads // heads_kv,
        "PAGE_SIZE": call.page_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": -(-head_dim // tiles.chunk) * tiles.chunk if tiles.chunk else widths[0],
        "BLOCK_E": widths[1],
        **named_constants(tiles),
        "PARTIAL": partial,
        "PRECISION": precision,
        "AS_FORWARD": call.cut is not None,
        "PAIRS": pairs,
        "PTX": facts.is_cuda and not interpreting(),
    }
    buffers = {**(PARTIAL_RESULTS if partial else {}), "out": "prefix_out", "lse": "prefix_lse"}
    return Kernel(attend_kernel, parameters, constants, programs, buffers, tiles.num_warps, tiles.num_stages)


def _cache_strides(strides: _Shape, multiple: int, call: SplitCall) -> CacheStrides:
    """The stride of rows is a constant."""
    outer, row, head = strides
    narrow = 0 < call.pages and call.pages * outer + call.page_size * row < 2**31
    return CacheStrides(int64(outer, multiple), row, int64(head, multiple), narrow or None)


def factor_strides(strides: _Shape | None) -> CacheStrides:
    """Without one of rows where these and their pages share a factor."""
    outer, row, head = strides or (0, 0, 0)
    shared = outer == row == 0
    return CacheStrides(int64(None if shared else outer), None if shared else row, int64(head if strides else None))


#: Rows of a program that puts splits together at most.
_MOST_ROWS = 16


class Combined(NamedTuple):
    """Results that are put together from those of splits.

    Attributes:
        dtype: of out.
        shape: of out: `[batch, seq_q, heads_q, head_dim_v]`, of packed queries `[total_q, heads_q, head_dim_v]`.
        starts: the dtype of the offsets of packed sequences, if these are not all served; else None.
        batch: how many sequences there are then.
        most: of which `SplitCall.most` says which are served.
    """

    dtype: torch.dtype
    shape: _Shape
    starts: torch.dtype | None = None
    batch: int | None = None
    most: int | None = None


def combining(
    results: Combined, splits: int, facts: DeviceFacts, multiprocessors: int, of_forward: bool = False
) -> Kernel:
    """The kernel that puts so many splits together. `of_forward`: parts are results of attention's forward, in the
    dtype of out, and the packed sequences that it served are those with more than `most` queries."""
    *places, heads, head_dim_v = results.shape
    few = results.most is not None and not of_forward
    rows = (results.batch * results.most if few else math.prod(places)) * heads  # type: ignore[operator]
    most_r = _MOST_ROWS if results.most is None else power_of_two_factor(heads)
    cut = combine_cut(splits, rows, most_r, head_dim_v, facts, COMBINING * multiprocessors)
    parameters = {
        **dict.fromkeys(("parts_lse_ptr", "lse_ptr"), pointer_to(torch.float32, 16)),
        "parts_ptr": pointer_to(results.dtype if of_forward else torch.float32, 16),
        "out_ptr": pointer_to(results.dtype, 16),
        "starts_ptr": pointer_to(results.starts),
        "rows": int32(rows),
        "heads": int32(heads),
        "seq_q": int32(places[-1]),
        "batch": int32(results.batch),
        "most": int32(results.most),
        "splits": int32(splits),
    }
    constants = {
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_E": tile_width(head_dim_v),
        **named_constants(cut),
        "OF_FORWARD": of_forward,
    }
    programs = -(-rows // cut.block_r)
    return Kernel(combine_kernel, parameters, constants, programs, num_warps=cut.num_warps, num_stages=2)


def shaped_parts(call: SplitCall, splits: int) -> tuple[Layout, Layout]:
    """out and lse of each split: those of `call.most` queries of each packed sequence, where it has no more."""
    if call.most is not None:
        call = call._replace(total_q=call.shape[0] * call.most)
    return shaped_results(call, (splits,), torch.float32)


def shaped_results(call: SplitCall, parts: _Shape = (), dtype: torch.dtype | None = None) -> tuple[Layout, Layout]:
    """out and lse; `parts` and `dtype` where they are those of each split."""
    batch, seq_q, heads, _, _, head_dim_v = call.shape
    rows: _Shape = (batch, seq_q)
    of_lse: _Shape = (batch, heads, seq_q)
    if call.total_q is not None:
        rows, of_lse = (call.total_q,), (heads, call.total_q)
    out = contiguous((*parts, *rows, heads, head_dim_v), dtype or call.dtype)
    return out, contiguous((*parts, *of_lse), torch.float32)


def _multiples(call: SplitCall) -> tuple[int, int]:
    """Powers of two that divide the addresses, in bytes, and the strides, in elements."""
    strides = (stride for of_tensor in call.strides for stride in of_tensor)
    return power_of_two_factor(call.misalignment), power_of_two_factor(*strides)


def visible_rows(capacity: int, seq_q: int, window_left: int | None, window_right: int | None) -> int:
    """How many rows of a sequence its queries see at most."""
    if window_left is None:
        return capacity
    # There are no rows past the last, so an unlimited right side shows at most as many keys as there are queries.
    right = seq_q if window_right is None else min(window_right, seq_q)
    return min(capacity, max(window_left + seq_q + right, 0))


def _dot_precision(dtype: torch.dtype, facts: DeviceFacts, allow_tf32: bool) -> str:
    """float32 products are IEEE, unless PyTorch's own setting allows TF32 where there is such a thing."""
    if dtype is torch.float32 and allow_tf32 and facts.is_cuda and facts.capability >= 80:
        return "tf32"
    return "ieee"
