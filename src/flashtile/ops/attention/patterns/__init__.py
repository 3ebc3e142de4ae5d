"""Known patterns of block-sparse attention, as `BlockMask`s.

A pattern knows which tiles its edges pass through and evaluates only these. Patterns combine with `&`, `|` and `~`. In
the pictures queries go down, keys go to the right, and `x` is visible.
"""

from flashtile.ops.attention.patterns.bands import (
    causal,
    dilated,
    fixed,
    neighborhood,
    prefix_lm,
    sliding_window,
    strided,
)
from flashtile.ops.attention.patterns.blocks import big_bird, butterfly, documents, tree, tree_positions

__all__ = [
    "big_bird",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "neighborhood",
    "prefix_lm",
    "sliding_window",
    "strided",
    "tree",
    "tree_positions",
]
