"""The vocabulary of the Hopper kernels: rings of tiles, what a tile sees, and steps of the
softmax.

Shapes::

    M  query rows of a consumer: the 64 of one warpgroup's matrix product
    N  keys of a tile
    D  head_dim of q and k, E head_dim of v and out: a power of two, or two chunks (96 = 64 + 32), so that such a head
       is not padded to the next power of two. TMA fills in zeros past head_dim.

A *line* is one head of one sequence (dense) or one head of all sequences (packed). Its query rows are cut into tiles,
each for all consumers of a thread block. Rows of a sequence count from its start; The hardware's bounds check keeps
packed sequences apart (`coordinates`).
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import (
    aggregate,
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)

LN_2 = gl.constexpr(0.6931471805599453)

#: Rows of a warpgroup's matrix product, and its threads.
M = gl.constexpr(64)
WARPGROUP = gl.constexpr(128)

#: Rows of a packed tensor as its descriptor states them (`flashtile._backends.tma.packed_layout`).
PACKED_ROWS = gl.constexpr(2**30)

#: Numbers that a producer tells of a tile at most: those of a packed backward (`backward_tiles.publish_key_tile`); and
#: of a tile of a packed call with a block mask.
_FIELDS, _FIELDS_OF_LISTED = gl.constexpr(7), gl.constexpr(8)


class Chunks(NamedTuple):
    """Descriptors, operands or sums of the chunks that a head_dim is cut into. If one chunk holds the whole head,
    nothing reads `tail`. It is None, or a placeholder where a function returns it, which Triton allows no None."""

    main: Any
    tail: Any


class HeadRows(NamedTuple):
    """The rows of one head of one sequence: `length` rows, from row `begin` of a packed tensor on."""

    sequence: Any
    head: Any
    begin: Any
    length: Any


class Slot(NamedTuple):
    """The place of a tile in a ring, and the parity of the barrier that says it is there."""

    place: Any
    phase: Any


@aggregate
class Ring:
    """Tiles in shared memory that the producer fills and the consumers empty. It owns a barrier of either kind for each
    place, and knows their phases: callers count tiles, and hand the slot of a tile back as they got it.

    A stage has `PARTS` tiles, each with barriers of its own, such as the query rows of each consumer. `tail` holds the
    second chunk of head_dim, `TAIL` wide, where there is one. Else it is `tiles` again.
    """

    tiles: gl.shared_memory_descriptor
    tail: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ROWS: gl.constexpr
    WIDTH: gl.constexpr
    TAIL: gl.constexpr
    STAGES: gl.constexpr
    PARTS: gl.constexpr
    COPIED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, tail, full, empty, ROWS, WIDTH, TAIL, STAGES, PARTS, COPIED):
        self.tiles = tiles
        self.tail = tail
        self.full = full
        self.empty = empty
        self.ROWS = gl.constexpr(ROWS)
        self.WIDTH = gl.constexpr(WIDTH)
        self.TAIL = gl.constexpr(TAIL)
        self.STAGES = gl.constexpr(STAGES)
        self.PARTS = gl.constexpr(PARTS)
        self.COPIED = gl.constexpr(COPIED)

    @gluon.jit
    def slot(self, count, PART: gl.constexpr = 0):
        """The slot of tile number `count`, or of one of its parts."""
        stage, phase = ring_slot(count, self.STAGES)
        if self.PARTS > 1:
            stage = stage * self.PARTS + PART
        return Slot(stage, phase)

    @gluon.jit
    def wait_empty(self, slot):
        """Producer: waits until the slot is free."""
        mbarrier.wait(self.empty.index(slot.place), slot.phase ^ 1)

    @gluon.jit
    def load(self, slot, descriptors, rows, row, PACKED: gl.constexpr, column=0, BESIDE: gl.constexpr = 0):
        """Producer: starts the load of the rows of a head from `row` on, and their columns from `column` on, into a
        slot that is free. The tile is there when `BESIDE` bytes more have arrived, which the caller loads."""
        full = self.full.index(slot.place)
        BYTES: gl.constexpr = self.tiles.dtype.primitive_bitwidth // 8 * self.ROWS * (self.WIDTH + self.TAIL)
        mbarrier.expect(full, BYTES + BESIDE)
        tma_load(descriptors.main, coordinates(rows, row, column, PACKED), full, self.tiles.index(slot.place))
        if self.TAIL > 0:
            tail = coordinates(rows, row, column + self.WIDTH, PACKED)
            tma_load(descriptors.tail, tail, full, self.tail.index(slot.place))

    @gluon.jit
    def fill(self, slot, descriptors, rows, row, PACKED: gl.constexpr, column=0):
        """Producer: waits until the slot is free, and starts the load."""
        self.wait_empty(slot)
        self.load(slot, descriptors, rows, row, PACKED, column)

    @gluon.jit
    def acquire(self, slot):
        """Consumer: waits until the tile is there, for products to read. What TMA brings these see at once; what
        threads have copied, behind a fence."""
        mbarrier.wait(self.full.index(slot.place), slot.phase)
        if self.COPIED:
            fence_async_shared()

    @gluon.jit
    def operand(self, slot):
        """Consumer: the tile as operands of matrix products, both chunks of it."""
        main = self.main_operand(slot)
        tail = main
        if self.TAIL > 0:
            tail = self.tail_operand(slot)
        return Chunks(main, tail)

    @gluon.jit
    def main_operand(self, slot):
        """The first chunk of the tile, `[ROWS, WIDTH]`."""
        return matrix(self.tiles.index(slot.place), self.ROWS, self.WIDTH)

    @gluon.jit
    def tail_operand(self, slot):
        """The second chunk of the tile, `[ROWS, TAIL]`, if it has one."""
        return matrix(self.tail.index(slot.place), self.ROWS, self.TAIL)

    @gluon.jit
    def release(self, slot):
        """Consumer: the tile is no longer read."""
        release(self.empty.index(slot.place))


@aggregate
class TileQueue:
    """Two places in which a producer tells the consumers their next tiles; up to `FIELDS` numbers each."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FIELDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty, FIELDS):
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.FIELDS = gl.constexpr(FIELDS)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr, MORE: gl.constexpr = 0):
    """Barriers, each complete after so many arrivals, and behind them `MORE`, complete after one."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT + MORE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT + MORE):
        mbarrier.init(bars.index(i), count=ARRIVALS if i < COUNT else 1)
    return bars


@gluon.jit
def release(barrier):
    """Every thread of the caller arrives for itself. `mbarrier.arrive` would make all its warps wait for one another
    first, which costs as much as the barrier; so barriers count threads, `WARPGROUP` for each consumer."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def make_ring(
    descriptors, STAGES: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr = 1, KEYS: gl.constexpr = 0,
    WRITERS: gl.constexpr = 1, OWN: gl.constexpr = False, COPIED: gl.constexpr = False,
):  # fmt: skip
    """A ring of tiles as wide as the boxes of the descriptors, of as many rows or of `KEYS`, each filled by `WRITERS`
    warps and emptied by `READERS` consumers. `OWN`: each of the warps has a full barrier of its own, behind those of
    the tiles. `COPIED`: threads of the warps copy the tiles, and each arrives for itself.

    With 0 it is loaded once, and has no barriers for being empty: where nobody waits for a barrier, the compiler lays
    tiles over it, and what made the barrier may come after what TMA loads there."""
    desc = descriptors.main
    tail_desc = descriptors.tail
    ROWS: gl.constexpr = KEYS if KEYS > 0 else desc.block_shape[-3]
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tiles = gl.allocate_shared_memory(desc.dtype, _ring_shape(STAGES * PARTS, ROWS, desc.block_shape), desc.layout)
    full = barriers(STAGES * PARTS, WRITERS * (32 if COPIED else 1), WRITERS if OWN else 0)
    empty = full
    if READERS > 0:
        empty = barriers(STAGES * PARTS, READERS * WARPGROUP)
    if tail_desc is None:
        ring = Ring(tiles, tiles, full, empty, ROWS, WIDTH, 0, STAGES=STAGES, PARTS=PARTS, COPIED=COPIED)
    else:
        tail_shape: gl.constexpr = _ring_shape(STAGES * PARTS, ROWS, tail_desc.block_shape)
        tail = gl.allocate_shared_memory(desc.dtype, tail_shape, tail_desc.layout)
        TAIL: gl.constexpr = tail_desc.block_shape[-1]
        ring = Ring(tiles, tail, full, empty, ROWS, WIDTH, TAIL, STAGES=STAGES, PARTS=PARTS, COPIED=COPIED)
    return ring


@gluon.constexpr_function
def _ring_shape(places, rows, box):
    """The shape of so many tiles, of so many rows instead of those of a box."""
    *outer, _, heads, width = box
    return [places, *outer, rows, heads, width]


@gluon.jit
def make_tile_queue(READERS: gl.constexpr, PACKED_AND_LISTED: gl.constexpr, WARPS: gl.constexpr = 0):
    """`PACKED_AND_LISTED`: of a packed call with a block mask. `WARPS` read it beside the consumers."""
    FIELDS: gl.constexpr = _FIELDS_OF_LISTED if PACKED_AND_LISTED else _FIELDS
    return TileQueue(number_places(2 * FIELDS), barriers(2, 1), barriers(2, READERS * WARPGROUP + WARPS * 32), FIELDS)


@gluon.jit
def ring_slot(count, STAGES: gl.constexpr):
    """The place of tile number `count` in a ring, and the phase of its `full` barrier when it is there."""
    return count % STAGES, (count // STAGES) & 1


@gluon.jit
def hidden_zero(count):
    """0 for a count, in a form in which no compiler sees it."""
    return count >> 31


@gluon.constexpr_function
def matrix_layout(WIDTH, BITS=16):
    return gl.NVMMASharedLayout(min(128, BITS // 8 * WIDTH), BITS, 2)


@gluon.constexpr_function
def product_layout(COLUMNS, BITS=16):
    """The layout of a product `[M, COLUMNS]` of operands with BITS bits an element."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 256 // BITS])


@gluon.jit
def matrix(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A tile as the two-dimensional operand of a matrix product, `[ROWS, WIDTH]`."""
    layout: gl.constexpr = matrix_layout(WIDTH, tile.dtype.primitive_bitwidth)
    return reinterpret(tile, tile.dtype, [ROWS, WIDTH], layout)


@gluon.jit
def tile_slice(tile, FIRST: gl.constexpr, COUNT: gl.constexpr, DIM: gl.constexpr):
    """`COUNT` rows (0) or columns (1) of a tile."""
    if COUNT < tile.shape[DIM]:
        tile = tile.slice(FIRST, COUNT, dim=DIM)
    return tile


@gluon.jit
def coordinates(rows, row, column, PACKED: gl.constexpr):
    """The coordinates of row `row` of a head of a sequence (`HeadRows`), from `column` on.

    Dense tensors have the dimensions (batch, row, head, column). A packed tensor is described with rows three times
    (`packed_layout`): the third counts so that it ends with the sequence, the second makes up for it, and the first
    for both, by wrapping around 64 bits, so the hardware's bounds check is that of one sequence: what is past its end
    is read as zero and never written.
    """
    if PACKED:
        place = (PACKED_ROWS, rows.begin + rows.length, PACKED_ROWS - rows.length + row, rows.head, column)
    else:
        place = (rows.sequence, row, rows.head, column)
    return place


@gluon.jit
def rows_in_cache(lengths, sequence, length, new, capacity):
    """The rows of a sequence with its `new` ones, as `split_keys.rows.sequence_lengths` counts them."""
    before = length
    if lengths is not None:
        # A length may be far more than there are rows, so it is 32 bits wide only after that.
        before = gl.minimum(gl.load(lengths + sequence), capacity).to(gl.int32)
    return gl.minimum(gl.maximum(before + new, 0), capacity)


@gluon.jit
def packed_sequence(starts, place, batch, scale, TILE: gl.constexpr):
    """The packed sequence that tile number `place` belongs to, as `split_keys.rows.tile_sequence` finds it; `batch` for
    what follows the last one. A row counts `scale` times."""
    low = gl.to_tensor(0)
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        first = gl.load(starts + middle).to(gl.int32) * scale // TILE
        if TILE > 1:
            first += middle
        begins = first <= place
        low = gl.where(begins, middle, low)
        high = gl.where(begins, high, middle - 1)
    return low


@gluon.jit
def publish_tile(queue, count, tile, TOLD: gl.constexpr):
    """The producer's side of the queue: publishes the `count`-th tile, a `NamedTuple` whose first number is negative
    after the last one. `TOLD`: which of its fields."""
    slot, phase = ring_slot(count, 2)
    mbarrier.wait(queue.empty.index(slot), phase ^ 1)
    place = 0
    for field in gl.static_range(len(TOLD)):
        if TOLD[field]:
            write_number(queue.numbers.index(slot * queue.FIELDS + place), tile[field])
            place = place + 1
    mbarrier.arrive(queue.full.index(slot), count=1)


@gluon.jit
def receive_tile(queue, count, TOLD: gl.constexpr):
    """The others' side: all fields of the `count`-th tile, 0 for those that are not told."""
    slot, phase = ring_slot(count, 2)
    mbarrier.wait(queue.full.index(slot), phase)
    numbers = (read_number(queue.numbers.index(slot * queue.FIELDS)),)
    place = 1
    for field in gl.static_range(1, len(TOLD)):
        if TOLD[field]:
            numbers = numbers + (read_number(queue.numbers.index(slot * queue.FIELDS + place)),)
            place = place + 1
        else:
            numbers = numbers + (0,)
    release(queue.empty.index(slot))
    return numbers


@gluon.jit
def number_places(COUNT: gl.constexpr):
    """Room in shared memory for so many int32."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_number(place, number):
    """Every warp of the caller writes a scalar to a place `[1]` in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def read_number(place):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(place.load(layout), 0)


@gluon.jit
def await_stores():
    """Until all that a warpgroup stored or added by TMA is in place; `tma_store_wait` waits only for its being read.
    The operand gives the instruction its threads."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r,~{memory}",
        [gl.arange(0, WARPGROUP, gl.BlockedLayout([1], [32], [4], [0]))], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


class KeyTileRange(NamedTuple):
    """Key tiles `[begin, end)` that query rows visit; all rows see the whole of those in `[full_begin, full_end)`."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@gluon.jit
def key_tile_ranges(
    first, rows, shift, keys, window_left, window_right,
    ROWS: gl.constexpr, N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """The key tiles that `ROWS` query rows from `first` on visit. `shift` is the key of row 0's diagonal.

    There is at least one: a tile that nobody sees costs less, where it occurs, than a branch around all of the work.
    """
    last = gl.minimum(first + ROWS, rows) - 1
    begin = 0
    full_begin = 0
    end = keys
    full_end = keys
    if HAS_RIGHT:
        end = gl.minimum(keys, last + shift + window_right + 1)
        full_end = gl.minimum(keys, first + shift + window_right + 1)
    if HAS_LEFT:
        begin = gl.minimum(gl.maximum(first + shift - window_left, 0), gl.maximum(keys - 1, 0)) // N
        full_begin = gl.cdiv(gl.maximum(last + shift - window_left, 0), N)
    end = gl.maximum(gl.cdiv(gl.maximum(end, 0), N), begin + 1)
    return KeyTileRange(begin, full_begin, gl.maximum(full_end, 0) // N, end)


@gluon.jit
def consumer_key_tiles(
    loaded, first, rows, shift, keys, window_left, window_right,
    N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SKIPS: gl.constexpr,
):  # fmt: skip
    """The key tiles that a consumer visits, out of those that are loaded (`KeyTileRange`), and how many of these it
    skips before and after its own. Tiles come from the last to the first.

    SKIPS: it visits what its own rows from `first` on see, and at least one tile. Otherwise it visits all.
    """
    visited = loaded
    before = 0
    after = 0
    if SKIPS:
        mine = key_tile_ranges(
            first, rows, shift, keys, window_left, window_right, M, N=N, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT
        )
        begin = gl.minimum(gl.maximum(mine.begin, loaded.begin), loaded.end - 1)
        end = gl.maximum(gl.minimum(mine.end, loaded.end), begin + 1)
        before = loaded.end - end
        after = begin - loaded.begin
        visited = KeyTileRange(begin, mine.full_begin, mine.full_end, end)
    return visited, before, after


@gluon.jit
def mask_scores(
    s, row, first_key, shift, keys, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr
):  # fmt: skip
    """Scores `[M, N]` of the keys from `first_key` on, -inf where row `row` (`[M]`) does not see the key."""
    column = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
    last = keys - 1 - first_key + row * 0
    if HAS_RIGHT:
        last = gl.minimum(last, row + (shift + window_right - first_key))
    visible = column <= last[:, None]
    if HAS_LEFT:
        visible &= column >= (row + (shift - window_left - first_key))[:, None]
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def row_maximum(s):
    """`[M]`. First of what a thread holds, two columns in turn: no comparison waits for the one just before it, and
    ptxas compares a thread's second row while the exponentials of its first are computed."""
    own = gl.max(gl.reshape(s, [M, s.shape[1] // 8, 8]), 1)
    return gl.convert_layout(gl.max(own, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def row_sums(p):
    """`[M, 8]`: what each thread holds of a row. Threads add up with one another once, at the end of a tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    partial = gl.sum(gl.reshape(p, [M, p.shape[1] // 8, 8]), 1)
    return gl.convert_layout(partial, layout, assert_trivial=True)


#: Four numbers of each row, one of each thread that has scores of it.
ONE_OF_A_THREAD = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.jit
def row_maxima(p):
    """`[M, 4]`: the largest of what each thread holds of a row, of numbers that are not negative. They have the order
    of their bits, and of integers an instruction compares three."""
    bits = gl.reshape(p.to(gl.int32, bitcast=True), [M, p.shape[1] // 8, 4, 2])
    own = gl.convert_layout(gl.max(gl.max(bits, 1), 2), ONE_OF_A_THREAD, assert_trivial=True)
    return own.to(gl.float32, bitcast=True)


@gluon.jit
def scale_rows(out, factor, v):
    """`out` `[M, E]`, in the chunks of `v`, times `factor` `[M]`."""
    main = out.main * gl.convert_layout(factor, gl.SliceLayout(1, out.main.type.layout))[:, None]
    tail = out.tail
    if v.TAIL > 0:
        tail = tail * gl.convert_layout(factor, gl.SliceLayout(1, tail.type.layout))[:, None]
    return Chunks(main, tail)


@gluon.jit
def pin_before_wait(sums):
    """The same sums of exponentials, `[M, 8]`, with the exponentials computed before whatever comes after this.

    ptxas moves arithmetic down past a wait for products, which ends the overlap of the two. It does not move it past
    an event that depends on it; that a sum of exponentials is never negative, so that there is none, it cannot know.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .pred negative;
            setp.lt.f32 negative, $4, 0f00000000;
            setp.lt.or.f32 negative, $5, 0f00000000, negative;
            setp.lt.or.f32 negative, $6, 0f00000000, negative;
            setp.lt.or.f32 negative, $7, 0f00000000, negative;
            @negative pmevent 1;
            mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;
        }""",
        "=f,=f,=f,=f,f,f,f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def wait_products(IN_FLIGHT: gl.constexpr):
    """Waits until so many products are in flight, without taking results, to which the others may still add."""
    gl.inline_asm_elementwise(_wait_products(IN_FLIGHT), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _wait_products(in_flight):
    return f"wgmma.wait_group.sync.aligned {in_flight}; mov.b32 $0, 0;"


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
def split_off(x, COUNT: gl.constexpr):
    """`[M, N]` in pieces, without moving values: the first `COUNT` columns, then so many each time as came before."""
    N: gl.constexpr = x.shape[1]
    if N == COUNT:
        pieces = (x,)
    else:
        left, right = gl.split(gl.permute(gl.reshape(x, [M, 2, N // 2]), [0, 2, 1]))
        layout: gl.constexpr = product_layout(N // 2)
        left = gl.convert_layout(left, layout, assert_trivial=True)
        pieces = split_off(left, COUNT) + (gl.convert_layout(right, layout, assert_trivial=True),)
    return pieces


@gluon.jit
def join_columns(left, right):
    """Two pieces side by side."""
    joined = gl.permute(gl.join(left, right), [0, 2, 1])
    N: gl.constexpr = 2 * left.shape[1]
    return gl.convert_layout(gl.reshape(joined, [M, N]), product_layout(N), assert_trivial=True)


@gluon.jit
def declare_flag(WHICH: gl.constexpr):
    """A register of each thread that outlives an inline assembly block. Every partition declares its own, once."""
    gl.inline_asm_elementwise(_declare_flag(WHICH), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def any_above(x, LIMIT: gl.constexpr, WHICH: gl.constexpr):
    """Whether a number that this warp holds is above a limit: a scalar, the same for all 32 threads.

    `x`: partial sums `[M, 8]` or one number for each row `[M]`, in a layout of a product. Gluon has no way from a
    tensor to a scalar but a reduction over the whole warpgroup, for which its four warps would wait in every key tile.
    Here each warp votes by itself, and the vote passes from one assembly block to the next in a register
    (`declare_flag`). Nothing behind a branch on it may make warps wait for one another.
    """
    COUNT: gl.constexpr = 2 if len(x.shape) == 1 else 4
    gl.inline_asm_elementwise(
        _vote(WHICH, LIMIT, COUNT), _vote_operands(COUNT), [x], dtype=gl.float32, is_pure=False, pack=COUNT
    )
    return gl.inline_asm_elementwise(_read_flag(WHICH), "=r", [], dtype=gl.int32, is_pure=False, pack=1) != 0


@gluon.constexpr_function
def _declare_flag(which):
    return f".reg .b32 flashtile_flag_{which}; mov.b32 $0, 0;"


@gluon.constexpr_function
def _vote(which, limit, count):
    """PTX that sets the flag to whether one of a warp's `count` numbers for each thread is above the limit."""
    if count == 4:
        largest = "max.f32 largest, $4, $5; max.f32 other, $6, $7; max.f32 largest, largest, other;"
    else:
        largest = "max.f32 largest, $2, $3;"
    passed_on = " ".join(f"mov.b32 ${i}, ${count + i};" for i in range(count))
    return f"""{{
        .reg .pred above;
        .reg .f32 largest, other;
        {largest}
        setp.gt.f32 above, largest, {limit};
        vote.sync.any.pred above, above, 0xffffffff;
        selp.b32 flashtile_flag_{which}, 1, 0, above;
        {passed_on}
    }}"""


@gluon.constexpr_function
def _vote_operands(count):
    return ",".join(["=f"] * count + ["f"] * count)


@gluon.constexpr_function
def _read_flag(which):
    return f"mov.b32 $0, flashtile_flag_{which};"


@gluon.jit
def begin_turn(WHICH: gl.constexpr):
    """Waits until the consumer before this one has started its products. Every consumer has as many turns."""
    gl.inline_asm_elementwise(_named_barrier("sync", WHICH), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_turn(WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    """The consumer after this one may start."""
    NEXT: gl.constexpr = (WHICH + 1) % CONSUMERS
    gl.inline_asm_elementwise(_named_barrier("arrive", NEXT), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _named_barrier(action, consumer):
    """PTX of the barrier of a consumer and the one before it. Triton counts its own barriers from 0."""
    return f"barrier.cta.{action}.aligned {8 + consumer}, 256; mov.b32 $0, 0;"
