"""What the kernels that split the keys serve, and when that is faster: pure functions of sizes. No Triton here.

The other kernels give each program a tile of queries of one head, and all keys. A few queries leave most rows of such a
tile empty; with few heads most of a GPU has nothing to do, and the query heads of a group read the same keys. Here the
rows of a tile are the queries times the heads of a group, and the keys are split over programs.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile.ops.attention.call import visible_keys
from flashtile.ops.attention.spec import AttentionSpec

#: With more queries than this, nobody asks whether to split.
MAX_QUERIES = 128
#: Keys of a tile, queries of a tile of the other kernels: what the model below counts in.
_KEYS, _QUERIES = 128, 128
#: Rows of a tile up to which it takes so long, in units of a tile of the other kernels (1.4 µs). Measured on an H200 at
#: 32,768 keys, D 128: 1.7 µs for 16 rows, where the time is that of reading keys and values, 2.0 for 32, 2.5 for 64.
_TILE_TIMES = ((16, 1.2), (32, 1.4), (64, 1.75))
#: The same for the other kernels, where the reading takes the time: all heads have keys and values of their own.
_READING = 1.3
#: Putting the parts together.
_COMBINING = 0.5


_NO_GAIN = "the queries are many enough, or the keys few enough, that splitting the keys gains nothing"


class SplitFacts(NamedTuple):
    """What decides whether splitting the keys of a call pays.

    Attributes:
        key_tiles: tiles of 128 keys that the queries see at most.
    """

    batch: int
    seq_q: int
    heads: int
    heads_kv: int
    key_tiles: int


def dense_facts(q_shape: tuple[int, ...], k_shape: tuple[int, ...], spec: AttentionSpec) -> SplitFacts:
    """The facts of a dense call."""
    (batch, seq_q, heads, _), (_, seq_k, heads_kv, _) = q_shape, k_shape
    first, last = visible_keys(seq_q, seq_k, spec)
    key_tiles = -(-(last - first) // _KEYS)
    return SplitFacts(batch, seq_q, heads, heads_kv, key_tiles)


def no_gain(facts: SplitFacts, multiprocessors: int) -> str | None:
    """Why splitting keys makes a call no faster; None where it does.

    A model of occupancy: how long the busiest multiprocessor goes through tiles of keys, with one program on each. Of
    88 cases on an H200 (1 to 64 sequences, 1 to 64 queries, 256 to 32,768 keys, groups of 1, 4 and 8) it takes the
    faster kernels in all but five, where the two differ by at most 1.4 µs.
    """
    if facts.seq_q > MAX_QUERIES:
        return f"it is for up to {MAX_QUERIES} queries of a sequence, and here are more"
    return None if _time_split(facts, multiprocessors) < _time_whole(facts, multiprocessors) else _NO_GAIN


def _time_split(facts: SplitFacts, multiprocessors: int) -> float:
    rows = facts.seq_q * facts.heads // max(facts.heads_kv, 1)
    most, tile_time = next((entry for entry in _TILE_TIMES if rows <= entry[0]), _TILE_TIMES[-1])
    tiles = facts.batch * facts.heads_kv * -(-rows // most) * facts.key_tiles
    return -(-tiles // multiprocessors) * tile_time + _COMBINING


def _time_whole(facts: SplitFacts, multiprocessors: int) -> float:
    programs = facts.batch * facts.heads * -(-facts.seq_q // _QUERIES)
    reading = facts.batch * facts.heads_kv * facts.key_tiles / multiprocessors * _READING
    return max(-(-programs // multiprocessors) * facts.key_tiles, reading) if programs else 0.0
