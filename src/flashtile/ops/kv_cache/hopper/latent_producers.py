"""The producers of latent attention on Hopper: one loads the cache by TMA, the other widens rows of 8 bits. The letters
of shapes are those of `latent`."""

from typing import Any, NamedTuple

from flashtile._backends.gluon import fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
from flashtile.ops.attention.hopper.primitives import (
    HeadRows,
    M,
    coordinates,
    matrix_layout,
    release,
    ring_slot,
)

#: Keys of a tile, and columns of a chunk.
N = gl.constexpr(64)
CHUNK = gl.constexpr(64)
#: Chunks of a row of the cache, those of them that are values, and those of the values that a warpgroup sums.
CHUNKS = gl.constexpr(9)
VALUE_CHUNKS = gl.constexpr(8)
SUM_CHUNKS = gl.constexpr(4)
#: Tiles of keys on chip.
STAGES = gl.constexpr(2)
#: Chunks of 8 bits that are on their way to registers.
AHEAD = gl.constexpr(5)


@gluon.constexpr_function
def chunk_column(chunk):
    """The first column of a chunk, in the order in which chunks are loaded: that in which their places become free.
    Those behind the values come first, then those of either half of the values in turn."""
    value = chunk - (CHUNKS - VALUE_CHUNKS)
    number = VALUE_CHUNKS + chunk if value < 0 else value % 2 * SUM_CHUNKS + value // 2
    return number * CHUNK


@gluon.jit
def produce(q_desc, cache_desc, rows, shared, sequences, work, problem, config):
    """Loads q and the keys. `rows`: `CachedRows`, of a cache of 8 bits."""
    if config.KIND is not None:
        widen(q_desc, rows, shared, sequences, work, problem, config)
    else:
        load(q_desc, cache_desc, shared, sequences, work, problem, config)


@gluon.jit
def load(q_desc, cache_desc, shared, sequences, work, problem, config):
    """Loads q with the first keys, and the keys, chunk by chunk.

    Where the first visible row lies within a box of a page, that box is loaded from there on, and what follows its end
    is left out: rows of left padding may hold NaN.
    """
    dtype: gl.constexpr = q_desc.dtype
    BOXES: gl.constexpr = N // config.BOX
    Q_BYTES: gl.constexpr = M * CHUNK * dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = N * CHUNK * dtype.primitive_bitwidth // 8
    q_row = work.first_token * problem.heads + work.first_row
    pages = tile_pages(sequences, work.first_tile, work, problem, config)
    for index in range(work.tiles):
        # The pages of the next tile are looked up before this one waits for places.
        here = pages
        tile = work.first_tile + index
        pages = tile_pages(sequences, tile + 1, work, problem, config)
        stage, phase = ring_slot(index, STAGES)
        for chunk in gl.static_range(CHUNKS):
            place = stage * CHUNKS + chunk
            full = shared.full.index(place)
            mbarrier.wait(shared.empty.index(place), phase ^ 1)
            if index == 0:
                mbarrier.expect(full, BYTES + Q_BYTES)
                tma_load(q_desc, [q_row, chunk_column(chunk)], full, shared.q.index(chunk))
            else:
                mbarrier.expect(full, BYTES)
            boxes = reinterpret(shared.keys.index(place), dtype, [BOXES, 1, 1, config.BOX, 1, CHUNK], cache_desc.layout)
            for box in gl.static_range(BOXES):
                key = work.base + tile * N + box * config.BOX
                row = key
                if config.PAGE_SIZE > 0:
                    row = key % config.PAGE_SIZE
                # Rows past the end of the sequence are read as zeros.
                length = gl.maximum(work.total - (key - row), 0)
                if config.CUTS_BOX and box == 0:
                    length = gl.where(tile == 0, gl.minimum(length, row + config.BOX), length)
                    row += gl.where(tile == 0, work.hidden, 0)
                rows = HeadRows(0, 0, here[box] * problem.rows_apart, length)
                tma_load(cache_desc, coordinates(rows, row, chunk_column(chunk), True), full, boxes.index(box))


@gluon.jit
def tile_pages(sequences, tile, work, problem, config):
    """The page, or the entry of the cache, of each box of a tile of keys. 0 past the end of the sequence, where the
    table is not read."""
    pages = ()
    for box in gl.static_range(N // config.BOX):
        if config.PAGE_SIZE > 0:
            key = work.base + tile * N + box * config.BOX
            table = sequences.table + work.sequence.to(gl.int64) * problem.stride_table
            page = gl.load(table + key // config.PAGE_SIZE, mask=key < work.total, other=0).to(gl.int32)
        elif sequences.entries is not None:
            page = gl.load(sequences.entries + work.sequence).to(gl.int32)
        else:
            page = work.sequence
        pages = pages + (page,)
    return pages


# The producer of a cache of 8 bits


class CachedRows(NamedTuple):
    """Rows of 8 bits in words of 32, and their `CacheStrides`; factors and theirs, which are without rows where all
    rows have one."""

    pointer: Any
    strides: Any
    factors: Any
    factor_strides: Any


class TileRows(NamedTuple):
    """Pointers `[N]` to the rows of a tile, which of them are there, and their factors, if they have some."""

    pointers: Any
    there: Any
    factors: Any


@gluon.jit
def widen(q_desc, rows, shared, sequences, work, problem, config):
    """Loads q, and the keys chunk by chunk through registers. `rows`: `CachedRows`."""
    dtype: gl.constexpr = q_desc.dtype
    HAS_FACTORS: gl.constexpr = rows.factor_strides.row is not None
    Q_BYTES: gl.constexpr = CHUNKS * M * CHUNK * dtype.primitive_bitwidth // 8
    mbarrier.expect(shared.q_full.index(0), Q_BYTES)
    q_row = work.first_token * problem.heads + work.first_row
    for chunk in gl.static_range(CHUNKS):
        tma_load(q_desc, [q_row, chunk_column(chunk)], shared.q_full.index(0), shared.q.index(chunk))
    pages = row_pages(sequences, 0, work, problem, config)
    here = tile_rows(rows, pages, 0, work, config)
    pages = row_pages(sequences, 1, work, problem, config)
    OLDEST: gl.constexpr = 0
    ahead = ()
    for chunk in gl.static_range(AHEAD):
        ahead = ahead + (load_rows(here, chunk),)
    for index in range(work.tiles):
        later = tile_rows(rows, pages, index + 1, work, config)
        pages = row_pages(sequences, index + 2, work, problem, config)
        stage, phase = ring_slot(index, STAGES)
        for chunk in gl.static_range(CHUNKS):
            if chunk + AHEAD < CHUNKS:
                upcoming = load_rows(here, chunk + AHEAD)
            else:
                upcoming = load_rows(later, chunk + AHEAD - CHUNKS)
            place = stage * CHUNKS + chunk
            mbarrier.wait(shared.empty.index(place), phase ^ 1)
            store_widened(ahead[OLDEST], here.factors, shared.keys.index(place), config.KIND, HAS_FACTORS)
            fence_async_shared()
            release(shared.full.index(place))
            ahead = ahead[1:] + (upcoming,)
        here = later


@gluon.constexpr_function
def rows_layout():
    """The layout of a chunk in registers: each thread has four words of two rows."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@gluon.jit
def tile_keys(index, work):
    """The keys of a tile, and which of them are rows of the sequence and of this split."""
    key = work.base + (work.first_tile + index) * N + gl.arange(0, N, gl.SliceLayout(1, rows_layout()))
    return key, (key < work.total) & (index < work.tiles)


@gluon.jit
def row_pages(sequences, index, work, problem, config):
    """The page of each row of a tile `[N]`, or the entry of the cache."""
    if config.PAGE_SIZE > 0:
        key, there = tile_keys(index, work)
        table = sequences.table + work.sequence.to(gl.int64) * problem.stride_table
        page = gl.load(table + key // config.PAGE_SIZE, mask=there, other=0)
    elif sequences.entries is not None:
        page = gl.load(sequences.entries + work.sequence)
    else:
        page = work.sequence
    return page


@gluon.jit
def tile_rows(rows, pages, index, work, config):
    """The places in the cache of the rows of a tile."""
    key, there = tile_keys(index, work)
    row = key
    if config.PAGE_SIZE > 0:
        row = key % config.PAGE_SIZE
    page = pages.to(gl.int64)
    pointers = rows.pointer + (page * rows.strides.outer + row.to(gl.int64) * rows.strides.row)
    factors = gl.to_tensor(1.0)
    if rows.factor_strides.row is not None:
        places = page * rows.factor_strides.outer + row.to(gl.int64) * rows.factor_strides.row
        factors = gl.load(rows.factors + places, mask=there, other=0.0)
    return TileRows(pointers, there, factors)


@gluon.jit
def load_rows(rows, chunk: gl.constexpr):
    """A chunk of a tile `[N, CHUNK / 4]`, four numbers in a word; 0 for rows that are not there."""
    first: gl.constexpr = chunk_column(chunk) // 4
    column = first + gl.arange(0, CHUNK // 4, gl.SliceLayout(0, rows_layout()))
    return gl.load(rows.pointers[:, None] + column[None, :], mask=rows.there[:, None], other=0)


@gluon.jit
def store_widened(words, factors, place, KIND: gl.constexpr, HAS_FACTORS: gl.constexpr):
    """Stores a chunk in 16 bits, in words again, times factors of the rows, if they have some."""
    PAIR: gl.constexpr = "bf16x2" if place.dtype == gl.bfloat16 else "f16x2"
    if HAS_FACTORS:
        factor = factors[:, None] + gl.zeros(words.shape, gl.float32, rows_layout())
        low, high = gl.inline_asm_elementwise(
            widening(KIND, PAIR, True), "=r,=r,r,f", [words, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            widening(KIND, PAIR, False), "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    pairs = gl.reshape(gl.join(low, high), [N, CHUNK // 2])
    reinterpret(place, gl.int32, [N, CHUNK // 2], matrix_layout(CHUNK // 2, 32)).store(pairs)


@gluon.constexpr_function
def widening(kind, pair, has_factors):
    """The instructions from four numbers of 8 bits to two pairs. A conversion from float16 to bfloat16, or from an
    integer, is done by a unit with an eighth of the rate, so all go by way of float32."""
    registers = ".reg .b32 all, bits; .reg .b16 low, high, first, second; .reg .f32 x0, x1, x2, x3;"
    lines = []
    if kind == "int8":
        lines.append("xor.b32 all, $2, 0x80808080;")
        for place in range(4):
            # The bits of 2²³ + 128 + number.
            lines.append(f"prmt.b32 bits, all, 0x4b000000, 0x744{place}; mov.b32 x{place}, bits;")
            lines.append(f"sub.f32 x{place}, x{place}, 0f4b000080;")
    else:
        lines.append("mov.b32 {low, high}, $2;")
        for place, half in enumerate(("low", "high")):
            lines.append(f"cvt.rn.f16x2.{kind}x2 bits, {half}; mov.b32 {{first, second}}, bits;")
            lines.append(f"cvt.f32.f16 x{2 * place}, first; cvt.f32.f16 x{2 * place + 1}, second;")
    if has_factors:
        lines.extend(f"mul.f32 x{place}, x{place}, $3;" for place in range(4))
    lines.append(f"cvt.rn.{pair}.f32 $0, x1, x0; cvt.rn.{pair}.f32 $1, x3, x2;")
    return "{ " + registers + " ".join(lines) + " }"
