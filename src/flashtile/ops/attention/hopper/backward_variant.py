"""What decides the machine code of the Hopper backward, and which loops its main kernel has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile._backends.gluon import SUMS_PASS_LOOPS
from flashtile._backends.launch import ABSENT, int32
from flashtile.ops.attention.call import Call
from flashtile.ops.attention.gpu.parameters import SideParameters
from flashtile.ops.attention.gpu.score_functions import captured_parameters, score_bounds
from flashtile.ops.attention.hopper.backward_configs import (
    BYTES_OF_A_COLUMN,
    BackwardConfig,
    BiasGradientConfig,
    bias_gradient_config,
    derivatives_apart,
    has_function_derivative,
)
from flashtile.ops.attention.hopper.backward_tiles import ScoreChange
from flashtile.ops.attention.hopper.configs import CONSUMER_ROWS
from flashtile.ops.attention.hopper.score_functions import reads_of, with_derivative_of
from flashtile.ops.attention.hopper.turns import take_two_rounds

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

#: That of a call without a score function.
NO_FUNCTION = ScoreChange(ABSENT, int32(None), None, None, False, False, False)


def function_of_call(call: Call, covered: bool) -> ScoreChange:
    """The score function of a call. `covered`: tiles divide its queries and keys, so its indices are known to be
    theirs."""
    score_program = call.spec.score_program
    if score_program is None:
        return NO_FUNCTION
    bounds = score_bounds(call) if covered else None
    read = captured_parameters(call.aux.captured)
    return NO_FUNCTION._replace(
        captured=read["captured"],
        sizes=read["captured_sizes"],
        SCORE_FUNCTION=with_derivative_of(score_program, bounds),
        SCORE_READS=reads_of(score_program, bounds, with_derivative=True),
        FUNCTION_DERIVATIVE=has_function_derivative(score_program),
    )


class BackwardVariant(NamedTuple):
    """All that decides the machine code of the backward kernels; not lengths, batch or heads. `wide_strides`: the
    strides of dout pass 32 bits, so that the first kernel takes 66 registers instead of 62. `side`: without sinks,
    which only the first kernel reads (`sinks`). `bias_in_parts`: the gradient of a bias leaves its kernel in parts;
    `bias_shared_by_heads`: it has one head for several. `function`: its `ScoreChange` without the soft cap.
    `masks` and the fields after it: as in `backward_tiles.KernelConfig`. `divides_queries`: walks over the queries are
    in parts. `lone_tiles`: the first query tiles see one key tile alone (`lone_query_tiles`). `statistics_together`:
    TOGETHER of the first kernel."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    config: BackwardConfig
    packed: bool
    has_left: bool
    has_right: bool
    top_left: bool
    has_dlse: bool
    ordered: bool
    side: SideParameters
    softcap: bool = False
    has_empty_rows: bool = False
    wide_strides: bool = False
    sinks: bool = False
    row_statistics: bool = False
    bias_in_parts: bool = False
    bias_shared_by_heads: bool = False
    slope_sums: bool = False
    function: ScoreChange = NO_FUNCTION
    masks: bool = True
    masks_last: bool = False
    reverses_walks: bool = False
    shares_progress: bool = False
    rotates_walks: bool = False
    reverses_lines: bool = False
    single_key_tile: bool = False
    whole_lines: bool = False
    lone_tiles: bool = False
    divides_queries: bool = False
    statistics_together: int = 1

    @property
    def bounded(self) -> bool:
        """Whether in k, v and their gradients the keys of each sequence end where its length says."""
        return self.packed or self.side.has("key_lengths")

    @property
    def adds_up(self) -> bool:
        """Whether thread blocks add dq up together. Then it is cleared before, and rounded afterwards."""
        return not (self.single_key_tile or self.whole_lines)

    @property
    def has_function(self) -> bool:
        """Whether there is a score function."""
        return self.function.SCORE_FUNCTION is not None

    @property
    def score_change(self) -> ScoreChange:
        """The score function, and whether it or the soft cap has derivatives."""
        of_function = self.function.FUNCTION_DERIVATIVE
        apart = derivatives_apart(self.softcap, of_function, self.slope_sums, self.side.has("dropout_seed"))
        return self.function._replace(DERIVATIVES=self.softcap or of_function, DERIVATIVES_APART=apart)

    @property
    def bias_gradient_cut(self) -> BiasGradientConfig:
        """How the kernel of the gradient of a bias is cut."""
        side = self.side
        modified = side.has("mask") or side.has("dropout_seed") or self.has_function
        by_position = self.has_left or self.has_right or side.has("key_lengths") or side.has("alibi_slopes")
        return bias_gradient_config(
            self.head_dim, self.head_dim_v, modified, by_position, self.packed or self.listed, side.constants.TILE_K
        )

    @property
    def listed(self) -> bool:
        """Whether there is a block mask."""
        return self.side.has("block_lists")


def with_loops(variant: BackwardVariant, group: int, rows_q: int, rows_k: int) -> BackwardVariant:
    """The variant of the main kernel for calls of `rows_q` queries and `rows_k` keys. `group`: query heads that a key
    tile visits."""
    banded = variant.has_left or variant.has_right
    may_end = variant.bounded or rows_k % variant.config.block_n != 0
    # Where statistics are operands, the product that takes lse off hides the keys past the end.
    masks = banded or (may_end and not variant.config.statistics_multiplied)
    if variant.single_key_tile:
        # No key tile comes after another that its walk could meet.
        return variant._replace(masks=masks, masks_last=masks and _may_mask_last(variant))
    if variant.whole_lines:
        # Its thread block meets no other one.
        return variant._replace(masks=masks)
    long = group * rows_q >= _LONG_WALK
    reverses_lines = group == 1 and _may_reverse_lines(variant)
    return variant._replace(
        masks=masks,
        masks_last=masks and long and not reverses_lines and _may_mask_last(variant),
        reverses_walks=long and group > 1 and _may_reverse_walks(variant),
        shares_progress=not banded and group * rows_q >= WALK_BEYOND_CACHE and _may_share_progress(variant),
        rotates_walks=group > 1 and _may_rotate_walks(variant),
        reverses_lines=reverses_lines,
    )


def shares_in_cache(
    variant: BackwardVariant, group: int, shares: int, key_tiles: int, lines: int, query_tiles: int, programs: int
) -> int:
    """Into how many shares the query heads of a key/value head are divided, at least `shares`, so that thread blocks
    find in the L2 cache what others have read and added to.

    In a band, walks differ in length. So one that follows another begins at its own time, and meets no other walk over
    the same queries, unless walks take turns in two rounds (`backward_tiles.reverses_walk`). What all walks under way
    read and add to has to stay in the cache then. That is as much as they visit query heads. Tiles of 64 keys have
    twice as many walks to meet, and do not stay together in two rounds either.

    Args:
        group: query heads of a key/value head.
        shares: as `shares_of_heads` divides them.
        key_tiles: of a line; `lines`: key/value heads of all sequences (packed: of one).
        query_tiles: of a head, that the longest walk visits.
        programs: thread blocks that run at once.
    """
    config = variant.config
    walks_differ = variant.has_left or variant.has_right or variant.listed
    several_rounds = key_tiles * lines * shares > programs
    if not (walks_differ and several_rounds):
        return shares
    may_meet = config.block_n > CONSUMER_ROWS and _may_reverse_walks(variant)
    if may_meet and take_two_rounds(key_tiles, lines * shares, programs):
        return shares
    of_a_head = programs * config.block_n * (variant.head_dim + variant.head_dim_v) * BYTES_OF_A_COLUMN
    heads = max(_IN_CACHE // of_a_head, 1)
    divided = next(each for each in range(shares, group + 1) if group % each == 0 and group // each <= heads)
    least = _LONG_WALK_TO_KEEP if variant.has_left or divided == group else _WALK_TO_KEEP
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


def _may_mask_last(variant: BackwardVariant) -> bool:
    """Whether the steps that a mask cuts may have a loop of their own. They are the last ones where no window ends on
    the left and no line is reversed.

    They have none where a tile of queries is as large as one of keys, because there they are the larger part of a short
    sequence. Packed calls have none, because registers do not suffice in float16, and neither have calls with a soft
    cap or ALiBi, whose scalars spill in either loop. Nor is there one where keys have two places: ptxas 12.8 computes
    the addresses for both loops ahead of the first one, which may not run.
    """
    config = variant.config
    they_are_last = not variant.has_left and not variant.listed
    they_are_few = config.block_m < config.block_n
    registers_suffice = config.producer and not variant.packed and not variant.side.has("alibi_slopes")
    registers_suffice = registers_suffice and not any(map(variant.side.has, ("bias", "mask", "dropout_seed")))
    registers_suffice = registers_suffice and not (variant.has_function or variant.softcap)
    return they_are_last and they_are_few and registers_suffice and config.key_stages == 1 and SUMS_PASS_LOOPS


def _may_reverse_walks(variant: BackwardVariant) -> bool:
    """Whether some key tiles may visit their queries upwards (`backward_tiles.reverses_walk`): under a causal mask,
    where they add in no order."""
    causal = variant.has_right and not variant.has_left and not variant.packed and not variant.listed
    return causal and variant.config.producer and not variant.ordered


def _may_rotate_walks(variant: BackwardVariant) -> bool:
    """Whether key tiles may begin at the same query tile (`backward_tiles.rotated_start`): in a window that ends on
    both sides, where they add in no order."""
    return variant.has_left and variant.has_right and not variant.listed and not variant.ordered


def _may_share_progress(variant: BackwardVariant) -> bool:
    """Whether the key tiles of a call without a mask may begin where others of their line are
    (`backward_tiles.shared_progress`): where they add in no order, and a producer can look for that."""
    return not (variant.listed or variant.packed or variant.ordered) and variant.config.producer


def _may_reverse_lines(variant: BackwardVariant) -> bool:
    """Whether every second group of lines may be reversed (`backward_tiles.reverses_line`). Where heads share keys the
    thread blocks of a line would be too far apart for the L2 cache, because a query tile is a step for each head."""
    return variant.ordered and variant.has_right and not variant.listed
