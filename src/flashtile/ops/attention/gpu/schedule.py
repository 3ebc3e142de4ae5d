"""How long calls are, and how the kernels of dk and dv divide their work.

A thread block visits the query tiles of all heads that share a key tile, one step each. To keep all multiprocessors
busy until the end, the heads may be divided into shares, and the queries into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from flashtile.ops.attention.call import Call
from flashtile.ops.attention.spec import AttentionSpec

#: How long the sequences of a call are: they all fit a tile of `SHORT` queries and keys; from `LONG` of both on they
#: fill a device with large tiles too.
Length = Literal["short", "medium", "long"]

SHORT, LONG = 64, 2048


def length_class(max_seqlen_q: int, max_seqlen_k: int) -> Length:
    if max(max_seqlen_q, max_seqlen_k) <= SHORT:
        return "short"
    return "long" if min(max_seqlen_q, max_seqlen_k) >= LONG else "medium"


#: Work that takes as long as so many steps: the beginning and the end of a walk; storing and adding its part of dk
#: and dv; adding up all parts, with the host's time. Microseconds of a backward in parts, and whole: 4 × 4,096 queries
#: on 77 keys, 10 heads of 64, 59.6 (3 parts) and 94.9; one sequence of these 26.7 (8) and 80.2; 8,192 queries on 256
#: keys, 8 heads of 128, 92.5 (8) and 271; but 4 × 1,024 on 77, 8 heads of 160, 62.8 (2) and 60.2. 8 × 128 tokens,
#: causal, 32 and 8 heads of 128, 40 (4 shares) and 33; 12 × 253, 8 and 1 of 64, 31 (8) and 50.
_STEPS_OF_A_WALK, _STEPS_OF_A_PART, _STEPS_OF_A_SUM = 2, 2, 8

#: The walks may take so many times as long as with the best division if they have fewer shares, or fewer parts of
#: queries, because parts of dk and dv take memory. Parts of queries have been timed where there are fewer walks than
#: multiprocessors, and not where there are more.
_NEARLY_BEST_SHARES, _NEARLY_BEST_PARTS = 1.02, 1.05

#: A walk has at most so many parts, unless each part of all walks has a multiprocessor for itself.
_MOST_PARTS = 4


def longest_walk(query_tiles: int, spec: AttentionSpec, block_m: int, block_n: int) -> int:
    """How many query tiles of a head see some of a key tile, at most."""
    if spec.window_left is None or spec.window_right is None:
        return query_tiles
    return min(query_tiles, (spec.window_left + spec.window_right + block_n) // block_m + 2)


def choose_shares(
    group: int,
    walks: int,
    query_tiles: int,
    uneven: bool,
    multiprocessors: int,
    walks_done: Callable[[int], float] = lambda shares: 0,
) -> int:
    """Into how many shares the query heads of a key/value head are divided in the kernel of dk and dv, so that there is
    work for all multiprocessors until the end. dk and dv are then sums of as many parts.

    Args:
        group: query heads of a key/value head.
        walks: key tiles of all key/value heads, each a walk over the query tiles of its group.
        query_tiles: of one head that a walk visits at most (`longest_walk`).
        uneven: walks may be of different lengths.
        walks_done: of so many shares, about how many walks are done when the longest one of the last lines begins.
    """

    def time(shares: int) -> float:
        """In steps, about. Uneven walks are half as long as the longest in the mean. The longest come first, so all end
        together, or the longest one of the last lines ends after the others."""
        longest, beside, summing = query_tiles * group / shares, *_steps_beside(shares)
        if not uneven:
            return -(-walks * shares // multiprocessors) * (longest + beside) + summing
        a_walk = (longest / 2 + beside) / multiprocessors
        return max(walks * shares * a_walk, walks_done(shares) * a_walk + longest + beside) + summing

    return _fewest([shares for shares in range(1, group + 1) if group % shares == 0], time, _NEARLY_BEST_SHARES)


def key_tile_shares(call: Call, block_m: int, block_n: int, uneven: bool) -> int:
    """`choose_shares` of a call, in tiles of so many queries and keys."""
    cut_by = call.cut_by
    steps = longest_walk(cut_by.tiles(cut_by.rows_q, block_m), call.spec, block_m, block_n)
    walks = cut_by.tiles(cut_by.rows_k, block_n) * cut_by.lines_kv
    return choose_shares(call.group, walks, steps, uneven, call.multiprocessors)


def choose_parts(walks: int, query_tiles: int, group: int, multiprocessors: int) -> int:
    """Into how many parts the queries of each walk are divided, if walks are few, or the last round of them is small.
    dk and dv are then sums of as many parts. Arguments as in `choose_shares`; `walks` may be of shares."""

    def time(parts: int) -> int:
        """In steps, about."""
        longest, beside, summing = -(-query_tiles // parts) * group, *_steps_beside(parts)
        return -(-walks * parts // multiprocessors) * (longest + beside) + summing

    most = max(multiprocessors // walks, min(_MOST_PARTS, query_tiles))
    return _fewest(range(1, most + 1), time, _NEARLY_BEST_PARTS)


def _fewest(choices: Iterable[int], time: Callable[[int], float], nearly_best: float) -> int:
    """The first choice that takes no longer than `nearly_best` times as long as the best one."""
    times = {choice: time(choice) for choice in choices}
    most = nearly_best * min(times.values())
    return next(choice for choice, taken in times.items() if taken <= most)


def _steps_beside(parts: int) -> tuple[int, int]:
    """Other work in steps, if dk and dv are sums of so many parts: with each walk, and once."""
    return (_STEPS_OF_A_WALK + _STEPS_OF_A_PART, _STEPS_OF_A_SUM) if parts > 1 else (_STEPS_OF_A_WALK, 0)
