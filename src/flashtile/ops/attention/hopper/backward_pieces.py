"""The vocabulary of the Hopper backward kernels: handovers, visible query tiles, statistics, products, sums and 16-bit
pairs. Letters as in `primitives` and `backward`."""

from flashtile._backends.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.modifiers import kept_weights
from flashtile.ops.attention.hopper.primitives import (
    WARPGROUP,
    Chunks,
    HeadRows,
    Slot,
    barriers,
    coordinates,
    matrix,
    matrix_layout,
    pack,
    product_layout,
    release,
    ring_slot,
    tile_slice,
)

#: Rows of a warpgroup's matrix product: the keys of one warpgroup, and the queries of one sum of dq.
ROWS = gl.constexpr(64)

#: Columns of statistics that are operands: three parts of a number, in those of lse what hides keys past the end, and
#: zeros, because a product takes no fewer.
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
        place, phase = ring_slot(count, self.STAGES)
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
def ring_columns(ring, slot, COLUMN: gl.constexpr, COUNT: gl.constexpr):
    """`COUNT` columns of a tile of a ring, all in one chunk."""
    if COLUMN < ring.WIDTH:
        columns = tile_slice(matrix(ring.tiles.index(slot.place), ring.ROWS, ring.WIDTH), COLUMN, COUNT, 1)
    else:
        tail = matrix(ring.tail.index(slot.place), ring.ROWS, ring.TAIL)
        columns = tile_slice(tail, COLUMN - ring.WIDTH, COUNT, 1)
    return columns


@gluon.jit
def start_transposed(a, b, FIRST: gl.constexpr, zeros, TAIL: gl.constexpr):
    """Starts `a bᵀ` of both chunks of head_dim, with as many rows of b from `FIRST` on as `zeros` has columns."""
    COUNT: gl.constexpr = zeros.shape[1]
    s = warpgroup_mma(a.main, tile_slice(b.main, FIRST, COUNT, 0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if TAIL > 0:
        s = warpgroup_mma(a.tail, tile_slice(b.tail, FIRST, COUNT, 0).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def wide_zeros(ring):
    """A sum as wide as a ring's tiles, in two chunks: at most `_BLOCK` columns, and the rest (perhaps unused)."""
    COLUMNS: gl.constexpr = min(ring.WIDTH, _BLOCK)
    MORE: gl.constexpr = ring.TAIL if ring.TAIL > 0 else max(ring.WIDTH - _BLOCK, 64)
    main = gl.zeros([ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return Chunks(main, gl.zeros([ROWS, MORE], gl.float32, product_layout(MORE)))


@gluon.constexpr_function
def products_per_sum(ring):
    """How many products add one term to a `wide_zeros` sum."""
    return 2 if ring.TAIL > 0 or ring.WIDTH > 128 else 1


@gluon.jit
def start_sum(a, b, FIRST: gl.constexpr, total, TAIL: gl.constexpr):
    """Starts `total += a b`, with `a` of 16 bits in registers and as many rows of b from `FIRST` on."""
    WIDTH: gl.constexpr = b.main.shape[1]
    COLUMNS: gl.constexpr = min(WIDTH, _BLOCK)
    rows = tile_slice(b.main, FIRST, a.shape[1], 0)
    main = _start_product(a, tile_slice(rows, 0, COLUMNS, 1), total.main)
    tail = total.tail
    if TAIL > 0:
        tail = _start_product(a, tile_slice(b.tail, FIRST, a.shape[1], 0), tail)
    elif WIDTH > COLUMNS:
        tail = _start_product(a, rows.slice(COLUMNS, WIDTH - COLUMNS, dim=1), tail)
    return Chunks(main, tail)


@gluon.jit
def _start_product(a, b, total):
    layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(b.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(a, layout, assert_trivial=True), b, total, is_async=True)


@gluon.jit
def wait_sum(IN_FLIGHT: gl.constexpr, ring, total):
    """Waits until at most `IN_FLIGHT` products are in flight."""
    main, tail = total.main, total.tail
    if products_per_sum(ring) > 1:
        main, tail = warpgroup_mma_wait(IN_FLIGHT, [main, tail])
    else:
        main = warpgroup_mma_wait(IN_FLIGHT, [main])
    return Chunks(main, tail)


@gluon.jit
def by_threads(dq):
    """A `[64, columns]` block of dq as its sums lie in memory, `[columns / 8, 4, 8, 4, 2, 2]`: eight columns at a time,
    then warps, threads in rows of four, and two rows with two columns each."""
    return gl.permute(gl.reshape(dq, [4, 2, 8, dq.shape[1] // 8, 4, 2]), [3, 0, 2, 4, 1, 5])


@gluon.jit
def by_rows(sums):
    """Undoes `by_threads`, of sums in one dimension."""
    COLUMNS: gl.constexpr = sums.shape[0] // ROWS
    parts = gl.permute(gl.reshape(sums, [COLUMNS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.reshape(parts, [ROWS, COLUMNS])


@gluon.jit
def make_ones(first_key, keys, QUERIES: gl.constexpr):
    """The other operand of statistics that are operands, in registers: `[64 keys, 16]` with ones in the first three
    columns, and for keys past the end also in the fourth, where lse has `HIDDEN`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, product_layout(QUERIES), 2)
    column = gl.arange(0, STATISTIC_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    is_one = (column < 3) | ((column == 3) & (key >= keys))
    return gl.where(is_one, 1.0, 0.0).to(gl.bfloat16)


#: The score of a key past the end, which leaves it no weight, whatever the scale is.
HIDDEN = gl.constexpr(-3e38)

#: The two statistics of a query, in the order in which they are stored.
LSE, DELTA = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def subtract_statistic(
    product, ones, statistics, slot, KIND: gl.constexpr, FIRST: gl.constexpr, QUERIES: gl.constexpr, config
):  # fmt: skip
    """Takes lse or delta (`KIND`) of `QUERIES` queries from `FIRST` on off a product that is in flight, whose columns
    are these queries. Returns the product and what is left to subtract, `[QUERIES]`.

    Either one more product takes them off, that of `ones` (`make_ones`), which also hides keys past the end, and 0 is
    left. Or they are loaded, lse in units of log2. `statistics`: the tiles of a ring, which arrive with the queries.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    if config.STATISTICS_MULTIPLIED:
        parts = statistics.index(slot.place).slice(KIND * config.M + FIRST, QUERIES)
        product = warpgroup_mma(ones, parts.permute([1, 0]), product, is_async=True)
        left = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, s_layout))
    else:
        left = _load_statistic(statistics.index(slot.place), KIND, FIRST, QUERIES, s_layout)
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
    """lse (log2) or delta of `QUERIES` queries of a tile, the columns of `sᵀ`. Query `16·a + 8·b + 2·t + e` is stored
    at `16·a + 4·t + 2·b + e`, so that the numbers of thread `t` of a row lie side by side."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    layout: gl.constexpr = _statistics_layout(QUERIES)
    TILE: gl.constexpr = tile.shape[1]
    sixteens = reinterpret(tile, gl.float32, [2, TILE // 16, 4, 2, 2], plain).index(KIND)
    quads = tile_slice(sixteens, FIRST // 16, QUERIES // 16, 0).load(layout)
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
def _enlargement(dtype, sums_slopes, config):
    """The factor by which weights are handed on larger. In float16 they lose bits below 2⁻¹⁴, which a sum over all of
    them shows, as that of slopes, and a small derivative of a score function. Derivatives may be large, too."""
    if dtype != gl.float16:
        return 1.0
    if sums_slopes:
        return 2.0**14
    return 2.0**6 if config.FUNCTION_DERIVATIVE and not config.DERIVATIVES_APART else 1.0


@gluon.jit
def gradient_factors(p, inner, probs, problem, config):
    """The factors of `dpᵀ - delta` in 16 bits: `pᵀ`, or with a soft cap or a function `pᵀ · compute_ds(inner)`. If
    DERIVATIVES_APART the second factor is no part of them. `probs`: the weights for dv, rounded."""
    LARGER: gl.constexpr = _enlargement(probs.dtype, problem.slope_sums_ptr is not None, config)
    factors = probs
    if config.DERIVATIVES and not config.DERIVATIVES_APART:
        factors = pack(p * compute_ds(inner, config) * LARGER, probs.dtype)
    elif LARGER > 1 or problem.side.dropout_seed is not None:
        factors = pack(p * LARGER, probs.dtype)
    return factors


@gluon.jit
def compute_ds(inner, config):
    """The derivatives of scores by products, without the scale. `inner`: as `modified_scores` returns it."""
    if not config.FUNCTION_DERIVATIVE:
        inner = 1.0 - inner * inner
    return inner


@gluon.jit
def signed_by_dropout(p, dropout, first_query, first_key):
    """The weights `pᵀ` that dropout keeps, not yet scaled, and all weights, with a minus before those that it drops."""
    layout: gl.constexpr = p.type.layout
    kept = kept_weights(dropout, first_query, first_key, p.shape[1], p.shape[0], layout, True)
    return gl.where(kept, p, 0.0), gl.where(kept, p, -p)


@gluon.jit
def without_rows_past_end(p, first_query, work):
    """`pᵀ` `[keys, queries]`, 0 for queries past the end, to which a table may say anything."""
    query = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
    return gl.where((query < work.seq_q)[None, :], p, 0.0)


@gluon.jit
def score_gradients(factors, dp, delta, dtype: gl.constexpr, problem, config):
    """`dsᵀ` in 16 bits from `dpᵀ` and the factors of `dpᵀ - delta`. `dtype`: in which the factors were handed on."""
    factors *= 1.0 / _enlargement(dtype, problem.slope_sums_ptr is not None, config)
    if problem.side.dropout_seed is not None:
        kept = gl.where(factors > 0.0, dp * problem.numbers.dropout.scale, 0.0)
        ds = gl.abs(factors) * (kept - delta[None, :])
    else:
        ds = factors * (dp - delta[None, :])
    return ds


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
    """The same rounded weights, computed before everything that follows, as in `primitives.pin_before_wait`. Else ptxas
    moves exponentials past the start of the next product, and makes all products wait for one another (C7512)."""
    WORDS: gl.constexpr = min(16, weights.shape[1] // 4)
    PIN: gl.constexpr = _pin(WORDS)
    OPERANDS: gl.constexpr = _pin_operands(WORDS)
    return gl.inline_asm_elementwise(PIN, OPERANDS, [weights], dtype=weights.dtype, is_pure=False, pack=2 * WORDS)


@gluon.jit
def unpack(x, dtype: gl.constexpr):
    """Undoes `pack`, also in pairs.

    Each float16 gets a register of its own before it is converted. When ptxas could take the halves of a pair as they
    lie, it kept pairs in memory, fetched their halves by themselves, and fetched some before it had stored the pair
    (decisions/compilers.md, "Halves of a pair")."""
    if dtype == gl.bfloat16:
        wide = gl.inline_asm_elementwise(
            "{ .reg .b32 x; shl.b32 x, $2, 16; mov.b32 $0, x; and.b32 x, $2, 0xffff0000; mov.b32 $1, x; }",
            "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = gl.inline_asm_elementwise(
            """{
                .reg .b16 half, none;
                .reg .b32 word;
                prmt.b32 word, $2, $2, 0x1010;
                mov.b32 {half, none}, word;
                cvt.f32.f16 $0, half;
                prmt.b32 word, $2, $2, 0x3232;
                mov.b32 {half, none}, word;
                cvt.f32.f16 $1, half;
            }""",
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
    """Starts the store of a sum of 64 keys from `row` on through a ring's slot; none is written past the end."""
    COLUMNS: gl.constexpr = total.main.shape[1]
    dtype: gl.constexpr = ring.tiles.dtype
    tma_store_wait(0)  # until what left through this place before has been read
    ring_columns(ring, slot, 0, COLUMNS).store(total.main.to(dtype))
    if products_per_sum(ring) > 1:
        ring_columns(ring, slot, COLUMNS, total.tail.shape[1]).store(total.tail.to(dtype))
    fence_async_shared()
    rows = HeadRows(work.sequence, work.head_kv, work.begin_k, work.seq_k)
    tma_store(descriptors.main, coordinates(rows, row, 0, PACKED), ring.tiles.index(slot.place))
    if ring.TAIL > 0:
        tma_store(descriptors.tail, coordinates(rows, row, ring.WIDTH, PACKED), ring.tail.index(slot.place))
