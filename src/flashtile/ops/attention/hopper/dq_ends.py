"""How dq of a Hopper backward leaves: as sums of several thread blocks, or stored by the one that has all of it. No
Triton here."""

from __future__ import annotations

from typing import NamedTuple

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.hopper.backward_configs import (
    BackwardConfig,
    backward_shared_memory,
    derivatives_apart_of,
)
from flashtile.ops.attention.hopper.configs import SHARED_MEMORY

#: Bytes that all walks under way may read and sum if thread blocks take whole lines of more than two key tiles. The
#: next walk reads the sums of this one, and has to find them in the L2 cache. Time before over time of whole lines (an
#: H100): 1.18 with 26 MB (57 × 384 tokens, 16 heads of 64), 1.08 with 27 MB (32 × 300, 12 of 80), 1.06 with 30 MB (87 ×
#: 288, 8 of 128, causal), 0.88 with 35 MB (32 × 512, 16 of 64), 0.72 with 39 MB (16 × 1,024, 16 of 64, causal).
_KEPT_BYTES = 32 * 10**6

#: With so many key tiles, sums are written and read once. These are fewer bytes than clearing, adding and rounding
#: move, wherever the sums are. 1.51 (133 × 200, 8 heads of 64), 1.26 (33 × 256, 16 and 4 of 128: 138 MB).
_FEW_KEY_TILES = 2

#: How many times as many key tiles a thread block may get as where each is taken by itself.
_MORE_ROUNDS = 1.15

#: Bytes of a query in one head, for each column of q and of v. They hold that column of q or dout, and half a column of
#: the float32 sums of dq.
BYTES_OF_A_COLUMN = 4


class DqEnds(NamedTuple):
    """How dq of a call leaves.

    Attributes:
        config: the row of the call, in which TMA stores dq where nobody adds to it.
        single: all keys are one tile (`_has_single_key_tile`).
        whole: thread blocks take whole lines (`_takes_whole_lines`).
    """

    config: BackwardConfig
    single: bool
    whole: bool


def ends_of_dq(config: BackwardConfig, call: Call) -> DqEnds:
    """Whether dq needs sums of several thread blocks. Where it does not, TMA stores it, also in the rows of wide heads,
    whose sums threads add up faster. `config`: the row of the table."""
    stores = config._replace(sums_by_tma=True)
    if backward_shared_memory(stores, *call.head_dims, derivatives_apart_of(call)) > SHARED_MEMORY:
        stores = config
    single = _has_single_key_tile(call, stores)
    whole = not (single or call.bounded) and _takes_whole_lines(call, stores)
    return DqEnds(stores if single or whole else config, single, whole)


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
    spec, rows_q, programs = call.spec, call.rows_q, call.multiprocessors
    may = config.producer and config.sums_by_tma and spec.block_shape is None
    if not may or call.band_hides_rows:
        return False
    lines = call.batch * call.heads_kv
    key_tiles = -(-call.rows_k // config.block_n)
    rounds = -(-lines // programs) * key_tiles / -(-lines * key_tiles // programs)
    visited = -(-rows_q // config.block_m) * config.block_m  # of a head, in the mean
    if spec.window_left is not None and spec.window_right is not None:
        visited = min(visited, spec.window_left + spec.window_right + config.block_n + config.block_m)
    elif spec.banded:
        visited = (visited + config.block_n) // 2
    kept = programs * call.group * visited * sum(call.head_dims) * BYTES_OF_A_COLUMN
    return rounds <= _MORE_ROUNDS and (key_tiles <= _FEW_KEY_TILES or kept <= _KEPT_BYTES)
