"""Walking over the tiles of a block mask in the Hopper kernels.

The mask's lists name, for each line (a row of its tiles, in the backward a column), the tiles that have something
visible. The producer reads them. For each tile it publishes, through shared memory, the number and the kind: FULL,
EMPTY, or the place of the pattern. Consumers then read the bits of the pattern, one for each row and column of their 64
rows: in the forward while the scores are computed, in the backward, which lacks the registers, after that. Stored tiles
are TILE_Q × TILE_K, multiples of the kernels' tiles. Both are 0 where there is no block mask.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.primitives import M, number_places, read_number, write_number

#: As in `flashtile.ops.attention.tile_lists`.
FULL = gl.constexpr(-1)
EMPTY = gl.constexpr(-2)

#: Fields that a producer publishes of a listed tile, and how many they are: its number, its kind, and in the backward
#: the head (counted from the first one) and how many tiles of keys add to its dq before this one.
TILE_NUMBER, TILE_KIND, TILE_HEAD, TILE_TURN = (gl.constexpr(field) for field in range(4))
TILE_INFO_FIELDS = gl.constexpr(4)


class BlockLists(NamedTuple):
    """The lists of a block mask. `numbers`: where in them the parts begin that a kernel reads, and how far apart the
    lines of two batch entries and of two heads are (`parameters.BlockNumbers`)."""

    lists_ptr: Any
    numbers: Any


@gluon.jit
def _first_line(blocks, sequence, head):
    """The first line of a head, among the lines of all heads."""
    return sequence * blocks.numbers.stride_batch + head * blocks.numbers.stride_head


@gluon.jit
def line_entries(blocks, sequence, head, line):
    """Where the entries of a line begin and end."""
    pointer = blocks.lists_ptr + blocks.numbers.offsets + _first_line(blocks, sequence, head) + line
    return gl.load(pointer), gl.load(pointer + 1)


@gluon.jit
def listed_line(blocks, sequence, head, line, rows, exists, OTHER: gl.constexpr, TILE: gl.constexpr):
    """Where the entries of a line of a packed call begin, and how many tiles of `OTHER` they list before row `rows`.

    The lists are made for the longest sequence. Entries ascend, so those that begin past the end of a shorter one come
    last. A sequence that does not `exist` has no line: rows past the last sequence.
    """
    pointer = blocks.lists_ptr + blocks.numbers.offsets + _first_line(blocks, sequence, head) + line
    entry = gl.load(pointer, mask=exists, other=0)
    low = entry
    high = gl.load(pointer + 1, mask=exists, other=0)
    while low < high:
        middle = (low + high) // 2
        if gl.load(blocks.lists_ptr + blocks.numbers.tiles + middle) * TILE < rows:
            low = middle + 1
        else:
            high = middle
    last = gl.load(blocks.lists_ptr + blocks.numbers.tiles + (low - 1), mask=low > entry, other=-1)
    past_end = gl.maximum((last + 1) * (TILE // OTHER) - gl.cdiv(rows, OTHER), 0)
    return entry, (low - entry) * (TILE // OTHER) - past_end


@gluon.jit
def load_tile_kind(blocks, entry, last_entry, tile):
    """The kind of a tile of the line whose entries lie between these two; EMPTY where it is not listed. By one warp."""
    STEP: gl.constexpr = 128
    place = gl.arange(0, STEP, gl.BlockedLayout([STEP // 32], [32], [1], [0]))
    kind = gl.to_tensor(EMPTY)
    for first in range(entry, last_entry, STEP):
        pointer = blocks.lists_ptr + first + place
        inside = place < last_entry - first
        tiles = gl.load(pointer + blocks.numbers.tiles, mask=inside, other=-1)
        kinds = gl.load(pointer + blocks.numbers.kinds, mask=inside, other=EMPTY)
        kind = gl.maximum(kind, gl.max(gl.where(tiles == tile, kinds, EMPTY), 0))  # EMPTY is the least
    return kind


@gluon.jit
def listed_tile(blocks, entry, step, listed, OTHER: gl.constexpr, TILE: gl.constexpr):
    """Number and kind of the kernel's tile `step` of a line whose entries begin at `entry`, where `TILE` is cut into
    tiles of `OTHER`. A line without entries (not `listed`) has one, of which nothing is visible."""
    place = blocks.lists_ptr + entry + step // (TILE // OTHER)
    tile = gl.load(place + blocks.numbers.tiles, mask=listed, other=0) * (TILE // OTHER) + step % (TILE // OTHER)
    return tile, gl.load(place + blocks.numbers.kinds, mask=listed, other=EMPTY)


@gluon.jit
def listed_rank(blocks, entry, step, OTHER: gl.constexpr, TILE: gl.constexpr):
    """How many stored tiles are before that of `listed_tile` in the other list that it is in. The ranks of all entries
    lie behind their kinds, as these do behind their numbers."""
    numbers = blocks.numbers
    return gl.load(blocks.lists_ptr + entry + step // (TILE // OTHER) + (2 * numbers.kinds - numbers.tiles))


@gluon.jit
def make_tile_info(PLACES: gl.constexpr):
    """Room for what the producer publishes of so many listed tiles."""
    return number_places(PLACES * TILE_INFO_FIELDS)


@gluon.jit
def write_tile_info(tile_info, place, FIELD: gl.constexpr, number):
    """The producer's side, before the tile itself is announced."""
    write_number(tile_info.index(place * TILE_INFO_FIELDS + FIELD), number)


@gluon.jit
def read_tile_info(tile_info, place, FIELD: gl.constexpr):
    return read_number(tile_info.index(place * TILE_INFO_FIELDS + FIELD))


@gluon.constexpr_function
def _bits_layout(WORDS):
    """Each thread has the words of both rows that it has scores of."""
    words = [[0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*words, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, WORDS])


@gluon.jit
def load_bits(
    blocks, kind, first_row, column, COLUMNS: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_COLUMNS: gl.constexpr
):
    """`[64, COLUMNS / 32]` words: what is visible of the `column`-th tile of COLUMNS to 64 rows from `first_row` on. Of
    a tile without a pattern nothing is read, and all words are 0."""
    WORDS: gl.constexpr = COLUMNS // 32
    layout: gl.constexpr = _bits_layout(WORDS)
    # What all threads share first: then a thread's own part is a single offset.
    base = blocks.lists_ptr + blocks.numbers.bits + kind.to(gl.int64) * (TILE_ROWS * TILE_COLUMNS // 32)
    base += first_row % TILE_ROWS * (TILE_COLUMNS // 32) + column % (TILE_COLUMNS // COLUMNS) * WORDS
    row = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    pattern = gl.zeros([M, WORDS], gl.int32, layout) + kind >= 0
    return gl.load(base + (row * (TILE_COLUMNS // 32) + word), mask=pattern, other=0)


@gluon.jit
def where_visible(bits, x, OTHER: gl.constexpr):
    """`x` `[64, C]`, fragments of a product, where the bit of an element is set in `bits` `[64, C / 32]`; else `OTHER`.

    A thread has two neighbours of every eight columns. Which eight, and which neighbour, is known when the kernel
    compiles; so words are shifted to the thread's own two once, and then each bit is a constant.
    """
    C: gl.constexpr = x.shape[1]
    parts = gl.reshape(x, [M, C // 32, 4, 4, 2])
    layout: gl.constexpr = parts.type.layout
    of_word: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    of_two: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    of_one: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    words = gl.convert_layout(bits, of_word, assert_trivial=True).to(gl.uint32)[:, :, None, None, None]
    own = words >> (2 * gl.arange(0, 4, of_two)).to(gl.uint32)[None, None, None, :, None]
    place = (
        8 * gl.arange(0, 4, of_eight)[None, None, :, None, None] + gl.arange(0, 2, of_one)[None, None, None, None, :]
    )
    place = place.to(gl.uint32)
    shown = gl.where(((own >> place) & 1) != 0, parts, OTHER)
    return gl.convert_layout(gl.reshape(shown, x.shape), x.type.layout, assert_trivial=True)
