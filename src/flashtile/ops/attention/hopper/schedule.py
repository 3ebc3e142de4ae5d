"""How the work of the Hopper backward is divided among thread blocks, and in what order they do it, for the host.

A key tile visits the query tiles of the heads that share it: its *walk*. `backward_tiles` does on the GPU what is
decided here.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile._backends.gluon import SUMS_PASS_LOOPS
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.schedule import longest_walk, parts_of_walks, shares_of_heads
from flashtile.ops.attention.hopper.backward_configs import (
    BYTES_OF_A_COLUMN,
    BackwardConfig,
    backward_config_of,
    ends_of_dq,
)
from flashtile.ops.attention.hopper.backward_tiles import TILES_AT_ONCE, TILES_TOGETHER, Loops
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.parameters import is_covered, whole_sizes
from flashtile.ops.attention.hopper.pieces import PAIRS_TOGETHER, TILES_AT_THE_END

#: Queries that a key tile visits, of all heads that share its keys, or of one share (`shares_of_heads`). From so
#: many on, thread blocks that drift apart find little of what they read and add to in the L2 cache: 1 KiB for each
#: query at D 128. TFLOP/s with and without shared progress, D 128, 64 and 8 heads: 32,768 tokens 605 and 560, 16,384
#: 602 and 607; 16 heads, 65,536 tokens, 621 and 613.
WALK_BEYOND_CACHE = 2**18

#: Queries from which on the walk of a key tile is long. Thousands of cycles of all kernels at D 128, causal, with one
#: loop and with two: 1,024 tokens 830 and 839, 4,096 1,979 and 1,991; of the main kernel, 8,192 tokens 3,272 and 3,285,
#: with 8 heads that share keys 13,089 and 12,794.
_LONG_WALK = 8192


#: Queries that the longest walk visits, of all heads that share its keys, from which on it pays to keep what walks read
#: and add to in the L2 cache, which takes parts of dk and dv (`shares_in_cache`); and the same in a window, or where
#: each head gets a walk of its own. Microseconds on an H100 without and with that, causal, D 128: 4,096, 8 × 1,024
#: tokens, 32 and 8 heads, 554 and 525; 4,608, 20 × 520, 32 and 4 heads, 617 and 571; 5,632, 15 × 1,408, 8 and 2 heads,
#: 562 and 447, 5 × 1,408, 32 and 8, 596 and 532; 7,200, 5 × 1,800 of these, 1,129 and 855; but 4,224, 8 × 1,408, 24 and
#: 8 heads, 640 and 677, and 4,864, 4 × 4,096, 32 and 8 heads in a window of 1,024, 1,583 and 1,616.
_WALK_TO_KEEP, _LONG_WALK_TO_KEEP = 4000, 6000

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
    """

    config: BackwardConfig
    loops: Loops
    query_tiles: int
    key_tiles: int
    shares: int = 1
    parts: int = 1
    lone_tiles: int = 0

    @staticmethod
    def from_call(call: Call) -> BackwardSchedule:
        config, single, whole = ends_of_dq(backward_config_of(call), call)
        rows_q, rows_k = whole_sizes(call)
        query_tiles, key_tiles = call.tiles(rows_q, config.block_m), call.tiles(rows_k, config.block_n)
        loops = NO_LOOPS._replace(SINGLE_KEY_TILE=single, WHOLE_LINES=whole)
        schedule = BackwardSchedule(config, loops, query_tiles, key_tiles)
        shares = _shares(call, schedule)
        group, parts = call.group // shares, 1
        if may_divide_queries(call, group):
            walks = key_tiles * call.lines_kv * shares
            parts = parts_of_walks(walks, query_tiles, group, call.multiprocessors)
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
        return is_covered(call, self.config.block_m, self.config.block_n)

    def programs(self, call: Call) -> int:
        """Thread blocks of the main kernel."""
        lines = call.lines_kv * self.shares
        work = lines if self.loops.WHOLE_LINES else self.key_tiles * lines
        return min(work, call.multiprocessors) if self.config.producer else self.key_tiles * lines

    def summed_tiles(self, call: Call) -> int:
        """Query tiles whose dq has sums."""
        if self.adds_up:
            return self.query_tiles * call.lines
        return self.programs(call) * self.group(call) * self.query_tiles if self.loops.WHOLE_LINES else 0


def _shares(call: Call, schedule: BackwardSchedule) -> int:
    """Into how many shares the query heads of a key/value head are divided."""
    config, key_tiles, programs = schedule.config, schedule.key_tiles, call.multiprocessors
    spec, lines = call.spec, call.lines_kv
    listed = spec.block_shape is not None
    uneven = call.bounded or listed or (spec.window_right is not None and spec.window_left is None)
    steps = longest_walk(schedule.query_tiles, spec, config.block_m, config.block_n)

    def walks_done(shares: int) -> float:
        # Here nobody knows the lengths of packed sequences, and with a block mask lines are in another order.
        if call.packed or listed:
            return 0
        return tiles_done_before_last(key_tiles, lines * shares, call.group // shares, programs)

    shares = shares_of_heads(call.group, key_tiles * lines, steps, uneven, programs, walks_done)
    return shares_in_cache(call, schedule, shares, steps)


def choose_loops(call: Call, schedule: BackwardSchedule, group: int) -> Loops:
    """The loops of the main kernel. `group`: query heads that a key tile visits."""
    config, loops, spec = schedule.config, schedule.loops, call.spec
    may_end = call.bounded or call.rows_k % config.block_n != 0
    # Where statistics are operands, the product that takes lse off hides the keys past the end.
    loops = loops._replace(MASKS=spec.banded or (may_end and not config.statistics_multiplied))
    if loops.SINGLE_KEY_TILE:
        # No key tile comes after another that its walk could meet.
        return loops._replace(MASKS_LAST=loops.MASKS and _may_mask_last(call, config))
    if loops.WHOLE_LINES:
        # Its thread block meets no other one.
        return loops
    long = group * call.rows_q >= _LONG_WALK
    reverses_lines = group == 1 and _may_reverse_lines(call)
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

    In a band, walks differ in length. So one that follows another begins at its own time, and meets no other walk over
    the same queries, unless walks take turns in two rounds (`backward_tiles.reverses_walk`). What all walks under way
    read and add to has to stay in the cache then. That is as much as they visit query heads. Tiles of 64 keys have
    twice as many walks to meet, and do not stay together in two rounds either.

    Args:
        shares: as `schedule.shares_of_heads` divides them.
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
    plain = call.aux.only_sinks and not (spec.deterministic or spec.softcap)
    causal = spec.window_left is None and spec.window_right is not None and not call.band_hides_rows
    listed = spec.block_shape is not None or spec.score_program is not None
    if not (plain and causal and config.sums_by_tma and not listed and call.group * call.rows_q < _LONG_WALK):
        return 0
    shift = 0 if spec.top_left else call.rows_k - call.rows_q
    unseen = config.block_n - shift - (spec.window_right or 0)  # the first query that sees a key of the second tile
    return max(0, min(unseen, call.rows_q) // config.block_m)


def may_divide_queries(call: Call, group: int) -> bool:
    """Whether the walks over queries may be in parts: they all have the same queries, and none waits for another's
    progress. Side inputs of the scores are numbered by query heads and key/value heads, which parts repeat. `group`:
    query heads of a walk."""
    return not call.spec.banded and call.aux.only_sinks and group * call.rows_q < WALK_BEYOND_CACHE


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
    """Whether some key tiles may visit their queries upwards (`backward_tiles.reverses_walk`): under a causal mask,
    where they add in no order."""
    spec = call.spec
    causal = spec.window_right is not None and spec.window_left is None and spec.block_shape is None
    return causal and not call.packed and config.producer and not ordered


def _may_rotate_walks(call: Call) -> bool:
    """Whether key tiles may begin at the same query tile (`backward_tiles.rotated_start`): in a window that ends on
    both sides, where they add in no order."""
    spec = call.spec
    window = spec.window_left is not None and spec.window_right is not None
    return window and spec.block_shape is None and not spec.deterministic


def _may_share_progress(call: Call, config: BackwardConfig) -> bool:
    """Whether the key tiles of a call without a mask may begin where others of their line are
    (`backward_tiles.shared_progress`): where they add in no order, and a producer can look for that."""
    spec = call.spec
    return not (spec.block_shape is not None or call.packed or spec.deterministic) and config.producer


def _may_reverse_lines(call: Call) -> bool:
    """Whether every second group of lines may be reversed (`backward_tiles.reverses_line`). Where heads share keys the
    thread blocks of a line would be too far apart for the L2 cache, because a query tile is a step for each head."""
    spec = call.spec
    return spec.deterministic and spec.window_right is not None and spec.block_shape is None


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
    """How many key tiles come before those of the last lines that take turns, which are `_closing_lines` or a few more.
    `group`: query heads of a walk."""
    closing = max(TILES_AT_THE_END.value // tiles, 1)
    if group > 1:
        closing = min(closing, TILES_AT_ONCE.value // 8)
    together = _tiles_together(tiles)
    return max(lines - closing, 0) * tiles // together * together


def _tiles_together(tiles: int) -> int:
    """Key tiles of the lines that take turns together (`_lines_together`), for the host."""
    return min(max(TILES_TOGETHER.value // tiles, 2), PAIRS_TOGETHER.value) * tiles
