"""The backend "split": which calls it serves, when that is faster, and the kernel that it runs. No Triton here.

The other kernels give each program a tile of queries of one head, and all keys. A few queries leave most rows of such a
tile empty; with few heads most of a GPU has nothing to do, and the query heads of a group read the same keys. Here the
rows of a tile are the queries times the heads of a group, and the keys are split over programs.
"""

from __future__ import annotations

import torch

from flashtile.ops.attention.call import Call, KernelChoice, summarise, visible_keys
from flashtile.ops.attention.spec import FP8
from flashtile.ops.common.backends import Backend, triton_unsupported_reason
from flashtile.ops.common.split_keys.configs import (
    TileKey,
    choose_split_count,
    choose_tiles,
    half_tiles_lose,
    shared_memory,
    tiles_from,
)

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
#: The Hopper forward splits keys too, but the query heads of a group do not share its tiles: how long 64 queries of a
#: head take, and how much longer its two kernels take beside that. µs on an H200, this and the Hopper forward, heads of
#: 128, 32 of queries and 8 of keys: 16 queries, 65,536 keys 80 and 119; 32, 165 and 119; 64, 316 and 129; 64, 4,096
#: keys 29 and 19; 17, 4,096 keys 19 and 20. `half_tiles_lose` has an exception.
_OF_64, _MORE_OF_SPLITS = 0.6, 3.5

_NO_GAIN = "the queries are many enough, or the keys few enough, that splitting the keys gains nothing"
_ONLY_SHORT_CALLS = "it is for the forward of a few queries against many keys"


def unsupported_reason(call: Call) -> str | None:
    """Why the keys of a call are not split: for "auto" also that it would not be faster; None where they are."""
    if call.phase == "column_sums":
        return "it has no kernel for column sums; backend='triton' has one"
    if reason := triton_unsupported_reason(call):
        return reason
    if call.dtype is FP8:
        return "it has no 8-bit inputs"
    automatic = call.requested == "auto"
    if call.phase == "backward" or (automatic and (call.multiprocessors == 1 or call.rows_q > MAX_QUERIES)):
        return _ONLY_SHORT_CALLS
    if call.spec.batch_invariant:
        return "it splits keys by the sizes of a call, and this one is batch-invariant"
    if call.packed:
        return "it takes one length of queries for all sequences, and these are packed"
    if call.spec.dropout_p:
        return "it has no dropout"
    if call.spec.returns_max_scores:
        return "it does not keep the largest score of a row"
    if call.spec.score_program is not None:
        return "it has no score functions"
    if call.aux.bias or call.aux.mask or call.spec.block_shape is not None:
        return "it has no bias, mask or block_mask"
    if not automatic:
        return None
    first, last = visible_keys(call.rows_q, call.rows_k, call.spec)
    on_hopper = call.arch == "sm_90" and call.dtype is not torch.float32 and call.aligned
    return no_gain(
        call.batch,
        call.rows_q,
        call.heads,
        call.heads_kv,
        -(-(last - first) // _KEYS),
        call.multiprocessors,
        others_split=on_hopper and not half_tiles_lose(call.rows_q, *call.head_dims),
    )


def no_gain(
    batch: int,
    seq_q: int,
    heads: int,
    heads_kv: int,
    key_tiles: int,
    multiprocessors: int,
    others_split: bool = False,
) -> str | None:
    """Why splitting keys makes a dense call no faster; None where it does. `key_tiles`: of 128 keys, that queries see.
    `others_split`: the Hopper forward is the other kernel.

    A model of occupancy: how long the busiest multiprocessor goes through tiles of keys, with one program on each. Of
    88 cases on an H200 (1 to 64 sequences, 1 to 64 queries, 256 to 32,768 keys, groups of 1, 4 and 8) it takes the
    faster kernels in all but five, where the two differ by at most 1.4 µs.
    """
    if seq_q > MAX_QUERIES:
        return f"it is for up to {MAX_QUERIES} queries of a sequence, and here are more"
    rows = seq_q * heads // max(heads_kv, 1)
    most, tile_time = next((entry for entry in _TILE_TIMES if rows <= entry[0]), _TILE_TIMES[-1])
    tiles = batch * heads_kv * -(-rows // most) * key_tiles
    split = -(-tiles // multiprocessors) * tile_time + _COMBINING
    programs = batch * heads * -(-seq_q // _QUERIES)
    reading = batch * heads_kv * key_tiles / multiprocessors * _READING
    whole = max(-(-programs // multiprocessors) * key_tiles, reading) if programs else 0.0
    if others_split:
        in_splits = batch * heads * -(-seq_q // 64) * key_tiles * _OF_64 / multiprocessors
        whole = min(whole, max(in_splits, reading) + _MORE_OF_SPLITS)
    return None if split < whole else _NO_GAIN


def describe(call: Call) -> tuple[KernelChoice, ...]:
    """The kernel that attends to a part of the keys, and how many parts there are."""
    (batch, seq_q, heads_q, head_dim), (_, seq_k, heads_kv, head_dim_v) = call.q.shape, call.v.shape
    group = heads_q // max(heads_kv, 1)
    first, last = visible_keys(seq_q, seq_k, call.spec)
    tile_key = TileKey(call.dtype, head_dim, head_dim_v, seq_q * group)
    facts = call.machine.facts
    tiles = choose_tiles(facts, tile_key)
    programs = batch * heads_kv * -(-tile_key.rows // tiles.block_m)
    splits = choose_split_count(tiles, tile_key, programs, last - first, facts, call.multiprocessors)
    memory = shared_memory(facts, tiles, tile_key)
    chunk = f", {tiles.chunk} columns of the head at a time" if tiles.chunk else ""
    block, rows = (tiles.block_m, tiles.block_n), "queries and heads"
    summary = summarise(block, f"{tiles.num_warps} warps", tiles.num_stages, memory, rows, chunk, splits)
    return (KernelChoice("forward", tiles, memory, "split", splits, summary, tiles_from(facts, tile_key)),)


BACKEND = Backend("split", "flashtile.ops.attention.split.launch", unsupported_reason, describe)
