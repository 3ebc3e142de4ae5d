"""The vocabulary of the Hopper backward kernels: which queries see a key tile, statistics, sums, and 16-bit pairs.

Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    thread_barrier,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.ops.attention.hopper.pieces import HeadRows, await_stores, coordinates, matrix
from flashtile.ops.attention.hopper.scores import capped, load_slope, lowered_by_distance

#: Rows of a warpgroup's matrix product: the keys of one warpgroup, and the queries of one sum of dq.
ROWS = gl.constexpr(64)

#: Columns of statistics that are operands: three parts of a number, and zeros, for a product takes no fewer.
STATISTIC_COLUMNS = gl.constexpr(16)


@gluon.jit
def query_tile_ranges(
    first, keys, shift, rows, window_left, window_right,
    N: gl.constexpr, M: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """The query tiles `[begin, end)` that see some of the `N` keys from `first` on, and those of them,
    `[full_begin, full_end)`, of which every row sees all. `shift` is the key of row 0's diagonal."""
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
    # Keys past the end are zeros, whose weights must not be taken for real ones.
    full_end = gl.where(first + N > keys, 0, full_end)
    return begin, full_begin, full_end, gl.maximum(end, begin)


#: Columns of a product: one of 256 does not compile in a kernel of four warpgroups, for want of registers.
_BLOCK = gl.constexpr(128)


@gluon.jit
def chunks_of(ring, stage):
    """A place of a ring as operands: both chunks of columns; the first again, where there is no second."""
    tile = matrix(ring.tiles.index(stage), ring.ROWS, ring.WIDTH)
    rest = tile
    if ring.TAIL > 0:
        rest = matrix(ring.tail.index(stage), ring.ROWS, ring.TAIL)
    return tile, rest


@gluon.jit
def columns_of(ring, stage, COLUMN: gl.constexpr, COUNT: gl.constexpr):
    """`COUNT` columns of a place of a ring, all in one chunk."""
    if COLUMN < ring.WIDTH:
        columns = slice_of(matrix(ring.tiles.index(stage), ring.ROWS, ring.WIDTH), COLUMN, COUNT, 1)
    else:
        columns = slice_of(matrix(ring.tail.index(stage), ring.ROWS, ring.TAIL), COLUMN - ring.WIDTH, COUNT, 1)
    return columns


@gluon.jit
def slice_of(tile, FIRST: gl.constexpr, COUNT: gl.constexpr, DIM: gl.constexpr):
    """`COUNT` rows (0) or columns (1) of a tile."""
    if COUNT < tile.shape[DIM]:
        tile = tile.slice(FIRST, COUNT, dim=DIM)
    return tile


@gluon.jit
def start_transposed(a, a_tail, b, b_tail, FIRST: gl.constexpr, zeros, TAIL: gl.constexpr):
    """Starts `a bᵀ` of both chunks of columns, with as many rows of b from `FIRST` on as `zeros` has columns."""
    COUNT: gl.constexpr = zeros.shape[1]
    s = warpgroup_mma(a, slice_of(b, FIRST, COUNT, 0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if TAIL > 0:
        s = warpgroup_mma(a_tail, slice_of(b_tail, FIRST, COUNT, 0).permute([1, 0]), s, is_async=True)
    return s


@gluon.constexpr_function
def _sum_layout(COLUMNS):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])


@gluon.jit
def wide_zeros(ring):
    """A sum with the columns of a ring, `[64, WIDTH + TAIL]`, in two blocks: at most `_BLOCK` columns, and what is
    left. Where nothing is left, the second is not used."""
    COLUMNS: gl.constexpr = min(ring.WIDTH, _BLOCK)
    MORE: gl.constexpr = max(ring.WIDTH + ring.TAIL - _BLOCK, 64)
    block = gl.zeros([ROWS, COLUMNS], gl.float32, _sum_layout(COLUMNS))
    return block, gl.zeros([ROWS, MORE], gl.float32, _sum_layout(MORE))


@gluon.constexpr_function
def products_of_sum(ring):
    """How many products a term of a `wide_zeros` sum is."""
    return 2 if ring.WIDTH + ring.TAIL > 128 else 1


@gluon.jit
def start_sum(a, b, b_tail, FIRST: gl.constexpr, block, rest, TAIL: gl.constexpr):
    """Starts `[block, rest] += a b`, with `a` of 16 bits in registers and as many rows of b from `FIRST` on."""
    WIDTH: gl.constexpr = b.shape[1]
    COLUMNS: gl.constexpr = min(WIDTH, _BLOCK)
    rows = slice_of(b, FIRST, a.shape[1], 0)
    block = _start_product(a, slice_of(rows, 0, COLUMNS, 1), block)
    if TAIL > 0:
        rest = _start_product(a, slice_of(b_tail, FIRST, a.shape[1], 0), rest)
    elif WIDTH > COLUMNS:
        rest = _start_product(a, rows.slice(COLUMNS, WIDTH - COLUMNS, dim=1), rest)
    return block, rest


@gluon.jit
def _start_product(a, b, block):
    layout: gl.constexpr = gl.DotOperandLayout(0, _sum_layout(b.shape[1]), 2)
    return warpgroup_mma(gl.convert_layout(a, layout, assert_trivial=True), b, block, is_async=True)


@gluon.jit
def wait_sum(IN_FLIGHT: gl.constexpr, ring, block, rest):
    """Waits until no more than so many products are in flight."""
    if products_of_sum(ring) > 1:
        block, rest = warpgroup_mma_wait(IN_FLIGHT, [block, rest])
    else:
        block = warpgroup_mma_wait(IN_FLIGHT, [block])
    return block, rest


@gluon.jit
def add_to_sums(sums, dq, line, form):
    """Adds a `[64, columns]` block of dq to the sums, from line `line` of 64 numbers on.

    There it is `[columns / 8, 4, 8, 4, 2, 2]`: eight columns at a time, what a warp has of these, what a thread has, in
    two rows two columns each. So threads write four numbers side by side, into shared memory without bank conflicts.
    """
    sums_ptr, sums_desc, smem = sums
    BLOCKS: gl.constexpr = dq.shape[1] // 8
    if form.SUMS_BY_TMA:
        tma_store_wait(0)  # until the block before has been read from there
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0])
        parts = gl.permute(gl.reshape(dq, [4, 2, 8, BLOCKS, 4, 2]), [3, 0, 2, 4, 1, 5])
        reinterpret(smem, gl.float32, [BLOCKS, 4, 8, 4, 2, 2], plain).store(parts)
        fence_async_shared()
        tma_reduce_add(sums_desc, (line, 0), smem)
    else:
        ADDITIONS: gl.constexpr = _additions(BLOCKS)
        OPERANDS: gl.constexpr = _addition_operands(BLOCKS)
        base = (sums_ptr + line.to(gl.int64) * 64).to(gl.int64)
        gl.inline_asm_elementwise(ADDITIONS, OPERANDS, [dq, base], dtype=gl.int32, is_pure=False, pack=4 * BLOCKS)


@gluon.constexpr_function
def _additions(BLOCKS):
    """Four numbers at a time to where a thread's are. The barrier keeps ptxas from starting the next block's product
    before: with two blocks in registers it would make all products wait for one another (C7512)."""
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
def make_statistics(desc, STAGES: gl.constexpr, MULTIPLIED: gl.constexpr):
    """Places for the statistics of tiles of queries, and where they are operands the other one: `[64, 16]` with ones in
    the first three columns."""
    statistics = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    ones = statistics
    if MULTIPLIED:
        ones = gl.allocate_shared_memory(gl.bfloat16, [ROWS, STATISTIC_COLUMNS], desc.layout)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        column = gl.arange(0, STATISTIC_COLUMNS, gl.SliceLayout(0, layout))[None, :]
        ones.store(gl.where(column + gl.zeros([ROWS, 1], gl.int32, layout) < 3, 1.0, 0.0).to(gl.bfloat16))
    return statistics, ones


@gluon.jit
def less_statistics(
    product, statistics, stage, KIND: gl.constexpr, FIRST: gl.constexpr, QUERIES: gl.constexpr, form
):  # fmt: skip
    """Of `QUERIES` queries, a column each of a product that is in flight, lse (in its units; KIND 0) or delta (1).

    Either another product takes them off, and what is left to do so is 0; or they are loaded, lse in units of log2.
    """
    smem, ones = statistics
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    if form.STATISTICS_MULTIPLIED:
        parts = smem.index(stage).slice(KIND * form.M + FIRST, QUERIES)
        product = warpgroup_mma(ones, parts.permute([1, 0]), product, is_async=True)
        numbers = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, s_layout))
    else:
        numbers = _load_statistics(smem.index(stage), KIND, FIRST, QUERIES, s_layout)
    return product, numbers


@gluon.constexpr_function
def _statistics_layout(QUERIES):
    """Each thread holds the four numbers of each 16 columns that its fragment of the scores has."""
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    sixteens = [[1 << bit, 0, 0, 0] for bit in range((QUERIES // 16).bit_length() - 1)]
    registers = [[0, 0, 0, 1], [0, 0, 1, 0], *sixteens]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0, 0], [0, 0, 0, 0]], [], [QUERIES // 16, 4, 2, 2])


@gluon.jit
def _load_statistics(smem, KIND: gl.constexpr, FIRST: gl.constexpr, QUERIES: gl.constexpr, s_layout: gl.constexpr):
    """lse (in units of log2; KIND 0) or delta (1) of `QUERIES` queries of a tile, a column each of `sᵀ`.

    Query `16·a + 8·b + 2·t + e` is stored at `16·a + 4·t + 2·b + e`: what thread `t` of a row needs lies side by side.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    layout: gl.constexpr = _statistics_layout(QUERIES)
    TILE: gl.constexpr = smem.shape[1]
    sixteens = reinterpret(smem, gl.float32, [2, TILE // 16, 4, 2, 2], plain).index(KIND)
    quads = slice_of(sixteens, FIRST // 16, QUERIES // 16, 0).load(layout)
    numbers = gl.reshape(gl.permute(quads, [0, 2, 1, 3]), [QUERIES])
    return gl.convert_layout(numbers, gl.SliceLayout(0, s_layout), assert_trivial=True)


@gluon.jit
def modified_scores(s, key, first_query, head, walk, changing):
    """Scores `sᵀ` with what changes them, and the tanh of the soft cap, whose derivative is `1 - tanh²`."""
    scale_log2, cap_scale, alibi_slopes_ptr, stride_alibi_batch = changing
    if cap_scale is not None:
        s = capped(s, cap_scale)
    tanh = s
    if alibi_slopes_ptr is not None:
        slope = load_slope(
            alibi_slopes_ptr, stride_alibi_batch, walk.sequence, walk.first_head + head, scale_log2, True
        )  # fmt: skip
        s = lowered_by_distance(s, key, first_query + (walk.seq_k - walk.seq_q), slope)
    return s, tanh


@gluon.jit
def mask_probs(p, key, first_query, shift, keys, window_left, window_right, form):
    """`pᵀ` `[keys, queries]`, 0 where the query does not see the key."""
    query = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
    last = keys - 1 + query * 0
    if form.HAS_RIGHT:
        last = gl.minimum(last, query + (shift + window_right))
    visible = key[:, None] <= last[None, :]
    if form.HAS_LEFT:
        visible &= key[:, None] >= (query + (shift - window_left))[None, :]
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
    """The same rounded weights, computed before whatever comes after this; as `pieces.pin_before_wait`.

    ptxas moves exponentials down past the start of the next product, and has no registers then for the scores beside
    it: it makes all products wait for one another (C7512).
    """
    WORDS: gl.constexpr = min(16, weights.shape[1] // 4)
    PIN: gl.constexpr = _pin(WORDS)
    OPERANDS: gl.constexpr = _pin_operands(WORDS)
    return gl.inline_asm_elementwise(PIN, OPERANDS, [weights], dtype=weights.dtype, is_pure=False, pack=2 * WORDS)


@gluon.jit
def unpack(x, dtype: gl.constexpr):
    """The inverse of `pack`, likewise in pairs."""
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
def store_rows(desc, tail_desc, ring, which, block, rest, walk, row, PACKED: gl.constexpr):
    """Starts the store of a sum of 64 keys, from `row` on, through a ring's place. Keys past the end are not
    written."""
    COLUMNS: gl.constexpr = block.shape[1]
    dtype: gl.constexpr = ring.tiles.dtype
    tma_store_wait(0)  # of what left through this place before
    columns_of(ring, which, 0, COLUMNS).store(block.to(dtype))
    if products_of_sum(ring) > 1:
        columns_of(ring, which, COLUMNS, rest.shape[1]).store(rest.to(dtype))
    fence_async_shared()
    rows = HeadRows(walk.sequence, walk.head_kv, walk.begin_k, walk.seq_k)
    tma_store(desc, coordinates(rows, row, 0, PACKED), ring.tiles.index(which))
    if ring.TAIL > 0:
        tma_store(tail_desc, coordinates(rows, row, ring.WIDTH, PACKED), ring.tail.index(which))


@gluon.jit
def begin_turn(turn_ptr, seen, turn):
    """Waits until so many key tiles have added to the sums of a query tile; `seen`: how many had, a while ago."""
    while seen < turn:
        seen = gl.load(turn_ptr, volatile=True)


@gluon.jit
def end_turn(turn_ptr):
    """Lets the next key tile add, once what TMA has added is in the L2 cache, where all additions meet.

    So the turn needs no release, whose fence would wait for whatever the program has under way: 16 % of all cycles.
    """
    await_stores()
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="relaxed")
