"""Which tiles of keys a program of the Hopper backward takes, and which tiles of queries each visits, in what order.

Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import aggregate, gl, gluon, mbarrier
from flashtile.ops.attention.hopper.backward_pieces import ROWS, query_tile_ranges
from flashtile.ops.attention.hopper.blocks import column_in_order, line_entries
from flashtile.ops.attention.hopper.pieces import (
    PAIRS_TOGETHER,
    closing_lines,
    locate_tile,
    next_number,
    place_of,
    publish_tile,
    receive_tile,
    tile_in_order,
    turn_of,
)

#: What stands for the first key: there are no more tiles; a tile has no keys.
_END, _EMPTY_SLOT = gl.constexpr(-1), gl.constexpr(-2)

#: Key tiles that run at once, about, and key tiles whose lines take turns.
_TILES_AT_ONCE, _TILES_TOGETHER = gl.constexpr(128), gl.constexpr(256)


@aggregate
class Form:
    """What the compiled main kernel is specialised for.

    KEYS: keys of a program, M: queries of a tile, PARTS: `pᵀ` and `dsᵀ` are computed for M / PARTS queries at a time,
    SUM_COLUMNS: columns of dq summed at a time, HANDOVERS: places for the `dsᵀ` and `pᵀ` that one warpgroup passes on
    to another, KEY_STAGES: tiles of keys and values on chip, STAYS: programs take one key tile after another, ORDERED:
    the key tiles add to dq in order, ALTERNATES: those of every second group of lines in the opposite one (`rises`),
    MAY_CUT: a band or the end of the keys may cut a tile (a branch for that, even one that is never taken, keeps ptxas
    from mixing what is before and behind it), CUT_LAST: what it cuts are the last steps of a walk, and they have a loop
    of their own (`backward_variant`), TURNS: some walks go up (`walks_up`), MEETS: they begin where others are
    (`meeting_point`), STATISTICS_MULTIPLIED, SUMS_BY_TMA: as in `BackwardConfig`.
    """

    KEYS: gl.constexpr
    M: gl.constexpr
    PARTS: gl.constexpr
    SUM_COLUMNS: gl.constexpr
    HANDOVERS: gl.constexpr
    KEY_STAGES: gl.constexpr
    STAYS: gl.constexpr
    ORDERED: gl.constexpr
    ALTERNATES: gl.constexpr
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TOP_LEFT: gl.constexpr
    MAY_CUT: gl.constexpr
    CUT_LAST: gl.constexpr
    TURNS: gl.constexpr
    MEETS: gl.constexpr
    STATISTICS_MULTIPLIED: gl.constexpr
    SUMS_BY_TMA: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, KEYS, M, PARTS, SUM_COLUMNS, HANDOVERS, KEY_STAGES, STAYS, ORDERED, ALTERNATES, PACKED, HAS_LEFT,
        HAS_RIGHT, TOP_LEFT, MAY_CUT, CUT_LAST, TURNS, MEETS, STATISTICS_MULTIPLIED, SUMS_BY_TMA, TILE_Q, TILE_K,
    ):  # fmt: skip
        self.KEYS = gl.constexpr(KEYS)
        self.M = gl.constexpr(M)
        self.PARTS = gl.constexpr(PARTS)
        self.SUM_COLUMNS = gl.constexpr(SUM_COLUMNS)
        self.HANDOVERS = gl.constexpr(HANDOVERS)
        self.KEY_STAGES = gl.constexpr(KEY_STAGES)
        self.STAYS = gl.constexpr(STAYS)
        self.ORDERED = gl.constexpr(ORDERED)
        self.ALTERNATES = gl.constexpr(ALTERNATES)
        self.PACKED = gl.constexpr(PACKED)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.TOP_LEFT = gl.constexpr(TOP_LEFT)
        self.MAY_CUT = gl.constexpr(MAY_CUT)
        self.CUT_LAST = gl.constexpr(CUT_LAST)
        self.TURNS = gl.constexpr(TURNS)
        self.MEETS = gl.constexpr(MEETS)
        self.STATISTICS_MULTIPLIED = gl.constexpr(STATISTICS_MULTIPLIED)
        self.SUMS_BY_TMA = gl.constexpr(SUMS_BY_TMA)
        self.TILE_Q = gl.constexpr(TILE_Q)
        self.TILE_K = gl.constexpr(TILE_K)


@aggregate
class Walk:
    """What a program does for one key tile: `total` steps, of `group` heads from `first_head` on for each query tile.

    `first`: first key in its sequence. `begin_q`, `seq_q`, `begin_k`, `seq_k`: where the sequence's rows begin and how
    many they are. `shift`: the key of query 0's diagonal. `start`: the query tile that comes first, `way`: 1 or -1,
    to the next one. Those in `[full_begin, full_end)` need no mask, nor do the first `uncut` steps. `place`: tile 0 of
    the first head among all tiles of statistics and sums, `line` tiles for each head. `turned`, `mirror`, `met`: as
    `turned_tile`.
    """

    first: gl.tensor
    sequence: gl.tensor
    first_head: gl.tensor
    head_kv: gl.tensor
    begin_q: gl.tensor
    seq_q: gl.tensor
    begin_k: gl.tensor
    seq_k: gl.tensor
    shift: gl.tensor
    start: gl.tensor
    way: gl.tensor
    group: gl.tensor
    total: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    place: gl.tensor
    line: gl.tensor
    uncut: gl.tensor
    turned: gl.tensor
    mirror: gl.tensor
    met: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, first, sequence, first_head, head_kv, begin_q, seq_q, begin_k, seq_k, shift, start, way, group, total,
        full_begin, full_end, place, line, uncut, turned, mirror, met,
    ):  # fmt: skip
        self.first = first
        self.sequence = sequence
        self.first_head = first_head
        self.head_kv = head_kv
        self.begin_q = begin_q
        self.seq_q = seq_q
        self.begin_k = begin_k
        self.seq_k = seq_k
        self.shift = shift
        self.start = start
        self.way = way
        self.group = group
        self.total = total
        self.full_begin = full_begin
        self.full_end = full_end
        self.place = place
        self.line = line
        self.uncut = uncut
        self.turned = turned
        self.mirror = mirror
        self.met = met


@gluon.jit
def first_number(counter_ptr, form):
    """The first tile of this program: its share, but in order whichever is the next one.

    Then programs wait for tiles with smaller numbers. Beside a kernel of another stream some programs begin only when
    others have ended; so nobody may wait for the share of one that has not begun. Programs that do not stay begin in
    the order of their numbers.
    """
    number = gl.program_id(0)
    if form.ORDERED and form.STAYS:
        number = gl.atomic_add(counter_ptr, 1)
    return number


@gluon.jit
def number_after(number, counter_ptr, form):
    """The next tile of a program that stays."""
    if form.ORDERED:
        following = gl.atomic_add(counter_ptr, 1)
    else:
        following = next_number(number, counter_ptr, 1)
    return following


@gluon.jit
def find_keys(number, taking, form):
    """The first tile with keys from the `number`-th on, published to the others as their `count`-th: its number, and
    what `walk_of` needs. Of a program that does not stay, its own tile if that has keys."""
    queue, count, counter_ptr, call = taking
    found = _locate_keys(number, call, form)
    if form.STAYS and (form.PACKED or form.TILE_K > 0):
        while found[0] == _EMPTY_SLOT:
            number = number_after(number, counter_ptr, form)
            found = _locate_keys(number, call, form)
    if form.MEETS:
        found += (gl.load(meeting_point(counter_ptr, found, call), volatile=True),)
    publish_tile(queue, count, found)
    return number, found


@gluon.jit
def _locate_keys(number, call, form):
    """First key (or `_END`, `_EMPTY_SLOT`), sequence and key/value head of the `number`-th tile; packed, where the
    sequence's queries and keys begin and how many they are; with a block mask, how many query tiles are listed."""
    (
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_kv, group, rows_q, rows_k, tiles, _, _, _, blocks, _,
    ) = call  # fmt: skip
    UNEVEN: gl.constexpr = form.PACKED or form.HAS_LEFT or form.HAS_RIGHT
    lines = heads_kv if form.PACKED else batch * heads_kv
    valid = number < tiles * lines
    number = gl.minimum(number, tiles * lines - 1)
    if form.ALTERNATES:
        together = _lines_at_once(tiles)
    elif form.ORDERED and form.TILE_K > 0:
        together = PAIRS_TOGETHER  # tiles of a line wait for one another in no regular way: other lines go on
    else:
        together = _lines_together(tiles)
    closing = gl.to_tensor(1) if form.ORDERED else _closing_lines(tiles, group)
    if form.TILE_K > 0 and not form.ORDERED:
        tile, line = column_in_order(number, tiles, lines, together, form.TILE_K // form.KEYS)
    else:
        tile, line = tile_in_order(number, tiles, lines, together, closing, UNEVEN or form.ORDERED)
        if form.ALTERNATES:
            tile = gl.where(rises(line, lines, together) != 0, tile, tiles - 1 - tile)
        elif form.ORDERED or (form.HAS_RIGHT and not form.PACKED):
            # The first keys are seen by the most queries. In order, programs wait for those with smaller numbers only.
            tile = tiles - 1 - tile
    sequence, head_kv, first, begin_k, seq_k, begin_q, seq_q = locate_tile(
        tile, line, cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads_kv, rows_k, rows_q, form.KEYS, form.PACKED
    )
    if form.PACKED or form.TILE_K > 0:
        first = gl.where(first < seq_k, first, _EMPTY_SLOT)
    first = gl.where(valid, first, _END)
    if form.PACKED:
        found = (first, sequence, head_kv, begin_q, seq_q, begin_k, seq_k)
    elif form.TILE_K > 0:
        listed = gl.to_tensor(0)
        if first >= 0:
            for which in range(group):
                entry, last_entry = line_entries(blocks, sequence, head_kv * group + which, first // form.TILE_K)
                listed += (last_entry - entry) * (form.TILE_Q // form.M)
        found = (first, sequence, head_kv, listed)
    else:
        found = (first, sequence, head_kv)
    return found


@gluon.jit
def _lines_together(tiles):
    """How many lines' key tiles take turns: so many that these are about twice as many as run at once.

    What they read and add to together is queries, dout and sums of dq, of whole lines where a mask has gaps: 1 KiB for
    each row and head at D 128, which should stay in the L2 cache. Not one line, whose last tiles would leave more of
    the GPU idle.
    """
    return gl.minimum(gl.maximum(_TILES_TOGETHER // tiles, 2), PAIRS_TOGETHER)


@gluon.jit
def _closing_lines(tiles, group):
    """How many lines take turns at the end of a call. Of heads that share keys no more than have 8 programs each at
    work, which read the same queries: these are too many for the L2 cache. With twice as many lines 64 and 8 heads,
    1,024 tokens, take 7 % longer; with so many at 2,048 tokens 18 % less than with 8."""
    closing = closing_lines(tiles)
    return gl.where(group > 1, gl.minimum(closing, _TILES_AT_ONCE // 8), closing)


@gluon.jit
def _lines_at_once(tiles):
    """How many lines have all their key tiles under way at once, at least one."""
    return gl.maximum(_TILES_AT_ONCE // tiles, 1)


@gluon.jit
def rises(line, lines, together):
    """Whether (1 or 0) the key tiles of a line under a causal mask add from the last one on, and walks go up.

    Walks that start together at their diagonals are, each, where the one with the next keys was before, which is the
    one that they wait for; and they end one after another, that with the last keys first. So the next line's start one
    after another, with the first keys and the longest walk first; down from the last query tile each then follows the
    one with the keys before, and they end together. So lines go up and down in turn, and the last ones down. If all
    went up, programs would drift apart, and end apart; if all went down, those that start together would wait.
    """
    return ((lines - 1) // together - line // together) % 2


@gluon.jit
def receive_keys(queue, count, form):
    """The `count`-th tile of this program, as `find_keys` found it; past the last a negative first key."""
    NUMBERS: gl.constexpr = 7 if form.PACKED else 4 if form.TILE_K > 0 or form.MEETS else 3
    return receive_tile(queue, count, NUMBERS)


@gluon.jit
def receive_next_keys(found, queue, count, form):
    """What follows the tile before. Of a program that does not stay, the end, which the compiler knows."""
    if form.STAYS:
        found = receive_keys(queue, count, form)
    else:
        found = (gl.to_tensor(_END),) + found[1:]
    return found


@gluon.jit
def walk_of(found, call, form):
    """The walk of a tile that `find_keys` or `receive_keys` gave."""
    _, _, batch, heads_kv, group, rows_q, rows_k, tiles, query_tiles, window_left, window_right, _, _ = call
    first, sequence, head_kv = found[0], found[1], found[2]
    head = head_kv * group
    if form.PACKED:
        begin_q, seq_q, begin_k, seq_k = found[3], found[4], found[5], found[6]
        place = head * query_tiles + begin_q // form.M + sequence
    else:
        begin_q, seq_q, begin_k, seq_k = gl.to_tensor(0), gl.to_tensor(rows_q), gl.to_tensor(0), gl.to_tensor(rows_k)
        place = (sequence * heads_kv * group + head) * query_tiles
    shift = gl.to_tensor(0) if form.TOP_LEFT else seq_k - seq_q
    begin, full_begin, full_end, end = query_tile_ranges(
        first, seq_k, shift, seq_q, window_left, window_right, form.KEYS, form.M, form.HAS_LEFT, form.HAS_RIGHT
    )
    total = group * (end - begin)
    uncut = uncut_tiles(begin, full_begin, full_end, end)
    met = gl.to_tensor(0)
    if form.MEETS:
        met = found[3]
    turned = gl.to_tensor(0)
    if form.TURNS:
        line = sequence * heads_kv + head_kv
        turned = uncut * walks_up(first // form.KEYS, tiles, line, batch * heads_kv, group, gl.num_programs(0))
    start, way = gl.to_tensor(end - 1), gl.to_tensor(-1)
    if form.ALTERNATES:
        line, lines = (head_kv, heads_kv) if form.PACKED else (sequence * heads_kv + head_kv, batch * heads_kv)
        if rises(line, lines, _lines_at_once(tiles)) != 0:
            start, way = gl.to_tensor(begin), gl.to_tensor(1)
    if form.TILE_K > 0:
        total = found[3]
    return Walk(
        first, sequence, head, head_kv, begin_q, seq_q, begin_k, seq_k, shift, start, way,
        gl.to_tensor(group), gl.to_tensor(total), gl.to_tensor(full_begin), gl.to_tensor(full_end), place,
        gl.to_tensor(query_tiles), gl.to_tensor(group * uncut), end - turned, 2 * end - 1 - turned,
        met,
    )  # fmt: skip


@gluon.jit
def uncut_tiles(begin, full_begin, full_end, end):
    """How many query tiles, from the last one on, need no mask (ranges as of `query_tile_ranges`)."""
    return gl.where(full_end < end, 0, gl.maximum(end - gl.maximum(full_begin, begin), 0))


@gluon.jit
def walks_up(tile, tiles, line, lines, group, programs):
    """Whether (1 or 0) the walk of a key tile goes up: that of every second one that a program takes in a line.

    The first ones, with the longest walks, start together at the last query tile. Under a causal mask they end one
    after the other, the one with the last keys first, and its program takes the longest walk that is left. So walks
    that go up from their diagonal are at the same query tile at any time, although they start one after the other, and
    end together at the last one, where those of the next round start.
    """
    _, lines_here = turn_of(line, lines, _lines_together(tiles), _closing_lines(tiles, group))
    of_a_round = gl.maximum(programs // lines_here, 1)
    return tile // of_a_round % 2


@gluon.jit
def meeting_point(counter_ptr, found, call):
    """Where the walks of a tile's line tell how many query tiles, from the last one down, lie before the one that they
    are at; behind the count of tiles.

    Programs that walk over the same queries together read them once from memory. But some multiprocessors are faster,
    and each walk takes them further apart, until the L2 cache no longer has for one what another has read. So each
    walk begins where another one is, which does not matter without a mask: behind the first query tile comes the last.
    A model of 132 programs and a cache of 35 MB has 8 fetches of each tile instead of 142 (64 and 8 heads, 32k).
    """
    return counter_ptr + 1 + found[1] * call[3] + found[2]


@gluon.jit
def turned_tile(walk, tile, form):
    """The query tile of a step that would have `tile` if the walk went down from the last one.

    Where it goes up the tiles from `turned` on, which are uncut, come in the opposite order, each in the place of its
    mirror image; so for masks `tile` will do. Where it began `met` tiles further down, without a mask, all are shifted.
    """
    if form.TURNS:
        tile = gl.where(tile >= walk.turned, walk.mirror - tile, tile)
    if form.MEETS:
        tile -= walk.met
        tile = gl.where(tile < 0, tile + walk.line, tile)
    return tile


@gluon.jit
def keys_of(count, WHICH: gl.constexpr, form):
    """The place of the `WHICH`-th 64 keys of the `count`-th tile, and the phase of its `full` barrier then."""
    stage, phase = place_of(count, form.KEY_STAGES)
    return stage * (form.KEYS // ROWS) + WHICH, phase


@gluon.jit
def step_of(walk, it):
    """Head (from the first one) and query tile (`turned_tile`) of step `it`; with a block mask the producer tells.

    From the last tile to the first, unless the line rises, and all heads of a tile before the next: so programs of a
    line that began together read the same queries at the same time, with or without a causal mask, and in order each
    follows the one before it by a single step.
    """
    return it % walk.group, walk.start + walk.way * (it // walk.group)


@gluon.jit
def step_after(walk, head, tile):
    """The step that follows one, without a division."""
    done = head + 1 == walk.group
    return gl.where(done, 0, head + 1), tile + gl.where(done, walk.way, 0)


@gluon.jit
def adders_before(walk, tile, window_left, window_right, form):
    """How many key tiles add to the dq of a query tile before this walk's does, without a block mask."""
    number = walk.first // form.KEYS
    before = number
    if form.HAS_LEFT:
        before = number - gl.maximum(tile * form.M + walk.shift - window_left, 0) // form.KEYS
    if form.ALTERNATES:
        last_key = tile * form.M + form.M - 1 + walk.shift + window_right  # that the tile's last query sees
        last = gl.minimum(last_key // form.KEYS, gl.cdiv(walk.seq_k, form.KEYS) - 1)
        before = gl.where(walk.way > 0, last - number, before)
    return before


@gluon.jit
def await_last_sum(walk, steps, form, dscores_empty):
    """Until the sums' warpgroup has read the keys for the last time; `steps`: of all tiles so far."""
    if walk.total > 0:
        place, phase = place_of(steps - 1, form.HANDOVERS)
        mbarrier.wait(dscores_empty.index(place), phase)
