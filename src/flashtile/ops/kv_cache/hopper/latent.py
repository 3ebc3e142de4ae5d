"""Attention over a latent cache on Hopper: one key head of up to 576 columns, whose first 512 columns are the values.

Shapes::

    M  rows of a tile: 64 queries times heads, query · heads + head
    N  keys of a tile, 64
    D  columns of q and of the cache, in chunks of 64; 512 of them are values

A thread block has a tile of rows, and one split of the keys that they see (`split_keys`). Its roles:

- `load`, one warp: loads q once, and the cache by tiles of keys, each in nine chunks of 64 columns with a place and
  barriers of their own. A place is filled again as soon as its chunk has been multiplied. If the cache has 8 bits,
  `score` copies its chunks instead, some ahead, and a warpgroup, `widen`, stores them in 16 bits; pages have any size
  then.
- `score`, a warpgroup: scores and weights of a tile, which it hands over through one place on chip (`Exchange`).
- `sum_values`, two warpgroups: each the sums of half of the value columns, which take 128 registers of a thread.

Per key tile, with `c = scale · log2(e)`::

    s = q kᵀ               [M, N]
    p = exp2(c·s - r)      [M, N]
    l = l + rowsum(p)      [M], kept as [M, 8]: each thread's own part
    o = o + p k[:, :512]   [M, 512]

The scores of a tile are computed while the values of the one before are summed. The reference `r` rises only where a
score passes it by more than `LARGEST_EXPONENT`, so sums are seldom rescaled. By how much it rises is handed over
beside the weights; behind the last tile, so is `1 / l`.

References: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1; Shah et al., "FlashAttention-3" (2024), algorithm 2.
"""

import math
from typing import Any, NamedTuple

import torch

from flashtile._backends.devices import multiprocessors
from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile._backends.launch import GIVEN, Parameter, float32, int32, int64, pointer_to
from flashtile._backends.pipeline import Kernel, Pipeline
from flashtile._backends.tma import TmaTensor, packed_layout, strided_layout
from flashtile.ops.attention.hopper.primitives import (
    LN_2,
    WARPGROUP,
    M,
    any_above,
    barriers,
    declare_flag,
    hidden_zero,
    matrix_layout,
    pack,
    packed_sequence,
    product_layout,
    release,
    row_maximum,
    row_sums,
    rows_in_cache,
    wait_products,
)
from flashtile.ops.common.checks import MAX_POSITIONS, check_programs, check_rows
from flashtile.ops.common.split_keys.configs import choose_splits
from flashtile.ops.common.split_keys.plan import (
    PARTIAL_RESULTS,
    SplitCall,
    factor_strides,
    row_tiles,
    with_combining,
)
from flashtile.ops.common.split_keys.rows import CacheStrides, Descales, Sequences
from flashtile.ops.common.tiles import box_rows
from flashtile.ops.kv_cache.hopper.latent_producers import (
    CHUNK,
    CHUNKS,
    COPIED,
    GROUP,
    SUM_CHUNKS,
    VALUE_CHUNKS,
    CachedRows,
    Copied,
    N,
    chunk_column,
    chunk_slot,
    copy_group,
    finish_copies,
    key_groups,
    make_factors,
    make_words,
    produce,
    row_pages,
    tile_rows,
)

#: Columns of values.
COLUMNS = gl.constexpr(512)

#: The largest weight, in log2: of float16, whose weights have all their bits from 2⁻¹⁴ on.
LARGEST_EXPONENT = gl.constexpr(15.0)
#: The reference of a row that has seen nothing.
NOTHING_SEEN = gl.constexpr(-(2.0**100))


@aggregate
class KernelConfig:
    """What the kernel is specialised for.

    PACKED: sequences have queries of their own. KIND: format of a cache of 8 bits, or None. CAUSAL: a query sees the
    keys up to its diagonal. PAGE_SIZE: 0 without pages. BOX: rows of the cache that a copy moves, which lie in one
    page. CUTS_BOX: the first visible row may lie within a box (`load`). PARTIAL: out and lse are those of a split.
    DEFERRED: chunks of values whose products wait for the scores of the next tile (`add_values`).
    """

    PACKED: gl.constexpr
    KIND: gl.constexpr
    CAUSAL: gl.constexpr
    PAGE_SIZE: gl.constexpr
    BOX: gl.constexpr
    CUTS_BOX: gl.constexpr
    PARTIAL: gl.constexpr
    DEFERRED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


class Problem(NamedTuple):
    """What every role knows of the call.

    Attributes:
        batch, heads, splits, capacity: of the call.
        seq_q: queries of each sequence; None if they are packed. total_q: of all sequences.
        seq_new: rows that a length does not count, without starts of new rows; else None.
        rows_apart: rows of the cache from one entry or page to the next; None if it has 8 bits.
        stride_table: elements from one sequence to the next in the table of pages.
        scale_log2: `scale · log2(e)`.
        tree: a `Tree`.
    """

    batch: Any
    heads: Any
    splits: Any
    capacity: Any
    seq_q: Any
    total_q: Any
    seq_new: Any
    rows_apart: Any
    stride_table: Any
    scale_log2: Any
    tree: Any


class Work(NamedTuple):
    """What a thread block does: `tiles` tiles of keys from tile `first_tile` on.

    Attributes:
        sequence: its number; that of the last one for rows of no sequence.
        split: of the keys.
        first_token: number of its first query among those of all sequences.
        first_row, rows: the first row of the tile in the sequence, and how many rows that has.
        total: rows of the cache that the sequence has.
        base: row of the cache at which tile 0 begins. hidden: rows from there on that are left padding, less than a
            box.
        shift: key on the diagonal of query 0.
        full_end: keys before this one are seen by all rows.
    """

    sequence: Any
    split: Any
    first_token: Any
    first_row: Any
    rows: Any
    total: Any
    base: Any
    hidden: Any
    shift: Any
    full_end: Any
    first_tile: Any
    tiles: Any


class Tree(NamedTuple):
    """Elements from one sequence and one query to the next in the tree, and how many columns it has; None without."""

    sequence: Any
    query: Any
    columns: Any


class View(NamedTuple):
    """What the rows of a tile see: keys up to `last_key` `[M]`, of the last ones those that the tree of the sequence at
    `tree_ptr` shows; None without one."""

    last_key: Any
    tree_ptr: Any


class Output(NamedTuple):
    """Where the first row of out goes, and how many rows there are."""

    pointer: Any
    rows: Any


class Exchange(NamedTuple):
    """What `score` hands to `sum_values`: weights `[M, N]`, and a number of each row `[M]`. `full`, `empty`: barriers.
    `scored`: that of the scores of a tile, for products that are deferred."""

    weights: Any
    numbers: Any
    full: Any
    empty: Any
    scored: Any


class Shared(NamedTuple):
    """What the roles share on chip: chunks of `q` and of `keys`, `full` and `empty` barriers of the latter, and the
    `Exchange`. Chunks of q arrive with those of the first keys, or where keys are `Copied` first, at a barrier
    `q_full`."""

    q: Any
    q_full: Any
    copied: Any
    keys: Any
    full: Any
    empty: Any
    exchange: Any


@gluon.jit
def latent_attention_kernel(
    q_desc, cache_desc, cache_ptr, out_ptr, lse_ptr, sequences, descales, length, cache_strides, factor_strides,
    problem,
    KIND: gl.constexpr, CAUSAL: gl.constexpr, PAGE_SIZE: gl.constexpr, PARTIAL: gl.constexpr, DEFERRED: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`sequences`: `split_keys.rows.Sequences`. `cache_ptr`, `cache_strides` (`CacheStrides`): of a cache of 8 bits, in
    words of 32; else `cache_desc`. `descales`: factors of keys and of values (`Descales`). `factor_strides`:
    `CacheStrides` of those that rows or pages have. `length`: of all sequences, where no tensor has them. out and lse
    are those of `split_keys.attend.attend_kernel`. The others: `KernelConfig`."""
    WIDENS: gl.constexpr = KIND is not None
    config = KernelConfig(
        PACKED=sequences.starts is not None,
        KIND=KIND,
        CAUSAL=CAUSAL,
        PAGE_SIZE=PAGE_SIZE,
        BOX=1 if WIDENS else cache_desc.block_shape[2],
        CUTS_BOX=not WIDENS and PAGE_SIZE > 0 and sequences.left is not None,
        PARTIAL=PARTIAL,
        DEFERRED=DEFERRED,
    )
    dtype: gl.constexpr = q_desc.dtype
    work = tile_work(sequences, length, problem, config)
    rows = CachedRows(cache_ptr, cache_strides, descales.k, factor_strides)
    GROUPS: gl.constexpr = key_groups(WIDENS)
    TOGETHER: gl.constexpr = GROUP if WIDENS else 1
    copied = None
    if WIDENS:
        factors = make_factors() if factor_strides.row is not None else None
        copied = Copied(make_words(), barriers(COPIED, WARPGROUP), factors)
    shared = Shared(
        q=gl.allocate_shared_memory(dtype, [CHUNKS, M, CHUNK], matrix_layout(CHUNK)),
        q_full=barriers(1, 1) if WIDENS else None,
        copied=copied,
        keys=gl.allocate_shared_memory(dtype, [GROUPS * TOGETHER, N, CHUNK], matrix_layout(CHUNK)),
        full=barriers(GROUPS, WARPGROUP if WIDENS else 1),
        empty=barriers(GROUPS, TOGETHER * WARPGROUP),
        exchange=Exchange(
            weights=gl.allocate_shared_memory(dtype, [M, N], matrix_layout(N)),
            numbers=gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0])),
            full=barriers(1, WARPGROUP),
            empty=barriers(1, 2 * WARPGROUP),
            scored=barriers(1, WARPGROUP),
        ),
    )
    out = output_block(out_ptr, work, problem, config)
    fence_async_shared()
    common_factors = Descales(None, None)
    if factor_strides.row is None:
        common_factors = descales
    PRODUCERS: gl.constexpr = 4 if WIDENS else 1
    gl.warp_specialize(
        [
            (score, (shared, lse_ptr, rows, sequences, common_factors, work, problem, config)),
            (sum_values, (0, shared, work.tiles, out, config)),
            (sum_values, (1, shared, work.tiles, out, config)),
            (produce, (q_desc, cache_desc, shared, sequences, work, problem, config)),
        ],
        [4, 4, PRODUCERS],
        [VALUE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS],
    )


# What a thread block does


@gluon.jit
def tile_work(sequences, length, problem, config):
    """The work of this thread block."""
    heads = problem.heads
    program = gl.program_id(0)
    if config.PACKED:
        tiles_of_rows = problem.total_q * heads // M + problem.batch + 1
    else:
        tiles_of_rows = gl.cdiv(problem.seq_q * heads, M)
    row_tile = program % tiles_of_rows
    if config.CAUSAL:
        row_tile = tiles_of_rows - 1 - row_tile  # the later rows see more, and start first
    rest = program // tiles_of_rows
    split = rest % problem.splits
    sequence = rest // problem.splits
    nobody = gl.to_tensor(False)
    if config.PACKED:
        sequence = packed_sequence(sequences.starts, row_tile, problem.batch, heads, M)
        nobody = sequence == problem.batch
        first_token = gl.load(sequences.starts + sequence).to(gl.int32)
        end_token = gl.load(sequences.starts + gl.minimum(sequence + 1, problem.batch)).to(gl.int32)
        tokens = gl.where(nobody, problem.total_q, end_token) - first_token
        row_tile -= first_token * heads // M + sequence
        sequence = gl.minimum(sequence, problem.batch - 1)
    else:
        first_token = sequence * problem.seq_q
        tokens = problem.seq_q
    rows = tokens * heads
    first_row = row_tile * M

    new = problem.seq_new
    if sequences.new_starts is not None:
        first_new = gl.load(sequences.new_starts + sequence)
        new = (gl.load(sequences.new_starts + sequence + 1) - first_new).to(gl.int32)
    total = rows_in_cache(sequences.lengths, sequence, length, new, problem.capacity)
    total = gl.where(nobody, 0, total)
    shift = total - tokens
    end = total
    full_end = total
    if config.CAUSAL:
        last_query = (gl.minimum(first_row + M, rows) - 1) // heads
        end = gl.maximum(gl.minimum(total, last_query + shift + 1), 0)
        full_end = gl.minimum(total, first_row // heads + shift + 1)
    base = gl.to_tensor(0)
    hidden = gl.to_tensor(0)
    if sequences.left is not None:
        # 32 bits wide only after that, like a length.
        base = gl.minimum(gl.maximum(gl.load(sequences.left + sequence), 0), total).to(gl.int32)
        if config.CUTS_BOX:
            hidden = base % config.BOX
            base -= hidden
    if sequences.tree is not None:
        full_end = gl.minimum(full_end, shift)
    # This split's share of the tiles that the rows see: the first splits take one more where they do not divide.
    visible = gl.where(first_row < rows, end - base, 0)
    tiles = gl.where(visible > hidden, gl.cdiv(visible, N), 0)
    share = tiles // problem.splits
    longer = tiles % problem.splits
    return Work(
        sequence=sequence,
        split=split,
        first_token=first_token,
        first_row=first_row,
        rows=rows,
        total=total,
        base=base,
        hidden=hidden,
        shift=shift,
        full_end=full_end,
        first_tile=split * share + gl.minimum(split, longer),
        tiles=share + gl.where(split < longer, 1, 0),
    )


@gluon.jit
def output_block(out_ptr, work, problem, config):
    """Where the results of a thread block go."""
    place = (work.first_token * problem.heads + work.first_row).to(gl.int64)
    rows = work.rows - work.first_row
    if config.PARTIAL:
        place += work.split.to(gl.int64) * problem.total_q * problem.heads
        rows = gl.where(work.tiles > 0, rows, 0)  # where the lse is -inf, nobody reads the rest of a part
    return Output(out_ptr + place * COLUMNS, rows)


@gluon.jit
def release_chunk(shared, index, chunk: gl.constexpr, config):
    """A chunk of tile `index` is no longer read."""
    _, slot, _ = chunk_slot(index, chunk, config)
    release(shared.empty.index(slot))


@gluon.constexpr_function
def value_chunk(which, index):
    """The place among the chunks of the `index`-th one that a warpgroup sums."""
    return CHUNKS - VALUE_CHUNKS + 2 * index + which


# Scores and weights


@gluon.jit
def score(shared, lse_ptr, rows, sequences, descales, work, problem, config):
    """Scores and weights of each tile of keys, and lse. Copies the keys, if they have 8 bits."""
    exchange = shared.exchange
    tree_ptr = sequences.tree
    layout: gl.constexpr = product_layout(N)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    row = work.first_row + gl.arange(0, M, of_rows)
    last_key = work.total - 1 + row * 0
    if config.CAUSAL:
        last_key = gl.minimum(last_key, row // problem.heads + work.shift)
    if tree_ptr is not None:
        if config.PACKED:
            tree_ptr += work.first_token.to(gl.int64) * problem.tree.query
        else:
            tree_ptr += work.sequence.to(gl.int64) * problem.tree.sequence
    view = View(last_key, tree_ptr)
    scale_log2 = problem.scale_log2
    if descales.k is not None:
        scale_log2 *= gl.load(descales.k)
    reference = gl.full([M], NOTHING_SEEN, gl.float32, of_rows)
    row_sum = row_sums(gl.zeros([M, N], gl.float32, layout))
    chunks_read = 0
    tile = 0
    pages = 0
    if config.KIND is not None:
        pages = row_pages(sequences, 0, work, problem, config)
        tile = tile_rows(rows, pages, 0, shared.copied, work, config)
        pages = row_pages(sequences, 1, work, problem, config)
        for group in gl.static_range(COPIED):
            copy_group(tile, group, 0, shared.copied)
        mbarrier.wait(shared.q_full.index(0), 0)
    for index in range(work.tiles):
        s, tile = tile_scores(shared, index, chunks_read, tile, pages, rows, work, config=config)
        chunks_read += CHUNKS
        if config.DEFERRED > 0:
            release(exchange.scored.index(0))
        if config.KIND is not None:
            pages = row_pages(sequences, index + 2, work, problem, config)
        s = hide_keys(s, index, view, work, problem, config)
        reference, row_sum = hand_over_weights(s, index, reference, row_sum, shared, scale_log2, config)

    if config.KIND is not None:
        finish_copies()
    # A row that saw no key has a sum of 0: its out is 0 and its lse -inf.
    row_total = gl.convert_layout(gl.sum(row_sum, 1), of_rows)
    nothing = row_total == 0.0
    row_total = gl.where(nothing, 1.0, row_total)
    mbarrier.wait(exchange.empty.index(0), (work.tiles & 1) ^ 1)
    if config.DEFERRED > 0:
        release(exchange.scored.index(0))  # the products behind the last scores wait for nothing
    factor = 1.0 / row_total
    if descales.v is not None:
        factor *= gl.load(descales.v)
    exchange.numbers.store(factor)
    tell(exchange.full.index(0), config)
    lse = gl.where(nothing, float("-inf"), reference + gl.log2(row_total))
    if not config.PARTIAL:
        lse *= LN_2
    head = row % problem.heads
    query = row // problem.heads
    if config.PACKED:
        statistic = (work.split * problem.heads + head).to(gl.int64) * problem.total_q + work.first_token + query
    else:
        line = (work.split * problem.batch + work.sequence) * problem.heads + head
        statistic = line.to(gl.int64) * problem.seq_q + query
    gl.store(lse_ptr + statistic, lse, mask=row < work.rows)


@gluon.jit
def tile_scores(shared, index, chunks_read, tile, pages, rows, work, config):
    """`q kᵀ` `[M, N]`; and if the cache has 8 bits, the rows of the next tile, whose pages these are, which are copied
    meanwhile. Chunks of q lie at constant places; if the compiler saw that, it would keep the descriptors of all
    products in registers."""
    hidden = hidden_zero(chunks_read)
    s = gl.zeros([M, N], gl.float32, product_layout(N))
    for chunk in gl.static_range(CHUNKS):
        place, slot, phase = chunk_slot(index, chunk, config)
        if config.KIND is None or chunk % GROUP == 0:
            mbarrier.wait(shared.full.index(slot), phase)
        keys = shared.keys.index(place).permute([1, 0])
        s = warpgroup_mma(shared.q.index(chunk + hidden), keys, s, use_acc=chunk > 0, is_async=True)
        if config.KIND is not None and chunk % GROUP == GROUP - 1:
            # The place from which this group was widened is free.
            if chunk // GROUP + COPIED == CHUNKS // GROUP:
                tile = tile_rows(rows, pages, index + 1, shared.copied, work, config)
            copy_group(tile, chunk // GROUP + COPIED, index, shared.copied)
    return warpgroup_mma_wait(0, [s]), tile


@gluon.jit
def tell(barrier, config):
    """Arrives at a barrier of a warpgroup. Threads that copy would arrive only when their copies have, so if there are
    some, one of them arrives for all."""
    if config.KIND is not None:
        mbarrier.arrive(barrier, count=WARPGROUP)
    else:
        release(barrier)


@gluon.jit
def hide_keys(s, index, view, work, problem, config):
    """Scores of a tile, -inf where a row does not see the key."""
    tile = work.first_tile + index
    first_key = work.base + tile * N
    cut = first_key + N > work.full_end
    if config.CUTS_BOX:
        cut |= (tile == 0) & (work.hidden > 0)
    if cut:
        column = gl.arange(0, N, gl.SliceLayout(0, s.type.layout))
        key = first_key + column
        if config.CUTS_BOX:
            hidden = gl.where((tile == 0) & (column < config.BOX), work.hidden, 0)
            key += gl.where(column + hidden >= config.BOX, gl.where(hidden > 0, work.total, 0), hidden)
        visible = key[None, :] <= view.last_key[:, None]
        if view.tree_ptr is not None:
            # Rows are counted once more: their places are not kept in registers.
            row = work.first_row + hidden_zero(index) + gl.arange(0, M, gl.SliceLayout(1, s.type.layout))
            tree_rows = view.tree_ptr + (row // problem.heads).to(gl.int64) * problem.tree.query
            last = (key - work.shift)[None, :]
            in_tree = (last >= 0) & (last < gl.minimum(problem.tree.columns, work.total - work.shift))
            shown = gl.load(tree_rows[:, None] + last, mask=(row < work.rows)[:, None] & in_tree, other=1)
            visible &= (shown != 0) & (last < problem.tree.columns)
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def hand_over_weights(s, index, reference, row_sum, shared, scale_log2, config):
    """The weights of a tile from its scores. Returns the new references and sums of weights of the rows."""
    exchange = shared.exchange
    dtype: gl.constexpr = shared.q.dtype
    highest = row_maximum(s) * scale_log2
    raised = gl.where(highest - reference > LARGEST_EXPONENT, highest, reference)
    p = gl.exp2(s * scale_log2 - raised[:, None])
    factor = gl.exp2(reference - raised)
    row_sum = row_sum * gl.convert_layout(factor, gl.SliceLayout(1, row_sum.type.layout))[:, None] + row_sums(p)
    mbarrier.wait(exchange.empty.index(0), (index & 1) ^ 1)
    exchange.numbers.store(raised - reference)
    exchange.weights.store(pack(p, dtype))
    tell(exchange.full.index(0), config)
    return raised, row_sum


# Sums of values


@gluon.jit
def sum_values(WHICH: gl.constexpr, shared, tiles, out, config):
    """The sums of half of the value columns. Whoever gets weights knows that the keys of their tile have been
    multiplied, so it releases the chunks of the cache: those that it sums, and one of the halves the others."""
    exchange = shared.exchange
    layout: gl.constexpr = product_layout(CHUNK)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    declare_flag(WHICH)
    total = ()
    for _ in gl.static_range(SUM_CHUNKS):
        total = total + (gl.zeros([M, CHUNK], gl.float32, layout),)
    for index in range(tiles):
        mbarrier.wait(exchange.full.index(0), index & 1)
        rise = exchange.numbers.load(of_rows)
        p = exchange.weights.load(layout)
        release(exchange.empty.index(0))
        if WHICH == 0:
            for chunk in gl.static_range(CHUNKS - VALUE_CHUNKS):
                release_chunk(shared, index, chunk, config)
        if any_above(rise, 0.0, WHICH):
            total = scaled(total, gl.exp2(-rise))
        total = add_values(total, p, shared, index, WHICH, config)

    mbarrier.wait(exchange.full.index(0), tiles & 1)
    total = scaled(total, exchange.numbers.load(of_rows))
    row = gl.arange(0, M, of_rows)
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    for chunk in gl.static_range(SUM_CHUNKS):
        columns = chunk_column(value_chunk(WHICH, chunk)) + column
        places = (out.pointer + row * COLUMNS)[:, None] + columns[None, :]
        gl.store(places, total[chunk].to(out.pointer.dtype.element_ty), mask=(row < out.rows)[:, None])


@gluon.jit
def scaled(total, factor):
    """Sums times a factor of each row."""
    sums = ()
    for chunk in gl.static_range(SUM_CHUNKS):
        sums = sums + (total[chunk] * factor[:, None],)
    return sums


@gluon.jit
def add_values(total, p, shared, index, WHICH: gl.constexpr, config):
    """The sums plus `p` times the chunks of values, each of which is released as soon as it has been multiplied. The
    last `DEFERRED` products wait for the scores of the next tile: so the tensor cores have work while these become
    weights."""
    FIRST: gl.constexpr = SUM_CHUNKS - config.DEFERRED
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(CHUNK), 2)
    p = gl.convert_layout(p, operand, assert_trivial=True)
    sums = add_chunks(total, p, shared, index, 0, FIRST, WHICH, config=config)
    if config.DEFERRED > 0:
        mbarrier.wait(shared.exchange.scored.index(0), (index + 1) & 1)
        sums = sums + add_chunks(total, p, shared, index, FIRST, config.DEFERRED, WHICH, config=config)
    return sums


@gluon.jit
def add_chunks(total, p, shared, index, FIRST: gl.constexpr, COUNT: gl.constexpr, WHICH: gl.constexpr, config):
    """`COUNT` of the sums, from `FIRST` on, plus `p` times their chunks."""
    sums = ()
    for chunk in gl.static_range(FIRST, FIRST + COUNT):
        place, slot, phase = chunk_slot(index, value_chunk(WHICH, chunk), config)
        mbarrier.wait(shared.full.index(slot), phase)
        sums = sums + (warpgroup_mma(p, shared.keys.index(place), total[chunk], is_async=True),)
    for chunk in gl.static_range(FIRST, FIRST + COUNT - 1):
        wait_products(FIRST + COUNT - 1 - chunk)
        release_chunk(shared, index, value_chunk(WHICH, chunk), config)
    if COUNT == 1:
        sums = (warpgroup_mma_wait(0, sums),)
    else:
        sums = warpgroup_mma_wait(0, sums)
    release_chunk(shared, index, value_chunk(WHICH, FIRST + COUNT - 1), config)
    return sums


#: Registers of a thread that sums values and of the one that loads; those of scores have the rest of 128 on average.
_VALUE_REGISTERS, _PRODUCER_REGISTERS, _REGISTERS = 176, 24, 128
#: What instructions call the numbers of a cache of 8 bits.
_KINDS: dict[torch.dtype | None, str] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
#: Likewise where a warpgroup loads a cache of 8 bits. With 168 for sums ptxas serialises all products.
_WIDENING_VALUE_REGISTERS, _WIDENING_REGISTERS = 176, 64
#: Chunks of values whose products are deferred where several tiles of rows read the same keys: the tensor cores are
#: the limit, not the memory. µs of 64 sequences of 16,384 rows on an H100, 128 heads: 512, without 536; in pages of 16
#: 498 and 509, of 64 482 and 483. With 16 heads 417 and 412, for places of the cache become free later. Beside copied
#: rows there are too few places.
_DEFERRED = 2


def latent_pipeline(call: SplitCall, device: torch.device) -> Pipeline:
    """The pipeline of a call, which is given q, the cache, those that there are of `rows.Sequences`, factors, and the
    length of all sequences. Its first outputs are out and lse, as of `split_pipeline`."""
    batch, seq_q, heads, _, head_dim, _ = call.shape
    total_q = batch * seq_q if call.total_q is None else call.total_q
    check_rows("q", seq_q, MAX_POSITIONS)
    check_rows("q with all heads", total_q * heads)
    with_rows, launched = row_tiles(call, M.value)
    most = max(-(-call.visible // N.value), 1)
    splits = min(call.num_splits, most) or choose_splits(with_rows, most, multiprocessors(device))
    programs = launched * splits if total_q else 0
    check_programs("q", programs)
    outer, row, _ = call.strides[1]
    widens = call.cache_itemsize == 1
    box = (1, 1, box_rows(call.page_size, N.value), 1, CHUNK.value)
    in_words = [int64(stride // 4 if widens else None, 4) for stride in (outer, row)]
    packed = call.total_q is not None
    # A single query at the last row sees all of them.
    causal = call.window_right == 0 and (packed or seq_q > 1)
    rows = total_q * heads, head_dim
    tree = call.tree or (None, None, None)
    parameters = {
        "q_desc": TmaTensor("q", call.dtype, (M.value, CHUNK.value), strided_layout(rows, (head_dim, 1))),
        "cache_desc": TmaTensor(
            "cache", call.dtype, None if widens else box, packed_layout((0, 1, head_dim), (row, row, 1))
        ),
        "cache_ptr": pointer_to(torch.int32 if widens else None, 16),
        "out_ptr": pointer_to(torch.float32 if splits > 1 else call.dtype, 16),
        "lse_ptr": pointer_to(torch.float32),
        "sequences": Sequences(*map(pointer_to, call.index_dtypes)),
        "descales": Descales(*(pointer_to(None if of is None else torch.float32) for of in call.descale_strides)),
        "length": Parameter("i32", 1, GIVEN),
        "cache_strides": CacheStrides(in_words[0], in_words[1], None),
        "factor_strides": factor_strides(call.descale_strides[0]),
        "problem": Problem(
            batch=int32(batch),
            heads=int32(heads),
            splits=int32(splits),
            capacity=int32(call.capacity),
            seq_q=int32(None if packed else seq_q),
            total_q=int32(total_q),
            seq_new=int32(call.seq_new if call.index_dtypes[5] is None else None),
            rows_apart=int32(None if widens else outer // row),
            stride_table=int64(call.stride_table),
            scale_log2=float32(call.scale / math.log(2)),
            tree=Tree(int64(tree[0]), int64(tree[1]), int32(tree[2])),
        ),
    }
    constants = {
        "KIND": _KINDS.get(call.cache_dtype),
        "CAUSAL": causal,
        "PAGE_SIZE": call.page_size,
        "PARTIAL": splits > 1,
        "DEFERRED": _DEFERRED if heads * seq_q > M.value and not widens else 0,
        "VALUE_REGISTERS": _WIDENING_VALUE_REGISTERS if widens else _VALUE_REGISTERS,
        "PRODUCER_REGISTERS": _WIDENING_REGISTERS if widens else _PRODUCER_REGISTERS,
    }
    buffers = {**(PARTIAL_RESULTS if splits > 1 else {}), "k": "descale_k", "v": "descale_v"}
    kernel = Kernel(latent_attention_kernel, parameters, constants, programs, buffers, max_registers=_REGISTERS)
    kernels, outputs = with_combining(call, {"attend": kernel}, splits, device)
    factors = (name for name, of in zip(("descale_k", "descale_v"), call.descale_strides) if of is not None)
    return Pipeline(device, kernels, ("q", "cache", *call.indices, *factors, "length"), outputs)
