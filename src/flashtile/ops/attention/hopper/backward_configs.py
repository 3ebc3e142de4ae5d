"""How the Hopper backward is cut: frozen rows, and the pure functions that read them, as `configs`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.score_source import adds_to_score
from flashtile.ops.attention.gpu.tile_tables import Row, first_row
from flashtile.ops.attention.hopper.configs import (
    BIAS_BYTES,
    CONSUMER_ROWS,
    OVERHEAD,
    SHARED_MEMORY,
    matches_scores,
    moves_by_tma,
    table_bytes,
)

#: Columns of statistics that are operands, the least that a product takes.
STATISTIC_COLUMNS = 16


class BackwardConfig(NamedTuple):
    """How the main backward kernel is cut.

    Attributes:
        block_n: keys of a program.
        block_m: queries of a tile.
        parts: weights and gradients of the scores are computed for so large a part of a tile's queries at a time, half
            (2) or all of it (1); all of it in split roles.
        stages: tiles of queries and of dout in flight.
        key_stages: tiles of keys and of values on chip: with two, the next one is loaded while one is worked on.
        dscore_stages: places for the gradients of scores (in split roles also for the weights) that one warpgroup hands
            to another.
        sum_columns: columns of dq that are multiplied and added to the sums at a time.
        split_roles: one warpgroup computes the weights and dv, another the scores' gradients and dk; else each does
            both for half of the keys.
        producer: a warp of its own loads; else the warpgroup that sums dq does, which leaves the others more registers
            (not with block masks, whose lists that warp reads).
        registers: of a thread of those two; the sums' warpgroup has what they and the producer leave.
        statistics_multiplied: lse and delta are taken off the scores and their gradients by a product more, as operands
            of 16 columns (three bfloat16 that they are the sum of); else they are loaded, and subtracted.
        sums_by_tma: dq goes through shared memory, and TMA adds it to the sums, or stores it where nobody else adds to
            it; else threads add, four numbers at once.
        bias_by_tma: TMA brings the tiles of a bias with the queries.
        bias_stored: the gradient of a bias is that of the scores, which the warpgroup that sums dq stores.
    """

    block_n: int
    block_m: int
    parts: int
    stages: int
    key_stages: int
    dscore_stages: int
    sum_columns: int
    split_roles: bool
    producer: bool
    registers: int
    statistics_multiplied: bool
    sums_by_tma: bool
    bias_by_tma: bool = False
    bias_stored: bool = False

    @property
    def max_registers(self) -> int:
        """Registers per thread at launch: 64 Ki over four warpgroups (three without a producer)."""
        return 128 if self.producer else 168

    @property
    def statistics_bytes(self) -> int:
        """Bytes of lse and delta of a query: two float32, or two rows of 16-bit operands."""
        return 4 * STATISTIC_COLUMNS if self.statistics_multiplied else 8


# fmt: off
#: 128 keys, 64 of them for each of two warpgroups.
_HALVES_OF_KEYS = BackwardConfig(
    block_n=128, block_m=64, parts=1, stages=3, key_stages=1, dscore_stages=2,
    sum_columns=64, split_roles=False, producer=True, registers=208, statistics_multiplied=True, sums_by_tma=True,
)

#: The same where both gradients together are up to 320 columns wide.
_WIDE_HALVES_OF_KEYS = BackwardConfig(
    block_n=128, block_m=64, parts=2, stages=2, key_stages=1, dscore_stages=2,
    sum_columns=64, split_roles=False, producer=False, registers=216, statistics_multiplied=True, sums_by_tma=False,
)

#: TFLOP/s at 8,192 tokens without a mask, unless said otherwise.
_BACKWARD_ROWS = (
    # Tiles of 128 queries: more work for each byte of shared memory that is read.
    Row(64, 64, BackwardConfig(
        block_n=128, block_m=128, parts=1, stages=2, key_stages=2, dscore_stages=2,
        sum_columns=64, split_roles=False, producer=True, registers=208, statistics_multiplied=True, sums_by_tma=True,
    ), measured="600; 64 queries 485; statistics multiplied 3 % fewer cycles"),
    Row(96, 96, _HALVES_OF_KEYS._replace(stages=4),
        measured="three stages: D 80 at 1,024 tokens 0.54 ms instead of 0.50, D 96 at 4,096 1.82 instead of 1.80"),
    Row(128, 128, _HALVES_OF_KEYS,
        measured="609; dq 32 columns at a time 507; three stages 2 % faster than two; statistics multiplied 2 % fewer "
                 "cycles at 512 tokens, 8 % from 2,048 on; sums not by TMA 1 to 3 % more"),
    # dk and dv take so many registers that a producer would leave too few: ptxas would let no two products be in
    # flight. With 64 keys in split roles the sums of dq fill the way into the L2 cache.
    Row(160, 160, _WIDE_HALVES_OF_KEYS,
        measured="time of 64 keys in split roles over this, D 160, 8 heads (an H100): 4 × 4,096 tokens 1.35, causal "
                 "1.28, 16 × 1,024 1.22 and 1.14, in order 1.33, packed 1.09, a window of 1,024 1.11; but 128 × 128, "
                 "causal, 0.98. With a soft cap or dropout it spills: 0.76 to 0.99"),
    Row(192, 128, _WIDE_HALVES_OF_KEYS,
        measured="434, causal 396; with a producer 403 and 328; sums not by TMA 5 to 9 % fewer cycles"),
    # 64 keys: no more fit on chip. One place for gradients of scores, so that two tiles of dout fit.
    Row(256, 256, BackwardConfig(
        block_n=64, block_m=64, parts=1, stages=2, key_stages=1, dscore_stages=1,
        sum_columns=64, split_roles=True, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=False,
    ), measured="sums not by TMA 8 % fewer cycles; statistics multiplied 2.6 % more"),
)

#: With a soft cap, a score function or dropout, heads of 97 to 128: weights of half a tile of queries at a time, else a
#: thread spills 300 to 400 bytes, and the call takes 1.4 to 2 times as long.
_CAPPED_HALVES_OF_KEYS = _HALVES_OF_KEYS._replace(parts=2, statistics_multiplied=False)

#: The rows with a soft cap or a score function, whose derivatives need registers too, and with dropout and full tables.
#: No row multiplies statistics, because a function takes scores from which lse has not been subtracted. Milliseconds
#: with a soft cap at 8,192 tokens, full. ALiBi as a score function has no derivatives, and takes 0.89 and 1.69 (causal,
#: on an H100); with the rows of the plain call, whose statistics were not multiplied then, 2.44 and 2.59.
_BACKWARD_CAPPED_ROWS = (
    Row(64, 64, BackwardConfig(
        block_n=128, block_m=64, parts=1, stages=3, key_stages=2, dscore_stages=2,
        sum_columns=64, split_roles=False, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=True,
    ), measured="6.57; 128 queries 20.6, for they spill; 64 keys in split roles 6.94"),
    # With 64 keys the sums of dq fill the way into the L2 cache.
    Row(96, 96, _HALVES_OF_KEYS._replace(statistics_multiplied=False),
        measured="time of 64 keys in split roles over this (an H100), 16 heads: of 96, 4 × 4,096 tokens, dropout 1.33, "
                 "causal 1.23, a mask 1.36, a function with tanh, causal, 1.31; of 80, 16 × 1,024, dropout 1.34"),
    Row(128, 128, _CAPPED_HALVES_OF_KEYS,
        measured="likewise, of 128, 4 × 4,096, dropout 1.14 and 1.08, a soft cap 1.26 and 1.15; but 64 × 128, dropout, "
                 "causal 0.87, and 2 × 4,096, 32 and 8 heads, 0.98"),
    # With a block mask whose tiles have 64 keys; where tables are loaded; and with derivatives apart.
    Row(128, 128, BackwardConfig(
        block_n=64, block_m=64, parts=1, stages=3, key_stages=1, dscore_stages=2,
        sum_columns=64, split_roles=True, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=True,
    ), measured="4 × 2,047 tokens, a bias: 0.84 of the time of 128 keys; derivatives apart, for which a thread with "
                "128 keys spills 296 bytes: 0.99"),
    _BACKWARD_ROWS[-1],
)

#: The rows with a bias that TMA brings, and nothing else that takes registers: 128 keys again. Milliseconds on an H200
#: with a bias that is constant, and one that learns, 16 heads; with the rows above 0.80 and 1.30 (4 × 2,048 tokens,
#: heads of 96), 0.92 and 1.55 (of 128), 1.88 and 3.40 (of 128, 2 × 4,096 tokens).
_BACKWARD_BIAS_ROWS = (
    _BACKWARD_CAPPED_ROWS[0],
    Row(96, 96, _BACKWARD_CAPPED_ROWS[1].config,
        measured="0.62 and 1.10; two stages 0.61 and 1.10, but D 80 at 1,024 tokens 0.264 instead of 0.245"),
    Row(128, 128, _HALVES_OF_KEYS._replace(stages=2, dscore_stages=1, statistics_multiplied=False),
        measured="0.73 and 1.36, 1.44 and 3.00; two places for gradients of scores 0.79 and 1.37, 1.58 and 3.05"),
    _BACKWARD_ROWS[-1],
)

# fmt: on


def backward_chunks(head_dim: int) -> tuple[int, int]:
    """Columns of a tile of the backward, in one or two powers of two, at least 32: 65 to 80 = 64 + 16, 81 to 96 = 64 +
    32, 129 to 160 = 128 + 32, 161 to 192 = 128 + 64. The second is 0 where there is none."""
    whole = max(32, 1 << (head_dim - 1).bit_length())
    tail = max(16, 1 << (head_dim - whole // 2 - 1).bit_length()) if head_dim > whole // 2 > 32 else whole
    return (whole // 2, tail) if tail < whole // 2 else (whole, 0)


def tile_width(head_dim: int) -> int:
    """Columns of a tile of the backward."""
    return sum(backward_chunks(head_dim))


#: Below it lse, in units of scores that this is to be multiplied by, might be more than a bfloat16 holds.
LEAST_SCALE = 2.0**-64


def rows_for(head_dim: int, head_dim_v: int, capped: bool) -> list[BackwardConfig]:
    """All rows that plain calls with such heads may be cut by; `capped`: calls with a soft cap or dropout."""
    rows = _BACKWARD_CAPPED_ROWS if capped else (*_BACKWARD_ROWS, *_BACKWARD_CAPPED_ROWS)
    return [row.config for row in rows if row.holds(head_dim, head_dim_v)]


def choose_backward_config(call: Call) -> BackwardConfig:
    """The first row of the call's table that holds the head, with what the call asks of it.

    The widest heads have room for derivatives apart and for additions by TMA only if these take fewer columns.
    """
    call = call.cut_by
    spec, listed = call.spec, call.spec.block_shape is not None
    row = _table_row(call)
    row = row._replace(sum_columns=min(row.sum_columns, tile_width(call.head_dims[0])))
    # In a window there are few steps for all the bytes of such statistics: 3 % fewer cycles without (128 keys, D 64).
    left = spec.window_left is not None
    if (left and max(call.head_dims) <= 64) or 0 < abs(spec.scale) < LEAST_SCALE:
        row = row._replace(statistics_multiplied=False)
    if spec.deterministic:
        # Key tiles add to dq in order. TMA's additions can be awaited without a fence (`backward_dq.pass_dq_turn`).
        row = row._replace(sums_by_tma=True)
    if separates_derivatives(call) and backward_shared_memory(row, call) > SHARED_MEMORY:
        row = row._replace(sum_columns=row.sum_columns // 2)
    # The gradient of a bias, which is added last, is that of the scores if these have no derivatives.
    own_bias = call.wanted.bias and matches_scores(call) and not has_derivatives(call)
    for asked, name in ((moves_by_tma(call.aux.bias, call.dtype), "bias_by_tma"), (own_bias, "bias_stored")):
        for stages in range(row.stages, 1, -1):
            cut = row._replace(**{name: asked})._replace(stages=stages)
            if backward_shared_memory(cut, call) <= SHARED_MEMORY:
                row = cut
                break
    return row._replace(producer=True, registers=208) if listed and not row.producer else row


def _table_row(call: Call) -> BackwardConfig:
    """The first row that holds the head, and whose tiles divide those of a block mask.

    Dropout, a score function, and a bias or a mask with rows and columns have tiles, random words and indices, which
    need registers as derivatives do, and dropped weights need delta apart from `dpᵀ`.
    """
    spec, listed = call.spec, call.spec.block_shape is not None
    tables, moved = table_bytes(call.aux.bias, call.aux.mask), moves_by_tma(call.aux.bias, call.dtype)
    changed = spec.dropout_p > 0 or spec.score_program is not None
    derivatives = has_derivatives(call)
    rows: tuple[Row[BackwardConfig], ...] = (*_BACKWARD_ROWS[:-1], *_BACKWARD_CAPPED_ROWS)
    bias_alone = moved and tables == BIAS_BYTES and not (changed or call.wanted.slopes)
    if bias_alone and not derivatives and not listed:
        rows = _BACKWARD_BIAS_ROWS
    elif derivatives or changed or tables > 1:
        rows = _BACKWARD_CAPPED_ROWS
    # Addresses of tables that TMA does not bring need registers too.
    needs_registers = tables > (BIAS_BYTES if moved else 1) or separates_derivatives(call)
    queries, keys = call.block_tile
    served = (
        row
        for row in rows
        if queries % row.config.block_m == keys % row.config.block_n == 0
        if not (needs_registers and row.config == _CAPPED_HALVES_OF_KEYS)
        # Beside the producer of a block mask its products would wait for one another.
        if not (listed and row.head_dim == 160)
    )
    return first_row(served, *call.head_dims)


def has_function_derivative(score_program: str | None) -> bool:
    """Whether there is a score function that does more than add to the scores."""
    return score_program is not None and not adds_to_score(score_program)


def has_derivatives(call: Call) -> bool:
    """Whether scores have derivatives: of a soft cap, or of a score function that does more than add to them."""
    return call.spec.softcap > 0 or has_function_derivative(call.spec.score_program)


def separates_derivatives(call: Call) -> bool:
    """DERIVATIVES_APART of `backward_tiles.KernelConfig`."""
    of_function = has_function_derivative(call.spec.score_program)
    return (call.wanted.slopes and has_derivatives(call)) or (call.spec.dropout_p > 0 and of_function)


def backward_shared_memory(config: BackwardConfig, call: Call) -> int:
    """Estimate of the shared memory of a program of the main backward kernel, in bytes."""
    return row_shared_memory(config, *call.head_dims, separates_derivatives(call))


def row_shared_memory(config: BackwardConfig, head_dim: int, head_dim_v: int, apart: bool) -> int:
    width = tile_width(head_dim) + tile_width(head_dim_v)
    rows = (config.block_n * config.key_stages + config.block_m * config.stages) * width
    kinds = 2 + apart if config.split_roles else 1
    handed_over = config.dscore_stages * config.block_n * config.block_m * kinds
    if config.bias_by_tma:
        rows += config.block_m * config.block_n * config.stages
    if config.bias_stored:
        rows += CONSUMER_ROWS**2
    statistics = config.statistics_bytes * config.stages * config.block_m
    sums = 4 * config.sum_columns * CONSUMER_ROWS if config.sums_by_tma else 0
    handover_barriers = 16 * config.dscore_stages if config.split_roles else 0
    # Measured: up to 12 bytes more for each.
    more = sum(backward_chunks(width)[1] > 0 for width in (head_dim, head_dim_v)) + config.bias_by_tma
    return 2 * (rows + handed_over) + statistics + sums + handover_barriers + 64 * more + OVERHEAD


class BiasGradientConfig(NamedTuple):
    """How the kernel of a bias's gradient is cut.

    Attributes:
        warpgroups: those that sum, each 64 keys.
        query_tiles: tiles of 64 queries of a program.
        key_stages: tiles of keys and of values in flight.
        stages: tiles of 64 queries and of dout in flight.
    """

    warpgroups: int
    query_tiles: int
    key_stages: int
    stages: int

    @property
    def keys(self) -> int:
        """Keys of a program."""
        return CONSUMER_ROWS * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers of a thread that sums."""
        return 160 if self.warpgroups == 3 else 240

    @property
    def max_registers(self) -> int:
        """Registers of a thread at launch, as in a forward with as many consumers; of one, that two programs fit."""
        return 168 if self.warpgroups == 2 else 128


#: Queries of a tile.
BIAS_QUERIES = 64

#: The first that fits serves. Two tiles read less for each score, but their sums spill: 88 bytes at head_dim 64, more
#: with wider heads, where one tile spills nothing. Milliseconds of two and of one: 3.38 and 4.06 (4 × 4,096 tokens, 32
#: heads of 64), 0.49 and 0.56 (4 × 2,048, 16 heads of 96), 0.59 and 0.59, causal 0.47 and 0.43 (of 128), 0.57 and 0.49
#: (8 of 192). More stages: 3.50 (64). Three warpgroups of 64 keys: 3.57, 0.67, 0.70, causal 0.48, 0.45. One warpgroup
#: is for block masks with tiles of 64 keys; (1, 1, 1, 2) spills 56 bytes at head_dim 256.
_BIAS_CUTS = tuple(
    BiasGradientConfig(*cut)
    for cut in ((2, 2, 2, 3), (2, 1, 2, 2), (2, 1, 1, 2), (2, 1, 1, 1), (1, 1, 2, 2), (1, 1, 1, 1))
)

#: Sequences and heads are left out here, if two programs fit on a multiprocessor: one computes while another begins.
#: Microseconds with one program of two warpgroups, and with these: 75 and 68 (16 sequences of 300 to 512, 16 heads of
#: 64), 1,043 and 854 (33 of 30 to 4,096, 8 heads of 64), 1,326 and 1,125 (block mask, 4 × 4,096, 16 of 64), 131 and 111
#: (of 80), 514 and 469 (of 96), 115 and 99 (of 32; three warpgroups 106). At head_dim 128 a single one fits, and the
#: backward takes 0.87 ms instead of 0.71. Three programs with 80 registers and fewer stages: 77, 775, 884; of 32 104.
_BIAS_CUT_OF_TWO_PROGRAMS = BiasGradientConfig(warpgroups=1, query_tiles=1, key_stages=2, stages=2)

#: Heads up to 32 columns, whose products are half as long: three warpgroups find more to do. Microseconds for 64 × 768
#: tokens, 4 heads of 32: 116; two stages of keys and three of queries 119, two warpgroups 148, with two tiles 156.
_NARROW_BIAS_CUT = BiasGradientConfig(warpgroups=3, query_tiles=1, key_stages=3, stages=4)


def bias_config(call: Call) -> BiasGradientConfig:
    """The cut of the gradient of a bias of a call.

    With a mask, dropout or a score function a thread with sums of two tiles has no registers left. With a band, key
    lengths or ALiBi, which compute with positions, a thread of three warpgroups has none either (it spills 224 bytes
    with all of them). Packed calls and block masks leave out sequences and heads that have nothing in a tile. Then a
    program has a single tile of queries, and its keys lie in one tile of the mask.
    """
    spec, heads = call.spec, call.head_dims
    modified = call.aux.mask is not None or spec.dropout_p > 0 or spec.score_program is not None
    leaves_out = call.packed or spec.block_shape is not None
    if leaves_out and 2 * bias_shared_memory(_BIAS_CUT_OF_TWO_PROGRAMS, *heads) <= SHARED_MEMORY:
        return _BIAS_CUT_OF_TWO_PROGRAMS
    if max(heads) <= 32 and not (modified or call.by_position):
        return _NARROW_BIAS_CUT
    single, tile_keys = modified or leaves_out, call.block_tile[1]
    cuts = (cut for cut in _BIAS_CUTS if not (single and cut.query_tiles > 1) and tile_keys % cut.keys == 0)
    return next(cut for cut in cuts if bias_shared_memory(cut, *heads) <= SHARED_MEMORY)


def bias_programs_together(config: BiasGradientConfig, head_dim: int, head_dim_v: int) -> int:
    """How many programs of the kernel of a bias's gradient share a multiprocessor."""
    by_registers = 64 * 1024 // (config.max_registers * 2 * CONSUMER_ROWS * (config.warpgroups + 1))
    return min(by_registers, SHARED_MEMORY // bias_shared_memory(config, head_dim, head_dim_v))


def bias_shared_memory(config: BiasGradientConfig, head_dim: int, head_dim_v: int) -> int:
    """Estimate of the shared memory of a program of the kernel of a bias's gradient, in bytes."""
    width = tile_width(head_dim) + tile_width(head_dim_v)
    rows = (config.keys * config.key_stages + BIAS_QUERIES * config.stages) * width
    bias = config.keys * BIAS_QUERIES * config.query_tiles
    return 2 * (rows + bias) + 8 * BIAS_QUERIES * config.stages + OVERHEAD


def bias_gradient_by(config: BackwardConfig, call: Call) -> Literal["backward", "hopper", "portable"] | None:
    """What computes the gradient of a bias: the main kernel, whose `config` this is, stores it; or the Hopper kernel
    for it, if TMA brings the bias, and the queries in the tiles of the main kernel; or the portable one. None if it is
    not wanted."""
    bias = call.aux.bias
    if bias is None or not call.wanted.bias:
        return None
    if config.bias_stored:
        return "backward"
    return "hopper" if moves_by_tma(bias, call.dtype) and config.block_m == BIAS_QUERIES else "portable"


class CapturedGradientConfig(NamedTuple):
    """How the kernel of the gradients of tensors that a score function reads is cut. Its tiles are those of the main
    kernel, whose statistics it reads, and whose order of sequences.

    Attributes:
        key_stages, stages: tiles of keys and of values, and of queries and of dout, in flight.
        registers, producer_registers: of a thread of a warpgroup that adds, of which there are two, and of the loading
            one, whose scalars 24 registers do not hold (heads of 256, causal, spill 32 bytes).
        max_registers: of a thread at launch: 64 Ki over three warpgroups.
    """

    key_stages: int
    stages: int
    registers: int = 232
    producer_registers: int = 40
    max_registers: int = 168


#: By the keys of a tile: the first that fits. If both warpgroups share 64 keys, each has half of the tiles of queries.
_CAPTURED_CUTS = {
    keys: tuple(CapturedGradientConfig(*cut) for cut in cuts)
    for keys, cuts in ((128, ((2, 3), (1, 3))), (64, ((2, 4), (1, 4), (1, 2))))
}

#: Bytes through which warps add up what belongs to one entry.
_REDUCTION = 2048


def captured_gradient_config(config: BackwardConfig, call: Call) -> CapturedGradientConfig:
    """The cut of the kernel of the gradients of captured tensors. `config`: of the main kernel."""
    cuts = _CAPTURED_CUTS[config.block_n]
    return next(cut for cut in cuts if captured_gradient_memory(cut, config, call.head_dims) <= SHARED_MEMORY)


def captured_gradient_memory(cut: CapturedGradientConfig, config: BackwardConfig, heads: tuple[int, int]) -> int:
    """Estimate of the shared memory of a program of that kernel, in bytes. `config`: of the main kernel."""
    loads = config._replace(
        key_stages=cut.key_stages, stages=cut.stages, dscore_stages=0, sums_by_tma=False, bias_stored=False
    )
    return row_shared_memory(loads, *heads, apart=False) + _REDUCTION


#: Bytes that all walks under way may read and sum if thread blocks take whole lines of more than two key tiles. The
#: next walk has to find the sums of this one in the L2 cache. Time before over time of whole lines (H100): 1.18 with 26
#: MB (57 × 384 tokens, 16 heads of 64), 1.06 with 30 MB (87 × 288, 8 of 128, causal), 0.88 with 35 MB (32 × 512, 16 of
#: 64), 0.72 with 39 MB (16 × 1,024, 16 of 64, causal).
_KEPT_BYTES = 32 * 10**6

#: With so many key tiles, sums are written and read once. These are fewer bytes than clearing, adding and rounding
#: move, wherever the sums are. 1.51 (133 × 200, 8 heads of 64), 1.26 (33 × 256, 16 and 4 of 128: 138 MB).
_FEW_KEY_TILES = 2

#: How many times as many key tiles a thread block may get as where each is taken by itself.
_MORE_ROUNDS = 1.15

#: Bytes of a query in a head, for each column of q and of v: of q or dout, and half a column of dq's float32 sums.
BYTES_OF_A_COLUMN = 4


class DqEpilogue(NamedTuple):
    """How dq of a call leaves.

    Attributes:
        config: the row of the call, in which TMA stores dq where nobody adds to it.
        single: all keys are one tile (`_has_single_key_tile`).
        whole: thread blocks take whole lines (`_takes_whole_lines`).
    """

    config: BackwardConfig
    single: bool
    whole: bool


def dq_epilogue(config: BackwardConfig, call: Call) -> DqEpilogue:
    """Whether dq needs sums of several thread blocks; if not, TMA stores it. `config`: the table's row."""
    stores = config._replace(sums_by_tma=True)
    if backward_shared_memory(stores, call) > SHARED_MEMORY:
        stores = config
    single = _has_single_key_tile(call, stores)
    # A sum that is kept is rounded in another way than one that key tiles add to.
    may = not (single or call.bounded or call.spec.batch_invariant)
    whole = may and _takes_whole_lines(call, stores)
    return DqEpilogue(stores if single or whole else config, single, whole)


def _has_single_key_tile(call: Call, config: BackwardConfig) -> bool:
    """Whether all keys of a sequence are one tile that each query tile visits, so that its product is dq. Bounded
    sequences may be empty, and nobody would write the dq of their queries. Nor would anybody that of the first
    queries, where the band begins below them. Only TMA writes it."""
    all_visit = call.spec.window_left is None and not call.band_hides_rows
    one = all_visit and call.rows_k <= config.block_n
    return one and config.sums_by_tma and not call.bounded and call.spec.block_shape is None


def _takes_whole_lines(call: Call, config: BackwardConfig) -> bool:
    """Whether each thread block takes all key tiles of a line, and keeps the sums of its dq for itself. Then they are
    neither cleared nor rounded by a kernel, and have a fixed order. It pays where key tiles are few, and lines so many
    that all thread blocks have about as many. The keys of the call, which is dense, do not end earlier."""
    spec, programs = call.spec, call.multiprocessors
    lines, key_tiles = call.batch * call.heads_kv, -(-call.rows_k // config.block_n)
    may = config.producer and config.sums_by_tma and spec.block_shape is None and lines * key_tiles > 0
    if not may or call.band_hides_rows:
        return False
    rounds = -(-lines // programs) * key_tiles / -(-lines * key_tiles // programs)
    return rounds <= _MORE_ROUNDS and keeps_sums(call, config, call.rows_q, call.rows_k)


def keeps_sums(call: Call, config: BackwardConfig, rows_q: int, rows_k: int) -> bool:
    """Whether it pays that thread blocks keep the sums of lines with so many rows."""
    spec, key_tiles = call.spec, -(-rows_k // config.block_n)
    visited = -(-rows_q // config.block_m) * config.block_m  # of a head, in the mean
    if spec.window_left is not None and spec.window_right is not None:
        visited = min(visited, spec.window_left + spec.window_right + config.block_n + config.block_m)
    elif spec.banded:
        visited = (visited + config.block_n) // 2
    kept = call.multiprocessors * call.group * visited * sum(call.head_dims) * BYTES_OF_A_COLUMN
    return key_tiles <= _FEW_KEY_TILES or kept <= _KEPT_BYTES
