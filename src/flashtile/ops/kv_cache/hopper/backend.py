"""Which calls over a cache the Hopper kernels serve: those of latent attention, and chunks of queries by the forward of
attention. Nothing here needs Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.devices import DeviceFacts, interpreting
from flashtile.ops.common.split_keys.configs import half_tiles_lose

if TYPE_CHECKING:
    from flashtile.ops.common.split_keys.plan import SplitCall

#: Whether something holds, and the reason for which a call is not served where it does not.
_Condition = tuple[bool, str]

#: Query rows of a tile, and columns of a head at most, of the forward of attention.
_QUERY_ROWS, _WIDEST = 64, 512
#: Multiprocessors with a tile of the forward at least, as a share of all, where rows are gathered for it.
_LEAST_SHARE = 0.5
#: Where rows are gathered first: the queries of a sequence from which on that is faster than the portable kernel; those
#: of the longest from which on, in 16 bits, it is faster than copies by the forward; and bytes of the gathered rows at
#: most. µs on an H200, pages of 1, 32 / 8 heads of 128, 4 sequences of 16,384 rows, gathered and copied by the forward:
#: 64 queries 248 and 151 (dense 112), 256 505 and 462 (354).
_GATHERED_LEAST, _GATHERED_LONGEST, _WORKSPACE = 64, 512, 2**30
#: Elements of a cache with pages that TMA does not move, at most: 32 bits number what a thread copies at a time.
_COPIED_ELEMENTS = 2**34
#: Where rows of a latent cache are gathered first: rows of a tile of the portable kernel, which would read a cached row
#: for each, and of the latent kernel; and how many gathered bytes take as long as one that the portable kernel reads.
#: H200, a token for each of 32 sequences of 8,192 rows, 16 heads: 242 µs, portable 269, with 1.6 times the bytes (pages
#: of 1); 205 and 187 with 2.6 (8 bits).
_PORTABLE_ROWS, _LATENT_ROWS, _GATHERED_BYTES = 16, 64, 2.0
#: The latent kernel widens rows of 8 bits itself for up to so many tiles of a sequence, each of which does it again. µs
#: on an H200 of such calls with 16 and 128 heads, 1 and 2 tiles: 91 and 179; gathered 207 and 250. Of 4 sequences, 8
#: queries, 128 heads, 16 tiles: 180; gathered 134.
_WIDENED_TILES = 4
#: Bytes of which TMA takes addresses and strides to be multiples.
_ALIGNED = 16
#: Steps that thread blocks share: pairs of a query and a key/value head at most, as a share of the multiprocessors,
#: rows of a tile, and columns of a head.
_FEW_PAIRS, _STEP_ROWS, _STEP_WIDEST = 0.5, 16, 256
#: Elements of which strides are multiples: those that TMA moves.
_TOGETHER = 8
#: Columns of rows that the latent kernel widens.
_WIDENED_COLUMNS = 576


def latent_unsupported_reason(call: SplitCall, device: DeviceFacts) -> str | None:
    """Why this kernel does not serve a call; None where it does."""
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    _, k_strides, _ = call.strides
    outer, row, _ = k_strides
    queries = (batch, seq_q) if call.total_q is None else (1, call.total_q)
    right = call.window_right
    aligned = call.misalignment % _ALIGNED == 0
    if _gathers_or_widens(call):
        of_rows = [
            (call.dtype in (torch.float16, torch.bfloat16), "it takes q in a 16-bit dtype"),
            (aligned, f"it takes addresses at multiples of {_ALIGNED} bytes"),
            (
                call.one_factor or not _has_own_factors(call),
                "rows are widened once, so factors of rows are those of keys and values",
            ),
            _has_range(call),
        ]
        if gathers_latent(call):
            of_rows += [
                *_gathering(call, gathered_sequences(call, 1), head_dim),
                (_is_gathering_cheaper(call), "for so few queries and heads the portable kernel reads fewer bytes"),
            ]
    else:
        of_rows = [
            _has_16_bits(call),
            (
                aligned and row % 8 == 0 and row > 0 and outer % row == 0,
                "TMA reads rows at multiples of 16 bytes, and entries or pages at multiples of a row",
            ),
            (call.moves_pages, f"8 divides the pages that it takes, not {call.page_size}"),
        ]
    return _first_reason(
        [
            _runs_on(device),
            (call.values_in_keys and heads_kv == 1, "it takes one key head whose first columns are the values"),
            (
                512 < head_dim <= 576 and head_dim % 8 == 0 and head_dim_v == 512,
                f"it takes heads of 520 to 576 columns with 512 of values, not {head_dim} with {head_dim_v}",
            ),
            (call.window_left is None and right in (None, 0), "it has no window"),
            (not call.softcap and not call.slope_dims and not call.row_logits, "it has no soft cap, ALiBi or sinks"),
            (call.scale > 0 and call.capacity > 0, "it takes a positive scale, and a cache that has rows"),
            (_consecutive((*queries, heads, head_dim), call.strides[0]), "TMA reads q as it is where it is contiguous"),
            *of_rows,
        ]
    )


def _gathers_or_widens(call: SplitCall) -> bool:
    """Whether TMA does not move the rows of a latent cache as they are, outside of the batch-invariant mode."""
    return is_gathered(call) or (call.cut is None and not call.moves_pages)


def gathers_latent(call: SplitCall) -> bool:
    """Whether rows of a latent cache are gathered first. The kernel widens those of 8 bits itself if it can, unless
    many tiles of rows would do that again."""
    if not _gathers_or_widens(call):
        return False
    *_, head_dim, _ = call.shape
    outer, row, _ = call.cache_strides[0]
    widens = call.cache_itemsize == 1 and head_dim == _WIDENED_COLUMNS and outer % _ALIGNED == row % _ALIGNED == 0
    many = _sequence_tiles(call, _LATENT_ROWS) > _WIDENED_TILES
    return not widens or (many and not _first_reason(_gathering(call, gathered_sequences(call, 1), head_dim)))


def _sequence_tiles(call: SplitCall, rows: int) -> int:
    """Tiles of so many queries times heads that a sequence has, on average."""
    batch, seq_q, heads, *_ = call.shape
    queries = seq_q if call.total_q is None else -(-call.total_q // max(batch, 1))
    return -(-queries * heads // rows)


def _is_gathering_cheaper(call: SplitCall) -> bool:
    """Whether it takes less time to gather the rows of a latent cache and read these than to let the portable kernel
    read the cache, by the bytes of a cached row: that kernel reads keys and values for each tile of queries and heads,
    gathering reads a row and writes it, and the latent kernel reads that for each of its larger tiles."""
    *_, head_dim, head_dim_v = call.shape
    portable, latent = (_sequence_tiles(call, rows) for rows in (_PORTABLE_ROWS, _LATENT_ROWS))
    read = portable * (head_dim + head_dim_v) * call.cache_itemsize
    gathered = head_dim * (call.cache_itemsize + (1 + latent) * call.dtype.itemsize)
    return gathered <= _GATHERED_BYTES * read


def _consecutive(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether rows follow one another; `strides` without that of columns."""
    return all(size == 1 or is_ == of for size, is_, of in zip(shape, strides, contiguous_strides(shape)))


def most_left(call: SplitCall) -> int:
    """Queries of a sequence up to which the portable kernel serves it: those that fill one of its tiles, or too few to
    gather rows for them."""
    _, _, heads, heads_kv, *_ = call.shape
    least = _GATHERED_LEAST - 1 if is_gathered(call) else 1
    return max(_QUERY_ROWS * heads_kv // heads, least)


def chunks_unsupported_reason(call: SplitCall, device: DeviceFacts, multiprocessors: int) -> str | None:
    """Why the forward of attention does not serve a call; None where it does. Packed sequences of few queries
    (`most_left`) stay with the portable kernel, which runs first. In the batch-invariant mode it is a matter of the
    call's features alone."""
    reason = _lacked_by_forward(call, device)
    if reason or call.cut is not None:
        return reason or (_has_16_bits(call)[1] if call.cache_itemsize == 1 else None)
    batch, seq_q, heads, *_ = call.shape
    tiles = heads * -(-(call.total_q or batch * seq_q) // _QUERY_ROWS)
    if seq_q <= most_left(call):
        return "so few queries fill one tile of the portable kernel"
    if call.num_splits:
        return "it chooses the splits of keys"
    if tiles < _LEAST_SHARE * multiprocessors:
        if call.cache_itemsize == 1:
            return "for so few tiles rows are not widened"
        if half_tiles_lose(seq_q, *call.shape[-2:]):
            return "a tile of queries of each head would be half empty"
    return unreadable_by_forward(call, is_gathered(call))


def segment_call(call: SplitCall, shared: int) -> SplitCall:
    """The call in which all queries of a call attend to the first `shared` rows of sequence 0, as rows of one sequence:
    those of a query are the heads of a group."""
    batch, seq_q, heads, heads_kv, head_dim, head_dim_v = call.shape
    rows = (call.total_q or batch * seq_q) * (heads // heads_kv)
    return call._replace(
        shape=(1, rows, heads_kv, heads_kv, head_dim, head_dim_v),
        strides=((heads_kv * rows * head_dim, head_dim, rows * head_dim), *call.strides[1:]),
        index_dtypes=(torch.int32, None, None, call.index_dtypes[3], None, None, None),
        capacity=shared, visible=shared, total_q=None, seq_new=0, window_left=None, window_right=None, tree=None,
        row_logits=False,
    )  # fmt: skip


def segments_unsupported_reason(call: SplitCall, of_prefix: SplitCall, device: DeviceFacts) -> str | None:
    """Why the forward of attention does not serve the prefix that the sequences of a call have in common; None where it
    does. `of_prefix`: of `segment_call`."""
    return (
        _lacked_by_forward(of_prefix, device)
        or _first_reason(
            [
                _has_16_bits(call),
                (not call.num_splits, "it chooses the splits of keys"),
                (call.index_dtypes[1] is None, "the entry of sequence 0 is not known"),
            ]
        )
        or unreadable_by_forward(of_prefix, gathered=False)
    )


def _lacked_by_forward(call: SplitCall, device: DeviceFacts) -> str | None:
    *_, head_dim, head_dim_v = call.shape
    return _first_reason(
        [
            _runs_on(device),
            (call.dtype in (torch.float16, torch.bfloat16), "it takes q in a 16-bit dtype"),
            (call.capacity > 0 and all(call.shape), "it takes calls that are not empty"),
            (max(head_dim, head_dim_v) <= _WIDEST, f"its heads have up to {_WIDEST} columns"),
            (call.index_dtypes[2] is None, "it has no left padding"),
            (call.scale > 0, "it takes a positive scale"),
            (call.tree is None or call.cut is None, "it has no tree in the batch-invariant mode"),
        ]
    )


def shares_steps(call: SplitCall, multiprocessors: int) -> bool:
    """Whether thread blocks share the keys of a sequence (`steps`), which the forward serves in the batch-invariant
    mode: each has one query at most, there are few, TMA moves the pages, and nothing depends on the head or the place
    of a key."""
    batch, seq_q, heads, heads_kv, *head_dims = call.shape
    few = (call.total_q or batch) * heads_kv <= _FEW_PAIRS * multiprocessors
    alike = call.is_plain and call.moves_pages
    return seq_q == 1 and alike and few and heads // heads_kv <= _STEP_ROWS and max(head_dims) <= _STEP_WIDEST


def mixes_tokens(call: SplitCall) -> bool:
    """Whether packed sequences may have one query or several, and those of one have a kernel of their own in the
    batch-invariant mode."""
    batch, seq_q, *_ = call.shape
    may = call.total_q is not None and seq_q > 1 and call.total_q <= (batch - 1) * seq_q + 1
    return may and call.heads_may_be_rows


def is_gathered(call: SplitCall) -> bool:
    """Whether rows are gathered for the forward (`gather`): those of 8 bits, which are widened, and for long chunks
    those in pages that TMA does not move. Not in the batch-invariant mode."""
    _, seq_q, *_ = call.shape
    if call.cut is not None:
        return False
    if call.cache_itemsize == 1:
        return True
    return not call.moves_pages and seq_q >= _GATHERED_LONGEST and not _first_reason(_gathering_chunks(call))


def gathered_sequences(call: SplitCall, least: int) -> int:
    """How many sequences have their rows gathered: of packed ones as many as can have `least` queries."""
    batch, *_ = call.shape
    return batch if call.total_q is None else min(batch, call.total_q // least)


def _has_own_factors(call: SplitCall) -> bool:
    """Whether rows or pages have factors of their own."""
    return any(strides is not None and any(strides[:2]) for strides in call.descale_strides)


def _has_range(call: SplitCall) -> _Condition:
    has = not _has_own_factors(call) or call.dtype is torch.bfloat16
    return has, "rows times their factors may leave the range of float16"


def _gathering(call: SplitCall, sequences: int, columns: int) -> list[_Condition]:
    """What must hold where rows of so many sequences are gathered."""
    size = sequences * call.capacity * columns * call.dtype.itemsize
    return [
        (sequences > 0, "no sequence can have enough queries to gather rows for them"),
        (size <= _WORKSPACE, f"gathered rows take up to {_WORKSPACE >> 20} MiB"),
    ]


def _gathering_chunks(call: SplitCall) -> list[_Condition]:
    """What must hold where rows are gathered for the forward."""
    heads_kv, *head_dims = call.shape[3:]
    sequences = gathered_sequences(call, _GATHERED_LEAST)
    return [
        (all(columns % _TOGETHER == 0 for columns in head_dims), "TMA moves multiples of 16 bytes"),
        *_gathering(call, sequences, heads_kv * sum(head_dims)),
    ]


def unreadable_by_forward(call: SplitCall, gathered: bool) -> str | None:
    """Why it cannot read the caches, q or out as they lie, or have rows gathered first; None where it can."""
    read = call.strides
    if gathered:
        read = call.strides[:1]
        conditions = [_has_range(call), *_gathering_chunks(call)]
    else:
        (outer_k, row_k, _), (outer_v, row_v, _) = call.cache_strides
        conditions = [
            (
                call.moves_pages or call.pages * max(outer_k, outer_v) <= _COPIED_ELEMENTS,
                f"8 divides the pages of caches with more than {_COPIED_ELEMENTS} elements, not {call.page_size}",
            ),
            (
                row_k > 0 and row_v > 0 and outer_k % row_k == 0 and outer_v % row_v == 0,
                "entries or pages lie whole rows apart",
            ),
        ]
    used = [stride for strides in read for stride in strides]
    return _first_reason(
        [
            *conditions,
            (
                math.gcd(*used) % _TOGETHER == 0 and call.misalignment % _ALIGNED == 0,
                f"it takes addresses at multiples of {_ALIGNED} bytes and strides of multiples of {_TOGETHER} elements",
            ),
        ]
    )


def _runs_on(device: DeviceFacts) -> _Condition:
    return device.arch == "sm_90" and not interpreting(), f"it runs on sm_90, not on {device.arch}"


def _has_16_bits(call: SplitCall) -> _Condition:
    one_dtype = call.dtype in (torch.float16, torch.bfloat16) and call.cache_dtype in (None, call.dtype)
    return one_dtype, "it takes q and the cache in one 16-bit dtype"


def _first_reason(conditions: Sequence[_Condition]) -> str | None:
    """The reason of the first condition that does not hold; None where all hold."""
    return next((reason for holds, reason in conditions if not holds), None)
