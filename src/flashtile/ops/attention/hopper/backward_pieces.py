"""The vocabulary of the Hopper backward kernels: handovers between warpgroups, query tiles that see a key tile,
statistics, products and sums, and 16-bit pairs.

Letters as in `pieces` and `backward`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.pieces import (
    WARPGROUP,
    Chunks,
    HeadRows,
    Slot,
    await_stores,
    barriers,
    coordinates,
    matrix,
    matrix_layout,
    place_of,
    release,
)

#: Rows of a warpgroup's matrix product: the keys of one warpgroup, and the queries of one sum of dq.
ROWS = gl.constexpr(64)

#: Columns of statistics that are operands: three parts of a number, and zeros, because a product takes no fewer.
STATISTIC_COLUMNS = gl.constexpr(16)


@aggregate
class Handover:
    """Tiles `[64, M]` that warpgroups hand to another one through shared memory. A stage has a tile of each of its
    `WRITERS`. It owns a barrier of either kind for each stage and knows their phases: callers count stages."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    WRITERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES, WRITERS):
        self.tiles, self.full, self.empty = tiles, full, empty
        self.STAGES, self.WRITERS = gl.constexpr(STAGES), gl.constexpr(WRITERS)

    @gluon.jit
    def slot(self, count):
        place, phase = place_of(count, self.STAGES)
        return Slot(place, phase)

    @gluon.jit
    def tile(self, slot, WRITER: gl.constexpr = 0):
        """The tile of one writer, in shared memory."""
        return self.tiles.index(slot.place * self.WRITERS + WRITER)

    @gluon.jit
    def wait_empty(self, slot):
        """Writer: waits until the reader has released what was in the slot before."""
        mbarrier.wait(self.empty.index(slot.place), slot.phase ^ 1)

    @gluon.jit
    def publish(self, slot):
        """Writer: its tile is there."""
        mbarrier.arrive(self.full.index(slot.place), count=1)

    @gluon.jit
    def wait_released(self, slot):
        """Writer: waits until the reader has released what is in the slot now."""
        mbarrier.wait(self.empty.index(slot.place), slot.phase)

    @gluon.jit
    def acquire(self, slot):
        """Reader: waits until the tiles of all writers are there."""
        mbarrier.wait(self.full.index(slot.place), slot.phase)

    @gluon.jit
    def release(self, slot):
        """Reader: the tiles are no longer read."""
        release(self.empty.index(slot.place))


@gluon.jit
def make_handover(dtype: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, WRITERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(dtype, [STAGES * WRITERS, ROWS, M], matrix_layout(M))
    return Handover(tiles, barriers(STAGES, WRITERS), barriers(STAGES, WARPGROUP), STAGES, WRITERS)


class Statistics(NamedTuple):
    """lse and delta of the query tiles on chip. They arrive with the queries. `ones`: the other operand where they are
    operands, `[64, 16]` with ones in the first three columns; else None."""

    tiles: Any
    ones: Any


class DqSums(NamedTuple):
    """The float32 buffer in which dq is summed. `desc` and `staging`: how TMA gets there, or None. `turns_ptr`: how
    many key tiles have added to the dq of each query tile; None where they add in no order."""

    sums_ptr: Any
    desc: Any
    staging: Any
    turns_ptr: Any


class BiasStores(NamedTuple):
    """How the gradient of a bias that no two scores share leaves: by TMA, through a place on chip for 64 queries and
    keys."""

    descriptor: Any
    place: Any


class Outputs(NamedTuple):
    """How what `sum_dq` makes leaves: dq by `DqSums` or `DqStores`, the gradient of a bias by `BiasStores`. None for
    those that a call does not need."""

    sums: Any
    stores: Any
    bias: Any


class DqStores(NamedTuple):
    """How dq leaves that no second key tile adds to: by TMA, through places on chip for 64 queries and the columns of a
    product. Both are `Chunks`; the tail is of the last columns, where these are fewer."""

    descriptors: Any
    places: Any


@gluon.jit
def make_sums_staging(desc, config):
    """The place on chip from which TMA adds."""
    TOGETHER: gl.constexpr = desc.block_shape[0]
    if TOGETHER == config.SUM_COLUMNS:
        staging = gl.allocate_shared_memory(gl.float32, desc.block_shape, desc.layout)
    else:
        places: gl.constexpr = [config.SUM_COLUMNS // TOGETHER] + desc.block_shape
        staging = gl.allocate_shared_memory(gl.float32, places, desc.layout)
    return staging


@gluon.jit
def place_of_dq(desc, staging):
    """A place on chip from which TMA stores dq. `staging`: that of the sums, which are not added to meanwhile; None
    where nothing is summed."""
    if staging is None:
        place = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    else:
        place = reinterpret(staging, desc.dtype, desc.block_shape, desc.layout)
    return place


@gluon.jit
def query_tile_ranges(
    first, keys, shift, rows, window_left, window_right,
    N: gl.constexpr, M: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """The query tiles `[begin, end)` that see some of the `N` keys from `first` on, and the tiles
    `[full_begin, full_end)` among them in which every row sees all of these keys. `shift`: the key on the diagonal of
    row 0."""
    last = gl.minimum(first + N, keys) - 1
    tiles = gl.cdiv(rows, M)
    begin = 0
    full_begin = 0
    end = tiles
    full_end = tiles
    if HAS_RIGHT:
        begin = gl.maximum(first - shift - window_right, 0) // M
        full_begin = gl.cdiv(gl.maximum(last - shift - window_right, 0), M)
    if HAS_LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(last - shift + window_left + 1, 0), M))
        full_end = gl.maximum(first - shift + window_left + 1, 0) // M
    # Keys past the end are zeros. Their weights must not count as real ones.
    full_end = gl.where(first + N > keys, 0, full_end)
    return begin, full_begin, full_end, gl.maximum(end, begin)


#: Columns of a product. A product of 256 does not compile in a kernel of four warpgroups, for want of registers.
_BLOCK = gl.constexpr(128)


@gluon.jit
def columns_of(ring, slot, COLUMN: gl.constexpr, COUNT: gl.constexpr):
    """`COUNT` columns of a tile of a ring, all in one chunk."""
    if COLUMN < ring.WIDTH:
        columns = slice_of(matrix(ring.tiles.index(slot.place), ring.ROWS, ring.WIDTH), COLUMN, COUNT, 1)
    else:
        tail = matrix(ring.tail.index(slot.place), ring.ROWS, ring.TAIL)
        columns = slice_of(tail, COLUMN - ring.WIDTH, COUNT, 1)
    return columns


@gluon.jit
def slice_of(tile, FIRST: gl.constexpr, COUNT: gl.constexpr, DIM: gl.constexpr):
    """`COUNT` rows (0) or columns (1) of a tile."""
    if COUNT < tile.shape[DIM]:
        tile = tile.slice(FIRST, COUNT, dim=DIM)
    return tile


@gluon.jit
def start_transposed(a, b, FIRST: gl.constexpr, zeros, TAIL: gl.constexpr):
    """Starts `a bᵀ` of both chunks of head_dim, with as many rows of b from `FIRST` on as `zeros` has columns."""
    COUNT: gl.constexpr = zeros.shape[1]
    s = warpgroup_mma(a.main, slice_of(b.main, FIRST, COUNT, 0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if TAIL > 0:
        s = warpgroup_mma(a.tail, slice_of(b.tail, FIRST, COUNT, 0).permute([1, 0]), s, is_async=True)
    return s


@gluon.constexpr_function
def _sum_layout(COLUMNS):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon.jit
def wide_zeros(ring):
    """A sum as wide as the tiles of a ring, `[64, WIDTH + TAIL]`, in two chunks: at most `_BLOCK` columns, and what is
    left. Where nothing is left, the second one is not used."""
    COLUMNS: gl.constexpr = min(ring.WIDTH, _BLOCK)
    MORE: gl.constexpr = ring.TAIL if ring.TAIL > 0 else max(ring.WIDTH - _BLOCK, 64)
    main = gl.zeros([ROWS, COLUMNS], gl.float32, _sum_layout(COLUMNS))
    return Chunks(main, gl.zeros([ROWS, MORE], gl.float32, _sum_layout(MORE)))


@gluon.constexpr_function
def products_of_sum(ring):
    """How many products add one term to a `wide_zeros` sum."""
    return 2 if ring.TAIL > 0 or ring.WIDTH > 128 else 1


@gluon.jit
def start_sum(a, b, FIRST: gl.constexpr, total, TAIL: gl.constexpr):
    """Starts `total += a b`, with `a` of 16 bits in registers and as many rows of b from `FIRST` on."""
    WIDTH: gl.constexpr = b.main.shape[1]
    COLUMNS: gl.constexpr = min(WIDTH, _BLOCK)
    rows = slice_of(b.main, FIRST, a.shape[1], 0)
    main = _start_product(a, slice_of(rows, 0, COLUMNS, 1), total.main)
    tail = total.tail
    if TAIL > 0:
        tail = _start_product(a, slice_of(b.tail, FIRST, a.shape[1], 0), tail)
    elif WIDTH > COLUMNS:
        tail = _start_product(a, rows.slice(COLUMNS, WIDTH - COLUMNS, dim=1), tail)
    return Chunks(main, tail)


@gluon.jit
def _start_product(a, b, total):
    layout: gl.constexpr = gl.DotOperandLayout(0, _sum_layout(b.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(a, layout, assert_trivial=True), b, total, is_async=True)


@gluon.jit
def wait_sum(IN_FLIGHT: gl.constexpr, ring, total):
    """Waits until at most `IN_FLIGHT` products are in flight."""
    main, tail = total.main, total.tail
    if products_of_sum(ring) > 1:
        main, tail = warpgroup_mma_wait(IN_FLIGHT, [main, tail])
    else:
        main = warpgroup_mma_wait(IN_FLIGHT, [main])
    return Chunks(main, tail)


@gluon.jit
def start_dq(slot, key_slot, part: gl.constexpr, column: gl.constexpr, config, shared):
    """Starts `ds k` of 64 queries, `part`, and `SUM_COLUMNS` columns from `column` on or as many as are left, over all
    keys of the tile. `key_slot`: of the first 64 keys."""
    k, dscores = shared.k, shared.dscores
    COLUMNS: gl.constexpr = min(config.SUM_COLUMNS, k.WIDTH + k.TAIL - column)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for which in gl.static_range(dscores.WRITERS):
        ds = dscores.tile(slot, which).permute([1, 0])
        if config.M > ROWS:
            ds = ds.slice(part * ROWS, ROWS)
        k_tile = columns_of(k, Slot(key_slot.place + which, key_slot.phase), column, COLUMNS)
        dq = warpgroup_mma(ds, k_tile, dq, use_acc=which > 0, is_async=True)
    return dq


@gluon.jit
def hand_over_dq(outputs, dq, rows, tile, part, line, COLUMN: gl.constexpr, problem, config):
    """Stores a `[64, columns]` block of dq, of part `part` of query tile `tile` of a head (`HeadRows`), or adds it to
    the sums, whose part begins at line `line` of 64 numbers."""
    row = tile * config.M + part * ROWS
    if config.SINGLE_KEY_TILE:
        store_dq(outputs.stores, dq * problem.scale, rows, row, COLUMN, config)
    elif problem.lone_tiles is not None:
        if tile < problem.lone_tiles:
            store_dq(outputs.stores, dq * problem.scale, rows, row, COLUMN, config)
        else:
            add_to_dq(outputs.sums, dq, line + COLUMN, config)
    else:
        add_to_dq(outputs.sums, dq, line + COLUMN, config)


@gluon.jit
def add_to_dq(sums, dq, line, config):
    """Adds a `[64, columns]` block of dq to the sums, from line `line` of 64 numbers on.

    There it is stored as `[columns / 8, 4, 8, 4, 2, 2]`: eight columns at a time, then warps, threads in rows of four,
    and two rows with two columns each. So threads write four numbers side by side, into shared memory without bank
    conflicts.
    """
    BLOCKS: gl.constexpr = dq.shape[1] // 8
    if config.SUMS_BY_TMA:
        tma_store_wait(0)  # until the block before has been read from there
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
        parts = gl.permute(gl.reshape(dq, [4, 2, 8, BLOCKS, 4, 2]), [3, 0, 2, 4, 1, 5])
        places = reinterpret(sums.staging, gl.float32, [config.SUM_COLUMNS // 8, 4, 8, 4, 2, 2], plain)
        slice_of(places, 0, BLOCKS, 0).store(parts)
        fence_async_shared()
        TOGETHER: gl.constexpr = sums.desc.block_shape[0]
        if TOGETHER == config.SUM_COLUMNS:
            tma_reduce_add(sums.desc, (line, 0), sums.staging)
        else:
            for some in gl.static_range(dq.shape[1] // TOGETHER):
                tma_reduce_add(sums.desc, (line + some * TOGETHER, 0), sums.staging.index(some))
    else:
        ADDITIONS: gl.constexpr = _additions(BLOCKS)
        OPERANDS: gl.constexpr = _addition_operands(BLOCKS)
        base = (sums.sums_ptr + line.to(gl.int64) * 64).to(gl.int64)
        gl.inline_asm_elementwise(ADDITIONS, OPERANDS, [dq, base], dtype=gl.int32, is_pure=False, pack=4 * BLOCKS)


@gluon.jit
def store_dq(stores, dq, rows, row, COLUMN: gl.constexpr, config):
    """Stores a `[64, columns]` block of dq, which no other key tile adds to, from `row` of a sequence (`HeadRows`) and
    column `COLUMN` on. Rows past the end are not written."""
    COLUMNS: gl.constexpr = dq.shape[1]
    tma_store_wait(0)  # until the block before has been read from there
    descriptor = stores.descriptors.main if COLUMNS == config.SUM_COLUMNS else stores.descriptors.tail
    place = stores.places.main if COLUMNS == config.SUM_COLUMNS else stores.places.tail
    matrix(place, ROWS, COLUMNS).store(dq.to(place.dtype))
    fence_async_shared()
    tma_store(descriptor, coordinates(rows, row, COLUMN, config.PACKED), place)


@gluon.jit
def store_bias_gradient(stores, dscores, slot, sequence, head, first_query, first_key, config):
    """Stores the `ds` of a step, from its transposed tiles, as the gradient of a head's bias."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    for which in gl.static_range(dscores.WRITERS):
        for part in gl.static_range(config.M // ROWS):
            ds = slice_of(dscores.tile(slot, which), part * ROWS, ROWS, 1).permute([1, 0]).load(layout)
            tma_store_wait(0)  # until the tile before has been read from there
            matrix(stores.place, ROWS, ROWS).store(ds)
            fence_async_shared()
            place = (sequence, head, first_query + part * ROWS, first_key + which * ROWS)
            tma_store(stores.descriptor, place, stores.place)


@gluon.constexpr_function
def _additions(BLOCKS):
    """PTX that adds four numbers at a time to the place of a thread. The barrier keeps ptxas from starting the next
    block's product before it: with two blocks in registers, all products would wait for one another (C7512)."""
    count = 4 * BLOCKS
    place = ["mov.u32 thread, %tid.x;", "and.b32 thread, thread, 127;", "mul.wide.u32 place, thread, 16;"]
    place += [f"add.u64 place, place, ${2 * count};"]
    numbers = [", ".join(f"${count + 4 * block + i}" for i in range(4)) for block in range(BLOCKS)]
    additions = [
        f"red.relaxed.gpu.global.add.v4.f32 [place + {2048 * block}], {{{four}}};" for block, four in enumerate(numbers)
    ]
    results = [f"mov.b32 ${i}, 0;" for i in range(count)]  # nobody reads them
    lines = [".reg .b32 thread;", ".reg .b64 place;", *place, *additions, "bar.warp.sync 0xffffffff;", *results]
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _addition_operands(BLOCKS):
    return ",".join(["=r"] * (4 * BLOCKS) + ["f"] * (4 * BLOCKS) + ["l"] * (4 * BLOCKS))


@gluon.jit
def make_ones(desc):
    """The other operand of statistics that are operands (`Statistics.ones`)."""
    ones = gl.allocate_shared_memory(gl.bfloat16, [ROWS, STATISTIC_COLUMNS], desc.layout)
    registers: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    column = gl.arange(0, STATISTIC_COLUMNS, gl.SliceLayout(0, registers))[None, :]
    ones.store(gl.where(column + gl.zeros([ROWS, 1], gl.int32, registers) < 3, 1.0, 0.0).to(gl.bfloat16))
    return ones


#: The two statistics of a query, in the order in which they are stored.
LSE, DELTA = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def subtract_statistic(
    product, statistics, slot, KIND: gl.constexpr, FIRST: gl.constexpr, QUERIES: gl.constexpr, config
):  # fmt: skip
    """Takes lse or delta (`KIND`) of `QUERIES` queries from `FIRST` on off a product that is in flight, whose columns
    are these queries. Returns the product and what is left to subtract, `[QUERIES]`.

    Either one more product takes them off, and 0 is left. Or they are loaded, lse in units of log2.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    if config.STATISTICS_MULTIPLIED:
        parts = statistics.tiles.index(slot.place).slice(KIND * config.M + FIRST, QUERIES)
        product = warpgroup_mma(statistics.ones, parts.permute([1, 0]), product, is_async=True)
        left = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, s_layout))
    else:
        left = _load_statistic(statistics.tiles.index(slot.place), KIND, FIRST, QUERIES, s_layout)
    return product, left


@gluon.constexpr_function
def _statistics_layout(QUERIES):
    """Each thread holds the four numbers of each 16 columns that its fragment of the scores has."""
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    sixteens = [[1 << bit, 0, 0, 0] for bit in range((QUERIES // 16).bit_length() - 1)]
    registers = [[0, 0, 0, 1], [0, 0, 1, 0], *sixteens]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0, 0], [0, 0, 0, 0]], [], [QUERIES // 16, 4, 2, 2])


@gluon.jit
def _load_statistic(tile, KIND: gl.constexpr, FIRST: gl.constexpr, QUERIES: gl.constexpr, s_layout: gl.constexpr):
    """lse (in units of log2) or delta of `QUERIES` queries of a tile, the columns of `sᵀ`.

    Query `16·a + 8·b + 2·t + e` is stored at `16·a + 4·t + 2·b + e`, so that the numbers of thread `t` of a row lie
    side by side.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    layout: gl.constexpr = _statistics_layout(QUERIES)
    TILE: gl.constexpr = tile.shape[1]
    sixteens = reinterpret(tile, gl.float32, [2, TILE // 16, 4, 2, 2], plain).index(KIND)
    quads = slice_of(sixteens, FIRST // 16, QUERIES // 16, 0).load(layout)
    numbers = gl.reshape(gl.permute(quads, [0, 2, 1, 3]), [QUERIES])
    return gl.convert_layout(numbers, gl.SliceLayout(0, s_layout), assert_trivial=True)


@gluon.jit
def mask_probs(p, key, first_query, work, problem, config):
    """`pᵀ` `[keys, queries]`, 0 where the query does not see the key."""
    query = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
    last = work.keys - 1 + query * 0
    if config.HAS_RIGHT:
        last = gl.minimum(last, query + (work.shift + problem.window.right))
    visible = key[:, None] <= last[None, :]
    if config.HAS_LEFT:
        visible &= key[:, None] >= (query + (work.shift - problem.window.left))[None, :]
    return gl.where(visible, p, 0.0)


@gluon.constexpr_function
def _pin(WORDS):
    """An event if one of the first four words is negative, and all words as they are."""
    words = [f"${WORDS + i}" for i in range(WORDS)]
    some = f"lop3.b32 some, {words[0]}, {words[1]}, {words[2]}, 0xfe; or.b32 some, some, {words[3]};"
    event = "setp.lt.s32 negative, some, 0; @negative pmevent 1;"
    moves = " ".join(f"mov.b32 ${i}, {word};" for i, word in enumerate(words))
    return "{ .reg .pred negative; .reg .b32 some; " + some + event + moves + "}"


@gluon.constexpr_function
def _pin_operands(WORDS):
    return ",".join(["=r"] * WORDS + ["r"] * WORDS)


@gluon.jit
def pin_pairs_before_product(weights):
    """The same rounded weights, computed before everything that follows, as in `pieces.pin_before_wait`.

    ptxas moves exponentials down past the start of the next product. Then it has no registers for the scores, and makes
    all products wait for one another (C7512).
    """
    WORDS: gl.constexpr = min(16, weights.shape[1] // 4)
    PIN: gl.constexpr = _pin(WORDS)
    OPERANDS: gl.constexpr = _pin_operands(WORDS)
    return gl.inline_asm_elementwise(PIN, OPERANDS, [weights], dtype=weights.dtype, is_pure=False, pack=2 * WORDS)


@gluon.jit
def unpack(x, dtype: gl.constexpr):
    """Undoes `pack`, also in pairs."""
    if dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b32 x; shl.b32 x, $2, 16; mov.b32 $0, x; and.b32 x, $2, 0xffff0000; mov.b32 $1, x; }",
            "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return wide


@gluon.jit
def scaled(total, scale):
    return Chunks(total.main * scale, total.tail * scale)


@gluon.jit
def scaled_by_dropout(dv, problem):
    if problem.side.dropout_seed is not None:
        dv = scaled(dv, problem.numbers.dropout.scale)
    return dv


@gluon.jit
def start_store(descriptors, ring, slot, total, work, row, PACKED: gl.constexpr):
    """Starts the store of a sum of 64 keys, from `row` on, through a slot of a ring. Keys past the end are not
    written."""
    COLUMNS: gl.constexpr = total.main.shape[1]
    dtype: gl.constexpr = ring.tiles.dtype
    tma_store_wait(0)  # until what left through this place before has been read
    columns_of(ring, slot, 0, COLUMNS).store(total.main.to(dtype))
    if products_of_sum(ring) > 1:
        columns_of(ring, slot, COLUMNS, total.tail.shape[1]).store(total.tail.to(dtype))
    fence_async_shared()
    rows = HeadRows(work.sequence, work.head_kv, work.begin_k, work.seq_k)
    tma_store(descriptors.main, coordinates(rows, row, 0, PACKED), ring.tiles.index(slot.place))
    if ring.TAIL > 0:
        tma_store(descriptors.tail, coordinates(rows, row, ring.WIDTH, PACKED), ring.tail.index(slot.place))


@gluon.jit
def wait_dq_turn(turn_ptr, seen, turn):
    """Waits until `turn` key tiles have added to the dq of a query tile. `seen`: how many had, a while ago."""
    while seen < turn:
        seen = gl.load(turn_ptr, volatile=True)


@gluon.jit
def pass_dq_turn(turn_ptr):
    """Lets the next key tile add, once what TMA has added is in the L2 cache, where all additions meet.

    So the turn needs no release. The fence of a release would wait for everything that the thread block has under way:
    16 % of all cycles.
    """
    await_stores()
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="relaxed")
