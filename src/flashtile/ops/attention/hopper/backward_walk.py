"""Which tiles of queries a program of the Hopper backward visits, and the producer that loads them.

Letters as in `pieces` and `backward`.
"""

from flashtile._backends.gluon import aggregate, gl, gluon, mbarrier, tma_load
from flashtile.ops.attention.hopper.backward_pieces import ROWS
from flashtile.ops.attention.hopper.blocks import FULL, hear, line_entries, listed_rank, listed_tile, tell
from flashtile.ops.attention.hopper.pieces import coordinates, load_tile, place_of


@aggregate
class Form:
    """What the compiled main kernel is specialised for.

    KEYS: keys of a program, M: queries of a tile, PARTS: `pᵀ` and `dsᵀ` are computed for M / PARTS queries at a time,
    SUM_COLUMNS: columns of dq summed at a time, HANDOVERS: places for the `dsᵀ` and `pᵀ` that one warpgroup passes on
    to another, ORDERED: the key tiles add to dq in their order.
    """

    KEYS: gl.constexpr
    M: gl.constexpr
    PARTS: gl.constexpr
    SUM_COLUMNS: gl.constexpr
    HANDOVERS: gl.constexpr
    ORDERED: gl.constexpr
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    TILE_Q: gl.constexpr
    TILE_K: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, KEYS, M, PARTS, SUM_COLUMNS, HANDOVERS, ORDERED, PACKED, HAS_LEFT, HAS_RIGHT, TILE_Q, TILE_K):
        self.KEYS = gl.constexpr(KEYS)
        self.M = gl.constexpr(M)
        self.PARTS = gl.constexpr(PARTS)
        self.SUM_COLUMNS = gl.constexpr(SUM_COLUMNS)
        self.HANDOVERS = gl.constexpr(HANDOVERS)
        self.ORDERED = gl.constexpr(ORDERED)
        self.PACKED = gl.constexpr(PACKED)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.TILE_Q = gl.constexpr(TILE_Q)
        self.TILE_K = gl.constexpr(TILE_K)


@aggregate
class Walk:
    """The query tiles that a key tile visits: `steps` of each of the `group` heads from `first_head` on.

    `begin_q`, `seq_q`: the sequence's queries. `begin`: the first tile. Tiles in `[full_begin, full_end)` need no
    mask. `place`: tile 0 of the first head among all tiles of statistics and sums, `line` tiles for each head.
    """

    sequence: gl.tensor
    first_head: gl.tensor
    begin_q: gl.tensor
    seq_q: gl.tensor
    begin: gl.tensor
    steps: gl.tensor
    total: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    place: gl.tensor
    line: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sequence, first_head, begin_q, seq_q, begin, steps, total, full_begin, full_end, place, line):
        self.sequence = sequence
        self.first_head = first_head
        self.begin_q = begin_q
        self.seq_q = seq_q
        self.begin = begin
        self.steps = steps
        self.total = total
        self.full_begin = full_begin
        self.full_end = full_end
        self.place = place
        self.line = line


@gluon.jit
def step_of(walk, it, form):
    """Head (from the first one) and query tile of step `it`; with a block mask the producer tells. In order, all
    programs go from the last tile to the first: then each follows the one before it by a single step, with or without a
    causal mask."""
    within = it % walk.steps
    if form.ORDERED:
        within = walk.steps - 1 - within
    return it // walk.steps, walk.begin + within


@gluon.jit
def load_tiles(producing):
    """Loads keys and values once, then queries, statistics and dout as soon as there is a place for them."""
    load_keys(producing)
    walk, form, loading, _, _, _, _, _, _, _, first, _, _, group, blocks = producing
    if form.TILE_K > 0:
        it = 0
        for head in range(group):
            entry, last_entry = line_entries(blocks, walk.sequence, walk.first_head + head, first // form.TILE_K)
            steps = (last_entry - entry) * (form.TILE_Q // form.M)
            for step in range(steps):
                turn = 0
                if form.ORDERED:
                    step = steps - 1 - step
                    rank = listed_rank(blocks, entry, step, form.M, form.TILE_Q)
                    turn = rank * (form.TILE_K // form.KEYS) + first % form.TILE_K // form.KEYS
                tile, kind = listed_tile(blocks, entry, step, True, form.M, form.TILE_Q)
                _load_queries(walk, form, loading, it, head, tile, kind, turn)
                it += 1
    else:
        for it in range(walk.total):
            load_step(it, producing)


@gluon.jit
def load_keys(producing):
    """Loads keys and values."""
    (
        walk, form, _, k, v, k_desc, k_rest_desc, v_desc, v_rest_desc, head_kv, first, begin_k, seq_k, _, _
    ) = producing  # fmt: skip
    for which in gl.static_range(form.KEYS // ROWS):
        row = first + which * ROWS
        load_tile(k, which, k_desc, k_rest_desc, walk.sequence, head_kv, begin_k, seq_k, row, form.PACKED)
    for which in gl.static_range(form.KEYS // ROWS):
        row = first + which * ROWS
        load_tile(v, which, v_desc, v_rest_desc, walk.sequence, head_kv, begin_k, seq_k, row, form.PACKED)


@gluon.jit
def load_step(it, producing):
    """Loads queries, statistics and dout of step `it` of a walk without a list."""
    walk, form, loading = producing[0], producing[1], producing[2]
    head, tile = step_of(walk, it, form)
    _load_queries(walk, form, loading, it, head, tile, FULL, 0)


@gluon.jit
def _load_queries(walk, form, loading, it, head, tile, kind, turn):
    """What step `it` needs of a query tile."""
    q, dout, statistics, q_desc, q_rest_desc, dout_desc, dout_rest_desc, statistics_desc, news = loading
    stage, phase = place_of(it, q.STAGES)
    row = tile * form.M
    mbarrier.wait(q.empty.index(stage), phase ^ 1)
    if form.TILE_K > 0:
        place = it % (q.STAGES + form.HANDOVERS)
        tell(news, place, 0, tile)
        tell(news, place, 1, kind)
        tell(news, place, 2, head)
        if form.ORDERED:
            tell(news, place, 3, turn)
    full = q.full.index(stage)
    mbarrier.expect(full, 2 * form.M * (q.WIDTH + q.REST) + 8 * form.M)
    place = coordinates(walk.sequence, walk.first_head + head, walk.begin_q, walk.seq_q, row, 0, form.PACKED)
    tma_load(q_desc, place, full, q.tiles.index(stage))
    if q.REST > 0:
        place = coordinates(
            walk.sequence, walk.first_head + head, walk.begin_q, walk.seq_q, row, q.WIDTH, form.PACKED
        )  # fmt: skip
        tma_load(q_rest_desc, place, full, q.rest.index(stage))
    place = walk.place + head * walk.line + tile
    tma_load(statistics_desc, (2 * place, 0), full, statistics.index(stage))
    mbarrier.wait(dout.empty.index(stage), phase ^ 1)
    load_tile(
        dout, stage, dout_desc, dout_rest_desc, walk.sequence, walk.first_head + head, walk.begin_q, walk.seq_q, row,
        form.PACKED,
    )  # fmt: skip


@gluon.jit
def hear_step(listing, it, q, form):
    """Head (from the first one), query tile and kind of step `it`."""
    news = listing[1]
    place = it % (q.STAGES + form.HANDOVERS)
    tile = hear(news, place, 0)
    kind = hear(news, place, 1)
    return hear(news, place, 2), tile, kind
