"""Walking over the tiles of a block mask: its lists name, for each line of tiles, those with something visible.

A *line* is a row of tiles of one head of one batch entry, or in the dk/dv kernel a column. Stored tiles are TILE_Q ×
TILE_K; those of a kernel divide them. `blocks` is `(tiles, kinds, patterns)`: pointers to the first entry of a line,
and to the patterns `[P, TILE_Q, TILE_K]`. TILE_Q = 0: there is no block mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: As in `flashtile.ops.attention.tile_lists`.
FULL = tl.constexpr(-1)
EMPTY = tl.constexpr(-2)


@triton.jit
def line_entries(lists_ptr, offsets, stride_batch, stride_head, sequence, head, line):
    """Where the entries of a line begin and end. `offsets`: where the offsets of the lines are in the lists."""
    pointer = lists_ptr + offsets + sequence * stride_batch + head * stride_head + line
    return tl.load(pointer), tl.load(pointer + 1)


@triton.jit
def listed_tile(blocks, step, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the kernel's tile number `step / BLOCK` of a line begins, and the kind of the stored one that it is in."""
    tiles, kinds, _ = blocks
    entry = step // TILE
    start = tl.load(tiles + entry) * TILE + step % TILE
    return tl.multiple_of(start, BLOCK), tl.load(kinds + entry)


@triton.jit
def apply_pattern(
    scores, blocks, kind, row, column, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TRANSPOSED: tl.constexpr
):  # fmt: skip
    """Hides what a partly visible tile does not show; `row` `[M]` and `column` `[N]` count within the sequence."""
    if kind >= 0:
        rows = (kind * TILE_Q + row % TILE_Q).to(tl.int64) * TILE_K
        pattern = tl.load(blocks[2] + rows[:, None] + (column % TILE_K)[None, :])
        pattern = tl.trans(pattern) if TRANSPOSED else pattern
        scores = tl.where(pattern != 0, scores, float("-inf"))
    return scores


@triton.jit
def kind_of_tile(blocks, entries, tile):
    """The kind of one tile of a line of `entries` entries; EMPTY where it is not listed."""
    CHUNK: tl.constexpr = 64
    kind = EMPTY
    for first in range(0, entries, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        listed = tl.load(blocks[0] + entry, mask=entry < entries, other=-1)
        kinds = tl.load(blocks[1] + entry, mask=entry < entries, other=EMPTY)
        kind = tl.maximum(kind, tl.max(tl.where(listed == tile, kinds, EMPTY), 0))
    return kind
