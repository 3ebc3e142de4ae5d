"""What the kernels that split the keys serve, and when that is faster: pure functions of sizes. No Triton here.

The other kernels give each program a tile of queries of one head, and all keys. A few queries leave most rows of such a
tile empty; with few heads most of a GPU has nothing to do, and the query heads of a group read the same keys. Here the
rows of a tile are the queries times the heads of a group, and the keys are split over programs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashtile.ops.attention.spec import AttentionSpec, SideInputs

#: With more queries than this, nobody asks whether to split.
MAX_QUERIES = 128
#: Keys of a tile, queries of a tile of the other kernels, rows of a tile of these: what the model below counts in.
_KEYS, _QUERIES, _ROWS = 128, 128, 64
#: What it costs to put the parts together, in tiles of keys.
_COMBINING = 2


class SplitFacts(NamedTuple):
    """What decides whether keys are split.

    Attributes:
        key_tiles: tiles of 128 keys that the queries see at most.
        packed: sequences lie one behind another.
        tables: there is a bias, a mask or a block mask.
    """

    batch: int
    seq_q: int
    heads: int
    heads_kv: int
    key_tiles: int
    packed: bool = False
    dropout: bool = False
    tables: bool = False


def facts_of(q: Tensor, k: Tensor, side: SideInputs, spec: AttentionSpec) -> SplitFacts:
    """Of a call."""
    packed = side.cu_seqlens_q is not None
    tables = side.bias is not None or side.mask is not None or side.block_lists is not None
    (seq_q, heads), (seq_k, heads_kv) = q.shape[-3:-1], k.shape[-3:-1]
    batch = 1 if packed else q.shape[0]
    first, last = visible_keys(seq_q, seq_k, spec)
    key_tiles = -(-(last - first) // _KEYS)
    return SplitFacts(batch, seq_q, heads, heads_kv, key_tiles, packed, spec.dropout_p > 0, tables)


def visible_keys(seq_q: int, seq_k: int, spec: AttentionSpec) -> tuple[int, int]:
    """First key that some query sees, and one past the last."""
    diagonal = 0 if spec.top_left else seq_k - seq_q
    first, last = 0, seq_k
    if spec.window_left is not None:
        first = max(first, diagonal - spec.window_left)
    if spec.window_right is not None:
        last = min(last, diagonal + seq_q + spec.window_right)
    return first, max(first, last)


def obstacle(facts: SplitFacts) -> str | None:
    """Why the kernels cannot serve a call; None when they can."""
    if facts.packed:
        return "it takes one length of queries for all sequences, and these are packed"
    if facts.dropout:
        return "it has no dropout"
    if facts.tables:
        return "it has no bias, mask or block_mask"
    return None


def no_gain(facts: SplitFacts, multiprocessors: int) -> str | None:
    """Why splitting keys makes a call no faster; None where it does.

    A model of occupancy: tiles of keys that the busiest multiprocessor goes through, with one program on each.
    """
    if facts.seq_q > MAX_QUERIES:
        return f"it is for up to {MAX_QUERIES} queries of a sequence, and here are more"
    group = facts.heads // max(facts.heads_kv, 1)
    whole = _turns(facts.batch * facts.heads * -(-facts.seq_q // _QUERIES), multiprocessors) * facts.key_tiles
    row_tiles = facts.batch * facts.heads_kv * -(-facts.seq_q * group // _ROWS)
    split = _turns(row_tiles * facts.key_tiles, multiprocessors) + _COMBINING
    if split < whole:
        return None
    return "the queries are many enough, or the keys few enough, that splitting the keys gains nothing"


def _turns(programs: int, multiprocessors: int) -> int:
    return -(-programs // multiprocessors)
