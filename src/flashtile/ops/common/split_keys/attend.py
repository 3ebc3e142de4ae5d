"""Attention of some queries to a part of the cache (a split), and the kernel that puts the parts together.

Shapes::

    M  rows of a tile: queries of a sequence times the query heads that share a key/value head, query · GROUP + head
    N  keys of a tile         D  head_dim of q and k         E  head_dim of v and out         S  splits in a tile
    BLOCK_D, BLOCK_E: D and E rounded up to what a tensor core takes; the rest of a tile is zero

A program has a tile of rows of one key/value head of one sequence, and one split of its keys. How long the sequence
is, it reads on the device, and takes its share of the key tiles that its rows see: splits of one sequence differ by one
tile at most, whatever the capacity of the cache. The softmax is that of Dao, "FlashAttention-2" (2023), algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.ops.common.kernels import swizzles_differ, tanh
from flashtile.ops.common.split_keys.eight_bits import powers_of_two, split_pairs, widened
from flashtile.ops.common.split_keys.rows import (
    load_flags,
    packed_rows,
    sequence_lengths,
    tile_factors,
    tile_pages,
    tile_pointers,
    tile_sequence,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class ByHead(NamedTuple):
    """Pointers to the slopes of ALiBi and to the logits of sinks; None for what a call does not have."""

    slopes: Any
    sinks: Any


class Prefix(NamedTuple):
    """Results of segments of a common prefix, which join those of a split; None without. `out`: pointer to `[segments,
    heads_kv, queries · group, head_dim_v]`, the heads of a group one after another. `lse`: the same without head_dim_v,
    natural logarithm."""

    out: Any
    lse: Any


class Parts(NamedTuple):
    """Into how many splits the keys of a sequence are divided, and segments of a common prefix, None without."""

    splits: Any
    segments: Any


@triton.jit
def attend_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, lse_ptr,
    sequences, by_head, descales, prefix, length,
    q_strides, k_strides, v_strides, descale_strides, table_strides,
    batch, heads_kv, seq_q, most, total_q, seq_new, capacity, parts, window, scale, softcap,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, AS_FORWARD: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`sequences`: `Sequences`. `descales`: `Descales`. `q_strides`: `RowStrides`, of k and v `CacheStrides`, and of
    their factors `Descales` of these, without `row` where all rows of a head share one. `table_strides`:
    `TableStrides`. `window`: a `Window`. `length`: of all sequences, where no tensor has them. `most`: queries of a
    packed sequence that is served, of which parts have that many; None: any number. `PAGE_SIZE`: 0 without pages.
    `CHUNK`: columns of the head in one product, 0 for all of them. `PARTIAL`: out and lse are those of a split, float32
    `[splits, batch, seq_q, heads_q, head_dim_v]` and `[splits, batch, heads_q, seq_q]` in units of log2; else the
    results themselves. Of packed queries out is `[total_q, heads_q, head_dim_v]` and lse `[heads_q, total_q]`, of a
    split behind `splits`. `AS_FORWARD`: in the operations of attention's forward kernel, for the same bits; the scale
    is positive then. `PAIRS`: values of 8 bits are loaded two columns at a time, as numbers of 16 bits. `PTX`: NVIDIA's
    instructions may be used by name."""
    program = tl.program_id(0)
    splits = parts.splits
    if sequences.starts is None:
        first_token = 0
        tiles_of_rows = tl.cdiv(seq_q * GROUP, BLOCK_M)
        row_tile = program % tiles_of_rows
        if window.right is not None:
            row_tile = tiles_of_rows - 1 - row_tile  # the later rows see more, and start first
        sequence = program // tiles_of_rows // heads_kv // splits
    elif most is not None:
        # Most sequences have rows in their first tile alone, so those come first, evenly over the multiprocessors.
        tiles_of_rows = batch
        sequence = program % batch
        if window.right is not None:
            sequence = batch - 1 - sequence
        row_tile = program // batch // heads_kv // splits
        first_token, seq_q = packed_rows(sequences.starts, sequence, batch, total_q)
    else:
        tiles_of_rows = total_q * GROUP // BLOCK_M + batch + 1
        row_tile = program % tiles_of_rows
        if window.right is not None:
            row_tile = tiles_of_rows - 1 - row_tile
        sequence = tile_sequence(sequences.starts, row_tile, batch, GROUP, BLOCK_M)
        first_token, seq_q = packed_rows(sequences.starts, sequence, batch, total_q)
        row_tile -= first_token * GROUP // BLOCK_M + sequence
    rows = seq_q * GROUP
    first_row = row_tile * BLOCK_M
    if (sequences.starts is not None) and (first_row >= rows):
        return
    if (most is not None) and (seq_q > most):
        return
    head_kv = program // tiles_of_rows % heads_kv
    split = program // tiles_of_rows // heads_kv % splits
    # Rows behind the last packed sequence see nothing, and read what the last sequence has.
    nobody = False
    if sequences.starts is not None:
        nobody = sequence == batch
        sequence = tl.minimum(sequence, batch - 1)
    if sequences.new_starts is not None:
        _, seq_new = packed_rows(sequences.new_starts, sequence, batch, 0)

    _, total = sequence_lengths(sequences.lengths, sequence, length, seq_new, capacity)
    if sequences.starts is not None:
        total = tl.where(nobody, 0, total)
    left = 0
    if sequences.left is not None:
        # 32 bits wide only after that, like a length.
        left = tl.minimum(tl.maximum(tl.load(sequences.left + sequence), 0), total).to(tl.int32)
    shift = total - seq_q
    if window.diagonal is not None:
        shift = window.diagonal
    first_query = first_row // GROUP
    last_query = (tl.minimum(first_row + BLOCK_M, rows) - 1) // GROUP
    begin, full_begin, full_end, end = visible_ranges(first_query, last_query, shift, left, total, window)
    # This split's share of the tiles that the rows see: the first splits take one more where they do not divide.
    skipped = begin // BLOCK_N
    tiles = tl.maximum(tl.cdiv(end, BLOCK_N) - skipped, 0)
    share, rest = tiles // splits, tiles % splits
    first_tile = skipped + split * share + tl.minimum(split, rest)
    last_tile = first_tile + share + tl.where(split < rest, 1, 0)

    row = first_row + tl.arange(0, BLOCK_M)
    there = row < rows
    query = row // GROUP
    head = head_kv * GROUP + row % GROUP
    tree_rows = None
    if sequences.tree is not None:
        full_end = tl.minimum(full_end, shift)
        tree_rows = sequences.tree + (first_token + query).to(tl.int64) * table_strides.tree_query
        if sequences.starts is None:
            tree_rows += sequence.to(tl.int64) * table_strides.tree
    slope = None
    if by_head.slopes is not None:
        slope = tl.load(by_head.slopes + sequence * table_strides.slopes + head, mask=there, other=0.0)
        if not AS_FORWARD:
            slope *= LOG2_E
    sink = None
    if by_head.sinks is not None:
        sink = tl.load(by_head.sinks + head, mask=there & (split == 0), other=float("-inf")) * LOG2_E
        if sequences.starts is not None:
            sink = tl.where(nobody, float("-inf"), sink)
    q_rows = q_ptr + (first_token + query).to(tl.int64) * q_strides.row
    if sequences.starts is None:
        q_rows += sequence.to(tl.int64) * q_strides.batch
    q_rows += head * q_strides.head
    table = None
    outer = sequence
    if sequences.table is not None:
        table = sequences.table + sequence.to(tl.int64) * table_strides.table
        outer = 0
    elif sequences.entries is not None:
        outer = tl.load(sequences.entries + sequence)
    k_base = k_cache_ptr + tl.cast(outer, tl.int64) * k_strides.outer + head_kv.to(tl.int64) * k_strides.head
    v_base = v_cache_ptr + tl.cast(outer, tl.int64) * v_strides.outer + head_kv.to(tl.int64) * v_strides.head

    k_factors = None
    if descales.k is not None:
        k_factors = descales.k + head_kv.to(tl.int64) * descale_strides.k.head
        if descale_strides.k.row is None:
            scale *= tl.load(k_factors)
        else:
            k_factors += tl.cast(outer, tl.int64) * descale_strides.k.outer
    v_factors = None
    if descales.v is not None:
        v_factors = descales.v + head_kv.to(tl.int64) * descale_strides.v.head
        if descale_strides.v.row is not None:
            v_factors += tl.cast(outer, tl.int64) * descale_strides.v.outer

    acc, row_max, row_sum = visit_tiles(
        Queries(rows=q_rows, there=there, number=query),
        CachedHead(base=k_base, factors=k_factors),
        CachedHead(base=v_base, factors=v_factors),
        table,
        Visible(
            first_tile=first_tile, last_tile=last_tile, begin=begin, full_begin=full_begin, full_end=full_end, end=end,
            shift=shift, tree_rows=tree_rows, tree_columns=table_strides.tree_columns,
        ),
        window,
        Scoring(scale=scale, softcap=softcap, slope=slope, sink=sink),
        k_strides=k_strides, v_strides=v_strides, k_factor_strides=descale_strides.k,
        v_factor_strides=descale_strides.v,
        PAGE_SIZE=PAGE_SIZE, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E, CHUNK=CHUNK, PRECISION=PRECISION, AS_FORWARD=AS_FORWARD, PAIRS=PAIRS, PTX=PTX,
    )  # fmt: skip

    # A row that saw no key has row_sum = 0 and acc = 0: its out is 0 and its lse -inf.
    if (descales.v is not None) and (descale_strides.v.row is None):
        acc *= tl.load(v_factors)
    # Results of a packed call are those of one long sequence.
    place = sequence.to(tl.int64)
    places, length_of_lse = batch, seq_q
    if sequences.starts is not None:
        place, places, length_of_lse = place * 0, 1, total_q
    token = first_token + query
    if (most is not None) and PARTIAL:
        token, length_of_lse = sequence * most + query, batch * most
    written = there
    if prefix.out is not None:
        queries = places * length_of_lse
        of_prefix = ((head_kv * queries + place * length_of_lse + token) * GROUP + row % GROUP).to(tl.int64)
        segments = parts.segments
        if sequences.starts is not None:
            segments = tl.where(nobody, 0, segments)
        acc, row_max, row_sum = add_prefix(
            (acc, row_max, row_sum), prefix, of_prefix, there, split, segments, splits,
            size=queries * heads_kv * GROUP, HEAD_DIM_V=HEAD_DIM_V, BLOCK_E=BLOCK_E,
        )  # fmt: skip
    nothing = row_sum == 0.0
    acc *= (1.0 / tl.where(nothing, 1.0, row_sum))[:, None]
    lse = tl.where(nothing, float("-inf"), row_max + tl.log2(tl.where(nothing, 1.0, row_sum)))
    if PARTIAL:
        # Where the lse is -inf, nobody reads the rest of a part.
        if prefix.out is None:
            written = there & ((tiles > 0) | (split == 0))
        place += split.to(tl.int64) * places
    else:
        lse *= LN_2
    heads = heads_kv * GROUP
    tl.store(lse_ptr + (place * heads + head) * length_of_lse + token, lse, mask=there)
    column = tl.arange(0, BLOCK_E)[None, :]
    out_rows = out_ptr + ((place * length_of_lse + token) * heads + head) * HEAD_DIM_V
    tl.store(
        out_rows[:, None] + column, acc.to(out_ptr.dtype.element_ty), mask=written[:, None] & (column < HEAD_DIM_V)
    )


@triton.jit
def visible_ranges(first_query, last_query, shift, left, total, window):
    """Keys that some query of a tile sees, `[begin, end)`, and those that all of them see, `[full_begin, full_end)`."""
    begin = left
    full_begin = left
    end = total
    full_end = total
    if window.left is not None:
        begin = tl.maximum(left, first_query + shift - window.left)
        full_begin = tl.maximum(left, last_query + shift - window.left)
    if window.right is not None:
        end = tl.minimum(total, last_query + shift + window.right + 1)
        full_end = tl.minimum(total, first_query + shift + window.right + 1)
    return begin, full_begin, full_end, tl.maximum(end, 0)


class Queries(NamedTuple):
    """Rows of a tile `[M]`: pointers to their first columns, which of them are there, and their queries' numbers."""

    rows: Any
    there: Any
    number: Any


class CachedHead(NamedTuple):
    """Pointers to a head's keys or values in row 0 of its entry, or of page 0, and to their factors, or None."""

    base: Any
    factors: Any


class Visible(NamedTuple):
    """The keys that a tile of rows sees.

    Attributes:
        first_tile, last_tile: the key tiles of this split.
        begin, full_begin, full_end, end: as `visible_ranges` returns them.
        shift: the key on the diagonal of query 0.
        tree_rows: pointers to the rows of the tree `[M]`, which has `tree_columns`; None without.
    """

    first_tile: Any
    last_tile: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    shift: Any
    tree_rows: Any
    tree_columns: Any


class Scoring(NamedTuple):
    """What makes scores of products: the scale, the soft cap, and for each row `[M]` the slope of ALiBi and the logit
    of the sink; None for what a call does not have."""

    scale: Any
    softcap: Any
    slope: Any
    sink: Any


@triton.jit
def visit_tiles(
    queries, k, v, table, visible, window, scoring, k_strides, v_strides, k_factor_strides, v_factor_strides,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, AS_FORWARD: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The online softmax over some key tiles. Returns acc `[M, E]`, row_max (in units of log2) and row_sum `[M]`.

    Of keys and values only the rows that some query of the tile sees are loaded, from `begin` to `end`. The others may
    hold NaN, which a weight of 0 would not remove. Numbers of 8 bits are widened to float16, which has each and
    takes the fewest instructions; rows of q in bfloat16 are then multiplied by a power of two, so that they fit.
    Factors of rows of k go into the scores, those of v into the weights, as parts of the largest so far: a weight times
    a factor itself may be less than float16 has.

    Columns `2e` and `2e + 1` of values in pairs `[N, E / 2]` have an acc each: a pair moves through shared memory like
    a number of 16 bits, and only these does the hardware transpose on the way to a product.
    """
    EIGHT_BITS: tl.constexpr = k.base.dtype.element_ty.primitive_bitwidth == 8
    PRECISE: tl.constexpr = queries.rows.dtype.element_ty == tl.float32
    DTYPE: tl.constexpr = tl.float16 if EIGHT_BITS and not PRECISE else queries.rows.dtype.element_ty
    COLUMNS: tl.constexpr = BLOCK_E // 2 if PAIRS else BLOCK_E
    WIDTH: tl.constexpr = HEAD_DIM_V // 2 if PAIRS else HEAD_DIM_V
    V_WITH_K: tl.constexpr = swizzles_differ(CHUNK if CHUNK else BLOCK_D, BLOCK_E)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if scoring.sink is not None:
        row_max = scoring.sink
        row_sum = tl.where(scoring.sink == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)  # in units of `largest`, where rows of v have factors
    acc_odd = acc
    largest = 2.0**-126
    # What scores are still to be multiplied by.
    unit = LOG2_E if (scoring.softcap is not None) or (scoring.slope is not None) else scoring.scale * LOG2_E
    column_v = tl.arange(0, COLUMNS)[None, :]
    q_unit, q_factor = None, None
    if EIGHT_BITS and queries.rows.dtype.element_ty == tl.bfloat16:
        q_unit, q_factor = powers_of_two(
            largest_magnitudes(queries.rows, queries.there, HEAD_DIM, BLOCK_M, BLOCK_D, CHUNK)
        )
    if not CHUNK:
        column = tl.arange(0, BLOCK_D)[None, :]
        q_tile = load_queries(queries.rows, queries.there, column, q_factor, HEAD_DIM)  # [M, D]
    pages = tile_pages(table, visible.first_tile, visible.last_tile, visible.begin, visible.end, PAGE_SIZE, BLOCK_N)
    for tile in tl.range(visible.first_tile, visible.last_tile):
        start = tile * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        valid = (key >= visible.begin) & (key < visible.end)
        # The pages of the next tile are looked up while this one is computed: its loads need not wait for them.
        page = pages
        pages = tile_pages(table, tile + 1, visible.last_tile, visible.begin, visible.end, PAGE_SIZE, BLOCK_N)
        k_rows = tile_pointers(k.base, page, start, k_strides, PAGE_SIZE, BLOCK_N)  # [N, 1]
        v_rows = tile_pointers(v.base, page, start, v_strides, PAGE_SIZE, BLOCK_N)
        if not CHUNK:
            k_tile = tl.load(k_rows + column, mask=valid[:, None] & (column < HEAD_DIM), other=0.0)  # [N, D]
        if PAIRS:
            v_rows = v_rows.to(tl.pointer_type(tl.uint16))
        if V_WITH_K:
            v_tile = tl.load(v_rows + column_v, mask=valid[:, None] & (column_v < WIDTH), other=0.0)  # [N, E]
        if CHUNK:
            products = products_by_chunks(
                queries.rows, queries.there, k_rows, valid, q_factor, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, CHUNK=CHUNK,
                PRECISION=PRECISION, PTX=PTX,
            )  # fmt: skip
        else:
            products = tl.dot(q_tile, tl.trans(widened(k_tile, DTYPE, PTX)), input_precision=PRECISION)  # [M, N]
        if q_unit is not None:
            products *= q_unit[:, None]
        if (k.factors is not None) and (k_factor_strides.row is not None):
            products *= tile_factors(k.factors, page, start, k_factor_strides, valid, PAGE_SIZE, BLOCK_N)
        if AS_FORWARD:
            scores = products
            if scoring.softcap is not None:
                scores = tanh(products * (scoring.scale / scoring.softcap), PRECISE) * scoring.softcap
            elif scoring.slope is not None:
                scores = products * scoring.scale
        elif scoring.softcap is not None:
            scores = tanh(products * (scoring.scale / scoring.softcap), PRECISE) * (scoring.softcap * LOG2_E)
        else:
            scores = products * (scoring.scale * LOG2_E)
        if scoring.slope is not None:
            origin = visible.shift
            if window.slope_diagonal is not None:
                origin = window.slope_diagonal
            distance = tl.abs((queries.number + origin)[:, None] - key[None, :])
            scores -= scoring.slope[:, None] * distance.to(tl.float32)
        if (start < visible.full_begin) | (start + BLOCK_N > visible.full_end):
            shown = valid[None, :] & (queries.number == queries.number)[:, None]
            diagonal = (queries.number + visible.shift)[:, None]
            if window.left is not None:
                shown &= key[None, :] >= diagonal - window.left
            if window.right is not None:
                shown &= key[None, :] <= diagonal + window.right
            if visible.tree_rows is not None:
                last = (key - visible.shift)[None, :]
                in_tree = valid[None, :] & (last >= 0) & (last < visible.tree_columns)
                in_branch = load_flags(visible.tree_rows[:, None] + last, queries.there[:, None] & in_tree, PTX)
                shown &= (in_branch != 0) & (last < visible.tree_columns)
            scores = tl.where(shown, scores, float("-inf"))
        tile_max = tl.max(scores, 1)
        if AS_FORWARD:
            tile_max *= unit
        new_max = tl.maximum(row_max, tile_max)
        # While a row has seen nothing its maximum is -inf, and -inf - -inf would be NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        if AS_FORWARD:
            probs = tl.exp2(scores * unit - finite_max[:, None])
        else:
            probs = tl.exp2(scores - finite_max[:, None])
        alpha = tl.exp2(row_max - finite_max)
        row_sum = row_sum * alpha + tl.sum(probs, 1)
        row_max = new_max
        if (v.factors is not None) and (v_factor_strides.row is not None):
            factors = tile_factors(v.factors, page, start, v_factor_strides, valid, PAGE_SIZE, BLOCK_N)  # [1, N]
            larger = tl.maximum(largest, tl.max(factors))
            part = 1.0 / larger
            probs *= factors * part
            alpha *= largest * part
            largest = larger
        if not V_WITH_K:
            v_tile = tl.load(v_rows + column_v, mask=valid[:, None] & (column_v < WIDTH), other=0.0)
        weights = probs.to(DTYPE)
        if PAIRS:
            v_tile, odd = split_pairs(v_tile, v.base.dtype.element_ty, PTX)
            acc_odd = tl.dot(weights, widened(odd, DTYPE, PTX), acc_odd * alpha[:, None], input_precision=PRECISION)
        acc = tl.dot(weights, widened(v_tile, DTYPE, PTX), acc * alpha[:, None], input_precision=PRECISION)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), (BLOCK_M, BLOCK_E))
    if (v.factors is not None) and (v_factor_strides.row is not None):
        acc *= largest
    return acc, row_max, row_sum


@triton.jit
def load_queries(q_rows, there, column, factor, HEAD_DIM: tl.constexpr):
    """Some columns of the rows of q `[M, columns]`; with a factor for each row in float16."""
    tile = tl.load(q_rows[:, None] + column, mask=there[:, None] & (column < HEAD_DIM), other=0.0)
    if factor is not None:
        tile = (tile.to(tl.float32) * factor[:, None]).to(tl.float16)
    return tile


@triton.jit
def largest_magnitudes(
    q_rows, there, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr
):
    """The largest magnitude of each row of q `[M]`, in float32."""
    COLUMNS: tl.constexpr = CHUNK if CHUNK else BLOCK_D
    largest = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, BLOCK_D, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        tile = load_queries(q_rows, there, column, None, HEAD_DIM)
        largest = tl.maximum(largest, tl.max(tl.abs(tile.to(tl.float32)), 1))
    return largest


@triton.jit
def products_by_chunks(
    q_rows, there, k_rows, valid, q_factor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`q kᵀ` `[M, N]` with only CHUNK columns of the head on chip at a time, for heads too wide for shared memory.
    `q_factor`: what each row of q is multiplied by; None for 1."""
    products = tl.zeros((there.shape[0], valid.shape[0]), tl.float32)
    for first in range(0, BLOCK_D, CHUNK):
        column = (first + tl.arange(0, CHUNK))[None, :]
        q_chunk = load_queries(q_rows, there, column, q_factor, HEAD_DIM)
        k_chunk = tl.load(k_rows + column, mask=valid[:, None] & (column < HEAD_DIM), other=0.0)
        products = tl.dot(q_chunk, tl.trans(widened(k_chunk, q_chunk.dtype, PTX)), products, input_precision=PRECISION)
    return products


@triton.jit
def add_prefix(
    merged, prefix, place, there, first, segments, step, size, HEAD_DIM_V: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Adds every `step`-th segment from `first` on to acc `[M, E]`, row_max and row_sum `[M]`. `place`: that of each
    row `[M]` in a segment, which has `size` rows."""
    acc, row_max, row_sum = merged
    column = tl.arange(0, BLOCK_E)[None, :]
    shown = there[:, None] & (column < HEAD_DIM_V)
    prefix_acc = tl.zeros((there.shape[0], BLOCK_E), tl.float32)
    prefix_max = tl.full((there.shape[0],), float("-inf"), tl.float32)
    prefix_sum = tl.zeros((there.shape[0],), tl.float32)
    for segment in tl.range(first, segments, step, loop_unroll_factor=4):
        at = tl.cast(segment, tl.int64) * size + place
        lse = tl.load(prefix.lse + at, mask=there, other=0.0) * LOG2_E
        part = tl.load(prefix.out + at[:, None] * HEAD_DIM_V + column, mask=shown, other=0.0)
        new_max = tl.maximum(prefix_max, lse)
        alpha, weight = tl.exp2(prefix_max - new_max), tl.exp2(lse - new_max)
        prefix_acc = prefix_acc * alpha[:, None] + part * weight[:, None]
        prefix_sum = prefix_sum * alpha + weight
        prefix_max = new_max
    new_max = tl.maximum(row_max, prefix_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha, weight = tl.exp2(row_max - finite_max), tl.exp2(prefix_max - finite_max)
    return acc * alpha[:, None] + prefix_acc * weight[:, None], new_max, row_sum * alpha + prefix_sum * weight


@triton.jit
def combine_kernel(
    parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, starts_ptr, rows, heads, seq_q, batch, most, splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    OF_FORWARD: tl.constexpr,
):  # fmt: skip
    """Some rows of out (one head of one query of one sequence) from their parts, in the order of the splits. `rows`:
    of a part, batch · seq_q · heads_q, in this order as for out; lse is `[batch, heads_q, seq_q]`. `BLOCK_R`: rows of
    a program, which belong to one query where some are not served. `OF_FORWARD`: parts are results of attention's
    forward, whose lse is a natural logarithm, not one of base 2. `most`: it served packed sequences of more queries,
    whose `starts` are given; or others, of which a part has `most` queries each. None: all are served."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    query, head = row // heads, row % heads
    there_r = row < rows
    token, part_q = query, seq_q
    if most is not None:
        first_query = tl.program_id(0) * BLOCK_R // heads
        if OF_FORWARD:
            sequence = tile_sequence(starts_ptr, first_query, batch, SCALE=1, TILE=1)
            _, queries = packed_rows(starts_ptr, sequence, batch, seq_q)
            unserved = (sequence < batch) & (queries <= most)
        else:
            first_token, queries = packed_rows(starts_ptr, first_query // most, batch, seq_q)
            token, part_q = first_token + query % most, batch * most
            unserved = (queries > most) | (first_query % most >= queries)
        if unserved:
            return
    statistic = (query // part_q * heads + head) * part_q + query % part_q  # [R]
    column = tl.arange(0, BLOCK_E)
    there_v = column < HEAD_DIM_V
    acc = tl.zeros((BLOCK_R, BLOCK_E), tl.float32)
    row_max = tl.full((BLOCK_R,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        there = split < splits
        place = split.to(tl.int64) * rows
        lse = tl.load(
            parts_lse_ptr + place[None, :] + statistic[:, None],
            mask=there_r[:, None] & there[None, :],
            other=-float("inf"),
        )  # [R, S]
        if OF_FORWARD:
            lse *= LOG2_E
        new_max = tl.maximum(row_max, tl.max(lse, 1))
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse - finite_max[:, None])  # [R, S]
        alpha = tl.exp2(row_max - finite_max)
        places = (place[None, :] + row[:, None])[:, :, None] * HEAD_DIM_V + column
        shown = (there_r[:, None] & there[None, :])[:, :, None] & there_v[None, None, :]
        part = tl.load(parts_ptr + places, mask=shown, other=0.0)  # [R, S, E]
        # A part without a key was never written. It is read all the same, so that parts need not wait for their lse.
        part = tl.where((lse == -float("inf"))[:, :, None], 0.0, part)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max
    nothing = row_sum == 0.0
    divisor = tl.where(nothing, 1.0, row_sum)
    lse = tl.where(nothing, -float("inf"), (row_max + tl.log2(divisor)) * LN_2)
    tl.store(lse_ptr + (token // seq_q * heads + head) * seq_q + token % seq_q, lse, mask=there_r)
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = (token * heads + head).to(tl.int64) * HEAD_DIM_V
    tl.store(out_ptr + out_rows[:, None] + column, out, mask=there_r[:, None] & there_v[None, :])
