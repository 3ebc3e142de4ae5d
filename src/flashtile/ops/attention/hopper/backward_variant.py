"""What decides the machine code of the Hopper backward, and which loops its main kernel has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashtile._backends.gluon import SUMS_PASS_LOOPS
from flashtile.ops.attention.hopper.configs import BackwardConfig
from flashtile.ops.attention.hopper.parameters import ScoreVariant

#: Queries of the heads of a walk (of those that share keys all, or one share: `plans.shares_of_heads`), from which on
#: what it reads and adds to (1 KiB each at D 128) is so much that programs which drift apart find little of it in the
#: L2 cache. TFLOP/s of walks that meet and others, D 128, 64 and 8 heads: 32,768 tokens 605 and 560, 16,384 602 and
#: 607; 16 heads, 65,536 tokens, 621 and 613.
WALK_BEYOND_CACHE = 2**18

#: The same, from which on a walk is long. Thousands of cycles of all kernels at D 128, causal, with one loop and with
#: two: 1,024 tokens 830 and 839, 4,096 1,979 and 1,991; of the main kernel, 8,192 tokens 3,272 and 3,285, with 8 heads
#: that share keys 13,089 and 12,794.
_LONG_WALK = 8192


class BackwardVariant(NamedTuple):
    """All that decides the machine code of the backward kernels; not lengths, batch or heads. Of the strides of dout
    only whether they pass 32 bits: the first kernel takes 66 registers then, not 62."""

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
    index_dtypes: tuple[torch.dtype, torch.dtype] | None
    scores: ScoreVariant = ScoreVariant()
    block_tile: tuple[int, int] | None = None
    hides_rows: bool = False
    wide_strides: bool = False
    sinks: bool = False
    may_cut: bool = True
    cut_last: bool = False
    turns: bool = False
    meets: bool = False
    alternates: bool = False


def with_loops(variant: BackwardVariant, group: int, rows_q: int, rows_k: int) -> BackwardVariant:
    """The variant of the main kernel for calls with so many queries and keys, and query heads of a walk."""
    banded = variant.packed or variant.has_left or variant.has_right
    may_cut = banded or rows_k % variant.config.block_n != 0
    long = group * rows_q >= _LONG_WALK
    alternates = group == 1 and _may_alternate(variant)
    return variant._replace(
        may_cut=may_cut,
        cut_last=may_cut and long and not alternates and _may_cut_last(variant),
        turns=long and group > 1 and _may_turn(variant),
        meets=group * rows_q >= WALK_BEYOND_CACHE and not banded and _may_meet(variant),
        alternates=alternates,
    )


def _may_cut_last(variant: BackwardVariant) -> bool:
    """Whether the steps that a mask cuts may have a loop of their own. They are the last ones where no window ends on
    the left and no line rises.

    Not where a tile of queries is as large as one of keys, for there they are the larger part of a short sequence; nor
    in packed calls, where registers do not suffice in float16, or beside ALiBi, where scalars spill in either loop; nor
    where keys have two places: ptxas 12.8 computes their addresses ahead of the first loop, which may not run, for
    both.
    """
    config = variant.config
    they_are_last = not variant.has_left and variant.block_tile is None
    they_are_few = config.block_m < config.block_n
    registers_suffice = config.producer and not variant.packed and not variant.scores.alibi
    return they_are_last and they_are_few and registers_suffice and config.key_stages == 1 and SUMS_PASS_LOOPS


def _may_turn(variant: BackwardVariant) -> bool:
    """Whether some walks of a call may go up (`backward_walk.walks_up`): those of a causal mask, in no order."""
    causal = variant.has_right and not variant.has_left and not variant.packed and variant.block_tile is None
    return causal and variant.config.producer and not variant.ordered


def _may_meet(variant: BackwardVariant) -> bool:
    """Whether walks of a call without a mask may begin where others of their line are (`backward_walk.meeting_point`):
    those in no order, of a program whose producer can look for that."""
    return variant.block_tile is None and variant.config.producer and not variant.ordered


def _may_alternate(variant: BackwardVariant) -> bool:
    """Whether every second group of lines of a call may rise (`backward_walk.rises`). With heads that share keys the
    programs of a line would be too far apart for the L2 cache: a query tile is as many steps as there are heads."""
    return variant.ordered and variant.has_right and variant.block_tile is None
