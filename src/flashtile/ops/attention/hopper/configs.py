"""How the Hopper kernels are cut: frozen rows, and the pure functions that read them.

Rows were measured on an H200 with Triton 3.6, bf16; the reason stands beside each. Nothing here needs Triton.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from flashtile._backends.allocate import contiguous_strides
from flashtile.ops.attention.spec import FP8, AttentionSpec
from flashtile.ops.attention.triton.score_source import reads_by_key, tile_values

#: Widest head of q and k, and of v: of the forward, and of the backward and of 8-bit inputs.
MAX_HEAD_DIM = 512
MAX_HEAD_DIM_BACKWARD = MAX_HEAD_DIM_8 = 256

#: Columns of v of a tile at most. Two consumers hold the output of 64 rows each in half of all registers.
_MAX_PART = 256

#: Query rows of a consumer: those of a warpgroup's matrix product.
CONSUMER_ROWS = 64

#: Registers of a thread of the producer, a single warp, in either kernel. All warps together have 504 or 512 on each
#: of 128 lanes.
PRODUCER_REGISTERS = 24

#: Numbers of queries up to which a sequence is short, and below which it is with a band.
SHORT, SHORT_CAUSAL = 256, 2048

#: Bytes of shared memory that a program may use on sm_90.
SHARED_MEMORY = 227 * 1024

#: Barriers, the producer's messages, and what Triton passes to its partitions. Measured: up to 848 bytes, and with a
#: third consumer of the forward 1,112.
_OVERHEAD, _OVERHEAD_OF_A_THIRD = 1024, 128


class HopperConfig(NamedTuple):
    """How the forward kernel is cut.

    Attributes:
        consumers: warpgroups that compute, of 64 query rows each.
        block_n: keys of a tile.
        stages: key and value tiles in flight.
        registers: of a consumer's thread.
        max_registers: of a thread at the start; all of the program's threads have 64 Ki.
        q_in_registers: a consumer takes its queries into registers; their place is free for the next tile at once.
        ahead: columns of a tile whose exponentials come while the product of the tile before is in flight, a power of
            two or 0; the others come after it.
        in_turn: consumers start their products one after the other.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    max_registers: int
    q_in_registers: bool
    ahead: int
    in_turn: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return CONSUMER_ROWS * self.consumers


def block_mask_divisors(backward: bool, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Queries and keys of a tile, of which those of a block mask's tiles must be multiples."""
    if backward:
        # With a soft cap tiles are smaller, so those that serve without one do.
        cut = choose_backward_config(head_dim, head_dim_v, blocks=True)
        return cut.block_m, cut.block_n
    config = choose_config(head_dim, head_dim_v, SHORT_CAUSAL, False, False, True)
    return config.block_m, config.block_n


def padded_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a gradient `[..., head_dim]`: contiguous, but that rows are padded to 16 bytes, so that TMA can write
    them."""
    *outer, head_dim = shape
    return contiguous_strides((*outer, -(-head_dim // 8) * 8))


def column_chunks(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Columns of a tile, in one or two powers of two: 96 = 64 + 32, 192 = 128 + 64. The second is 0 or at least what
    one instruction multiplies, 16 columns, of 8-bit operands 32.

    Up to 64 a second chunk would save nothing: a tile of 64 columns is a row of the swizzle. Heads of more than 256
    always have one.
    """
    least = 32 // dtype.itemsize
    whole = max(least, 1 << (head_dim - 1).bit_length())
    half = whole // 2
    if whole <= 64 or head_dim <= half:
        return whole, 0
    rest = max(least, 1 << (head_dim - half - 1).bit_length())
    return (half, rest) if rest < half or whole > _MAX_PART else (whole, 0)


def value_parts(head_dim_v: int) -> int:
    """Parts of the columns of v, each with tiles of its own, which compute the weights once more."""
    return -(-head_dim_v // _MAX_PART)


def value_chunks(head_dim_v: int) -> tuple[int, int]:
    """Columns of a part of v in a tile, as `column_chunks`."""
    return column_chunks(_part_width(head_dim_v))


def _part_width(head_dim_v: int) -> int:
    """Columns of a part of v, a multiple of 16 where there are several."""
    parts = value_parts(head_dim_v)
    return head_dim_v if parts == 1 else -(-head_dim_v // (16 * parts)) * 16


#: Two consumers of 128 keys. Heads of 128: half of the exponentials ahead up to 3 % more cycles, none 6 to 11 % more.
#: Four stages of half the keys, or keys and values released together: nothing gained. Queries in registers: such
#: products take longer to issue (622 for 648).
_TWO_CONSUMERS = HopperConfig(
    consumers=2, block_n=128, stages=2, registers=240, max_registers=168, q_in_registers=False, ahead=64
)

#: (widest head_dim, widest part of head_dim_v, config). TFLOP/s of one run at 8,192 tokens without a mask.
_ROWS = (
    # Three consumers: more queries per byte of keys (509; two consumers 451). With so many, others multiply while one
    # computes its exponentials: all of them after the product, 3 to 8 % fewer cycles. In turn: 13 %.
    (
        64,
        64,
        HopperConfig(
            consumers=3,
            block_n=128,
            stages=4,
            registers=160,
            max_registers=128,
            q_in_registers=False,
            ahead=0,
            in_turn=True,
        ),
    ),
    # In turn: 0.63 ms instead of 0.72 (4 sequences of 4,096 tokens, 16 heads of 96), causal 0.36 instead of 0.40; D 80
    # 0.59 instead of 0.63. Three consumers of 64 keys 0.65 and 0.36.
    (96, 96, _TWO_CONSUMERS._replace(in_turn=True)),
    (128, 128, _TWO_CONSUMERS),
    # Shared memory: the output of one consumer after the other goes through one place.
    (192, 128, _TWO_CONSUMERS),
    # Half of the exponentials ahead: full 2.6 % fewer cycles than all of them, causal the same.
    (
        192,
        192,
        HopperConfig(
            consumers=2, block_n=64, stages=3, registers=240, max_registers=168, q_in_registers=False, ahead=32
        ),
    ),
    # Half of the exponentials ahead: up to 2 % more cycles. In turn: 0.7 % fewer.
    (
        256,
        256,
        HopperConfig(
            consumers=2,
            block_n=64,
            stages=2,
            registers=240,
            max_registers=168,
            q_in_registers=False,
            ahead=64,
            in_turn=True,
        ),
    ),
    # Queries take 128 KiB, and keys and values of one stage 96. 1.13 ms, causal 0.62 (4 sequences of 4,096 tokens, 4
    # heads of 512); in turn 1.23 and 0.64, half of the exponentials ahead 1.17 and 0.62.
    (
        512,
        256,
        HopperConfig(
            consumers=2,
            block_n=64,
            stages=1,
            registers=240,
            max_registers=168,
            q_in_registers=False,
            ahead=64,
        ),
    ),
)

#: Instead of the row of 64 columns, where sequences are short, and in windows: fewer rows of a tile are past the end
#: or masked at its edges. Thousands of cycles, three consumers and this: causal, 1,024 tokens 459 and 349, 2,048 593
#: and 594, 4,096 1,011 and 1,078; full, 512 297 and 305.
_NARROW = HopperConfig(
    consumers=2, block_n=128, stages=4, registers=240, max_registers=168, q_in_registers=True, ahead=64
)


#: Instead of the row of 65 to 128 columns, for long sequences with 8-bit queries and keys: a third consumer, for which
#: half the keys make room, computes exponentials while others multiply. TFLOP/s of one run, two consumers and this:
#: full, 1,024 tokens 701 and 674, 2,048 840 and 860, 8,192 910 and 973; causal, 4,096 805 and 783, 8,192 870 and 906,
#: 16,384 892 and 956. All exponentials after the product: 0 to 3 % slower; consumers in turn: no faster.
_LONG_8 = HopperConfig(
    consumers=3, block_n=64, stages=6, registers=160, max_registers=128, q_in_registers=False, ahead=16
)

#: Queries of a sequence from which on that serves, without a mask and under a causal one.
LONG_8, LONG_8_CAUSAL = 2048, 8192


def choose_config(
    head_dim: int,
    head_dim_v: int,
    max_seqlen_q: int,
    left: bool,
    right: bool,
    blocks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    dropout: bool = False,
    tables: int = 0,
) -> HopperConfig:
    """The row of a call. `left`, `right`: whether keys on that side of a band are not visible. `blocks`: there is a
    block mask; its tiles are usually of 128 queries. `tables`: as `table_bytes` and `function_bytes` have it."""
    widest = max(head_dim, head_dim_v)
    part = _part_width(head_dim_v)
    row = next(config for heads, heads_v, config in _ROWS if head_dim <= heads and part <= heads_v)
    long = max_seqlen_q >= (LONG_8_CAUSAL if right else LONG_8)
    if widest <= 64:
        short = max_seqlen_q < SHORT_CAUSAL if right else max_seqlen_q <= SHORT
        # A third consumer leaves no registers for tables and random words.
        row = _NARROW if left or blocks or short or dropout or tables else row
    elif dtype is FP8 and widest <= 128 and long and not (left or blocks):
        row = _LONG_8
    if (dropout or tables > 2) and row.block_n > 64:
        # A thread holds scores, weights and sums already: half the keys leave room for random words, or for four bytes
        # of tables for each score.
        row = row._replace(block_n=64, stages=2 * row.stages)
    return row


class Broadcast(Protocol):
    """What has the shape and dtype of a bias or a mask: the tensor, or a `plans.Table`."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def table_bytes(*tables: Broadcast | None) -> int:
    """Bytes of tables that a thread holds for each of its scores, about. It holds few of a table that broadcasts along
    a dimension."""
    return sum(1 if 1 in table.shape[2:] else max(2, table.dtype.itemsize) for table in tables if table is not None)


def function_bytes(score_program: str | None) -> int:
    """Bytes that a thread holds for each of its scores of what a score function reads and computes, about; at least 1,
    0 without one. Of entries that belong to keys a thread has half as many as scores, and their checks."""
    if score_program is None:
        return 0
    return max(1, sum(dtype.itemsize for dtype in tile_values(score_program)), 4 * reads_by_key(score_program))


def out_places(config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Places for output on its way out: one for each consumer, or where there is no room for that, one after the
    other uses the same. Without room even for one, out leaves through the place of the queries."""
    for places in (config.consumers, 1):
        if _shared_memory(config, head_dim, head_dim_v, dtype, queries=1, outs=places) <= SHARED_MEMORY:
            return places
    return 0


def query_places(config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Tiles of queries on chip: two, where products read them there and there is room, so that the next ones arrive
    while the last products are computed."""
    if config.q_in_registers:
        return 1
    room = _shared_memory(config, head_dim, head_dim_v, dtype, queries=2, outs=config.consumers)
    return 2 if room <= SHARED_MEMORY else 1


def shared_memory(config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Estimate of the shared memory of a program, in bytes; a test compiles every row and holds it to the limit."""
    queries = query_places(config, head_dim, head_dim_v, dtype)
    outs = out_places(config, head_dim, head_dim_v, dtype)
    return _shared_memory(config, head_dim, head_dim_v, dtype, queries, outs)


def _shared_memory(
    config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype, queries: int, outs: int
) -> int:
    width, width_v = sum(column_chunks(head_dim, dtype)), sum(value_chunks(head_dim_v))
    read = dtype.itemsize * (config.block_m * queries + config.block_n * config.stages) * width
    overhead = _OVERHEAD + _OVERHEAD_OF_A_THIRD * (config.consumers - 2)
    return read + 2 * (config.block_n * config.stages + CONSUMER_ROWS * outs) * width_v + overhead


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
        sums_by_tma: dq goes through shared memory, and TMA adds it to the sums; else threads do, four numbers at once.
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

#: (widest head_dim, widest head_dim_v, config). TFLOP/s at 8,192 tokens without a mask.
_BACKWARD_ROWS = (
    # Tiles of 128 queries: more work for each byte of shared memory that is read (600; 64 queries 485). Statistics
    # multiplied: 3 % fewer cycles.
    (64, 64, BackwardConfig(
        block_n=128, block_m=128, parts=1, stages=2, key_stages=2, dscore_stages=2,
        sum_columns=64, split_roles=False, producer=True, registers=208, statistics_multiplied=True, sums_by_tma=True,
    )),
    # Four stages: with three, D 80 at 1,024 tokens 0.54 ms instead of 0.50, D 96 at 4,096 1.82 instead of 1.80.
    (96, 96, _HALVES_OF_KEYS._replace(stages=4)),
    # Three stages 2 % faster than two. dq 32 columns at a time: 507 instead of 609. Statistics multiplied: 2 % fewer
    # cycles at 512 tokens, 8 % from 2,048 on. Sums not by TMA: 1 to 3 % more.
    (128, 128, _HALVES_OF_KEYS),
    # dk and dv take so many registers that a producer would leave too few: ptxas would let no two products be in
    # flight (403, causal 328; so 434 and 396). Sums not by TMA: 5 to 9 % fewer cycles.
    (192, 128, BackwardConfig(
        block_n=128, block_m=64, parts=2, stages=2, key_stages=1, dscore_stages=2,
        sum_columns=64, split_roles=False, producer=False, registers=216, statistics_multiplied=True, sums_by_tma=False,
    )),
    # 64 keys: no more fit on chip. One place for gradients of scores, so that two tiles of dout fit. Sums not by TMA:
    # 8 % fewer cycles. Statistics multiplied: 2.6 % more.
    (256, 256, BackwardConfig(
        block_n=64, block_m=64, parts=1, stages=2, key_stages=1, dscore_stages=1,
        sum_columns=64, split_roles=True, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=False,
    )),
)

#: The rows with a soft cap, which needs registers for its derivative too, and with dropout and full tables.
#: Milliseconds with a soft cap at 8,192 tokens, full.
_BACKWARD_CAPPED_ROWS = (
    # 6.57; 128 queries 20.6, for they spill; 64 keys in split roles 6.94.
    (64, 64, BackwardConfig(
        block_n=128, block_m=64, parts=1, stages=3, key_stages=2, dscore_stages=2,
        sum_columns=64, split_roles=False, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=True,
    )),
    # 5.99; the row without a soft cap 9.92, 64 keys × 128 queries 6.37.
    (128, 128, BackwardConfig(
        block_n=64, block_m=64, parts=1, stages=3, key_stages=1, dscore_stages=2,
        sum_columns=64, split_roles=True, producer=True, registers=208, statistics_multiplied=False, sums_by_tma=True,
    )),
    _BACKWARD_ROWS[-1],
)
# fmt: on


def backward_chunks(head_dim: int) -> tuple[int, int]:
    """Columns of a tile of the backward, in one or two powers of two: 65 to 80 = 64 + 16, 81 to 96 = 64 + 32, 129 to
    160 = 128 + 32, 161 to 192 = 128 + 64. The second is 0 where there is none."""
    whole = max(64, 1 << (head_dim - 1).bit_length())
    tail = max(16, 1 << (head_dim - whole // 2 - 1).bit_length()) if head_dim > whole // 2 > 32 else whole
    return (whole // 2, tail) if tail < whole // 2 else (whole, 0)


def tile_width(head_dim: int) -> int:
    """Columns of a tile of the backward."""
    return sum(backward_chunks(head_dim))


#: Below it lse, in units of scores that this is to be multiplied by, might be more than a bfloat16 holds.
_LEAST_SCALE = 2.0**-64


def choose_backward_config(
    head_dim: int,
    head_dim_v: int,
    softcap: bool = False,
    blocks: bool = False,
    left: bool = False,
    scale: float = 1.0,
    ordered: bool = False,
    modified: bool = False,
    derivatives_apart: bool = False,
) -> BackwardConfig:
    """The row of a call: the first that holds the head. `blocks`: of a block mask a producer reads the lists. `left`:
    a window ends on the left. Of `scale` the sign does not matter. `ordered`: the key tiles add to dq in order, which
    takes TMA, whose additions can be awaited without a fence (`backward_pieces.pass_dq_turn`).
    `modified`: there is dropout, or a bias or a mask with rows and columns. Their tiles and random words need registers
    as a soft cap's derivative does, and dropped weights need delta apart from `dpᵀ`. `derivatives_apart`: as in
    `backward_tiles.KernelConfig`. The widest heads have room for them and for additions by TMA only if these take fewer
    columns."""
    rows = _BACKWARD_CAPPED_ROWS if softcap or modified else _BACKWARD_ROWS
    row = next(config for heads, heads_v, config in rows if head_dim <= heads and head_dim_v <= heads_v)
    # In a window there are few steps for all the bytes of such statistics: 3 % fewer cycles without (128 keys, D 64).
    if (left and max(head_dim, head_dim_v) <= 64) or 0 < abs(scale) < _LEAST_SCALE:
        row = row._replace(statistics_multiplied=False)
    if ordered:
        row = row._replace(sums_by_tma=True)
    if derivatives_apart and backward_shared_memory(row, head_dim, head_dim_v, True) > SHARED_MEMORY:
        row = row._replace(sum_columns=row.sum_columns // 2)
    return row._replace(producer=True, registers=208) if blocks and not row.producer else row


def backward_config_of(
    head_dim: int, head_dim_v: int, spec: AttentionSpec, tables: int = 0, learned_slopes: bool = False
) -> BackwardConfig:
    """The row of a call, for who launches it and for who tells what it would launch. `tables`: as in `table_bytes`."""
    capped = spec.softcap > 0
    blocks, left = spec.block_shape is not None, spec.window_left is not None
    modified = spec.dropout_p > 0 or tables > 1
    return choose_backward_config(
        head_dim, head_dim_v, capped, blocks, left, spec.scale, spec.deterministic, modified, capped and learned_slopes
    )


def backward_shared_memory(
    config: BackwardConfig, head_dim: int, head_dim_v: int, derivatives_apart: bool = False
) -> int:
    """Estimate of the shared memory of a program of the main backward kernel, in bytes. `derivatives_apart`: as in
    `backward_tiles.KernelConfig`."""
    width = tile_width(head_dim) + tile_width(head_dim_v)
    rows = (config.block_n * config.key_stages + config.block_m * config.stages) * width
    kinds = 2 + derivatives_apart if config.split_roles else 1
    handed_over = config.dscore_stages * config.block_n * config.block_m * kinds
    statistics = config.statistics_bytes * config.stages * config.block_m
    if config.statistics_multiplied:
        statistics += 2 * STATISTIC_COLUMNS * CONSUMER_ROWS
    sums = 4 * config.sum_columns * CONSUMER_ROWS if config.sums_by_tma else 0
    handover_barriers = 16 * config.dscore_stages if config.split_roles else 0
    tails = sum(backward_chunks(width)[1] > 0 for width in (head_dim, head_dim_v))  # Measured: up to 12 bytes more
    return 2 * (rows + handed_over) + statistics + sums + handover_barriers + 64 * tails + _OVERHEAD
