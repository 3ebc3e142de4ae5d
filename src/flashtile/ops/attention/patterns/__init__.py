"""Known patterns of block-sparse attention, as `BlockMask`s.

A pattern knows which tiles its edges pass through and evaluates only these. A mask over 65,536 tokens takes a second or
less on a CPU. In the pictures queries go down, keys go to the right, and `x` is visible.
"""

from flashtile.ops.attention.patterns.bands import causal, prefix_lm, sliding_window
from flashtile.ops.attention.patterns.blocks import big_bird, butterfly
from flashtile.ops.attention.patterns.packing import documents
from flashtile.ops.attention.patterns.periodic import fixed, strided

__all__ = ["big_bird", "butterfly", "causal", "documents", "fixed", "prefix_lm", "sliding_window", "strided"]
