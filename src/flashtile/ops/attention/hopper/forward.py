"""Forward kernel for Hopper: a producer warp that loads, and consumer warpgroups that multiply and exponentiate.

A thread block stays on its multiprocessor and takes one tile of query rows after another. Its roles:

- `produce`, one warp: takes the next tile, publishes it to the consumers (`TileQueue`), and loads queries, keys and
  values by TMA into rings, as soon as they have room.
- `consume`, one to three warpgroups: each computes 64 query rows of every tile. `consume_tile` finds the key tiles that
  these rows see, `attend` is the loop over them, and `store_statistics` and `store_epilogue` write lse and out.

They wait for one another only through the rings and the queue. Per key tile, with `c = scale · log2(e)` (letters as in
`primitives`), a consumer computes an online softmax::

    s = q kᵀ               [M, N]
    p = exp2(c·s - r)      [M, N]
    l = l + rowsum(p)      [M], kept as [M, 8]: each thread's own part
    o = o + p v            [M, E]

and in the end `out = o / l` and `lse = r·ln 2 + ln l`.

The reference `r` `[M]` rarely moves; `forward_softmax` says why, and when it does. `p v` of the tile before is in
flight while `config.AHEAD` keys of a tile are exponentiated. Key tiles come from the last to the first, so that the
masked ones of the diagonal come first.

8-bit queries and keys are multiplied as they are, and their factors join the scale. Values come in 16 bits.

References: Shah et al., "FlashAttention-3" (2024), algorithm 2, for the products in flight and the consumers that take
turns; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

import math
from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import contiguous_strides
from flashtile._backends.gluon import aggregate, fence_async_shared, gl, gluon, tma_store_wait
from flashtile._backends.launch import int32, named_constants, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile._backends.tma import TmaTensor, broadcast_layout, row_layout
from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.parameters import (
    SideParameters,
    captured_parameters,
    key_batch_strides,
    side_parameters,
    window_parameters,
)
from flashtile.ops.attention.gpu.score_writer import score_bounds
from flashtile.ops.attention.hopper.cache import CachedRows, copied_rows, sequence_tree
from flashtile.ops.attention.hopper.configs import (
    CONSUMER_ROWS,
    PRODUCER_REGISTERS,
    HopperConfig,
    column_chunks,
    out_places,
    query_places,
    score_columns,
    value_chunks,
    value_parts,
)
from flashtile.ops.attention.hopper.forward_producer import (
    Rings,
    head_and_split,
    key_slot,
    load_share,
    produce,
    receive_query_tile,
    split_keys,
    split_range,
    split_rows,
    value_column,
    visited_keys,
)
from flashtile.ops.attention.hopper.forward_softmax import (
    FunctionInputs,
    HeadModifiers,
    Output,
    Softmax,
    drop_weights,
    exponents,
    first_reference,
    first_sums,
    forward_dropout,
    head_cap_scale,
    head_scale,
    head_slope,
    largest_weights,
    load_table_tiles,
    make_out_tiles,
    modify_scores,
    query_operand,
    score_factor,
    start_scores,
    start_values,
    store_epilogue,
    store_statistics,
    wait_scores,
    wait_values,
    weights_by_maxima,
    weights_by_sums,
)
from flashtile.ops.attention.hopper.modifiers import (
    FULL,
    TILE_KIND,
    TILE_NUMBER,
    BlockLists,
    MovedBias,
    ScoreUnits,
    distance_shift,
    gluon_function,
    gluon_reads,
    head_table,
    load_bits,
    make_bias_tiles,
    make_tile_info,
    near_shift,
    read_tile_info,
)
from flashtile.ops.attention.hopper.primitives import (
    WARPGROUP,
    Chunks,
    HeadRows,
    KeyTileRange,
    M,
    Slot,
    barriers,
    begin_turn,
    consumer_key_tiles,
    declare_flag,
    end_turn,
    hidden_zero,
    make_ring,
    make_tile_queue,
    pack,
    product_layout,
    row_maximum,
)
from flashtile.ops.attention.spec import FP8, out_dtype
from flashtile.ops.common.split_keys.plan import Combined, combining


@aggregate
class KernelConfig:
    """A kernel's constants: `configs.HopperConfig`, and what the call has, so that other calls do not pay."""

    EIGHT_BITS: gl.constexpr
    CONSUMERS: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    AHEAD: gl.constexpr
    IN_TURN: gl.constexpr
    OUT_PLACES: gl.constexpr
    PACKED: gl.constexpr
    BY_SEQUENCE: gl.constexpr
    CACHED: gl.constexpr
    PAGE_SIZE: gl.constexpr
    SHARES: gl.constexpr
    COPIED: gl.constexpr
    KEY_LENGTHS: gl.constexpr
    MASK_ENDS_KEYS: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr
    BIAS_COLUMN: gl.constexpr
    MASK_COLUMN: gl.constexpr
    BATCH_FIRST: gl.constexpr
    SCORE_COLUMNS: gl.constexpr
    VALUE_PARTS: gl.constexpr
    ONE_STAGE: gl.constexpr
    SCORE_FUNCTION: gl.constexpr
    SCORE_READS: gl.constexpr
    MAX_SCORES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


class Tensors(NamedTuple):
    """TMA descriptors of each tensor, as `Chunks`; `bias`: a `MovedBias`; `k_rows`, `v_rows`: `cache.CopiedRows`, if
    threads copy keys and values, else None."""

    q: Any
    k: Any
    v: Any
    out: Any
    bias: Any
    k_rows: Any
    v_rows: Any


class Problem(NamedTuple):
    """The facts of the call that every role knows.

    Attributes:
        side, numbers: the side inputs (`parameters`).
        captured, captured_sizes: addresses and sizes of what a score function reads; None without any.
        batch, heads: of the call. `group` query heads share a key/value head.
        rows_q, rows_k: seq_q and seq_k, or the totals of a packed call.
        tiles, lines: `tiles` (packed: slots) on each of `lines`, which are as many for each part of the values'
            columns, and for each split. `dynamic`: thread blocks take them as they come.
        splits: into so many the keys of each sequence are divided, and another kernel puts the results together; None:
            no sequence is divided.
        window: `parameters.Window`.
        units: `scores.ScoreUnits`.
        k_rows_apart, v_rows_apart: with key lengths, rows of k and v from one batch entry to the next.
        cache, cache_numbers: those of `cache.CachedRows`, if keys and values are rows of one; else None.
    """

    side: Any
    captured: Any
    cache: Any
    batch: Any
    heads: Any
    group: Any
    rows_q: Any
    rows_k: Any
    tiles: Any
    lines: Any
    dynamic: Any
    splits: Any
    window: Any
    units: Any
    k_rows_apart: Any
    v_rows_apart: Any
    numbers: Any
    captured_sizes: Any
    cache_numbers: Any

    @classmethod
    def from_call(
        cls,
        call: Call,
        side: SideParameters,
        tiles: int,
        lines: int,
        dynamic: bool,
        splits: int,
        cache: CachedRows | None = None,
    ) -> Any:
        """Describes it for a kernel."""
        read = captured_parameters(call.aux.captured)
        return cls(
            side=side.pointers,
            captured=read["captured"],
            cache=None if cache is None else cache.addresses,
            batch=int32(call.batch),
            heads=int32(call.heads),
            group=int32(call.group),
            rows_q=int32(call.rows_q),
            rows_k=int32(call.rows_k),
            tiles=int32(tiles),
            lines=int32(lines),
            dynamic=int32(int(dynamic)),
            splits=int32(splits if splits > 1 else None),
            window=window_parameters(call.spec),
            units=ScoreUnits.from_spec(call.spec),
            numbers=side.numbers,
            captured_sizes=read["captured_sizes"],
            cache_numbers=None if cache is None else cache.numbers,
            **key_batch_strides(call),
        )


class BlockMask(NamedTuple):
    """The block mask: its lists, and what the producer publishes of each loaded key tile. All None without one."""

    lists: Any
    tile_info: Any


class View(NamedTuple):
    """The keys that a consumer's rows see. `row` `[M]`: its rows, from `first` on; `shift`: key of row 0's diagonal;
    `distance_shift`, `near_shift`: as the functions of `scores`; `keys`: how many there are; `tiles`: the key tiles to
    visit."""

    row: Any
    first: Any
    shift: Any
    distance_shift: Any
    near_shift: Any
    keys: Any
    window_left: Any
    window_right: Any
    tiles: Any


class Attended(NamedTuple):
    """All but the last product of a tile: weights `p` of the last key tile, which are still to be multiplied by the
    values in `slot`, and how many key tiles have come out of the rings before that one."""

    p: Any
    out: Any
    softmax: Any
    key_tiles: Any
    slot: Any


@gluon.jit
def attention_forward_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, v_tail_desc, out_desc, out_tail_desc, bias_desc,
    lse_ptr, max_scores_ptr, counter_ptr, problem, constants,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, AHEAD: gl.constexpr, IN_TURN: gl.constexpr, OUT_PLACES: gl.constexpr,
    QUERY_PLACES: gl.constexpr, PACKED: gl.constexpr, BY_SEQUENCE: gl.constexpr, CACHED: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, SHARES: gl.constexpr, COPIED: gl.constexpr, TOP_LEFT: gl.constexpr,
    BATCH_FIRST: gl.constexpr, MASK_ENDS_KEYS: gl.constexpr, SCORE_COLUMNS: gl.constexpr, VALUE_PARTS: gl.constexpr,
    SCORE_FUNCTION: gl.constexpr, SCORE_READS: gl.constexpr,
):  # fmt: skip
    """`..._tail_desc`: of the second chunk of head_dim. `constants`: `parameters.CallConstants`.
    `BY_SEQUENCE`: each sequence of a packed call has lines of its own. `CACHED`: keys and values are rows of a cache,
    `PAGE_SIZE` of a page, 0 without pages. Boxes of the descriptors, of which several may be a tile of `BLOCK_N` keys,
    are loaded in `SHARES` by as many warps. `COPIED`: their threads copy the rows instead. `counter_ptr`: two zeros,
    through which thread blocks take tiles as they come, if they do. `BATCH_FIRST`: the same head of all batch entries
    comes next, because they share a table. `MASK_ENDS_KEYS`: the mask is the same for all rows, and keys past the last
    one that it shows are left out. `SCORE_COLUMNS`: of the first chunk, those that scores are products of
    (`start_scores`). `VALUE_PARTS`: so many tiles of the same rows have a part of the values' columns each.
    `SCORE_FUNCTION`, `SCORE_READS`: the user's, and what it reads (`modifiers`). `max_scores_ptr`: the largest score of
    each row. A parameter that a call does not need is None.
    """
    TILE_K: gl.constexpr = constants.TILE_K
    config = KernelConfig(
        EIGHT_BITS=q_desc.dtype.primitive_bitwidth == 8,
        CONSUMERS=CONSUMERS,
        Q_IN_REGISTERS=Q_IN_REGISTERS,
        AHEAD=AHEAD,
        IN_TURN=IN_TURN,
        OUT_PLACES=OUT_PLACES,
        PACKED=PACKED,
        BY_SEQUENCE=BY_SEQUENCE,
        CACHED=CACHED,
        PAGE_SIZE=PAGE_SIZE,
        SHARES=SHARES,
        COPIED=COPIED,
        KEY_LENGTHS=problem.side.key_lengths is not None,
        MASK_ENDS_KEYS=MASK_ENDS_KEYS,
        HAS_LEFT=constants.HAS_LEFT,
        HAS_RIGHT=constants.HAS_RIGHT,
        TOP_LEFT=TOP_LEFT,
        TILE_Q=constants.TILE_Q,
        TILE_K=TILE_K,
        BIAS_COLUMN=constants.BIAS_COLUMN,
        MASK_COLUMN=constants.MASK_COLUMN,
        BATCH_FIRST=BATCH_FIRST,
        SCORE_COLUMNS=SCORE_COLUMNS,
        VALUE_PARTS=VALUE_PARTS,
        ONE_STAGE=STAGES == 1,
        SCORE_FUNCTION=SCORE_FUNCTION,
        SCORE_READS=SCORE_READS,
        MAX_SCORES=max_scores_ptr is not None,
    )
    k_rows = None
    v_rows = None
    if COPIED:
        k_rows, v_rows = copied_rows(problem.cache, problem.cache_numbers)
    tensors = Tensors(
        q=Chunks(q_desc, q_tail_desc),
        k=Chunks(k_desc, k_tail_desc),
        v=Chunks(v_desc, v_tail_desc),
        out=Chunks(out_desc, out_tail_desc),
        bias=MovedBias(bias_desc, problem.numbers.bias),
        k_rows=k_rows,
        v_rows=v_rows,
    )
    keys = tensors.k
    k_tail = None
    if STAGES == 1 and k_tail_desc is not None:
        keys = Chunks(k_desc, None)
        tail = Chunks(k_tail_desc, None)
        k_tail = make_ring(tail, STAGES, READERS=CONSUMERS, KEYS=BLOCK_N, WRITERS=SHARES, COPIED=COPIED)
    bias_tiles = None
    if bias_desc is not None:
        bias_tiles = make_bias_tiles(bias_desc, STAGES, CONSUMERS)
    q_ring = make_ring(tensors.q, STAGES=QUERY_PLACES, READERS=1, PARTS=CONSUMERS)
    k_ring = make_ring(keys, STAGES=STAGES, READERS=CONSUMERS, KEYS=BLOCK_N, WRITERS=SHARES, COPIED=COPIED)
    OWN: gl.constexpr = CACHED and constants.HAS_LEFT and not COPIED
    v_ring = make_ring(
        tensors.v, STAGES=STAGES, READERS=CONSUMERS, KEYS=BLOCK_N, WRITERS=SHARES, OWN=OWN, COPIED=COPIED
    )
    rings = Rings(q=q_ring, k=k_ring, k_tail=k_tail, v=v_ring, bias=bias_tiles)
    out_tiles = None
    if OUT_PLACES > 0:
        out_tiles = make_out_tiles(tensors.out, config)
    output = Output(
        tiles=out_tiles,
        free=barriers(CONSUMERS, WARPGROUP),
        descriptors=tensors.out,
        lse_ptr=lse_ptr,
        max_scores_ptr=max_scores_ptr,
    )
    queue = make_tile_queue(CONSUMERS, PACKED and TILE_K > 0, SHARES - 1)
    tile_info = None
    if TILE_K > 0:
        tile_info = make_tile_info(STAGES)
    blocks = BlockMask(lists=BlockLists(problem.side.block_lists, problem.numbers.blocks), tile_info=tile_info)
    fence_async_shared()
    if CONSUMERS == 1 and SHARES == 1:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 1 and SHARES == 4:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
                (load_share, (1, config, queue, rings, tensors, problem)),
                (load_share, (2, config, queue, rings, tensors, problem)),
                (load_share, (3, config, queue, rings, tensors, problem)),
            ],
            [1, 1, 1, 1],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2 and SHARES == 1:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (consume, (1, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2 and SHARES == 4:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (consume, (1, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
                (load_share, (1, config, queue, rings, tensors, problem)),
                (load_share, (2, config, queue, rings, tensors, problem)),
                (load_share, (3, config, queue, rings, tensors, problem)),
            ],
            [4, 1, 1, 1, 1],
            [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 3 and SHARES == 1:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (consume, (1, config, queue, rings, output, problem, blocks)),
                (consume, (2, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, config, queue, rings, output, problem, blocks)),
                (consume, (1, config, queue, rings, output, problem, blocks)),
                (consume, (2, config, queue, rings, output, problem, blocks)),
                (produce, (config, queue, counter_ptr, rings, tensors, problem, blocks)),
                (load_share, (1, config, queue, rings, tensors, problem)),
                (load_share, (2, config, queue, rings, tensors, problem)),
                (load_share, (3, config, queue, rings, tensors, problem)),
            ],
            [4, 4, 1, 1, 1, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )


# The consumers


@gluon.jit
def consume(WHICH: gl.constexpr, config, queue, rings, output, problem, blocks):
    """Consumer warpgroup: computes the `WHICH`-th 64 rows of each tile."""
    declare_flag(WHICH)
    tiles_received = 0
    key_tiles = 0
    if config.IN_TURN and WHICH == config.CONSUMERS - 1:
        end_turn(WHICH, config.CONSUMERS)
    tile = receive_query_tile(queue, tiles_received, config)
    while tile.first >= 0:
        tiles_received += 1
        tile, key_tiles = consume_tile(
            tile, tiles_received, key_tiles, config, queue, rings, output, problem=problem, blocks=blocks, WHICH=WHICH
        )
    tma_store_wait(0)


@gluon.jit
def consume_tile(
    tile, tiles_received, key_tiles, config, queue, rings, output, problem, blocks, WHICH: gl.constexpr
):  # fmt: skip
    """Computes and stores 64 rows of a tile, the `tiles_received`-th counted from 1. Returns the next tile, and how
    many key tiles have come out of the rings."""
    k = rings.k
    v = rings.v
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    ROWS: gl.constexpr = config.CONSUMERS * M
    # If a tile has more rows than a key tile has keys, a band often hides whole key tiles from a consumer.
    SKIPS: gl.constexpr = (config.HAS_LEFT or config.HAS_RIGHT) and config.TILE_Q == 0 and ROWS > k.ROWS
    # With a single stage the producer has to wait for the key tiles that are left out before it finds the next tile.
    LEAVES_OUT_FIRST: gl.constexpr = SKIPS and config.HAS_LEFT and config.ONE_STAGE
    head = tile.head
    part = 0
    if config.VALUE_PARTS > 1:
        part = head % config.VALUE_PARTS
        head = head // config.VALUE_PARTS
    head, split = head_and_split(head, problem.splits)
    rows = HeadRows(tile.sequence, head, 0, problem.rows_q)
    seq_k = problem.rows_k
    if config.PACKED:
        rows = HeadRows(tile.sequence, head, tile.begin_q, tile.seq_q)
    if config.PACKED or config.CACHED:
        seq_k = tile.seq_k
    keys = seq_k
    if config.KEY_LENGTHS or config.MASK_ENDS_KEYS:
        keys = tile.keys
    shift = 0 if config.TOP_LEFT else seq_k - rows.length
    first = tile.first + WHICH * M
    row = first + gl.arange(0, M, gl.SliceLayout(1, s_layout))
    loaded = visited_keys(tile.first, rows.length, seq_k, keys, problem, config, k.ROWS)
    keys = split_keys(loaded, split, keys, problem.splits)
    loaded = split_range(loaded, split, problem.splits)
    visited, before, after = consumer_key_tiles(
        loaded, first, rows.length, shift, keys, problem.window.left, problem.window.right, N=k.ROWS,
        HAS_LEFT=config.HAS_LEFT, HAS_RIGHT=config.HAS_RIGHT, SKIPS=SKIPS,
    )  # fmt: skip
    if SKIPS:
        key_tiles = skip_key_tiles(before, key_tiles, rings, config, WHICH)
    if config.TILE_Q > 0:
        visited = KeyTileRange(0, visited.full_begin, visited.full_end, gl.maximum(tile.listed, 1))
    exists = tile.sequence < problem.batch  # rows past the end of a packed call belong to no sequence
    factor = score_factor(problem, tile.sequence, head, exists, config)
    unit = head_scale(problem.units, factor)
    slope = head_slope(problem, tile.sequence, head, unit, exists)
    bias = head_table(problem.side.bias, problem.numbers.bias, tile.sequence, head)
    mask = head_table(problem.side.mask, problem.numbers.mask, tile.sequence, head)
    dropout = forward_dropout(problem, tile.sequence, head)
    function = FunctionInputs(
        problem.units.function_scale, tile.sequence, head, problem.captured, problem.captured_sizes
    )
    q_slot = rings.q.slot(tiles_received - 1, WHICH)
    rings.q.acquire(q_slot)
    query = query_operand(rings.q, q_slot, s_layout, config)
    apart = distance_shift(rows.length, seq_k, problem.numbers.origin)
    view = View(
        row=row,
        first=first,
        shift=shift,
        distance_shift=apart,
        near_shift=near_shift(apart, first, keys, M),
        keys=keys,
        window_left=problem.window.left,
        window_right=problem.window.right,
        tiles=visited,
    )
    cap_scale = head_cap_scale(problem.units, factor)
    tree = None
    if config.CACHED:
        tree = sequence_tree(problem.cache, problem.cache_numbers, rows, config.PACKED)
    modifiers = HeadModifiers(
        problem.numbers, unit, cap_scale, slope, bias, mask, dropout, function=function, tree=tree
    )
    attended = attend(query, q_slot, key_tiles, modifiers, view, blocks, rings, config=config, WHICH=WHICH)
    v.acquire(attended.slot)
    out = start_values(attended.p, attended.out, v, attended.slot)
    if not config.Q_IN_REGISTERS and config.OUT_PLACES > 0:
        rings.q.release(q_slot)
    # While the last product is in flight: what comes next, and the statistics.
    if not LEAVES_OUT_FIRST:
        following = receive_query_tile(queue, tiles_received, config)
    inverse = store_statistics(attended.softmax, rows, view, part, split, problem=problem, output=output, config=config)
    out = wait_values(out, v)
    v.release(attended.slot)
    key_tiles = attended.key_tiles + 1
    if SKIPS and config.HAS_LEFT:
        key_tiles = skip_key_tiles(after, key_tiles, rings, config, WHICH)
    if LEAVES_OUT_FIRST:
        following = receive_query_tile(queue, tiles_received, config)
    column = value_column(part, rings, config)
    store_epilogue(
        out, inverse, split_rows(rows, split, problem), first, column, tiles_received, rings, q_slot=q_slot,
        output=output, config=config, WHICH=WHICH,
    )  # fmt: skip
    return following, key_tiles


@gluon.jit
def skip_key_tiles(count, key_tiles, rings, config, WHICH: gl.constexpr):
    """Releases the next key tiles unseen, and gives others its turns. Returns the tiles taken from the rings."""
    for _ in range(count):
        slot = key_slot(rings, key_tiles)
        rings.k.acquire(slot)
        rings.k.release(slot)
        if rings.k_tail is not None:
            rings.k_tail.acquire(slot)
            rings.k_tail.release(slot)
        rings.v.acquire(slot)
        rings.v.release(slot)
        key_tiles += 1
        if config.IN_TURN:
            begin_turn(WHICH)
            end_turn(WHICH, config.CONSUMERS)
    return key_tiles


# The loop over key tiles


@gluon.jit
def step_query(query, q_slot, key_tiles, rings, s_layout: gl.constexpr, config):
    """The queries as an operand for one key tile; with a single stage at a hidden address (`hidden_zero`)."""
    if config.ONE_STAGE:
        query = query_operand(rings.q, Slot(q_slot.place + hidden_zero(key_tiles), q_slot.phase), s_layout, config)
    return query


@gluon.jit
def attend(query, q_slot, key_tiles, modifiers, view, blocks, rings, config, WHICH: gl.constexpr):
    """The online softmax over the key tiles that `view` names, from the last one to the first."""
    k = rings.k
    v = rings.v
    dtype: gl.constexpr = v.tiles.dtype
    o_layout: gl.constexpr = product_layout(v.WIDTH)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_layout: gl.constexpr = product_layout(k.ROWS, k.tiles.dtype.primitive_bitwidth)
    zeros = gl.zeros([M, k.ROWS], gl.float32, s_layout)
    o = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    o_tail = gl.to_tensor(0)
    if v.TAIL > 0:
        o_tail = gl.zeros([M, v.TAIL], gl.float32, product_layout(v.TAIL))
    out = Chunks(o, o_tail)

    slot = key_slot(rings, key_tiles)
    k.acquire(slot)
    n, kind, bits = key_tile_at(view.tiles.end - 1, slot, view, blocks, k, config)
    query_here = step_query(query, q_slot, key_tiles, rings, s_layout, config)
    scores = start_scores(query_here, rings, slot, zeros, config)
    tables = load_table_tiles(n, slot, modifiers, view, rings, config, s_layout, WHICH=WHICH)
    s = wait_scores(scores, rings, slot, 0)
    s = modify_scores(s, n, kind, bits, tables, modifiers, view, MAY_CUT=True, config=config)
    reference = first_reference(row_maximum(s) * modifiers.scale_log2, dtype)
    probs = gl.exp2(exponents(s, modifiers.scale_log2, reference))
    softmax = Softmax(reference, first_sums(probs, dtype, config), largest_weights(probs, config))
    p = gl.convert_layout(pack(drop_weights(probs, n, modifiers, view), dtype), p_layout)

    for done in range(view.tiles.begin + 1, view.tiles.end):
        v_slot = slot
        key_tiles += 1
        query_here = step_query(query, q_slot, key_tiles, rings, s_layout, config)
        s, out, slot, n = scores_during_values(
            query_here, p, out, v_slot, key_tiles, done, zeros, modifiers=modifiers, view=view, blocks=blocks,
            rings=rings, config=config, WHICH=WHICH,
        )  # fmt: skip
        if dtype == gl.float16:
            p, softmax, out = weights_by_maxima(
                s, n, modifiers, view, softmax, out, v, v_slot=v_slot, p_layout=p_layout, config=config, WHICH=WHICH
            )
        else:
            p, softmax, out = weights_by_sums(
                s, n, modifiers, view, softmax, out, v, v_slot=v_slot, p_layout=p_layout, config=config, WHICH=WHICH
            )
    return Attended(p, out, softmax, key_tiles, slot)


@gluon.jit
def scores_during_values(
    query, p, out, v_slot, key_tiles, done, zeros, modifiers, view, blocks, rings, config, WHICH: gl.constexpr
):  # fmt: skip
    """Starts the scores of the next key tile and `p v` of the one before, and waits for the scores. Returns these,
    `out` with that product in flight, and slot and number of the key tile."""
    k = rings.k
    v = rings.v
    PRODUCTS: gl.constexpr = 2 if v.TAIL > 0 else 1
    # Without a band only the last tile of keys can be cut, and that comes first. A branch that is never taken would
    # still keep the loop in pieces, which costs 7 % at head_dim 64.
    MAY_CUT: gl.constexpr = config.HAS_LEFT or config.HAS_RIGHT or config.TILE_Q > 0
    s_layout: gl.constexpr = zeros.type.layout
    slot = key_slot(rings, key_tiles)
    k.acquire(slot)
    if config.IN_TURN:
        begin_turn(WHICH)
    scores = start_scores(query, rings, slot, zeros, config)
    v.acquire(v_slot)
    out = start_values(p, out, v, v_slot)
    if config.IN_TURN:
        end_turn(WHICH, config.CONSUMERS)
    n, kind, bits = key_tile_at(view.tiles.begin + view.tiles.end - 1 - done, slot, view, blocks, k, config)
    tables = load_table_tiles(n, slot, modifiers, view, rings, config, s_layout, WHICH=WHICH)
    s = wait_scores(scores, rings, slot, PRODUCTS)
    s = modify_scores(s, n, kind, bits, tables, modifiers, view, MAY_CUT=MAY_CUT, config=config)
    return s, out, slot, n


@gluon.jit
def key_tile_at(n, slot, view, blocks, k, config):
    """Number of a key tile. With a block mask, which one it is that was loaded there, its kind, and its bits."""
    kind = FULL
    bits = 0
    if config.TILE_Q > 0:
        n = read_tile_info(blocks.tile_info, slot.place, TILE_NUMBER)
        kind = read_tile_info(blocks.tile_info, slot.place, TILE_KIND)
        bits = load_bits(blocks.lists, kind, view.first, n, k.ROWS, config.TILE_Q, config.TILE_K)
    return n, kind, bits


def forward_kernel(
    call: Call, config: HopperConfig, programs: int, tiles: int, lines: int, dynamic: bool, splits: int = 1,
    cache: CachedRows | None = None, by_sequence: bool = False,
) -> Kernel:  # fmt: skip
    """The kernel as a pipeline launches it. Arguments as in `Problem` and in the kernel."""
    spec, aux, dtype = call.spec, call.aux, call.dtype
    covered = call.is_covered(config.block_m, config.block_n)
    side = side_parameters(call, covered=covered, by_column=False, staged=True, group=call.group)
    bounds = score_bounds(call) if covered else None
    copied = cache is not None and cache.copied
    parameters = {
        **_moved_tensors(call, config, cache),
        "lse_ptr": pointer_to(torch.float32),
        "max_scores_ptr": pointer_to(torch.float32 if spec.returns_max_scores else None),
        "counter_ptr": pointer_to(torch.int32, 16),
        "problem": Problem.from_call(call, side, tiles, lines, dynamic, splits, cache),
        "constants": side.constants,
    }
    constants = {
        **named_constants(config),
        "PRODUCER_REGISTERS": config.left_registers if copied else PRODUCER_REGISTERS,
        "OUT_PLACES": out_places(config, *call.head_dims, dtype),
        "QUERY_PLACES": query_places(config, *call.head_dims, dtype),
        "PACKED": call.packed,
        "BY_SEQUENCE": by_sequence,
        "CACHED": cache is not None,
        "PAGE_SIZE": 0 if cache is None else cache.page_size,
        "SHARES": 1 if cache is None or config.stages == 1 else cache.shares,
        "COPIED": copied,
        "TOP_LEFT": spec.banded and spec.top_left,
        # A table may be larger than keys and values: thread blocks that read the same part run at the same time.
        "BATCH_FIRST": not call.packed and call.batch > 1 and any(map(_is_shared_by_batch, (aux.bias, aux.mask))),
        "SCORE_COLUMNS": score_columns(call.head_dims[0], dtype),
        "VALUE_PARTS": value_parts(call.head_dims[1]),
        "MASK_ENDS_KEYS": aux.mask is not None and aux.mask.by_key,
        "SCORE_FUNCTION": None if spec.score_program is None else gluon_function(spec.score_program, bounds),
        "SCORE_READS": None if spec.score_program is None else gluon_reads(spec.score_program, bounds),
    }
    return Kernel(attention_forward_kernel, parameters, constants, programs, max_registers=config.max_registers)


def split_kernels(
    call: Call, kernel: Kernel, splits: int, served: tuple[torch.dtype, int, int] | None = None
) -> tuple[dict[str, Kernel], dict[str, int]]:
    """The kernel with its keys in splits, the one that puts their results together, and what the first leaves for the
    second, in numbers of 32 bits. `served`: the last fields of `Combined`, if not all packed sequences are served."""
    dtype, (rows, *others) = out_dtype(call.dtype), call.out_shape
    shape = (splits * rows, *others)
    layout = row_layout(shape, contiguous_strides(shape), call.packed)
    names = [name for name in ("out_desc", "out_tail_desc") if name in kernel.parameters]
    moved = {name: kernel.parameters[name]._replace(buffer="parts", layout=layout) for name in names}
    buffers = {**kernel.buffers, "lse_ptr": "parts_lse"}
    forward = kernel._replace(parameters={**kernel.parameters, **moved}, buffers=buffers)
    results = Combined(dtype, call.out_shape, *served or ())
    combine = combining(results, splits, call.machine.facts, call.multiprocessors, of_forward=True)
    words = {"parts": math.prod(shape) * dtype.itemsize // 4, "parts_lse": splits * math.prod(call.lse_shape)}
    return {"forward": forward, "combine": combine._replace(buffers={"starts_ptr": "cu_seqlens_q"})}, words


def _moved_tensors(call: Call, config: HopperConfig, cache: CachedRows | None) -> dict[str, TmaTensor]:
    """The tensors that TMA moves, by the parameters of the kernel: each tensor once for either chunk of its columns."""
    dtype, v, bias, values = call.dtype, call.v, call.aux.bias, out_dtype(call.dtype)
    head_dim, head_dim_v = call.head_dims
    chunks, chunks_v = column_chunks(head_dim, dtype), value_chunks(head_dim_v)
    bounded, keys = call.bounded, config.block_n
    if cache is not None:
        bounded, keys = True, keys // cache.loads
    buffer, v_strides = ("wide_v", contiguous_strides(v.shape)) if dtype is FP8 else ("v", v.strides)
    out_strides = contiguous_strides(call.out_shape)
    moved = {}
    for name, of, of_type, ends, rows, widths, shape, strides in (
        ("q", "q", dtype, call.packed, CONSUMER_ROWS, chunks, call.q.shape, call.q.strides),
        ("k", "k", dtype, bounded, keys, chunks, call.k.shape, call.k.strides),
        ("v", buffer, values, bounded, keys, chunks_v, v.shape, v_strides),
        ("out", "out", values, call.packed, CONSUMER_ROWS, chunks_v, call.out_shape, out_strides),
    ):
        layout = row_layout(shape, strides, ends)
        for part, width in zip(("", "_tail"), widths):
            box = ((1, 1) if ends else (1,)) + (rows, 1, width) if width else None
            moved[f"{name}{part}_desc"] = TmaTensor(of, of_type, box, layout)
    # Past the end of a bias NaN, so that too small a bias is seen; rows past those of q count for nothing.
    by_bias = None if bias is None else broadcast_layout(bias.shape, bias.strides, nan_outside=True)
    box = (1, 1, CONSUMER_ROWS, config.block_n) if config.bias_by_tma else None
    return {**moved, "bias_desc": TmaTensor("bias", dtype, box, by_bias)}


def _is_shared_by_batch(table: TensorFacts | None) -> bool:
    """Whether all batch entries read one matrix of queries × keys for each head."""
    return table is not None and table.shape[0] == 1 and table.has_each_score
