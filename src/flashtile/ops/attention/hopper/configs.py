"""How the Hopper forward is cut, and what all Hopper kernels share: frozen rows, and the pure functions that read them.

Rows were measured on an H200 with Triton 3.6, bf16; `Row.measured`, or what stands above a name, says why.
`backward_configs` has those of the backward. Nothing here needs Triton.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from flashtile.ops.attention.call import Call, TensorFacts
from flashtile.ops.attention.gpu.score_source import reads_by_key, tile_values
from flashtile.ops.attention.gpu.tile_tables import Row, first_row
from flashtile.ops.attention.hopper.few_tiles import (
    MIDDLE_CAUSAL,
    ROWS_OF_THREE,
    fit_one_tile,
    gives_at_most,
    leave_one_idle,
    lengths,
    one_consumer_pays,
    short_tiles_pay,
)
from flashtile.ops.attention.spec import FP8

#: Widest head of q and k, and of v, and of 8-bit inputs.
MAX_HEAD_DIM = 512
MAX_HEAD_DIM_8 = 256

#: Columns of v of a tile at most. Two consumers hold the output of 64 rows each in half of all registers.
_MAX_PART = 256

#: Query rows of a consumer: those of a warpgroup's matrix product.
CONSUMER_ROWS = 64

#: Registers of a thread of the producer, a single warp, in either kernel. All warps together have 504 or 512 on each
#: of 128 lanes.
PRODUCER_REGISTERS = 24

#: Bytes of shared memory that a program may use on sm_90.
SHARED_MEMORY = 227 * 1024

#: Barriers, the producer's messages, and what Triton passes to its partitions. Measured: up to 848 bytes, and with a
#: third consumer of the forward 1,112.
OVERHEAD, _OVERHEAD_OF_A_THIRD = 1024, 128


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
        bias_by_tma: TMA brings the tiles of a bias with the keys.
        resident: programs on a multiprocessor, which share its memory and registers.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    max_registers: int
    q_in_registers: bool
    ahead: int
    in_turn: bool = False
    bias_by_tma: bool = False
    resident: int = 1

    @property
    def room(self) -> int:
        """Bytes of shared memory that a program may use. Each takes one KiB in addition."""
        return (SHARED_MEMORY + 1024) // self.resident - 1024

    @property
    def left_registers(self) -> int:
        """Registers of a thread of the warps that load, which consumers leave."""
        return (self.consumers + 1) * self.max_registers - self.consumers * self.registers

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return CONSUMER_ROWS * self.consumers


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


def score_columns(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Columns of the first chunk that scores are products of; past 64 cut to what an instruction multiplies."""
    least = 32 // dtype.itemsize
    width, _ = column_chunks(head_dim, dtype)
    return min(-(-head_dim // least) * least, width) if width > 64 else width


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
#: Four stages of half the keys, or keys and values released together: nothing gained.
_TWO_CONSUMERS = HopperConfig(
    consumers=2, block_n=128, stages=2, registers=240, max_registers=168, q_in_registers=False, ahead=64
)

#: More queries per byte of keys. With so many, others multiply while one computes its
#: exponentials: all of them after the product, 3 to 8 % fewer cycles. In turn: 13 %.
_THREE_CONSUMERS = _TWO_CONSUMERS._replace(
    consumers=3, stages=4, registers=160, max_registers=128, ahead=0, in_turn=True
)

# fmt: off
#: By the columns of q and of a part of v. TFLOP/s of one run at 8,192 tokens without a mask, unless said otherwise.
_ROWS = (
    Row(64, 64, _THREE_CONSUMERS, measured="509; two consumers 451"),
    Row(96, 96, _TWO_CONSUMERS._replace(in_turn=True),
        measured="in turn 0.63 ms instead of 0.72 (4 sequences of 4,096 tokens, 16 heads of 96), causal 0.36 instead "
                 "of 0.40; D 80 0.59 instead of 0.63; three consumers of 64 keys 0.65 and 0.36"),
    Row(128, 128, _TWO_CONSUMERS, measured="648; queries in registers, whose products take longer to issue, 622"),
    # Shared memory: the output of one consumer after the other goes through one place.
    Row(192, 128, _TWO_CONSUMERS),
    Row(192, 192, _TWO_CONSUMERS._replace(block_n=64, stages=3, ahead=32),
        measured="half of the exponentials ahead: full 2.6 % fewer cycles than all of them, causal the same"),
    Row(256, 256, _TWO_CONSUMERS._replace(block_n=64, in_turn=True),
        measured="half of the exponentials ahead: up to 2 % more cycles; in turn: 0.7 % fewer"),
    # Queries take 128 KiB, and keys and values of one stage 96.
    Row(512, 256, _TWO_CONSUMERS._replace(block_n=64, stages=1),
        measured="1.13 ms, causal 0.62 (4 sequences of 4,096 tokens, 4 heads of 512); in turn 1.23 and 0.64, half of "
                 "the exponentials ahead 1.17 and 0.62"),
)
# fmt: on

#: Instead of the row of 64 columns in bfloat16 and 8 bits from Triton 3.8 on. Of its code, ptxas stores and loads 37 to
#: 53 values of a thread in each step of 128 keys, and 16 of older Triton's. Microseconds on an H100 of that row with
#: Triton 3.6 and 3.9, and of this with 3.9: 2 × 8,192 tokens, 32 heads of 64, 1,825, 2,528 and 1,933, causal 960, 1,670
#: and 1,046; packed 430, 679 and 418; 8 bits 551, 985 and 557; 16 heads of 40, 519, 692 and 550. But float16 649, 629
#: and 695, with 3.9 both under LLVM's scheduler for few registers.
_THREE_OF_HALF_KEYS = _THREE_CONSUMERS._replace(block_n=64, stages=8, ahead=32)

#: The first Triton with such code.
SPILLS_FROM = 3, 8

#: Instead of the row of 64 columns, where sequences are short, and in windows: fewer rows of a tile are past the end
#: or masked at its edges. Thousands of cycles, three consumers and this: causal, 1,024 tokens 459 and 349, 2,048 593
#: and 594, 4,096 1,011 and 1,078; full, 512 297 and 305.
_NARROW = HopperConfig(
    consumers=2, block_n=128, stages=4, registers=240, max_registers=168, q_in_registers=True, ahead=64
)

#: Numbers of queries up to which a sequence is short, and below which it is with a band.
SHORT, SHORT_CAUSAL = 256, 2048

#: Instead of that and of the row of 128 columns, where sequences are shorter still, and in narrow windows
#: (`HALF_WINDOW`): less of the tiles on the diagonal is hidden, and the first tile is there sooner. Microseconds, this
#: and 128 keys, causal: heads of 64, 16 of them, 32 × 384 tokens 42.7 and 45.8, 32 × 512 63.0 and 65.2, 16 × 768 63.9
#: and 62.2; of 128, 16 × 512 45.5 and 49.4, 8 × 1,024 67.7 and 69.1, 1 × 2,048 60.9 and 59.4. Without a mask, of 128,
#: 32 × 256 38.1 and 39.1; but of 64, 64 × 256 53.9 and 53.2, and of 80 and 96, 32 × 512, 104.8 and 92.8, 115 and 99.5.
#: Causal, of 80 and 96, 16 heads (an H200): 83 × 197 62.2 and 73.1, 66.4 and 78.5; 28 × 577 87.6 and 92.8, 93.4 and
#: 100.
_HALF_KEYS = HopperConfig(
    consumers=2, block_n=64, stages=4, registers=240, max_registers=168, q_in_registers=True, ahead=32
)

#: Numbers of queries and keys up to which tiles have 64 keys: under a causal mask with heads of up to 64 columns; with
#: heads of 97 to 128, without a mask and under a causal one. Heads of 65 to 96, causal: `MIDDLE_CAUSAL`.
HALF_CAUSAL, HALF_WIDE, HALF_WIDE_CAUSAL = 512, 512, 1024

#: Queries and keys up to which tiles have one consumer, with heads of 32 and 64: causal, beyond `SHORT`; without a mask
#: if tiles of three consumers would be less full than this.
#: 28 × 577 tokens, 16 heads of 64, an H200: 110 µs instead of 122.
ALONE_CAUSAL, ALONE_FULL, _LEAST_FULL = 1024, 640, 0.9

#: Calls of up to so many keys have tiles of 64 if they fill an odd number of these, without a mask and with heads of 65
#: to 128: half of the last tile of 128 keys would be empty. Time of 128 keys over time of 64 (an H100, 16 heads): 256 ×
#: 144 tokens, heads of 72, 80 and 96, 1.25, 1.21 and 1.22; 64 × 320 1.11, 1.13 and 1.11; 32 × 448 1.07, 1.00 and 1.04;
#: 8 × 2,048 queries on 144 and 320 keys, heads of 128, 1.28 and 1.22. But on 1,100, heads of 80, 0.85; and 64 × 257, of
#: 40, 1.01.
HALF_ODD = 448

#: Windows of up to so many keys besides a query's own have tiles of 64 keys: with heads of up to 64 columns, and with
#: heads of up to 128. Microseconds on an H100 with 128 and 64 keys, 2 × 8,192 tokens unless said otherwise: 32 heads of
#: 64, a window of 128 160 and 112, of 256 170 and 147, of 1,024 337 and 348; 4 × 4,096, 12 heads, 64 on either side, 76
#: and 45; 16 of 96, 128 103 and 77, 256 127 and 88, 1,024 209 and 200; 16 of 128, 128 109 and 99, 256 126 and 106, 512
#: 157 and 138, 1,024 230 and 216, 1 × 16,384, 4,096, 645 and 679; 32 and 8 heads of 128, 256, 222 and 171.
HALF_WINDOW, HALF_WINDOW_WIDE = 512, 1024

#: One or two key tiles of 64 columns without a mask: a consumer has no other product for its exponentials to overlap
#: with, and those of one program begin and end together. Two programs with one each do not. Microseconds, this,
#: `_HALF_KEYS` and `_NARROW`: 64 × 128 tokens, 12 heads of 64, 15.2, 16.9 and 17.4; 128 × 128, 32 heads, 67.4, 69.2 and
#: 70.7; 64 × 256, 16 heads, 49.6, 53.9 and 53.2; of 32, 64 × 256, 12 heads, 32.0, 37.4 and 35.8. But of 40, 64 × 128,
#: 12 heads, 19.8, 16.1 and 15.8; and causal, 64 × 128, 12 heads of 64, 19.0, 18.1 and 19.9. Few keys of many queries
#: likewise: 4,096 queries on 77 keys, 10 heads, 1 and 4 sequences 1.20 and 1.08 times as fast as with three consumers,
#: 8 × 4,096 on 256, 16 heads, 1.11. With dropout always, instead of two consumers of 64 keys: 4 × 4,096 tokens, 32
#: heads, 1.07 times, causal 1.06, 16 × 1,024, 16 heads, 1.00, 64 × 128, 12 heads, 1.14.
#: And where tiles are few (`one_consumer_pays`). Causal, 16,384 tokens, 16 heads, an H200, times as fast as the others:
#: of 256 1.00, of 512 1.05, of 1,024 1.02 to 1.05.
_ALONE = HopperConfig(
    consumers=1, block_n=128, stages=2, registers=224, max_registers=128, q_in_registers=True, ahead=0, resident=2
)

#: Where tiles of three consumers would not be full, and exponentials find another product: 512 tokens, 16 heads, H200s,
#: 1.04 and 1.06 times as fast.
_ALONE_AHEAD = _ALONE._replace(ahead=64)

#: With a block mask whose tiles have 64 queries: a single consumer has 64. Two such programs share a multiprocessor, so
#: that one multiplies while the other computes exponentials.
_SINGLE = HopperConfig(
    consumers=1, block_n=64, stages=4, registers=224, max_registers=128, q_in_registers=False, ahead=32, resident=2
)

#: It serves sequences whose queries fit its tile, with heads of any width (wider than 128: one consumer of their row).
#: µs of two consumers and of this, 16,384 tokens, an H200: 8 heads of 128, sequences of 64 38.5 and 37.2, of 16 111 and
#: 58; 4 heads of 256, of 64 41.4 and 37.6, of 16 109 and 60, with dropout 170 and 73; packed, 8 heads of 64, of 64 47.8
#: and 33.4 (`_ALONE`: 35.0), of 16 155 and 87. 16 × 64 queries over 8,192 cached rows, pages of 16, 32 / 8 heads of
#: 128, 360 and 221.
#:
#: It serves sequences with an odd number of such tiles (`leave_one_idle`): the second of two consumers would have none
#: of the last. 16 heads of 80, sequences of 144 83.8 and 72.3, causal 74.4 and 58.2, of 257 102 and 94.8, causal
#: 80.5 and 67.6; of 64, 160 61.1 and 59.0, causal 60.0 and 47.0, 257 91.8 and 82.4; of 128, 144 95.4 and 86.9, causal
#: 86.1 and 77.6, 257 causal 91.7 and 84.5, but full 111 and 124. With an even number, of 80, 197 78.4 and 84.4, causal
#: 62.2 and 64.0.
#:
#: It serves heads of 65 to 128 also where tiles are few (`one_consumer_pays`), and with dropout in short sequences: 103
#: × 73 tokens, 4 heads of 128, 1.17 times as fast as two consumers, 64 × 128, 16 heads, 1.07, causal 1.03; but 16 × 512
#: 1.01, and of 96, 64 × 197, 12 heads, 0.97.
_SHORT_SINGLE = _SINGLE._replace(stages=2, q_in_registers=True)

#: Instead of the row of 65 to 128 columns, for long sequences with 8-bit queries and keys: a third consumer, for which
#: half the keys make room, computes exponentials while others multiply. TFLOP/s of one run, two consumers and this:
#: full, 1,024 tokens 701 and 674, 2,048 840 and 860, 8,192 910 and 973; causal, 4,096 805 and 783, 8,192 870 and 906,
#: 16,384 892 and 956. All exponentials after the product: 0 to 3 % slower; consumers in turn: no faster.
_LONG_8 = HopperConfig(
    consumers=3, block_n=64, stages=6, registers=160, max_registers=128, q_in_registers=False, ahead=16
)

#: Queries of a sequence from which on that serves, without a mask and under a causal one.
LONG_8, LONG_8_CAUSAL = 2048, 8192


def rows_for(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> list[HopperConfig]:
    """All rows that calls with such heads may be cut by."""
    widest, row = max(head_dim, head_dim_v), first_row(_ROWS, head_dim, _part_width(head_dim_v))
    if widest <= 128:
        more = [_THREE_OF_HALF_KEYS, _NARROW, _ALONE] if widest <= 64 else [_LONG_8] * (dtype is FP8)
        return [row, _HALF_KEYS, _SHORT_SINGLE, *more]
    return [row, row._replace(consumers=1, in_turn=False)] if widest <= _MAX_PART else [row]


def choose_config(call: Call, spills: bool = False) -> HopperConfig:
    """The row of a call. `spills`: ptxas would spill (`SPILLS_FROM`)."""
    call = call.cut_by
    spec, dtype = call.spec, call.dtype
    head_dim, head_dim_v = call.head_dims
    left, right = spec.window_left is not None, spec.window_right is not None
    dropout, blocks = spec.dropout_p > 0, spec.block_shape is not None
    tables = table_bytes(call.aux.bias, call.aux.mask) + function_bytes(spec.score_program)
    widest, part = max(head_dim, head_dim_v), _part_width(head_dim_v)
    row = first_row(_ROWS, head_dim, part)
    longest_q, _ = lengths(call)
    long = longest_q >= (LONG_8_CAUSAL if right else LONG_8)
    if widest <= 64:
        short = longest_q < SHORT_CAUSAL if right else longest_q <= SHORT
        row = _THREE_OF_HALF_KEYS if spills and dtype is not torch.float16 else row
        # A third consumer leaves no registers for tables and random words.
        row = _NARROW if left or blocks or short or dropout or tables else row
    elif dtype is FP8 and widest <= 128 and long and not (left or blocks):
        row = _LONG_8
    bare = not (blocks or tables or dtype is FP8)
    if bare and not dropout and _has_half_keys(call):
        # Without a mask no exponentials ahead: heads of 128, 512 tokens, 16 heads, H200s, 1.04 and 1.05 times as fast.
        row = _HALF_KEYS if left or right or widest <= 96 else _HALF_KEYS._replace(ahead=0)
    if (dropout or tables > 2) and row.block_n > 64:
        # A thread holds scores, weights and sums already: half the keys leave room for random words, or for four bytes
        # of tables for each score.
        row = row._replace(block_n=64, stages=2 * row.stages)
    if not (blocks or dtype is FP8) and (fit_one_tile(call) or not tables):
        row = _single_consumer(row, call) or row
    if blocks:
        row = _within_tile(row, call.block_tile, widest)
    if moves_by_tma(call.aux.bias, dtype):
        # Heads of 128 in turn, milliseconds for 4 × 2,048 and 4 × 4,096 tokens, 16 heads: 0.248 and 0.935, otherwise
        # 0.266 and 0.992; half the keys, in turn, 0.249 and 0.960. Of 64, half the keys: 1.54, not 1.32; in turn 1.55.
        in_turn = row.in_turn or (96 < widest <= 128 and row.consumers > 1)
        row = _with_room_for_bias(row._replace(in_turn=in_turn), head_dim, head_dim_v, dtype)
    return row


def _has_half_keys(call: Call) -> bool:
    """Whether `_HALF_KEYS` serves a plain call."""
    spec, both, widest = call.spec, lengths(call), max(call.head_dims)
    right, longest, keys = spec.window_right is not None, max(both), both[1]
    if spec.window_left is not None:
        if spec.window_right is None or widest > 128:
            return False
        window = spec.window_left + spec.window_right
        return window <= (HALF_WINDOW if widest <= 64 else HALF_WINDOW_WIDE)
    if widest <= 64:
        return right and longest <= HALF_CAUSAL
    if not right and widest <= 128 and keys <= HALF_ODD and -(-keys // _HALF_KEYS.block_n) % 2:
        return True
    if widest <= 96:
        return right and longest <= MIDDLE_CAUSAL
    return widest <= 128 and longest <= (HALF_WIDE_CAUSAL if right else HALF_WIDE)


def _single_consumer(row: HopperConfig, call: Call) -> HopperConfig | None:
    """The row of one consumer that serves instead of `row`; None where none does."""
    head_dim, head_dim_v = call.head_dims
    widest, (queries, keys), dropout = max(head_dim, head_dim_v), lengths(call), call.spec.dropout_p > 0
    longest = max(queries, keys)
    left, right = call.spec.window_left is not None, call.spec.window_right is not None
    one_tile = fit_one_tile(call)
    few = one_tile or one_consumer_pays(call)
    if widest > 128:
        short = right and not (left or dropout) and short_tiles_pay(call)
        return row._replace(consumers=1, in_turn=False) if (few or short) and widest <= _MAX_PART else None
    odd = leave_one_idle(call)
    if widest > 64 or (one_tile and not left):
        short = dropout and widest > 96 and longest <= SHORT
        return _SHORT_SINGLE if few or short or odd else None
    if left:
        return None
    if odd and not dropout and _fill_tiles(head_dim, head_dim_v):
        return _SHORT_SINGLE
    if not _fill_tiles(head_dim, head_dim_v):
        # Its tiles of queries are more, so that keys are loaded more often, and TMA fills these up.
        few = not right and gives_at_most(call, 1)
    elif not right and keys <= SHORT:
        few = True
    elif not right and queries <= SHORT:
        few = gives_at_most(call, 2)  # else two consumers, whose tiles these fill
    elif right:
        few = few or SHORT < longest <= ALONE_CAUSAL
    elif longest <= ALONE_FULL and not dropout:
        full = queries / (-(-queries // ROWS_OF_THREE) * ROWS_OF_THREE)
        return _ALONE_AHEAD if full < _LEAST_FULL else _ALONE if few else None
    return _ALONE if few or dropout else None


def _fill_tiles(*head_dims: int) -> bool:
    """Whether heads of up to 64 columns have as many as their tiles."""
    return all(column_chunks(head_dim) == (head_dim, 0) for head_dim in head_dims)


def _within_tile(row: HopperConfig, block_tile: tuple[int, int], widest: int) -> HopperConfig:
    """Tiles that divide those of a block mask, which are multiples of 64."""
    queries, keys = block_tile
    if queries % row.block_m:
        if widest <= 128:
            return _SINGLE if widest <= 64 else _SINGLE._replace(stages=2)
        row = row._replace(consumers=1, in_turn=False)
    return row if keys % row.block_n == 0 else row._replace(block_n=64, stages=2 * row.stages)


def _with_room_for_bias(row: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> HopperConfig:
    """With the tiles of a bias on chip, in as many stages as fit beside a place for output, else without one; as it is
    if there is no room for two stages."""
    chunks, chunks_v = column_chunks(head_dim, dtype), value_chunks(head_dim_v)
    through_queries = chunks_v[0] <= chunks[0] and chunks_v[1] <= chunks[1]
    for outs in (1, 0) if through_queries else (1,):
        for stages in range(row.stages, 1, -1):
            cut = row._replace(stages=stages, bias_by_tma=True)
            if _shared_memory(cut, head_dim, head_dim_v, dtype, 1, outs) <= cut.room:
                return cut
    return row


def moves_by_tma(bias: TensorFacts | None, dtype: torch.dtype) -> bool:
    """Whether TMA can bring tiles of a bias: queries × keys, in the dtype of q, rows at multiples of 16 bytes."""
    if bias is None or bias.dtype is not dtype or 1 in bias.shape[2:] or bias.strides[2] == 0 or bias.strides[3] != 1:
        return False
    used = (stride for size, stride in zip(bias.shape, bias.strides[:-1]) if size > 1)
    bits = functools.reduce(int.__or__, (stride * dtype.itemsize for stride in used), bias.misalignment)
    return bits % 16 == 0


def matches_scores(call: Call) -> bool:
    """Whether each score of a dense call has an element of the bias of its own, in the dtype of q."""
    bias = call.aux.bias
    return (
        bias is not None
        and not call.packed
        and bias.dtype is call.dtype
        and bias.shape[:2] == (call.batch, call.heads)
        and bias.has_each_score
    )


#: The bytes that `table_bytes` counts for a bias that TMA brings.
BIAS_BYTES = 2


def table_bytes(*tables: TensorFacts | None) -> int:
    """Bytes of tables that a thread holds for each of its scores, about: few of a table that broadcasts."""
    return sum(1 if 1 in table.shape[2:] else max(2, table.dtype.itemsize) for table in tables if table is not None)


def function_bytes(score_program: str | None) -> int:
    """Bytes that a thread holds for each of its scores of what a score function reads and computes, about; at least 1,
    0 without one. Of entries that belong to keys a thread has half as many as scores, and their checks."""
    if score_program is None:
        return 0
    return max(1, sum(dtype.itemsize for dtype in tile_values(score_program)), 4 * reads_by_key(score_program))


def out_places(config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Places for output on its way out: one for each consumer, or where there is no room for that, one after the
    other uses the same. Without room even for one, out leaves through the place of the queries, whose chunks are as
    wide as its own; but not where the next queries may be there already."""
    for places in (config.consumers, 1):
        if _shared_memory(config, head_dim, head_dim_v, dtype, queries=1, outs=places) <= config.room:
            return places
    return 1 if config.q_in_registers else 0


def query_places(config: HopperConfig, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Tiles of queries on chip: two, to load the next early, where products read them there and there is room."""
    if config.q_in_registers:
        return 1
    room = _shared_memory(config, head_dim, head_dim_v, dtype, queries=2, outs=config.consumers)
    return 2 if room <= config.room else 1


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
    if config.bias_by_tma:
        read += dtype.itemsize * config.block_m * config.block_n * config.stages
    overhead = OVERHEAD + _OVERHEAD_OF_A_THIRD * max(0, config.consumers - 2)
    return read + 2 * (config.block_n * config.stages + CONSUMER_ROWS * outs) * width_v + overhead
