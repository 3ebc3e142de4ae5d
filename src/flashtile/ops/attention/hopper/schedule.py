"""The tile that a thread block of the Hopper kernels takes next, and the parts of the backward's work: host and device.

The forward takes query tiles, the backward key tiles. A key tile visits the query tiles of the heads that share it: its
*walk*. The host chooses how walks are divided and in what order they go (`BackwardSchedule`); the device functions
behind it compute the places of tiles. Letters as in `primitives`.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import SUMS_PASS_LOOPS, gl, gluon
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.tile_configs import choose_parts, choose_shares, longest_lengths, longest_walk
from flashtile.ops.attention.hopper.backward_configs import (
    BYTES_OF_A_COLUMN,
    BackwardConfig,
    dq_epilogue,
    keeps_sums,
)
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.modifiers import _first_line
from flashtile.ops.attention.hopper.tuned_rows import backward_config

#: (batch, head) pairs whose tiles run side by side: few enough that their keys and values stay in the L2 cache.
PAIRS_TOGETHER = gl.constexpr(8)

#: Tiles that end a call, longest first: about twice as many as run at once.
TILES_AT_THE_END = gl.constexpr(256)


@gluon.jit
def tile_in_order(number, tiles, lines, together, closing, UNEVEN: gl.constexpr):
    """The tile and the line of number `number`.

    If a mask makes tiles uneven, tiles with the most keys (the last of a line) come first, so that short ones fill up
    the end. Tiles of lines that take turns together (`line_group`) follow one another, heads fastest, and share keys in
    the L2 cache.
    """
    if UNEVEN:
        first_line, lines_here = line_group(number // tiles, lines, together, closing)
        within = number - first_line * tiles
        tile = tiles - 1 - within // lines_here
        line = first_line + within % lines_here
    else:
        tile = number % tiles
        line = number // tiles
    return tile, line


@gluon.jit
def line_group(line, lines, together, closing):
    """The first of the lines that take turns with `line`, and how many: `together`, at the end `closing` or more."""
    last = gl.maximum(lines - closing, 0) // together * together
    first = gl.minimum(line // together * together, last)
    return first, gl.where(first < last, together, lines - last)


@gluon.jit
def closing_lines(tiles):
    """How many lines of so many tiles take turns at the end of a call at least: so many that their short tiles suffice
    to keep all programs at work until the end. A model of 132 programs, causal, is busy for 0.96 of its time with 32
    lines of 8 tiles, and for 0.69 if 8 lines take turns; with 512 lines of 4 for 0.99 and 0.95."""
    return gl.maximum(TILES_AT_THE_END // tiles, 1)


@gluon.jit
def find_sequence(cu_seqlens_ptr, slot, batch, ROWS: gl.constexpr):
    """The sequence that a slot of a packed line belongs to: the last `b` for which `cu_seqlens[b] // ROWS + b <= slot`.

    Always as many slots as a sequence has tiles, or one more; `total // ROWS + batch + 1` slots hold every tile of any
    lengths. Rows past `cu_seqlens[batch]` are sequence number `batch`, which has no keys.
    """
    return _last_at_most(cu_seqlens_ptr, slot, batch, ROWS, 1)


@gluon.jit
def _last_at_most(numbers_ptr, most, last, DIVISOR: gl.constexpr, APART: gl.constexpr):
    """The last place up to `last` whose number is at most `most`; place 0 has such a number. The numbers never fall:
    what lies at a place, divided by DIVISOR, and APART for each place before.

    The threads of a warp look at 32 places at once, so that up to 1,024 take two loads one after another. Halves take
    ten, which short sequences wait for (decisions/hopper_forward.md, "Threads of a warp find a sequence together").
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    which = gl.arange(1, 33, layout)
    low = gl.to_tensor(0)
    high = gl.to_tensor(last)
    while low < high:
        step = gl.cdiv(high - low, 32)
        places = low + step * which
        exists = places <= high
        numbers = gl.load(numbers_ptr + places, mask=exists, other=0).to(gl.int32) // DIVISOR + APART * places
        low += step * gl.sum((exists & (numbers <= most)).to(gl.int32), 0)
        high = gl.minimum(high, low + step - 1)
    return low


@gluon.jit
def sequence_rows(cu_seqlens_ptr, sequence, batch, total):
    """First row and number of rows of a sequence of a packed call; sequence `batch` is the rest of the rows."""
    begin = gl.load(cu_seqlens_ptr + sequence).to(gl.int32)
    end = gl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=total).to(gl.int32)
    return begin, end - begin


@gluon.jit
def other_rows_of(sequence, other_cu_seqlens_ptr, batch, total):
    """The same in the tensor that tiles do not divide, where sequence `batch` has no rows."""
    begin, length = sequence_rows(other_cu_seqlens_ptr, sequence, batch, total)
    return begin, gl.where(sequence < batch, length, 0)


class LocatedTile(NamedTuple):
    """A tile's sequence, head and first row in it (at or past the length: an empty slot), and where the sequence lies
    in the tensor that the tiles divide and in the other one."""

    sequence: Any
    head: Any
    first: Any
    begin: Any
    length: Any
    other_begin: Any
    other_length: Any


@gluon.jit
def locate_tile(
    tile, line, cu_seqlens_ptr, other_cu_seqlens_ptr, batch, heads, rows, other_rows,
    ROWS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The place of tile number `tile` of a line. `rows`, `other_rows`: lengths, or the totals of a packed call."""
    if PACKED:
        sequence = find_sequence(cu_seqlens_ptr, tile, batch, ROWS)
        head = line
        begin, length = sequence_rows(cu_seqlens_ptr, sequence, batch, rows)
        first = (tile - begin // ROWS - sequence) * ROWS
        other_begin, other_length = other_rows_of(sequence, other_cu_seqlens_ptr, batch, other_rows)
    else:
        sequence = line // heads
        head = line % heads
        begin = 0
        length = rows
        first = tile * ROWS
        other_begin = 0
        other_length = other_rows
    return LocatedTile(sequence, head, first, begin, length, other_begin, other_length)


class SequenceOrder(NamedTuple):
    """The order of the sequences of a packed backward, and what it follows from. `order_ptr`: int32, `batch + 2` and
    then `batch + 1` numbers. The first ones say of each place how many numbers of key tiles come before (the last one,
    how many there are), the second ones whose it is."""

    order_ptr: Any
    cu_seqlens_k_ptr: Any
    rows_k: Any
    keys_of_tile: Any


@gluon.jit
def is_short(seq_q, seq_k, short_rows):
    """Whether a thread block takes all key tiles of a line of a packed sequence, so that nobody else adds to its dq: if
    it has at most `short_rows` keys (None: no sequence is short), and no more queries, each of which sees a key then.
    """
    short = False
    if short_rows is not None:
        short = (seq_q <= seq_k) & (seq_k <= short_rows)
    return short


@gluon.jit
def count_numbers(tiles, seq_q, seq_k, short_rows):
    """How many numbers the key tiles of a line of a packed sequence have: one each, but one together if it is short."""
    numbers = tiles
    if short_rows is not None:
        numbers = gl.where(is_short(seq_q, seq_k, short_rows), gl.minimum(tiles, 1), tiles)
    return numbers


@gluon.jit
def write_rank(order, sequence, batch, cu_seqlens_q_ptr, rows_q, short_rows):
    """Writes one sequence's part of a `SequenceOrder`. Sequences with more queries come first; the rows behind
    `cu_seqlens[batch]` are one, without queries. `short_rows`: `is_short`.

    Key tiles of many queries have long walks. At the end of a call they would leave other thread blocks without work.
    """
    BLOCK: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    _, own_q = sequence_rows(cu_seqlens_q_ptr, sequence, batch, rows_q)
    own_q = gl.where(sequence < batch, own_q, -1)
    _, own_k = sequence_rows(order.cu_seqlens_k_ptr, sequence, batch, order.rows_k)
    place = gl.to_tensor(0)
    numbers_before = gl.to_tensor(0)
    for first in range(0, batch, BLOCK):
        others = first + gl.arange(0, BLOCK, layout)
        exists = others < batch
        begin_q = gl.load(cu_seqlens_q_ptr + others, mask=exists, other=0)
        end_q = gl.load(cu_seqlens_q_ptr + others + 1, mask=exists, other=0)
        begin_k = gl.load(order.cu_seqlens_k_ptr + others, mask=exists, other=0)
        end_k = gl.load(order.cu_seqlens_k_ptr + others + 1, mask=exists, other=0)
        length_q = (end_q - begin_q).to(gl.int32)
        length_k = (end_k - begin_k).to(gl.int32)
        numbers = count_numbers(gl.cdiv(length_k, order.keys_of_tile), length_q, length_k, short_rows)
        before = exists & ((length_q > own_q) | ((length_q == own_q) & (others < sequence)))
        place += gl.sum(before.to(gl.int32), 0)
        numbers_before += gl.sum(gl.where(before, numbers, 0), 0)
    gl.store(order.order_ptr + place, numbers_before)
    gl.store(order.order_ptr + batch + 2 + place, sequence)
    if sequence == batch:
        own_numbers = count_numbers(gl.cdiv(own_k, order.keys_of_tile), own_q, own_k, short_rows)
        gl.store(order.order_ptr + batch + 1, numbers_before + own_numbers)


@gluon.jit
def place_in_order(order_ptr, batch, number):
    """The place, in `SequenceOrder`, of the sequence that has number `number` of a line."""
    return _last_at_most(order_ptr, number, batch, 1, 0)


@gluon.jit
def take_number(counter_ptr):
    """Adds one to a counter in device memory. Returns what it held before, a scalar. The caller must be one warp.

    `gl.atomic_add` hands its scalar round through shared memory, and numbers got lost there: thread blocks ended early,
    and nobody computed their tiles (decisions/hopper_forward.md, "Tiles that nobody computed"). None did
    with a shuffle from the thread that took the number to the others of its warp.

    The addition is relaxed: a number says who computes a tile, and nobody reads by it what another one wrote. With an
    order of memory the producer would wait for all that it has written. `number` has a value in each thread, because
    ptxas keeps a register that has none in memory.
    """
    gl.static_assert(gl.num_warps() == 1)
    return gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 lane, number;
            mov.b32 number, 0;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first atom.relaxed.gpu.global.add.u32 number, [$1], 1;
            shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff;
        }""",
        "=r,l",
        [counter_ptr],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def next_number(number, counter_ptr, dynamic):
    """The next tile of this program: whichever is next where tiles are uneven, else its share in turn."""
    following = number + gl.num_programs(0)
    if dynamic != 0:
        following = gl.num_programs(0) + take_number(counter_ptr)
    return following


@gluon.jit
def finish_numbers(counter_ptr, dynamic):
    """The last program to finish leaves both counters at 0, as it found them: a launch needs no memset."""
    if dynamic != 0:
        finished = take_number(counter_ptr + 1)
        if finished == gl.num_programs(0) - 1:
            gl.store(counter_ptr, 0)
            gl.store(counter_ptr + 1, 0)


#: Key tiles that run at once, about, and key tiles whose lines take turns.
TILES_AT_ONCE, TILES_TOGETHER = gl.constexpr(128), gl.constexpr(256)


class Loops(NamedTuple):
    """Constants of the kernel that decide its loops, with the meanings of `KernelConfig`."""

    MASKS: Any
    MASKS_LAST: Any
    REVERSES_WALKS: Any
    REVERSES_LINES: Any
    SHARES_PROGRESS: Any
    ROTATES_WALKS: Any
    SINGLE_KEY_TILE: Any
    WHOLE_LINES: Any


@gluon.jit
def first_tile_number(counter_ptr, problem, config):
    """The number of this thread block's first key tile: that of its program id, but in order whichever tile is next.

    In order, thread blocks wait for tiles with smaller numbers. Beside a kernel of another stream some thread blocks
    begin only when others have ended, so nobody may wait for the tile of a thread block that has not begun. Thread
    blocks that are not persistent begin in the order of their numbers.
    """
    number = gl.program_id(0)
    if config.WHOLE_LINES:
        number = number * problem.key_tiles
    elif config.ORDERED and config.PERSISTENT:
        number = take_number(counter_ptr)
    return number


@gluon.jit
def next_tile_number(number, counter_ptr, problem, config):
    """The number of the next key tile of a persistent thread block."""
    if config.WHOLE_LINES:
        following = number + 1
        if following % problem.key_tiles == 0:
            following = next_number(number, counter_ptr, 1) * problem.key_tiles
    elif config.ORDERED:
        following = take_number(counter_ptr)
    else:
        following = next_number(number, counter_ptr, 1)
    return following


@gluon.jit
def _lines_together(tiles):
    """How many lines' key tiles take turns: enough that these are about twice as many tiles as run at once.

    Together they read and add to queries, dout and sums of dq, of whole lines where a mask has gaps. That is 1 KiB for
    each row and head at D 128, which should stay in the L2 cache. It is never one line, because the last tiles of a
    line would leave more of the GPU idle.
    """
    return gl.minimum(gl.maximum(TILES_TOGETHER // tiles, 2), PAIRS_TOGETHER)


@gluon.jit
def _closing_lines(tiles, group):
    """How many lines take turns at the end of a call. If heads share keys, no more than have 8 thread blocks each at
    work, which read the same queries, because more are too many for the L2 cache. With twice as many lines, 64 and 8
    heads of 1,024 tokens take 7 % longer. With that many lines at 2,048 tokens they take 18 % less than with 8."""
    closing = closing_lines(tiles)
    return gl.where(group > 1, gl.minimum(closing, TILES_AT_ONCE // 8), closing)


@gluon.jit
def _lines_at_once(tiles):
    """How many lines have as many key tiles as are under way at once."""
    return gl.cdiv(TILES_AT_ONCE, tiles)


@gluon.jit
def reverses_line(line):
    """Whether (1 or 0) the key tiles of a line under a causal mask add from the last one on and visit queries upwards,
    which is every second line. With an even number of heads, a head has one direction in every sequence.

    Key tiles that start together at their diagonals each follow the one with the next keys, and wait for it. They end
    one after another, and the one with the last keys ends first, so the tiles of the next line start one after another,
    and the longest, with the first keys, starts first. Going down from the last query tile, each of them follows the
    one with the keys before, and they end together, so lines that are under way together go up and down in turn
    (`line_in_turn`), and the last lines go down. If all lines went up, thread blocks would drift apart and end apart.
    If all went down, those that start together would wait.
    """
    return line % 2


@gluon.jit
def line_in_turn(place, lines, together):
    """The line that has a place in the order: `together` lines that are reversed, as many that are not, and so on."""
    first = place // (2 * together) * (2 * together)
    here = gl.minimum(2 * together, lines - first)
    within = place - first
    reversed_lines = here // 2
    return first + gl.where(within < reversed_lines, 2 * within + 1, 2 * (within - reversed_lines))


@gluon.jit
def unmasked_tiles(begin, full_begin, full_end, end):
    """How many query tiles, from the last one on, need no mask (ranges as of `query_tile_ranges`)."""
    return gl.where(full_end < end, 0, gl.maximum(end - gl.maximum(full_begin, begin), 0))


@gluon.jit
def reverses_walk(tile, tiles, line, lines, group, programs):
    """Whether (1 or 0) a key tile visits its queries upwards, which is every second one that a thread block takes in a
    line.

    The first ones, with the most query tiles, start together at the last query tile. Under a causal mask they end one
    after the other. The one with the last keys ends first, and its thread block takes the longest key tile that is
    left, so key tiles that go up from their diagonal are at the same query tile at any time, although they start one
    after the other. They end together at the last query tile, where those of the next round start.
    """
    _, lines_here = line_group(line, lines, _lines_together(tiles), _closing_lines(tiles, group))
    of_a_round = gl.maximum(programs // lines_here, 1)
    return tile // of_a_round % 2


@gluon.jit
def rotated_start(begin, end, width, config):
    """The query tile at which a key tile in a window begins. From there it goes down to `begin`, and on from `end`.
    `width`: of the window.

    The key tiles of a line that are at work see different queries, each `KEYS` further than the one before. If each
    went down from its own last query tile, each would be at another query tile, and visit one `KEYS` queries of all
    heads after the key tile before it did. With many heads that share keys, the L2 cache has dropped it by then. So
    they begin at a tile whose number is a multiple of the tiles in a window: at any time all that see a query tile are
    at it. A model of 132 thread blocks and a cache of 35 MB has 1.4 fetches of each tile instead of 29 (16 and 2 heads,
    32k, a window of 4,096). Equal heads go down, because what they read stays in the cache anyway.
    """
    period = gl.maximum((width + config.KEYS + config.M - 1) // config.M, 1)
    start = (end - 1) // period * period
    return gl.where(start >= begin, start, end - 1)


@gluon.jit
def shared_progress(counter_ptr, sequence, head_kv, problem):
    """The place at which the key tiles of a line say how many query tiles, from the last one down, lie before the one
    that they are at. It is behind the count of tiles.

    Thread blocks that visit the same queries together read them once from memory. But some multiprocessors are faster,
    and each key tile takes them further apart, until the L2 cache has dropped for one what another has read, so each
    key tile begins where another one is. Without a mask that does not matter: behind the first query tile comes the
    last. A model of 132 thread blocks and a cache of 35 MB has 8 fetches of each tile instead of 142 (64 and 8 heads,
    32k).
    """
    return counter_ptr + 1 + sequence * problem.heads_kv + head_kv


@gluon.jit
def longest_line_first(blocks, number, sequence, head, OWN: gl.constexpr, TILE: gl.constexpr):
    """The tile of `OWN` rows that comes `number`-th from behind, in a head whose lines are `TILE` rows."""
    first = blocks.lists_ptr + blocks.numbers.order + _first_line(blocks, sequence, head)
    line = gl.load(first + number // (TILE // OWN))
    return line * (TILE // OWN) + number % (TILE // OWN)


@gluon.jit
def column_in_order(number, tiles, lines, together, FIRST: gl.constexpr):
    """The `number`-th key tile of the backward, and its line.

    First the `FIRST` tiles of all lines: tokens that all others see usually stand first, and such a column, walked at
    the end, would be waited for. Then those of `together` lines at a time: columns with gaps do not walk side by side,
    and their queries should stay in the L2 cache.
    """
    others = gl.maximum(tiles - FIRST, 1)
    number_of_others = gl.maximum(number - FIRST * lines, 0)
    first_line = number_of_others // (together * others) * together
    lines_here = gl.minimum(together, lines - first_line)
    within = number_of_others % (together * others)
    is_first = number < FIRST * lines
    tile = gl.where(is_first, number // lines, FIRST + within // lines_here)
    line = gl.where(is_first, number % lines, first_line + within % lines_here)
    return tile, line


#: Queries that a key tile visits, of all heads that share its keys, or of one share (`choose_shares`). From so
#: many on, thread blocks that drift apart find little of what they read and add to in the L2 cache: 1 KiB for each
#: query at D 128. TFLOP/s with and without shared progress, D 128, 64 and 8 heads: 32,768 tokens 605 and 560, 16,384
#: 602 and 607; 16 heads, 65,536 tokens, 621 and 613.
WALK_BEYOND_CACHE = 2**18

#: Queries from which on the walk of a key tile is long. Thousands of cycles of all kernels at D 128, causal, with one
#: loop and with two: 1,024 tokens 830 and 839, 4,096 1,979 and 1,991; of the main kernel, 8,192 tokens 3,272 and 3,285,
#: with 8 heads that share keys 13,089 and 12,794.
_LONG_WALK = 8192


#: Queries from which on walks take so long that the GPU's power bounds its clock: multiprocessors without work in the
#: last round would take some in the others. TFLOP/s with all 132 and with 128, which need as many rounds, D 128: 12
#: heads, 32,760 tokens 643 and 677, 16,384 639 and 642; 8 heads, 65,536 tokens 650 and 660; but 12 heads, 8,192 tokens
#: 626 and 617.
_POWER_BOUND_WALK = 2**14

#: Queries that the longest walk visits, of all heads that share its keys, from which on it pays to keep what walks read
#: and add to in the L2 cache, which takes parts of dk and dv (`shares_in_cache`); and the same in a window, or where
#: each head gets a walk of its own. Microseconds on an H100 without and with that, causal, D 128: 4,096, 8 × 1,024
#: tokens, 32 and 8 heads, 554 and 525; 4,608, 20 × 520, 32 and 4 heads, 617 and 571; 5,632, 15 × 1,408, 8 and 2 heads,
#: 562 and 447, 5 × 1,408, 32 and 8, 596 and 532; 7,200, 5 × 1,800 of these, 1,129 and 855; but 4,224, 8 × 1,408, 24 and
#: 8 heads, 640 and 677, and 4,864, 4 × 4,096, 32 and 8 heads in a window of 1,024, 1,583 and 1,616.
_WALK_TO_KEEP, _LONG_WALK_TO_KEEP = 4000, 6000

#: Thread blocks take whole lines of short packed sequences from so many lines for each multiprocessor on, if they have
#: at most so many key tiles, and sequences in the mean at most so many times the rows of a short one. Others pay up to
#: 7 % for it. Microseconds without and with it, H200: 200 × 37 to 400 rows, 12 heads of 64, 487 and 363 (full), 442 and
#: 295 (causal); 16 of 128 1,058 and 916, 958 and 791; 400 × 30 to 128, 12 of 64, 394 and 195; 100 × 16 to 512, 32 / 8
#: of 128, 1,339 and 1,296; but 90 × 200 to 1,000, 16 of 80, full, 1,325 and 1,416.
_SHORT_LINES, _SHORT_TILES, _SHORT_IN_THE_MEAN = 4, 8, 2

#: Bytes of the L2 cache, of 50 MB, for what walks under way read and add to: 43 MB stay (6 × 1,408, 32 and 8 heads of
#: 80: 439 µs, in shares 456), 52 do not (15 × 1,408, 8 and 2 heads of 96: 427 and 339).
_IN_CACHE = 44 * 10**6


#: The loops of a kernel without a mask, whose key tiles follow one another as they come.
NO_LOOPS = Loops(*(False,) * len(Loops._fields))


class BackwardSchedule(NamedTuple):
    """How the work of a backward is divided.

    Attributes:
        config: how the main kernel is cut.
        loops: those of the main kernel.
        query_tiles, key_tiles: of a head of a sequence; of a packed call the slots.
        shares: walks of a key tile, each over some of the query heads that share it, or over a part of the queries.
            Each has dk and dv of its own.
        parts: of these shares have the same heads and a part of the queries each.
        lone_tiles: the first query tiles that see the first key tile alone (`lone_query_tiles`).
        short_rows: of a packed call, up to which sequences are short (`is_short`); 0 if none is.
    """

    config: BackwardConfig
    loops: Loops
    query_tiles: int
    key_tiles: int
    shares: int = 1
    parts: int = 1
    lone_tiles: int = 0
    short_rows: int = 0

    @staticmethod
    def from_call(call: Call) -> "BackwardSchedule":
        config, single, whole = dq_epilogue(backward_config(call), call)
        query_tiles, key_tiles = _count_tiles(call, config)
        short_rows = _short_rows(call, config)
        loops = NO_LOOPS._replace(SINGLE_KEY_TILE=single, WHOLE_LINES=whole)
        schedule = BackwardSchedule(config, loops, query_tiles, key_tiles, short_rows=short_rows)
        shares = _shares(call.cut_by, schedule)
        group, parts = call.group // shares, 1
        if may_divide_queries(call, group):
            walks = key_tiles * call.lines_kv * shares
            parts = choose_parts(walks, _longest_head(call, schedule), group, call.multiprocessors)
        return schedule._replace(
            loops=choose_loops(call, schedule, group),
            shares=shares * parts,
            parts=parts,
            lone_tiles=0 if single or whole else lone_query_tiles(call, config),
        )

    @property
    def adds_up(self) -> bool:
        """Whether thread blocks add dq up together. Then it is cleared before, and rounded afterwards."""
        return not (self.loops.SINGLE_KEY_TILE or self.loops.WHOLE_LINES)

    def group(self, call: Call) -> int:
        """Query heads of a walk."""
        return call.group * self.parts // self.shares

    def is_ordered(self, call: Call) -> bool:
        """Whether thread blocks add dq up in order."""
        return call.spec.deterministic and self.adds_up

    def is_covered(self, call: Call) -> bool:
        """Whether tiles divide the call."""
        return call.is_covered(self.config.block_m, self.config.block_n)

    def programs(self, call: Call) -> int:
        """Thread blocks of the main kernel; of long, even walks what each round needs (`_POWER_BOUND_WALK`)."""
        lines = call.lines_kv * self.shares
        if not self.config.producer:
            return self.key_tiles * lines
        work, programs = lines if self.loops.WHOLE_LINES else self.key_tiles * lines, call.multiprocessors
        spec, long = call.spec, self.group(call) * call.rows_q >= _POWER_BOUND_WALK
        even = not (spec.banded or call.bounded or spec.block_shape is not None)
        if long and even and self.adds_up:
            programs = -(-work // -(-work // programs))
        return min(work, programs)

    def summed_tiles(self, call: Call) -> int:
        """Query tiles whose dq has sums: those that thread blocks add up together, then those of a line of each."""
        added_up = self.query_tiles * call.lines if self.adds_up else 0
        kept = self.query_tiles if self.loops.WHOLE_LINES else -(-self.short_rows // self.config.block_m)
        return added_up + self.programs(call) * self.group(call) * kept


def _count_tiles(call: Call, config: BackwardConfig) -> tuple[int, int]:
    """Query and key tiles of a head of a sequence; of a packed call the slots."""
    rows_q, rows_k = call.whole_sizes
    return call.tiles(rows_q, config.block_m), call.tiles(rows_k, config.block_n)


def _shares(call: Call, schedule: BackwardSchedule) -> int:
    """Into how many shares the query heads of a key/value head are divided. `call`: by which kernels are cut."""
    config, programs, spec, lines = schedule.config, call.multiprocessors, call.spec, call.lines_kv
    query_tiles, key_tiles = _count_tiles(call, config)
    schedule = schedule._replace(query_tiles=query_tiles, key_tiles=key_tiles)
    listed = spec.block_shape is not None
    uneven = call.bounded or listed or (spec.window_right is not None and spec.window_left is None)
    steps = longest_walk(_longest_head(call, schedule), spec, config.block_m, config.block_n)

    def walks_done(shares: int) -> float:
        # Here nobody knows the lengths of packed sequences, and with a block mask lines are in another order.
        if call.packed or listed:
            return 0
        return tiles_done_before_last(key_tiles, lines * shares, call.group // shares, programs)

    shares = choose_shares(call.group, key_tiles * lines, steps, uneven, programs, walks_done)
    return shares_in_cache(call, schedule, shares, steps)


def _longest_head(call: Call, schedule: BackwardSchedule) -> int:
    """Query tiles of a head of the longest sequence (`longest_lengths`)."""
    if not call.packed:
        return schedule.query_tiles
    return min(schedule.query_tiles, -(-longest_lengths(call)[0] // schedule.config.block_m))


def choose_loops(call: Call, schedule: BackwardSchedule, group: int) -> Loops:
    """The loops of the main kernel. `group`: query heads that a key tile visits."""
    config, loops, spec = schedule.config, schedule.loops, call.spec
    may_end = call.bounded or call.rows_k % config.block_n != 0
    # If statistics are operands, the product that takes lse off hides the keys past the end.
    loops = loops._replace(MASKS=spec.banded or (may_end and not config.statistics_multiplied))
    reverses_lines = group == 1 and _may_reverse_lines(call)
    if loops.SINGLE_KEY_TILE:
        # No key tile comes after another that its walk could meet. But dk and dv depend on its direction.
        reverses_lines = reverses_lines and spec.batch_invariant
        masks_last = loops.MASKS and not reverses_lines and _may_mask_last(call, config)
        return loops._replace(MASKS_LAST=masks_last, REVERSES_LINES=reverses_lines)
    if loops.WHOLE_LINES:
        # Its thread block meets no other one.
        return loops
    long = group * call.rows_q >= _LONG_WALK
    beyond_cache = not spec.banded and group * call.rows_q >= WALK_BEYOND_CACHE
    return loops._replace(
        MASKS_LAST=loops.MASKS and long and not reverses_lines and _may_mask_last(call, config),
        REVERSES_WALKS=long and group > 1 and _may_reverse_walks(call, config, spec.deterministic),
        SHARES_PROGRESS=beyond_cache and _may_share_progress(call, config),
        ROTATES_WALKS=group > 1 and _may_rotate_walks(call),
        REVERSES_LINES=reverses_lines,
    )


def shares_in_cache(call: Call, schedule: BackwardSchedule, shares: int, query_tiles: int) -> int:
    """Into how many shares the query heads of a key/value head are divided, at least `shares`, so that thread blocks
    find in the L2 cache what others have read and added to.

    In a band, walks differ in length, so one that follows another begins at its own time, and meets no other walk over
    the same queries, unless walks take turns in two rounds (`backward_tiles.reverses_walk`). What all walks under way
    read and add to has to stay in the cache then. That is as much as they visit query heads. Tiles of 64 keys have
    twice as many walks to meet, and do not stay together in two rounds either.

    Args:
        shares: as `schedule.choose_shares` divides them.
        query_tiles: of a head, that the longest walk visits.
    """
    config, key_tiles = schedule.config, schedule.key_tiles
    group, lines, programs = call.group, call.lines_kv, call.multiprocessors
    walks_differ = call.spec.banded or call.spec.block_shape is not None
    several_rounds = key_tiles * lines * shares > programs
    if not (walks_differ and several_rounds):
        return shares
    may_meet = config.block_n > CONSUMER_ROWS and _may_reverse_walks(call, config, schedule.is_ordered(call))
    if may_meet and take_two_rounds(key_tiles, lines * shares, programs):
        return shares
    of_a_head = programs * config.block_n * sum(call.head_dims) * BYTES_OF_A_COLUMN
    heads = max(_IN_CACHE // of_a_head, 1)
    divided = next(each for each in range(shares, group + 1) if group % each == 0 and group // each <= heads)
    least = _LONG_WALK_TO_KEEP if call.spec.window_left is not None or divided == group else _WALK_TO_KEEP
    return divided if group * query_tiles * config.block_m >= least else shares


def lone_query_tiles(call: Call, config: BackwardConfig) -> int:
    """How many of the first query tiles see the first key tile alone, so that its product is their dq, and is stored as
    such. They are many only in short calls, under a causal mask. Others add to sums everywhere, which takes fewer
    registers: long ones, and such with side inputs."""
    spec = call.spec
    plain = call.aux.leaves_scores and not spec.softcap
    causal = spec.window_left is None and spec.window_right is not None and not call.band_hides_rows
    listed = spec.block_shape is not None or spec.score_program is not None
    if not (plain and causal and config.sums_by_tma and not listed and call.group * call.rows_q < _LONG_WALK):
        return 0
    shift = 0 if spec.top_left else call.rows_k - call.rows_q
    unseen = config.block_n - shift - (spec.window_right or 0)  # the first query that sees a key of the second tile
    return max(0, min(unseen, call.rows_q) // config.block_m)


def _short_rows(call: Call, config: BackwardConfig) -> int:
    """Up to how many rows the sequences of a packed call are short (`is_short`); 0 if none is. Lines are so many that
    thread blocks end together, however many rows these have."""
    spec, lines = call.spec, call.batch * call.heads_kv
    hides_rows = (spec.window_left or 0) < 0 or (spec.window_right or 0) < 0
    in_order = spec.batch_invariant or spec.deterministic
    if not call.packed or hides_rows or in_order or spec.block_shape is not None or call.aux.key_lengths is not None:
        return 0
    if not (config.producer and config.sums_by_tma) or lines < _SHORT_LINES * call.multiprocessors:
        return 0
    sizes = (tiles * config.block_n for tiles in range(_SHORT_TILES, 0, -1))
    rows = next(rows for rows in sizes if keeps_sums(call, config, rows, rows))
    return rows if call.rows_k <= _SHORT_IN_THE_MEAN * rows * call.batch else 0


def may_divide_queries(call: Call, group: int) -> bool:
    """Whether walks may be in parts: none waits for another, no side input counts heads (`group` of a walk)."""
    may = not (call.spec.banded or call.spec.batch_invariant) and call.aux.leaves_scores
    return may and group * call.rows_q < WALK_BEYOND_CACHE


def _may_mask_last(call: Call, config: BackwardConfig) -> bool:
    """Whether the steps that a mask cuts may have a loop of their own. They are the last ones where no window ends on
    the left and no line is reversed.

    They have none where a tile of queries is as large as one of keys, because there they are the larger part of a short
    sequence. Packed calls have none, because registers do not suffice in float16, and neither have calls with a soft
    cap or ALiBi, whose scalars spill in either loop. Nor is there one where keys have two places: ptxas 12.8 computes
    the addresses for both loops ahead of the first one, which may not run.
    """
    spec, aux = call.spec, call.aux
    they_are_last = spec.window_left is None and spec.block_shape is None
    they_are_few = config.block_m < config.block_n
    changed = aux.modifies_scores or aux.dropout_seed is not None or spec.score_program is not None or spec.softcap > 0
    registers_suffice = config.producer and not (call.packed or changed)
    return they_are_last and they_are_few and registers_suffice and config.key_stages == 1 and SUMS_PASS_LOOPS


def _may_reverse_walks(call: Call, config: BackwardConfig, ordered: bool) -> bool:
    """Whether some key tiles may visit their queries upwards: under a causal mask, if they add in no order."""
    spec = call.spec
    causal = spec.window_right is not None and spec.window_left is None and spec.block_shape is None
    return causal and not call.packed and config.producer and not ordered


def _may_rotate_walks(call: Call) -> bool:
    """Whether key tiles may begin at the same query tile: in a two-sided window, if they add in no order."""
    spec = call.spec
    window = spec.window_left is not None and spec.window_right is not None
    return window and spec.block_shape is None and not spec.deterministic


def _may_share_progress(call: Call, config: BackwardConfig) -> bool:
    """Whether key tiles may begin where others are: without a mask and an order, if a producer can look."""
    spec = call.spec
    return not (spec.block_shape is not None or call.packed or spec.deterministic) and config.producer


def _may_reverse_lines(call: Call) -> bool:
    """Whether every second line may be reversed: not if heads share keys, because a step for each head takes the
    thread blocks of a line too far apart for the L2 cache. In the batch-invariant mode a head needs one direction in
    all sequences."""
    spec = call.spec
    may = spec.deterministic and not (spec.batch_invariant and call.heads % 2)
    return may and spec.window_right is not None and spec.block_shape is None


def take_two_rounds(tiles: int, lines: int, programs: int) -> bool:
    """Whether under a causal mask no thread block takes more than two tiles of the lines that take turns together, and
    those of lines that others follow more than one (`_lines_together`, `_closing_lines`). Then the second ones end when
    the next lines begin. Lines are those of several query heads."""
    before_last = tiles_before_last(tiles, lines, 2)
    followed = before_last == 0 or programs < _tiles_together(tiles) <= 2 * programs
    return followed and lines * tiles - before_last <= 2 * programs


def tiles_done_before_last(tiles: int, lines: int, group: int, programs: int) -> float:
    """About how many key tiles are done when the longest one of the last lines that take turns begins, under a causal
    mask. The tiles under way are then the short ones of the lines before, and all but done. If the lines that take
    turns are less than a round, they are of any length, and two thirds of their work are left."""
    left = 2 / 3 * programs if _tiles_together(tiles) < programs else 0
    return max(tiles_before_last(tiles, lines, group) - left, 0)


def tiles_before_last(tiles: int, lines: int, group: int) -> int:
    """Key tiles before the last lines that take turns, `_closing_lines` or more, of `group` query heads."""
    closing = max(TILES_AT_THE_END.value // tiles, 1)
    if group > 1:
        closing = min(closing, TILES_AT_ONCE.value // 8)
    together = _tiles_together(tiles)
    return max(lines - closing, 0) * tiles // together * together


def _tiles_together(tiles: int) -> int:
    """Key tiles of the lines that take turns together (`_lines_together`), for the host."""
    return min(max(TILES_TOGETHER.value // tiles, 2), PAIRS_TOGETHER.value) * tiles
