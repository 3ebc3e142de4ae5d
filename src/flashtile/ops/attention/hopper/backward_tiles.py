"""The key tiles of a thread block of the Hopper backward, and their query tiles. Letters: `primitives`, `backward`."""

from typing import Any, NamedTuple

import torch

from flashtile._backends.gluon import aggregate, gl, gluon
from flashtile._backends.launch import float32, int32, optional, pointer_to
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import SideParameters, key_batch_strides, window_parameters
from flashtile.ops.attention.hopper.backward_pieces import (
    ROWS,
    mask_probs,
    query_tile_ranges,
    signed_by_dropout,
    without_rows_past_end,
)
from flashtile.ops.attention.hopper.modifiers import (
    FULL,
    LOG2_E,
    TILE_HEAD,
    TILE_KIND,
    TILE_NUMBER,
    ScoreUnits,
    TableTiles,
    add_bias,
    capped,
    distance_shift,
    head_dropout,
    head_table,
    hide_by_mask,
    in_eights_and_distances,
    line_entries,
    listed_line,
    load_bits,
    load_slope,
    load_table,
    lowered_by_distance,
    moved_bias,
    near_shift,
    read_tile_info,
    where_visible,
)
from flashtile.ops.attention.hopper.primitives import hidden_zero, publish_tile, receive_tile
from flashtile.ops.attention.hopper.schedule import (
    PAIRS_TOGETHER,
    _closing_lines,
    _lines_at_once,
    _lines_together,
    column_in_order,
    is_short,
    line_in_turn,
    next_tile_number,
    place_in_order,
    reverses_line,
    reverses_walk,
    rotated_start,
    sequence_rows,
    shared_progress,
    tile_in_order,
    unmasked_tiles,
)

#: In place of the first key: there are no more tiles; a tile has no keys.
_END, _EMPTY_SLOT = gl.constexpr(-1), gl.constexpr(-2)


@aggregate
class KernelConfig:
    """The constants of the compiled main kernel.

    KEYS: keys of a tile. M: queries of a tile. PARTS: `pᵀ` and `dsᵀ` are computed for M / PARTS queries at a time.
    SUM_COLUMNS: columns of dq that are summed at a time. DSCORE_STAGES: places for the `dsᵀ` and `pᵀ` that one
    warpgroup passes on to another. KEY_STAGES: tiles of keys and of values on chip. PERSISTENT: a thread block takes
    one key tile after another. ORDERED: key tiles add to dq in order. REVERSES_LINES: key tiles of every second line
    add in the opposite order (`reverses_line`). MASKS: a band or the end of the keys may cut a tile. (A branch
    for that, even one that is never taken, keeps ptxas from mixing what is before and behind it.) MASKS_LAST: the tiles
    that it cuts are the last steps of a key tile and have a loop of their own (`schedule`). REVERSES_WALKS:
    some key tiles visit their queries upwards (`reverses_walk`). SHARES_PROGRESS: key tiles begin where others of their
    line are (`shared_progress`). ROTATES_WALKS: key tiles begin at the same query tile (`rotated_start`).
    SINGLE_KEY_TILE: all keys of a sequence are one tile, and each query tile visits it, so its product is dq.
    WHOLE_LINES: a thread block takes all key tiles of a line, one after another, so nobody else adds to its dq.
    STATISTICS_MULTIPLIED, SUMS_BY_TMA: as in `BackwardConfig`. TILE_Q, TILE_K: stored
    tiles of the block mask, or 0. KEY_LENGTHS: keys of a sequence may end before its tensors do. BIAS_COLUMN,
    MASK_COLUMN: strides of the tables' columns, 0 where these broadcast. SCORE_FUNCTION, SCORE_READS: the user's, which
    returns its derivative too, and what it reads (`modifiers`); None without one. FUNCTION_DERIVATIVE: that
    derivative is not 1 everywhere, because the function does more than add to the scores. DERIVATIVES: a soft cap or a
    function has derivatives. DERIVATIVES_APART: they are no part of the weights, because slopes that learn come after
    them, or because the sign of the weights says what dropout drops, and a function's derivative has one too.
    """

    KEYS: gl.constexpr
    M: gl.constexpr
    PARTS: gl.constexpr
    SUM_COLUMNS: gl.constexpr
    DSCORE_STAGES: gl.constexpr
    KEY_STAGES: gl.constexpr
    PERSISTENT: gl.constexpr
    ORDERED: gl.constexpr
    REVERSES_LINES: gl.constexpr
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    MASKS: gl.constexpr
    MASKS_LAST: gl.constexpr
    REVERSES_WALKS: gl.constexpr
    SHARES_PROGRESS: gl.constexpr
    ROTATES_WALKS: gl.constexpr
    SINGLE_KEY_TILE: gl.constexpr
    WHOLE_LINES: gl.constexpr
    STATISTICS_MULTIPLIED: gl.constexpr
    SUMS_BY_TMA: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr
    KEY_LENGTHS: gl.constexpr
    BIAS_COLUMN: gl.constexpr
    MASK_COLUMN: gl.constexpr
    SCORE_FUNCTION: gl.constexpr
    SCORE_READS: gl.constexpr
    FUNCTION_DERIVATIVE: gl.constexpr
    DERIVATIVES: gl.constexpr
    DERIVATIVES_APART: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, **constants):
        for name, value in constants.items():
            setattr(self, name, gl.constexpr(value))


class ScoreChange(NamedTuple):
    """A score function's inputs: addresses and sizes of what it reads, or None. The others: `KernelConfig`."""

    captured: Any
    sizes: Any
    SCORE_FUNCTION: Any
    SCORE_READS: Any
    FUNCTION_DERIVATIVE: Any
    DERIVATIVES: Any
    DERIVATIVES_APART: Any


class Problem(NamedTuple):
    """The facts of the call that every role knows, in rows, heads and tiles.

    Attributes:
        side, numbers: the side inputs (`parameters`).
        order_ptr: of a packed call, the order of its sequences (`schedule.SequenceOrder`); None of others.
        slope_sums_ptr: float32 `[batch, heads, rows_k]`, packed `[heads, rows_k]`, zeros at the start: minus what each
            key adds to the gradient of a slope; None where nobody wants that.
        score_change: a `ScoreChange`.
        heads_kv: counts each key/value head `shares` times, once for each share of its query heads, `group` of them,
            which has dk and dv of its own. `parts` of these shares have the same heads and a part of the queries each;
            None where each has all queries.
        key_tiles: on each line of such a head, `query_tiles` (packed: slots) likewise of a query head. The first
            `lone_tiles` of these see the first key tile alone, whose product is their dq; None where dq is summed
            everywhere or nowhere.
        short_rows: as in `schedule.BackwardSchedule`; None if no sequence is short.
        others: as in `forward.Problem`.
    """

    side: Any
    order_ptr: Any
    slope_sums_ptr: Any
    score_change: Any
    batch: Any
    heads_kv: Any
    group: Any
    shares: Any
    parts: Any
    rows_q: Any
    rows_k: Any
    key_tiles: Any
    query_tiles: Any
    lone_tiles: Any
    short_rows: Any
    window: Any
    scale: Any
    units: Any
    k_rows_apart: Any
    v_rows_apart: Any
    numbers: Any

    @staticmethod
    def from_call(call: Call, schedule: Any, side: SideParameters, change: ScoreChange) -> Any:
        """Describes it for a kernel. `schedule`: `schedule.BackwardSchedule`."""
        numbers = {
            "batch": call.batch,
            "heads_kv": call.heads_kv * schedule.shares,
            "group": schedule.group(call),
            "shares": schedule.shares,
            "parts": schedule.parts if schedule.parts > 1 else None,
            "rows_q": call.rows_q,
            "rows_k": call.rows_k,
            "key_tiles": None if call.packed else schedule.key_tiles,
            "query_tiles": schedule.query_tiles,
            "lone_tiles": schedule.lone_tiles or None,
            "short_rows": schedule.short_rows or None,
        }
        return Problem(
            side=side.pointers,
            order_ptr=optional(call.packed, pointer_to(torch.int32)),
            slope_sums_ptr=optional(call.wanted.slopes, pointer_to(torch.float32)),
            score_change=change,
            window=window_parameters(call.spec),
            scale=float32(call.spec.scale),
            units=ScoreUnits.from_spec(call.spec),
            numbers=side.numbers,
            **key_batch_strides(call),
            **{name: int32(number) for name, number in numbers.items()},
        )


class KeyTile(NamedTuple):
    """A key tile as the producer publishes it: its first key in the sequence (or `_END`, `_EMPTY_SLOT`), sequence and
    key/value head. The other fields are 0 where they mean nothing: in a packed call where the sequence's queries and
    keys begin and how many there are; with a block mask the number of steps that its lists name; if SHARES_PROGRESS how
    many query tiles further down it begins."""

    first_key: Any
    sequence: Any
    head_kv: Any
    begin_q: Any = 0
    seq_q: Any = 0
    begin_k: Any = 0
    seq_k: Any = 0
    listed_steps: Any = 0
    start_offset: Any = 0


class KeyTileWork(NamedTuple):
    """The work of a thread block for a key tile: `steps` steps, for each query tile one for each of `group` heads from
    `first_head` on.

    `first_key`: in its sequence. `begin_q`, `seq_q`, `begin_k`, `seq_k`: where the rows of the sequence begin, and how
    many there are. `shift`: the key on the diagonal of query 0. `first_tile`: the query tile that comes first.
    `direction`: 1 or -1, to the next one. `begin`, `tiles`: if ROTATES_WALKS, the first tile of all and how many there
    are (`rotated_start`). Query tiles in `[full_begin, full_end)` need no mask, and neither do the
    first `unmasked_steps` steps. `first_number`: the number of the first head's tile 0 among all tiles of statistics
    and of dq. `query_tiles`: tiles of a head. `reversed_from`, `mirror`, `start_offset`: see `visited_tile`.
    """

    first_key: Any
    sequence: Any
    first_head: Any
    head_kv: Any
    begin_q: Any
    seq_q: Any
    begin_k: Any
    seq_k: Any
    keys: Any
    shift: Any
    first_tile: Any
    direction: Any
    begin: Any
    tiles: Any
    group: Any
    steps: Any
    full_begin: Any
    full_end: Any
    first_number: Any
    query_tiles: Any
    unmasked_steps: Any
    reversed_from: Any
    mirror: Any
    start_offset: Any


class Step(NamedTuple):
    """A head, counted from the first of the group, and a query tile. `visited_tile` says which tile is loaded then."""

    head: Any
    tile: Any


@gluon.jit
def publish_key_tile(number, count, queue, counter_ptr, problem, blocks, config):
    """Finds the first tile that has keys (with a block mask some have none), from number `number` on, and publishes it
    as the thread block's `count`-th. Returns its number and the tile. One that is not persistent takes its own tile."""
    tile = _locate_key_tile(number, problem, blocks, config)
    if config.PERSISTENT and config.TILE_K > 0:
        while tile.first_key == _EMPTY_SLOT:
            number = next_tile_number(number, counter_ptr, problem, config)
            tile = _locate_key_tile(number, problem, blocks, config)
    if config.SHARES_PROGRESS:
        progress = shared_progress(counter_ptr, tile.sequence, tile.head_kv, problem)
        start_offset = gl.load(progress, volatile=True)
        tile = KeyTile(tile.first_key, tile.sequence, tile.head_kv, start_offset=start_offset)
    publish_tile(queue, count, tile, _told(config))
    return number, tile


@gluon.jit
def publish_next_key_tile(number, tile, count, queue, counter_ptr, problem, blocks, config):
    """Publishes the key tile that a persistent thread block takes after `tile`, number `number`, as its `count`-th.
    Returns as `publish_key_tile`."""
    if problem.short_rows is not None:
        following = KeyTile(
            tile.first_key + config.KEYS, tile.sequence, tile.head_kv, tile.begin_q, tile.seq_q, tile.begin_k,
            tile.seq_k, listed_steps=tile.listed_steps,
        )  # fmt: skip
        if not (is_short(tile.seq_q, tile.seq_k, problem.short_rows) & (following.first_key < tile.seq_k)):
            number = next_tile_number(number, counter_ptr, problem, config)
            following = _locate_key_tile(number, problem, blocks, config)
        publish_tile(queue, count, following, _told(config))
    else:
        number = next_tile_number(number, counter_ptr, problem, config)
        number, following = publish_key_tile(number, count, queue, counter_ptr, problem, blocks, config)
    return number, following


@gluon.jit
def _locate_key_tile(number, problem, blocks, config):
    """The `number`-th key tile, still without a `start_offset`. Packed, all lines of a sequence are consecutive."""
    UNEVEN: gl.constexpr = config.HAS_LEFT or config.HAS_RIGHT
    if config.PACKED:
        lines = problem.heads_kv
        all_tiles = gl.load(problem.order_ptr + problem.batch + 1)
    else:
        lines = problem.batch * problem.heads_kv
        all_tiles = problem.key_tiles
    valid = number < all_tiles * lines
    number = gl.minimum(number, all_tiles * lines - 1)
    tiles = all_tiles
    if config.PACKED:
        place = place_in_order(problem.order_ptr, problem.batch, number // lines)
        sequence = gl.load(problem.order_ptr + problem.batch + 2 + place)
        numbers_before = gl.load(problem.order_ptr + place)
        tiles = gl.load(problem.order_ptr + place + 1) - numbers_before
        number -= numbers_before * lines
    if config.REVERSES_LINES:
        together = _lines_at_once(tiles)
    elif config.ORDERED and config.TILE_K > 0:
        together = PAIRS_TOGETHER  # tiles of a line wait for one another in no regular way: other lines go on
    else:
        together = _lines_together(tiles)
    closing = gl.to_tensor(1) if config.ORDERED else _closing_lines(tiles, problem.group)
    if config.WHOLE_LINES:
        tile, line = number % tiles, number // tiles
    elif config.TILE_K > 0 and not config.ORDERED and not config.PACKED:
        tile, line = column_in_order(number, tiles, lines, together, config.TILE_K // config.KEYS)
    else:
        tile, line = tile_in_order(number, tiles, lines, together, closing, UNEVEN or config.ORDERED)
        if config.REVERSES_LINES:
            line = line_in_turn(line, lines, together)
            tile = gl.where(reverses_line(line) != 0, tile, tiles - 1 - tile)
        elif config.ORDERED or config.HAS_RIGHT:
            # The first keys are seen by the most queries. In order, thread blocks wait for smaller numbers only.
            tile = tiles - 1 - tile
    first_key = tile * config.KEYS
    if config.PACKED:
        head_kv = line
        begin_k, seq_k = sequence_rows(problem.side.cu_seqlens_k, sequence, problem.batch, problem.rows_k)
        begin_q, seq_q = sequence_rows(problem.side.cu_seqlens_q, sequence, problem.batch, problem.rows_q)
        seq_q = gl.where(sequence < problem.batch, seq_q, 0)
    else:
        sequence = line // problem.heads_kv
        head_kv = line % problem.heads_kv
        begin_k, seq_k = 0, problem.rows_k
        begin_q, seq_q = 0, problem.rows_q
    if config.TILE_K > 0:
        first_key = gl.where(first_key < seq_k, first_key, _EMPTY_SLOT)
    first_key = gl.where(valid, first_key, _END)
    listed_steps = gl.to_tensor(0)
    if config.TILE_K > 0:
        if first_key >= 0:
            for which in range(problem.group):
                head = head_kv * problem.group + which
                _, steps = line_steps(sequence, head, first_key, seq_q, problem, blocks, config)
                listed_steps += steps
    return KeyTile(first_key, sequence, head_kv, begin_q, seq_q, begin_k, seq_k, listed_steps=listed_steps)


@gluon.jit
def line_steps(sequence, head, first_key, seq_q, problem, blocks, config):
    """The first entry of a key tile's line in the lists of a block mask, and the steps of one head."""
    line = first_key // config.TILE_K
    if config.PACKED:
        exists = sequence < problem.batch
        entry, steps = listed_line(blocks, sequence, head, line, seq_q, exists, config.M, TILE=config.TILE_Q)
    else:
        entry, last_entry = line_entries(blocks, sequence, head, line)
        steps = (last_entry - entry) * (config.TILE_Q // config.M)
    return entry, steps


@gluon.jit
def receive_key_tile(queue, count, config):
    """The `count`-th key tile that the producer published; past the last, `first_key` is negative."""
    return KeyTile(*receive_tile(queue, count, _told(config)))


@gluon.constexpr_function
def _told(config):
    """The fields of a key tile that mean something, in their order."""
    packed = config.PACKED
    return (True, True, True, packed, packed, packed, packed, config.TILE_K > 0, config.SHARES_PROGRESS)


@gluon.jit
def receive_next_key_tile(tile, queue, count, config):
    """The key tile after `tile`. In a thread block that is not persistent it is the end, which the compiler knows."""
    if config.PERSISTENT:
        following = receive_key_tile(queue, count, config)
    else:
        following = KeyTile(
            gl.to_tensor(_END), tile.sequence, tile.head_kv, tile.begin_q, tile.seq_q, tile.begin_k, tile.seq_k,
            listed_steps=tile.listed_steps, start_offset=tile.start_offset,
        )  # fmt: skip
    return following


@gluon.jit
def tile_work(tile, problem, config):
    """The work for a key tile."""
    group = problem.group
    head_kv = tile.head_kv
    heads_kv = problem.heads_kv
    if problem.parts is not None:
        head_kv = head_kv // problem.parts
        heads_kv = heads_kv // problem.parts
    head = head_kv * group
    if config.PACKED:
        begin_q, seq_q, begin_k, seq_k = tile.begin_q, tile.seq_q, tile.begin_k, tile.seq_k
        first_number = head * problem.query_tiles + begin_q // config.M + tile.sequence
    else:
        begin_q, seq_q = gl.to_tensor(0), gl.to_tensor(problem.rows_q)
        begin_k, seq_k = gl.to_tensor(0), gl.to_tensor(problem.rows_k)
        first_number = (tile.sequence * heads_kv * group + head) * problem.query_tiles
    shift = gl.to_tensor(0) if config.TOP_LEFT else seq_k - seq_q
    keys = seq_k
    if config.KEY_LENGTHS:
        # A length may be more than 32 bits.
        counted = gl.load(problem.side.key_lengths + tile.sequence)
        keys = gl.maximum(gl.minimum(counted, seq_k), 0).to(gl.int32)
        if not config.PACKED:
            begin_k = tile.sequence * problem.rows_k
    begin, full_begin, full_end, end = query_tile_ranges(
        tile.first_key, keys, shift, seq_q, problem.window.left, problem.window.right, config.KEYS, M=config.M,
        HAS_LEFT=config.HAS_LEFT, HAS_RIGHT=config.HAS_RIGHT,
    )  # fmt: skip
    if config.KEY_LENGTHS:
        end = gl.where(tile.first_key < keys, end, begin)
    if problem.parts is not None:
        part = tile.head_kv % problem.parts
        tiles = end - begin
        end = begin + tiles * (part + 1) // problem.parts
        begin += tiles * part // problem.parts
    steps = group * (end - begin)
    unmasked = unmasked_tiles(begin, full_begin, full_end, end)
    start_offset = gl.to_tensor(0)
    if config.SHARES_PROGRESS:
        start_offset = tile.start_offset
    reversed_tiles = gl.to_tensor(0)
    if config.REVERSES_WALKS:
        line, lines, tiles = _locate_line(tile, problem, config)
        number = tile.first_key // config.KEYS
        reversed_tiles = unmasked * reverses_walk(number, tiles, line, lines, group, gl.num_programs(0))
    first_tile, direction = gl.to_tensor(end - 1), gl.to_tensor(-1)
    if config.ROTATES_WALKS:
        first_tile = rotated_start(begin, end, problem.window.left + problem.window.right, config)
    if config.REVERSES_LINES:
        line, _, _ = _locate_line(tile, problem, config)
        if reverses_line(line) != 0:
            first_tile, direction = gl.to_tensor(begin), gl.to_tensor(1)
    if config.TILE_K > 0:
        steps = tile.listed_steps
    return KeyTileWork(
        first_key=tile.first_key,
        sequence=tile.sequence,
        first_head=head,
        head_kv=tile.head_kv,
        begin_q=begin_q,
        seq_q=seq_q,
        begin_k=begin_k,
        seq_k=seq_k,
        keys=keys,
        shift=shift,
        first_tile=first_tile,
        direction=direction,
        begin=begin,
        tiles=end - begin,
        group=group,
        steps=steps,
        full_begin=full_begin,
        full_end=full_end,
        first_number=first_number,
        query_tiles=problem.query_tiles,
        unmasked_steps=group * unmasked,
        reversed_from=end - reversed_tiles,
        mirror=2 * end - 1 - reversed_tiles,
        start_offset=start_offset,
    )


@gluon.jit
def _locate_line(tile, problem, config):
    """The line of a key tile among those that come in its order, how many these are, and the key tiles of each."""
    if config.PACKED:
        line, lines, tiles = tile.head_kv, problem.heads_kv, gl.cdiv(tile.seq_k, config.KEYS)
    else:
        line, lines = tile.sequence * problem.heads_kv + tile.head_kv, problem.batch * problem.heads_kv
        tiles = problem.key_tiles
    return line, lines, tiles


@gluon.jit
def visited_tile(work, tile, config):
    """The query tile of a step that would have `tile` if the key tile went down from the last one.

    If it goes up, the tiles from `reversed_from` on, which are unmasked, come in the opposite order, each in the
    place of its mirror image, so `tile` will do for masks. If it began `start_offset` tiles further down, without a
    mask, all are shifted.
    """
    if config.REVERSES_WALKS:
        tile = gl.where(tile >= work.reversed_from, work.mirror - tile, tile)
    if config.SHARES_PROGRESS:
        tile -= work.start_offset
        tile = gl.where(tile < 0, tile + work.query_tiles, tile)
    return tile


@gluon.jit
def first_statistics_tile(work, head):
    """The number of tile 0 of a head of the group, among all tiles of statistics and of dq."""
    return work.first_number + head * work.query_tiles


@gluon.jit
def key_tile_step(work, index, config):
    """Step number `index` of a key tile. With a block mask the producer publishes it instead.

    Query tiles come from the last to the first, unless the line is reversed, and all heads of a tile come before the
    next tile, so thread blocks of a line that began together read the same queries at the same time, with or without a
    causal mask. In order, each follows the one before it by a single step.
    """
    tile = work.first_tile + work.direction * (index // work.group)
    return Step(index % work.group, _rotated(tile, work, config))


@gluon.jit
def step_after(work, step, config):
    """The step that follows one, without a division."""
    done = step.head + 1 == work.group
    tile = step.tile + gl.where(done, work.direction, 0)
    return Step(gl.where(done, 0, step.head + 1), _rotated(tile, work, config))


@gluon.jit
def _rotated(tile, work, config):
    """The query tile that comes after those down to the first one, if ROTATES_WALKS."""
    if config.ROTATES_WALKS:
        tile = gl.where(tile < work.begin, tile + work.tiles, tile)
    return tile


@gluon.jit
def info_slot(count, config, shared):
    """The place of the info of step number `count`."""
    return count % (shared.q.STAGES + config.DSCORE_STAGES)


@gluon.jit
def listed_step(count, config, shared):
    """Step number `count` as the producer published it, and the kind of its tile."""
    place = info_slot(count, config, shared)
    tile = read_tile_info(shared.tile_info, place, TILE_NUMBER)
    kind = read_tile_info(shared.tile_info, place, TILE_KIND)
    return Step(read_tile_info(shared.tile_info, place, TILE_HEAD), tile), kind


@gluon.jit
def dq_sum_tile(work, head, tile, config):
    """The number of a head's query tile in the sums of dq; with whole lines, in the thread block's one line."""
    if config.WHOLE_LINES:
        number = (gl.program_id(0) * work.group + head) * work.query_tiles + tile
    else:
        number = first_statistics_tile(work, head) + tile
    return number


@gluon.jit
def kept_sum_tile(work, head, tile, problem, config):
    """The number of a head's query tile in the sums that a thread block keeps of short sequences, behind the others."""
    tiles = gl.cdiv(problem.short_rows, config.M)
    heads = problem.heads_kv * work.group
    if problem.parts is not None:
        heads = heads // problem.parts
    return heads * work.query_tiles + (gl.program_id(0) * work.group + head) * tiles + tile


@gluon.jit
def dq_turn(work, tile, problem, config):
    """How many key tiles add to the dq of a query tile before this one does, without a block mask."""
    first, last = adding_tiles(work, tile, problem, config)
    number = work.first_key // config.KEYS
    turn = number - first
    if config.REVERSES_LINES:
        turn = gl.where(work.direction > 0, last - number, turn)
    return turn


@gluon.jit
def adding_tiles(work, tile, problem, config):
    """The numbers of the first and of the last key tile that add to the dq of a query tile, without a block mask."""
    first = gl.to_tensor(0)
    last = gl.cdiv(work.keys, config.KEYS) - 1
    if config.HAS_LEFT:  # the first key that the first query of the tile sees
        first = gl.maximum(tile * config.M + work.shift - problem.window.left, 0) // config.KEYS
    if config.HAS_RIGHT:  # the last key that its last query sees
        last_key = tile * config.M + config.M - 1 + work.shift + problem.window.right
        last = gl.minimum(last_key // config.KEYS, last)
    return first, last


@gluon.jit
def modified_scores(s, key, first_query, first_key, head, tables, work, problem, config):
    """Scores `sᵀ` with what changes them; and for `compute_ds` the soft cap's tanh, or a function's derivatives."""
    side = problem.side
    units = problem.units
    if units.cap_scale is not None:
        s = capped(s, units.cap_scale)
    inner = s
    if config.SCORE_FUNCTION is not None:
        query = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s, derivatives = config.SCORE_FUNCTION(
            s * units.function_scale, batch=work.sequence, head=work.first_head + head, q_index=query[None, :],
            k_index=key[:, None], first_q=first_query, first_k=first_key, captured=problem.score_change.captured,
            sizes=problem.score_change.sizes, reads=tables.read,
        )  # fmt: skip
        if config.FUNCTION_DERIVATIVE:
            if units.cap_scale is not None:
                derivatives *= 1.0 - inner * inner
            inner = derivatives
    if side.bias is not None:
        s = add_bias(s, tables.bias, LOG2_E / units.scale_log2)
    slope = load_slope(side, problem.numbers, work.sequence, work.first_head + head, True)
    if slope is not None:
        shift = distance_shift(work.seq_q, work.seq_k, problem.numbers.origin)
        near = near_shift(shift, first_query // config.M * config.M, work.keys, config.M)
        s = lowered_by_distance(s, key, first_query + near, slope * (LOG2_E / units.scale_log2))
    if side.mask is not None:
        s = hide_by_mask(s, tables.mask)
    return s, inner


@gluon.jit
def compute_p(
    s, lse, positions, first_key, step, kind, tables, part: gl.constexpr, work, config, problem, blocks,
    MASK: gl.constexpr,
):  # fmt: skip
    """`pᵀ` `[64, QUERIES]` of part `part` of a step, and what `compute_ds` takes. `lse` is still to be subtracted
    from the products `s`. `kind`: of the tile in the block mask. `tables`: as `load_tables` returns them."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    query = step.tile * config.M + part * QUERIES
    visited = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    s, inner = modified_scores(
        s, positions, visited, first_key, step.head, tables, work, problem=problem, config=config
    )
    if config.TILE_K > 0:
        if kind != FULL:
            column = step.tile * config.PARTS + part
            bits = load_bits(blocks, kind, first_key, column, QUERIES, config.TILE_K, config.TILE_Q)
            s = where_visible(bits, s, float("-inf"))
    p = gl.exp2(s * problem.units.scale_log2 - lse[None, :])
    if MASK:
        if (step.tile < work.full_begin) | (step.tile >= work.full_end):
            p = mask_probs(p, positions, query, work, problem, config)
    if problem.side.bias is not None or config.SCORE_FUNCTION is not None:
        if visited + QUERIES > work.seq_q:
            p = without_rows_past_end(p, visited, work)
    if config.FUNCTION_DERIVATIVE:
        inner = gl.where(p == 0.0, 0.0, inner)  # what a function says of pairs that nobody sees does not count
    return p, inner


@gluon.jit
def load_tables(
    first_key, slot, step, part: gl.constexpr, work, bias_tiles, problem, config, WHICH: gl.constexpr
):  # fmt: skip
    """What TMA or this thread reads of bias, mask and score function for `sᵀ` of part `part` of a step, whose queries
    lie in `slot`, and the `WHICH`-th 64 keys. `bias_tiles`: those that TMA brought, or None."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    side = problem.side
    bias, mask = 0, 0
    if bias_tiles is not None:
        tile = bias_tiles.index(slot.place * (config.KEYS // ROWS) + WHICH)
        bias = moved_bias(tile, part * QUERIES, QUERIES, s_layout, True)
    elif side.bias is not None:
        bias = _load_table(
            side.bias, problem.numbers.bias, config.BIAS_COLUMN, first_key, step, part, work, config=config, OTHER=0.0
        )
    if side.mask is not None:
        mask = _load_table(
            side.mask, problem.numbers.mask, config.MASK_COLUMN, first_key, step, part, work, config=config, OTHER=0
        )
    read = 0
    if config.SCORE_READS is not None:
        first_query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
        query = first_query + gl.arange(0, QUERIES, gl.SliceLayout(0, s_layout))
        key = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        read = config.SCORE_READS(
            batch=work.sequence, head=work.first_head + step.head, q_index=query[None, :], k_index=key[:, None],
            first_q=first_query, first_k=first_key, captured=problem.score_change.captured,
            sizes=problem.score_change.sizes,
        )  # fmt: skip
    return TableTiles(bias, mask, read)


@gluon.jit
def _load_table(
    pointer, numbers, STRIDE_COLUMN: gl.constexpr, first_key, step, part: gl.constexpr, work, config,
    OTHER: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = config.M // config.PARTS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    first = head_table(pointer, numbers, work.sequence, work.first_head + step.head)
    return load_table(
        first, numbers, STRIDE_COLUMN, query, first_key, QUERIES, ROWS, layout=s_layout, OTHER=OTHER, TRANSPOSED=True
    )


@gluon.jit
def group_head_dropout(head, work, problem):
    """The `HeadDropout` of a head, counted from the first of the group; 0 without dropout."""
    dropout = 0
    if problem.side.dropout_seed is not None:
        heads = problem.heads_kv * work.group
        dropout = head_dropout(problem.side, problem.numbers, work.sequence, work.first_head + head, heads)
    return dropout


@gluon.jit
def step_dropout(dropout, step, work, problem, config):
    """The same of a step, from that of the step before. Its words take ten rounds of Philox, one after another, as long
    as a product, so they are computed anew only where several heads visit the keys, and while a product is in flight.
    Beside a score function there are no registers to keep them in."""
    if problem.side.dropout_seed is not None:
        if config.SCORE_FUNCTION is not None:
            dropout = group_head_dropout(step.head, work, problem)
        elif work.group > 1:
            dropout = group_head_dropout(step.head, work, problem)
    return dropout


@gluon.jit
def with_dropout(p, dropout, first_key, step, part: gl.constexpr, work, config, problem):
    """The weights for dv, and what is a factor of the scores' gradients (`signed_by_dropout`). `dropout`: of the step's
    head (`group_head_dropout`)."""
    weights = p
    if problem.side.dropout_seed is not None:
        query = visited_tile(work, step.tile, config) * config.M + part * (config.M // config.PARTS)
        weights, p = signed_by_dropout(p, dropout, query, first_key)
    return weights, p


@gluon.jit
def add_to_slope_sums(ds, positions, step, part: gl.constexpr, work, config, problem):
    """Adds to minus the gradient of a head's slope what part `part` of a step gives to each key: the sum over queries
    of `dsᵀ · |distance|`. Nobody else adds to these keys of this head, and a thread's additions keep their order. So
    the sums are the same whenever the steps are."""
    QUERIES: gl.constexpr = config.M // config.PARTS
    query = visited_tile(work, step.tile, config) * config.M + part * QUERIES
    diagonal = distance_shift(work.seq_q, work.seq_k, problem.numbers.origin)
    # If a compiler saw that these are the distances of the scores, it would keep them in registers meanwhile.
    eights, distance = in_eights_and_distances(ds, positions, query + diagonal + hidden_zero(step.tile))
    sums = gl.sum(gl.sum(eights * gl.abs(distance), 1), 1)
    key = gl.convert_layout(positions, sums.type.layout)
    row = (work.first_head + step.head).to(gl.int64) * problem.rows_k
    if config.PACKED:
        row += work.begin_k
    else:
        row += (work.sequence * (problem.heads_kv * problem.group)).to(gl.int64) * problem.rows_k
    gl.atomic_add(problem.slope_sums_ptr + row + key, sums, mask=key < work.seq_k, sem="relaxed")
