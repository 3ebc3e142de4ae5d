"""The backend "split": which calls it serves, and the kernel that it runs. No Triton here."""

from __future__ import annotations

from flashtile.ops.attention.call import Call, KernelChoice, summarise, visible_keys
from flashtile.ops.attention.spec import FP8
from flashtile.ops.attention.split.configs import MAX_QUERIES, dense_facts, no_gain
from flashtile.ops.common.backends import Backend, triton_unsupported_reason
from flashtile.ops.common.split_keys.configs import TileKey, choose_split_count, choose_tiles, shared_memory

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
    return no_gain(dense_facts(call.q.shape, call.k.shape, call.spec), call.multiprocessors) if automatic else None


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
    parts = f", keys in {splits} parts" if splits > 1 else ""
    block, rows = (tiles.block_m, tiles.block_n), "queries and heads"
    summary = summarise(block, f"{tiles.num_warps} warps", tiles.num_stages, memory, rows, chunk + parts)
    return (KernelChoice("forward", tiles, memory, "split", splits, summary),)


BACKEND = Backend("split", "flashtile.ops.attention.split.launch", unsupported_reason, describe)
