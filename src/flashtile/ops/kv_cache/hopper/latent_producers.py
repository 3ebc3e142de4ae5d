"""How the cache comes to the chip in latent attention on Hopper: by TMA, or copied by threads, where it has 8 bits, and
then widened. The letters of shapes are those of `latent`."""

from typing import Any, NamedTuple

from flashtile._backends.gluon import async_copy, fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_load
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
#: Chunks that are widened together, and share a fence and barriers; groups of them on chip in 16 bits, and in 8.
GROUP = gl.constexpr(3)
WIDENED = gl.constexpr(4)
COPIED = gl.constexpr(3)


@gluon.constexpr_function
def key_groups(widens):
    """Groups of chunks of keys on chip in 16 bits, which have barriers in common: single chunks if none are widened."""
    return WIDENED if widens else STAGES * CHUNKS


@gluon.jit
def chunk_slot(index, chunk: gl.constexpr, config):
    """The place of a chunk of tile `index` in 16 bits, that of its barriers, and their phase."""
    if config.KIND is None:
        stage, phase = ring_slot(index, STAGES)
        place = stage * CHUNKS + chunk
        slot = place
    else:
        slot, phase = group_slot(index, chunk // GROUP, WIDENED)
        place = slot * GROUP + chunk % GROUP
    return place, slot, phase


@gluon.jit
def group_slot(index, group: gl.constexpr, GROUPS: gl.constexpr):
    """The place of a group of chunks of tile `index` in a ring of `GROUPS`, and the phase of its barriers."""
    return ring_slot(index * (CHUNKS // GROUP) + group, GROUPS)


@gluon.constexpr_function
def chunk_column(chunk):
    """The first column of a chunk, in the order in which chunks are loaded: that in which their places become free.
    Those behind the values come first, then those of either half of the values in turn."""
    value = chunk - (CHUNKS - VALUE_CHUNKS)
    number = VALUE_CHUNKS + chunk if value < 0 else value % 2 * SUM_CHUNKS + value // 2
    return number * CHUNK


@gluon.jit
def produce(q_desc, cache_desc, shared, sequences, work, problem, config):
    """Loads q, and loads the keys, or widens those that are copied."""
    if config.KIND is not None:
        widen(q_desc, shared, work, problem, config)
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
        for chunk in gl.static_range(CHUNKS):
            place, _, phase = chunk_slot(index, chunk, config)
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


# A cache of 8 bits
#
# Products see what threads have stored only behind a fence, which waits for all that its thread has asked of memory, so
# one warpgroup copies, and another one widens.


class CachedRows(NamedTuple):
    """Rows of 8 bits in words of 32, and their `CacheStrides`; factors and theirs, which are without rows where all
    rows have one."""

    pointer: Any
    strides: Any
    factors: Any
    factor_strides: Any


class TileRows(NamedTuple):
    """Pointers `[N]` to the rows of a tile, and which of them are there."""

    pointers: Any
    there: Any


class Copied(NamedTuple):
    """Chunks of rows on chip, in words `[COPIED · GROUP, N, CHUNK / 4]`, and the barriers that say that a group is
    there; factors of the rows of two tiles `[2, N]`, or None."""

    words: Any
    full: Any
    factors: Any


@gluon.jit
def make_words():
    """Room for copied chunks."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [COPIED * GROUP, N, CHUNK // 4], layout)


@gluon.jit
def make_factors():
    """Room for factors of the rows of two tiles."""
    return gl.allocate_shared_memory(gl.float32, [2, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copy_group(tile, group: gl.constexpr, index, copied):
    """Starts to copy a group of chunks, zeros for rows that are not there. It is counted from the first group of tile
    `index`, and may be one of the next tile. A place serves again as soon as its group has been widened."""
    slot, _ = group_slot(index, group, COPIED)
    for number in gl.static_range(GROUP):
        _copy_chunk(tile, (group * GROUP + number) % CHUNKS, copied.words.index(slot * GROUP + number))
    release(copied.full.index(slot))


@gluon.jit
def _copy_chunk(tile, chunk: gl.constexpr, place):
    first: gl.constexpr = chunk_column(chunk) // 4
    column = first + gl.arange(0, CHUNK // 4, gl.SliceLayout(0, rows_layout()))
    pointers = tile.pointers[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(place, pointers, mask=tile.there[:, None])


@gluon.jit
def finish_copies():
    """Waits for all that this thread copies: the last tile has none behind it, and nobody waits for its zeros."""
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def widen(q_desc, shared, work, problem, config):
    """Loads q, and stores the keys that are copied, group by group, in 16 bits."""
    dtype: gl.constexpr = q_desc.dtype
    copied = shared.copied
    HAS_FACTORS: gl.constexpr = copied.factors is not None
    Q_BYTES: gl.constexpr = CHUNKS * M * CHUNK * dtype.primitive_bitwidth // 8
    mbarrier.expect(shared.q_full.index(0), Q_BYTES)
    q_row = work.first_token * problem.heads + work.first_row
    for chunk in gl.static_range(CHUNKS):
        tma_load(q_desc, [q_row, chunk_column(chunk)], shared.q_full.index(0), shared.q.index(chunk))
    for index in range(work.tiles):
        factors = gl.to_tensor(1.0)
        for group in gl.static_range(CHUNKS // GROUP):
            slot, phase = group_slot(index, group, COPIED)
            mbarrier.wait(copied.full.index(slot), phase)
            if HAS_FACTORS and group == 0:
                factors = copied.factors.index(index & 1).load(gl.SliceLayout(1, rows_layout()))
            words = ()
            for number in gl.static_range(GROUP):
                words = words + (copied.words.index(slot * GROUP + number).load(rows_layout()),)
            slot, phase = group_slot(index, group, WIDENED)
            mbarrier.wait(shared.empty.index(slot), phase ^ 1)
            for number in gl.static_range(GROUP):
                place = shared.keys.index(slot * GROUP + number)
                store_widened(words[number], factors, place, config.KIND, HAS_FACTORS)
            fence_async_shared()
            release(shared.full.index(slot))


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
def tile_rows(rows, pages, index, copied, work, config):
    """The places in the cache of the rows of a tile. Starts to copy their factors."""
    key, there = tile_keys(index, work)
    row = key
    if config.PAGE_SIZE > 0:
        row = key % config.PAGE_SIZE
    page = pages.to(gl.int64)
    pointers = rows.pointer + (page * rows.strides.outer + row.to(gl.int64) * rows.strides.row)
    if copied.factors is not None:
        places = page * rows.factor_strides.outer + row.to(gl.int64) * rows.factor_strides.row
        async_copy.async_copy_global_to_shared(copied.factors.index(index & 1), rows.factors + places, mask=there)
    return TileRows(pointers, there)


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
