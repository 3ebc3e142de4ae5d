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
from flashtile.ops.attention.hopper.pieces import coordinates, matrix

#: Rows of a warpgroup's matrix product: the keys of one warpgroup, and the queries of one sum of dq.
ROWS = gl.constexpr(64)


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


@gluon.jit
def wide_zeros(WIDTH: gl.constexpr):
    """A sum of `[64, WIDTH]` in two blocks of at most 128 columns: a single product of 256 columns does not compile
    in a kernel of four warpgroups, for want of registers. Up to 128 columns the second block is not used."""
    COLUMNS: gl.constexpr = min(WIDTH, 128)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout), gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def wide_product(a, b, block, rest):
    """`[block, rest] + a b`, with `a` of 16 bits in registers."""
    operand = gl.convert_layout(a, gl.DotOperandLayout(0, block.type.layout, 2), assert_trivial=True)
    COLUMNS: gl.constexpr = block.shape[1]
    if b.shape[1] > COLUMNS:
        block = warpgroup_mma(operand, b.slice(0, COLUMNS, dim=1), block, is_async=True)
        rest = warpgroup_mma(operand, b.slice(COLUMNS, COLUMNS, dim=1), rest, is_async=True)
        block, rest = warpgroup_mma_wait(0, [block, rest])
    else:
        block = warpgroup_mma_wait(0, [warpgroup_mma(operand, b, block, is_async=True)])
    return block, rest


@gluon.jit
def store_sums(sums_desc, smem, dq, line):
    """Adds a `[64, columns]` block of dq to the sums, where it is stored as `[columns / 8, 64, 8]`, in lines of 64.

    So the four threads that hold eight columns of a row, and the rows, write side by side, without bank conflicts.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    tma_store_wait(0)  # until the block before has been read from there
    blocks = gl.permute(gl.reshape(dq, [ROWS, COLUMNS // 8, 8]), [1, 0, 2])
    reinterpret(smem, gl.float32, [COLUMNS // 8, ROWS, 8], plain).store(blocks)
    fence_async_shared()
    tma_reduce_add(sums_desc, (line, 0), smem)


@gluon.constexpr_function
def _statistics_layout(QUERIES):
    """Each thread holds the four numbers of each 16 columns that its fragment of the scores has."""
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    sixteens = [[1 << bit, 0, 0, 0] for bit in range((QUERIES // 16).bit_length() - 1)]
    registers = [[0, 0, 0, 1], [0, 0, 1, 0], *sixteens]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0, 0], [0, 0, 0, 0]], [], [QUERIES // 16, 4, 2, 2])


@gluon.jit
def load_statistics(smem, KIND: gl.constexpr, QUERIES: gl.constexpr, s_layout: gl.constexpr):
    """lse (in units of log2; KIND 0) or delta (1) of a tile's queries, `[QUERIES]`, a column each of `sᵀ`.

    Query `16·a + 8·b + 2·t + e` is stored at `16·a + 4·t + 2·b + e`: what thread `t` of a row needs lies side by side.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    layout: gl.constexpr = _statistics_layout(QUERIES)
    quads = reinterpret(smem, gl.float32, [2, QUERIES // 16, 4, 2, 2], plain).index(KIND).load(layout)
    numbers = gl.reshape(gl.permute(quads, [0, 2, 1, 3]), [QUERIES])
    return gl.convert_layout(numbers, gl.SliceLayout(0, s_layout), assert_trivial=True)


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


@gluon.jit
def pack(x, dtype: gl.constexpr):
    """Rounds to 16 bits, in pairs. `x.to(dtype)` of a value that is used in two layouts is converted one by one, on a
    unit with an eighth of the rate."""
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return packed


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
def store_rows(desc, smem, tile, sequence, head, begin, length, row, PACKED: gl.constexpr):
    """Starts the store of 64 rows through shared memory. Rows past the end are not written."""
    matrix(smem, ROWS, tile.shape[1]).store(tile.to(smem.dtype))
    fence_async_shared()
    tma_store(desc, coordinates(sequence, head, begin, length, row, 0, PACKED), smem)


@gluon.jit
def store_wide_rows(
    desc, smem, block, rest, sequence, head, begin, length, row, WIDTH: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """`store_rows` of a sum in two blocks of columns."""
    COLUMNS: gl.constexpr = block.shape[1]
    tile = matrix(smem, ROWS, WIDTH)
    if WIDTH > COLUMNS:
        tile.slice(0, COLUMNS, dim=1).store(block.to(smem.dtype))
        tile.slice(COLUMNS, COLUMNS, dim=1).store(rest.to(smem.dtype))
    else:
        tile.store(block.to(smem.dtype))
    fence_async_shared()
    tma_store(desc, coordinates(sequence, head, begin, length, row, 0, PACKED), smem)


@gluon.jit
def begin_turn(turn_ptr, seen, turn):
    """Waits until so many key tiles have added to the sums of a query tile; `seen`: how many had, a while ago."""
    while seen < turn:
        seen = gl.load(turn_ptr, volatile=True)


@gluon.jit
def end_turn(turn_ptr):
    """Waits until what was added has arrived in device memory, and lets the next key tile add."""
    _await_additions(gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])))
    thread_barrier()
    gl.atomic_add(turn_ptr, 1, sem="release")


@gluon.jit
def _await_additions(anything):
    """`tma_store_wait` waits only until shared memory has been read. The operand gives the instruction its threads."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [anything],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
