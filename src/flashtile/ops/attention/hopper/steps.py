"""One query of each of a few sequences on Hopper, in the batch-invariant mode: the bits of attention's forward, with
thread blocks that share a sequence.

Shapes::

    M  rows of a tile, 64, of which the query heads that share a key/value head are there
    N  keys of a tile         D  head_dim of q and k         W  columns of the values that a thread block sums

The forward goes through the key tiles of a row from the last to the first, and its sums depend on that order. But most
of its work on a tile does not depend on the tiles before, and nothing depends on other columns of the values:

- `step_weights_kernel`: thread blocks have a head and some of the key tiles. Each finds the reference of the rows by
  the last tile, as the forward does, and stores the weights of its tiles in 16 bits, and their sums.
- `step_values_kernel`: thread blocks have a head and W columns of the values. Each adds the products of weights and
  values in the forward's order, and one warp the sums of the weights.

A reference that rises in a later tile would change the weights of those after it. `step_weights_kernel` says where that
is so (`raised`), and the forward computes these sequences once more.
"""

from typing import Any, NamedTuple

import torch

from flashtile._backends.allocate import Layout, contiguous
from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from flashtile._backends.launch import int32, pointer_to
from flashtile._backends.pipeline import Kernel
from flashtile._backends.tma import TmaTensor, row_layout, strided_layout
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.hopper.cache import CachedRows, KeyTile, box_pages, load_boxes, locate_in_cache
from flashtile.ops.attention.hopper.configs import PRODUCER_REGISTERS, HopperConfig, column_chunks, score_columns
from flashtile.ops.attention.hopper.forward_softmax import (
    LARGEST_FLOAT16_EXPONENT,
    LARGEST_WEIGHT,
    NOTHING_SEEN,
    exponentials,
    exponents,
    first_reference,
    first_sums,
    start_scores,
    wait_scores,
)
from flashtile.ops.attention.hopper.modifiers import ScoreUnits, capped
from flashtile.ops.attention.hopper.primitives import (
    LN_2,
    Chunks,
    HeadRows,
    M,
    barriers,
    make_ring,
    mask_scores,
    matrix,
    pack,
    packed_sequence,
    product_layout,
    release,
    row_maximum,
    tile_slice,
    wait_products,
)
from flashtile.ops.attention.hopper.schedule import LocatedTile
from flashtile.ops.common.checks import check_programs
from flashtile.ops.common.split_keys.plan import SplitCall, shaped_results
from flashtile.ops.common.tiles import tile_width

#: Rows whose sums one warp adds up, and tiles whose sums are on their way to it.
ROWS = gl.constexpr(16)
SUMS = gl.constexpr(8)


@aggregate
class StepConfig:
    """Constants of the kernels. `GROUP`: query heads that share a key/value head, at most `ROWS`. `AHEAD`,
    `SCORE_COLUMNS`: as in the forward. `PAGE_SIZE`: 0 without pages. The last three are those of a forward in which one
    warp loads, nobody asks for the largest scores, and queries are read from shared memory."""

    GROUP: gl.constexpr
    AHEAD: gl.constexpr
    PAGE_SIZE: gl.constexpr
    SCORE_COLUMNS: gl.constexpr
    SHARES: gl.constexpr
    MAX_SCORES: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in {**constants, "SHARES": 1, "MAX_SCORES": False, "Q_IN_REGISTERS": False}.items():
            setattr(self, name, gl.constexpr(value))


class StepProblem(NamedTuple):
    """What every role knows of the call.

    Attributes:
        batch, heads_kv: of the call. `tokens`: queries, of which each sequence has one, or none if they are packed.
        splits: thread blocks that share the keys of a head in `step_weights_kernel`.
        tiles: of keys that a sequence can have.
        scale_log2, cap_scale: `ScoreUnits`.
        lse_token, lse_head: from one query and head to the next in lse.
    """

    batch: Any
    heads_kv: Any
    tokens: Any
    splits: Any
    tiles: Any
    scale_log2: Any
    cap_scale: Any
    lse_token: Any
    lse_head: Any


class Step(NamedTuple):
    """A query and its keys.

    Attributes:
        token, head: which query, and key/value head. `pair`: both in one number.
        sequence, place, total: of the keys: number, `KeyPlace`, and how many there are.
        tiles: of keys.
    """

    token: Any
    head: Any
    pair: Any
    sequence: Any
    place: Any
    total: Any
    tiles: Any


@gluon.jit
def locate_step(pair, starts, cache, numbers, problem, N: gl.constexpr):
    """The `Step` of a pair of a query and a key/value head. `starts`: of packed queries; None where they are not."""
    token = pair // problem.heads_kv
    head = pair % problem.heads_kv
    sequence = token
    nobody = gl.to_tensor(False)
    if starts is not None:
        sequence = packed_sequence(starts, token, problem.batch, scale=1, TILE=1)
        nobody = sequence == problem.batch
        sequence = gl.minimum(sequence, problem.batch - 1)
    at = LocatedTile(sequence, head, 0, 0, 1, 0, 0)
    at, place = locate_in_cache(at, cache, numbers, problem.batch, False)
    total = gl.where(nobody, 0, at.other_length)
    return Step(token, head, pair, sequence, place, total, gl.cdiv(total, N))


class Cached(NamedTuple):
    """The keys or the values of a step: descriptors, the first row of the entry, rows from one page to the next, and
    the first column."""

    descriptors: Any
    begin: Any
    apart: Any
    column: Any


@gluon.jit
def load_tile(ring, slot, cached, tile, step, config):
    """Producer: loads tile number `tile` into a slot as soon as that is free."""
    row = tile * ring.ROWS
    head = HeadRows(step.sequence, step.head, cached.begin, step.total)
    if config.PAGE_SIZE > 0:
        pages = box_pages(cached.descriptors.main, row, step.total, step.place.table, config, ring.ROWS, 0)
        ring.wait_empty(slot)
        rows = KeyTile(head, row, pages, cached.apart)
        load_boxes(ring, slot, cached.descriptors, rows, cached.column, config, 0, barrier=slot.place)
    else:
        ring.wait_empty(slot)
        ring.load(slot, cached.descriptors, head, row, True, cached.column)


# Weights


@gluon.jit
def step_weights_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, weights_ptr, sums_ptr, references_ptr, raised_ptr, starts, cache,
    numbers, problem,
    GROUP: gl.constexpr, AHEAD: gl.constexpr, PAGE_SIZE: gl.constexpr, SCORE_COLUMNS: gl.constexpr,
    KEY_LOADS: gl.constexpr, STAGES: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`q`: `[tokens, group, heads_kv, head_dim]`. `cache`, `numbers`: those of `CachedRows`. It writes, for each pair
    of a query and a key/value head, weights `[group, tiles · N]`, in parts the sums of each tile `[tiles, group, 8]`,
    references `[group]`, and whether these would have to rise: `[splits]`."""
    config = StepConfig(GROUP=GROUP, AHEAD=AHEAD, PAGE_SIZE=PAGE_SIZE, SCORE_COLUMNS=SCORE_COLUMNS)
    queries = Chunks(q_desc, q_tail_desc)
    keys = Chunks(k_desc, k_tail_desc)
    q = make_ring(queries, STAGES=1, READERS=0)
    k = make_ring(keys, STAGES=STAGES, READERS=1, KEYS=KEY_LOADS * k_desc.block_shape[-3])
    program = gl.program_id(0)
    split = program % problem.splits
    step = locate_step(program // problem.splits, starts, cache, numbers, problem, k.ROWS)
    # Shares of the tiles, counted from the last one. All begin with that one.
    share = step.tiles // problem.splits
    longer = step.tiles % problem.splits
    first = split * share + gl.minimum(split, longer)
    last = first + share + gl.where(split < longer, 1, 0)
    fence_async_shared()
    written = Written(weights_ptr, sums_ptr, references_ptr, raised_ptr)
    gl.warp_specialize(
        [
            (weigh_share, (q, k, step, split, first, last, written, problem, config)),
            (load_keys, (q, k, queries, keys, step, first, last, config)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


class Written(NamedTuple):
    """Pointers to the results of `step_weights_kernel`."""

    weights: Any
    sums: Any
    references: Any
    raised: Any


class KeyRing(NamedTuple):
    """The ring of keys, as the functions of the forward know it."""

    k: Any
    k_tail: Any


@gluon.jit
def load_keys(q, k, queries, keys, step, first, last, config):
    """Producer: the query, the last tile of keys, and those of this share."""
    if first < last:
        rows = HeadRows(step.token, step.head, 0, config.GROUP)
        q.load(q.slot(0), queries, rows, 0, False)
        cached = Cached(keys, step.place.k_begin, step.place.k_apart, 0)
        load_tile(k, k.slot(0), cached, step.tiles - 1, step, config)
        count = 1
        for done in range(gl.maximum(first, 1), last):
            load_tile(k, k.slot(count), cached, step.tiles - 1 - done, step, config)
            count += 1


@gluon.jit
def weigh_share(q, k, step, split, first, last, written, problem, config):
    """Weights and sums of this share of the tiles."""
    dtype: gl.constexpr = k.tiles.dtype
    row = gl.arange(0, M, gl.SliceLayout(1, product_layout(k.ROWS)))
    raised = gl.to_tensor(0)
    if first < last:
        q.acquire(q.slot(0))
        query = q.operand(q.slot(0))
        s = tile_scores(query, k, k.slot(0), step.tiles - 1, step, problem, config)
        reference = first_reference(row_maximum(s) * problem.scale_log2, dtype)
        if first == 0:
            probs = gl.exp2(exponents(s, problem.scale_log2, reference))
            sums = first_sums(probs, dtype, config)
            store_weights(probs, sums, step.tiles - 1, step, written, problem, config)
            gl.store(written.references + step.pair * config.GROUP + row, reference, mask=row < config.GROUP)
        excess = row * 0.0
        count = 1
        for done in range(gl.maximum(first, 1), last):
            tile = step.tiles - 1 - done
            s = tile_scores(query, k, k.slot(count), tile, step, problem, config)
            probs, _, sums, _ = exponentials(s, problem.scale_log2, reference, None, None, None, config)
            if dtype == gl.float16:
                highest = gl.maximum(row_maximum(s) * problem.scale_log2, NOTHING_SEEN)
                excess = gl.maximum(excess, highest - reference - LARGEST_FLOAT16_EXPONENT)
            else:
                largest = gl.convert_layout(gl.max(sums, 1), row.type.layout)
                excess = gl.maximum(excess, gl.where(largest > LARGEST_WEIGHT, 1.0, 0.0))
            store_weights(probs, sums, tile, step, written, problem, config)
            count += 1
        raised = (gl.max(excess, 0) > 0).to(gl.int32)
    gl.store(written.raised + step.pair * problem.splits + split, raised)


@gluon.jit
def tile_scores(query, k, slot, tile, step, problem, config):
    """Scores `[M, N]`, -inf past the last key."""
    s_layout: gl.constexpr = product_layout(k.ROWS)
    zeros = gl.zeros([M, k.ROWS], gl.float32, s_layout)
    k.acquire(slot)
    rings = KeyRing(k, None)
    s = wait_scores(start_scores(query, rings, slot, zeros, config), rings, slot, 0)
    if problem.cap_scale is not None:
        s = capped(s, problem.cap_scale)
    if (tile + 1) * k.ROWS > step.total:
        row = gl.arange(0, M, gl.SliceLayout(1, s_layout))
        s = mask_scores(s, row, tile * k.ROWS, 0, step.total, 0, 0, HAS_LEFT=False, HAS_RIGHT=False)
    return s


@gluon.jit
def store_weights(probs, sums, tile, step, written, problem, config):
    """Stores weights and sums of a tile."""
    N: gl.constexpr = probs.shape[1]
    dtype: gl.constexpr = written.weights.dtype.element_ty
    row = gl.arange(0, M, gl.SliceLayout(1, probs.type.layout))
    line = step.pair.to(gl.int64) * problem.tiles * N * config.GROUP
    column = tile * N + gl.arange(0, N, gl.SliceLayout(0, probs.type.layout))
    places = written.weights + line + (row * problem.tiles * N)[:, None] + column[None, :]
    weights = gl.convert_layout(pack(probs, dtype), probs.type.layout)
    gl.store(places, weights, mask=(row < config.GROUP)[:, None])
    of_sums: gl.constexpr = sums.type.layout
    sum_row = gl.arange(0, M, gl.SliceLayout(1, of_sums))
    part = gl.arange(0, 8, gl.SliceLayout(0, of_sums))
    line = (step.pair.to(gl.int64) * problem.tiles + tile) * config.GROUP
    places = written.sums + (line + sum_row)[:, None] * 8 + part[None, :]
    gl.store(places, sums, mask=(sum_row < config.GROUP)[:, None])


# Values


@gluon.jit
def step_values_kernel(
    weights_desc, v_desc, sums_ptr, references_ptr, out_ptr, lse_ptr, starts, cache, numbers, problem,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, KEY_LOADS: gl.constexpr, STAGES: gl.constexpr,
    VALUE_COLUMNS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`weights`: `[pairs, group, tiles · N]`. out is `[tokens, heads, head_dim_v]`, contiguous."""
    config = StepConfig(GROUP=GROUP, AHEAD=0, PAGE_SIZE=PAGE_SIZE, SCORE_COLUMNS=0)
    WIDTH: gl.constexpr = v_desc.block_shape[-1]
    PARTS: gl.constexpr = (VALUE_COLUMNS + WIDTH - 1) // WIDTH
    v = make_ring(Chunks(v_desc, None), STAGES=STAGES, READERS=1, KEYS=KEY_LOADS * v_desc.block_shape[-3])
    shape: gl.constexpr = [STAGES, 1, M, v.ROWS]
    weights = gl.allocate_shared_memory(weights_desc.dtype, shape, weights_desc.layout)
    weights_full = barriers(STAGES, 1)
    sums = gl.allocate_shared_memory(gl.float32, [M, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums_full = barriers(1, 32)
    program = gl.program_id(0)
    part = program % PARTS
    step = locate_step(program // PARTS, starts, cache, numbers, problem, v.ROWS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                sum_values,
                (
                    v, weights, weights_full, sums, sums_full, step, part, references_ptr, out_ptr, lse_ptr, problem,
                    config, VALUE_COLUMNS,
                ),
            ),
            (load_values, (v, weights, weights_full, weights_desc, v_desc, step, part * WIDTH, config)),
            (sum_rows, (sums, sums_full, sums_ptr, step, problem, config)),
        ],
        [1, 1],
        [PRODUCER_REGISTERS, SUM_REGISTERS],
    )  # fmt: skip


@gluon.jit
def load_values(v, weights, weights_full, weights_desc, v_desc, step, column, config):
    """Producer: weights and values of all tiles, from the last one on. A tile of both has one place."""
    THERE: gl.constexpr = weights_desc.block_shape[-2]
    BYTES: gl.constexpr = THERE * v.ROWS * v.tiles.dtype.primitive_bitwidth // 8
    cached = Cached(Chunks(v_desc, None), step.place.v_begin, step.place.v_apart, column)
    for done in range(step.tiles):
        tile = step.tiles - 1 - done
        slot = v.slot(done)
        load_tile(v, slot, cached, tile, step, config)
        full = weights_full.index(slot.place)
        mbarrier.expect(full, BYTES)
        there = tile_slice(weights.index(slot.place), 0, THERE, 1)  # nobody reads what other rows add up to
        tma_load(weights_desc, [step.pair, 0, tile * v.ROWS], full, there)


@gluon.jit
def sum_rows(sums, sums_full, sums_ptr, step, problem, config):
    """One warp: the sums of the weights of all tiles, in parts, in the order of the tiles."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    part = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    places = sums_ptr + step.pair.to(gl.int64) * problem.tiles * config.GROUP * 8 + row * 8 + part
    total = gl.zeros([ROWS, 8], gl.float32, layout)
    for done in range(0, step.tiles, SUMS):
        found = ()
        for each in gl.static_range(SUMS):
            tile = step.tiles - 1 - done - each
            mask = (row < config.GROUP) & (part >= 0) & (tile >= 0)
            found = found + (gl.load(places + tile * config.GROUP * 8, mask=mask, other=0.0),)
        for each in gl.static_range(SUMS):
            total += found[each]
    sums.slice(0, ROWS, dim=0).store(total)
    release(sums_full.index(0))


@gluon.jit
def sum_values(
    v, weights, weights_full, sums, sums_full, step, part, references_ptr, out_ptr, lse_ptr, problem, config,
    VALUE_COLUMNS: gl.constexpr,
):  # fmt: skip
    """Sums of values, out and lse."""
    o_layout: gl.constexpr = product_layout(v.WIDTH)
    of_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    out = gl.zeros([M, v.WIDTH], gl.float32, o_layout)
    in_flight = warpgroup_mma_init(out)
    for done in range(step.tiles):
        slot = v.slot(done)
        mbarrier.wait(weights_full.index(slot.place), slot.phase)
        v.acquire(slot)
        p = matrix(weights.index(slot.place), M, v.ROWS)
        in_flight = warpgroup_mma(p, v.main_operand(slot), in_flight, is_async=True)
        if done > 0:
            wait_products(1)
            v.release(v.slot(done - 1))
    out = warpgroup_mma_wait(0, [in_flight])
    mbarrier.wait(sums_full.index(0), 0)
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    row_sum = gl.convert_layout(gl.sum(sums.load(of_sums), 1), of_rows)
    row = gl.arange(0, M, of_rows)
    there = row < config.GROUP
    inverse = gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)
    reference = gl.load(references_ptr + step.pair * config.GROUP + row, mask=there & (step.tiles > 0), other=0.0)
    lse = gl.where(row_sum == 0.0, float("-inf"), reference * LN_2 + gl.log(row_sum))
    head = step.head * config.GROUP + row
    statistic = step.token.to(gl.int64) * problem.lse_token + head * problem.lse_head
    gl.store(lse_ptr + statistic, lse, mask=there & (part == 0))
    out = out * inverse[:, None]
    column = part * v.WIDTH + gl.arange(0, v.WIDTH, gl.SliceLayout(0, o_layout))
    line = step.pair.to(gl.int64) * config.GROUP
    places = out_ptr + (line + row)[:, None] * VALUE_COLUMNS + column[None, :]
    stored = there[:, None] & (column < VALUE_COLUMNS)[None, :]
    gl.store(places, out.to(out_ptr.dtype.element_ty), mask=stored)


#: Tiles of keys, and of weights and values, on chip; bytes of the latter at most.
_KEY_STAGES, _VALUE_STAGES, _VALUE_BYTES = 4, 9, 216 * 1024
#: Columns of the values that a thread block sums at least.
_LEAST_COLUMNS = 16
#: Rows of the weights that a copy moves: a multiple of those that are swizzled together.
_BOX_ROWS = 8
#: Registers of a thread that sums weights, and of all threads on average.
_SUM_REGISTERS, _REGISTERS = 96, 128


class StepKernels(NamedTuple):
    """The kernels of a call, the layouts of out, lse and the flags of sequences that the forward computes again, and
    the sizes of what kernels leave for one another."""

    kernels: dict[str, Kernel]
    outputs: dict[str, Layout]
    scratch: dict[str, int]


def step_kernels(call: SplitCall, described: Call, config: HopperConfig, rows: CachedRows, blocks: int) -> StepKernels:
    """`described`: the call as attention over the cache. `config`: of its forward. `blocks`: multiprocessors."""
    batch, _, heads, heads_kv, head_dim, head_dim_v = call.shape
    tokens, group = call.total_q or batch, heads // heads_kv
    pairs, tiles = tokens * heads_kv, -(-call.capacity // config.block_n)
    splits = min(max(blocks // pairs, 1), tiles)
    width_v = tile_width(head_dim_v)
    columns = width_v
    while columns > _LEAST_COLUMNS and 2 * pairs * (width_v // columns) <= blocks:
        columns //= 2
    parts = -(-head_dim_v // columns)
    check_programs("q", pairs * max(splits, parts))
    packed = call.total_q is not None
    batch_stride, row_stride, head_stride = call.strides[0]
    token_stride = row_stride if packed else batch_stride
    units = ScoreUnits.from_spec(described.spec)
    box = 1, 1, config.block_n // rows.loads, 1
    k, v = described.k, described.v
    padded = tiles * config.block_n
    of_queries = strided_layout(
        (tokens, group, heads_kv, head_dim), (token_stride, head_stride, group * head_stride, 1)
    )
    of_keys = row_layout(k.shape, k.strides, bounded=True)
    chunks = dict(zip(("", "_tail"), column_chunks(head_dim)))
    parameters = {
        **{
            f"q{part}_desc": TmaTensor("q", call.dtype, (1, M.value, 1, width) if width else None, of_queries)
            for part, width in chunks.items()
        },
        **{
            f"k{part}_desc": TmaTensor("k", call.dtype, (*box, width) if width else None, of_keys)
            for part, width in chunks.items()
        },
        "v_desc": TmaTensor("v", call.dtype, (*box, columns), row_layout(v.shape, v.strides, bounded=True)),
        "weights_desc": TmaTensor(
            "weights", call.dtype, (1, _BOX_ROWS * -(-group // _BOX_ROWS), config.block_n),
            strided_layout((pairs, group, padded), (group * padded, padded, 1)),
        ),
        "weights_ptr": pointer_to(call.dtype, 16),
        **dict.fromkeys(("sums_ptr", "references_ptr", "lse_ptr"), pointer_to(torch.float32)),
        "raised_ptr": pointer_to(torch.int32),
        "out_ptr": pointer_to(call.dtype, 16),
        "starts": pointer_to(call.index_dtypes[4]),
        "cache": rows.addresses,
        "numbers": rows.numbers,
        "problem": StepProblem(
            batch=int32(batch),
            heads_kv=int32(heads_kv),
            tokens=int32(tokens),
            splits=int32(splits),
            tiles=int32(tiles),
            scale_log2=units.scale_log2,
            cap_scale=units.cap_scale,
            lse_token=int32(1 if packed else heads),
            lse_head=int32(tokens if packed else 1),
        ),
    }  # fmt: skip
    constants = {
        "GROUP": group,
        "AHEAD": config.ahead,
        "PAGE_SIZE": rows.page_size,
        "SCORE_COLUMNS": score_columns(head_dim),
        "KEY_LOADS": rows.loads,
        "VALUE_COLUMNS": head_dim_v,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "SUM_REGISTERS": _SUM_REGISTERS,
    }
    value_stages = min(_VALUE_STAGES, _VALUE_BYTES // (2 * config.block_n * (M.value + columns)))
    kernels = {
        "weights": Kernel(
            step_weights_kernel, parameters, {**constants, "STAGES": _KEY_STAGES}, pairs * splits,
            buffers={"raised_ptr": "flags"}, max_registers=_REGISTERS,
        ),
        "values": Kernel(
            step_values_kernel, parameters, {**constants, "STAGES": value_stages}, pairs * parts,
            max_registers=_REGISTERS,
        ),
    }  # fmt: skip
    out, lse = shaped_results(call)
    outputs = {"out": out, "lse": lse, "flags": contiguous((tokens, heads_kv * splits), torch.int32)}
    scratch = {
        "weights": pairs * group * padded // 2,
        "sums": pairs * tiles * group * 8,
        "references": pairs * group,
    }
    return StepKernels(kernels, outputs, scratch)
