"""The kernels before and after the main backward kernel.

The first writes the statistics of the queries, a copy of dout without rows that see no key where there may be such
rows, and the gradient of sinks. The last writes dq in its own dtype, where it was summed. Both are bound by device
memory.

Statistics and sums are stored by tiles of `M` query rows: tile `t` of a line (one head of a sequence; packed: one head)
is number `line · query_tiles + t`, where the tiles of packed sequence `b` begin at `cu_seqlens_q[b] // M + b`. Where
the kernels behind read TOGETHER tiles at once, these are slots of `M · TOGETHER` rows of so many tiles each. Letters as
in `backward`.
"""

from flashtile._backends.gluon import gl, gluon
from flashtile.ops.attention.hopper.backward_pieces import HIDDEN, ROWS, STATISTIC_COLUMNS, by_rows
from flashtile.ops.attention.hopper.pieces import locate_tile, sequence_rows
from flashtile.ops.attention.hopper.scores import LOG2_E, distance_shift, load_slope, near_shift, raised_to_near


@gluon.constexpr_function
def _row_layout(WIDTH):
    """Sixteen bytes a thread, rows side by side."""
    lanes = min(32, WIDTH // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _at_least(WIDTH):
    """The next power of two."""
    return 1 << (WIDTH - 1).bit_length()


@gluon.constexpr_function
def _padded(HEAD_DIM):
    """Elements from a row of dq to the next: `backward_configs.padded_strides`."""
    return -(-HEAD_DIM // 8) * 8


@gluon.constexpr_function
def _columns_together(WIDTH):
    """The largest power of two that divides the columns of the sums."""
    return WIDTH & -WIDTH


@gluon.jit
def attention_begin_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, statistics_ptr, cleared_ptr, turns_ptr, counter_ptr, masked_dout_ptr,
    sink_logits_ptr, sink_sums_ptr, cu_seqlens_q_ptr, row_statistics_ptr, side,
    stride_dout_batch, stride_dout_row, stride_dout_head, batch, heads, rows_q, query_tiles, lone_tiles, lse_unit,
    side_numbers, near_rows_k,
    HEAD_DIM_V: gl.constexpr, E: gl.constexpr, D: gl.constexpr, M: gl.constexpr,
    PACKED: gl.constexpr, HAS_DLSE: gl.constexpr, ORDERED: gl.constexpr, SHARES_PROGRESS: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Writes lse and `delta = rowsum(dout · out) - dlse` of one tile, as `backward_pieces.subtract_statistic` reads
    them: lse in units of log2. Where they are operands, it writes both in parts and with the opposite sign (`lse_unit`:
    minus one unit of log2, in units of scores).

    It also writes zeros where thread blocks will add up the dq of the tile (`cleared_ptr`, None where they do not; they
    do not for the first `lone_tiles` of a line), where key tiles count their turns to do so, and where thread blocks
    count the tiles that they take and say where they are.

    `masked_dout_ptr`: where rows may see no key, dout for the main kernel, in the layout of out, with zeros in these
    rows. Their weights of 0 would not stop NaN there. `sink_logits_ptr`: the sinks that lse counts, or None.
    `sink_sums_ptr`: the tile's part of minus their gradient. `row_statistics_ptr`: `[*lse.shape, 4]`, where the
    portable kernel of the bias's gradient reads what its `statistics_of_rows` stores; None where nobody wants that.
    `side`, `side_numbers`, `near_rows_k`: the side inputs and the number of keys, for ALiBi; all None without it."""
    number = gl.program_id(0)
    if number == 0:
        gl.store(counter_ptr, 0)
    if SHARES_PROGRESS:
        if number < batch * heads:
            gl.store(counter_ptr + 1 + number, 0)
    tile = number % query_tiles
    line = number // query_tiles
    sequence, head, first, begin, rows, _, _ = locate_tile(
        tile // TOGETHER, line, cu_seqlens_q_ptr, cu_seqlens_q_ptr, batch, heads, rows_q, rows_q, M * TOGETHER, PACKED
    )
    first += tile % TOGETHER * M
    WIDTH: gl.constexpr = _at_least(E)
    layout: gl.constexpr = _row_layout(WIDTH)
    row = first + gl.arange(0, M, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (row < rows)[:, None] & (column < HEAD_DIM_V)[None, :]
    out_row = (sequence.to(gl.int64) * rows_q if not PACKED else begin.to(gl.int64)) + row
    elements = (out_row * heads + head)[:, None] * HEAD_DIM_V + column[None, :]
    out = gl.load(out_ptr + elements, mask=mask, other=0.0)
    dout_row = (begin.to(gl.int64) if PACKED else gl.to_tensor(0).to(gl.int64)) + row
    dout_base = dout_ptr + head * stride_dout_head.to(gl.int64)
    if not PACKED:
        dout_base += sequence * stride_dout_batch.to(gl.int64)
    dout = gl.load(dout_base + (dout_row * stride_dout_row)[:, None] + column[None, :], mask=mask, other=0.0)
    delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)

    numbers = (head.to(gl.int64) if PACKED else line.to(gl.int64)) * rows_q + (begin if PACKED else 0) + row
    lse = gl.load(lse_ptr + numbers, mask=row < rows, other=float("-inf"))
    if masked_dout_ptr is not None:
        hidden = lse == float("-inf")
        if sink_logits_ptr is not None:
            # A row with tiny weights may look like one that sees its sink alone, and has gradients. So finite numbers
            # stay, which do no harm. Because out is 0, delta is NaN where dout is not finite.
            alone = _sees_sink_alone(lse, gl.load(sink_logits_ptr + head), out)
            hidden = hidden | (alone & (delta != delta))
        delta = gl.where(hidden, 0.0, delta)
        gl.store(masked_dout_ptr + elements, gl.where(hidden[:, None], 0.0, dout), mask=mask)
    seen = lse > float("-inf")
    if HAS_DLSE:
        # A row that saw no key has no gradient, even where its dlse is NaN (as when two such rows are merged).
        delta -= gl.where(seen, gl.load(dlse_ptr + numbers, mask=row < rows, other=0.0), 0.0)
    if sink_logits_ptr is not None:
        # Rows past the last sequence have no sink, whatever their delta is.
        weight = gl.where(lse == float("-inf"), 0.0, gl.exp2((gl.load(sink_logits_ptr + head) - lse) * LOG2_E))
        gl.store(sink_sums_ptr + number, gl.sum(gl.where(weight == 0.0, 0.0, weight * delta), 0))
        if HAS_DLSE and masked_dout_ptr is not None:
            # The gradient of lse in a row that sees its sink alone belongs to the sink, to nobody else.
            delta = gl.where(alone, gl.where(gl.abs(delta) < float("inf"), delta, 0.0), delta)
    near_lse = lse
    if side.alibi_slopes is not None:
        seq_k, keys = _keys_of(sequence, batch, side, near_rows_k, PACKED)
        slope = load_slope(side, side_numbers, sequence, head, sequence < batch)
        shift = distance_shift(rows, seq_k, side_numbers.origin)
        near_lse = raised_to_near(lse, slope, shift, near_shift(shift, first, keys, M), 1)
    if row_statistics_ptr is not None:
        gl.store(row_statistics_ptr + 4 * numbers, _in_log2(lse), mask=row < rows)
        gl.store(row_statistics_ptr + 4 * numbers + 1, delta, mask=row < rows)
        if side.alibi_slopes is not None:
            by_row = raised_to_near(lse, slope, shift, near_shift(shift, row, keys, 1), 1)
            gl.store(row_statistics_ptr + 4 * numbers + 3, _in_log2(by_row), mask=row < rows)
    lse = _in_log2(near_lse)
    if lse_unit is not None:
        base = statistics_ptr + number.to(gl.int64) * (2 * M * STATISTIC_COLUMNS)
        _store_parts(base, lse * lse_unit, HIDDEN)
        _store_parts(base + M * STATISTIC_COLUMNS, -delta, 0.0)
    else:
        within = row - first
        place = within // 16 * 16 + within % 8 // 2 * 4 + within % 16 // 8 * 2 + within % 2
        base = statistics_ptr + number.to(gl.int64) * (2 * M)
        gl.store(base + place, lse)
        gl.store(base + M + place, delta)

    if ORDERED:
        gl.store(turns_ptr + number, 0)
    if cleared_ptr is not None:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        BLOCK: gl.constexpr = M * _columns_together(D)
        if tile >= lone_tiles:
            for block in gl.static_range(0, M * D, BLOCK):
                sums = cleared_ptr + number.to(gl.int64) * (M * D) + block + gl.arange(0, BLOCK, flat)
                gl.store(sums, gl.zeros([BLOCK], gl.float32, flat))


@gluon.jit
def _in_log2(lse):
    """lse in units of log2; +inf for rows that saw no key, so that their weights are 0. NaN stays NaN."""
    return gl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@gluon.jit
def _keys_of(sequence, batch, side, rows_k, PACKED: gl.constexpr):
    """How many keys a sequence has, and how many of these may be visible."""
    seq_k = rows_k
    if PACKED:
        _, seq_k = sequence_rows(side.cu_seqlens_k, sequence, batch, rows_k)
    keys = seq_k
    if side.key_lengths is not None:
        counted = gl.load(side.key_lengths + sequence, mask=sequence < batch, other=0)
        keys = gl.maximum(gl.minimum(counted, seq_k), 0).to(gl.int32)
    return seq_k, keys


@gluon.jit
def _store_parts(base, numbers, FOURTH: gl.constexpr):
    """Stores each number as the three bfloat16 that it is the sum of; one that is not finite as itself and zeros. Then
    comes `FOURTH`, and zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    numbers = gl.convert_layout(numbers, gl.SliceLayout(1, layout))
    high = numbers.to(gl.bfloat16)
    finite = gl.abs(high.to(gl.float32)) < float("inf")
    left = gl.where(finite, numbers - high.to(gl.float32), 0.0)
    middle = left.to(gl.bfloat16)
    low = (left - middle.to(gl.float32)).to(gl.bfloat16)
    column = gl.arange(0, STATISTIC_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    parts = gl.where(column == 0, high[:, None], gl.where(column == 1, middle[:, None], low[:, None]))
    parts = gl.where(column < 3, parts, gl.where(column == 3, FOURTH, 0.0))
    row = gl.arange(0, numbers.shape[0], gl.SliceLayout(1, layout))
    gl.store(base + row[:, None] * STATISTIC_COLUMNS + column, parts.to(gl.bfloat16))


@gluon.jit
def _sees_sink_alone(lse, sink, out):
    """Whether rows `[M]` see their sink alone: they have `out = 0` and the sink as their lse, up to rounding."""
    near = gl.abs(sink - lse) <= 1e-6 + 1e-6 * gl.abs(lse)
    return near & (gl.sum(gl.abs(out.to(gl.float32)), 1) == 0.0)


@gluon.constexpr_function
def _rows_of_sums(COLUMNS):
    """The layout of a block of sums in which each thread reads eight columns of two rows, 8 apart, which lie side by
    side (`backward_pieces.by_threads`), from 64 columns on also the same of the rows 4 below. Of 16 columns it reads
    four."""
    if COLUMNS == 16:
        registers, lanes = [[1], [2], [4]], [[8], [512], [16], [32], [64]]
    elif COLUMNS == 32:
        registers, lanes = [[1], [2], [4], [8]], [[512], [1024], [16], [32], [64]]
    else:
        registers = [[1], [2], [4], [8], [64], *([64 << bit] for bit in range(6, (COLUMNS - 1).bit_length()))]
        lanes = [[512], [1024], [2048], [16], [32]]
    return gl.DistributedLinearLayout(registers, lanes, [[128], [256]], [], [ROWS.value * COLUMNS])


@gluon.constexpr_function
def _rows_of_dq(COLUMNS):
    """The same layout by rows and columns, in the order in which a thread writes."""
    if COLUMNS == 16:
        registers, lanes = [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    elif COLUMNS == 32:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    else:
        more = [[0, 1 << bit] for bit in range(6, (COLUMNS - 1).bit_length())]
        registers = [[0, 1], [0, 2], [0, 4], [8, 0], [4, 0], *more]
        lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS.value, COLUMNS])


@gluon.jit
def attention_end_kernel(
    sums_ptr, dq_ptr, cu_seqlens_q_ptr, batch, heads, rows_q, query_tiles, lone_tiles, scale,
    HEAD_DIM: gl.constexpr, D: gl.constexpr, M: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Writes `dq = scale · sums` of one tile, unless it is one of the first `lone_tiles` of its line, whose dq the main
    kernel stores; dq is contiguous but for the padding of its rows."""
    number = gl.program_id(0)
    tile = number % query_tiles
    line = number // query_tiles
    sequence, head, first, begin, rows, _, _ = locate_tile(
        tile, line, cu_seqlens_q_ptr, cu_seqlens_q_ptr, batch, heads, rows_q, rows_q, M, PACKED
    )
    COLUMNS: gl.constexpr = _columns_together(D)
    target: gl.constexpr = _rows_of_dq(COLUMNS)
    place = gl.arange(0, ROWS * COLUMNS, _rows_of_sums(COLUMNS))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, target))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, target))[None, :]
    if tile >= lone_tiles:
        for part in gl.static_range(M // ROWS):
            for left in gl.static_range(0, D, COLUMNS):
                sums = gl.load(sums_ptr + (number.to(gl.int64) * M + part * ROWS) * D + left * ROWS + place)
                dq = gl.convert_layout(by_rows(sums), target, assert_trivial=True)
                mine = first + part * ROWS + row
                dq_row = (begin.to(gl.int64) if PACKED else sequence.to(gl.int64) * rows_q) + mine
                gl.store(
                    dq_ptr + (dq_row * heads + head) * _padded(HEAD_DIM) + (column + left),
                    (dq * scale).to(dq_ptr.dtype.element_ty),
                    mask=(mine < rows) & (column + left < HEAD_DIM),
                )
