"""Rows of a cache that threads load, where TMA does not: of pages that no box divides, and of 8 bits.

A warpgroup of its own copies them with `cp.async`, which takes no registers and waits for nothing: rows of 16 bits to
their place in the ring; rows of 8 bits to a place for tiles as they lie in the cache, some tiles ahead, from where the
warpgroup widens them into the ring.

Products see what threads have written only behind a fence between the two. That of a thread that loads would wait for
its copies, and that of a consumer delays products. So the warp of the producer passes tiles on (`pass_on`): it waits
for who wrote them, fences, and tells the consumers.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import async_copy, fence_async_shared, gl, gluon, mbarrier, reinterpret
from flashtile.ops.attention.hopper.primitives import WARPGROUP, Chunks, barriers, matrix_layout

#: Tiles of 8-bit keys, and of values, that are copied ahead of those that are widened.
AHEAD = gl.constexpr(2)

#: Words of 32 bits that a copy moves at most, and those that a thread widens at a time.
_COPIED, _WIDENED = gl.constexpr(4), gl.constexpr(2)


class RowSource(NamedTuple):
    """The place of the rows of a head of a sequence in one of the caches.

    Attributes:
        rows: address of the head in row 0 of the sequence's entry, or of page 0.
        factors: likewise of the factors of rows; None where rows have none of their own.
        stride: words from one row to the next.
        apart: rows from one page to the next.
        factor_strides: a `CacheStrides`.
    """

    rows: Any
    factors: Any
    stride: Any
    apart: Any
    factor_strides: Any


class SeenRows(NamedTuple):
    """The rows of a sequence that some query of a tile sees, `[first, end)`, and where its pages are listed."""

    first: Any
    end: Any
    table: Any


class LoadedRows(NamedTuple):
    """Shared memory of the keys, or the values, that threads load.

    Attributes:
        arrived: for each place of the ring a barrier that says that it was written.
        words: `Chunks` of places for `AHEAD` tiles of 8 bits, `[AHEAD, ROWS, WORDS]`.
        factors: of the rows of these, `[AHEAD, ROWS]`.

    What a call does not need is `arrived` again.
    """

    arrived: Any
    words: Any
    factors: Any


@gluon.jit
def make_loaded_rows(ring, pointer, strides, WIDENED: gl.constexpr):
    """The `LoadedRows` beside a ring. `pointer`, `strides`: of the factors."""
    arrived = barriers(ring.STAGES, WARPGROUP if WIDENED == "" else 1)
    words = Chunks(arrived, arrived)
    factors = arrived
    if WIDENED != "":
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        main = gl.allocate_shared_memory(gl.int32, [AHEAD, ring.ROWS, ring.WIDTH // 4], layout)
        tail = main
        if ring.TAIL > 0:
            tail = gl.allocate_shared_memory(gl.int32, [AHEAD, ring.ROWS, ring.TAIL // 4], layout)
        words = Chunks(main, tail)
        if pointer is not None and strides.row is not None:
            factors = gl.allocate_shared_memory(gl.float32, [AHEAD, ring.ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return LoadedRows(arrived, words, factors)


@gluon.jit
def cache_factor(pointer, strides, head):
    """The factor that all rows of a key/value head share; None where there is none."""
    factor = None
    if pointer is not None and strides.row is None:
        factor = gl.load(pointer + head * strides.head)
    return factor


@gluon.jit
def head_factors(pointer, strides, entry, head):
    """Address of the factors of a head in an entry, or in page 0; None where rows have none of their own."""
    factors = None
    if pointer is not None and strides.row is not None:
        factors = pointer + (entry * strides.outer + head * strides.head)
    return factors


@gluon.constexpr_function
def row_layout(WORDS, TOGETHER):
    """The layout of rows of `WORDS`, of which a thread of the warpgroup has so many `TOGETHER`."""
    columns = min(WORDS // TOGETHER, 32)
    return gl.BlockedLayout([1, TOGETHER], [32 // columns, columns], [4, 1], [1, 0])


@gluon.constexpr_function
def _one_row():
    """The layout of numbers of which a thread has one of a row."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def tile_rows(row, seen, ROWS: gl.constexpr, layout: gl.constexpr):
    """The rows of a tile from `row` on. In place of a row that nobody sees stands the nearest that somebody sees: it
    counts for nothing, but is finite."""
    rows = row + gl.arange(0, ROWS, layout)
    return gl.maximum(gl.minimum(gl.maximum(rows, seen.first), seen.end - 1), 0)


class TileRows(NamedTuple):
    """A tile of rows from row `first` of a sequence on: the pages of each in the layout of either chunk, and in that of
    their factors. 0 without pages."""

    first: Any
    main: Any
    tail: Any
    factors: Any


@gluon.jit
def look_up(ring, row, seen, config, FACTORS: gl.constexpr):
    """The `TileRows` from `row` on."""
    OF_WORD: gl.constexpr = words_bytes(config)
    main = gl.to_tensor(0)
    tail = main
    factors = main
    if config.PAGE_SIZE > 0:
        layout: gl.constexpr = row_layout(ring.WIDTH // OF_WORD, _COPIED)
        main = _pages(row, seen, ring.ROWS, config.PAGE_SIZE, gl.SliceLayout(1, layout))
        tail = main
        if ring.TAIL > 0 and ring.TAIL != ring.WIDTH:
            tail_layout: gl.constexpr = row_layout(ring.TAIL // OF_WORD, _COPIED)
            tail = _pages(row, seen, ring.ROWS, config.PAGE_SIZE, gl.SliceLayout(1, tail_layout))
        if FACTORS:
            factors = _pages(row, seen, ring.ROWS, config.PAGE_SIZE, _one_row())
    return TileRows(row, main, tail, factors)


@gluon.jit
def _pages(row, seen, ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, layout: gl.constexpr):
    pages = tile_rows(row, seen, ROWS, layout).to(gl.uint32) // PAGE_SIZE
    return gl.load(seen.table + pages, mask=seen.first < seen.end, other=0).to(gl.int32)


@gluon.constexpr_function
def words_bytes(config):
    """Elements of the cache in a word."""
    return 4 if config.WIDENED else 2


@gluon.jit
def copy_rows(source, ring, slot, arrived, rows, seen, config, HEAD_DIM: gl.constexpr):
    """Starts to copy rows of 16 bits into a slot as soon as it is free. When they have come, each thread arrives."""
    ring.wait_empty(slot)
    main = reinterpret(
        ring.tiles.index(slot.place), gl.int32, [ring.ROWS, ring.WIDTH // 2], matrix_layout(ring.WIDTH // 2, 32)
    )
    _copy(source, main, rows.first, rows.main, seen, config, FIRST=0, COLUMNS=HEAD_DIM // 2)
    if ring.TAIL > 0:
        tail = reinterpret(
            ring.tail.index(slot.place), gl.int32, [ring.ROWS, ring.TAIL // 2], matrix_layout(ring.TAIL // 2, 32)
        )
        _copy(source, tail, rows.first, rows.tail, seen, config, FIRST=ring.WIDTH // 2, COLUMNS=HEAD_DIM // 2)
    async_copy.mbarrier_arrive(arrived.index(slot.place), increment_count=False)


@gluon.jit
def copy_ahead(source, ring, loaded, place, rows, seen, config, HEAD_DIM: gl.constexpr):
    """Starts to copy rows of 8 bits, and their factors, as one group."""
    main = loaded.words.main.index(place)
    _copy(source, main, rows.first, rows.main, seen, config, FIRST=0, COLUMNS=HEAD_DIM // 4)
    if ring.TAIL > 0:
        tail = loaded.words.tail.index(place)
        _copy(source, tail, rows.first, rows.tail, seen, config, FIRST=ring.WIDTH // 4, COLUMNS=HEAD_DIM // 4)
    if source.factors is not None:
        seen_rows = tile_rows(rows.first, seen, ring.ROWS, _one_row())
        own = seen_rows.to(gl.int64) * source.factor_strides.row
        if config.PAGE_SIZE > 0:
            own = (seen_rows.to(gl.uint32) % config.PAGE_SIZE).to(gl.int64) * source.factor_strides.row
            own += rows.factors.to(gl.int64) * source.factor_strides.outer
        async_copy.async_copy_global_to_shared(
            loaded.factors.index(place), source.factors + own, mask=seen.first < seen.end
        )
    async_copy.commit_group()


@gluon.jit
def _copy(source, tile, row, pages, seen, config, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts to copy words from `FIRST` on of rows of `COLUMNS` words to a tile `[ROWS, WORDS]`. Without rows, and past
    their end, it gets zeros."""
    ROWS: gl.constexpr = tile.shape[0]
    WORDS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = row_layout(WORDS, _COPIED)
    word = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    place = tile_rows(row, seen, ROWS, gl.SliceLayout(1, layout))
    if config.PAGE_SIZE > 0:
        place = pages * source.apart + (place.to(gl.uint32) % config.PAGE_SIZE).to(gl.int32)
    # The product of two unsigned numbers has 64 bits in one instruction.
    begin = place.to(gl.uint32).to(gl.int64) * source.stride.to(gl.uint32).to(gl.int64)
    pointers = (source.rows + word)[None, :] + begin[:, None]
    there = seen.first < seen.end
    if COLUMNS < FIRST + WORDS:
        there = (word < COLUMNS)[None, :] & (place >= 0)[:, None] & there
    async_copy.async_copy_global_to_shared(tile, pointers, mask=there, cache_modifier=".cg")


@gluon.jit
def put_rows(source, ring, slot, loaded, place, config):
    """Rows of 8 bits that have come, widened and multiplied by their factors, into a slot as soon as it is free."""
    async_copy.wait_group(2 * AHEAD - 1)
    ring.wait_empty(slot)
    factors = None
    if source.factors is not None:
        factors = loaded.factors.index(place)
    _put(ring.tiles.index(slot.place), loaded.words.main.index(place), factors, config)
    if ring.TAIL > 0:
        _put(ring.tail.index(slot.place), loaded.words.tail.index(place), factors, config)
    mbarrier.arrive(loaded.arrived.index(slot.place), count=1)


@gluon.jit
def _put(tile, words, factors, config):
    ROWS: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    STEP: gl.constexpr = min(ROWS, 32)
    layout: gl.constexpr = row_layout(WORDS, _WIDENED)
    target = reinterpret(tile, gl.int32, [ROWS, 2 * WORDS], matrix_layout(2 * WORDS, 32))
    for first in gl.static_range(0, ROWS, STEP):
        own = None
        if factors is not None:
            own = factors.slice(first, STEP, dim=0).load(gl.SliceLayout(1, layout))
        wide = widened(words.slice(first, STEP, dim=0).load(layout), own, tile.dtype, config.WIDENED)
        target.slice(first, STEP, dim=0).store(wide)


@gluon.jit
def pass_on(ring, arrived, slot):
    """The producer, which is one warp: tells the consumers that a tile is there, when threads have written it."""
    mbarrier.wait(arrived.index(slot.place), slot.phase)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(slot.place), count=1)


@gluon.jit
def widened(words, factors, dtype: gl.constexpr, KIND: gl.constexpr):
    """The words of 8-bit rows in 16 bits, twice as many, times the factors of rows; None without. Triton's own
    conversions go through a unit with an eighth of the rate, which has exponentials to compute."""
    asm: gl.constexpr = _widen(KIND, dtype, factors is not None)
    kinds: gl.constexpr = (gl.int32, gl.int32)
    if factors is not None:
        low, high = gl.inline_asm_elementwise(
            asm, "=r,=r,r,f", [words, factors[:, None]], dtype=kinds, is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(asm, "=r,=r,r", [words], dtype=kinds, is_pure=True, pack=1)
    return gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@gluon.constexpr_function
def _widen(kind, to, multiply):
    """PTX that converts the four numbers of a word: to float16 at once, where nothing is multiplied, else by way of
    float32. An integer becomes the last bits of a number about 2^10 or 2^23, from which that is subtracted."""
    if to == gl.float16 and not multiply:
        return _widen_to_halves(kind)
    if kind == "s8":
        lines = ["xor.b32 a, $2, 0x80808080;"]
        for i in range(4):
            lines.append(f"prmt.b32 b, a, 0x4B000000, 0x744{i}; mov.b32 x{i}, b; sub.f32 x{i}, x{i}, 0f4B000080;")
    else:
        lines = [
            f"mov.b32 {{low, high}}, $2; cvt.rn.f16x2.{kind}x2 a, low; cvt.rn.f16x2.{kind}x2 b, high;",
            "mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;",
            *(f"cvt.f32.f16 x{i}, h{i};" for i in range(4)),
        ]
    if multiply:
        lines += [f"mul.f32 x{i}, x{i}, $3;" for i in range(4)]
    pair = "bf16x2" if to == gl.bfloat16 else "f16x2"
    return " ".join(
        [
            "{ .reg .b32 a, b; .reg .b16 low, high, h0, h1, h2, h3; .reg .f32 x0, x1, x2, x3;",
            *lines,
            f"cvt.rn.{pair}.f32 $0, x1, x0; cvt.rn.{pair}.f32 $1, x3, x2; }}",
        ]
    )


@gluon.constexpr_function
def _widen_to_halves(kind):
    if kind == "s8":
        lines = [
            "xor.b32 a, $2, 0x80808080; mov.b32 middle, 0x64806480;",
            "prmt.b32 b, a, 0x64646464, 0x4140; sub.rn.f16x2 $0, b, middle;",
            "prmt.b32 b, a, 0x64646464, 0x4342; sub.rn.f16x2 $1, b, middle;",
        ]
    else:
        lines = [
            "mov.b32 {low, high}, $2;",
            f"cvt.rn.f16x2.{kind}x2 a, low; cvt.rn.f16x2.{kind}x2 b, high; mov.b32 $0, a; mov.b32 $1, b;",
        ]
    return " ".join(["{ .reg .b32 a, b, middle; .reg .b16 low, high;", *lines, "}"])
